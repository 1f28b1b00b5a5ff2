"""The Mamba-2 recurrence: launches.

A state of 64, 128 or 256 a channel, in float32; a prompt's rows run in chunks (see ``recurrent``).
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas_kernels.recurrence_shapes import CHUNK, matrix_bytes
from atlas_kernels.recurrence_shapes import MAMBA2_VARIANTS as VARIANTS
from atlas_kernels.recurrence_shapes import MAMBA2_WARPS as WARPS

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import SHORT, Args, is_aligned, match, require
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.recurrent import (
    check_pool,
    check_rows,
    check_sequences,
    plan_chunks,
    ranges,
    sweep_form,
)
from atlas.errors import ShapeError
from atlas.ops.check import match_dims

SIZES = (64, 128, 256)
"""Sizes of a channel's state that the kernels take."""
HEAD_DIM = 64
"""Channels of a head that the chunked kernels take."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a call: heads, groups, channels of a head, state of a channel, sequences."""

    heads: int
    groups: int
    dim: int
    size: int
    seqs: int
    bounds: tuple[float, float]


def mamba2_step(
    queue: Queue,
    x: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    dt: DeviceArray,
    decay_log: DeviceArray,
    d: DeviceArray,
    dt_bias: DeviceArray,
    dt_min: float,
    dt_max: float,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    *,
    states: DeviceArray,
    out: DeviceArray,
) -> None:
    inputs, vectors = (x, b, c, dt), (decay_log, d, dt_bias)
    sequences = (slots, cu_rows, positions)
    sizes = _check(inputs, vectors, (dt_min, dt_max), sequences, states, out)
    _step(queue, sizes, (*inputs, *vectors), slots, ranges(cu_rows), states, out)


def mamba2_prefill(
    queue: Queue,
    x: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    dt: DeviceArray,
    decay_log: DeviceArray,
    d: DeviceArray,
    dt_bias: DeviceArray,
    dt_min: float,
    dt_max: float,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    *,
    states: DeviceArray,
    out: DeviceArray,
) -> None:
    inputs, vectors = (x, b, c, dt), (decay_log, d, dt_bias)
    sequences = (slots, cu_rows, positions)
    sizes = _check(inputs, vectors, (dt_min, dt_max), sequences, states, out)
    heads, groups, dim, size = sizes.heads, sizes.groups, sizes.dim, sizes.size
    require(dim == HEAD_DIM, "channels of a Mamba-2 head", dim, str(HEAD_DIM))
    step_inputs = (*inputs, *vectors)
    if len(x) < CHUNK:
        _step(queue, sizes, step_inputs, slots, ranges(cu_rows), states, out)
        return
    plan = plan_chunks(queue, slots, cu_rows, positions, chunk_parts(heads, groups, dim, size))
    _step(queue, sizes, step_inputs, slots, plan.before, states, out)
    args: Args = (*inputs, decay_log, dt_bias, plan.chunk_rows, plan.num_chunks, *plan.work)
    args += (heads, groups, dim, x.strides[0], dt.strides[0], *sizes.bounds)
    queue.launch(f"mamba2_chunk_n{size}_{SHORT[dt.dtype]}", (plan.most, heads), args)
    form, columns = sweep_form(queue, heads, dim)
    args = (*plan.work, x, d, plan.chunk_rows, plan.cu_chunks, slots, states, out, heads, groups)
    grid = (sizes.seqs * heads * (dim // columns), 1)
    queue.launch(f"mamba2_prefill_n{size}_{form}", grid, (*args, x.strides[0], out.strides[0]))
    _step(queue, sizes, step_inputs, slots, plan.after, states, out)


def _step(
    queue: Queue,
    sizes: _Sizes,
    inputs: tuple[DeviceArray, ...],
    slots: DeviceArray,
    rows: tuple[int, int],
    states: DeviceArray,
    out: DeviceArray,
) -> None:
    """Rows one after another: those of each sequence that ``rows``, begins and ends, name."""
    x, dt = inputs[0], inputs[3]
    args: Args = (*inputs, slots, slots, *rows, states, out, sizes.heads, sizes.groups, sizes.dim)
    args += (x.strides[0], dt.strides[0], out.strides[0], *sizes.bounds)
    variant = f"n{sizes.size}_{SHORT[dt.dtype]}"
    channels = VARIANTS[variant][1] * WARPS
    grid = (sizes.seqs * sizes.heads, -(-sizes.dim // channels))
    queue.launch(f"mamba2_step_{variant}", grid, args)


def _check(
    inputs: tuple[DeviceArray, ...],
    vectors: tuple[DeviceArray, ...],
    bounds: tuple[float, float],
    sequences: tuple[DeviceArray, DeviceArray, DeviceArray],
    states: DeviceArray,
    out: DeviceArray,
) -> _Sizes:
    x, b, c, dt = inputs
    sizes = match("float32", "T H P", x, "T G N", b, "T G N", c, "S H P N", states, "T H P", out)
    heads, groups, dim, size = (sizes[name] for name in "HGPN")
    match_dims(f"{len(x)} {heads}", dt)
    for vector in vectors:
        match("float32", f"{heads}", vector)
    check_pool("states", states)
    check_rows(x=x, b=b, c=c, dt=dt, out=out)
    seqs = check_sequences(*sequences, len(x))
    require(size in SIZES, "a Mamba-2 channel's state", size, ", ".join(map(str, SIZES)))
    channels = VARIANTS[f"n{size}_{SHORT[dt.dtype]}"][1]
    require(dim % channels == 0, "channels of a Mamba-2 head", dim, f"multiples of {channels}")
    if heads % groups:
        raise ShapeError(f"{heads} heads in {groups} groups; allowed: as many in each")
    if len(x) > 1 and not x.strides[0] == b.strides[0] == c.strides[0]:
        raise ShapeError(f"x {x}, b {b} and c {c}; allowed: columns of one array")
    if not is_aligned(16, x, b, c):
        raise ShapeError(f"rows of x {x}, b {b} and c {c} must lie at multiples of 16 bytes")
    return _Sizes(heads, groups, dim, size, seqs, bounds)


def chunk_parts(heads: int, groups: int, dim: int, size: int) -> tuple[int, ...]:
    """Bytes that a chunk keeps: b and c, x, C · Bᵀ and the logarithms of decays."""
    keys, values = groups * matrix_bytes(size), 2 * CHUNK * dim * heads
    return keys, keys, values, heads * matrix_bytes(CHUNK), heads * 4 * CHUNK
