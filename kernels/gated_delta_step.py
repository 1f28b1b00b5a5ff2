"""The gated delta rule, row after row: a thread block holds one value head's state in registers.

Two forms of one kernel. ``gated_delta_step`` takes q, k and v after the convolution. The fused
``gated_delta_mixer_step`` takes the layer's projection and does all between it and the output
projection: convolution, L2 norms, gates, recurrence, gated norm.

A warp holds K × 16 of the state, a lane K / 8 rows × 4 columns; it is read once and written once,
however many rows the sequence has. Order: an output of the convolution as in ``conv1d``; Σ x² of a
head as in ``norm``; a sum over K takes a lane's rows ascending, then the 8 lanes of a column by a
butterfly. Rows come after one another in one loop, so K rows give the bits of K launches.

The thread blocks that share a key head all read its part of the tail; the last to have read it
writes it anew.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464, eq. 10.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.conv1d import convolve
from atlas_kernels.gates import exponential, log_decay, sigmoid, silu
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import fast_rsqrt, fma, quotient, vector_scale
from atlas_kernels.ptx_memory import (
    atomic_add_b32,
    load_b32,
    load_constant_b32,
    load_constant_f32,
    load_constant_f32x2,
    load_f32x2,
    load_shared_b32,
    load_shared_f32x2,
    load_shared_f32x4,
    prefetch_l2,
    shared_buffer,
    store_b32,
    store_f32x2,
    store_shared_b32,
    store_shared_f32x2,
    store_shared_f32x4,
)
from atlas_kernels.ptx_state import (
    correct_and_read,
    decay_and_read,
    shared_vector,
    state_load,
    state_store,
    sum_over_lanes,
)
from atlas_kernels.ptx_warp import (
    block_x,
    lane_id,
    shuffle_b32,
    sync_threads,
    thread_x,
    warp_sum,
)
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access

ROWS = 8
"""Rows whose inputs are in shared memory at a time."""
NORM_EPS = 1e-6
COLUMN_LANES = (4, 8, 16)  # the lanes of a column differ in these bits

DIMS = {"d64": 64, "d128": 128}
TYPES = ("bf16", "f32")
VARIANTS = {f"{size}_{type}": (DIMS[size], access(type, 2)) for size in DIMS for type in TYPES}


def num_threads(dim: int, rows: Access) -> int:
    """A warp for each 16 columns."""
    return 2 * dim


class Head:
    """Where a head's inputs lie in shared memory, and the device functions over them.

    q and k are kept in the 8 groups of rows that the lanes of a warp hold, 16 bytes apart from each
    other so that no two groups meet in a bank.
    """

    def __init__(self, dim: int) -> None:
        self.dim, self.rows, self.warps = dim, dim // 8, dim // 16
        self.group_bytes = self.rows * 4 + 16
        self.vector_bytes = 8 * self.group_bytes
        self.q, self.k = 0, ROWS * self.vector_bytes
        self.v = 2 * ROWS * self.vector_bytes
        self.out = self.v + ROWS * dim * 4
        self.gates = self.out + ROWS * dim * 4
        self.arrivals = self.gates + ROWS * 16
        self.window = self.arrivals + 16
        self.buffer = shared_buffer("atlas_gated_delta", self.window + 3 * 16 * dim)

    def place(self) -> Any:
        """(element of q, k and v, row) → offset; the element is even."""
        dim, rows = self.dim, self.rows
        group_bytes, vector_bytes, k_at, v_at = self.group_bytes, self.vector_bytes, self.k, self.v

        @device
        def place(element, row):
            within = element & (dim - 1)
            head = quotient(within, rows) * group_bytes + (within & (rows - 1)) * 4
            head += row * vector_bytes
            offset = head if element < dim else head + k_at
            return i32(offset if element < 2 * dim else v_at + (row * dim + within) * 4)

        return place

    def measure(self) -> Any:
        """(base, row, time, strength, decay_log, bias): a warp's norms and gates of a row."""
        rows, group_bytes, vector_bytes = self.rows, self.group_bytes, self.vector_bytes
        k_at, gates_at, scale = self.k, self.gates, f32(self.dim**-0.5)
        eps = f32(NORM_EPS)

        @device
        def squares(at):
            """Σ over the warp; a lane has rows / 4 elements of group lane / 4."""
            at += (lane_id() >> 2) * group_bytes + (lane_id() & 3) * rows
            total = f32(0)
            for i in range(0, rows, 8):
                pair = load_shared_f32x2(at + i)
                total = fma(pair[1], pair[1], fma(pair[0], pair[0], total))
            return warp_sum(total)

        @device
        def measure(base, row, time, strength, decay_log, bias):
            q = fast_rsqrt(squares(base + row * vector_bytes) + eps) * scale
            k = fast_rsqrt(squares(base + k_at + row * vector_bytes) + eps)
            decay = exponential(log_decay(time, decay_log, bias))
            if lane_id() == 0:
                store_shared_f32x4(base + gates_at + row * 16, (q, k, decay, sigmoid(strength)))

        return measure

    def advance(self) -> Any:
        """(state, base, row) → the state after a row; its output goes to shared memory."""
        dim, rows, vector_bytes = self.dim, self.rows, self.vector_bytes
        group_bytes = self.group_bytes
        k_at, v_at, out_at, gates_at = self.k, self.v, self.out, self.gates
        read, vector, scaled = decay_and_read(rows, 4), shared_vector(rows), vector_scale(rows)
        correct, combine = correct_and_read(rows, 4), sum_over_lanes(4, COLUMN_LANES)

        @device
        def advance(state, base, row):
            gates = load_shared_f32x4(base + gates_at + row * 16)
            lane = lane_id()
            group = base + row * vector_bytes + (lane >> 2) * group_bytes
            column = ((thread_x() >> 5) * 16 + (lane & 3) * 4 + row * dim) * 4
            k = scaled(vector(i32(group + k_at)), gates[1])
            state, held = read(state, gates[2], k)
            held = combine(held)
            v, beta = load_shared_f32x4(base + v_at + column), gates[3]
            d = (
                beta * (v[0] - held[0]),
                beta * (v[1] - held[1]),
                beta * (v[2] - held[2]),
                beta * (v[3] - held[3]),
            )
            q = scaled(vector(i32(group)), gates[0])
            state, sums = correct(state, k, d, q)
            sums = combine(sums)
            if lane < 4:
                store_shared_f32x4(base + out_at + column, sums)
            return state

        return advance


