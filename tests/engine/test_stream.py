"""``stream``: deltas that add up to the completion, and requests that nobody wants any more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas import Delta, Engine, SamplingParams
from atlas.errors import ClosedError, InvalidArgumentError, PromptTooLongError
from tests.engine.conftest import num_taken
from tests.engine.folders import EOS
from tests.text.vocabularies import TEXTS

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=16, ignore_eos=True)
HARD_TEXT = "naïve 🙂👩‍👩‍👧‍👦🇩🇪 日本語 你好，世界。 한국어 e\u0301 �\ud7ff\U0010ffff end"


def joined(deltas: list[Delta]) -> tuple[str, tuple[int, ...]]:
    return "".join(d.text for d in deltas), tuple(i for d in deltas for i in d.token_ids)


def test_deltas_add_up_to_the_completion(engine: Engine) -> None:
    completion = engine.generate(PROMPT, LONG)
    deltas = list(engine.stream(PROMPT, LONG))
    assert joined(deltas) == (completion.text, completion.token_ids)
    assert [d.finish_reason for d in deltas] == [None] * 15 + ["length"]
    # Without a tokenizer nothing is withheld: a token a step.
    assert all(len(d.token_ids) == 1 for d in deltas)


@pytest.mark.parametrize("text", [HARD_TEXT, *TEXTS])
def test_text_of_every_kind_adds_up(
    text_engine: Engine, says: Callable[..., Any], text: str
) -> None:
    ids = text_engine.tokenizer.encode(text, add_special=False)
    params = SamplingParams(logits_processor=says(ids), max_tokens=len(ids))
    deltas = list(text_engine.stream("a", params))
    assert joined(deltas) == (text, tuple(ids))
    assert all("�" not in d.text for d in deltas) or "�" in text
    completion = text_engine.generate("a", params)
    assert (completion.text, completion.token_ids) == (text, tuple(ids))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_ids_and_stops_add_up(
    text_engine: Engine, says: Callable[..., Any], data: st.DataObject
) -> None:
    """Random ids cut characters apart and leave invalid bytes; stops may be anywhere."""
    tokenizer = text_engine.tokenizer
    vocab_size = text_engine.model.config.vocab_size
    eos = text_engine.eos_token_ids
    token = st.integers(0, vocab_size - 1).filter(lambda i: i not in eos)
    byte_tokens = tokenizer.encode("🙂日é", add_special=False)
    ids = data.draw(
        st.lists(st.one_of(token, st.sampled_from(byte_tokens)), min_size=1, max_size=12)
    )
    text = tokenizer.decode(ids, skip_special=True)
    starts = st.integers(0, max(0, len(text) - 1))
    stops = [
        text[start : start + data.draw(st.integers(1, 3))]
        for start in data.draw(st.lists(starts, max_size=2))
        if start < len(text)
    ]
    params = SamplingParams(
        logits_processor=says(ids),
        max_tokens=len(ids),
        stop=stops,
        include_stop=data.draw(st.booleans()),
    )
    deltas = list(text_engine.stream("a", params))
    completion = text_engine.generate("a", params)
    assert joined(deltas) == (completion.text, completion.token_ids)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (
        completion.finish_reason,
        completion.stop_reason,
    )
    assert text.startswith(completion.text)
    assert completion.token_ids == tuple(ids[: len(completion.token_ids)])
    if completion.finish_reason == "stop":
        ends = [text.find(stop) + len(stop) for stop in stops]
        assert text[: min(ends)].endswith(str(completion.stop_reason))
    else:
        assert completion.text == text


def test_the_last_delta_says_why(engine: Engine, says: Callable[..., Any]) -> None:
    params = SamplingParams(logits_processor=says([9, EOS]))
    last = list(engine.stream(PROMPT, params))[-1]
    assert (last.finish_reason, last.stop_reason, last.token_ids) == ("stop", EOS, ())


def test_breaking_out_cancels_and_frees(engine: Engine) -> None:
    for count, _delta in enumerate(engine.stream(PROMPT, LONG)):
        if count == 3:
            assert num_taken(engine) == 1
            break
    assert num_taken(engine) == 0


def test_an_error_in_the_loop_frees(engine: Engine) -> None:
    def consume() -> None:
        for _delta in engine.stream(PROMPT, LONG):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert num_taken(engine) == 0


def test_closing_and_forgetting_a_stream_free(engine: Engine) -> None:
    stream: Any = engine.stream(PROMPT, LONG)
    next(stream)
    stream.close()
    assert num_taken(engine) == 0
    with pytest.raises(StopIteration):
        next(stream)
    stream = engine.stream(PROMPT, LONG)
    next(stream)
    del stream
    gc.collect()
    assert num_taken(engine) == 0


def test_a_stream_that_is_never_started_takes_nothing(engine: Engine) -> None:
    stream: Any = engine.stream(PROMPT, LONG)
    assert num_taken(engine) == 0
    stream.close()
    del stream
    assert num_taken(engine) == 0


def test_streams_may_take_turns(engine: Engine) -> None:
    other = [9, 10, 11, 12]
    alone = [engine.generate(prompt, LONG).token_ids for prompt in (PROMPT, other)]
    first, second = engine.stream(PROMPT, LONG), engine.stream(other, LONG)
    a, b = [], []
    for _ in range(5):
        a.append(next(first))
        b.append(next(second))
    assert num_taken(engine) == 2
    nested = engine.generate([20, 21], LONG)
    a += first
    b += second
    assert [joined(a)[1], joined(b)[1]] == alone
    assert nested.token_ids == engine.generate([20, 21], LONG).token_ids


def test_sampled_streams_draw_as_generate(engine: Engine) -> None:
    params = LONG.replace(temperature=1.0, seed=4)
    assert (
        joined(list(engine.stream(PROMPT, params)))[1] == engine.generate(PROMPT, params).token_ids
    )


def test_closing_the_engine_ends_an_open_stream(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    stream = engine.stream(PROMPT, LONG)
    unstarted = engine.stream(PROMPT, LONG)
    next(stream)
    engine.close()
    for open_stream in (stream, unstarted):
        with pytest.raises(ClosedError):
            next(open_stream)
        with pytest.raises(StopIteration):
            next(open_stream)


def test_arguments_are_checked_before_the_first_delta(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="one or more ids"):
        engine.stream([])
    with pytest.raises(InvalidArgumentError, match="n is 2"):
        engine.stream(PROMPT, SamplingParams(n=2))
    with pytest.raises(InvalidArgumentError, match="prompt_logprobs"):
        engine.stream(PROMPT, SamplingParams(prompt_logprobs=1))
    with pytest.raises(InvalidArgumentError, match="shape"):
        engine.stream([PROMPT])  # type: ignore[list-item]
    with pytest.raises(PromptTooLongError):
        engine.stream([5] * 600)
