"""Recurrent mixers in plain NumPy, token by token: what their sizes and weights mean."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from atlas.config import GatedDeltaConfig, Mamba2Config

Doubles = NDArray[np.float64]
Weights = Mapping[str, Doubles]


def gated_delta(sizes: GatedDeltaConfig, norm_eps: float, layer: Weights, x: Doubles) -> Doubles:
    """The mixer's output [T, D] for normalised inputs [T, D]."""
    q, k, v, z, b, a = (x @ layer[f"delta.{name}_proj"].T for name in "qkvzba")
    mixed = _convolve(np.concatenate([q, k, v], axis=1), layer["delta.conv"], sizes.conv_size)
    q, k, v = np.split(mixed, [sizes.key_size, 2 * sizes.key_size], axis=1)
    per_key = sizes.num_value_heads // sizes.num_key_heads
    q, k = (
        np.repeat(_unit(y.reshape(len(x), sizes.num_key_heads, -1)), per_key, axis=1)
        for y in (q, k)
    )
    v, z = (y.reshape(len(x), sizes.num_value_heads, -1) for y in (v, z))
    rate = np.exp(layer["delta.decay_log"]) * np.logaddexp(0, a + layer["delta.dt_bias"])
    state = np.zeros(sizes.state_shape)
    read = np.empty_like(v)
    for t in range(len(x)):
        state = state * np.exp(-rate[t])[:, None, None]
        missing = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv,h->hkv", k[t], missing, 1 / (1 + np.exp(-b[t])))
        read[t] = np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(sizes.key_dim)
    normed = _norm(read, norm_eps) * layer["delta.gated_norm"] * _silu(z)
    out = normed.reshape(len(x), -1)
    if sizes.tiled_values:
        tiles = normed.reshape(len(x), sizes.num_key_heads, per_key, -1).swapaxes(1, 2)
        out = tiles.reshape(len(x), -1)
    result: Doubles = out @ layer["delta.out_proj"].T
    return result


def mamba2(sizes: Mamba2Config, norm_eps: float, layer: Weights, x: Doubles) -> Doubles:
    """The mixer's output [T, D] for normalised inputs [T, D]."""
    projected = x @ layer["mamba.in_proj"].T + layer.get("mamba.in_bias", np.zeros(1))
    inner = sizes.inner_size
    gate, mixed, dt = np.split(projected, [inner, inner + sizes.conv_size], axis=1)
    mixed = _convolve(
        mixed, layer["mamba.conv"], sizes.conv_size, layer.get("mamba.conv_bias", np.zeros(1))
    )
    width = sizes.num_groups * sizes.state_size
    values, b, c = np.split(mixed, [inner, inner + width], axis=1)
    values = values.reshape(len(x), sizes.num_heads, -1)
    per_group = sizes.num_heads // sizes.num_groups
    b, c = (np.repeat(y.reshape(len(x), sizes.num_groups, -1), per_group, axis=1) for y in (b, c))
    step = np.clip(np.logaddexp(0, dt + layer["mamba.dt_bias"]), sizes.dt_min, sizes.dt_max)
    decay = np.exp(-np.exp(layer["mamba.decay_log"]) * step)
    state = np.zeros(sizes.state_shape)
    read = np.empty_like(values)
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        state = state + np.einsum("h,hp,hn->hpn", step[t], values[t], b[t])
        read[t] = np.einsum("hpn,hn->hp", state, c[t]) + layer["mamba.d"][:, None] * values[t]
    gated = (read.reshape(len(x), -1) * _silu(gate)).reshape(len(x), sizes.num_groups, -1)
    normed = _norm(gated, norm_eps).reshape(len(x), -1) * layer["mamba.gated_norm"]
    result: Doubles = normed @ layer["mamba.out_proj"].T
    return result + layer.get("mamba.out_bias", np.zeros(1))


def _convolve(x: Doubles, taps: Doubles, channels: int, bias: Doubles | float = 0.0) -> Doubles:
    taps = taps.reshape(channels, -1)
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, channels)), x])
    width = taps.shape[1]
    total = sum(padded[j : j + len(x)] * taps[:, j] for j in range(width))
    return _silu(np.asarray(total + bias))


def _silu(x: Doubles) -> Doubles:
    return x / (1 + np.exp(-x))


def _unit(x: Doubles) -> Doubles:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def _norm(x: Doubles, norm_eps: float) -> Doubles:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm_eps)
