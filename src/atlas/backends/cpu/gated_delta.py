"""The gated delta rule: launches."""

from __future__ import annotations

import math

from atlas.backends.cpu.conv import causal_conv_step
from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.backends.cpu.norm import gated_rmsnorm
from atlas.errors import ShapeError
from atlas.ops.check import match_dims, match_sequences, require_contiguous, require_rows
from atlas.ops.gated_delta import NORM_EPS

_LANES = 16


def gated_delta_step(
    queue: Queue,
    qkv: Array,
    a: Array,
    b: Array,
    decay_log: Array,
    dt_bias: Array,
    slots: Array,
    cu_rows: Array,
    positions: Array,
    *,
    states: Array,
    out: Array,
) -> None:
    sizes = match_dims("S HV K V", states, "T HV V", out, "T HV", a, "T HV", b, dtype="float32")
    value_heads, key_dim, value_dim = sizes["HV"], sizes["K"], sizes["V"]
    vector = f"{value_heads}"
    match_dims(f"{sizes['T']} C", qkv, vector, decay_log, vector, dt_bias, dtype="float32")
    match_sequences(slots, cu_rows, positions, sizes["T"])
    require_contiguous(states=states, decay_log=decay_log, dt_bias=dt_bias)
    require_rows(qkv=qkv, a=a, b=b, out=out)
    key_heads, rest = divmod(qkv.shape[1] - value_heads * value_dim, 2 * key_dim)
    if rest or key_heads < 1 or value_heads % key_heads:
        raise ShapeError(
            f"qkv has {qkv.shape[1]} columns; allowed: 2·HK·{key_dim} + {value_heads}·{value_dim} "
            f"with HK a divisor of {value_heads}"
        )
    # A thread's scratch: a tile of 64 columns of state, then k and q in whole vectors.
    scratch_bytes = (64 * key_dim + 2 * -(-key_dim // _LANES) * _LANES) * 4
    scratch = queue.device.scratch(queue.device.threads * scratch_bytes)
    args: Args = (address(qkv), qkv.strides[0], address(a), a.strides[0], address(b), b.strides[0])
    args += (address(decay_log), address(dt_bias), address(slots), address(cu_rows), len(slots))
    args += (key_heads, value_heads, key_dim, value_dim, address(states))
    args += (address(out), out.strides[0], float_bits(NORM_EPS), float_bits(math.sqrt(key_dim)))
    args += (address(scratch), scratch_bytes)
    keep = (qkv, a, b, decay_log, dt_bias, slots, cu_rows, states, out, scratch)
    queue.launch("gated_delta.recur", args, keep)


gated_delta_prefill = gated_delta_step  # one order for both kinds of rows


def gated_delta_mixer_step(
    queue: Queue,
    qkv: Array,
    gate: Array,
    a: Array,
    b: Array,
    conv_weight: Array,
    norm_weight: Array,
    norm_eps: float,
    decay_log: Array,
    dt_bias: Array,
    slots: Array,
    cu_rows: Array,
    positions: Array,
    *,
    states: Array,
    tails: Array,
    convolved: Array,
    recurred: Array,
    out: Array,
) -> None:
    rows = slots, cu_rows, positions
    causal_conv_step(queue, qkv, conv_weight, None, *rows, tails=tails, out=convolved)
    value_heads, value_dim = states.shape[1], states.shape[3]
    heads = recurred.reshape(len(recurred), value_heads, value_dim, copy=False)
    gated_delta_step(queue, convolved, a, b, decay_log, dt_bias, *rows, states=states, out=heads)
    gated_rmsnorm(queue, recurred, gate, norm_weight, norm_eps, value_dim, True, out=out)
