"""Decode steps whose input ids never leave the device."""

from __future__ import annotations

from atlas_kernels._cuda import i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import load_b32, store_b32
from atlas_kernels.ptx_warp import block_x, thread_x
from atlas_kernels.registry import kernel

THREADS = 128


@kernel("feed_tokens", args="ptr ptr i32", threads=THREADS)
def feed_tokens(ids, chosen, rows):
    """ids[i] = chosen[−2 − ids[i]] wherever ids[i] ≤ −2; grid (⌈rows / 128⌉).

    The host writes −2 − r for "what the step before chose for its logits row r".
    """
    launch_dependents()
    wait_prerequisites()
    i = block_x() * THREADS + thread_x()
    if i < rows:
        place = ids + i64(i) * 4
        source = -2 - load_b32(place)
        if source >= 0:
            store_b32(place, load_b32(chosen + i64(source) * 4))
