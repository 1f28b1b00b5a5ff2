"""Causal depthwise convolution: launches."""

from __future__ import annotations

from atlas.backends.cpu.device import Args, Array, Queue, address
from atlas.errors import ShapeError
from atlas.ops.check import match_dims, match_sequences, require_contiguous, require_rows


def causal_conv_step(
    queue: Queue,
    x: Array,
    weight: Array,
    bias: Array | None,
    slots: Array,
    cu_rows: Array,
    positions: Array,
    *,
    tails: Array,
    out: Array,
) -> None:
    sizes = match_dims("T C", x, "W C", weight, "T C", out, dtype="float32")
    match_sequences(slots, cu_rows, positions, sizes["T"])
    width, channels = sizes["W"], sizes["C"]
    if width < 2:
        raise ShapeError(f"weight has {width} taps; allowed: 2 or more")
    match_dims(f"S {width - 1} {channels}", tails, dtype="float32")
    if bias is not None:
        match_dims(f"{channels}", bias, dtype="float32")
    require_contiguous(weight=weight, tails=tails, bias=bias)
    require_rows(x=x, out=out)
    args: Args = (address(x), x.strides[0], channels, address(weight), width)
    args += (0 if bias is None else address(bias), address(slots), address(cu_rows), len(slots))
    args += (address(tails), address(out), out.strides[0])
    queue.launch("conv.causal", args, (x, weight, bias, slots, cu_rows, tails, out))


causal_conv_prefill = causal_conv_step  # one order for both kinds of rows
