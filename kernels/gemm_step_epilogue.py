"""What the step GEMM does with its sums: bias, residual, ReLU or act · mul, rounding, stores.

Four neighbouring columns at once: ``out``, ``bias`` and ``residual`` rows hold a multiple of four
columns and lie a multiple of 16 bytes apart.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i64
from atlas_kernels.activation import gelu_tanh_mul, silu_mul
from atlas_kernels.ptx_math import pack_bf16, unpack_bf16, vector_add
from atlas_kernels.ptx_memory import (
    load_b32x2,
    load_constant_f32x4,
    store_b32x2,
    store_f32x4,
)

add4 = vector_add(4)


@device
def _positive(value):
    """max(value, 0); NaN stays NaN."""
    return value if value > f32(0) or value != value else f32(0)


@device
def finish(total, row, column, bias, residual, out, residual_stride, out_stride, option):
    """out = total + bias in float32, rounded once; or that rounded to bf16, plus the residual.

    So a product can be stored before it is added to the residual stream, as a model in bf16 does.
    A zero address leaves bias or residual out. ``bias`` is float32, ``residual`` bf16 (it may be
    ``out``). ``out`` is bf16; float32 where ``option`` is 1; what is below 0 becomes 0 where it is
    2.
    """
    if bias != 0:
        total = add4(total, load_constant_f32x4(bias + i64(column) * 4))
    if residual != 0:
        words = load_b32x2(residual + i64(row) * residual_stride + i64(column) * 2)
        a, b = unpack_bf16(words[0])
        c, d = unpack_bf16(words[1])
        t0, t1 = unpack_bf16(pack_bf16(total[0], total[1]))
        t2, t3 = unpack_bf16(pack_bf16(total[2], total[3]))
        total = add4((t0, t1, t2, t3), (a, b, c, d))
    target = out + i64(row) * out_stride
    if option == 1:
        store_f32x4(target + i64(column) * 4, total)
    else:
        if option == 2:
            first, second = _positive(total[0]), _positive(total[1])
            total = (first, second, _positive(total[2]), _positive(total[3]))
        words = (pack_bf16(total[0], total[1]), pack_bf16(total[2], total[3]))
        store_b32x2(target + i64(column) * 2, words)


@device
def _gate_pair(gate, up, is_gelu):
    """act · mul of two pairs, both rounded to bf16 first: as if they had been stored."""
    g0, g1 = unpack_bf16(pack_bf16(gate[0], gate[1]))
    u0, u1 = unpack_bf16(pack_bf16(up[0], up[1]))
    if is_gelu != 0:
        return f32(gelu_tanh_mul(g0, u0)), f32(gelu_tanh_mul(g1, u1))
    return f32(silu_mul(g0, u0)), f32(silu_mul(g1, u1))


@device
def finish_gated(gate, up, row, column, num_columns, bias, out, out_stride, is_gelu):
    """out = act(gate + bias) · (up + its bias): the bits of a product stored and then gated.

    ``act`` is silu, or gelu with tanh.
    """
    if bias != 0:
        gate = add4(gate, load_constant_f32x4(bias + i64(column) * 4))
        up = add4(up, load_constant_f32x4(bias + i64(num_columns + column) * 4))
    a, b = _gate_pair((gate[0], gate[1]), (up[0], up[1]), is_gelu)
    c, d = _gate_pair((gate[2], gate[3]), (up[2], up[3]), is_gelu)
    target = out + i64(row) * out_stride + i64(column) * 2
    store_b32x2(target, (pack_bf16(a, b), pack_bf16(c, d)))
