"""The Mamba-2 recurrence: launches."""

from __future__ import annotations

from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.errors import ShapeError
from atlas.ops.check import match_dims, match_sequences, require_contiguous, require_rows


def mamba2_step(
    queue: Queue,
    x: Array,
    b: Array,
    c: Array,
    dt: Array,
    decay_log: Array,
    d: Array,
    dt_bias: Array,
    dt_min: float,
    dt_max: float,
    slots: Array,
    cu_rows: Array,
    positions: Array,
    *,
    states: Array,
    out: Array,
) -> None:
    sizes = match_dims("T H P", x, "T H P", out, "T G N", b, "T G N", c, "T H", dt, dtype="float32")
    heads, groups = sizes["H"], sizes["G"]
    for vector in (decay_log, d, dt_bias):
        match_dims(f"{heads}", vector, dtype="float32")
    match_dims(f"S {heads} {sizes['P']} {sizes['N']}", states, dtype="float32")
    match_sequences(slots, cu_rows, positions, sizes["T"])
    require_contiguous(states=states, decay_log=decay_log, d=d, dt_bias=dt_bias)
    require_rows(x=x, b=b, c=c, dt=dt, out=out)
    if heads % groups:
        raise ShapeError(f"{groups} groups for {heads} heads; allowed: a divisor")
    args: Args = (address(x), x.strides[0], address(b), b.strides[0], address(c), c.strides[0])
    args += (address(dt), dt.strides[0], address(decay_log), address(d), address(dt_bias))
    args += (float_bits(dt_min), float_bits(dt_max), address(slots), address(cu_rows), len(slots))
    args += (heads, groups, sizes["P"], sizes["N"], address(states), address(out), out.strides[0])
    keep = (x, b, c, dt, decay_log, d, dt_bias, slots, cu_rows, states, out)
    queue.launch("mamba2.recur", args, keep)


mamba2_prefill = mamba2_step  # one order for both kinds of rows
