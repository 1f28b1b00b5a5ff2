"""Mbarriers and bulk copies of sm_90 for the PTX machine.

What a bulk copy brings arrives in shared memory only when its barrier's phase is waited for, so
that a missing wait shows. A thread that waits for a phase which is not complete stands still until
another one has arrived or copied.
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


def without_loops(ptx: str) -> str:
    """PTX with each loop that waits for a barrier as one instruction, ``mbarrier.wait``."""
    return _LOOP.sub(r"mbarrier.wait \1, \2;", ptx)


@dataclass
class Barrier:
    """One mbarrier: arrivals of a phase, bytes still expected, phases completed."""

    arrivals: int
    pending: int
    num_bytes: int = 0
    completed: int = 0
    copies: list[tuple[int, Array]] = field(default_factory=list)


class Barriers:
    """The mbarriers of a thread block, by shared address."""

    def __init__(self) -> None:
        self.table: dict[int, Barrier] = {}

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
        barrier = self.table[address]
        assert place % 16 == 0, "a bulk copy wants 16-byte alignment"
        assert data.size % 16 == 0, "a bulk copy is of a multiple of 16 bytes"
        barrier.copies.append((place, data))
        barrier.num_bytes -= data.size
        self._settle(barrier)

    def wait(self, addresses: Array, parities: Array, shared: Array) -> Array:
        """Let what the phases brought arrive; which of them are complete."""
        complete = np.zeros(addresses.size, bool)
        pairs = zip(addresses.tolist(), parities.tolist(), strict=True)
        for i, (address, parity) in enumerate(pairs):
            barrier = self.table[address]
            complete[i] = barrier.completed % 2 != parity & 1
            if complete[i]:
                for place, data in barrier.copies:
                    shared[place : place + data.size] = data
                barrier.copies.clear()
        return complete

    @staticmethod
    def _settle(barrier: Barrier) -> None:
        if barrier.pending == 0 and barrier.num_bytes == 0:
            barrier.completed += 1
            barrier.pending = barrier.arrivals
