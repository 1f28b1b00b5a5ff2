"""Saved sessions: they go on bitwise, and a file that is not what it says is refused by reason."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.cache.sequence_file import SequenceHeader, SequenceLayout, write_sequence
from atlas.errors import (
    InvalidArgumentError,
    KvExhausted,
    SequenceStateError,
    StaleHandleError,
)
from atlas.session import RestoredSequence
from tests.engine.conftest import num_taken
from tests.engine.folders import write_model
from tests.engine.test_fork_and_rewind import GREEDY, PROMPT, SAMPLED, advance, run_out

BIASED = GREEDY.replace(
    logit_bias={7: 3.5, 11: -2.25, 201: -1e4},
    bad_words=[[5, 6]],
    stop_token_ids=(201,),
    prompt_logprobs=1,
)


@pytest.fixture
def other(folder: Path) -> Iterator[Engine]:
    """A second engine on the same file, with a cache of another size."""
    with Engine(folder, threads=2, kv_tokens=96, max_seq_len=80, quiet=True) as engine:
        yield engine
        assert num_taken(engine) == 0


# -- requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, BIASED], ids=["greedy", "sampled", "biased"])
@pytest.mark.parametrize("num_steps", [1, 9, 10, 11, 39])
def test_a_restored_request_ends_as_the_plain_run(
    engine: Engine, other: Engine, tmp_path: Path, params: SamplingParams, num_steps: int
) -> None:
    plain = engine.generate(PROMPT, params)
    name = engine.submit(PROMPT, params)
    advance(engine, num_steps)
    engine.save(name, tmp_path / "session")
    here = engine.restore(tmp_path / "session", user="again")
    there = other.restore(tmp_path / "session", request_id="there")
    assert there == "there"
    done = run_out(engine) | run_out(other)
    assert set(done) == {name, here, there}
    for completion in done.values():
        assert completion.samples == plain.samples
        assert completion.prompt_logprobs == plain.prompt_logprobs
        assert completion.usage.completion_tokens == plain.usage.completion_tokens


def test_a_session_outlives_its_engine_and_saves_again(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with Engine(folder, threads=1, quiet=True) as engine:
        plain = engine.generate(PROMPT, SAMPLED)
        name = engine.submit(PROMPT, SAMPLED)
        advance(engine, 3)
        engine.save(name, path)
    for _ in range(5):
        with Engine(folder, threads=1, quiet=True) as engine:
            name = engine.restore(path)
            advance(engine, 6)
            engine.save(name, path)
    with Engine(folder, threads=1, quiet=True) as engine:
        name = engine.restore(path)
        assert run_out(engine)[name].samples == plain.samples
    assert os.listdir(tmp_path) == ["session"]


def test_text_and_stops_go_on(text_engine: Engine, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=4)
    whole = text_engine.generate("naïve 🙂 日", params).text
    params = params.replace(stop=[whole[-3:], "🙂 "])  # one of them ends it
    plain = text_engine.generate("naïve 🙂 日", params)
    name = text_engine.submit("naïve 🙂 日", params)
    num_steps = len(plain.token_ids) // 2
    text = "".join(event.text for event in advance(text_engine, num_steps))
    text_engine.save(name, tmp_path / "session")
    text_engine.cancel(name)
    run_out(text_engine)
    again = text_engine.restore(tmp_path / "session")
    while text_engine.has_unfinished():
        for event in text_engine.poll():
            text += event.text
            completion = event.completion
    assert completion is not None
    assert completion.request_id == again
    assert text == completion.text == plain.text
    assert completion.samples == plain.samples
    assert plain.stop_reason == whole[-3:]


@pytest.mark.parametrize("preemption", ["spill", "requeue"])
def test_restored_requests_share_a_small_pool(
    folder: Path, tmp_path: Path, preemption: str
) -> None:
    with Engine(folder, threads=1, kv_tokens=96, quiet=True, preemption=preemption) as engine:
        plain = engine.generate(PROMPT, SAMPLED)
        name = engine.submit(PROMPT, SAMPLED)
        advance(engine, 20)
        engine.save(name, tmp_path / "session")
        names = [name, *(engine.restore(tmp_path / "session") for _ in range(4))]
        done = run_out(engine)
        assert [done[name].samples for name in names] == [plain.samples] * 5
        assert num_taken(engine) == 0


@pytest.mark.parametrize("preemption", ["spill", "requeue"])
def test_a_session_that_stands_on_generated_blocks(
    folder: Path, tmp_path: Path, preemption: str
) -> None:
    """Its file says how much of the prompt owes nothing to generated tokens."""
    with Engine(folder, threads=1, kv_tokens=256, quiet=True, preemption=preemption) as engine:
        turn = [*PROMPT, *engine.generate(PROMPT, GREEDY).token_ids, 9, 8]
        plain = engine.generate(turn, SAMPLED)
        name = engine.submit(turn, SAMPLED)
        advance(engine, 4)
        engine.save(name, tmp_path / "session")
        header = engine._sessions._read(tmp_path / "session").header
        assert header.prompt_len == len(turn)
        assert header.exact_len < header.prompt_len
        names = [name, *(engine.restore(tmp_path / "session") for _ in range(4))]
        done = run_out(engine)
        assert [done[name].samples for name in names] == [plain.samples] * 5
        assert num_taken(engine) == 0


def test_a_cancelled_restore_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    name = engine.submit(PROMPT, GREEDY)
    advance(engine, 5)
    engine.save(name, tmp_path / "session")
    engine.cancel(name)
    again = engine.restore(tmp_path / "session")
    assert engine._loop.store.nbytes > 0
    engine.cancel(again)
    assert run_out(engine)[again].finish_reason == "cancelled"
    assert engine._loop.store.nbytes == 0


def test_a_restored_request_that_never_fits_leaves_nothing(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "session"
    name = engine.submit(PROMPT, GREEDY)
    advance(engine, 5)
    engine.save(name, path)
    with Engine(folder, threads=1, kv_tokens=32, max_seq_len=512, quiet=True) as small:
        for _ in range(2):  # the id is free again
            with pytest.raises(KvExhausted, match="the pool has 2"):
                small.restore(path, request_id="one")
        assert not small.has_unfinished()
        assert small.metrics().spilled_bytes == 0
    engine.restore(path, request_id="one")
    with pytest.raises(InvalidArgumentError, match="'one' is in use"):
        engine.restore(path, request_id="one")
    run_out(engine)


def test_what_cannot_be_saved(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with pytest.raises(InvalidArgumentError, match="'nobody' is not live"):
        engine.save("nobody", path)
    name = engine.submit(PROMPT, GREEDY, request_id="one")
    with pytest.raises(SequenceStateError, match="cannot be saved now: its prompt is not done"):
        engine.save(name, path)
    many = engine.submit(PROMPT, GREEDY.replace(n=2))
    scripted = engine.submit(PROMPT, GREEDY.replace(logits_processor=lambda p, o, row: None))
    advance(engine, 2)
    with pytest.raises(InvalidArgumentError, match="n 2; allowed to be saved: n 1"):
        engine.save(many, path)
    with pytest.raises(InvalidArgumentError, match="logits_processor, which cannot be saved"):
        engine.save(scripted, path)
    with pytest.raises(InvalidArgumentError, match="logits are given"):
        engine.save(name, path, logits=np.zeros(203, np.float32))
    with pytest.raises(FileNotFoundError):
        engine.save(name, tmp_path / "no" / "session")
    assert os.listdir(tmp_path) == []
    run_out(engine)


def test_a_save_that_fails_leaves_the_old_file(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "session"
    name = engine.submit(PROMPT, GREEDY)
    advance(engine, 2)
    engine.save(name, path)
    before = path.read_bytes()

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("atlas.session.write_sequence", fail)
    with pytest.raises(OSError, match="the disk is full"):
        engine.save(name, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["session"]
    run_out(engine)


@pytest.mark.cpu
def test_no_foreign_tokens_in_the_file(engine: Engine, tmp_path: Path) -> None:
    """Places of the last block behind the sequence hold zeros, not an earlier request's KV."""
    engine.generate(list(range(3, 120)), GREEDY)  # fill blocks
    files = []
    for again in range(2):
        name = engine.submit(PROMPT, GREEDY)
        advance(engine, 5)
        engine.save(name, tmp_path / f"{again}")
        engine.cancel(name)
        run_out(engine)
        engine.generate([100 + again] * 50, GREEDY)
        files.append((tmp_path / f"{again}").read_bytes())
    assert len(files[0]) == len(files[1])
    layout = engine._sessions.layout()
    saved = engine._sessions._read(tmp_path / "0")
    used = saved.header.seq_len % layout.block_size
    assert used
    for keys, values in zip(saved.parts[::2], saved.parts[1::2], strict=True):
        assert not keys[-1][..., used:].any()
        assert not values[-1][:, used:].any()
        assert keys[-1][..., :used].any()


