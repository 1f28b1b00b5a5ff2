"""Paged attention: launches.

The pools are [B, HK, 16, K] in bfloat16. Step rows go through one kernel, ``attention_step``; more
rows a sequence than it takes, through the two that it stands for, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas_kernels.attention_plan import (
    SPLIT,
    STEP_DIMS,
    WGMMA_KEYS,
    WORKERS_PER_SM,
    fresh_rows,
    is_few,
    pool_view,
    prefill_rows,
    prefill_variant,
    rehearsal,
    step_variant,
    wgmma_tiles,
    wgmma_variant,
)

from atlas.backends.cuda.activation import sigmoid_gate
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import (
    Args,
    activation_type,
    is_aligned,
    match,
    require,
    require_contiguous_rows,
    row_suffix,
)
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.rope import HEADS_PER_WARP, WARPS_PER_BLOCK, WIDTH, require_rotation
from atlas.errors import ShapeError

BLOCK_LEN = 16
"""Tokens in a block of the pools."""
_PARTIAL_BYTES = 96 << 20  # of scratch for partial results; beyond it one worker has all splits


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a call: rows, query and KV heads, dimensions of a head."""

    rows: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def kv_store(
    queue: Queue,
    k: DeviceArray,
    v: DeviceArray,
    slots: DeviceArray,
    *,
    k_pool: DeviceArray,
    v_pool: DeviceArray,
) -> None:
    sizes = _check_pools(k, k, v, slots, k_pool, v_pool)
    type = activation_type(k, v, k_pool, v_pool)
    variant = type + row_suffix(sizes.dim, WIDTH, k, v, k_pool, v_pool)
    args = (k, v, slots, k_pool, v_pool, sizes.kv_heads, sizes.dim, k.strides[0], v.strides[0])
    grid = (sizes.rows, -(-sizes.kv_heads // WARPS_PER_BLOCK))
    queue.launch(f"kv_store_{variant}", grid, args)


def prepare_heads(
    queue: Queue,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm: DeviceArray | None,
    k_norm: DeviceArray | None,
    norm_eps: float,
    positions: DeviceArray,
    rope_table: DeviceArray,
    slots: DeviceArray,
    *,
    k_pool: DeviceArray,
    v_pool: DeviceArray,
) -> None:
    sizes = _check_pools(q, k, v, slots, k_pool, v_pool)
    match("int32", f"{sizes.rows}", positions)
    half = match("float32", "P 2 R", rope_table)["R"]
    require_rotation(rope_table, sizes.dim)
    require_contiguous_rows(q=q, k=k, v=v)
    type = activation_type(q, k, v, k_pool, v_pool)
    suffix = row_suffix(half, WIDTH, q, k, v, k_pool, v_pool, rope_table)
    suffix = suffix or row_suffix(sizes.dim, WIDTH, q)
    prefix = ""
    weights: Args = ()
    eps: Args = ()
    if q_norm is not None and k_norm is not None:
        match("float32", f"{sizes.dim}", q_norm, f"{sizes.dim}", k_norm)
        prefix, weights, eps = "norm_", (q_norm, k_norm), (norm_eps,)
    args: Args = (
        q, k, v, *weights, positions, slots, rope_table, k_pool, v_pool,
        sizes.heads, sizes.kv_heads, sizes.dim, half,
        q.strides[0], k.strides[0], v.strides[0], *eps,
    )  # fmt: skip
    warps = -(-sizes.heads // HEADS_PER_WARP) + 2 * -(-sizes.kv_heads // HEADS_PER_WARP)
    grid = (sizes.rows, -(-warps // WARPS_PER_BLOCK))
    queue.launch(f"{prefix}rope_kv_store_{type}{suffix}", grid, args)


def attention_step(
    queue: Queue,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm: DeviceArray | None,
    k_norm: DeviceArray | None,
    norm_eps: float,
    rope_table: DeviceArray,
    slots: DeviceArray,
    block_tables: DeviceArray,
    cu_rows: DeviceArray,
    max_rows: int,
    positions: DeviceArray,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    k_pool: DeviceArray,
    v_pool: DeviceArray,
    out: DeviceArray,
) -> None:
    attention_step_gated(
        queue, q, k, v, None, q_norm, k_norm, norm_eps, rope_table, slots, block_tables, cu_rows,
        max_rows, positions, scale, window, softcap, k_pool=k_pool, v_pool=v_pool, out=out,
    )  # fmt: skip


def attention_step_gated(
    queue: Queue,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    gate: DeviceArray | None,
    q_norm: DeviceArray | None,
    k_norm: DeviceArray | None,
    norm_eps: float,
    rope_table: DeviceArray,
    slots: DeviceArray,
    block_tables: DeviceArray,
    cu_rows: DeviceArray,
    max_rows: int,
    positions: DeviceArray,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    k_pool: DeviceArray,
    v_pool: DeviceArray,
    out: DeviceArray,
) -> None:
    sizes = _check_pools(q, k, v, slots, k_pool, v_pool)
    seqs = _check_tables(q, block_tables, cu_rows, positions, out)
    half = match("float32", "P 2 R", rope_table)["R"]
    require_rotation(rope_table, sizes.dim)
    tile = _step_tile(sizes, max_rows)
    is_fused = max_rows <= fresh_rows(sizes.dim, tile) and half % WIDTH == 0
    gates: Args = (0, 0)
    if gate is not None:
        match("bfloat16", f"{sizes.rows} {sizes.heads * sizes.dim}", gate)
        require_contiguous_rows(gate=gate)
        if is_fused and is_aligned(16, gate):
            gates = gate, gate.strides[0]
    norms: Args = (0, 0)
    if q_norm is not None and k_norm is not None:
        match("float32", f"{sizes.dim}", q_norm, f"{sizes.dim}", k_norm)
        norms = (q_norm, k_norm)
    if not is_fused:
        prepare_heads(
            queue, q, k, v, q_norm, k_norm, norm_eps, positions, rope_table, slots,
            k_pool=k_pool, v_pool=v_pool,
        )  # fmt: skip
    at_once = sequences_at_once(sizes, max_rows)
    for first in range(0, seqs, at_once):
        part = slice(first, first + at_once)
        tables, own_rows = block_tables[part], cu_rows[first : first + at_once + 1]
        sweep = share_sweep(queue, sizes, max_rows, tile, tables, window)
        heads: Args = (sizes.heads, sizes.kv_heads)
        pools: Args = (k_pool, v_pool, out, tables, own_rows, positions, *sweep.scratch)
        if is_fused:
            args: Args = (q, k, v, gates[0], *norms, rope_table, slots, *pools, *heads, half)
            args += (*sweep.numbers, sweep.rehearsal)
            args += (q.strides[0], k.strides[0], v.strides[0], gates[1])
            args += (out.strides[0], scale, softcap or 0.0, norm_eps)
            device = queue.device
            variant = step_variant(
                sizes.dim, tile, sweep.grid[0], arch=device.arch, num_sms=device.num_sms
            )
            queue.launch(f"attention_step_{variant}", sweep.grid, args)
        else:
            args = (q, *pools, *heads, *sweep.numbers, q.strides[0], out.strides[0])
            args += (scale, softcap or 0.0)
            queue.launch(f"attention_decode_d{sizes.dim}_r{tile}", sweep.grid, args)
    if gate is not None and gates[0] == 0:
        flat = out.reshape(gate.shape)
        sigmoid_gate(queue, flat, gate, out=flat)


@dataclass(frozen=True, slots=True)
class Sweep:
    """How a sweep over keys is shared out: grid, scratch, the numbers that tell of them; and how
    far a thread block goes through its code while it waits."""

    grid: tuple[int, int]
    scratch: tuple[int, int, int]
    numbers: tuple[int, int, int, int]
    rehearsal: int


def _step_tile(sizes: Heads, max_rows: int) -> int:
    """Query rows of a thread block."""
    is_wide = max_rows * sizes.group > 16 or max_rows > fresh_rows(sizes.dim, 16)
    return 32 if is_wide and sizes.dim <= 128 else 16


def _result_bytes(sizes: Heads, max_rows: int) -> int:
    """Partial results of a split of one sequence."""
    return max_rows * sizes.heads * (sizes.dim + 2) * 4


def sequences_at_once(sizes: Heads, max_rows: int) -> int:
    """As many as the partial results of two splits of each have room for."""
    return max(1, _PARTIAL_BYTES // (2 * _result_bytes(sizes, max_rows)))


def share_sweep(
    queue: Queue, sizes: Heads, max_rows: int, tile: int, tables: DeviceArray, window: int | None
) -> Sweep:
    """Of the queue's next launch. Workers beyond the splits of a sequence end at once; one that has
    all of them keeps a running result, for which two places are enough."""
    (seqs, blocks), rows = tables.shape, max_rows * sizes.group
    columns = seqs * sizes.kv_heads * -(-rows // tile)
    splits = -(-blocks * BLOCK_LEN // SPLIT)
    if window is not None:
        splits = min(splits, -(-(window + max_rows) // SPLIT) + 1)
    at_once = WORKERS_PER_SM * queue.device.num_sms
    few = is_few(columns, queue.device.num_sms)
    if few:
        at_once -= at_once % columns  # all of them, so that none waits for another's place
    workers = min(splits, -(-at_once // columns))
    if seqs * splits * _result_bytes(sizes, max_rows) > _PARTIAL_BYTES:
        workers = 1
    room = splits if workers > 1 else min(splits, 2)
    results = seqs * room * sizes.kv_heads * rows
    partials = queue.scratch(results * (sizes.dim + 2) * 4)
    counters = queue.scratch(columns * 4, zeroed=True)
    sums = partials + results * sizes.dim * 4
    numbers = (max_rows, room, window or 0, blocks)
    far = rehearsal(queue.reading, few=few, is_early=queue.device.has_dependent_launch)
    return Sweep((columns, workers), (partials, sums, counters), numbers, far)


def attention_prefill(
    queue: Queue,
    q: DeviceArray,
    k_pool: DeviceArray,
    v_pool: DeviceArray,
    block_tables: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    out: DeviceArray,
    first_rows: DeviceArray | None = None,
) -> None:
    sizes = pools_of(q, k_pool, v_pool)
    seqs, dim = _check_tables(q, block_tables, cu_rows, positions, out), sizes.dim
    if first_rows is None:
        first_rows = cu_rows
    else:
        match("int32", f"{seqs}", first_rows)
    tables: Args = (out, block_tables, first_rows, cu_rows, positions)
    tables += (sizes.heads, sizes.kv_heads)
    limits: Args = (window or 0, block_tables.shape[1], q.strides[0], out.strides[0])
    limits += (scale, softcap or 0.0)
    if queue.device.arch == "sm_90a" and dim in WGMMA_KEYS:
        maps = tuple(_pool_map(queue, pool) for pool in (k_pool, v_pool))
        grid = (sizes.heads, wgmma_tiles(sizes.rows, seqs))
        name = f"attention_prefill_wgmma_{wgmma_variant(dim, capped=bool(softcap))}"
        queue.launch(name, grid, (q, *maps, *tables, seqs, *limits), (k_pool, v_pool))
        return
    grid = (seqs * sizes.heads, -(-sizes.rows // prefill_rows(dim)))
    name = f"attention_prefill_{prefill_variant(dim)}"
    queue.launch(name, grid, (q, k_pool, v_pool, *tables, *limits))


def _pool_map(queue: Queue, pool: DeviceArray) -> int:
    """The tensor map of a pool: boxes of one head of one block."""
    box, strides = pool_view(pool.shape[3])
    shape = (pool.shape[0] * pool.shape[1], *box[1:])
    return queue.tensor_map(pool, box, shape=shape, strides=strides)


def pools_of(q: DeviceArray, k_pool: DeviceArray, v_pool: DeviceArray) -> Heads:
    """Checks queries and pools; the sizes of the call."""
    rows, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    match("bfloat16", f"B {kv_heads} {BLOCK_LEN} {dim}", k_pool, "B HK S K", v_pool)
    if k_pool.shape != v_pool.shape or not (k_pool.is_contiguous and v_pool.is_contiguous):
        raise ShapeError(f"pools {k_pool} and {v_pool}; allowed: contiguous and of one shape")
    require(heads % kv_heads == 0, "heads / kv_heads", f"{heads} / {kv_heads}", "whole numbers")
    require(dim in STEP_DIMS, "head_dim", dim, ", ".join(map(str, STEP_DIMS)))
    return Heads(rows, heads, kv_heads, dim)


def _check_pools(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    slots: DeviceArray,
    k_pool: DeviceArray,
    v_pool: DeviceArray,
) -> Heads:
    rows, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    match(q.dtype, "T H K", q, f"{rows} {kv_heads} {dim}", k, f"{rows} {kv_heads} {dim}", v)
    match(q.dtype, f"B {kv_heads} {BLOCK_LEN} {dim}", k_pool, "B HK S K", v_pool)
    match("int32", f"{rows}", slots)
    require_contiguous_rows(q=q, k=k, v=v)
    if k_pool.shape != v_pool.shape or not (k_pool.is_contiguous and v_pool.is_contiguous):
        raise ShapeError(f"pools {k_pool} and {v_pool}; allowed: contiguous and of one shape")
    return Heads(rows, heads, kv_heads, dim)


def _check_tables(
    q: DeviceArray,
    block_tables: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    out: DeviceArray,
) -> int:
    """Checks what attention reads and writes; the number of sequences."""
    match("bfloat16", "T H K", q, "T H K", out)
    match("int32", f"{len(q)}", positions)
    require_contiguous_rows(q=q, out=out)
    return require_tables(block_tables, cu_rows)


def require_tables(block_tables: DeviceArray, cu_rows: DeviceArray) -> int:
    """Checks the tables of a call's sequences; their number."""
    seqs = match("int32", "N M", block_tables)["N"]
    match("int32", f"{seqs + 1}", cu_rows)
    if not block_tables.is_contiguous:
        raise ShapeError(f"block tables {block_tables} must be contiguous")
    return seqs
