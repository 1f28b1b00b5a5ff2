"""What turns paged attention into attention over a whole source."""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import load_i32, store_i32


@body("cross_attention.last_positions")
def last_positions(thread, num_threads, args):
    """positions[t] = length of row t's source − 1."""
    cu_rows, source_lens, num_sources, positions = args[0], args[1], args[2], args[3]
    for n in range(thread, num_sources, num_threads):
        last = load_i32(source_lens + n * 4) - 1
        for row in range(load_i32(cu_rows + n * 4), load_i32(cu_rows + (n + 1) * 4)):
            store_i32(positions + row * 4, last)
