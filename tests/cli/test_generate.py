"""``atlas generate`` and ``atlas bench`` on the models in packages."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import pytest

import atlas
from tests.cli.outcome import Command

PROMPT = "This module provides"
SMALL = ["--max-seq-len", "256", "--threads", "1"]
NOTE = "no model given: atlas-tiny, the small one in the package\n"


@pytest.fixture(scope="module")
def engine() -> atlas.Engine:
    return atlas.Engine(threads=1, max_seq_len=256, quiet=True)


def test_text_is_that_of_the_library(atlas_command: Command, engine: atlas.Engine) -> None:
    done = atlas_command("generate", *SMALL, "-n", "8", PROMPT)
    expected = engine.generate(PROMPT, atlas.SamplingParams(max_tokens=8)).text
    assert (done.status, done.out, done.err) == (0, expected + "\n", NOTE)
    named = atlas_command("generate", "--model", "atlas-tiny", *SMALL, "-n", "8", PROMPT)
    quiet = atlas_command("generate", "--quiet", *SMALL, "-n", "8", PROMPT)
    assert (named.out, named.err) == (quiet.out, quiet.err) == (done.out, "")


def test_sampling_options_reach_the_sampler(atlas_command: Command, engine: atlas.Engine) -> None:
    options = ["--temperature", "1.2", "--top-k", "50", "--seed", "7", "--stop", "."]
    done = atlas_command("generate", *SMALL, "-n", "8", *options, PROMPT)
    params = atlas.SamplingParams(max_tokens=8, temperature=1.2, top_k=50, seed=7, stop=".")
    assert done.out == engine.generate(PROMPT, params).text + "\n"


def test_chat_applies_the_template(atlas_command: Command, smollm2: str) -> None:
    options = ["--chat", "--model", smollm2, *SMALL]
    done = atlas_command("generate", *options, "-n", "8", "What is two plus two?")
    messages = [{"role": "user", "content": "What is two plus two?"}]
    with atlas.Engine(smollm2, threads=1, max_seq_len=256, quiet=True) as engine:
        expected = engine.chat(messages, atlas.SamplingParams(max_tokens=8)).text
        assert done.out == expected + "\n"
        assert expected != engine.generate(messages[0]["content"]).text


def test_chat_needs_a_template(atlas_command: Command) -> None:
    done = atlas_command("generate", "--chat", "--quiet", *SMALL, PROMPT)
    assert (done.status, done.out) == (atlas.errors.ChatTemplateError.code, "")
    assert "atlas-tiny has no chat template" in done.err


def test_a_dash_reads_standard_input(
    atlas_command: Command, engine: atlas.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    done = atlas_command("generate", *SMALL, "-n", "4", "-")
    assert done.out == engine.generate(PROMPT, atlas.SamplingParams(max_tokens=4)).text + "\n"


def test_errors_after_loading(atlas_command: Command) -> None:
    too_long = atlas_command("generate", "--quiet", "--max-seq-len", "2", PROMPT)
    assert too_long.status == atlas.errors.PromptTooLongError.code
    assert "max_seq_len 2" in too_long.err
    empty = atlas_command("generate", "--quiet", *SMALL, "")
    assert (empty.status, empty.err.count("\n")) == (2, 1)


def test_an_interrupt_ends_generation_quietly() -> None:
    code = "from atlas.cli import main; main()"
    options = ["--quiet", "--threads", "1", "-n", "none", "--ignore-eos"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, "generate", *options, PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, b"")


def test_bench_prints_json(atlas_command: Command) -> None:
    sizes = ["--prompt-tokens", "20", "--gen-tokens", "4", "--repeats", "2"]
    done = atlas_command("bench", *SMALL, *sizes, "--json")
    assert (done.status, done.err) == (0, NOTE)
    results = json.loads(done.out)
    measured = ("prefill_tok_s", "decode_tok_s", "first_token_ms", "load_s", "peak_rss_mb")
    assert all(results[name] > 0 for name in measured)
    assert results["prefill_tok_s"] == pytest.approx(20_000 / results["first_token_ms"])
    settings = {"prompt_tokens": 20, "gen_tokens": 4, "repeats": 2, "threads": 1}
    assert settings.items() <= results.items()


def test_bench_refuses_more_tokens_than_fit(atlas_command: Command) -> None:
    done = atlas_command("bench", *SMALL, "--prompt-tokens", "200", "--gen-tokens", "57")
    assert (done.status, done.out) == (2, "")
    assert "200 prompt and 57 generated tokens" in done.err