# -- sequences driven by hand -----------------------------------------------------------------


def test_a_sequence_goes_on_by_hand(engine: Engine, tmp_path: Path) -> None:
    model = engine.model
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(PROMPT, seq)
    for token in (9, 8, 7):
        view = model.forward.decode(token, seq)
    assert view is not None
    row = view.numpy()[0].copy()
    engine.save(seq, tmp_path / "with", logits=view)
    engine.save(seq, tmp_path / "without")
    expected = model.forward.decode(5, seq).numpy().copy()
    for name in ("with", "without"):
        restored = engine.restore(tmp_path / name)
        assert isinstance(restored, RestoredSequence)
        again, logits = restored
        assert np.array_equal(again.tokens, [*PROMPT, 9, 8, 7])
        assert (again.seq_len, again.prompt_len) == (10, 7)
        assert (logits is None) == (name == "without")
        if logits is not None:
            assert np.array_equal(logits.view(np.int32), row.view(np.int32))
        assert np.array_equal(model.forward.decode(5, again).numpy(), expected)
        model.lifecycle.free_sequence(again)
    with pytest.raises(InvalidArgumentError, match="request_id is 'x', but the file holds"):
        engine.restore(tmp_path / "with", request_id="x")
    with pytest.raises(InvalidArgumentError, match="logits hold 3 values; allowed: one row of 203"):
        engine.save(seq, tmp_path / "bad", logits=np.zeros(3, np.float32))
    model.lifecycle.free_sequence(seq)
    with pytest.raises(StaleHandleError):
        engine.save(seq, tmp_path / "bad")
    assert sorted(os.listdir(tmp_path)) == ["with", "without"]


