"""Conversions between element types."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from atlas_kernels._cuda import i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_warp import block_x, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.vector import ITEM_BYTES, access

THREADS = 256
WIDTH = 8


@kernel(
    "cast",
    args="ptr ptr i64",
    threads=THREADS,
    variants={
        f"{source}_{target}": (source, target) for source, target in permutations(ITEM_BYTES, 2)
    },
)
def make_cast(source_type: str, target_type: str) -> Any:
    """out[i] = x[i], ``count`` elements, rounded to nearest even; grid (⌈count / 2048⌉).

    Both addresses are multiples of 16; ``count`` is any number. A value beyond float16 becomes
    infinite.
    """
    load, store = access(source_type, WIDTH).load, access(target_type, WIDTH).store
    load_one, store_one = access(source_type, 1).load, access(target_type, 1).store
    source_item, target_item = ITEM_BYTES[source_type], ITEM_BYTES[target_type]

    def cast(x, out, count):
        launch_dependents()
        wait_prerequisites()
        at = (i64(block_x()) * THREADS + thread_x()) * WIDTH
        if at + WIDTH <= count:
            store(out + at * target_item, load(x + at * source_item))
        else:
            for i in range(at, count):
                store_one(out + i * target_item, load_one(x + i * source_item))

    return cast
