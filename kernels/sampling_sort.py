"""Sorting by one thread block: a bitonic network over int64 in device memory.

Every comparison puts the lesser element first (the first step of a merge compares mirrored places),
so that places past the end count as greatest without being there. Pieces of ``TILE`` elements are
sorted and merged in shared memory.

Source: Batcher, "Sorting Networks and Their Applications" (1968).
"""

from __future__ import annotations

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import (
    load_b64,
    load_shared_b64,
    shared_buffer,
    store_b64,
    store_shared_b64,
)
from atlas_kernels.ptx_warp import sync_threads, thread_x

THREADS = 512
TILE = 4096
tile_buffer = shared_buffer("atlas_sampling_tile", 8 * TILE)
"""For the kernel to call, once: each function that calls it has a buffer of its own."""


@device
def _lower_place(pair, distance):
    """The first place of a pair when pairs are ``distance`` apart within blocks of twice that."""
    inside = i32(distance - 1)
    return i32(((pair & ~inside) << 1) | (pair & inside))


@device
def _compare_tile(tile, count, pairs, distance, mask):
    for pair in range(thread_x(), pairs, THREADS):
        low = _lower_place(i32(pair), distance)
        high = i32(low ^ mask)
        if high < count:
            a, b = load_shared_b64(tile + low * 8), load_shared_b64(tile + high * 8)
            if a > b:
                store_shared_b64(tile + low * 8, b)
                store_shared_b64(tile + high * 8, a)
    sync_threads()


@device
def _compare(keys, count, pairs, distance, mask):
    for pair in range(thread_x(), pairs, THREADS):
        low = _lower_place(i32(pair), distance)
        high = i32(low ^ mask)
        if high < count:
            a, b = load_b64(keys + i64(low) * 8), load_b64(keys + i64(high) * 8)
            if a > b:
                store_b64(keys + i64(low) * 8, b)
                store_b64(keys + i64(high) * 8, a)
    sync_threads()


@device
def _merge_tile(tile, count, pairs, distance):
    while distance > 0:
        _compare_tile(tile, count, pairs, distance, distance)
        distance = i32(distance >> 1)


@device
def _in_tile(tile, keys, count, is_first):
    """Sort a piece, or finish its part of a wider merge."""
    thread = thread_x()
    for j in range(thread, count, THREADS):
        store_shared_b64(tile + j * 8, load_b64(keys + i64(j) * 8))
    sync_threads()
    padded = i32(2)
    while padded < count:
        padded = i32(padded << 1)
    pairs = i32(padded >> 1)
    size = i32(2) if is_first else padded
    while size <= padded:
        if is_first:
            _compare_tile(tile, count, pairs, i32(size >> 1), i32(size - 1))
        _merge_tile(tile, count, pairs, i32(size >> 2) if is_first else pairs)
        size = i32(size << 1)
    for j in range(thread, count, THREADS):
        store_b64(keys + i64(j) * 8, load_shared_b64(tile + j * 8))
    sync_threads()


@device
def sort(tile, keys, count):
    """Sort int64 [count] in place, ascending, by all threads of the thread block.

    First every piece by itself, then merges of 2, 4, … pieces: their wide steps in device memory,
    the rest in shared memory again.
    """
    size = i32(TILE)
    while size == TILE or size < 2 * count:
        if size > TILE:
            half = i32(size >> 1)
            pairs = i32(quotient(i32(count + size - 1), size) * half)
            _compare(keys, count, pairs, half, i32(size - 1))
            distance = i32(size >> 2)
            while distance >= TILE:
                _compare(keys, count, pairs, distance, distance)
                distance = i32(distance >> 1)
        for first in range(0, count, TILE):
            own = i32(min(i32(TILE), i32(count - first)))
            _in_tile(tile, keys + i64(first) * 8, own, size == TILE)
        size = i32(size << 1)
