"""What a thread block of the gated delta rule does with the head whose state it holds.

A warp holds K × 16 of the state in registers, a lane K / 8 rows × 4 columns; it is read once and
written once, however many rows the sequence has. Order: Σ x² of a head as in ``norm``; a sum over K
takes a lane's rows ascending, then the 8 lanes of a column by a butterfly. Rows come after one
another in one loop, so K rows give the bits of K launches.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464, eq. 10.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32
from atlas_kernels.gates import exponential, log_decay, sigmoid
from atlas_kernels.ptx_math import fast_rsqrt, fma, quotient, vector_scale
from atlas_kernels.ptx_memory import (
    load_shared_f32x2,
    load_shared_f32x4,
    prefetch_l2,
    shared_buffer,
    store_shared_f32x2,
    store_shared_f32x4,
)
from atlas_kernels.ptx_state import (
    correct_and_read,
    decay_and_read,
    shared_vector,
    sum_over_lanes,
)
from atlas_kernels.ptx_warp import (
    lane_id,
    thread_x,
    warp_sum,
)
from atlas_kernels.vector import access

ROWS = 8
"""Rows whose inputs are in shared memory at a time."""
NORM_EPS = 1e-6
COLUMN_LANES = (4, 8, 16)  # the lanes of a column differ in these bits

DIMS = {"d64": 64, "d128": 128}
TYPES = ("bf16", "f32")
VARIANTS = {f"{size}_{type}": (DIMS[size], access(type, 2)) for size in DIMS for type in TYPES}


def num_threads(dim: int, *_: Any) -> int:
    """A warp for each 16 columns."""
    return 2 * dim


class Head:
    """Where a head's inputs lie in shared memory, and the device functions over them.

    q and k are kept in the 8 groups of rows that the lanes of a warp hold, 16 bytes apart from each
    other so that no two groups meet in a bank.
    """

    def __init__(self, dim: int, pair_bytes: int = 0) -> None:
        self.dim, self.rows, self.warps = dim, dim // 8, dim // 16
        self.group_bytes = self.rows * 4 + 16
        self.vector_bytes = 8 * self.group_bytes
        self.q, self.k = 0, ROWS * self.vector_bytes
        self.v = 2 * ROWS * self.vector_bytes
        self.out = self.v + ROWS * dim * 4
        self.gates = self.out + ROWS * dim * 4
        self.arrivals = self.gates + ROWS * 16
        self.rate = self.arrivals + 4  # and what is added to the time
        self.window = self.arrivals + 16
        # For the layer's whole step: last inputs, inputs and output gates of ``ROWS`` rows.
        self.inputs = self.window + 3 * 8 * num_threads(dim)
        self.z = self.inputs + ROWS * pair_bytes * num_threads(dim)
        num_bytes = self.z + ROWS * dim * pair_bytes // 2 if pair_bytes else self.window
        self.buffer = shared_buffer("atlas_gated_delta", num_bytes)

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
            offset = offset if element < 2 * dim else v_at + (row * dim + within) * 4
            return i32(offset)

        return place

    def put_gates(self) -> Any:
        """(base, row, time, strength, decay_log, bias): a thread's row."""
        gates_at = self.gates

        @device
        def put_gates(base, row, time, strength, decay_log, bias):
            decay = exponential(log_decay(time, decay_log, bias))
            store_shared_f32x2(base + gates_at + 8 + row * 16, (decay, sigmoid(strength)))

        return put_gates

    def put_norms(self) -> Any:
        """(base, row): a warp's row, the factors of q and k."""
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
        def put_norms(base, row):
            q = fast_rsqrt(squares(base + row * vector_bytes) + eps) * scale
            k = fast_rsqrt(squares(base + k_at + row * vector_bytes) + eps)
            if lane_id() == 0:
                store_shared_f32x2(base + gates_at + row * 16, (q, k))

        return put_norms

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
