"""Rotary position embedding, alone and fused with what stands around it in a layer.

Pairs (i, i + R/2) of a head's first R dimensions are rotated; the rest passes. The table is float32
[P, 2, R/2]: cosines, then sines, of every position. In float32: first · cos − second · sin and
second · cos + first · sin, two products and a sum each, no fused multiply-add.

A warp takes a head, or with a KV store ``HEADS`` neighbouring heads of q, of k or of v: their loads
are on their way together, and what belongs to the row is loaded once. Its lanes take two
neighbouring pairs each (``_scalar``: one). Rows are addressed by strides in bytes, the heads of a
row are contiguous.

Source: Su et al., "RoFormer" (2021), arXiv 2104.09864, eq. 34, with rotate-half pairing.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.kv_store import BLOCK_LEN, copy_heads, load_heads, pool_offset, store_heads
from atlas_kernels.norm import head_factors, mean_factors
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import opaque
from atlas_kernels.ptx_memory import load_b32
from atlas_kernels.ptx_warp import block_x, block_y, lane_id, lanes, shuffle_b32, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.tuples import each
from atlas_kernels.vector import Access, access, row_variants

THREADS = 128  # four warps a thread block
HEADS = 4  # of a warp, at most: a power of two
_SHIFT = HEADS.bit_length() - 1
WIDTH = 2  # a head of 128 elements is 32 pairs of neighbouring pairs


def _blocks(rows: Access) -> int:
    """Thread blocks of several heads a warp on an SM: what registers allow without spills."""
    return 9 if rows.type == "bf16" else 8


def _turn_heads(rows: Access, count: int) -> Any:
    """A device function: (targets, firsts, seconds, angles, places) rotates and stores.

    ``angles`` are (cosines, sines) of the pairs, ``places`` bytes to their first and second
    elements.
    """
    add, mul, scale = rows.add, rows.mul, rows.scale
    store = store_heads(rows, count)

    @device
    def first_of(first, second, angles):
        return add(mul(first, angles[0]), scale(mul(second, angles[1]), f32(-1)))

    @device
    def second_of(first, second, angles):
        return add(mul(second, angles[0]), mul(first, angles[1]))

    turn_first, turn_second = each(count, first_of), each(count, second_of)

    @device
    def turn(targets, firsts, seconds, angles, places):
        store(targets, turn_first(firsts, seconds, angles), places[0])
        store(targets, turn_second(firsts, seconds, angles), places[1])

    return turn


def rotate_heads(rows: Access, count: int = 1) -> Any:
    """A device function: a warp rotates ``count`` heads; ``targets`` may be ``sources``."""
    item, width = rows.item_bytes, rows.width
    load, store, turn = load_heads(rows, count), store_heads(rows, count), _turn_heads(rows, count)
    load_table = access("f32", width).load_constant

    @device
    def rotate(sources, targets, angles, half, dim):
        i = i32(lane_id() * width)
        while i < half:
            places = i * item, (half + i) * item
            firsts, seconds = load(sources, places[0]), load(sources, places[1])
            cos, sin = load_table(angles + i * 4), load_table(angles + (half + i) * 4)
            turn(targets, firsts, seconds, (cos, sin), places)
            i = i32(i + lanes() * width)
        i = i32(2 * half + lane_id() * width)
        while i < dim:
            store(targets, load(sources, i * item), i * item)
            i = i32(i + lanes() * width)

    return rotate


def _norm_heads(rows: Access, count: int) -> Any:
    """A device function: (vectors, factors, weights) → normalised vectors of ``count`` heads."""
    mul, scale = rows.mul, rows.scale
    return each(count, device(lambda values, factor, weights: mul(scale(values, factor), weights)))


def rotate_normed_heads(rows: Access, count: int = 1) -> Any:
    """A device function: rmsnorm of heads, then rotation, without a rounding in between."""
    item, width = rows.item_bytes, rows.width
    load, store, turn = load_heads(rows, count), store_heads(rows, count), _turn_heads(rows, count)
    load_table = access("f32", width).load_constant
    factors_of, norm = head_factors(rows, count), _norm_heads(rows, count)

    @device
    def normed(sources, weight, i, factors):
        return norm(load(sources, i * item), factors, load_table(weight + i * 4))

    @device
    def rotate(sources, targets, weight, angles, half, dim, eps):
        factors = factors_of(sources, dim, eps)
        i = i32(lane_id() * width)
        while i < half:
            firsts = normed(sources, weight, i, factors)
            seconds = normed(sources, weight, i32(half + i), factors)
            cos, sin = load_table(angles + i * 4), load_table(angles + (half + i) * 4)
            turn(targets, firsts, seconds, (cos, sin), (i * item, (half + i) * item))
            i = i32(i + lanes() * width)
        i = i32(2 * half + lane_id() * width)
        while i < dim:
            store(targets, normed(sources, weight, i, factors), i * item)
            i = i32(i + lanes() * width)

    return rotate


def _whole_heads(rows: Access, count: int) -> tuple[Any, Any]:
    """``ask`` and ``rotate`` of normalised heads that are a pair of vectors a lane, all rotated.

    ``ask(sources)`` → (firsts, seconds), loaded once: what a lane rotates is what it sums up.
    Addresses are those of the lane's own first element.
    """
    item, width, add_squares = rows.item_bytes, rows.width, rows.add_squares
    load, turn, norm = load_heads(rows, count), _turn_heads(rows, count), _norm_heads(rows, count)
    load_table = access("f32", width).load_constant
    half, factors_of = 32 * width, mean_factors(count)
    sums_of = each(count, device(lambda a, b, _: add_squares(add_squares(f32(0), a), b)))

    @device
    def ask(sources):
        return load(sources, 0), load(sources, half * item)

    @device
    def rotate(pairs, targets, weight, angles, eps):
        i = lane_id() * width
        cos, sin = load_table(angles + i * 4), load_table(angles + (half + i) * 4)
        weights = load_table(weight + i * 4), load_table(weight + (half + i) * 4)
        factors = factors_of(sums_of(pairs[0], pairs[1], 0), i32(2 * half), eps)
        firsts, seconds = norm(pairs[0], factors, weights[0]), norm(pairs[1], factors, weights[1])
        turn(targets, firsts, seconds, (cos, sin), (0, half * item))

    return ask, rotate


_spread = each(HEADS, device(lambda i, _, at: at[0] + i64(min(i32(i), at[1])) * i64(at[2])))
_NUMBERS = tuple(range(HEADS))


@device
def _addresses(place, offset):
    """Of a warp's heads, ``offset`` bytes on; the last one stands in for those that it lacks."""
    first, last, step = place
    step = opaque(step)  # else the compiler widens it once for all, and multiplies 64 bits
    return _spread(_NUMBERS, _NUMBERS, (first + offset, last, step))


