"""A decode step's integers, fetched from pinned memory by the kernel that feeds its tokens."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import KernelLaunch, Recording
from atlas.backends.cuda.memory import Arena, aligned
from atlas.backends.cuda.small_copies import MOST_BYTES
from atlas.cache.kv import BLOCK_SIZE

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList
    from atlas.backends.cuda.device import CudaDevice
    from atlas.backends.cuda.inputs import InputLayout, InputRegion
    from atlas.layers.step import StepShape

_WORDS = 128  # that a thread block copies
_PIECE_WORDS = 3


def pieces_bytes(layout: InputLayout) -> int:
    """Device memory of an ``InputFetch``."""
    return aligned(4 * _PIECE_WORDS * len(layout.shapes))


def worth_a_kernel(fetched: int, copied: int) -> bool:
    """Whether reading ``fetched`` bytes of tables by a kernel costs less than copying ``copied``.

    A copy takes whole tables, as wide as the longest sequence that the model allows.
    """
    return fetched <= MOST_BYTES or 2 * fetched <= copied


class InputFetch:
    """One recorded launch, whose arguments change: what the step needs, and no more of it.

    A step with prompts does without: its kernels are no graph, so they may begin before a kernel in
    front has ended, and they read these integers before they wait.

    Parameters
    ----------
    device : CudaDevice
    arena : Arena
        Gives ``pieces_bytes``.
    layout : InputLayout
        Of ``StepBuffers``: token ids first, block tables last.
    mirror : uint8 [layout.nbytes]
        The integers on the device.
    chosen : int32 [L]
        Tokens that the step before chose.
    """

    kernel = "fetch_inputs"

    def __init__(
        self,
        device: CudaDevice,
        arena: Arena,
        layout: InputLayout,
        mirror: DeviceArray,
        chosen: DeviceArray,
    ) -> None:
        names = list(layout.shapes)
        assert (names[0], names[-1]) == ("token_ids", "block_tables"), names
        self._device, self._mirror, self._chosen = device, mirror, chosen
        shapes = layout.shapes.values()
        offsets = layout.offsets.values()
        table = [
            (at // 4, shape[0], prod(shape[1:])) for shape, at in zip(shapes, offsets, strict=True)
        ]
        pieces = np.array(table, np.int32)
        self._pieces = arena.take(pieces.shape, "int32")
        device.copy_in(self._pieces.address, pieces.ctypes.data, pieces.nbytes)
        self._layout, (self._max_seqs, self._max_blocks) = layout, layout.shapes["block_tables"]
        self._launches: CudaLaunchList | None = None  # until a step is fetched

    def run(self, region: InputRegion, padded: StepShape) -> bool:
        """Put the integers of a step that only decodes on the stream; False: a copy is better.

        Parameters
        ----------
        region : InputRegion
            Padded to the shape.
        """
        rows = max(padded.rows, padded.seqs, padded.logits)
        columns = int(region.arrays.positions[: padded.rows].max()) // BLOCK_SIZE + 1
        columns = min(columns, self._max_blocks)
        words = min(rows + 1, self._max_seqs) * columns
        if not worth_a_kernel(4 * words, self._layout.used_bytes(padded.seqs)):
            return False
        num_pieces = len(self._layout.shapes)
        places = region.pinned.address, self._mirror.address, self._pieces.address
        args = (*places, self._chosen.address, num_pieces, rows, columns)
        if self._launches is None:
            self._launches = Recording([KernelLaunch(self.kernel, (1, 1), args)]).compile(
                self._device
            )
        per_piece = (rows + _WORDS) // _WORDS
        self._launches.patch(0, (num_pieces - 1) * per_piece - -words // _WORDS, args)
        self._device.run(self._launches)
        return True