def test_a_sequence_that_does_not_fit_takes_nothing(folder: Path, tmp_path: Path) -> None:
    with Engine(folder, threads=1, kv_tokens=64, quiet=True) as engine:
        lifecycle = engine.model.lifecycle
        seq = lifecycle.alloc_sequence()
        engine.model.forward.prefill(list(range(3, 43)), seq)
        engine.save(seq, tmp_path / "session")
        with pytest.raises(KvExhausted):
            engine.restore(tmp_path / "session")
        lifecycle.free_sequence(seq)
        assert num_taken(engine) == 0


# -- files that are not what they say ---------------------------------------------------------


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> bytes:
    name = engine.submit(PROMPT, SAMPLED)
    advance(engine, 10)
    engine.save(name, tmp_path / "session")
    engine.cancel(name)
    run_out(engine)
    return (tmp_path / "session").read_bytes()


def refusal(engine: Engine, path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError) as refused:
        engine.restore(path)
    assert str(path) in str(refused.value)
    assert not engine.has_unfinished()
    return str(refused.value)


def test_every_damage_is_refused(engine: Engine, saved: bytes, tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "bad"
    places = [*range(0, 160, 3), *(rng.randrange(len(saved)) for _ in range(150))]
    for place in places:
        damaged = bytearray(saved)
        damaged[place] ^= 1 << rng.randrange(8)
        refusal(engine, path, bytes(damaged))
    for length in (0, 5, 12, *(rng.randrange(len(saved)) for _ in range(40)), len(saved) - 1):
        assert "ends within" in refusal(engine, path, saved[:length])
    assert "more bytes follow" in refusal(engine, path, saved + b"\0")
    (tmp_path / "good").write_bytes(saved)
    name = engine.restore(tmp_path / "good")
    assert isinstance(name, str)
    assert run_out(engine)[name].samples == engine.generate(PROMPT, SAMPLED).samples


@pytest.mark.cpu
def test_another_models_session_is_refused(engine: Engine, saved: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(saved)
    for folder, options, word in [
        (write_model(tmp_path / "weights", seed=1), {}, "weights="),
        (write_model(tmp_path / "kv"), {"kv_dtype": "float16"}, "kv="),
        (write_model(tmp_path / "size", vocab_size=300), {}, "config="),
    ]:
        with (
            Engine(folder, threads=1, quiet=True, **options) as another,  # type: ignore[arg-type]
            pytest.raises(InvalidArgumentError, match=f"another model .*{word}"),
        ):
            another.restore(tmp_path / "file")
    with (
        Engine(write_model(tmp_path / "short"), threads=1, max_seq_len=16, quiet=True) as another,
        pytest.raises(InvalidArgumentError, match="end the request at its output"),
    ):
        another.restore(tmp_path / "file")


def forged(layout: SequenceLayout, path: Path, section: Any, prompt_len: int = 7) -> bytes:
    """A file with a right checksum and whatever section."""
    tokens = np.array([*PROMPT, 3, 4], np.int32)
    header = SequenceHeader(layout.fingerprint, 9, prompt_len, 0, 9)
    parts = [np.zeros((1, *shape), kind) for shape, kind in layout.block_parts]
    content = section if isinstance(section, bytes) else json.dumps(section).encode()
    with path.open("wb") as file:
        write_sequence(file, header, tokens, parts, {"request": content})
    return path.read_bytes()


GOOD: dict[str, Any] = {
    "params": {"max_tokens": 20, "ignore_eos": True},
    "last_token": 5,
    "position": 10,
    "logprobs": None,
    "prompt_logprobs": [],
    "cached_tokens": 0,
}


def test_hostile_sections_are_refused(engine: Engine, tmp_path: Path) -> None:
    layout = engine._sessions.layout()
    path = tmp_path / "file"
    forged(layout, path, GOOD)
    name = engine.restore(path)
    assert isinstance(name, str)
    assert run_out(engine)[name].token_ids[:3] == (3, 4, 5)
    for changes, message in [
        ({"params": 3}, "params of the saved request are no mapping"),
        ({"params": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"params": {"max_tokens": 3}}, "end the request at its output token 3"),
        ({"params": {"max_tokens": 1}}, "end the request at its output token 1"),
        ({"params": {"evil": 1}}, "unknown sampling parameter 'evil'"),
        ({"params": {"n": 2}}, "n of the saved request is 2"),
        ({"params": {"temperature": 1.0}}, "seed is None"),
        ({"params": {"logits_processor": "os.system"}}, "logits_processor is 'os.system'"),
        ({"params": {"logit_bias": 5}}, "params of the saved request"),
        ({"params": {"logit_bias": [[[], 1]]}}, "params of the saved request"),
        ({"params": {"stop_token_ids": [999]}}, "stop_token_ids is 999; allowed: 0 … 202"),
        ({"params": {"logprobs": 1}}, "logprobs of the saved request are not 3 items"),
        ({"params": {"logprobs": 1}, "logprobs": [1, 2, 3]}, "logprobs .* malformed"),
        ({"params": {"prompt_logprobs": 1}}, "prompt_logprobs .* not its own"),
        ({"params": {"prompt_logprobs": 1}, "prompt_logprobs": 7}, "malformed"),
        ({"last_token": 203}, "last_token|203"),
        ({"last_token": True}, "last_token holds True"),
        ({"last_token": 2**40}, "last_token holds"),
        ({"position": 9}, "position of the saved sampler is 9; allowed: 10"),
        ({"cached_tokens": -1}, "cached_tokens holds -1"),
        ({"cached_tokens": 8}, "cached_tokens is 8; allowed: 0 … 7"),
        ({"more": 1}, "section 'request' has other fields"),
    ]:
        content = forged(layout, path, GOOD | changes)
        with pytest.raises(InvalidArgumentError, match=message):
            engine.restore(path)
        assert content
    for section, message in [
        (b"", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"last_token": ' + b"9" * 10_000 + b"}", "no JSON"),
        (b"[]", "has other fields"),
    ]:
        forged(layout, path, section)
        with pytest.raises(InvalidArgumentError, match=message):
            engine.restore(path)
    forged(layout, path, GOOD, prompt_len=0)
    with pytest.raises(InvalidArgumentError, match="prompt_len of the saved request is 0"):
        engine.restore(path)
    forged(layout, path, GOOD | {"params": {"max_tokens": 2**31 - 1}})
    assert not engine.has_unfinished()


def test_claims_take_no_memory(engine: Engine, saved: bytes, tmp_path: Path) -> None:
    """A huge file is refused by its size; a huge section by the bytes that are missing."""
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write(saved)
        file.truncate(2**40)
    with pytest.raises(InvalidArgumentError, match=f"{2**40} bytes; a session of this model has"):
        engine.restore(path)
    name = saved.index(b"request")
    claim = bytearray(saved)
    claim[name + 7 : name + 15] = struct.pack("<Q", 2**50)
    claim[-4:] = struct.pack("<I", zlib.crc32(bytes(claim[:-4])))
    path.write_bytes(claim)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgumentError, match="ends within its section 'request'"):
            engine.restore(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(InvalidArgumentError, match="no regular file"):
        engine.restore("/dev/zero")
    with pytest.raises(FileNotFoundError):
        engine.restore(tmp_path / "nothing")
