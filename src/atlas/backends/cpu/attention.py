"""Paged attention: launches.

Step tokens and prompt tokens run the same bodies here. A step with few rows shares the segments of
each row out over the threads and merges them; a step with many rows gives each thread whole tiles
of rows. Both compute the same bits.
"""

from __future__ import annotations

from functools import partial

from atlas.backends.cpu.activation import sigmoid_gate
from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.backends.cpu.norm import rmsnorm
from atlas.backends.cpu.rope import rope
from atlas.backends.cpu.target import simd_level
from atlas.errors import CapabilityError, ShapeError
from atlas.ops.attention import SEGMENT, step_then_gate
from atlas.ops.check import match_dims

_LANES = 16
QUERIES = 4


def kv_store(
    queue: Queue, k: Array, v: Array, slots: Array, *, k_pool: Array, v_pool: Array
) -> None:
    sizes = match_dims("T HK K", k, "T HK K", v, dtype="float32")
    match_dims(f"{sizes['T']}", slots, dtype="int32")
    kind = pool_kind(k_pool, v_pool, sizes["HK"], sizes["K"])
    args: Args = (address(k), k.strides[0], address(v), v.strides[0], sizes["T"], sizes["HK"])
    args += (sizes["K"], k_pool.shape[3], address(slots), address(k_pool), address(v_pool))
    queue.launch(f"attention.kv_store_{kind}", args, (k, v, slots, k_pool, v_pool))


def prepare_heads(
    queue: Queue,
    q: Array,
    k: Array,
    v: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    norm_eps: float,
    positions: Array,
    rope_table: Array,
    slots: Array,
    *,
    k_pool: Array,
    v_pool: Array,
) -> None:
    if q_norm is not None and k_norm is not None:
        rmsnorm(queue, q, q_norm, norm_eps, out=q)
        rmsnorm(queue, k, k_norm, norm_eps, out=k)
    rope(queue, q, positions, rope_table)
    rope(queue, k, positions, rope_table)
    kv_store(queue, k, v, slots, k_pool=k_pool, v_pool=v_pool)


def attention_step(
    queue: Queue,
    q: Array,
    k: Array,
    v: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    norm_eps: float,
    rope_table: Array,
    slots: Array,
    block_tables: Array,
    cu_rows: Array,
    max_rows: int,
    positions: Array,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    k_pool: Array,
    v_pool: Array,
    out: Array,
) -> None:
    prepare_heads(
        queue, q, k, v, q_norm, k_norm, norm_eps, positions, rope_table, slots,
        k_pool=k_pool, v_pool=v_pool,
    )  # fmt: skip
    attention_prefill(
        queue, q, k_pool, v_pool, block_tables, cu_rows, positions, scale, window, softcap, out=out
    )


attention_step_gated = partial(
    step_then_gate, {"attention_step": attention_step, "sigmoid_gate": sigmoid_gate}
)


def attention_prefill(
    queue: Queue,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    cu_rows: Array,
    positions: Array,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    out: Array,
    first_rows: Array | None = None,
) -> None:
    sizes = match_dims("T H K", q, "T H K", out, dtype="float32")
    match_dims("N M", block_tables, f"{sizes['T']}", positions, "N1", cu_rows, dtype="int32")
    if first_rows is None:
        first_rows = cu_rows
    else:
        match_dims("N M", block_tables, "N", first_rows, dtype="int32")
    kind = pool_kind(k_pool, v_pool, k_pool.shape[1], sizes["K"])
    rows, heads, kv_heads, dim = sizes["T"], sizes["H"], k_pool.shape[1], sizes["K"]
    if not out.flags.c_contiguous:
        raise ShapeError("out must be contiguous")
    threads = queue.device.threads
    wide = -(-dim // _LANES) * _LANES * 4
    scratch_bytes = QUERIES * SEGMENT * 4 + 2 * QUERIES * wide
    segments = -(-block_tables.shape[1] * k_pool.shape[3] // SEGMENT)
    row_bytes = 64 + wide
    shared_out = threads > 1 and rows * kv_heads < 4 * threads
    partial_bytes = rows * heads * segments * row_bytes if shared_out else 0
    scratch = queue.device.scratch(threads * scratch_bytes + partial_bytes)
    partials = address(scratch) + threads * scratch_bytes
    args: Args = (address(q), q.strides[0], address(k_pool), address(v_pool), address(block_tables))
    args += (block_tables.strides[0], address(cu_rows), address(positions), len(cu_rows) - 1)
    args += (heads, kv_heads, dim, k_pool.shape[3], float_bits(scale), window or 0)
    args += (float_bits(softcap or 0.0), address(out), address(scratch), scratch_bytes)
    args += (address(first_rows),)
    keep = (q, k_pool, v_pool, block_tables, cu_rows, first_rows, positions, out, scratch)
    if not shared_out:
        queue.launch(f"attention.fused_{kind}", args, keep)
        return
    args += (partials, segments, row_bytes)
    queue.launch(f"attention.segments_{kind}", args, keep)
    merge = (address(positions), rows, heads, dim, window or 0, address(out), partials, segments)
    queue.launch("attention.merge", (*merge, row_bytes, address(scratch), scratch_bytes), keep)


def pool_kind(k_pool: Array, v_pool: Array, kv_heads: int, dim: int) -> str:
    """``f32`` or ``f16``, after checking the pools' shapes."""
    match_dims(f"B {kv_heads} {dim} S", k_pool, f"B {kv_heads} S {dim}", v_pool)
    if k_pool.shape[3] % _LANES:
        raise ShapeError(f"block size is {k_pool.shape[3]}; allowed: multiples of {_LANES}")
    if k_pool.dtype != v_pool.dtype or k_pool.dtype.name not in ("float32", "float16"):
        raise ShapeError(
            f"pools are {k_pool.dtype} and {v_pool.dtype}; allowed: float32 or float16"
        )
    if k_pool.dtype.name == "float32":
        return "f32"
    if simd_level() == "plain":
        raise CapabilityError("float16 KV needs F16C; this CPU target allows float32")
    return "f16"
