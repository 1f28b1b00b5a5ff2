"""Log-probabilities of the tokens that were chosen, and of the most probable ones."""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST, logit_key
from atlas_kernels.elementary import log32
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import bits_float
from atlas_kernels.ptx_memory import (
    load_b32,
    load_b64,
    load_f32,
    shared_buffer,
    store_b32,
    store_f32,
    store_shared_f32,
)
from atlas_kernels.ptx_warp import block_max_i64, block_x, sync_threads, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.sampling_choose import end_lanes
from atlas_kernels.sampling_parts import key_value, row_extent
from atlas_kernels.sampling_rows import (
    KIND,
    LANES,
    LOGITS_ROW,
    MAX_SCORES,
    ROW_BYTES,
    SCORE,
    SCORE_WORDS,
    SHORT_LEN,
    TOP_K,
)
from atlas_kernels.sampling_sort import THREADS, sort, tile_buffer

_lanes_buffer = shared_buffer("atlas_sampling_lane_sums", 4 * LANES)
_LOW = 0xFFFFFFFF


@device
def _next_best(logits, size, greatest, after):
    """The greatest key of x below ``after``, over all ids."""
    best = i64(LEAST)
    for at in range(thread_x(), size, THREADS):
        key = logit_key(load_f32(logits + i64(at) * 4) - greatest, at)
        if key < after:
            best = max(best, key)
    return block_max_i64(best, LEAST)


@kernel("sampling_score", args="ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i64", threads=THREADS)
def sampling_score(
    rows, logits, keys, lows, taken, lanes, lists, chosen, scores, size, extents, logits_stride
):
    """scores[row] = log p of the row's chosen token, and the best ids with theirs; grid (rows).

    ``scores`` is int32 [rows, SCORE_WORDS]; log p = x − log32(Σ weights), x = logit − maximum.
    Nothing is written where no token was chosen.
    """
    launch_dependents()
    wait_prerequisites()
    i, thread, tile, sums = block_x(), thread_x(), tile_buffer(), _lanes_buffer()
    row = rows + i64(i) * ROW_BYTES
    if load_b32(row + 4 * KIND) == SCORE:
        logits_row = i64(load_b32(row + 4 * LOGITS_ROW))
        token = load_b32(chosen + logits_row * 4)
        if token >= 0:
            source, out = logits + logits_row * logits_stride, scores + i64(i) * (4 * SCORE_WORDS)
            greatest = key_value(row_extent(keys, lows, i, extents)[0])
            if thread < LANES:
                own = load_f32(lanes + (i64(i) * LANES + thread) * 4)
                store_shared_f32(sums + thread * 4, own)
            sync_threads()
            log_total = log32(end_lanes(sums))
            num_top, count = load_b32(row + 4 * TOP_K), i32(0)
            if num_top > 0:
                count = load_b32(taken + i64(i) * 8)
            if thread == 0:
                x = load_f32(source + i64(token) * 4) - greatest
                store_f32(out, x - log_total)
            if num_top > 0 and count <= SHORT_LEN:
                listed = lists + i64(i) * (16 * SHORT_LEN)
                sort(tile, listed, count)
                if thread < num_top:
                    candidate = load_b64(listed + i64(thread) * 8)
                    x = f32(0) - bits_float(i32(candidate >> 32))
                    store_b32(out + 8 + thread * 4, i32(candidate & _LOW))
                    store_f32(out + 8 + 4 * MAX_SCORES + thread * 4, x - log_total)
            elif num_top > 0:  # a great many alike
                after = i64((1 << 63) - 1)
                for j in range(num_top):
                    after = _next_best(source, size, greatest, after)
                    if thread == 0:
                        store_b32(out + 8 + j * 4, i32(_LOW - (after & _LOW)))
                        store_f32(out + 8 + 4 * MAX_SCORES + j * 4, key_value(after) - log_total)