@device
def _share(warp, heads, kv_heads):
    """(part, first head, how many more there are) of a row's ``warp``; the part is 0 for q, 1 for
    k, 2 for v, 3 for none."""
    q_warps = i32(i32(heads + HEADS - 1) >> _SHIFT)
    kv_warps = i32(i32(kv_heads + HEADS - 1) >> _SHIFT)
    part, index, end = i32(0), i32(warp), heads
    if index >= q_warps:
        part, index, end = i32(1), i32(index - q_warps), kv_heads
        if index >= kv_warps:
            part, index = i32(2), i32(index - kv_warps)
            if index >= kv_warps:
                part = i32(3)
    head = i32(index * HEADS)
    return part, head, i32(end - head - 1)


def _own_heads(rows: Access) -> Any:
    """A device function: which heads a warp has, and where they are and go.

    (row, slot, (q, k, v), their strides, pools, (heads, kv_heads, dim)) → (part, source, target):
    the part as in ``_share``, of padding 3; places as ``_addresses`` takes them.
    """
    item = rows.item_bytes

    @device
    def own_heads(row, slot, arrays, strides, pools, sizes):
        # A shuffle, so that the assembler knows of one way for all lanes.
        warp = block_y() * (THREADS // 32) + shuffle_b32(thread_x() >> 5, 0)
        heads, kv_heads, dim = sizes
        part, head, last = _share(warp, heads, kv_heads)
        base, stride, pool = arrays[0], strides[0], pools[0]
        if part == 1:
            base, stride = arrays[1], strides[1]
        elif part == 2:
            base, stride, pool = arrays[2], strides[2], pools[1]
        step, apart = i32(dim * item), i32(1)
        source = base + row * stride + i64(head) * i64(step)
        target = source
        if part > 0:
            target = pool + pool_offset(slot, head, kv_heads, dim) * item
            apart = i32(BLOCK_LEN)
        if slot < 0:
            part = i32(3)
        return part, (source, last, step), (target, last, i32(step * apart))

    return own_heads


@kernel(
    "rope",
    args="ptr ptr ptr i32 i32 i32 i64",
    threads=THREADS,
    variants=row_variants(WIDTH),
)
def make_rope(rows: Access) -> Any:
    """Rotate x [T, H, K] in place; grid (rows, ⌈heads / 4⌉). R = 2 · ``half``."""
    item = rows.item_bytes
    rotate = rotate_heads(rows)

    def rope(x, positions, table, heads, dim, half, x_stride):
        launch_dependents()
        wait_prerequisites()
        head = block_y() * (THREADS // 32) + (thread_x() >> 5)
        if head < heads:
            angles = table + i64(load_b32(positions + block_x() * 4)) * half * 8
            at = x + block_x() * x_stride + i64(head) * dim * item
            rotate((at,), (at,), angles, half, 2 * half)

    return rope


@kernel(
    "rope_kv_store",
    args="ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i64 i64 i64",
    threads=THREADS,
    min_blocks=_blocks,
    variants=row_variants(WIDTH),
)
def make_rope_kv_store(rows: Access) -> Any:
    """Rotate q in place, rotate k into its pool, copy v into its pool.

    q [T, H, K], k and v [T, HK, K], which may be columns of one array; the pools as in
    ``kv_store``. Grid (rows, ⌈(⌈H / ``HEADS``⌉ + 2 ⌈HK / ``HEADS``⌉) / 4⌉). k itself is left as it
    was. A row with a negative slot is padding and is skipped.
    """
    own_heads = _own_heads(rows)
    rotate, copy = rotate_heads(rows, HEADS), copy_heads(rows, HEADS)

    def rope_kv_store(
        q, k, v, positions, slots, table, k_pool, v_pool,
        heads, kv_heads, dim, half, q_stride, k_stride, v_stride,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        row = i64(block_x())
        slot, position = load_b32(slots + row * 4), load_b32(positions + row * 4)
        arrays, strides, pools = (q, k, v), (q_stride, k_stride, v_stride), (k_pool, v_pool)
        sizes = heads, kv_heads, dim
        part, source, target = own_heads(row, slot, arrays, strides, pools, sizes)
        if part > 2:
            return
        sources, targets = _addresses(source, 0), _addresses(target, 0)
        if part < 2:
            end = dim if part == 1 else i32(2 * half)
            rotate(sources, targets, table + i64(position) * half * 8, half, end)
        else:
            copy(sources, targets, dim)

    return rope_kv_store


@kernel(
    "norm_rope_kv_store",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i64 i64 i64 f32",
    threads=THREADS,
    min_blocks=_blocks,
    variants=row_variants(WIDTH),
)
def make_norm_rope_kv_store(rows: Access) -> Any:
    """``rope_kv_store`` with the heads of q and k normalised first (Qwen3, Gemma 3).

    In float32 the bits are those of ``rmsnorm_heads`` and ``rope_kv_store`` one after the other; in
    bf16 this saves a rounding. Heads of 128 dimensions (``_scalar``: 64), all of them rotated, are
    loaded once; others a second time, from L1.
    """
    whole, item, width = 32 * rows.width, rows.item_bytes, rows.width
    own_heads = _own_heads(rows)
    ask, rotate_whole = _whole_heads(rows, HEADS)
    rotate, copy = rotate_normed_heads(rows, HEADS), copy_heads(rows, HEADS)

    def norm_rope_kv_store(
        q, k, v, q_weight, k_weight, positions, slots, table, k_pool, v_pool,
        heads, kv_heads, dim, half, q_stride, k_stride, v_stride, eps,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        row = i64(block_x())
        slot, position = load_b32(slots + row * 4), load_b32(positions + row * 4)
        arrays, strides, pools = (q, k, v), (q_stride, k_stride, v_stride), (k_pool, v_pool)
        sizes = heads, kv_heads, dim
        part, source, target = own_heads(row, slot, arrays, strides, pools, sizes)
        if part > 2:
            return
        angles, weight = table + i64(position) * half * 8, q_weight if part == 0 else k_weight
        if part < 2 and half == whole and dim == 2 * whole:
            at = lane_id() * (width * item)
            pairs = ask(_addresses(source, at))
            targets = _addresses(target, at)
            rotate_whole(pairs, targets, weight, angles, eps)
        else:
            sources, targets = _addresses(source, 0), _addresses(target, 0)
            if part < 2:
                rotate(sources, targets, weight, angles, half, dim, eps)
            else:
                copy(sources, targets, dim)

    return norm_rope_kv_store