@device
def prefetch(address, num_bytes, threads):
    """Ask the thread block's cache lines into L2."""
    for line in range(thread_x() * 128, num_bytes, threads * 128):
        prefetch_l2(address + line)


@kernel(
    "gated_delta_step",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i64 i64 i64",
    threads=num_threads,
    min_blocks=2,
    variants=VARIANTS,
)
def make_gated_delta_step(dim: int, rows: Access) -> Any:
    """The op ``gated_delta_step`` for K = V = ``dim``; grid (N · HV).

    - ``qkv`` [T, 2·HK·K + HV·V] float32, ``a`` and ``b`` [T, HV], ``out`` [T, HV, V] float32;
    - sequence n has the rows ``begins[n]`` … ``ends[n]`` − 1 (perhaps none), its state at
      ``slots[n]`` (−1: padding) of ``states`` float32 [S, HV, K, V]. What comes out is written to
      ``targets[n]``, or nowhere if that is −1.

    Strides in bytes.
    """
    head_of = Head(dim)
    place, measure, advance = head_of.place(), head_of.measure(), head_of.advance()
    piece_rows, threads, warps, buffer = head_of.rows, 2 * dim, head_of.warps, head_of.buffer
    load_state = state_load(piece_rows, 4, dim * 4)
    store_state = state_store(piece_rows, 4, dim * 4)
    load_gate, item, out_at = access(rows.type, 1).load, rows.item_bytes, head_of.out

    def gated_delta_step(
        qkv, a, b, decay_log, dt_bias, slots, targets, begins, ends, states, out,
        key_heads, value_heads, qkv_stride, gate_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        lane, warp, base = lane_id(), shuffle_b32(thread_x() >> 5, 0), buffer()
        sequence = quotient(block_x(), value_heads)
        head = i32(block_x() - sequence * value_heads)
        slot = load_constant_b32(slots + sequence * 4)
        target = load_constant_b32(targets + sequence * 4)
        within = ((lane >> 2) * piece_rows * dim + warp * 16 + (lane & 3) * 4) * 4
        state_bytes = dim * dim * 4
        source = states + (i64(slot) * value_heads + head) * state_bytes
        if slot >= 0:
            prefetch(source, state_bytes, threads)
        rate = load_constant_f32(decay_log + head * 4)
        bias = load_constant_f32(dt_bias + head * 4)
        wait_prerequisites()
        begin, end = load_b32(begins + sequence * 4), load_b32(ends + sequence * 4)
        if slot < 0 or begin >= end:
            return
        state = load_state(source + within)
        key_head = quotient(head, quotient(value_heads, key_heads))
        element = i32(thread_x() * 2)
        part = quotient(element, dim)  # q, k or v; for the last threads none
        first = i32((key_head if part == 0 else key_heads + key_head) * dim)
        if part == 2:
            first = i32((2 * key_heads + head) * dim)
        inputs = qkv + i64(first + (element & (dim - 1))) * 4
        row = i32(begin)
        while row < end:
            count = i32(min(ROWS, end - row))
            if part < 3:
                for j in range(count):
                    pair = load_f32x2(inputs + (row + j) * qkv_stride)
                    store_shared_f32x2(base + place(element, j), pair)
            sync_threads()
            for j in range(warp, count, warps):
                at = (row + j) * gate_stride + head * item
                measure(base, j, load_gate(a + at)[0], load_gate(b + at)[0], rate, bias)
            sync_threads()
            for j in range(count):
                state = advance(state, base, j)
            sync_threads()
            for j in range(count):
                if element < dim:
                    pair = load_shared_f32x2(base + out_at + (j * dim + element) * 4)
                    store_f32x2(out + (row + j) * out_stride + (head * dim + element) * 4, pair)
            row = i32(row + count)
        if target >= 0:
            store_state(states + (i64(target) * value_heads + head) * state_bytes + within, state)

    return gated_delta_step


@kernel(
    "gated_delta_mixer_step",
    args="ptr " * 16 + "i32 i32 i64 i64 i64 i64 f32",
    threads=num_threads,
    min_blocks=2,
    variants=VARIANTS,
)
def make_gated_delta_mixer_step(dim: int, rows: Access) -> Any:
    """Convolution (4 taps, no bias), ``gated_delta_step`` and ``gated_rmsnorm``; grid (N · HV).

    - ``x`` [T, 2·HK·K + HV·V]: q, k and v before the convolution; ``gate`` [T, HV·V]; ``a`` and
      ``b`` [T, HV]; ``out`` [T, HV·V]; all of the variant's type, strides in bytes;
    - ``conv_weight`` float32 [4, C], ``norm_weight`` float32 [V], ``eps`` the norm's;
    - ``tails`` float32 [S, 3, C] are read and written as ``states`` are;
    - ``counters`` int32 [N · HK]: zero, and zero again afterwards.
    """
    head_of = Head(dim)
    place, measure, advance = head_of.place(), head_of.measure(), head_of.advance()
    piece_rows, threads, warps, buffer = head_of.rows, 2 * dim, head_of.warps, head_of.buffer
    load_state = state_load(piece_rows, 4, dim * 4)
    store_state = state_store(piece_rows, 4, dim * 4)
    load, put, item = rows.load, rows.store, rows.item_bytes
    load_gate, out_at, arrivals_at = access(rows.type, 1).load, head_of.out, head_of.arrivals
    convolution = convolve(2)

    @device
    def finish(base, row, source, target, weight, eps):
        """A warp's gated norm of a row of the head: two columns a lane, of each 64."""
        values = base + out_at + row * dim * 4 + lane_id() * 8
        total = f32(0)
        for i in range(0, dim * 4, 256):
            pair = load_shared_f32x2(values + i)
            total = fma(pair[1], pair[1], fma(pair[0], pair[0], total))
        factor = fast_rsqrt(warp_sum(total) / f32(dim) + eps)
        for i in range(dim // 64):
            column = i * 64 + lane_id() * 2
            pair, at = load_shared_f32x2(values + i * 256), column * item
            scale = load_constant_f32x2(weight + column * 4)
            z = load(source + at)
            first = pair[0] * factor * scale[0] * silu(z[0])
            put(target + at, (first, pair[1] * factor * scale[1] * silu(z[1])))

    window_at, step = head_of.window, 8 * threads

    @device
    def keep(base, t0, t1, t2):
        """A thread's last inputs, in shared memory: registers are what a state needs."""
        at = base + window_at + thread_x() * 8
        store_shared_f32x2(at, t0)
        store_shared_f32x2(at + step, t1)
        store_shared_f32x2(at + 2 * step, t2)

    @device
    def kept(base):
        at = base + window_at + thread_x() * 8
        first, second = load_shared_f32x2(at), load_shared_f32x2(at + step)
        return first, second, load_shared_f32x2(at + 2 * step)

    @device
    def weights(at, line):
        """The taps of two channels."""
        first, second = load_constant_f32x2(at), load_constant_f32x2(at + line)
        return first, second, load_constant_f32x2(at + 2 * line), load_constant_f32x2(at + 3 * line)

    def gated_delta_mixer_step(
        x, gate, a, b, conv_weight, norm_weight, decay_log, dt_bias, slots, targets, begins, ends,
        states, tails, counters, out, key_heads, value_heads,
        x_stride, gate_stride, ab_stride, out_stride, eps,
    ):  # fmt: skip
        launch_dependents()
        lane, warp, base = lane_id(), shuffle_b32(thread_x() >> 5, 0), buffer()
        sequence = quotient(block_x(), value_heads)
        head = i32(block_x() - sequence * value_heads)
        group = quotient(value_heads, key_heads)
        key_head = quotient(head, group)
        slot = load_constant_b32(slots + sequence * 4)
        target = load_constant_b32(targets + sequence * 4)
        begin = load_constant_b32(begins + sequence * 4)
        end = load_constant_b32(ends + sequence * 4)
        within = ((lane >> 2) * piece_rows * dim + warp * 16 + (lane & 3) * 4) * 4
        state_bytes = dim * dim * 4
        source = states + (i64(slot) * value_heads + head) * state_bytes
        if slot >= 0:
            prefetch(source, state_bytes, threads)
        rate = load_constant_f32(decay_log + head * 4)
        bias = load_constant_f32(dt_bias + head * 4)
        element = i32(thread_x() * 2)
        part = quotient(element, dim)  # q, k or v; the last threads repeat others
        first = i32((key_head if part == 0 else key_heads + key_head) * dim)
        if part >= 2:
            first = i32((2 * key_heads + head) * dim)
        channel = i64(first + (element & (dim - 1)))
        line = i64(2 * key_heads + value_heads) * (dim * 4)
        wait_prerequisites()
        if slot < 0 or begin >= end:
            return
        tail = tails + i64(slot) * 3 * line + channel * 4
        t0, t1, t2 = load_f32x2(tail), load_f32x2(tail + line), load_f32x2(tail + 2 * line)
        state = load_state(source + within)
        keep(base, t0, t1, t2)
        inputs, arrived = x + channel * item, i32(0)
        counter = counters + i64(sequence * key_heads + key_head) * 4
        row = i32(begin)
        while row < end:
            count = i32(min(ROWS, end - row))
            taps = weights(conv_weight + channel * 4, line)
            t0, t1, t2 = kept(base)
            for j in range(count):
                new = load(inputs + (row + j) * x_stride)
                pair = convolution(t0, t1, t2, new, taps, (f32(0), f32(0)))
                if part < 3:
                    store_shared_f32x2(base + place(element, j), pair)
                t0, t1, t2 = t1, t2, new
            keep(base, t0, t1, t2)
            sync_threads()
            # All of the block have used what they read of the tail: nothing is left to order.
            if row == begin and target >= 0 and thread_x() == 0:
                arrived = atomic_add_b32(counter, 1)
            for j in range(warp, count, warps):
                at = (row + j) * ab_stride + head * item
                measure(base, j, load_gate(a + at)[0], load_gate(b + at)[0], rate, bias)
            sync_threads()
            for j in range(count):
                state = advance(state, base, j)
            sync_threads()
            for j in range(warp, count, warps):
                column = i64(head * dim) * item
                source = gate + (row + j) * gate_stride + column
                finish(base, j, source, out + (row + j) * out_stride + column, norm_weight, eps)
            row = i32(row + count)
        if target < 0:
            return
        store_state(states + (i64(target) * value_heads + head) * state_bytes + within, state)
        if thread_x() == 0:
            store_shared_b32(base + arrivals_at, arrived)
            if arrived == group - 1:
                store_b32(counter, 0)
        sync_threads()
        is_last = load_shared_b32(base + arrivals_at) == group - 1
        if part == 2 or (part < 2 and is_last):
            tail = tails + i64(target) * 3 * line + channel * 4
            t0, t1, t2 = kept(base)
            store_f32x2(tail, t0)
            store_f32x2(tail + line, t1)
            store_f32x2(tail + 2 * line, t2)

    return gated_delta_mixer_step
