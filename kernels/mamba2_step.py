"""The Mamba-2 recurrence, row after row: a warp holds some channels of one head's state.

A lane holds N / 32 neighbouring elements of each of ``channels`` channels, in registers; the state
is read once and written once, however many rows the sequence has. Order: h·c takes a lane's
elements ascending, then the lanes by ``gather_sums``. Rows come after one another in one loop, so K
rows give the bits of K launches.

Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 7.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gates import exponential, softplus
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import add, fma, maximum, minimum, quotient, vector_scale
from atlas_kernels.ptx_memory import (
    load_b32,
    load_constant_b32,
    load_constant_f32,
    load_f32,
    store_f32,
)
from atlas_kernels.ptx_state import (
    gather_sums,
    global_vector,
    push_and_read,
    state_load,
    state_store,
)
from atlas_kernels.ptx_warp import block_x, block_y, lane_id, shuffle_b32, thread_x
from atlas_kernels.recurrence_shapes import MAMBA2_THREADS as THREADS
from atlas_kernels.recurrence_shapes import MAMBA2_VARIANTS as VARIANTS
from atlas_kernels.recurrence_shapes import MAMBA2_WARPS as WARPS
from atlas_kernels.registry import kernel
from atlas_kernels.vector import access


@device
def time_step(time, bias, lowest, highest):
    """Δ = softplus(time + bias), between its bounds."""
    return minimum(maximum(softplus(add(time, bias)), lowest), highest)


@kernel(
    "mamba2_step",
    args="ptr " * 13 + "i32 i32 i32 i64 i64 i64 f32 f32",
    threads=THREADS,
    min_blocks=4,
    variants=VARIANTS,
)
def make_mamba2_step(size: int, channels: int, type: str) -> Any:
    """The op ``mamba2_step`` for a state of N = ``size``; grid (N · H, ⌈P / (4 · channels)⌉).

    - ``x`` [T, H, P], ``b``, ``c`` [T, G, N] float32 after the convolution, with one stride; P is a
      multiple of ``channels``; ``dt`` [T, H] of the variant's type; ``out`` [T, H, P] float32;
    - sequence n has the rows ``begins[n]`` … ``ends[n]`` − 1 (perhaps none), its state at
      ``slots[n]`` (−1: padding) of ``states`` float32 [S, H, P, N]. What comes out is written to
      ``targets[n]``, or nowhere if that is −1.

    Strides in bytes.
    """
    columns, line = size // 32, size * 4
    load_state, store_state = (
        state_load(channels, columns, line),
        state_store(channels, columns, line),
    )
    push, gather, scaled = (
        push_and_read(channels, columns),
        gather_sums(channels),
        vector_scale(channels),
    )
    row_values, column_values = global_vector(channels), global_vector(columns)
    load_time, item = access(type, 1).load, access(type, 1).item_bytes
    owners = 32 // channels  # lanes that end up with the same channel's sum

    def mamba2_step(
        x, b, c, dt, decay_log, d, dt_bias, slots, targets, begins, ends, states, out,
        heads, groups, dim, stride, dt_stride, out_stride, dt_min, dt_max,
    ):  # fmt: skip
        launch_dependents()
        lane, warp = lane_id(), shuffle_b32(thread_x() >> 5, 0)
        sequence = quotient(block_x(), heads)
        head = i32(block_x() - sequence * heads)
        first = (block_y() * WARPS + warp) * channels
        slot = load_constant_b32(slots + sequence * 4)
        target = load_constant_b32(targets + sequence * 4)
        rate = exponential(load_constant_f32(decay_log + head * 4))
        bias, skip = load_constant_f32(dt_bias + head * 4), load_constant_f32(d + head * 4)
        wait_prerequisites()
        begin, end = load_b32(begins + sequence * 4), load_b32(ends + sequence * 4)
        if first >= dim or slot < 0 or begin >= end:
            return
        group = quotient(head, quotient(heads, groups))
        within = i64(head * dim + first) * line + lane * (columns * 4)
        state = load_state(states + i64(slot) * heads * dim * line + within)
        own = (head * dim + first + quotient(lane, owners)) * 4
        values, element = x + (head * dim + first) * 4, (group * size + lane * columns) * 4
        for row in range(begin, end):
            at = row * stride
            step = time_step(load_time(dt + row * dt_stride + head * item)[0], bias, dt_min, dt_max)
            pushed = scaled(row_values(values + at), step)
            keys, reads = column_values(b + at + element), column_values(c + at + element)
            state, sums = push(state, exponential(-(rate * step)), pushed, keys, reads)
            y = fma(skip, load_f32(x + at + own), gather(sums, lane))
            if lane & (owners - 1) == 0:
                store_f32(out + row * out_stride + own, y)
        if target >= 0:
            store_state(states + i64(target) * heads * dim * line + within, state)

    return mamba2_step
