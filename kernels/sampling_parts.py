"""What the kernels of sampling share: random numbers, scaled logits, bins, candidates.

A candidate is an int64: (bits of −x, id), which orders as "by probability" does. The bits of
``atlas.ops`` depend on the order of candidates alone; bins and estimates of mass only bound which
logits can be among them.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST
from atlas_kernels.elementary import exp32_falling, log32
from atlas_kernels.ptx_math import bits_float, fma, maximum, minimum
from atlas_kernels.ptx_memory import (
    load_b32,
    load_b64,
    load_f32,
    load_f32x4,
    load_shared_f32,
    store_shared_f32,
)
from atlas_kernels.ptx_warp import (
    block_max_i64,
    lane_id,
    num_threads_x,
    shuffle_f32,
    shuffle_xor_f32,
    sync_threads,
    thread_x,
    warp_max_i64,
)
from atlas_kernels.sampling_rows import BINS, EDIT_BYTES, MIN_P, TEMPERATURE, TOP_K, TOP_P

_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
INFINITY = float("inf")
_SPREAD = 32.0
"""Logits that lie further below the greatest share the last bin."""


@device
def uniform(seed_low, seed_high, sample_index, position):
    """A number in [0, 1): ``atlas.ops.random.uniform`` for the purpose DRAW."""
    a, b = i64(position) & _LOW, i64(sample_index) & _LOW
    c, d = i64(0), i64(0)
    k, m = i64(seed_low) & _LOW, i64(seed_high) & _LOW
    for _ in range(10):
        first, second = i64(a * 0xD2511F53), i64(c * 0xCD9E8D57)
        a, b = ((second >> 32) & _LOW) ^ b ^ k, second & _LOW
        c, d = ((first >> 32) & _LOW) ^ d ^ m, first & _LOW
        k, m = (k + 0x9E3779B9) & _LOW, (m + 0xBB67AE85) & _LOW
    return f32(i32(a >> 8)) * f32(2.0**-24)


@device
def row_extent(keys, lows, row, parts):
    """By each warp: the greatest key of a row and its least allowed logit, over all parts."""
    best, low = i64(LEAST), f32(INFINITY)
    for part in range(lane_id(), parts, 32):
        at = i64(row) * parts + part
        best = max(best, load_b64(keys + at * 8))
        low = minimum(low, load_f32(lows + at * 4))
    for step in range(5):
        low = minimum(low, shuffle_xor_f32(low, i32(16 >> step)))
    return warp_max_i64(best), low


@device
def key_value(key):
    """The logit of a key of ``logit_key``."""
    order = i32(key >> 32)
    return bits_float(i32(order ^ ((order >> 31) & _MAGNITUDE)))


@device
def bin_scale(greatest, low, temperature):
    """The factor that takes −x to its bin: bins of equal width down to the least logit."""
    spread = minimum(greatest - low, f32(_SPREAD))
    return f32(BINS - 1) * temperature / spread if spread > f32(0) else f32(0)


@device
def bin_of(x, scale):
    """0 … BINS − 1; never falls where x falls."""
    return i32(minimum((f32(0) - x) * scale, f32(BINS - 1)))


@device
def wants(row):
    """0 if no filter is on, 1 if only min-p is, 2 if top-k or top-p is."""
    top = load_b32(row + 4 * TOP_K) > 0 or load_f32(row + 4 * TOP_P) < f32(1)
    if top:
        return i32(2)
    return i32(1) if load_f32(row + 4 * MIN_P) > f32(0) else i32(0)


@device
def weight_of(magnitude):
    """exp32 of −x's bits; the argument's high half is ignored."""
    return exp32_falling(f32(0) - bits_float(i32(magnitude)))


@device
def inverse_of(temperature, greatest, low):
    """1 / temperature, or 0 where ``scaled`` may not use it.

    It may where no number on the way overflows or loses bits as a subnormal one: x is 0 or, as a
    difference of float32 from the greatest logit on, above 2**-84.
    """
    size = maximum(greatest, f32(0) - greatest)
    usable = size >= f32(2.0**-60) and size <= f32(2.0**60) and low >= f32(-(2.0**60))
    usable = usable and temperature >= f32(2.0**-30) and temperature <= f32(2.0**30)
    return f32(1) / temperature if usable else f32(0)


@device
def scaled(value, greatest, temperature, inverse):
    """x = (value − greatest) / temperature, rounded to nearest; −inf only where inverse is 0.

    Two corrections by the exact remainder: the first makes the quotient faithful, the second then
    correct, as the inverse is the nearest one. A ``/`` would branch for every element.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor"
    (1990), theorem 8.
    """
    x = value - greatest
    if inverse == f32(0):
        return x / temperature
    q = x * inverse
    q = fma(fma(f32(0) - q, temperature, x), inverse, q)
    return fma(fma(f32(0) - q, temperature, x), inverse, q)


@device
def view_of(row, key, low):
    """(greatest, temperature, inverse, scale, floor) of a row with these extremes.

    ``floor`` is min-p where nothing else filters, and else −1.
    """
    greatest, temperature = key_value(key), load_f32(row + 4 * TEMPERATURE)
    floor = load_f32(row + 4 * MIN_P) if wants(row) == 1 else f32(-1)
    inverse = inverse_of(temperature, greatest, low)
    return greatest, temperature, inverse, bin_scale(greatest, low, temperature), floor


@device
def row_view(row, keys, lows, i, extents):
    """``view_of``, by each warp."""
    key, low = row_extent(keys, lows, i, extents)
    return view_of(row, key, low)


@device
def bin_in(view, value):
    """The bin of a logit; where min-p alone filters 0 if it stays and 1 if not."""
    x = scaled(value, view[0], view[1], view[2])
    if view[4] >= f32(0):
        return i32(0) if exp32_falling(x) >= view[4] else i32(1)
    return bin_of(x, view[3])


@device
def threshold(view, limit):
    """No logit below it lies in a bin up to ``limit``: a bin, or 0.01 in x, is left as a margin."""
    if view[4] >= f32(0):
        return view[0] + (log32(view[4]) - f32(0.01)) * view[1]
    if limit >= BINS - 2 or view[3] <= f32(0):
        return f32(-INFINITY)
    return view[0] - f32(limit + 2) / view[3] * view[1]


@device
def first_quad(source):
    """The place ≤ 0 of a row at which its address is a multiple of 16."""
    return i32(0) - i32((source >> 2) & 3)


@device
def _one(source, at, size):
    return load_f32(source + i64(at) * 4) if at >= 0 and at < size else f32(-INFINITY)


@device
def load_quad(source, at, size):
    """Four logits from place ``at`` on, −inf outside the row; the address is a multiple of 16."""
    if at >= 0 and at + 4 <= size:
        return load_f32x4(source + i64(at) * 4)
    return (
        _one(source, at, size), _one(source, i32(at + 1), size),
        _one(source, i32(at + 2), size), _one(source, i32(at + 3), size),
    )  # fmt: skip


@device
def _scan(value):
    """Inclusive sums over the warp."""
    lane = lane_id()
    for step in range(5):
        other = shuffle_f32(value, i32(lane - (1 << step)))
        if lane >= (1 << step):
            value = value + other
    return value


@device
def block_scan(value, sums):
    """(inclusive sum, sum of all) over the thread block; ``sums`` is shared float32 [warps]."""
    warp, inner = thread_x() >> 5, _scan(value)
    if lane_id() == 31:
        store_shared_f32(sums + warp * 4, inner)
    sync_threads()
    before, total = f32(0), f32(0)
    for w in range(num_threads_x() >> 5):
        other = load_shared_f32(sums + w * 4)
        before = before + (other if w < warp else f32(0))
        total = total + other
    sync_threads()
    return before + inner, total


@device
def first_of(found, index):
    """The least index of those that threads found, in every thread; −1 where nobody did."""
    best = block_max_i64(i64(-i64(index)) if found else i64(LEAST), LEAST)
    return i32(-best) if best > LEAST else i32(-1)


@device
def next_skipped(edits, bans, skipped, rank):
    """How many banned ids lie below the allowed id of a rank, which has not fallen since."""
    while skipped < bans:
        if load_b32(edits + i64(skipped) * EDIT_BYTES) - skipped > rank:
            break
        skipped = i32(skipped + 1)
    return skipped
