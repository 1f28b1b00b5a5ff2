"""A gated delta layer's step between its projections, in one kernel.

Convolution, L2 norms, gates, recurrence, gated norm: the recurrence is ``gated_delta_head``'s, an
output of the convolution that of ``conv1d``. The thread blocks that share a key head all read its
part of the tail; the last to have read it writes it anew.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.conv1d import convolve
from atlas_kernels.gated_delta_head import ROWS, VARIANTS, Head, num_threads, prefetch
from atlas_kernels.gates import silu
from atlas_kernels.ptx_async import (
    copy4,
    copy8,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import fast_rsqrt, fma, opaque, quotient, unpack_bf16, vector_zero
from atlas_kernels.ptx_memory import (
    atomic_add_b32,
    load_constant_b32,
    load_constant_f32x2,
    load_shared_b32,
    load_shared_f32,
    load_shared_f32x2,
    store_b32,
    store_f32x2,
    store_shared_b32,
    store_shared_f32x2,
)
from atlas_kernels.ptx_state import (
    state_load,
    state_store,
)
from atlas_kernels.ptx_warp import (
    block_x,
    lane_id,
    lanes,
    num_blocks_x,
    shuffle_b32,
    sync_threads,
    thread_x,
    warp_sum,
)
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access

AT_ONCE = 264
"""Thread blocks that an H200 holds at a time, two on each SM."""
AHEAD = 132
"""How many blocks later the one is whose state a block asks into L2: what is asked sooner has left
again before its turn."""


@kernel(
    "gated_delta_mixer_step",
    args="ptr " * 16 + "i32 i32 i64 i64 i64 i64 f32",
    threads=num_threads,
    min_blocks=2,
    variants={name: (*sizes, name == "d128_bf16") for name, sizes in VARIANTS.items()},
)
def make_gated_delta_mixer_step(dim: int, rows: Access, ahead: bool) -> Any:
    """Convolution (4 taps, no bias), ``gated_delta_step`` and ``gated_rmsnorm``; grid (N · HV).

    - ``x`` [T, 2·HK·K + HV·V]: q, k and v before the convolution; ``gate`` [T, HV·V]; ``a`` and
      ``b`` [T, HV]; ``out`` [T, HV·V]; all of the variant's type, strides in bytes;
    - ``conv_weight`` float32 [4, C], ``norm_weight`` float32 [V], ``eps`` the norm's;
    - ``tails`` float32 [S, 3, C] are read and written as ``states`` are;
    - ``counters`` int32 [N · HK]: zero, and zero again afterwards.

    What earlier steps left is read before the wait: the tail, and, where all thread blocks run at
    once, the state. Of many thread blocks the later ones find the wait over: they ask for what is
    small before the state, whose bytes it would wait behind, and use it while those are on their
    way. With ``ahead``, a thread block asks the state of one that starts later into L2.
    """
    item, pair_bytes = rows.item_bytes, 2 * rows.item_bytes
    head_of = Head(dim, pair_bytes)
    place, advance = head_of.place(), head_of.advance()
    put_gates, put_norms = head_of.put_gates(), head_of.put_norms()
    piece_rows, threads, warps, buffer = head_of.rows, 2 * dim, head_of.warps, head_of.buffer
    out_at, arrivals_at, window_at = head_of.out, head_of.arrivals, head_of.window
    inputs_at, z_at, rate_at = head_of.inputs, head_of.z, head_of.rate
    load_state = state_load(piece_rows, 4, dim * 4)
    store_state = state_store(piece_rows, 4, dim * 4)
    copy_pair = copy4 if pair_bytes == 4 else copy8
    load_pair, widen, store_pair = load_shared_f32x2, device(lambda pair: pair), rows.store
    if rows.type == "bf16":
        load_pair, widen = load_shared_b32, unpack_bf16
    nothing = vector_zero(piece_rows * 4)
    load_gate, convolution, copies_arrived = access(rows.type, 1).load, convolve(2), copy_wait(0)
    window_step, row_step, z_step = 8 * threads, pair_bytes * threads, dim * item
    turns = ROWS // warps  # of rows, for each warp

    @device
    def finish(base, row, target, weight, eps):
        """A warp's gated norm of a row of the head: two columns a lane, of each 64."""
        values = base + out_at + row * dim * 4 + lane_id() * 8
        total = f32(0)
        for i in range(0, dim * 4, 256):
            pair = load_shared_f32x2(values + i)
            total = fma(pair[1], pair[1], fma(pair[0], pair[0], total))
        factor = fast_rsqrt(warp_sum(total) / f32(dim) + eps)
        for i in range(dim // 64):
            column = i * 64 + lane_id() * 2
            pair = load_shared_f32x2(values + i * 256)
            gates = widen(load_pair(i32(base + z_at + row * z_step + column * item)))
            scale = load_constant_f32x2(weight + column * 4)
            first = pair[0] * factor * scale[0] * silu(gates[0])
            last = pair[1] * factor * scale[1] * silu(gates[1])
            store_pair(target + column * item, (first, last))

    @device
    def ask(base, inputs, gates, count, x_stride, gate_stride):
        """Some rows into shared memory: a thread's inputs, and its share of output gates."""
        at = base + inputs_at + thread_x() * pair_bytes
        j, one = i32(0), i32(lanes() >> 5)  # as a step: the loop is not unrolled
        while j < count:
            copy_pair(i32(at + j * row_step), inputs + j * x_stride)
            j = i32(j + one)
        at, gates = base + z_at + lane_id() * pair_bytes, gates + lane_id() * pair_bytes
        for turn in range(turns):
            j = i32((thread_x() >> 5) + turn * warps)
            if j < count:
                for i in range(0, z_step, 64 * item):
                    copy_pair(i32(at + j * z_step + i), gates + j * gate_stride + i)

    @device
    def ask_tail(base, tail, line):
        """A thread's inputs before the first."""
        at = i32(base + window_at + thread_x() * 8)
        copy8(at, tail)
        copy8(at + window_step, tail + line)
        copy8(at + 2 * window_step, tail + 2 * line)

    @device
    def keep(base, t0, t1, t2):
        """A thread's last inputs, in shared memory: registers are what a state needs."""
        at = base + window_at + thread_x() * 8
        store_shared_f32x2(at, t0)
        store_shared_f32x2(at + window_step, t1)
        store_shared_f32x2(at + 2 * window_step, t2)

    @device
    def kept(base):
        at = base + window_at + thread_x() * 8
        first, second = load_shared_f32x2(at), load_shared_f32x2(at + window_step)
        return first, second, load_shared_f32x2(at + 2 * window_step)

    @device
    def weights(at, line):
        """The taps of two channels."""
        first, second = load_constant_f32x2(at), load_constant_f32x2(at + line)
        return first, second, load_constant_f32x2(at + 2 * line), load_constant_f32x2(at + 3 * line)

    @device
    def ask_decay(a, b, row, end, stride):
        """A row of what decay and strength come from: a thread's own of the first threads.

        The others ask as well: in a branch the loads would come after those of the state.
        """
        at = min(row + (thread_x() & (ROWS - 1)), end - 1) * stride
        return load_gate(a + at)[0], load_gate(b + at)[0]

    @device
    def state_of(states, slots, block, heads):
        """Address of a thread block's state, 0 for none."""
        sequence = quotient(block, heads)
        slot = load_constant_b32(slots + sequence * 4)
        state = i64(slot) * heads + (block - sequence * heads)
        return states + state * (dim * dim * 4) if slot >= 0 else i64(0)

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
        if slot < 0 or begin >= end:
            wait_prerequisites()
            return
        element = i32(thread_x() * 2)
        part = quotient(element, dim)  # q, k or v; the last threads repeat others
        first = i32((key_head if part == 0 else key_heads + key_head) * dim)
        if part >= 2:
            first = i32((2 * key_heads + head) * dim)
        channel = i32(first + (element & (dim - 1)))
        line = i64(2 * key_heads + value_heads) * (dim * 4)
        ask_tail(base, tails + i64(slot) * 3 * line + i64(channel) * 4, line)
        taps = weights(conv_weight + i64(channel) * 4, line)
        if thread_x() >= threads - ROWS:
            copy4(i32(base + rate_at), decay_log + head * 4)
            copy4(i32(base + rate_at + 4), dt_bias + head * 4)
        state, at_once = nothing(), num_blocks_x() <= AT_ONCE
        if at_once:
            state = load_state(source + within)
        elif not ahead or block_x() < AT_ONCE:
            prefetch(source, state_bytes, threads)
        wait_prerequisites()
        row, arrived = i32(begin), i32(0)
        inputs, gates = x + i64(channel) * item, gate + i64(head * dim) * item
        inputs, gates = inputs + row * x_stride, gates + row * gate_stride
        ask(base, inputs, gates, i32(min(ROWS, end - row)), x_stride, gate_stride)
        copy_commit()
        time, strength = ask_decay(a + head * item, b + head * item, row, end, ab_stride)
        if not at_once:
            state = load_state(source + within)
        if ahead and block_x() + AHEAD < num_blocks_x():
            later = state_of(states, slots, block_x() + AHEAD, value_heads)
            if later != 0:
                prefetch(later, state_bytes, threads)
        while row < end:
            count, own, column = i32(min(ROWS, end - row)), opaque(head), opaque(channel)
            if row > begin:
                inputs, gates = x + i64(column) * item, gate + i64(own * dim) * item
                inputs, gates = inputs + row * x_stride, gates + row * gate_stride
                ask(base, inputs, gates, count, x_stride, gate_stride)
                copy_commit()
                time, strength = ask_decay(a + own * item, b + own * item, row, end, ab_stride)
                taps = weights(conv_weight + i64(column) * 4, line)
            copies_arrived()
            if thread_x() >= threads - ROWS:  # of a warp without inputs of its own
                rate, bias = load_shared_f32(base + rate_at), load_shared_f32(base + rate_at + 4)
                put_gates(base, thread_x() & (ROWS - 1), time, strength, rate, bias)
            t0, t1, t2 = kept(base)
            for j in range(count):
                at = i32(base + inputs_at + thread_x() * pair_bytes + j * row_step)
                new = widen(load_pair(at))
                pair = convolution(t0, t1, t2, new, taps, (f32(0), f32(0)))
                if part < 3:
                    store_shared_f32x2(base + place(element, j), pair)
                t0, t1, t2 = t1, t2, new
            keep(base, t0, t1, t2)
            sync_threads()
            # All of the block have used what they read of the tail: nothing is left to order.
            if row == begin and target >= 0 and thread_x() == 0:
                counter = counters + i64(sequence * key_heads + key_head) * 4
                arrived = atomic_add_b32(counter, 1)
            for turn in range(turns):
                j = i32(warp + turn * warps)
                if j < count:
                    put_norms(base, j)
            sync_threads()
            for j in range(count):
                state = advance(state, base, j)
            sync_threads()
            own = opaque(head)
            if row + count == end and target >= 0:
                new_state = states + (i64(target) * value_heads + own) * state_bytes
                store_state(new_state + within, state)
            for turn in range(turns):
                j = i32(warp + turn * warps)
                if j < count:
                    row_out = out + (row + j) * out_stride + i64(own * dim) * item
                    finish(base, j, row_out, norm_weight, eps)
            row = i32(row + count)
        if target < 0:
            return
        if thread_x() == 0:
            store_shared_b32(base + arrivals_at, arrived)
            if arrived == group - 1:
                store_b32(counters + i64(sequence * key_heads + key_head) * 4, 0)
        sync_threads()
        is_last = load_shared_b32(base + arrivals_at) == group - 1
        if part == 2 or (part < 2 and is_last):
            tail = tails + i64(target) * 3 * line + i64(opaque(channel)) * 4
            t0, t1, t2 = kept(base)
            store_f32x2(tail, t0)
            store_f32x2(tail + line, t1)
            store_f32x2(tail + 2 * line, t2)

    return gated_delta_mixer_step
