"""Mbarriers and bulk copies of sm_90 for the PTX machine.

What a bulk copy brings arrives in shared memory only when its barrier's phase is waited for, so
that a missing wait shows. With ``turns`` copies are as late as they may be: only when nobody can go
on without one does one come, whichever. So they overtake one another, and warps run far apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_LOOP = re.compile(
    r"WAIT: mbarrier\.try_wait\.parity\.shared::cta\.b64 p, (\[[^\]]+\]), ([^;\s]+);"
    r"\s*@p bra DONE; bra WAIT; DONE:"
)

_BRANCH = re.compile(
    r"mov\.u32 n, %nctaid\.x; setp\.ne\.u32 p, n, 0;\s*@!p bra GO; griddepcontrol\.wait; GO:"
)


def without_loops(ptx: str) -> str:
    """PTX with each loop that waits for a barrier as one instruction, ``mbarrier.wait``.

    And the wait for the kernel before without the branch around it, which is never taken.
    """
    ptx = _BRANCH.sub("griddepcontrol.wait;", ptx)
    return _LOOP.sub(r"mbarrier.wait \1, \2;", ptx)


@dataclass
class Barrier:
    """One mbarrier: arrivals of a phase, bytes still expected, phases completed."""

    arrivals: int
    pending: int
    num_bytes: int = 0
    completed: int = 0
    copies: list[tuple[int, Array]] = field(default_factory=list)
    arrived: list[tuple[int, Array]] = field(default_factory=list)
    """What completed phases brought; ``copies`` are this phase's."""


class Barriers:
    """The mbarriers of a thread block, by shared address; ``turns`` says which copy comes next."""

    def __init__(self, turns: np.random.Generator | None = None) -> None:
        self.table: dict[int, Barrier] = {}
        self.turns = turns
        self.late: list[tuple[int, int, Array]] = []
        """Copies that have not come: barrier, place and bytes."""

    def init(self, addresses: Array, counts: Array) -> None:
        for address, count in zip(addresses.tolist(), counts.tolist(), strict=True):
            assert address % 8 == 0
            self.table[address] = Barrier(count, count)

    def expect(self, addresses: Array, sizes: Array) -> None:
        """Arrive once and expect bytes."""
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            barrier = self.table[address]
            assert barrier.pending > 0, "more arrivals than a phase has"
            barrier.pending -= 1
            barrier.num_bytes += size
            self._settle(barrier)

    def copy(self, address: int, place: int, data: Array) -> None:
        """Bytes on their way to ``place``."""
        assert address in self.table, "a copy for a barrier that is not there"
        assert place % 16 == 0, "a bulk copy wants 16-byte alignment"
        assert data.size % 16 == 0, "a bulk copy is of a multiple of 16 bytes"
        self.late.append((address, place, data))
        if self.turns is None:
            self._come(0)

    def _come(self, number: int) -> None:
        address, place, data = self.late.pop(number)
        barrier = self.table[address]
        barrier.copies.append((place, data))
        barrier.num_bytes -= data.size
        self._settle(barrier)

    def bring(self) -> bool:
        """One of the late copies comes, whichever; whether there was one."""
        if self.late:
            assert self.turns is not None
            self._come(int(self.turns.integers(len(self.late))))
            return True
        return False

    def end(self) -> None:
        """The thread block is over, and its shared memory another's."""
        copies = [*self.late]
        for barrier in self.table.values():
            copies += barrier.copies + barrier.arrived
        assert not copies, "a bulk copy that nobody waits for"

    def wait(self, addresses: Array, parities: Array, shared: Array) -> Array:
        """Whether each wait is over; then what the phase brought arrives."""
        is_over = []
        for address, parity in zip(addresses.tolist(), parities.tolist(), strict=True):
            barrier = self.table[address]
            is_over.append(barrier.completed % 2 != parity & 1)
            if not is_over[-1]:
                continue
            for place, data in barrier.arrived:
                shared[place : place + data.size] = data
            barrier.arrived.clear()
        return np.array(is_over)

    @staticmethod
    def _settle(barrier: Barrier) -> None:
        if barrier.pending == 0 and barrier.num_bytes == 0:
            barrier.completed += 1
            barrier.arrived += barrier.copies
            barrier.copies = []
            barrier.pending = barrier.arrivals
