"""atlas-tiny's training network computes what transformers' Qwen3.5 computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import folder
from tiny.gated_delta import UnitLowerInverse, chunk_scan, gated_delta
from tiny.network import CONFIG, Network
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

SMALL: dict[str, Any] = CONFIG | {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "layer_types": CONFIG["layer_types"][:4],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}


def restless(config: dict[str, Any]) -> Network:
    """Weights far from their start: every norm, gate and decay matters."""
    torch.manual_seed(1)
    network = Network(config)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight *= 3.0
    return network.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    folder.write_weights(restless(SMALL), path)
    return path


def reference(path: Path) -> Qwen3_5ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_logits_equal_transformers(exported: Path, length: int) -> None:
    network, model = folder.read_network(exported), reference(exported)
    assert type(model) is Qwen3_5ForCausalLM
    tokens = torch.randint(SMALL["vocab_size"], (2, length))
    tokens[:, 20:120] = 7  # a run of equal tokens: the chunk's system is as coupled as it gets
    with torch.no_grad():
        want = model(tokens).logits
        got = network.logits(network(tokens)[0])
    difference = (got - want).abs().amax(-1) / want.abs().amax(-1)
    assert difference.max() <= 1e-4


def test_gradients_equal_transformers(exported: Path) -> None:
    network, model = folder.read_network(exported), reference(exported)
    tokens = torch.randint(SMALL["vocab_size"], (2, 90))
    model(tokens).logits.square().mean().backward()
    network.logits(network(tokens)[0]).square().mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in network.named_parameters():
        if not name.startswith("mtp."):
            scale = want[name].abs().max()
            assert (parameter.grad - want[name]).abs().max() <= 2e-3 * scale, name


def test_mtp_tensors_are_those_of_the_format(exported: Path) -> None:
    mixer = [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    mlp = [f"mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")]
    layer = [*mixer, *mlp, "input_layernorm", "post_attention_layernorm"]
    names = ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    names += [f"layers.0.{name}" for name in layer]
    network = folder.read_network(exported)
    found = {name for name in network.state_dict() if name.startswith("mtp.")}
    assert found == {f"mtp.{name}.weight" for name in names}


def test_the_mtp_head_sees_its_row_and_the_token_after() -> None:
    network = restless(SMALL)
    tokens = torch.randint(SMALL["vocab_size"], (1, 40))
    with torch.no_grad():
        before = network(tokens[:, :-1], tokens[:, 1:])[1]
        tokens[0, 21] += 1
        after = network(tokens[:, :-1], tokens[:, 1:])[1]
    changed = (before != after).any(-1)[0]
    assert not changed[:20].any()  # row 19 is given tokens 0 to 20
    assert changed[20:].all()


@pytest.mark.parametrize(("length", "decay"), [(1, 0.1), (130, 0.01), (130, 20.0)])
def test_chunked_gated_delta_equals_the_recurrence(length: int, decay: float) -> None:
    torch.manual_seed(length)
    q, k = torch.randn(2, 2, 3, length, 16).unbind()
    v = torch.randn(2, 3, length, 24)
    log_decay, beta = -decay * torch.rand(2, 3, length), torch.rand(2, 3, length)
    got = gated_delta(q, k, v, log_decay, beta)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    rates = {"g": log_decay.transpose(1, 2), "beta": beta.transpose(1, 2)}
    want, _ = torch_recurrent_gated_delta_rule(*rows, **rates, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_triangular_inverse() -> None:
    a = torch.randn(3, 5, 16, 16, dtype=torch.float64).tril(-1).requires_grad_()
    inverse = UnitLowerInverse.apply(a)
    identity = torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(inverse @ (identity + a), identity.expand_as(a))
    small = (0.5 * torch.randn(2, 8, 8, dtype=torch.float64)).tril(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: UnitLowerInverse.apply(x.tril(-1)), small)


def test_chunk_scan() -> None:
    maps = torch.randn(2, 5, 3, 3, dtype=torch.float64).requires_grad_()
    adds = torch.randn(2, 5, 3, 4, dtype=torch.float64).requires_grad_()
    state = torch.zeros(2, 3, 4, dtype=torch.float64)
    for chunk, before in enumerate(chunk_scan(maps, adds).unbind(1)):
        torch.testing.assert_close(before, state)
        state = maps[:, chunk] @ state + adds[:, chunk]
    assert torch.autograd.gradcheck(chunk_scan, (maps, adds))
