"""The definitions of the recurrent ops against transformers' functions in float32."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from atlas.config import RopeConfig
from atlas.layers.rope import rope_table
from atlas.ops import OPS

ROWS = 150
RNG = np.random.default_rng(6)
SLOTS = np.array([1], np.int32)
POSITIONS = np.arange(ROWS, dtype=np.int32)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def near(actual: np.ndarray, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    want = expected.detach().numpy()
    np.testing.assert_allclose(actual, want, rtol=0, atol=tolerance * np.abs(want).max())


def cu_rows(rows: int = ROWS) -> np.ndarray:
    return np.array([0, rows], np.int32)


@pytest.mark.parametrize(("width", "biased"), [(4, False), (2, True), (5, True)])
def test_causal_conv(width: int, biased: bool) -> None:
    x, weight, bias = normal(ROWS, 37), normal(width, 37), normal(37) if biased else None
    tails, out = np.zeros((2, width - 1, 37), np.float32), np.empty_like(x)
    args = (weight, bias, SLOTS, cu_rows(ROWS - 1), POSITIONS)
    OPS["causal_conv_prefill"](x, *args, tails=tails, out=out)
    taps = tensor(weight.T)
    torch_bias = None if bias is None else tensor(bias)
    want = qwen3_next.causal_conv1d_fn(tensor(x.T)[None], taps, torch_bias, "silu")
    near(out[:-1], want[0].T[:-1])
    # The last row as a decode step.
    state = tensor(tails[1].T)[None]
    args = (weight, bias, SLOTS, cu_rows(1), POSITIONS)
    OPS["causal_conv_step"](x[-1:], *args, tails=tails, out=out[-1:])
    step = qwen3_next.causal_conv1d_update(tensor(x[-1:].T)[None], state, taps, torch_bias, "silu")
    near(out[-1:], step[0].T)
    near(out[-1:], want[0].T[-1:])
    near(tails[1], state[0].T)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"), [(2, 6, 16, 24), (3, 3, 20, 12)]
)
def test_gated_delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
    keys = key_heads * key_dim
    qkv = normal(ROWS, 2 * keys + value_heads * value_dim)
    a, b = normal(ROWS, value_heads), normal(ROWS, value_heads)
    decay_log, dt_bias = normal(value_heads), normal(value_heads)
    states = np.zeros((2, value_heads, key_dim, value_dim), np.float32)
    states[1] = normal(*states[1].shape)
    start = tensor(states[1])[None]
    out = np.empty((ROWS, value_heads, value_dim), np.float32)
    args = (qkv, a, b, decay_log, dt_bias, SLOTS, cu_rows(), POSITIONS)
    OPS["gated_delta_prefill"](*args, states=states, out=out)

    q, k, v = (tensor(part)[None] for part in np.split(qkv, [keys, 2 * keys], axis=1))
    arguments = {
        "query": q.reshape(1, ROWS, key_heads, key_dim),
        "key": k.reshape(1, ROWS, key_heads, key_dim),
        "value": v.reshape(1, ROWS, value_heads, value_dim),
        "g": -tensor(decay_log).exp() * torch.nn.functional.softplus(tensor(a + dt_bias))[None],
        "beta": tensor(b)[None].sigmoid(),
        "initial_state": start,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    for reference in (
        qwen3_next.torch_recurrent_gated_delta_rule,
        qwen3_next.torch_chunk_gated_delta_rule,
    ):
        want, final = reference(**arguments)
        near(out, want[0])
        near(states[1], final[0])
    assert not states[0].any()


@pytest.mark.parametrize("bounds", [(0.0, float("inf")), (0.3, 1.5)])
def test_mamba2(bounds: tuple[float, float]) -> None:
    heads, groups, dim, size = 6, 2, 12, 20
    x, b, c = normal(ROWS, heads, dim), normal(ROWS, groups, size), normal(ROWS, groups, size)
    dt, decay_log, d, dt_bias = normal(ROWS, heads), normal(heads), normal(heads), normal(heads)
    states = np.zeros((2, heads, dim, size), np.float32)
    states[1] = normal(heads, dim, size)
    start, out = tensor(states[1])[None], np.empty_like(x)
    args = (x, b, c, dt, decay_log, d, dt_bias, *bounds, SLOTS, cu_rows(), POSITIONS)
    OPS["mamba2_prefill"](*args, states=states, out=out)

    want, final = mamba2.mamba2_chunk_scan(
        *(tensor(part)[None] for part in (x, dt)),
        -tensor(decay_log).exp(),
        *(tensor(part)[None] for part in (b, c)),
        chunk_size=32,
        D=tensor(d),
        dt_bias=tensor(dt_bias),
        initial_states=start,
        dt_softplus=True,
        dt_limit=bounds,
        return_final_states=True,
    )
    near(out, want[0])
    near(states[1], final[0])
    if bounds[0] > 0:
        return  # transformers does not clamp in its step
    OPS["mamba2_step"](
        *(part[:1] for part in (x, b, c, dt)),
        *(decay_log, d, dt_bias, *bounds, SLOTS, cu_rows(1), POSITIONS[:1]),
        states=states,
        out=out[:1],
    )
    wide = (heads, dim)
    step = mamba2.mamba2_selective_state_update(
        final,
        tensor(x[:1]),
        tensor(dt[:1])[..., None].expand(1, *wide),
        -tensor(decay_log).exp()[:, None, None].expand(*wide, size),
        tensor(b[:1]),
        tensor(c[:1]),
        tensor(d)[:, None].expand(wide),
        dt_bias=tensor(dt_bias)[:, None].expand(wide),
        dt_softplus=True,
    )
    near(out[:1], step)
    near(states[1], final[0])


def test_gated_rmsnorm() -> None:
    x, gate, weight, out = normal(9, 48), normal(9, 48), normal(48), np.empty((9, 48), np.float32)
    OPS["gated_rmsnorm"](x, gate, weight, 1e-5, 16, False, out=out)
    norm = nemotron_h.NemotronHRMSNormGated(48, group_size=16, eps=1e-5)
    norm.weight.data = tensor(weight)
    near(out, norm(tensor(x), tensor(gate)))
    OPS["gated_rmsnorm"](x, gate, weight[:16], 1e-5, 16, True, out=out)
    first = qwen3_next.Qwen3NextRMSNormGated(16, eps=1e-5)
    first.weight.data = tensor(weight[:16])
    near(out, first(tensor(x.reshape(-1, 16)), tensor(gate.reshape(-1, 16))).reshape(9, 48))


def test_moe_route_of_nemotron() -> None:
    config = SimpleNamespace(
        num_experts_per_tok=5,
        num_local_experts=24,
        hidden_size=8,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
    )
    router = nemotron_h.NemotronHTopkRouter(config)
    router.weight.data, bias = tensor(normal(24, 8)), normal(24)
    router.e_score_correction_bias.copy_(tensor(bias))
    scores, want_weights, want_ids = router(tensor(normal(40, 8)))
    ids, weights = np.empty((40, 5), np.int32), np.empty((40, 5), np.float32)
    logits = scores.detach().numpy()
    args = (logits, True, "sigmoid", bias, 2.5, 4, 2)
    OPS["moe_route"](*args, ids=ids, weights=weights)
    dense, want = np.zeros((40, 24), np.float32), torch.zeros(40, 24)
    np.put_along_axis(dense, ids.astype(np.int64), weights, axis=1)
    near(dense, want.scatter(1, want_ids, want_weights))


def test_rope_axes_of_qwen3_5() -> None:
    config = qwen3_5.Qwen3_5TextConfig(
        head_dim=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
    )
    q, positions = normal(ROWS, 2, 32), RNG.integers(0, 99, (3, ROWS)).astype(np.int32)
    cos, sin = qwen3_5.Qwen3_5TextRotaryEmbedding(config)(tensor(q), tensor(positions)[:, None])
    want, _ = qwen3_5.apply_rotary_pos_emb(tensor(q)[None], tensor(q)[None], cos, sin, 2)
    table = rope_table(RopeConfig(theta=10000.0, rotary_dim=16), 32, 100)
    OPS["rope"](q, positions, table, (3, 3, 2))
    near(q, want[0])
