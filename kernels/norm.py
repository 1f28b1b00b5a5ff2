"""RMS normalisation of rows and of heads, and layer normalisation of rows.

Order of a row's Σ x²: thread i of ``ROW_THREADS`` takes the vectors i, i + ROW_THREADS, … of
``width`` neighbouring elements, ascending, by fused multiply-add; the threads' sums are added by
``block_sum``. Order of a head's: lane l takes the vectors l, l + 32, …, then ``warp_sum``. Neither
depends on the number of rows. Then x · rsqrt(mean + eps) · weight, from left to right, and one
rounding. Rows and heads are addressed by strides in bytes.

Layer normalisation sums a row twice in the order of RMS normalisation's rows, with
``LAYER_THREADS`` threads: x, then (x − mean)². Then (x − mean) · rsqrt(variance + eps), times the
weight plus the bias in one rounding, and the rounding of the result.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), arXiv 1910.07467; Ba,
Kiros and Hinton, "Layer Normalization" (2016), arXiv 1607.06450.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.ptx_async import (
    copy4,
    copy16,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import fast_rsqrt, vector_fma, vector_shift, vector_sum
from atlas_kernels.ptx_memory import load_shared_f32, shared_buffer
from atlas_kernels.ptx_state import shared_vector
from atlas_kernels.ptx_warp import (
    block_sum,
    block_x,
    block_y,
    lane_id,
    lanes,
    num_threads_x,
    shuffle_f32,
    thread_x,
    warp_sums,
)
from atlas_kernels.registry import kernel
from atlas_kernels.tuples import each
from atlas_kernels.vector import Access, access, row_variants

ROW_THREADS = 512  # 4,096 bf16 elements are one vector of 8 a thread, kept in registers
LAYER_THREADS = 256  # rows of 1,024 or 2,048, where encoder-decoders have layer normalisation
HEAD_THREADS = 128  # four heads a thread block
HEAD_WIDTH = 2  # a head of 64 elements fills the warp

_copied = copy_wait(0)


def _row_blocks(rows: Access) -> int:
    """Thread blocks on an SM: what their registers allow without spills."""
    return 3 if rows.type == "bf16" else 2


def _early_weights(width: int) -> tuple[Any, Any, Any]:
    """``place()``, ``ask(place, address)`` before the wait, ``asked(place)`` → the first weights.

    By way of shared memory: the assembler moves a load into registers behind the wait, to where
    the weights are used, and then their latency comes on top of the row's.
    """
    buffer = shared_buffer("atlas_norm_weights", 4 * width * ROW_THREADS)
    copy, at_once = (copy4, 1) if width < 4 else (copy16, 4)
    asked = shared_vector(width) if width >= 4 else device(lambda at: (load_shared_f32(at),))

    @device
    def place():
        return i32(buffer() + thread_x() * (4 * width))

    @device
    def ask(place, address):
        for i in range(width // at_once):
            copy(i32(place + i * (4 * at_once)), address + i * (4 * at_once))

    return place, ask, asked


@kernel(
    "rmsnorm",
    args="ptr ptr ptr i32 i64 i64 f32",
    threads=ROW_THREADS,
    min_blocks=_row_blocks,
    variants=row_variants(),
)
def make_rmsnorm(rows: Access) -> Any:
    """out = x / sqrt(mean(x²) + eps) · weight; grid (rows). ``out`` may be ``x``."""
    load, store, zero, item = rows.load, rows.store, rows.zero, rows.item_bytes
    mul, scale, add_squares, width = rows.mul, rows.scale, rows.add_squares, rows.width
    load_weight = access("f32", width).load_constant
    place_of, ask_weights, asked_weights = _early_weights(width)

    def rmsnorm(x, weight, out, dim, x_stride, out_stride, eps):
        launch_dependents()
        first = thread_x() * width
        source = x + block_x() * x_stride
        values, place = zero(), place_of()
        if first < dim:
            ask_weights(place, weight + first * 4)
        copy_commit()
        wait_prerequisites()
        if first < dim:
            values = load(source + first * item)
        total = add_squares(f32(0), values)
        step = num_threads_x() * width  # unknown to the compiler: unrolled loops take registers
        i = first + step
        while i < dim:
            total = add_squares(total, load(source + i * item))
            i += step
        factor = fast_rsqrt(block_sum(total) / f32(dim) + eps)
        target = out + block_x() * out_stride
        _copied()
        if first < dim:
            store(target + first * item, mul(scale(values, factor), asked_weights(place)))
        i = first + step
        while i < dim:
            scaled = scale(load(source + i * item), factor)
            store(target + i * item, mul(scaled, load_weight(weight + i * 4)))
            i += step

    return rmsnorm


@kernel(
    "add_rmsnorm",
    args="ptr ptr ptr ptr i32 i64 i64 i64 f32",
    threads=ROW_THREADS,
    min_blocks=_row_blocks,
    variants=row_variants(),
)
def make_add_rmsnorm(rows: Access) -> Any:
    """residual += x, then out = rmsnorm(residual); grid (rows). ``out`` may be ``x``.

    The sum is rounded to the residual's type before it is normalised: the bits are those of ``add``
    and ``rmsnorm`` one after the other.
    """
    load, store, zero, item = rows.load, rows.store, rows.zero, rows.item_bytes
    add, mul, scale, width = rows.add, rows.mul, rows.scale, rows.width
    add_squares, round = rows.add_squares, rows.round
    load_weight = access("f32", width).load_constant

    def add_rmsnorm(x, residual, weight, out, dim, x_stride, residual_stride, out_stride, eps):
        launch_dependents()
        first = thread_x() * width
        source = x + block_x() * x_stride
        kept = residual + block_x() * residual_stride
        weights = values = zero()
        if first < dim:
            weights = load_weight(weight + first * 4)
        wait_prerequisites()
        if first < dim:
            values = round(add(load(source + first * item), load(kept + first * item)))
            store(kept + first * item, values)
        total = add_squares(f32(0), values)
        step = num_threads_x() * width
        i = first + step
        while i < dim:
            more = round(add(load(source + i * item), load(kept + i * item)))
            store(kept + i * item, more)
            total = add_squares(total, more)
            i += step
        factor = fast_rsqrt(block_sum(total) / f32(dim) + eps)
        target = out + block_x() * out_stride
        if first < dim:
            store(target + first * item, mul(scale(values, factor), weights))
        i = first + step
        while i < dim:
            scaled = scale(load(kept + i * item), factor)
            store(target + i * item, mul(scaled, load_weight(weight + i * 4)))
            i += step

    return add_rmsnorm


@kernel(
    "layernorm",
    args="ptr ptr ptr ptr i32 i64 i64 f32",
    threads=LAYER_THREADS,
    variants=row_variants(),
)
def make_layernorm(rows: Access) -> Any:
    """out = (x − mean) / sqrt(variance + eps) · weight + bias; grid (rows).

    ``out`` may be ``x``.
    """
    load, store, zero, item, width = rows.load, rows.store, rows.zero, rows.item_bytes, rows.width
    scale, add_squares, load_vector = (
        rows.scale,
        rows.add_squares,
        access("f32", width).load_constant,
    )
    add_up, shift, fma = vector_sum(width), vector_shift(width), vector_fma(width)

    def layernorm(x, weight, bias, out, dim, x_stride, out_stride, eps):
        launch_dependents()
        first = thread_x() * width
        source = x + block_x() * x_stride
        weights = biases = values = zero()
        if first < dim:
            weights, biases = load_vector(weight + first * 4), load_vector(bias + first * 4)
        wait_prerequisites()
        if first < dim:
            values = load(source + first * item)
        total = add_up(f32(0), values)
        step = num_threads_x() * width  # unknown to the compiler: unrolled loops take registers
        i = first + step
        while i < dim:
            total = add_up(total, load(source + i * item))
            i += step
        away = f32(0) - block_sum(total) / f32(dim)
        total = f32(0)
        if first < dim:
            values = shift(values, away)
            total = add_squares(total, values)
        i = first + step
        while i < dim:
            total = add_squares(total, shift(load(source + i * item), away))
            i += step
        factor = fast_rsqrt(block_sum(total) / f32(dim) + eps)
        target = out + block_x() * out_stride
        if first < dim:
            store(target + first * item, fma(scale(values, factor), weights, biases))
        i = first + step
        while i < dim:
            scaled = scale(shift(load(source + i * item), away), factor)
            weights, biases = load_vector(weight + i * 4), load_vector(bias + i * 4)
            store(target + i * item, fma(scaled, weights, biases))
            i += step

    return layernorm


@device
def _of_lane(lane, _, value):
    return shuffle_f32(value, lane)


def mean_factors(count: int) -> Any:
    """A device function: a lane's sums of squares of ``count`` heads → 1 / sqrt(mean(x²) + eps).

    ``count`` is a power of two; every lane gets all factors, and computes one of them.
    """
    sums, spread = warp_sums(count), each(count, _of_lane)
    owners = tuple(i * 32 // count for i in range(count))

    @device
    def factor(totals, dim, eps):
        return fast_rsqrt(sums(totals) / f32(dim) + eps)

    if count == 1:
        return device(lambda totals, dim, eps: (factor(totals, dim, eps),))
    return device(lambda totals, dim, eps: spread(owners, owners, factor(totals, dim, eps)))


def head_factors(rows: Access, count: int = 1) -> Any:
    """A device function: 1 / sqrt(mean(x²) + eps) of ``count`` heads, computed by a warp."""
    load, add_squares = rows.load, rows.add_squares
    width, item = rows.width, rows.item_bytes
    load_each = each(count, device(lambda head, _, at: load(head + at)))
    add_each = each(count, device(lambda total, values, _: add_squares(total, values)))
    factors_of, nothing = mean_factors(count), each(count, device(lambda head, _, zero: f32(0)))

    @device
    def factors(heads, dim, eps):
        totals = nothing(heads, heads, 0)
        i = i32(lane_id() * width)
        while i < dim:
            totals = add_each(totals, load_each(heads, heads, i * item), 0)
            i = i32(i + lanes() * width)
        return factors_of(totals, dim, eps)

    return factors


@kernel(
    "rmsnorm_heads",
    args="ptr ptr ptr i32 i32 i64 i64 i64 i64 f32",
    threads=HEAD_THREADS,
    variants=row_variants(HEAD_WIDTH),
)
def make_rmsnorm_heads(rows: Access) -> Any:
    """``rmsnorm`` of each head of [T, H, K]; grid (rows, ⌈heads / 4⌉). ``out`` may be ``x``."""
    load, store, item = rows.load, rows.store, rows.item_bytes
    mul, scale, width = rows.mul, rows.scale, rows.width
    load_weight = access("f32", width).load_constant
    factors_of = head_factors(rows)

    def rmsnorm_heads(
        x, weight, out, heads, dim, x_stride, x_head_stride, out_stride, out_head_stride, eps
    ):
        launch_dependents()
        wait_prerequisites()
        head = block_y() * (HEAD_THREADS // 32) + (thread_x() >> 5)
        if head < heads:
            source = x + block_x() * x_stride + i64(head) * x_head_stride
            target = out + block_x() * out_stride + i64(head) * out_head_stride
            factor = factors_of((source,), dim, eps)[0]
            for i in range(lane_id() * width, dim, 32 * width):
                scaled = scale(load(source + i * item), factor)
                store(target + i * item, mul(scaled, load_weight(weight + i * 4)))

    return rmsnorm_heads
