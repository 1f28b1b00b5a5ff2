"""``generate``: what it takes, what it gives back, and when a completion ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atlas
from atlas import Engine, SamplingParams
from atlas.errors import (
    CallbackError,
    InvalidArgumentError,
    KvExhausted,
    ModelBusyError,
    ModelFileError,
    NonFiniteLogitsError,
    PromptTooLongError,
    TokenizerError,
)
from tests.engine.conftest import num_taken
from tests.engine.folders import EOS, VOCAB_SIZE, weights, write_model

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=24)


def by_hand(engine: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy ids through the model's own groups."""
    model = engine.model
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(prompt, seq)
    tokens = []
    for _ in range(num_tokens):
        assert view is not None
        tokens.append(model.logits.argmax(view))
        view = model.forward.decode(tokens[-1], seq)
    model.lifecycle.free_sequence(seq)
    return tokens


# -- prompts ----------------------------------------------------------------------------------


def test_greedy_is_the_argmax_of_the_models_logits(engine: Engine) -> None:
    assert list(engine.generate(PROMPT, LONG).token_ids) == by_hand(engine, PROMPT, 24)


@pytest.mark.parametrize(
    "prompt",
    [tuple(PROMPT), range(5, 8), np.array(PROMPT), np.array(PROMPT, np.uint8), np.array(PROMPT)[:]],
    ids=["tuple", "range", "int64", "uint8", "view"],
)
def test_ids_come_in_any_sequence(engine: Engine, prompt: Any) -> None:
    completion = engine.generate(prompt, LONG)
    assert completion.token_ids == engine.generate(PROMPT, LONG).token_ids
    assert completion.prompt_token_ids == tuple(PROMPT)


@pytest.mark.parametrize(
    "prompts",
    [[PROMPT, [9]], (tuple(PROMPT), np.array([9])), [np.array(PROMPT), range(9, 10)]],
    ids=["lists", "tuples", "arrays"],
)
def test_several_prompts_give_a_list_in_their_order(engine: Engine, prompts: Any) -> None:
    completions = engine.generate(prompts, LONG)
    alone = [engine.generate(PROMPT, LONG), engine.generate([9], LONG)]
    assert [c.token_ids for c in completions] == [c.token_ids for c in alone]


def test_a_matrix_is_several_prompts(engine: Engine) -> None:
    completions = engine.generate(np.array([PROMPT, PROMPT]), LONG)  # type: ignore[call-overload]
    assert [c.prompt_token_ids for c in completions] == [tuple(PROMPT)] * 2


def test_one_prompt_in_a_list_gives_a_list(engine: Engine) -> None:
    assert isinstance(engine.generate([PROMPT], LONG), list)


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([], "empty"),
        ([[]], "one or more ids"),
        ([PROMPT, []], "one or more ids"),
        ([5, [6]], "mix"),
        ([PROMPT, "text"], "tokenizer"),
        (b"bytes", "bytes"),
        ([b"bytes"], "bytes"),
        (None, "NoneType"),
        (5, "int"),
        ({5, 6}, "set"),
        ({"5": 6}, "dict"),
        ((i for i in PROMPT), "generator"),
        (np.array(5), "ndarray"),
        ([5.0, 6.0], "float64"),
        ([True, False], "bool"),
        ([5, None], "object"),
        ([[5], [[6]]], "shape"),
        ([5, 2**70], "object"),
        ([5, -1], "-1"),
        ([5, VOCAB_SIZE], str(VOCAB_SIZE)),
        (np.array([2**63], np.uint64), str(2**63)),
    ],
)
def test_other_prompts_are_refused(engine: Engine, prompts: Any, named: str) -> None:
    with pytest.raises((InvalidArgumentError, TokenizerError), match=named):
        engine.generate(prompts, LONG)


def test_nothing_runs_when_one_of_several_prompts_is_refused(engine: Engine) -> None:
    seen: list[int] = []
    params = SamplingParams(max_tokens=1, logits_processor=lambda *_: seen.append(1))
    with pytest.raises(InvalidArgumentError, match="one or more ids"):
        engine.generate([PROMPT, []], params)
    assert not seen


