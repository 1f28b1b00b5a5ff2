"""Attention of an encoder: launches.

Keys and values are laid out in the scratch as a cache's blocks would be, and the bodies of paged
attention run over them with every row at its sequence's last position.
"""

from __future__ import annotations

from atlas.backends.cpu.attention import QUERIES
from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.errors import ShapeError
from atlas.ops.attention import SEGMENT
from atlas.ops.check import match_dims

_BLOCK = 16  # keys side by side in a vector


def encoder_attention(
    queue: Queue, q: Array, k: Array, v: Array, cu_rows: Array, scale: float, *, out: Array
) -> None:
    sizes = match_dims("T H K", q, "T H K", k, "T H K", v, "T H K", out, dtype="float32")
    match_dims("N1", cu_rows, dtype="int32")
    if not out.flags.c_contiguous:
        raise ShapeError("out must be contiguous")
    rows, heads, dim, seqs = sizes["T"], sizes["H"], sizes["K"], len(cu_rows) - 1
    blocks = rows // _BLOCK + seqs  # at most: a sequence's last block may be partly filled
    table = -(-rows // _BLOCK)  # entries of a sequence at most
    threads = queue.device.threads
    wide = -(-dim // _BLOCK) * 64
    per_thread = QUERIES * SEGMENT * 4 + 2 * QUERIES * wide
    plane = blocks * heads * dim * _BLOCK * 4 + 64
    parts = (threads * per_thread, plane, plane, seqs * table * 4, rows * 4)
    scratch = queue.device.scratch(sum(-(-part // 64) * 64 for part in parts))
    places = [address(scratch)]
    for part in parts:
        places.append(places[-1] + -(-part // 64) * 64)
    work, keys, values, tables, positions = places[:5]
    keep = (q, k, v, cu_rows, out, scratch)
    store: Args = (address(k), k.strides[0], address(v), v.strides[0], address(cu_rows), seqs)
    store += (heads, dim, keys, values, tables, table * 4, positions)
    queue.launch("encoder_attention.lay_out", store, keep)
    args: Args = (address(q), q.strides[0], keys, values, tables, table * 4, address(cu_rows))
    args += (positions, seqs, heads, heads, dim, _BLOCK, float_bits(scale), 0, float_bits(0.0))
    args += (address(out), work, per_thread, address(cu_rows))
    queue.launch("attention.fused_f32", args, keep)
