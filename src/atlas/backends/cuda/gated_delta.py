"""The gated delta rule: launches.

K = V = 64 or 128, states in float32. A layer's step rows take one kernel from its projection to
what its output projection reads; a prompt's rows run in chunks (see ``recurrent``).
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas_kernels.recurrence_shapes import CHUNK, matrix_bytes
from atlas_kernels.recurrence_shapes import CONV_TAPS as TAPS

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import SHORT, Args, is_aligned, match, require
from atlas.backends.cuda.conv import causal_conv_step
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.norm import gated_rmsnorm
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

DIMS = (64, 128)
"""Dimensions of a head, of keys and values, that the kernels take."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """Sizes of a call: key heads, value heads, dimensions of each, sequences."""

    key_heads: int
    value_heads: int
    dim: int
    seqs: int


def gated_delta_step(
    queue: Queue,
    qkv: DeviceArray,
    a: DeviceArray,
    b: DeviceArray,
    decay_log: DeviceArray,
    dt_bias: DeviceArray,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    *,
    states: DeviceArray,
    out: DeviceArray,
) -> None:
    sizes = _check(qkv, a, b, decay_log, dt_bias, slots, cu_rows, positions, states)
    _check_plain(sizes, qkv, out)
    rows = ranges(cu_rows)
    _step(queue, sizes, (qkv, a, b, decay_log, dt_bias, slots), rows, states, out)


def gated_delta_prefill(
    queue: Queue,
    qkv: DeviceArray,
    a: DeviceArray,
    b: DeviceArray,
    decay_log: DeviceArray,
    dt_bias: DeviceArray,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    *,
    states: DeviceArray,
    out: DeviceArray,
) -> None:
    sizes = _check(qkv, a, b, decay_log, dt_bias, slots, cu_rows, positions, states)
    _check_plain(sizes, qkv, out)
    keys, values, dim = sizes.key_heads, sizes.value_heads, sizes.dim
    inputs = (qkv, a, b, decay_log, dt_bias)
    if len(qkv) < CHUNK:
        _step(queue, sizes, (*inputs, slots), ranges(cu_rows), states, out)
        return
    plan = plan_chunks(queue, slots, cu_rows, positions, chunk_parts(keys, values, dim))
    _step(queue, sizes, (*inputs, slots), plan.before, states, out)
    args: Args = (*inputs, plan.chunk_rows, plan.num_chunks, *plan.work, keys, values)
    name = f"gated_delta_chunk_d{dim}_{SHORT[a.dtype]}"
    queue.launch(name, (plan.most, values), (*args, qkv.strides[0], a.strides[0]))
    form, columns = sweep_form(queue, values, dim)
    args = (*plan.work, plan.chunk_rows, plan.cu_chunks, slots, states, out, keys, values)
    grid = (sizes.seqs * values * (dim // columns), 1)
    queue.launch(f"gated_delta_prefill_d{dim}_{form}", grid, (*args, out.strides[0]))
    _step(queue, sizes, (*inputs, slots), plan.after, states, out)


def chunk_parts(keys: int, values: int, dim: int) -> tuple[int, ...]:
    """Bytes that a chunk keeps: k, q and W, U, P and the logarithms of decays."""
    wide, u = matrix_bytes(dim), 2 * CHUNK * dim
    p, logs = matrix_bytes(CHUNK), 4 * CHUNK
    return keys * wide, keys * wide, values * wide, values * u, values * p, values * logs


def gated_delta_mixer_step(
    queue: Queue,
    qkv: DeviceArray,
    gate: DeviceArray,
    a: DeviceArray,
    b: DeviceArray,
    conv_weight: DeviceArray,
    norm_weight: DeviceArray,
    norm_eps: float,
    decay_log: DeviceArray,
    dt_bias: DeviceArray,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    *,
    states: DeviceArray,
    tails: DeviceArray,
    convolved: DeviceArray,
    recurred: DeviceArray,
    out: DeviceArray,
) -> None:
    sizes = _check(qkv, a, b, decay_log, dt_bias, slots, cu_rows, positions, states)
    rows, channels = qkv.shape
    values, dim = sizes.value_heads, sizes.dim
    if len(conv_weight) != TAPS:
        causal_conv_step(
            queue, qkv, conv_weight, None, slots, cu_rows, positions, tails=tails, out=convolved
        )
        heads = recurred.reshape(rows, values, dim, copy=False)
        gated_delta_step(
            queue, convolved, a, b, decay_log, dt_bias, slots, cu_rows, positions,
            states=states, out=heads,
        )  # fmt: skip
        gated_rmsnorm(queue, recurred, gate, norm_weight, norm_eps, dim, True, out=out)
        return
    width = f"{rows} {values * dim}"
    match(qkv.dtype, f"{rows} {channels}", qkv, width, gate, width, out)
    match(qkv.dtype, f"{rows} {values}", a)
    match("float32", f"{TAPS} {channels}", conv_weight, f"{dim}", norm_weight)
    match("float32", f"S {TAPS - 1} {channels}", tails)
    check_pool("conv_weight", conv_weight)
    check_pool("tails", tails)
    check_rows(qkv=qkv, gate=gate, out=out)
    if not is_aligned(2 * qkv.itemsize, qkv, gate, out):
        raise ShapeError(f"qkv {qkv}, gate {gate}, out {out}; allowed: rows at pairs of elements")
    counters = queue.scratch(4 * sizes.seqs * sizes.key_heads, zeroed=True)
    args: Args = (qkv, gate, a, b, conv_weight, norm_weight, decay_log, dt_bias, slots, slots)
    args += (*ranges(cu_rows), states, tails, counters, out, sizes.key_heads, values)
    args += (qkv.strides[0], gate.strides[0], a.strides[0], out.strides[0], norm_eps)
    name = f"gated_delta_mixer_step_d{dim}_{SHORT[qkv.dtype]}"
    queue.launch(name, (sizes.seqs * values, 1), args)


def _step(
    queue: Queue,
    sizes: _Heads,
    inputs: tuple[DeviceArray, ...],
    rows: tuple[int, int],
    states: DeviceArray,
    out: DeviceArray,
) -> None:
    """Rows one after another: those of each sequence that ``rows``, begins and ends, name."""
    *given, slots = inputs
    qkv, a = given[:2]
    args: Args = (*given, slots, slots, *rows, states, out, sizes.key_heads, sizes.value_heads)
    args += (qkv.strides[0], a.strides[0], out.strides[0])
    name = f"gated_delta_step_d{sizes.dim}_{SHORT[a.dtype]}"
    queue.launch(name, (sizes.seqs * sizes.value_heads, 1), args)


def _check(
    qkv: DeviceArray,
    a: DeviceArray,
    b: DeviceArray,
    decay_log: DeviceArray,
    dt_bias: DeviceArray,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    states: DeviceArray,
) -> _Heads:
    sizes = match("float32", "S HV K V", states)
    values, dim = sizes["HV"], sizes["K"]
    require(
        dim == sizes["V"] and dim in DIMS,
        "a gated delta head's key and value dimension", f"{dim} and {sizes['V']}",
        "one of " + ", ".join(map(str, DIMS)) + " for both",
    )  # fmt: skip
    match_dims(f"T {values}", a, f"T {values}", b, "T C", qkv)
    match("float32", f"{values}", decay_log, f"{values}", dt_bias)
    check_pool("states", states)
    seqs = check_sequences(slots, cu_rows, positions, len(qkv))
    if a.dtype != b.dtype or a.strides[0] != b.strides[0]:
        raise ShapeError(f"a {a} and b {b}; allowed: columns of one projection")
    check_rows(qkv=qkv, a=a, b=b)
    key_heads, rest = divmod(qkv.shape[1] - values * dim, 2 * dim)
    if rest or key_heads < 1 or values % key_heads:
        raise ShapeError(
            f"qkv has {qkv.shape[1]} columns; allowed: 2·HK·{dim} + {values}·{dim} "
            f"with HK a divisor of {values}"
        )
    return _Heads(key_heads, values, dim, seqs)


def _check_plain(sizes: _Heads, qkv: DeviceArray, out: DeviceArray) -> None:
    """What the convolution left, and where the rule's own output goes."""
    match("float32", "T C", qkv, f"T {sizes.value_heads} {sizes.dim}", out)
    check_rows(out=out)
    if not is_aligned(16, qkv) or not is_aligned(8, out):
        raise ShapeError(f"rows of qkv {qkv} and out {out} must lie at multiples of 16 and 8 bytes")