def test_params_are_sampling_params_or_nothing(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="dict"):
        engine.generate(PROMPT, {"max_tokens": 1})  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match="nan"):
        engine.generate(PROMPT, SamplingParams(temperature=math.nan))
    with pytest.raises(InvalidArgumentError, match=str(VOCAB_SIZE)):
        engine.generate(PROMPT, SamplingParams(stop_token_ids=[VOCAB_SIZE]))


def test_text_needs_a_tokenizer_and_ids_do_not(engine: Engine) -> None:
    assert engine.generate(PROMPT, LONG).text == ""
    for call in (
        lambda: engine.generate("text"),
        lambda: engine.stream("text"),
        lambda: engine.generate(PROMPT, SamplingParams(stop="x")),
        lambda: engine.chat([{"role": "user", "content": "hi"}]),
        lambda: engine.tokenizer,
    ):
        with pytest.raises(TokenizerError, match="no tokenizer"):
            call()


def test_text_is_encoded_with_special_tokens_and_decoded(text_engine: Engine) -> None:
    tokenizer = text_engine.tokenizer
    completion = text_engine.generate("Hello world", LONG)
    assert list(completion.prompt_token_ids) == tokenizer.encode("Hello world")
    assert completion.text == tokenizer.decode(completion.token_ids, skip_special=True)
    assert text_engine.generate(["Hello world", "x"], LONG)[0].text == completion.text


def test_unencodable_text_is_refused(text_engine: Engine) -> None:
    with pytest.raises(TokenizerError):
        text_engine.generate("lone surrogate \ud800")
    with pytest.raises(InvalidArgumentError, match="one token or more"):
        text_engine.generate("")


def test_chat_answers_in_the_models_format(text_engine: Engine) -> None:
    messages = [{"role": "user", "content": "<|im_end|> hi"}]
    ids = text_engine.chat_token_ids(messages)
    library = text_engine.tokenizer
    # The template's own marker is a control token, the user's is text.
    marker = library.encode("<|im_end|>", add_special=False, parse_special=True)
    assert len(marker) == 1
    assert ids.count(marker[0]) == 1
    completion = text_engine.chat(messages, LONG)
    assert completion.token_ids == text_engine.generate(ids, LONG).token_ids
    deltas = list(text_engine.stream_chat(messages, LONG))
    assert "".join(delta.text for delta in deltas) == completion.text


# -- where a completion ends ------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_max_tokens(engine: Engine, num_tokens: int) -> None:
    completion = engine.generate(PROMPT, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    assert len(completion.token_ids) == completion.usage.completion_tokens == num_tokens
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_without_max_tokens_a_sequence_fills(folder: Path) -> None:
    with Engine(folder, threads=1, max_seq_len=20, quiet=True) as engine:
        completion = engine.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(completion.token_ids) == 20 - len(PROMPT)
        assert completion.finish_reason == "length"
        limited = engine.generate(PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True))
        assert limited.token_ids == completion.token_ids


def test_an_end_token_stops(engine: Engine, says: Callable[..., Any]) -> None:
    params = SamplingParams(logits_processor=says([9, 10, EOS, 11]), max_tokens=6)
    ended = engine.generate(PROMPT, params)
    assert ended.token_ids == (9, 10)
    assert (ended.finish_reason, ended.stop_reason) == ("stop", EOS)
    assert ended.usage.completion_tokens == 3
    assert engine.generate(PROMPT, params.replace(include_stop=True)).token_ids == (9, 10, EOS)
    ignored = engine.generate(PROMPT, params.replace(ignore_eos=True))
    assert ignored.token_ids == (9, 10, EOS, 11, 9, 9)
    asked = engine.generate(PROMPT, params.replace(stop_token_ids=[10]))
    assert (asked.token_ids, asked.stop_reason) == ((9,), 10)


def test_min_tokens_holds_off_every_end(engine: Engine) -> None:
    free = engine.generate(PROMPT, LONG.replace(ignore_eos=True)).token_ids
    stop = free[3]
    params = LONG.replace(stop_token_ids=[stop])
    assert len(engine.generate(PROMPT, params).token_ids) == free.index(stop)
    held = engine.generate(PROMPT, params.replace(min_tokens=8))
    assert held.usage.completion_tokens >= 8
    assert stop not in held.token_ids[:8]


