"""``atlas generate`` and ``atlas bench`` on a real model."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import pytest

import atlas
from tests.cli.outcome import Command

PROMPT = "The capital of France is"
SMALL = ["--max-seq-len", "256", "--threads", "1"]


@pytest.fixture(scope="module")
def engine(smollm2: str) -> atlas.Engine:
    return atlas.Engine(smollm2, threads=1, max_seq_len=256, quiet=True)


def test_text_is_that_of_the_library(atlas_command: Command, engine: atlas.Engine) -> None:
    done = atlas_command("generate", *SMALL, "-n", "8", PROMPT)
    expected = engine.generate(PROMPT, atlas.SamplingParams(max_tokens=8)).text
    assert (done.status, done.out, done.err) == (0, expected + "\n", "")


def test_sampling_options_reach_the_sampler(atlas_command: Command, engine: atlas.Engine) -> None:
    options = ["--temperature", "1.2", "--top-k", "50", "--seed", "7", "--stop", "."]
    done = atlas_command("generate", *SMALL, "-n", "8", *options, PROMPT)
    params = atlas.SamplingParams(max_tokens=8, temperature=1.2, top_k=50, seed=7, stop=".")
    assert done.out == engine.generate(PROMPT, params).text + "\n"


def test_chat_applies_the_template(atlas_command: Command, engine: atlas.Engine) -> None:
    done = atlas_command("generate", "--chat", *SMALL, "-n", "8", "What is two plus two?")
    messages = [{"role": "user", "content": "What is two plus two?"}]
    expected = engine.chat(messages, atlas.SamplingParams(max_tokens=8)).text
    assert done.out == expected + "\n"
    assert expected != engine.generate(messages[0]["content"]).text


def test_a_dash_reads_standard_input(
    atlas_command: Command, engine: atlas.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    done = atlas_command("generate", *SMALL, "-n", "4", "-")
    assert done.out == engine.generate(PROMPT, atlas.SamplingParams(max_tokens=4)).text + "\n"


@pytest.mark.usefixtures("smollm2")
def test_errors_after_loading(atlas_command: Command) -> None:
    too_long = atlas_command("generate", "--max-seq-len", "4", PROMPT)
    assert too_long.status == atlas.errors.PromptTooLongError.code
    assert "max_seq_len 4" in too_long.err
    empty = atlas_command("generate", *SMALL, "")
    assert (empty.status, empty.err.count("\n")) == (2, 1)


def test_an_interrupt_ends_generation_quietly(smollm2: str) -> None:
    code = "from atlas.cli import main; main()"
    options = ["--model", smollm2, "--threads", "1", "-n", "none", "--ignore-eos"]
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


@pytest.mark.usefixtures("smollm2")
def test_bench_prints_json(atlas_command: Command) -> None:
    sizes = ["--prompt-tokens", "20", "--gen-tokens", "4", "--repeats", "2"]
    done = atlas_command("bench", "smollm2", *SMALL, *sizes, "--json")
    assert (done.status, done.err) == (0, "")
    results = json.loads(done.out)
    measured = ("prefill_tok_s", "decode_tok_s", "first_token_ms", "load_s", "peak_rss_mb")
    assert all(results[name] > 0 for name in measured)
    assert results["prefill_tok_s"] == pytest.approx(20_000 / results["first_token_ms"])
    settings = {"prompt_tokens": 20, "gen_tokens": 4, "repeats": 2, "threads": 1}
    assert settings.items() <= results.items()


@pytest.mark.usefixtures("smollm2")
def test_bench_refuses_more_tokens_than_fit(atlas_command: Command) -> None:
    done = atlas_command("bench", *SMALL, "--prompt-tokens", "200", "--gen-tokens", "57")
    assert (done.status, done.out) == (2, "")
    assert "200 prompt and 57 generated tokens" in done.err
