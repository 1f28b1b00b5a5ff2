"""Runs an encoder-decoder on a GPU: sources as lists, decode sweeps as graphs, beams' candidates.

Keys and values of a decoder's sequences lie in blocks that beams hold together, those of a source
in blocks of the same pools, written once; a graph reads both through tables, and holds nothing of
the requests that run in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas.backends.backend import Shapes
from atlas.backends.cuda.candidates import KERNELS, Candidates, Floats, Ints
from atlas.backends.cuda.device import CudaDevice
from atlas.backends.cuda.inputs import InputRegion
from atlas.backends.cuda.launch import Queue, Recording
from atlas.backends.cuda.runtime import CudaRuntime
from atlas.backends.cuda.translation_shapes import pad_translation, translation_bucket
from atlas.layers.translation_step import DecodeShape, TranslationBuffers
from atlas.ops.select import bind

if TYPE_CHECKING:
    from atlas.sampling_table import SamplingTable


class TranslatorRuntime(CudaRuntime):
    """A GPU's side of one encoder-decoder.

    No sweep chooses greedily of itself, as searches ask for candidates instead: logits of a large
    vocabulary are read once less. Samples are drawn, or their greatest logits found, behind a sweep
    that has some.
    """

    def __init__(self, device: CudaDevice, weight_bytes: int, scratch_bytes: int) -> None:
        self._candidates: Candidates | None = None
        self._drawn = range(0)  # rows of the arena whose tokens the last sweep chose
        super().__init__(device, weight_bytes, scratch_bytes)
        self._by_name |= set(KERNELS)

    def buffers(self, shapes: Shapes) -> TranslationBuffers:
        """A sweep's buffers, zeroed, with two pinned regions for its integers."""
        arrays, arena = self._allocate(shapes)
        self._candidates = self._own(
            Candidates(self.device, arena, self.workspace, shapes, arrays["logits"], self.functions)
        )
        return TranslationBuffers(**arrays)

    def padded(self, shape: Any) -> Any:
        """The shape under which a sweep of this one runs."""
        return translation_bucket(shape, *self._limits)

    def top_candidates(
        self, buffers: TranslationBuffers, rows: int, k: int, banned: Ints, cu_banned: Ints
    ) -> tuple[Ints, Floats, Floats]:
        """The op's ids, values and totals of arena rows 0 … rows − 1; waits."""
        assert self._candidates is not None
        self.device.enter()
        return self._candidates.find(rows, k, banned, cu_banned)

    def greedy(self, buffers: Any, first: int, count: int) -> Ints:
        """Token of arena rows from ``first`` on: what was drawn, else the greatest logit's id."""
        self.device.enter()
        if not (first in self._drawn and first + count - 1 in self._drawn):
            self._argmax(buffers, first, count)
            self._readbacks.begin(first, count)
            self._drawn = range(0)
        return self._readbacks.tokens(first, count)

    def forget_recorded(self) -> None:
        """Drop every recorded list and graph (ops were replaced), and the user's own kernels."""
        if self._candidates is not None:
            self._candidates.forget_recorded()
        super().forget_recorded()

    def _argmax(self, buffers: Any, first: int, count: int) -> None:
        rows = slice(first, first + count)
        self.ops.argmax(buffers.logits[rows], out=self._chosen[rows])

    def _pad(self, region: InputRegion, shape: Any, padded: Any) -> int:
        return self._input_layout.used_bytes(pad_translation(region.arrays, shape, padded))

    def _is_decode(self, padded: Any) -> bool:
        """Whether a sweep runs one row of each sequence; first sweeps run two."""
        return isinstance(padded, DecodeShape) and padded.max_rows == 1

    def _record(self, network: Any, buffers: Any, padded: Any) -> Recording:
        recording = Recording()
        ops = bind(self.functions, Queue(self.device, self.workspace, recording))
        network.forward(ops, buffers.view(padded))
        return recording

    def _choose(self, buffers: Any, shape: Any, table: SamplingTable) -> None:
        self._drawn = range(0)
        if table.num_rows:
            first, count = shape.first_logits, shape.logits
            self._argmax(buffers, first, count)
            self._sampling.run(table, self.workspace)
            self._readbacks.begin(first, count)
            self._drawn = range(first, first + count)
