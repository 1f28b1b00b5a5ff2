"""Prefill, decode, their mixtures, and verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from atlas.capi._binding import ffi, lib
from atlas.capi.calls import exported
from atlas.capi.engine import driving, engine_of
from atlas.capi.logits import LogitsTarget
from atlas.capi.memory import Ints, number, read_ids, require
from atlas.capi.sequences import OwnedSequence, sequence_of
from atlas.errors import InvalidArgumentError, PromptTooLongError
from atlas.model.records import PrefillSlice

if TYPE_CHECKING:
    from atlas.engine import Engine
    from atlas.model.records import LogitsMode

_MODES: dict[int, LogitsMode] = {
    lib.ATLAS_LOGITS_LAST: "last",
    lib.ATLAS_LOGITS_ALL: "all",
    lib.ATLAS_LOGITS_NONE: "none",
}


def _mode(logits_mode: int) -> LogitsMode:
    if logits_mode not in _MODES:
        raise InvalidArgumentError(f"logits_mode is {logits_mode}; allowed: 0, 1, 2")
    return _MODES[logits_mode]


def _prompt(engine: Engine, tokens: Any, count: int) -> Ints:
    """A prompt's ids; one that cannot fit is refused before its memory is read."""
    if count == 0:
        raise InvalidArgumentError("num_tokens is 0; allowed: 1 or more")
    if count > engine.max_seq_len:
        raise PromptTooLongError(
            f"the prompt has {count} tokens; allowed: up to max_seq_len {engine.max_seq_len}"
        )
    return read_ids(tokens, count, engine.max_seq_len, "tokens")


@exported
def sequence_prefill(handle: Any, tokens: Any, count: int, logits_mode: int, out: Any) -> None:
    """Run a whole prompt."""
    found = sequence_of(handle)
    mode = _mode(logits_mode)
    ids = _prompt(found.engine, tokens, count)
    target = LogitsTarget(found.engine, out)
    with driving(found.engine) as model:
        target.put(model.forward.prefill(ids, found.state, logits=mode))


@exported
def sequence_prefill_chunk(
    handle: Any, tokens: Any, count: int, start: int, length: int, logits_mode: int, out: Any
) -> None:
    """Run one window of a prompt."""
    found = sequence_of(handle)
    mode = _mode(logits_mode)
    ids = _prompt(found.engine, tokens, count)
    target = LogitsTarget(found.engine, out)
    with driving(found.engine) as model:
        last = start + length == count
        view = model.forward.prefill_chunk(ids, found.state, start, length, last, logits=mode)
        target.put(view)


@exported
def sequence_decode(handle: Any, token: int, out: Any) -> None:
    """Append one token."""
    found = sequence_of(handle)
    target = LogitsTarget(found.engine, out)
    with driving(found.engine) as model:
        target.put(model.forward.decode(token, found.state))


@exported
def engine_decode_batch(handle: Any, tokens: Any, sequences: Any, count: int, out: Any) -> None:
    """Append one token to each of several sequences."""
    engine = engine_of(handle)
    if count == 0:
        raise InvalidArgumentError("num is 0; allowed: 1 or more")
    ids, found = _decode_rows(engine, tokens, sequences, count)
    target = LogitsTarget(engine, out)
    with driving(engine) as model:
        target.put(model.forward.decode_batch(ids, [item.state for item in found]))


@exported
def engine_forward_mixed(
    handle: Any,
    decode_tokens: Any,
    decode_sequences: Any,
    num_decode: int,
    slices: Any,
    num_slices: int,
    logits_mode: int,
    decode_out: Any,
    slice_out: Any,
) -> None:
    """Decode rows and prompt windows in one sweep."""
    engine = engine_of(handle)
    mode = _mode(logits_mode)
    ids, found = _decode_rows(engine, decode_tokens, decode_sequences, num_decode)
    windows = _windows(engine, slices, num_slices)
    decode_target = LogitsTarget(engine, decode_out)
    slice_targets = [
        LogitsTarget(engine, slice_out + i) for i in range(num_slices if slice_out else 0)
    ]
    with driving(engine) as model:
        states = [item.state for item in found]
        result = model.forward.mixed_forward_batch(ids, states, windows, logits=mode)
        decode_target.put(result.decode_logits)
        if slice_targets:
            for target, view in zip(slice_targets, result.prefill_logits, strict=True):
                target.put(view)


def _decode_rows(
    engine: Engine, tokens: Any, sequences: Any, count: int
) -> tuple[Ints, list[OwnedSequence]]:
    limit = engine._loaded.core.limits.max_seqs
    if count > limit:
        raise InvalidArgumentError(f"{count} sequences; allowed in one step: {limit}")
    ids = read_ids(tokens, count, limit, "tokens")
    if count:
        require(sequences, "sequences")
    return ids, [_own(engine, sequences[i]) for i in range(count)]


def _windows(engine: Engine, slices: Any, count: int) -> list[PrefillSlice]:
    limit = engine._loaded.core.limits.max_seqs
    if count > limit:
        raise InvalidArgumentError(f"{count} slices; allowed in one step: {limit}")
    if count:
        require(slices, "slices")
    return [
        PrefillSlice(
            _prompt(engine, piece.tokens, piece.num_tokens),
            _own(engine, piece.sequence).state,
            piece.chunk_start,
            piece.chunk_len,
            piece.chunk_start + piece.chunk_len == piece.num_tokens,
        )
        for piece in (slices[i] for i in range(count))
    ]


def _own(engine: Engine, handle: Any) -> OwnedSequence:
    found = sequence_of(handle)
    if found.engine is not engine:
        raise InvalidArgumentError(f"sequence 0x{number(handle):x} belongs to another engine")
    return found


@exported
def sequence_verify(handle: Any, tokens: Any, count: int, argmax: Any, out: Any) -> None:
    """Run drafts."""
    found = sequence_of(handle)
    ids = _prompt(found.engine, tokens, count)
    target = LogitsTarget(found.engine, out)
    with driving(found.engine) as model:
        result = model.verify.decode_verify(ids, found.state, logits="all" if out else "none")
        target.put(result.logits)
    if argmax:
        best = np.ascontiguousarray(result.argmax, np.int32)
        ffi.memmove(argmax, ffi.from_buffer(best), best.nbytes)


@exported
def sequence_accept(handle: Any, rows_kept: int) -> None:
    """Keep some of a verify's rows."""
    found = sequence_of(handle)
    with driving(found.engine) as model:
        model.verify.accept(found.state, rows_kept)
