"""The gated delta rule, row after row: a thread block holds one value head's state in registers.

``gated_delta_step`` takes q, k and v after the convolution; ``gated_delta_mixer`` has the same
arithmetic between a layer's projections.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i32, i64
from atlas_kernels.gated_delta_head import ROWS, VARIANTS, Head, num_threads, prefetch
from atlas_kernels.ptx_async import (
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import (
    load_b32,
    load_constant_b32,
    load_constant_f32,
    load_f32x2,
    load_shared_f32x2,
    store_f32x2,
    store_shared_f32x2,
)
from atlas_kernels.ptx_state import (
    state_load,
    state_store,
)
from atlas_kernels.ptx_warp import (
    block_x,
    lane_id,
    shuffle_b32,
    sync_threads,
    thread_x,
)
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access


@kernel(
    "gated_delta_step",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i64 i64 i64",
    threads=num_threads,
    min_blocks=2,
    variants=VARIANTS,
)
def make_gated_delta_step(dim: int, rows: Access) -> Any:
    """The op ``gated_delta_step`` for K = V = ``dim``; grid (N · HV).

    - ``qkv`` [T, 2·HK·K + HV·V] float32, ``a`` and ``b`` [T, HV], ``out`` [T, HV, V] float32;
    - sequence n has the rows ``begins[n]`` … ``ends[n]`` − 1 (perhaps none), its state at
      ``slots[n]`` (−1: padding) of ``states`` float32 [S, HV, K, V]. What comes out is written to
      ``targets[n]``, or nowhere if that is −1.

    Strides in bytes.
    """
    head_of = Head(dim)
    place, advance = head_of.place(), head_of.advance()
    put_gates, put_norms = head_of.put_gates(), head_of.put_norms()
    piece_rows, threads, warps, buffer = head_of.rows, 2 * dim, head_of.warps, head_of.buffer
    load_state = state_load(piece_rows, 4, dim * 4)
    store_state = state_store(piece_rows, 4, dim * 4)
    load_gate, item, out_at = access(rows.type, 1).load, rows.item_bytes, head_of.out

    def gated_delta_step(
        qkv, a, b, decay_log, dt_bias, slots, targets, begins, ends, states, out,
        key_heads, value_heads, qkv_stride, gate_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        lane, warp, base = lane_id(), shuffle_b32(thread_x() >> 5, 0), buffer()
        sequence = quotient(block_x(), value_heads)
        head = i32(block_x() - sequence * value_heads)
        slot = load_constant_b32(slots + sequence * 4)
        target = load_constant_b32(targets + sequence * 4)
        within = ((lane >> 2) * piece_rows * dim + warp * 16 + (lane & 3) * 4) * 4
        state_bytes = dim * dim * 4
        source = states + (i64(slot) * value_heads + head) * state_bytes
        if slot >= 0:
            prefetch(source, state_bytes, threads)
        rate = load_constant_f32(decay_log + head * 4)
        bias = load_constant_f32(dt_bias + head * 4)
        wait_prerequisites()
        begin, end = load_b32(begins + sequence * 4), load_b32(ends + sequence * 4)
        if slot < 0 or begin >= end:
            return
        state = load_state(source + within)
        key_head = quotient(head, quotient(value_heads, key_heads))
        element = i32(thread_x() * 2)
        part = quotient(element, dim)  # q, k or v; for the last threads none
        first = i32((key_head if part == 0 else key_heads + key_head) * dim)
        if part == 2:
            first = i32((2 * key_heads + head) * dim)
        inputs = qkv + i64(first + (element & (dim - 1))) * 4
        row = i32(begin)
        while row < end:
            count = i32(min(ROWS, end - row))
            if part < 3:
                for j in range(count):
                    pair = load_f32x2(inputs + (row + j) * qkv_stride)
                    store_shared_f32x2(base + place(element, j), pair)
            if thread_x() < count:
                at = (row + thread_x()) * gate_stride + head * item
                time, strength = load_gate(a + at)[0], load_gate(b + at)[0]
                put_gates(base, thread_x(), time, strength, rate, bias)
            sync_threads()
            for j in range(warp, count, warps):
                put_norms(base, j)
            sync_threads()
            for j in range(count):
                state = advance(state, base, j)
            sync_threads()
            for j in range(count):
                if element < dim:
                    pair = load_shared_f32x2(base + out_at + (j * dim + element) * 4)
                    store_f32x2(out + (row + j) * out_stride + (head * dim + element) * 4, pair)
            row = i32(row + count)
        if target >= 0:
            store_state(states + (i64(target) * value_heads + head) * state_bytes + within, state)

    return gated_delta_step
