"""Products that follow each other in a recorded step, joined into cooperative kernels.

Between two layers of attention a step is a row of products and norms, each of which waits for the
one before. Launches that say what they compute (``ChainPart``) are joined, where nothing else
stands between them, into one launch of ``gemm_chain``: it has the same bits, and reads the weights
of a product while the one before still ends. Steps of up to ``RUNGS[-1]`` rows gain by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from atlas_kernels.chain_plan import (
    CHAIN_TILES,
    GATED,
    MAX_STEPS,
    NORM,
    OWN_NORM,
    ChainStep,
    chain_rung,
    row_view,
    unit_columns,
    weight_view,
)
from atlas_kernels.grid_barrier import COUNTER_BYTES

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import KernelLaunch, Launch, Recording

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice
    from atlas.backends.cuda.pack import DeviceMatrix

_SLAB_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, eq=False)
class ChainPart:
    """What one launch computes: a norm of rows (no ``weight``), or a product of bfloat16.

    ``norm`` and ``eps`` beside a weight: the product's rows are normalised first, and ``normed`` is
    where they may lie. ``option`` and ``is_gated`` as ``gemm_step`` has them.
    """

    x: DeviceArray
    out: DeviceArray
    weight: DeviceMatrix | None = None
    bias: DeviceArray | None = None
    residual: DeviceArray | None = None
    option: int = 0
    is_gated: bool = False
    norm: DeviceArray | None = None
    eps: float = 0.0
    normed: DeviceArray | None = None

    @property
    def rows(self) -> int:
        """Of activations."""
        return len(self.x)


class Chains:
    """The programs of a device's chains, each with its counters; they live as long as the device.

    A step that is recorded again finds its programs here: a bucket's buffers are always the same.

    Attributes
    ----------
    is_used : bool
        Whether ``join`` joins anything: ``gemm_chain`` is for sm_90a.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.is_used = device.arch == "sm_90a"
        self._places: dict[bytes, tuple[int, int]] = {}
        self._own_rows: dict[int, DeviceArray] = {}
        self._slabs: list[int] = []
        self._next = self._left = 0

    def join(self, recording: Recording) -> Recording:
        """The same step with chains in place of the launches that they join."""
        if not self.is_used:
            return recording
        launches: list[Launch] = []
        for run in _runs(recording.launches):
            parts = [item.part for item in run if isinstance(item, KernelLaunch) and item.part]
            if sum(part.weight is not None for part in parts) < 2:
                launches += run
            else:
                launches.append(self._launch(parts))
        return Recording(launches, recording.keep)

    def _launch(self, parts: list[ChainPart]) -> KernelLaunch:
        m = parts[0].rows
        steps = [step for part in parts for step in self._steps(part)]
        program, counters = self._place(steps)
        name = f"gemm_chain_bf16_{chain_rung(m)}"
        return KernelLaunch(name, (self._device.num_sms, 1), (program, counters, len(steps), m))

    def _steps(self, part: ChainPart) -> Iterator[ChainStep]:
        """A part's steps: one, or a norm and a product where several rows are normalised."""
        if part.norm is None:
            yield self._product(part, part.x)
            return
        target = part.out if part.weight is None else part.normed
        assert target is not None
        norm = ChainStep(
            kind=NORM, k=part.x.shape[1], source=part.x.address, source_stride=part.x.strides[0],
            norm=part.norm.address, eps=part.eps,
        )  # fmt: skip
        if part.weight is None or part.rows > 1:
            yield replace(norm, target=target.address, target_stride=target.strides[0])
            if part.weight is not None:
                yield self._product(part, target)
            return
        own = self._own(part.x.shape[1])
        product = self._product(part, own)
        yield replace(
            product, kind=product.kind | OWN_NORM, source=norm.source, norm=norm.norm, eps=norm.eps,
            target=own.address, target_stride=own.strides[0],
        )  # fmt: skip

    def _product(self, part: ChainPart, x: DeviceArray) -> ChainStep:
        weight, out, gated, k = part.weight, part.out, part.is_gated, x.shape[1]
        assert weight is not None
        tile, maps = CHAIN_TILES[chain_rung(part.rows) or 0], self._device.tensor_maps
        columns = weight.rows // 2 if gated else weight.rows
        box, stride = unit_columns(columns, self._device.num_sms, gated=gated), x.strides[0]
        blocks = tile.blocks(2 * box if gated else box)
        copies = len(x) if x is self._own_rows.get(k) else 1
        w_view = weight_view(weight.rows, k, box, blocks, gated=gated)
        x_view = row_view(len(x) // copies, k, stride, tile, blocks, copies)
        return ChainStep(
            kind=GATED if gated else 0,
            map_w=maps.address(weight.values, *w_view),
            map_x=maps.address(x, *x_view),
            bias=part.bias.address if part.bias is not None else 0,
            residual=part.residual.address if part.residual is not None else 0,
            residual_stride=part.residual.strides[0] if part.residual is not None else 0,
            out=out.address,
            out_stride=out.strides[0],
            option=part.option,
            columns=columns,
            k=k,
            box=box,
            units=-(-columns // box),
            blocks=blocks,
        )

    def _own(self, k: int) -> DeviceArray:
        """A row for each thread block to normalise into; chains run one after another."""
        if k not in self._own_rows:
            shape = (self._device.num_sms, k)
            self._own_rows[k] = DeviceArray(self._take(2 * shape[0] * k), shape, "bfloat16")
        return self._own_rows[k]

    def _place(self, steps: list[ChainStep]) -> tuple[int, int]:
        """Addresses of a program and of its counters."""
        words = np.array([word for step in steps for word in step.words()], np.int64)
        key = words.tobytes()
        if key not in self._places:
            device = self._device
            counters = self._take(len(steps) * COUNTER_BYTES)
            program = self._take(words.nbytes)
            device.fill(counters, len(steps) * COUNTER_BYTES)
            device.copy_in(program, words.ctypes.data, words.nbytes)
            device.synchronize()  # later launches find them, on whatever stream
            self._places[key] = program, counters
        return self._places[key]

    def _take(self, nbytes: int) -> int:
        nbytes = -(-nbytes // 256) * 256
        if nbytes > self._left:
            size = max(_SLAB_BYTES, nbytes)
            self._slabs.append(self._device.allocate(size, "programs of chains"))
            self._next, self._left = self._slabs[-1], size
        address = self._next
        self._next, self._left = self._next + nbytes, self._left - nbytes
        return address

    def close(self) -> None:
        """Free them; idempotent."""
        while self._slabs:
            self._device.free(self._slabs.pop())
        self._places.clear()
        self._own_rows.clear()
        self._left = 0


def _runs(launches: list[Launch]) -> Iterator[list[Launch]]:
    """Launches in order: such as can be joined together, every other one alone."""
    run: list[Launch] = []
    rows, steps = 0, 0
    for item in launches:
        part = item.part if isinstance(item, KernelLaunch) else None
        if part is None or chain_rung(part.rows) is None:
            yield from ([run] if run else [])
            yield [item]
            run, steps = [], 0
            continue
        if run and (part.rows != rows or steps + 2 > MAX_STEPS):
            yield run
            run, steps = [], 0
        run.append(item)
        rows, steps = part.rows, steps + 2
    if run:
        yield run
