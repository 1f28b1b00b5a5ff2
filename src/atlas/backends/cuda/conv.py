"""Causal depthwise convolution: launches."""

from __future__ import annotations

from atlas_kernels.recurrence_shapes import CONV_TAPS as TAPS
from atlas_kernels.recurrence_shapes import CONV_THREADS as THREADS
from atlas_kernels.recurrence_shapes import CONV_TILE as TILE
from atlas_kernels.recurrence_shapes import CONV_WIDTH as WIDTH

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import SHORT, Args, match, row_suffix
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.recurrent import check_pool, check_rows, check_sequences, ranges
from atlas.errors import ShapeError
from atlas.ops.check import match_dims


def causal_conv_step(
    queue: Queue,
    x: DeviceArray,
    weight: DeviceArray,
    bias: DeviceArray | None,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    *,
    tails: DeviceArray,
    out: DeviceArray,
) -> None:
    sizes = match_dims("T C", x, "W C", weight, "T C", out)
    rows, channels, taps = sizes["T"], sizes["C"], sizes["W"]
    if taps < 2:
        raise ShapeError(f"weight has {taps} taps; allowed: 2 or more")
    match("float32", f"S {taps - 1} {channels}", tails, "W C", weight, "T C", out)
    if bias is not None:
        match("float32", f"{channels}", bias)
    seqs = check_sequences(slots, cu_rows, positions, rows)
    check_pool("weight", weight)
    check_pool("tails", tails)
    check_rows(x=x, out=out)
    type, vectors = SHORT[x.dtype], (x, weight, tails, out, *(() if bias is None else (bias,)))
    args: Args = (x, weight, 0 if bias is None else bias, slots, *ranges(cu_rows), tails, out)
    if taps == TAPS:
        suffix = row_suffix(channels, WIDTH, *vectors)
        name, width = f"causal_conv_{type}{suffix}", 1 if suffix else WIDTH
        args = (*args, channels)
    else:
        name, width, args = f"causal_conv_any_{type}", 1, (*args, channels, taps)
    # Any one sequence may have all rows; tiles behind its last leave at once.
    grid = (seqs * -(-channels // (THREADS * width)), -(-rows // TILE))
    queue.launch(name, grid, (*args, x.strides[0], out.strides[0]))


causal_conv_prefill = causal_conv_step  # one order for both kinds of rows
