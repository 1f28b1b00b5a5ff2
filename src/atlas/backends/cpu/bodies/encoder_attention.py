"""An encoder's keys and values as blocks of a cache."""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import load_f32, load_i32, store_f32, store_i32
from atlas.backends.cpu.bodies.vectors import device

BLOCK = 16


@device
def lay_out_head(source_k, source_v, dim, offset, key_at, value_at):
    for i in range(dim):
        store_f32(key_at + (i * BLOCK + offset) * 4, load_f32(source_k + i * 4))
        store_f32(value_at + (offset * dim + i) * 4, load_f32(source_v + i * 4))


@body("encoder_attention.lay_out")
def lay_out(thread, num_threads, args):
    """Keys [B, H, K, 16], values [B, H, 16, K], tables, and every row's last position."""
    k, k_stride, v, v_stride, cu_rows, num_seqs = (
        args[0],
        args[1],
        args[2],
        args[3],
        args[4],
        args[5],
    )
    num_heads, dim, keys, values = args[6], args[7], args[8], args[9]
    tables, table_stride, positions = args[10], args[11], args[12]
    plane = num_heads * dim * BLOCK
    first_block, item = 0, 0
    for n in range(num_seqs):
        start, stop = load_i32(cu_rows + n * 4), load_i32(cu_rows + (n + 1) * 4)
        num_blocks = (stop - start + BLOCK - 1) // BLOCK
        for row in range(start, stop):
            item += 1
            if item % num_threads != thread:
                continue
            block, offset = first_block + (row - start) // BLOCK, (row - start) % BLOCK
            store_i32(positions + row * 4, stop - start - 1)
            store_i32(tables + n * table_stride + (row - start) // BLOCK * 4, block)
            for head in range(num_heads):
                at = (block * plane + head * dim * BLOCK) * 4
                lay_out_head(
                    k + row * k_stride + head * dim * 4,
                    v + row * v_stride + head * dim * 4,
                    dim,
                    offset,
                    keys + at,
                    values + at,
                )
        first_block += num_blocks
