"""Configuration and canonical weights, read from a folder or a GGUF file, say all about a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from atlas.architectures import expected_weights
from atlas.config import GatedDeltaConfig, ModelConfig
from atlas.ops.blocks import quantize
from atlas.weights.checkpoint import open_checkpoint
from tests.helpers import plain_decoder
from tests.helpers.reference import ARCHITECTURES, NOT_IN_GGUF, ReferenceModel, build
from tests.helpers.reference_gguf import write_gguf

GetReference = Callable[[str], ReferenceModel]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Exactness 5: per row, max |a - b| / max |b| is at most 1e-4."""
    error = np.abs(actual - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() <= 1e-4, f"row {error.argmax()}: {error.max():.2e}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folder_gives_the_reference_logits(name: str, reference: GetReference) -> None:
    model = reference(name)
    prompt = model.prompt(40)
    with open_checkpoint(model.directory) as checkpoint:
        weights = plain_decoder.load_weights(checkpoint)
        actual = plain_decoder.logits(checkpoint.config, weights, prompt)
    assert_close(actual, model.logits(prompt))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_IN_GGUF])
def test_gguf_gives_the_folder(name: str, reference: GetReference, tmp_path: Path) -> None:
    """Bitwise equal weights, the same configuration, the same logits.

    Not bitwise are decays, of which the file stores a power, and what the file cannot say.
    """
    model = reference(name)
    prompt = model.prompt(40)
    gguf_path = write_gguf(model, tmp_path / f"{name}.gguf")
    with open_checkpoint(model.directory) as folder, open_checkpoint(gguf_path) as file:
        assert (folder.format_name, file.format_name) == ("safetensors", "gguf")
        expected, actual = plain_decoder.load_weights(folder), plain_decoder.load_weights(file)
        assert list(actual) == list(expected)
        for weight_name, values in expected.items():
            if weight_name.endswith("decay_log"):
                np.testing.assert_allclose(actual[weight_name], values, rtol=1e-5, atol=1e-6)
            elif weight_name.endswith("delta.out_proj"):
                columns = _columns(file.config.gated_delta)
                np.testing.assert_array_equal(actual[weight_name], values[:, columns])
            else:
                np.testing.assert_array_equal(actual[weight_name], values, err_msg=weight_name)
        assert _comparable(file.config) == _comparable(folder.config)
        assert file.ignored_options == folder.ignored_options == ()
        logits = plain_decoder.logits(file.config, actual, prompt)
    assert_close(logits, model.logits(prompt))


def test_parts_of_quantised_tensors(reference: GetReference, tmp_path: Path) -> None:
    """Rows are gathered whole, whatever their format: queries and gates, tiles of value heads."""
    model = reference("qwen3_5_moe")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(model, tmp_path / "model.gguf", quantize=q8_0)
    with open_checkpoint(model.directory) as folder, open_checkpoint(path) as file:
        for name in ("q_proj", "q_gate_proj", "k_proj"):
            name = f"layers.1.{name}"
            assert file.weight_formats()[name] == "q8_0"
            expected = quantize(folder.matrix(name), "q8_0").data
            np.testing.assert_array_equal(file.matrix(name).data, expected, err_msg=name)
        for name in ("q_proj", "v_proj", "z_proj"):
            name = f"layers.0.delta.{name}"
            expected = quantize(folder.matrix(name), "q8_0").data
            np.testing.assert_array_equal(file.matrix(name).data, expected, err_msg=name)


def _columns(sizes: GatedDeltaConfig | None) -> np.ndarray:
    """Columns of a gated delta layer's output projection in the order of the file."""
    assert sizes is not None
    columns = np.arange(sizes.value_size)
    if sizes.tiled_values:
        heads = columns.reshape(sizes.num_key_heads, -1, sizes.value_dim)
        columns = heads.swapaxes(0, 1).reshape(-1)
    return columns


def _comparable(config: ModelConfig) -> dict[str, object]:
    """Fields that both kinds of file spell alike, numbers as float32."""
    differing = {"norm_offset", "gated_delta"}  # GGUF norms hold the 1 already
    if config.architecture in ("llama", "mistral"):
        differing |= {"architecture", "rope"}  # Mistral files say llama; llama3 has divisors
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["rope"] = replace(config.rope, sections=None)  # the converter writes a default
    if config.gated_delta is not None:
        values["delta"] = replace(config.gated_delta, tiled_values=False)
    return {
        name: np.float32(value) if isinstance(value, float) else value
        for name, value in values.items()
        if name not in differing
    }


