"""What the kernels of sampling share: random numbers, scaled logits, bins, candidates.

A candidate is an int64: (bits of −x, id), which orders as "by probability" does, or with its halves
exchanged (id, bits of −x). The bits of ``atlas.ops`` depend on the order of candidates alone;
bins and estimates of mass only bound which logits can be among them.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST
from atlas_kernels.elementary import exp32
from atlas_kernels.ptx_math import (
    bits_float,
    fast_exp2,
    first_bit,
    float_bits,
    minimum,
    popcount,
)
from atlas_kernels.ptx_memory import atomic_add_b32, load_b32, load_b64, load_f32, store_b64
from atlas_kernels.ptx_warp import (
    ballot,
    lane_id,
    shuffle_b32,
    shuffle_f32,
    shuffle_xor_f32,
    warp_max_i64,
)
from atlas_kernels.sampling_rows import BINS, EDIT_BYTES, MIN_P, TOP_K, TOP_P

_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
INFINITY = float("inf")
_LOG2_E = 1.4426950408889634
SENTINEL = (1 << 63) - 1
"""Sorts behind every candidate."""
_SLACK = 2
"""Bins more than the estimate of mass asks for: it has all logits of a bin in its middle."""
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
def _scan(value):
    """Inclusive sums over the warp."""
    lane = lane_id()
    for step in range(5):
        other = shuffle_f32(value, i32(lane - (1 << step)))
        if lane >= (1 << step):
            value = value + other
    return value


@device
def _bin_value(counts, at, rate):
    """What a bin adds: its number of logits, times an estimate of their weight."""
    return f32(load_b32(counts + at * 4)) * fast_exp2((f32(at) + f32(0.5)) * rate)


@device
def last_bin(row, counts, scale):
    """By each warp: the bin down to which candidates are wanted, as a guess for top-p alone."""
    lane, count = lane_id(), load_b32(row + 4 * TOP_K)
    by_mass = count == 0
    rate = f32(-_LOG2_E) / scale if by_mass and scale > f32(0) else f32(0)
    own = f32(0)
    for j in range(BINS // 32):
        own = own + _bin_value(counts, i32(lane * (BINS // 32) + j), rate)
    ends = _scan(own)
    aim = f32(count)
    if by_mass:
        p = load_f32(row + 4 * TOP_P)
        aim = shuffle_f32(ends, 31) * (p + (f32(1) - p) * f32(0.25))
    reached = ballot(i32(1) if ends >= aim else i32(0))
    group = first_bit(reached)
    found = i32(BINS - 1)
    if group < 32:
        before = shuffle_f32(ends - own, group)
        at = i32(group * (BINS // 32) + lane)
        within = before + _scan(_bin_value(counts, at, rate))
        inside = first_bit(ballot(i32(1) if within >= aim else i32(0)))
        found = i32(group * (BINS // 32) + min(inside, i32(31)))
        if by_mass:
            found = i32(min(found + _SLACK, BINS - 1))
    return found


@device
def wants(row):
    """0 if no filter is on, 1 if only min-p is, 2 if top-k or top-p is."""
    top = load_b32(row + 4 * TOP_K) > 0 or load_f32(row + 4 * TOP_P) < f32(1)
    if top:
        return i32(2)
    return i32(1) if load_f32(row + 4 * MIN_P) > f32(0) else i32(0)


@device
def gather(logits, start, end, step, first, greatest, temperature, scale, limit, floor, out, room,
           counter):  # fmt: skip
    """Append candidates among logits start + first, + step … to a list, in any order.

    Wanted is a bin up to ``limit``, or with ``limit`` −1 a weight of at least ``floor``. The
    counter goes on past ``room``, the list does not. Whole warps.
    """
    lane = lane_id()
    before = i32((i64(1) << lane) - 1)
    for base in range(start, end, step):
        at = i32(base + first)
        value = f32(-INFINITY)
        if at < end:
            value = load_f32(logits + i64(at) * 4)
        x = (value - greatest) / temperature
        wanted = i32(0)
        if value > f32(-INFINITY):
            if limit >= 0:
                wanted = i32(1) if bin_of(x, scale) <= limit else i32(0)
            else:
                wanted = i32(1) if exp32(x) >= floor else i32(0)
        votes = ballot(wanted)
        if votes != 0:
            place = i32(0)
            if lane == 0:
                place = atomic_add_b32(counter, popcount(votes))
            place = i32(shuffle_b32(place, 0) + popcount(i32(votes & before)))
            if wanted != 0 and place < room:
                magnitude = i64(float_bits(x) & _MAGNITUDE)
                store_b64(out + i64(place) * 8, i64((magnitude << 32) | i64(at)))


@device
def exchanged(candidate):
    """With its halves exchanged."""
    return i64((candidate << 32) | ((candidate >> 32) & _LOW))


@device
def weight_of(magnitude):
    """exp32 of −x's bits; the argument's high half is ignored."""
    return exp32(f32(0) - bits_float(i32(magnitude)))


@device
def next_skipped(edits, bans, skipped, rank):
    """How many banned ids lie below the allowed id of a rank, which has not fallen since."""
    while skipped < bans and load_b32(edits + i64(skipped) * EDIT_BYTES) - skipped <= rank:
        skipped = i32(skipped + 1)
    return skipped
