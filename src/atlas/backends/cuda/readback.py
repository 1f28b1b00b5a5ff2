"""Chosen tokens and rows of logits on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.memory import PinnedMemory

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice
    from atlas.backends.cuda.small_copies import SmallCopies
    from atlas.ops.sampling import Sampled
    from atlas.sampling_table import Scores

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
_RING = 3  # steps whose tokens may be under way: two, and the one that is being read


class _Slot:
    """Pinned memory for one step's tokens, and for the rows of logits that were asked for."""

    def __init__(self, device: CudaDevice, num_rows: int) -> None:
        self.pinned = PinnedMemory(device, 4 * num_rows)
        self.tokens = self.pinned.array.view(np.int32)
        self.event: Any = device.create_event()
        self.rows: PinnedMemory | None = None
        self.turn = -1

    def close(self, device: CudaDevice) -> None:
        device.destroy_event(self.event)
        self.tokens = np.empty(0, np.int32)
        self.pinned.close()
        if self.rows is not None:
            self.rows.close()


class ReadBacks:
    """A ring of pinned buffers: each step's tokens are copied out as soon as they are chosen.

    Parameters
    ----------
    device : CudaDevice
    copies : SmallCopies
    logits : float32 [R, C]
        The arena.
    chosen : int32 [R]
        The greedy id of each of its rows.
    """

    def __init__(
        self, device: CudaDevice, copies: SmallCopies, logits: DeviceArray, chosen: DeviceArray
    ) -> None:
        self._device, self._copies = device, copies
        self._logits = logits
        self._chosen = chosen
        self._slots = [_Slot(device, len(chosen)) for _ in range(_RING)]
        self._turn = 0
        self._last = 0, 0  # rows that the latest step chose: first, count

    def begin(self, first: int, count: int) -> None:
        """Copy out the tokens of rows from ``first`` on, behind the step just launched."""
        self._turn += 1
        slot = self._slots[self._turn % _RING]
        self._device.wait(slot.event)  # of three steps ago
        slot.turn = self._turn
        at = 4 * first
        self._copies.copy_out(slot.pinned.address + at, self._chosen.address + at, 4 * count)
        self._device.record(slot.event)
        self._last = first, count

    def tokens(self, first: int, count: int) -> Ints:
        """Greedy ids of arena rows as they are now; waits."""
        since, number = self._last
        slot = self._slots[self._turn % _RING]
        if not since <= first <= first + count <= since + number:
            chosen = self._chosen[first : first + count]
            out = np.empty(count, np.int32)
            self._device.copy_out(out.ctypes.data, chosen.address, chosen.nbytes)
            self._device.synchronize()
            return out
        self._device.wait(slot.event)
        return slot.tokens[first : first + count].copy()

    def result(self, count: int, host_rows: Sequence[int]) -> StepReadBack:
        """The step just launched; ``host_rows`` of its logits are copied out behind it."""
        if not count:
            return StepReadBack(self, None, 0, {})
        slot = self._slots[self._turn % _RING]
        row_bytes = self._logits.shape[1] * 4
        places = {row: i for i, row in enumerate(sorted(set(host_rows)))}
        if places:
            nbytes = row_bytes * len(places)
            if slot.rows is None or slot.rows.array.size < nbytes:
                if slot.rows is not None:
                    slot.rows.close()
                slot.rows = PinnedMemory(self._device, nbytes)
            for row, i in places.items():
                source = self._logits.address + row * self._logits.strides[0]
                self._device.copy_out(slot.rows.address + i * row_bytes, source, row_bytes)
            self._device.record(slot.event)
        return StepReadBack(self, slot, count, places)

    def wait(self, slot: _Slot) -> None:
        """Until what was copied into a slot is there; faults of the step appear here."""
        self._device.enter()
        self._device.wait(slot.event)

    def row(self, row: int) -> Floats:
        """A row of the arena as it is now; waits."""
        out = np.empty(self._logits.shape[1], np.float32)
        source = self._logits.address + row * self._logits.strides[0]
        self._device.enter()
        self._device.copy_out(out.ctypes.data, source, out.nbytes)
        self._device.synchronize()
        return out

    @property
    def row_len(self) -> int:
        """C."""
        return self._logits.shape[1]

    def close(self) -> None:
        """Free the ring; idempotent."""
        while self._slots:
            self._slots.pop().close(self._device)


class StepReadBack:
    """The result of a step on the device (``atlas.model.step_result.StepResult``)."""

    def __init__(
        self, ring: ReadBacks, slot: _Slot | None, count: int, places: dict[int, int]
    ) -> None:
        self._ring = ring
        self._slot = slot
        self._turn = -1 if slot is None else slot.turn
        self._count = count
        self._places = places
        self.scores: Scores | None = None  # of what the step drew with log-probabilities
        self._tokens: Ints | None = np.empty(0, np.int32) if slot is None else None

    def tokens(self) -> Ints:
        """int32 [L]: the token of each logits row; the first call waits for the step."""
        if self._tokens is None:
            assert self._slot is not None
            assert self._slot.turn == self._turn, "read after the next step but one was launched"
            self._ring.wait(self._slot)
            self._tokens = self._slot.tokens[: self._count].copy()
        return self._tokens

    def scored(self, row: int, token_id: int) -> Sampled:
        """A token that the step drew, with its log-probability and the best ones."""
        assert self.scores is not None, "nothing was scored"
        self.tokens()  # which waits for the step
        return self.scores.sampled(row, token_id)

    def logits(self, row: int) -> Floats:
        """float32 [C] of a row: one that was asked for at launch, or one as the arena has it."""
        place = self._places.get(row)
        if place is None or self._slot is None or self._slot.rows is None:
            return self._ring.row(row)
        assert self._slot.turn == self._turn, "read after the next step but one was launched"
        self._ring.wait(self._slot)
        size = self._ring.row_len
        return self._slot.rows.array.view(np.float32)[place * size : (place + 1) * size]
