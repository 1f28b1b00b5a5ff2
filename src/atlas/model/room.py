"""Room for the positions that a step will write: blocks taken, shared ones copied, all undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from atlas.errors import KvExhausted

if TYPE_CHECKING:
    from atlas.model.core import ModelCore
    from atlas.model.sequence import SequenceState


class Replaced(NamedTuple):
    """A shared block that a private copy stands in for; whoever has this holds its reference."""

    seq: SequenceState
    place: int
    block: int


def reserve(core: ModelCore, seq: SequenceState, num_positions: int) -> Replaced | None:
    """Blocks for positions 0 … num_positions − 1, all of them or KvExhausted and no change.

    Evicts cached blocks where the pool lacks some. If the next position is in a block that others
    hold too, that is replaced by a copy.
    """
    core.require_length(num_positions)
    native, pool = seq.native, core.blocks
    index = native.shared_block() if num_positions > native.seq_len else -1
    copies = int(index >= 0)
    needed = max(0, -(-num_positions // native.block_size) - native.num_blocks) + copies
    if core.prefix_cache is not None and needed > pool.num_free:
        core.prefix_cache.evict(needed - pool.num_free)
    if not copies:
        native.reserve(num_positions)
        return None
    if needed > pool.num_free:
        raise KvExhausted(
            f"{needed} KV blocks needed, {pool.num_free} of {pool.num_total} are free"
        )
    native.reserve(num_positions)
    (copy,) = pool.allocate(1)
    core.pools.copy_block(int(native.block_table[index]), copy)
    return Replaced(seq, index, native.replace_block(index, copy))


class Taken:
    """What a step takes for its sequences: kept once it has run, given back if it fails."""

    def __init__(self, core: ModelCore, seqs: Sequence[SequenceState]) -> None:
        self._core = core
        self._seqs = seqs
        self._before = [
            (seq.seq_len, seq.prompt_len, seq.kv_valid_tokens, seq.native.num_blocks)
            for seq in seqs
        ]
        self._replaced: list[Replaced] = []
        self._displaced: list[int] = []  # reserved blocks in whose place shared ones came

    def take(self, counts: Sequence[int]) -> None:
        """Prefixes that were found, then blocks for ``counts[i]`` positions from the start on."""
        for seq, count in zip(self._seqs, counts, strict=True):
            end = seq.seq_len + count
            if seq.prefix is not None:
                self._displaced += seq.native.share(seq.prefix)
            replaced = reserve(self._core, seq, end)
            if replaced is not None:
                self._replaced.append(replaced)

    def keep(self) -> None:
        """Drop the references that undoing would have needed."""
        for _, _, block in self._replaced:
            self._core.blocks.release(block)
        for block in self._displaced:
            self._core.blocks.release(block)
        for seq in self._seqs:
            if seq.prefix is not None:
                seq.prefix.release()
                seq.prefix = None

    def undo(self) -> None:
        """Lengths, tokens and blocks as before, backwards: the pool is a stack."""
        core = self._core
        for seq, (length, prompt_len, kv_valid_tokens, num_blocks) in zip(
            reversed(self._seqs), reversed(self._before), strict=True
        ):
            if seq.seq_len != length:
                seq.native.rewind(length)
            seq.native.prompt_len, seq.native.kv_valid_tokens = prompt_len, kv_valid_tokens
            seq.native.trim(num_blocks)
        for seq, place, block in self._replaced:
            core.blocks.release(seq.native.replace_block(place, block))
        for block in reversed(self._displaced):
            core.blocks.release(block)
        for seq, (_, _, _, num_blocks) in zip(self._seqs, self._before, strict=True):
            seq.native.reserve(num_blocks * core.pools.block_size)


@contextmanager
def room(core: ModelCore, seqs: Sequence[SequenceState], counts: Sequence[int]) -> Iterator[None]:
    """What ``ModelCore.room`` does."""
    taken = Taken(core, seqs)
    try:
        taken.take(counts)
        yield
    except BaseException:
        taken.undo()
        raise
    taken.keep()
