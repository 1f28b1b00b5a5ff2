"""Sorting by one thread block: a bitonic network over int64, after a distribution to bins.

Every comparison puts the lesser element first (the first step of a merge compares mirrored places),
so that places past the end count as greatest without being there. Pieces of ``TILE`` elements are
sorted and merged in shared memory. A longer list of candidates is distributed to the bins of x
first, and as many bins as a piece holds are sorted at a time.

Source: Batcher, "Sorting Networks and Their Applications" (1968).
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST
from atlas_kernels.ptx_math import bits_float, quotient
from atlas_kernels.ptx_memory import (
    atomic_add_shared_b32,
    load_b64,
    load_shared_b32,
    load_shared_b64,
    shared_buffer,
    store_b64,
    store_shared_b32,
    store_shared_b64,
)
from atlas_kernels.ptx_warp import block_max_i64, sync_threads, thread_x
from atlas_kernels.sampling_parts import bin_of, block_scan
from atlas_kernels.sampling_rows import BINS

THREADS = 512
TILE = 4096
assert 2 * THREADS == BINS, "a thread has two bins"
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


@device
def _candidate_bin(candidate, scale):
    return bin_of(f32(0) - bits_float(i32(candidate >> 32)), scale)


@device
def _distribute(bins, listed, ranked, count, scale, sums):
    """Put a list in order of bins, within a bin in any order; the bins become their ends."""
    thread = thread_x()
    store_shared_b32(bins + thread * 8, i32(0))
    store_shared_b32(bins + thread * 8 + 4, i32(0))
    sync_threads()
    for j in range(thread, count, THREADS):
        place = i32(bins + _candidate_bin(load_b64(listed + i64(j) * 8), scale) * 4)
        atomic_add_shared_b32(place, i32(1))
    sync_threads()
    low = load_shared_b32(bins + thread * 8)
    both = i32(low + load_shared_b32(bins + thread * 8 + 4))
    start = i32(i32(block_scan(f32(both), sums)[0]) - both)
    store_shared_b32(bins + thread * 8, start)
    store_shared_b32(bins + thread * 8 + 4, i32(start + low))
    sync_threads()
    for j in range(thread, count, THREADS):
        candidate = load_b64(listed + i64(j) * 8)
        place = i32(bins + _candidate_bin(candidate, scale) * 4)
        store_b64(ranked + i64(atomic_add_shared_b32(place, i32(1))) * 8, candidate)
    sync_threads()


@device
def _piece_end(bins, first):
    """The end of the last bin that ends up to ``TILE`` places on, or else of the next bin."""
    low = load_shared_b32(bins + thread_x() * 8)
    high = load_shared_b32(bins + thread_x() * 8 + 4)
    last = i32(first + TILE)
    near = high if high <= last else low
    end = i32(block_max_i64(i64(near if near <= last else first), LEAST))
    if end <= first:
        far = low if low > first else high
        end = i32(-block_max_i64(i64(-i64(far)) if far > first else i64(LEAST), LEAST))
    return end


@device
def rank(tile, bins, listed, ranked, count, scale, sums):
    """``ranked`` = the candidates of a list by probability, both int64 [count] in device memory.

    ``bins`` is shared int32 [BINS], ``sums`` shared float32 [warps].
    """
    if count > TILE:
        _distribute(bins, listed, ranked, count, scale, sums)
    else:
        for j in range(thread_x(), count, THREADS):
            store_b64(ranked + i64(j) * 8, load_b64(listed + i64(j) * 8))
        sync_threads()
    first = i32(0)
    while first < count:
        end = count
        if count > TILE:
            end = _piece_end(bins, first)
        sort(tile, ranked + i64(first) * 8, i32(end - first))
        first = end