def test_canonical_weights_are_those_of_the_model(reference: GetReference) -> None:
    model = reference("gemma3")
    parameters = {name: p.detach().numpy() for name, p in model.model.named_parameters()}
    with open_checkpoint(model.directory) as checkpoint:
        weights = plain_decoder.load_weights(checkpoint)
    for canonical, stored in {
        "layers.1.q_proj": "model.layers.1.self_attn.q_proj.weight",
        "layers.2.o_proj": "model.layers.2.self_attn.o_proj.weight",
        "layers.0.down_proj": "model.layers.0.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(weights[canonical], parameters[stored])
    norm = parameters["model.layers.0.pre_feedforward_layernorm.weight"]
    np.testing.assert_array_equal(weights["layers.0.mlp_norm"], 1 + norm)


def test_experts_are_stacked_by_rows(reference: GetReference) -> None:
    model = reference("qwen3_moe")
    experts = model.model.model.layers[1].mlp.experts
    fused = experts.gate_up_proj.detach().numpy()
    with open_checkpoint(model.directory) as checkpoint:
        weights = plain_decoder.load_weights(checkpoint)
    gate, up = np.split(fused, 2, axis=1)
    np.testing.assert_array_equal(weights["layers.1.experts.gate_proj"], gate.reshape(-1, 64))
    np.testing.assert_array_equal(weights["layers.1.experts.up_proj"], up.reshape(-1, 64))
    np.testing.assert_array_equal(
        weights["layers.1.experts.down_proj"], experts.down_proj.detach().numpy().reshape(-1, 32)
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral_window", {"windows": (6, 6)}),
        ("qwen2_window", {"windows": (6, 6, 6)}),
        ("llama3_rope", {"rope": None}),
        ("llama_yarn", {"rope": None}),
        ("llama_linear", {"rope": None}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma2", {"windows": (5, 5, 5)}),
        ("gemma2", {"attention_scale": 32**-0.5}),
        ("gemma3", {"rope_local": None}),
        ("gemma3", {"embedding_scale": 1.0}),
    ],
)
def test_references_notice_a_wrong_option(
    name: str, change: dict[str, object], reference: GetReference
) -> None:
    """The tiny models are of use only if every option shows in their logits."""
    model = reference(name)
    prompt = model.prompt(40)
    with open_checkpoint(model.directory) as checkpoint:
        config, weights = checkpoint.config, plain_decoder.load_weights(checkpoint)
    if change == {"rope": None}:
        change = {"rope": replace(config.rope, scaling="none")}
    wrong = plain_decoder.logits(replace(config, **change), weights, prompt)  # type: ignore[arg-type]
    expected = model.logits(prompt)
    assert (np.abs(wrong - expected).max(-1) / np.abs(expected).max(-1)).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("qwen3_5", "", {"attention_gate": False}),
        ("qwen3_5", "rope", {"rotary_dim": None}),
        ("qwen3_5_tied", "rope", {"scaling": "none"}),
        ("qwen3_5_moe", "moe", {"shared_gate": False}),
        ("qwen3_5_moe", "moe", {"shared_size": 0}),
        ("mamba2_bounded", "mamba2", {"dt_min": 0.0}),
        ("mamba2_bounded", "mamba2", {"dt_max": 100.0}),
        ("nemotron_h", "mamba2", {"dt_min": 0.0}),
        ("nemotron_h_moe", "", {"rotary": True}),
        ("nemotron_h_moe", "moe", {"scoring": "softmax"}),
        ("nemotron_h_moe", "moe", {"scale": 1.0}),
        ("nemotron_h_moe", "moe", {"top_groups": 4}),
        ("nemotron_h_latent", "moe", {"normalize_top_k": True}),
        ("bamba", "rope", {"rotary_dim": None}),
    ],
)
def test_hybrid_references_notice_a_wrong_option(
    name: str, part: str, change: dict[str, Any], reference: GetReference
) -> None:
    """As above; ``part`` is the section of the configuration that changes."""
    model = reference(name)
    prompt = model.prompt(40)
    with open_checkpoint(model.directory) as checkpoint:
        config, weights = checkpoint.config, plain_decoder.load_weights(checkpoint)
    changed = {part: replace(getattr(config, part), **change)} if part else change
    wrong = plain_decoder.logits(replace(config, **changed), weights, prompt)
    expected = model.logits(prompt)
    assert (np.abs(wrong - expected).max(-1) / np.abs(expected).max(-1)).max() > 1e-2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_references_are_reproducible_and_varied(
    name: str, reference: GetReference, tmp_path: Path
) -> None:
    model = reference(name)
    prompt = model.prompt(12)
    text = model.greedy(prompt, 48)
    assert build(name, tmp_path).greedy(prompt, 48) == text
    assert len(set(text)) >= 10


def test_expected_weights_follow_the_options() -> None:
    config = ModelConfig(
        "llama", 100, 32, 2, 4, 2, 8, 48, 1e-6, 64, qkv_bias=True, tie_embeddings=True
    )
    shapes = expected_weights(config)
    assert shapes["embedding"] == (100, 32)
    assert shapes["layers.1.k_proj"] == (16, 32)
    assert shapes["layers.1.k_bias"] == (16,)
    assert shapes["layers.0.down_proj"] == (32, 48)
    assert "head" not in shapes
    assert "layers.0.o_bias" not in shapes
    assert expected_weights(replace(config, tie_embeddings=False))["head"] == (100, 32)