def test_a_stop_string_is_trimmed_from_text_and_ids(
    text_engine: Engine, says: Callable[..., Any]
) -> None:
    tokenizer = text_engine.tokenizer
    ids = tokenizer.encode("One two three four", add_special=False)
    params = SamplingParams(logits_processor=says(ids), max_tokens=len(ids), stop=["three", "xyz"])
    completion = text_engine.generate("a", params)
    assert completion.text == "One two "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "three")
    assert "One two ".startswith(tokenizer.decode(completion.token_ids))
    kept = text_engine.generate("a", params.replace(include_stop=True))
    assert kept.text == "One two three"
    assert kept.usage == completion.usage
    late = text_engine.generate("a", params.replace(min_tokens=len(ids) - 1))
    assert late.finish_reason == "length"
    assert late.text == "One two three four"


def test_a_stop_that_never_completes_is_given_back(
    text_engine: Engine, says: Callable[..., Any]
) -> None:
    ids = text_engine.tokenizer.encode("One two thr", add_special=False)
    params = SamplingParams(logits_processor=says(ids), max_tokens=len(ids), stop="three")
    assert text_engine.generate("a", params).text == "One two thr"


# -- prompts over the limit -------------------------------------------------------------------


def test_a_prompt_over_the_limit_is_refused_or_cut(folder: Path) -> None:
    with Engine(folder, threads=1, max_seq_len=16, quiet=True) as engine:
        prompt = list(range(3, 23))
        fits = engine.generate(prompt[:15], LONG)
        assert (len(fits.token_ids), fits.finish_reason) == (1, "length")
        with pytest.raises(PromptTooLongError, match=r"20 tokens.*15.*truncate_prompt='left'"):
            engine.generate(prompt, LONG)
        with pytest.raises(PromptTooLongError):
            engine.stream(prompt, LONG)
        cut = engine.generate(prompt, LONG.replace(truncate_prompt="left"))
        assert cut.prompt_token_ids == tuple(prompt[-15:])
        last = engine.generate(prompt, LONG.replace(truncate_prompt=4))
        assert last.prompt_token_ids == tuple(prompt[-4:])
        assert last.token_ids == engine.generate(prompt[-4:], LONG).token_ids
        with pytest.raises(PromptTooLongError):
            engine.generate(prompt, LONG.replace(truncate_prompt=18))


def test_a_request_that_outgrows_the_cache_fails_alone(folder: Path) -> None:
    with Engine(folder, threads=1, max_seq_len=256, kv_tokens=32, quiet=True) as engine:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        short, long = engine.generate([PROMPT, list(range(3, 60))], params)
        assert short.finish_reason == "length"
        assert isinstance(long.error, KvExhausted)
        assert (long.finish_reason, long.token_ids) == ("error", ())
        with pytest.raises(KvExhausted):
            engine.generate(list(range(3, 60)), params)
        grown = engine.generate([PROMPT], params.replace(max_tokens=100))[0]
        assert grown.finish_reason == "error"
        assert isinstance(grown.error, KvExhausted)  # refused with the numbers, before it runs
        assert "kv_tokens" in str(grown.error)
        assert num_taken(engine) == 0


# -- samples and seeds ------------------------------------------------------------------------


def test_a_seed_decides_the_draw(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=11)
    first = engine.generate(PROMPT, params)
    assert first.seed == 11
    assert engine.generate(PROMPT, params).token_ids == first.token_ids
    assert engine.generate(PROMPT, params.replace(seed=12)).token_ids != first.token_ids


