"""Attention over a source's blocks: launch.

The sweep over keys is shared out as that of ``attention_step``, with a source for a sequence.
"""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.attention import pools_of, require_tables, sequences_at_once, share_sweep
from atlas.backends.cuda.check import Args, match, require_contiguous_rows
from atlas.backends.cuda.launch import Queue

_NARROW, _WIDE = 16, 32
"""Query rows of a thread block."""
_WIDEST_DIM = 128  # of the wide form


def cross_attention(
    queue: Queue,
    q: DeviceArray,
    k_pool: DeviceArray,
    v_pool: DeviceArray,
    source_tables: DeviceArray,
    cu_rows: DeviceArray,
    max_rows: int,
    source_lens: DeviceArray,
    scale: float,
    *,
    out: DeviceArray,
) -> None:
    sizes = pools_of(q, k_pool, v_pool)
    match("bfloat16", "T H K", q, "T H K", out)
    require_contiguous_rows(q=q, out=out)
    sources = require_tables(source_tables, cu_rows)
    match("int32", f"{sources}", source_lens)
    is_wide = max_rows * sizes.group > _NARROW and sizes.dim <= _WIDEST_DIM
    tile = _WIDE if is_wide else _NARROW
    at_once = sequences_at_once(sizes, max_rows)
    for first in range(0, sources, at_once):
        part = slice(first, first + at_once)
        tables, own_rows = source_tables[part], cu_rows[first : first + at_once + 1]
        sweep = share_sweep(queue, sizes, max_rows, tile, tables, None)
        _, room, _, blocks = sweep.numbers
        args: Args = (q, k_pool, v_pool, out, tables, own_rows, source_lens[part], *sweep.scratch)
        args += (sizes.heads, sizes.kv_heads, max_rows, room, blocks, sweep.rehearsal)
        args += (q.strides[0], out.strides[0], scale)
        queue.launch(f"cross_attention_d{sizes.dim}_r{tile}", sweep.grid, args)
