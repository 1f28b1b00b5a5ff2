"""Rotary position embedding, alone and fused with what stands around it in a layer.

Pairs (i, i + R/2) of a head's first R dimensions are rotated; the rest passes. The table is float32
[P, 2, R/2]: cosines, then sines, of every position. In float32: first · cos − second · sin and
second · cos + first · sin, two products and a sum each, no fused multiply-add.

A warp takes a head, its lanes two neighbouring pairs each (``_scalar``: one). Rows are addressed by
strides in bytes, the heads of a row are contiguous.

Source: Su et al., "RoFormer" (2021), arXiv 2104.09864, eq. 34, with rotate-half pairing.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.kv_store import copy_head, pool_offset
from atlas_kernels.norm import head_factor
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import load_b32
from atlas_kernels.ptx_warp import block_x, block_y, lane_id, lanes, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access, row_variants

THREADS = 128  # four heads a thread block
WIDTH = 2  # a head of 128 elements is 32 pairs of neighbouring pairs


def rotate_head(rows: Access) -> Any:
    """A device function: a warp rotates a head; ``target`` may be ``source``."""
    load, store, item = rows.load, rows.store, rows.item_bytes
    add, mul, scale, width = rows.add, rows.mul, rows.scale, rows.width
    load_table = access("f32", width).load_constant

    @device
    def rotate(source, target, angles, half, dim):
        i = i32(lane_id() * width)
        while i < half:
            first, second = load(source + i * item), load(source + (half + i) * item)
            cos, sin = load_table(angles + i * 4), load_table(angles + (half + i) * 4)
            turned = scale(mul(second, sin), f32(-1))
            store(target + i * item, add(mul(first, cos), turned))
            store(target + (half + i) * item, add(mul(second, cos), mul(first, sin)))
            i = i32(i + lanes() * width)
        i = i32(2 * half + lane_id() * width)
        while i < dim:
            store(target + i * item, load(source + i * item))
            i = i32(i + lanes() * width)

    return rotate


def rotate_normed_head(rows: Access) -> Any:
    """A device function: rmsnorm of a head, then rotation, without a rounding in between."""
    load, store, item = rows.load, rows.store, rows.item_bytes
    add, mul, scale, width = rows.add, rows.mul, rows.scale, rows.width
    load_table = access("f32", width).load_constant
    factor_of = head_factor(rows)

    @device
    def normed(source, weight, i, factor):
        return mul(scale(load(source + i * item), factor), load_table(weight + i * 4))

    @device
    def rotate(source, target, weight, angles, half, dim, eps):
        factor = factor_of(source, dim, eps)
        i = i32(lane_id() * width)
        while i < half:
            first = normed(source, weight, i, factor)
            second = normed(source, weight, half + i, factor)
            cos, sin = load_table(angles + i * 4), load_table(angles + (half + i) * 4)
            turned = scale(mul(second, sin), f32(-1))
            store(target + i * item, add(mul(first, cos), turned))
            store(target + (half + i) * item, add(mul(second, cos), mul(first, sin)))
            i = i32(i + lanes() * width)
        i = i32(2 * half + lane_id() * width)
        while i < dim:
            store(target + i * item, normed(source, weight, i, factor))
            i = i32(i + lanes() * width)

    return rotate


@kernel(
    "rope",
    args="ptr ptr ptr i32 i32 i32 i64",
    threads=THREADS,
    variants=row_variants(WIDTH),
)
def make_rope(rows: Access) -> Any:
    """Rotate x [T, H, K] in place; grid (rows, ⌈heads / 4⌉). R = 2 · ``half``."""
    item = rows.item_bytes
    rotate = rotate_head(rows)

    def rope(x, positions, table, heads, dim, half, x_stride):
        launch_dependents()
        wait_prerequisites()
        head = block_y() * (THREADS // 32) + (thread_x() >> 5)
        if head < heads:
            angles = table + i64(load_b32(positions + block_x() * 4)) * half * 8
            at = x + block_x() * x_stride + i64(head) * dim * item
            rotate(at, at, angles, half, 2 * half)

    return rope


@kernel(
    "rope_kv_store",
    args="ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i64 i64 i64",
    threads=THREADS,
    variants=row_variants(WIDTH),
)
def make_rope_kv_store(rows: Access) -> Any:
    """Rotate q in place, rotate k into its pool, copy v into its pool.

    q [T, H, K], k and v [T, HK, K], which may be columns of one array; the pools as in
    ``kv_store``. Grid (rows, ⌈(H + 2 HK) / 4⌉). k itself is left as it was. A row with a negative
    slot is padding and is skipped.
    """
    item = rows.item_bytes
    rotate, copy = rotate_head(rows), copy_head(rows)

    def rope_kv_store(
        q, k, v, positions, slots, table, k_pool, v_pool,
        heads, kv_heads, dim, half, q_stride, k_stride, v_stride,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        row, head = i64(block_x()), i64(block_y() * (THREADS // 32) + (thread_x() >> 5))
        slot = load_b32(slots + row * 4)
        if slot < 0 or head >= heads + 2 * kv_heads:
            return
        angles = table + i64(load_b32(positions + row * 4)) * half * 8
        if head < heads:
            at = q + row * q_stride + head * dim * item
            rotate(at, at, angles, half, 2 * half)
        elif head < heads + kv_heads:
            head -= heads
            target = k_pool + pool_offset(slot, head, kv_heads, dim) * item
            rotate(k + row * k_stride + head * dim * item, target, angles, half, dim)
        else:
            head -= heads + kv_heads
            target = v_pool + pool_offset(slot, head, kv_heads, dim) * item
            copy(v + row * v_stride + head * dim * item, target, dim)

    return rope_kv_store


@kernel(
    "norm_rope_kv_store",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i64 i64 i64 f32",
    threads=THREADS,
    variants=row_variants(WIDTH),
)
def make_norm_rope_kv_store(rows: Access) -> Any:
    """``rope_kv_store`` with the heads of q and k normalised first (Qwen3, Gemma 3).

    In float32 the bits are those of ``rmsnorm_heads`` and ``rope_kv_store`` one after the other; in
    bf16 this saves a rounding.
    """
    item = rows.item_bytes
    rotate, copy = rotate_normed_head(rows), copy_head(rows)

    def norm_rope_kv_store(
        q, k, v, q_weight, k_weight, positions, slots, table, k_pool, v_pool,
        heads, kv_heads, dim, half, q_stride, k_stride, v_stride, eps,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        row, head = i64(block_x()), i64(block_y() * (THREADS // 32) + (thread_x() >> 5))
        slot = load_b32(slots + row * 4)
        if slot < 0 or head >= heads + 2 * kv_heads:
            return
        angles = table + i64(load_b32(positions + row * 4)) * half * 8
        if head < heads:
            at = q + row * q_stride + head * dim * item
            rotate(at, at, q_weight, angles, half, dim, eps)
        elif head < heads + kv_heads:
            head -= heads
            target = k_pool + pool_offset(slot, head, kv_heads, dim) * item
            source = k + row * k_stride + head * dim * item
            rotate(source, target, k_weight, angles, half, dim, eps)
        else:
            head -= heads + kv_heads
            target = v_pool + pool_offset(slot, head, kv_heads, dim) * item
            copy(v + row * v_stride + head * dim * item, target, dim)

    return norm_rope_kv_store