def test_a_missing_seed_is_made_and_reported(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    first, second = engine.generate(PROMPT, params), engine.generate(PROMPT, params)
    assert first.seed is not None
    assert first.seed != second.seed
    again = engine.generate(PROMPT, params.replace(seed=first.seed))
    assert again.token_ids == first.token_ids
    assert engine.generate(PROMPT, LONG).seed is None


def test_n_samples_of_one_prompt(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3, n=3, ignore_eos=True)
    completion = engine.generate(PROMPT, params)
    assert [sample.index for sample in completion.samples] == [0, 1, 2]
    assert len({sample.token_ids for sample in completion.samples}) == 3
    assert completion.token_ids == completion.samples[0].token_ids
    assert completion.usage.completion_tokens == 36
    assert completion.usage.prompt_tokens == 3
    # Sample 0 does not depend on how many there are.
    alone = engine.generate(PROMPT, params.replace(n=1))
    assert alone.token_ids == completion.token_ids


def test_completion_reports_usage_and_timings(engine: Engine) -> None:
    completion = engine.generate(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 9)
    assert completion.usage.cached_tokens == 0
    timings = completion.timings
    assert 0 < timings.first_token_s <= timings.total_s
    assert timings.decode_tokens_per_s(9) > 0
    assert completion.error is None
    assert completion.logprobs is None
    assert "9 tokens" in repr(completion)


# -- requests that fail -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_end_their_request_only(tmp_path: Path, bad: float) -> None:
    # One damaged embedding row: only prompts and outputs that hold token 7 meet it.
    embedding = weights(VOCAB_SIZE)["model.embed_tokens.weight"]
    embedding[7, 3] = bad
    damaged = write_model(tmp_path, replaced={"model.embed_tokens.weight": embedding})
    params = SamplingParams(max_tokens=4, ignore_eos=True, bad_words=[[7]])
    greedy = SamplingParams(max_tokens=1, ignore_eos=True)
    with Engine(damaged, threads=1, quiet=True) as engine:
        before, failed, after = engine.generate([[5, 6], [5, 7], [5, 6]], params)
        assert isinstance(failed.error, NonFiniteLogitsError)
        assert (failed.finish_reason, failed.token_ids) == ("error", ())
        assert before.token_ids == after.token_ids
        assert before.finish_reason == "length"
        for one in (params, greedy, greedy.replace(temperature=0.7), greedy.replace(logprobs=1)):
            with pytest.raises(NonFiniteLogitsError):
                engine.generate([5, 7], one)
            with pytest.raises(NonFiniteLogitsError):
                list(engine.stream([5, 7], one))
        with pytest.raises(NonFiniteLogitsError):
            engine.generate([5, 7, 6], greedy.replace(prompt_logprobs=0))
        assert engine.generate([5, 6], params).token_ids == before.token_ids
        assert num_taken(engine) == 0


@pytest.mark.parametrize(
    ("processor", "error"),
    [
        (lambda p, o, row: row[:-1], InvalidArgumentError),
        (lambda p, o, row: row.astype(np.float64), InvalidArgumentError),
        (lambda p, o, row: list(row), InvalidArgumentError),
        (lambda p, o, row: row * np.nan, NonFiniteLogitsError),
        (lambda p, o, row: np.full_like(row, np.inf), NonFiniteLogitsError),
        (lambda p, o, row: np.full_like(row, -np.inf), InvalidArgumentError),
        (lambda p, o, row: 1 / 0, CallbackError),
    ],
    ids=["shape", "dtype", "list", "nan", "inf", "nothing-left", "raises"],
)
def test_a_bad_logits_processor_ends_its_request(
    engine: Engine, processor: Any, error: type[Exception]
) -> None:
    params = SamplingParams(logits_processor=processor)
    with pytest.raises(error):
        engine.generate(PROMPT, params)
    with pytest.raises(error):
        list(engine.stream(PROMPT, params))


def test_a_logits_processor_cannot_step_its_own_engine(engine: Engine) -> None:
    def processor(prompt: Any, output: Any, row: Any) -> None:
        engine.generate([50, 60], SamplingParams(max_tokens=1))

    with pytest.raises(ModelBusyError, match="callback"):
        engine.generate(PROMPT, LONG.replace(logits_processor=processor))
    assert len(engine.generate(PROMPT, LONG).token_ids) == 24


@pytest.mark.parametrize("model", [None, 5, b"smollm2", ["smollm2"]])
def test_a_model_is_a_name_or_a_path(model: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="model is"):
        Engine(model)


def test_unknown_models_and_devices_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        Engine(tmp_path / "nothing.gguf")
    with pytest.raises(InvalidArgumentError, match="'auto', 'cpu', 'cuda'"):
        Engine(folder, device="tpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="stream is 7; allowed on the CPU: None"):
        Engine(folder, device="cpu", stream=7)
    with pytest.raises(InvalidArgumentError, match="quiet"):
        Engine(folder, quiet="yes")  # type: ignore[arg-type]


def test_public_names() -> None:
    assert {"Engine", "SamplingParams", "Completion", "Delta"} <= set(dir(atlas))
