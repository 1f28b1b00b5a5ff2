"""Forks and rewinds of running requests: what follows is what a plain run gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas import Engine, SamplingParams
from atlas.errors import InvalidArgumentError, ModelBusyError, OutOfMemoryError, SequenceStateError
from atlas.event import Event
from atlas.request import Completion
from tests.engine.conftest import num_taken

PROMPT = [5, 6, 7, 9, 11, 4, 8]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=40,
    ignore_eos=True,
    temperature=1.2,
    seed=11,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    dry_multiplier=0.5,
    dry_sequence_breakers=(),
    logprobs=2,
)


def advance(engine: Engine, num_steps: int) -> list[Event]:
    return [event for _ in range(num_steps) for event in engine.step()]


def run_out(engine: Engine) -> dict[str, Completion]:
    done = {}
    while engine.has_unfinished():
        for event in engine.poll():
            if event.completion is not None:
                done[event.request_id] = event.completion
    return done


# -- fork -------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_steps", [1, 9, 10, 26])
def test_a_fork_and_its_parent_both_end_as_the_plain_run(
    engine: Engine, params: SamplingParams, num_steps: int
) -> None:
    plain = engine.generate(PROMPT, params)
    parent = engine.submit(PROMPT, params, user="tag")
    advance(engine, num_steps)
    twin = engine.fork(parent, new_id=f"twin {num_steps}")
    assert twin == f"twin {num_steps}"
    done = run_out(engine)
    assert set(done) == {parent, twin}
    for completion in done.values():
        assert completion.samples == plain.samples
        assert completion.usage.completion_tokens == 40


def test_a_fork_with_another_seed_goes_its_own_way(engine: Engine) -> None:
    plain = engine.generate(PROMPT, SAMPLED)
    parent = engine.submit(PROMPT, SAMPLED)
    advance(engine, 12)
    other = SAMPLED.replace(seed=12)
    first, second = engine.fork(parent, params=other), engine.fork(parent, params=other)
    done = run_out(engine)
    assert done[parent].samples == plain.samples
    assert done[first].samples == done[second].samples
    assert done[first].token_ids[:12] == plain.token_ids[:12]
    assert done[first].token_ids[12:] != plain.token_ids[12:]
    assert done[first].seed == 12


def test_a_forks_events_bring_what_is_new(text_engine: Engine, says: Callable[..., Any]) -> None:
    params = SamplingParams(
        max_tokens=12,
        logits_processor=says(
            text_engine.tokenizer.encode("héllo wörld 日本 and", add_special=False)
        ),
    )
    parent = text_engine.submit("x", params, user=3)
    given = "".join(event.text for event in advance(text_engine, 4))
    twin = text_engine.fork(parent)
    texts = {parent: given, twin: ""}
    completions = {}
    while text_engine.has_unfinished():
        for event in text_engine.poll():
            texts[event.request_id] += event.text
            assert event.user == 3
            if event.completion is not None:
                completions[event.request_id] = event.completion
    assert completions[twin].text == completions[parent].text == texts[parent]
    assert given + texts[twin] == texts[parent]
    assert given


def test_shorter_forks_and_forks_of_forks(engine: Engine) -> None:
    plain = engine.generate(PROMPT, GREEDY)
    parent = engine.submit(PROMPT, GREEDY)
    advance(engine, 5)
    short = engine.fork(parent, params=GREEDY.replace(max_tokens=9))
    advance(engine, 2)
    grandchild = engine.fork(short)
    engine.cancel(short)
    done = run_out(engine)
    assert done[grandchild].token_ids == plain.token_ids[:9]
    assert done[short].finish_reason == "cancelled"
    assert done[parent].token_ids == plain.token_ids


def test_more_forks_than_places_to_run(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_running=2) as engine:
        plain = engine.generate(PROMPT, SAMPLED)
        parent = engine.submit(PROMPT, SAMPLED)
        advance(engine, 6)
        forks = [engine.fork(parent) for _ in range(4)]
        done = run_out(engine)
        assert all(done[name].samples == plain.samples for name in [parent, *forks])
        assert num_taken(engine) == 0


def test_a_fork_without_a_place_leaves_nothing(folder: Path) -> None:
    """It cannot wait either: on generated blocks it could not be rebuilt from its tokens."""
    with Engine(folder, threads=1, quiet=True, max_running=1) as engine:
        turn = [*PROMPT, *engine.generate(PROMPT, GREEDY).token_ids, 9]
        plain = engine.generate(turn, SAMPLED)
        parent = engine.submit(turn, SAMPLED)
        advance(engine, 3)
        for _ in range(2):  # the id is free again
            with pytest.raises(OutOfMemoryError, match="cannot be rebuilt"):
                engine.fork(parent, new_id="twin")
        done = run_out(engine)
        assert {name: c.samples for name, c in done.items()} == {parent: plain.samples}
        assert num_taken(engine) == 0


def test_what_a_fork_refuses(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="'nobody' is not live"):
        engine.fork("nobody")
    plain = engine.generate(PROMPT, GREEDY)
    many = engine.submit(PROMPT, GREEDY.replace(n=2))
    one = engine.submit(PROMPT, GREEDY, request_id="one")
    with pytest.raises(SequenceStateError, match="'one' cannot fork now: its prompt is not done"):
        engine.fork(one)
    advance(engine, 3)
    with pytest.raises(InvalidArgumentError, match="n 2; allowed to fork: n 1"):
        engine.fork(many)
    for changes, message in [
        ({"n": 2}, "n is 2"),
        ({"max_tokens": 41}, "max_tokens is 41; allowed in a fork: up to the 40"),
        ({"max_tokens": 1}, "end the request at its output token 1"),
        ({"logprobs": 1}, "logprobs is 1; allowed in a fork: None"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is 1"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            engine.fork(one, params=GREEDY.replace(**changes))
    with pytest.raises(InvalidArgumentError, match="'one' is in use"):
        engine.fork(one, new_id="one")
    done = run_out(engine)
    assert done[one].token_ids == done[many].token_ids == plain.token_ids


# -- rewind -----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    params=st.sampled_from([GREEDY, SAMPLED]),
    # Drawn before anything runs, so that no request is left behind: output lengths at which a
    # rewind comes, and what it keeps of them.
    rewinds=st.lists(st.tuples(st.integers(1, 39), st.floats(0, 1)), max_size=4),
)
def test_rewinds_anywhere_end_as_the_plain_run(
    engine: Engine, params: SamplingParams, rewinds: list[tuple[int, float]]
) -> None:
    plain = engine.generate(PROMPT, params)
    name = engine.submit(PROMPT, params)
    tokens: tuple[int, ...] = ()
    completion = None
    while completion is None:
        for event in engine.step():
            tokens += event.token_ids
            completion = event.completion
        if rewinds and len(tokens) == rewinds[0][0]:
            kept = round(rewinds.pop(0)[1] * len(tokens))
            standing = engine.rewind(name, len(PROMPT) + kept)
            tokens = standing.token_ids
            assert tokens == plain.token_ids[:kept]
            assert len(standing.logprobs) == (kept if params.logprobs else 0)
    assert tokens == plain.token_ids
    assert completion.samples == plain.samples


def test_text_goes_on_from_what_rewind_gave_back(
    text_engine: Engine, says: Callable[..., Any]
) -> None:
    ids = text_engine.tokenizer.encode("naïve 🙂 日本語 stop here", add_special=False)
    params = SamplingParams(max_tokens=len(ids) + 3, logits_processor=says(ids), stop="stop")
    plain = text_engine.generate("x", params)
    assert plain.stop_reason == "stop"
    for num_steps in range(2, len(ids) - 6):
        name = text_engine.submit("x", params)
        for _ in range(num_steps):
            text_engine._driver.advance()  # events stay where they are: rewind drops them
        start = len(text_engine.tokenizer.encode("x"))
        text = text_engine.rewind(name, start + num_steps // 2).text
        assert plain.text.startswith(text)
        while text_engine.has_unfinished():
            for event in text_engine.poll():
                text += event.text
                completion = event.completion
        assert completion is not None
        assert completion.samples == plain.samples
        assert text == plain.text


def test_a_rewound_fork_leaves_its_parent_alone(engine: Engine) -> None:
    plain = engine.generate(PROMPT, SAMPLED)
    parent = engine.submit(PROMPT, SAMPLED)
    advance(engine, 30)
    twin = engine.fork(parent, params=SAMPLED.replace(seed=5))
    engine.rewind(twin, len(PROMPT))
    done = run_out(engine)
    assert done[parent].samples == plain.samples
    alone = engine.generate(PROMPT, SAMPLED.replace(seed=5))
    assert done[twin].samples == alone.samples


def test_prompt_logprobs_survive_a_rewind(engine: Engine) -> None:
    params = GREEDY.replace(prompt_logprobs=1)
    plain = engine.generate(PROMPT, params)
    name = engine.submit(PROMPT, params)
    advance(engine, 4)
    engine.rewind(name, len(PROMPT))
    done = run_out(engine)[name]
    assert done.prompt_logprobs == plain.prompt_logprobs
    assert done.samples == plain.samples


def test_what_a_rewind_refuses(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="'nobody' is not live"):
        engine.rewind("nobody", 3)
    name = engine.submit(PROMPT, GREEDY, request_id="one")
    with pytest.raises(SequenceStateError, match="cannot rewind now: its prompt is not done"):
        engine.rewind(name, 7)
    advance(engine, 3)
    for position in (6, 11, -1):
        with pytest.raises(
            InvalidArgumentError, match=rf"position is {position}; allowed: 7 .* 10"
        ):
            engine.rewind(name, position)
    with pytest.raises(InvalidArgumentError, match="position is True; allowed: an integer"):
        engine.rewind(name, True)
    done = run_out(engine)
    assert done[name].token_ids == engine.generate(PROMPT, GREEDY).token_ids
    with pytest.raises(InvalidArgumentError, match="'one' is not live"):
        engine.rewind(name, 8)


def test_a_callback_may_neither_fork_nor_rewind(engine: Engine) -> None:
    refused = []

    def processor(prompt: Any, output: list[int], row: Any) -> None:
        for attempt in (lambda: engine.fork(name), lambda: engine.rewind(name, 7)):
            with pytest.raises(ModelBusyError) as refusal:
                attempt()
            refused.append(refusal.value)

    name = engine.submit(PROMPT, GREEDY.replace(max_tokens=3, logits_processor=processor))
    assert run_out(engine)[name].finish_reason == "length"
    assert len(refused) == 6


def test_with_the_owner_thread(folder: Path) -> None:
    params = SAMPLED.replace(max_tokens=300)
    with Engine(folder, threads=1, quiet=True) as engine:
        plain = engine.generate(PROMPT, params)
        engine.start()
        name = engine.submit(PROMPT, params)
        while not engine.poll(timeout=5):
            pass
        twin = engine.fork(name)
        engine.rewind(name, len(PROMPT) + 1)
        done = run_out(engine)
        assert done[name].samples == done[twin].samples == plain.samples
