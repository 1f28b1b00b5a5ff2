"""Fork, save and restore through C: sequences that go on bitwise as the one they came from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capi.interface import (
    CallError,
    call,
    ffi,
    ids,
    info,
    lib,
    make,
    mark,
    read_ids,
    rewind,
    struct,
)
from tests.capi.test_token_level import rows_of

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]


def load(model: Path) -> Any:
    options = make("load_options", "load_options_create")
    call("load_options_set_integer", options, b"threads", 1)
    params = struct("load_params", options=options)
    handle = make("engine", "engine_load", str(model).encode(), params)
    call("load_options_free", options)
    return handle


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[Any]:
    handle = load(model)
    yield handle
    call("engine_free", handle)


def started(engine: Any) -> Any:
    """A sequence past its prompt and two more tokens."""
    sequence = make("sequence", "sequence_create", engine, 0)
    call("sequence_prefill", sequence, ids(PROMPT), len(PROMPT), 2, ffi.NULL)
    logits = make("logits", "sequence_decode", sequence, 30)
    call("logits_free", logits)
    return sequence


def decoded(sequence: Any, tokens: list[int]) -> list[bytes]:
    """The logits after each token."""
    rows = []
    for token in tokens:
        logits = make("logits", "sequence_decode", sequence, token)
        rows.append(rows_of(logits).tobytes())
        call("logits_free", logits)
    return rows


def saved(sequence: Any, *, refuse: bool = False) -> bytes:
    """What the write callback was given."""
    parts: list[bytes] = []

    @ffi.callback("int32_t(void *, const void *, size_t)")
    def write(user: Any, data: Any, count: int) -> int:
        parts.append(bytes(ffi.buffer(data, count)))
        return int(refuse)

    call("sequence_save", sequence, write, ffi.NULL)
    return b"".join(parts)


def restore(sequence: Any, data: bytes) -> None:
    at = [0]

    @ffi.callback("int64_t(void *, void *, size_t)")
    def read(user: Any, buffer: Any, capacity: int) -> int:
        part = data[at[0] : at[0] + min(capacity, 1000)]
        ffi.buffer(buffer, capacity)[: len(part)] = part
        at[0] += len(part)
        return len(part)

    call("sequence_restore", sequence, read, ffi.NULL)


def test_a_fork_goes_its_own_way(loaded: Any) -> None:
    assert lib.atlas_has(b"sequence.fork") == 1
    sequence = started(loaded)
    twin = make("sequence", "sequence_fork", sequence)
    mark(loaded, twin)
    expected = decoded(sequence, [3, 4, 5])
    assert decoded(twin, [9])[0] != expected[0]
    rewind(loaded, twin, len(PROMPT) + 1)
    assert decoded(twin, [3, 4, 5]) == expected
    assert read_ids("sequence_get_tokens", sequence) == [*PROMPT, 30, 3, 4, 5]
    call("sequence_free", sequence)
    assert info("sequence", twin).seq_len == len(PROMPT) + 4
    call("sequence_free", twin)


def test_a_restored_sequence_goes_on(loaded: Any, model: Path) -> None:
    sequence = started(loaded)
    data = saved(sequence)
    expected = decoded(sequence, [3, 4, 5])
    call("sequence_free", sequence)
    other = load(model)
    for engine in (loaded, other):
        again = make("sequence", "sequence_create", engine, 0)
        restore(again, data)
        assert read_ids("sequence_get_tokens", again) == [*PROMPT, 30]
        assert decoded(again, [3, 4, 5]) == expected
        call("sequence_free", again)
    call("engine_free", other)


def test_a_damaged_state_is_refused_and_changes_nothing(loaded: Any) -> None:
    sequence = started(loaded)
    data = saved(sequence)
    call("sequence_free", sequence)
    empty = make("sequence", "sequence_create", loaded, 0)
    for bad in (b"", data[:20], data[:-1], b"X" + data[1:], data[:60] + b"\xff" + data[61:]):
        with pytest.raises(CallError):
            restore(empty, bad)
        assert info("sequence", empty).seq_len == 0
    restore(empty, data)
    assert info("sequence", empty).seq_len == len(PROMPT) + 1
    call("sequence_free", empty)


def test_a_write_callback_can_end_the_save(loaded: Any) -> None:
    sequence = started(loaded)
    with pytest.raises(CallError, match="CANCELLED"):
        saved(sequence, refuse=True)
    assert len(decoded(sequence, [3])) == 1
    call("sequence_free", sequence)
