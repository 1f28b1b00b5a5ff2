"""RMS normalisation of the groups of a row, with a gate before or after.

A warp takes a group. Order of its Σ x²: lane l takes the vectors l, l + 32, … of ``width``
neighbouring elements, ascending, by fused multiply-add, then ``warp_sum``. Then (x · rsqrt) ·
weight, · silu(gate) before or after, and one rounding. Heads of 64, 128 or 256, whose vectors leave
lanes idle, are taken several to a warp, with the same bits.

Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 7.1.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.activation import over_pairs
from atlas_kernels.gates import silu
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import fast_rsqrt, quotient
from atlas_kernels.ptx_warp import (
    block_x,
    block_y,
    lane_id,
    shuffle_xor_f32,
    thread_x,
    warp_sum,
)
from atlas_kernels.recurrence_shapes import NORM_THREADS as THREADS
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access, row_variants

WARPS = THREADS // 32


@device
def _times_silu(value, gate):
    return value * silu(gate)


@kernel(
    "gated_rmsnorm",
    args="ptr ptr ptr ptr i32 i32 i32 i64 i64 i64 i64 f32",
    threads=THREADS,
    variants=row_variants(),
)
def make_gated_rmsnorm(rows: Access) -> Any:
    """The op ``gated_rmsnorm``; grid (rows, ⌈groups / 4⌉).

    ``x`` [T, D] float32; ``gate`` and ``out`` of the variant's type; ``weight`` float32, that of
    the next group ``weight_stride`` bytes on, 0 where it serves every group. Strides in bytes.
    """
    width, item = rows.width, rows.item_bytes
    floats = access("f32", width)
    load, load_weight, load_gate, put = floats.load, floats.load_constant, rows.load, rows.store
    mul, scale, add_squares = rows.mul, rows.scale, rows.add_squares
    gated = over_pairs(_times_silu, width)

    def gated_rmsnorm(
        x, gate, weight, out, groups, size, norm_first,
        x_stride, gate_stride, weight_stride, out_stride, eps,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        group = block_y() * WARPS + (thread_x() >> 5)
        if group >= groups:
            return
        first = i64(group) * size
        source = x + block_x() * x_stride + first * 4
        gates = gate + block_x() * gate_stride + first * item
        target = out + block_x() * out_stride + first * item
        factors = weight + group * weight_stride
        total = f32(0)
        for i in range(lane_id() * width, size, 32 * width):
            value = load(source + i * 4)
            if norm_first == 0:
                value = gated(value, load_gate(gates + i * item))
            total = add_squares(total, value)
        factor = fast_rsqrt(warp_sum(total) / f32(size) + eps)
        for i in range(lane_id() * width, size, 32 * width):
            value, z = load(source + i * 4), load_gate(gates + i * item)
            if norm_first == 0:
                value = gated(value, z)
            value = mul(scale(value, factor), load_weight(factors + i * 4))
            if norm_first != 0:
                value = gated(value, z)
            put(target + i * item, value)

    return gated_rmsnorm


@kernel(
    "gated_rmsnorm_heads",
    args="ptr ptr ptr ptr i32 i32 i64 i64 i64 f32",
    threads=THREADS,
    min_blocks=4,
    variants={
        f"{type}_d{size}": (access(type, 8), size)
        for type in ("bf16", "f32")
        for size in (64, 128, 256)
    },
)
def make_gated_rmsnorm_heads(rows: Access, size: int) -> Any:
    """``gated_rmsnorm`` with the norm first and one weight for all heads of ``size`` elements.

    Grid (⌈rows · heads / (``HEADS[size]`` · 4)⌉): a warp takes ``HEADS[size]`` neighbouring heads,
    several side by side and four one after the other, whose loads are all under way at once.
    ``num_heads`` counts those of all rows.
    """
    width, item = rows.width, rows.item_bytes
    lanes = size // width  # of a head
    beside = 32 // lanes
    floats = access("f32", width)
    load, load_weight, load_gate, put = floats.load, floats.load_constant, rows.load, rows.store
    mul, scale, add_squares = rows.mul, rows.scale, rows.add_squares
    gated = over_pairs(_times_silu, width)

    @device
    def sum_of(value):
        """``warp_sum`` of lanes of which only those of a head have numbers."""
        distance = i32(lanes // 2)
        while distance > 0:
            value = value + shuffle_xor_f32(value, distance)
            distance = i32(distance >> 1)
        return value

    @device
    def ask(x, gate, place, x_stride, gate_stride):
        values = load(x + place[0] * x_stride + i64(place[1]) * 4)
        return values, load_gate(gate + place[0] * gate_stride + i64(place[1]) * item)

    @device
    def place_of(head, heads):
        """A head's row, and the column of the lane's first element."""
        row = quotient(head, heads)
        column = (head - row * heads) * size + (lane_id() & (lanes - 1)) * width
        return i32(row), i32(column)

    @device
    def finish(values, gates, weights, eps):
        factor = fast_rsqrt(sum_of(add_squares(f32(0), values)) * f32(1 / size) + eps)
        return gated(mul(scale(values, factor), weights), gates)

    def gated_rmsnorm_heads(
        x, gate, weight, out, heads, num_heads, x_stride, gate_stride, out_stride, eps
    ):
        launch_dependents()
        weights = load_weight(weight + (lane_id() & (lanes - 1)) * (width * 4))
        warp, last = block_x() * WARPS + (thread_x() >> 5), num_heads - 1
        h0 = i32(warp * (4 * beside) + quotient(lane_id(), lanes))
        h1, h2, h3 = i32(h0 + beside), i32(h0 + 2 * beside), i32(h0 + 3 * beside)
        p0, p1 = place_of(i32(min(h0, last)), heads), place_of(i32(min(h1, last)), heads)
        p2, p3 = place_of(i32(min(h2, last)), heads), place_of(i32(min(h3, last)), heads)
        wait_prerequisites()
        x0, z0 = ask(x, gate, p0, x_stride, gate_stride)
        x1, z1 = ask(x, gate, p1, x_stride, gate_stride)
        x2, z2 = ask(x, gate, p2, x_stride, gate_stride)
        x3, z3 = ask(x, gate, p3, x_stride, gate_stride)
        x0, x1 = finish(x0, z0, weights, eps), finish(x1, z1, weights, eps)
        x2, x3 = finish(x2, z2, weights, eps), finish(x3, z3, weights, eps)
        if h0 <= last:
            put(out + p0[0] * out_stride + i64(p0[1]) * item, x0)
        if h1 <= last:
            put(out + p1[0] * out_stride + i64(p1[1]) * item, x1)
        if h2 <= last:
            put(out + p2[0] * out_stride + i64(p2[1]) * item, x2)
        if h3 <= last:
            put(out + p3[0] * out_stride + i64(p3[1]) * item, x3)

    return gated_rmsnorm_heads
