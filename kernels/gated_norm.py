"""RMS normalisation of the groups of a row, with a gate before or after.

A warp takes a group. Order of its Σ x²: lane l takes the vectors l, l + 32, … of ``width``
neighbouring elements, ascending, by fused multiply-add, then ``warp_sum``. Then (x · rsqrt) ·
weight, · silu(gate) before or after, and one rounding.

Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 7.1.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i64
from atlas_kernels.activation import over_pairs
from atlas_kernels.gates import silu
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import fast_rsqrt
from atlas_kernels.ptx_warp import block_x, block_y, lane_id, thread_x, warp_sum
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access, row_variants

THREADS = 128
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
