"""Sequences: their life and what is known about them."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from atlas.capi._binding import ffi, lib
from atlas.capi.calls import exported
from atlas.capi.engine import driving, engine_of
from atlas.capi.handles import HANDLES, handled
from atlas.capi.memory import (
    number,
    require,
    require_buffer,
    struct_size,
    write_array,
    write_struct,
)
from atlas.errors import Cancelled, ClosedError, InvalidArgumentError
from atlas.model import Unavailable, capability

if TYPE_CHECKING:
    from atlas.engine import Engine
    from atlas.model.sequence import SequenceState


@handled("sequence")
class OwnedSequence:
    """A sequence of an engine."""

    __slots__ = ("engine", "state")

    def __init__(self, engine: Engine, state: SequenceState) -> None:
        self.engine, self.state = engine, state


def sequence_of(handle: Any) -> OwnedSequence:
    """The sequence of a handle."""
    return HANDLES.get(number(handle), OwnedSequence)


def _put(out: Any, engine: Engine, state: SequenceState) -> None:
    out[0] = ffi.cast("atlas_sequence *", HANDLES.add(OwnedSequence(engine, state)))


@exported
def sequence_create(handle: Any, budget_tokens: int, out: Any) -> None:
    """An empty sequence."""
    engine = engine_of(handle)
    require(out, "sequence")
    with driving(engine) as model:
        _put(out, engine, model.lifecycle.alloc_sequence(budget_tokens or None))


@exported
def sequence_fork(handle: Any, out: Any) -> None:
    """A second sequence that stands where this one stands."""
    found = sequence_of(handle)
    require(out, "forked")
    with driving(found.engine) as model:
        _put(out, found.engine, model.lifecycle.fork(found.state))


@exported
def sequence_free(handle: Any) -> None:
    """Give the blocks back and free the handle."""
    found = sequence_of(handle)
    try:
        with driving(found.engine) as model:
            HANDLES.remove(number(handle), OwnedSequence)
            model.lifecycle.free_sequence(found.state)
    except ClosedError:  # the engine's end has taken the blocks along
        HANDLES.remove(number(handle), OwnedSequence)


@exported
def sequence_get_info(handle: Any, info: Any) -> None:
    """Fill the caller's struct."""
    found = sequence_of(handle)
    size = struct_size(info, "atlas_sequence_info", "info", "seq_len")
    with driving(found.engine):
        state = found.state
        values = ffi.new("atlas_sequence_info *")
        values.seq_len = state.seq_len
        values.prompt_len = state.prompt_len
        values.verify_rows = state.verify_rows
        values.num_blocks = state.native.num_blocks
        failed = state.status == "failed"
        values.state = lib.ATLAS_SEQUENCE_FAILED if failed else lib.ATLAS_SEQUENCE_ACTIVE
    write_struct(values, info, size)


@exported
def sequence_get_tokens(handle: Any, ids: Any, capacity: int, num_ids: Any) -> None:
    """The ids at its positions."""
    found = sequence_of(handle)
    require_buffer(ids, capacity, num_ids)
    with driving(found.engine):
        tokens = found.state.tokens
    write_array(tokens, ids, capacity, num_ids, "ids")


@exported
def sequence_reserve(handle: Any, num_positions: int) -> None:
    """Take blocks."""
    found = sequence_of(handle)
    with driving(found.engine) as model:
        model.lifecycle.reserve(found.state, num_positions)


@exported
def sequence_rewind(handle: Any, new_len: int) -> None:
    """Drop positions."""
    found = sequence_of(handle)
    with driving(found.engine) as model:
        model.lifecycle.rewind(found.state, new_len)


@exported
def sequence_save_snapshot(handle: Any, ring_slot: int) -> None:
    """Copy the recurrent state into the ring."""
    found = sequence_of(handle)
    with driving(found.engine) as model:
        capability.require(model.ssm, "ssm").save_snapshot(found.state, ring_slot)


@exported
def sequence_restore_snapshot(handle: Any, ring_slot: int) -> None:
    """Make a state from the ring the live one."""
    found = sequence_of(handle)
    with driving(found.engine) as model:
        capability.require(model.ssm, "ssm").restore_snapshot(found.state, ring_slot)


class CallbackWriter(io.RawIOBase):
    """A file that is a C function; ``header`` goes before the first bytes."""

    def __init__(self, callback: Any, user: Any, header: bytes) -> None:
        super().__init__()
        self._callback, self._user, self._header = callback, user, header

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for part in filter(len, (memoryview(self._header), view)):
            if self._callback(self._user, ffi.from_buffer(part), len(part)):
                raise Cancelled("the write callback ended the save")
        self._header = b""
        return len(view)


class CallbackReader(io.RawIOBase):
    """A file that is a C function. It asks for what is wanted and never for more."""

    def __init__(self, callback: Any, user: Any) -> None:
        super().__init__()
        self._callback, self._user = callback, user

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or as much of it as there is."""
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view):
            rest = view[done:]
            target = ffi.from_buffer(rest, require_writable=True)
            count = int(self._callback(self._user, target, len(rest)))
            if not 0 <= count <= len(rest):
                raise Cancelled(f"the read callback returned {count}; allowed: 0 … {len(rest)}")
            if count == 0:
                break
            done += count
        return done


_HEADER = struct.Struct("<8sQ")
_MAGIC = b"ATLASSEQ"


@exported
def sequence_save(handle: Any, write: Any, user: Any) -> None:
    """Write its state, after the number of blocks that it takes."""
    found = sequence_of(handle)
    require(write, "write")
    with driving(found.engine) as model:
        header = _HEADER.pack(_MAGIC, found.state.native.num_blocks)
        writer = cast(BinaryIO, CallbackWriter(write, user, header))
        model.lifecycle.save_sequence_state(found.state, writer)


@exported
def sequence_restore(handle: Any, read: Any, user: Any) -> None:
    """Read a state into an empty sequence."""
    found = sequence_of(handle)
    require(read, "read")
    with driving(found.engine) as model:
        if isinstance(type(model.lifecycle).restore_sequence_state, Unavailable):
            model.lifecycle.restore_sequence_state(found.state, 0, io.BytesIO())  # says why
        reader = CallbackReader(read, user)
        header = reader.read(_HEADER.size) or b""
        magic, num_blocks = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or num_blocks > model.lifecycle.num_total_blocks:
            raise InvalidArgumentError("what the read callback gives is no saved sequence")
        file = cast(BinaryIO, reader)
        model.lifecycle.restore_sequence_state(found.state, num_blocks, file)
