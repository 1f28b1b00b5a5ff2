"""Options of real hybrids, in config.json and in GGUF metadata, and refusals."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import transformers

from atlas.architectures import config_from_gguf, config_from_huggingface
from atlas.config import ModelConfig
from atlas.errors import ModelFileError, UnsupportedModelError
from tests.helpers.real_configs import (
    BAMBA_9B,
    MAMBA_CODESTRAL_7B,
    NEMOTRON_3_NANO,
    QWEN_3_5_35B,
    QWEN_3_NEXT_80B,
    REAL_HYBRIDS,
)
from tests.helpers.real_metadata import MAMBA2, NEMOTRON_H_MOE, QWEN35_MOE, tensors_for


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    """`config` with `changes`; ``...`` removes an option."""
    changed = {key: value for key, value in (config | changes).items() if value is not ...}
    return config_from_huggingface(changed)[0]


def read_gguf(metadata: dict[str, Any], *extra: str, **changes: Any) -> ModelConfig:
    """`metadata` with `changes`; ``__`` stands for a dot."""
    name = metadata["general.architecture"]
    changed = {f"{name}.{key.replace('__', '.')}": value for key, value in changes.items()}
    tensors = tensors_for(metadata, *extra)
    return config_from_gguf(metadata | changed, tensors, origin="model.gguf")[0]


def test_qwen_3_next() -> None:
    config = read(QWEN_3_NEXT_80B)
    assert Counter(config.layer_kinds) == {"gated_delta": 36, "attention": 12}
    assert config.layer_kinds[:4] == ("gated_delta",) * 3 + ("attention",)
    assert config.layer_blocks(3) == ("attention", "moe")
    delta, moe = config.gated_delta, config.moe
    assert delta is not None
    assert (delta.conv_size, delta.value_size, delta.state_shape) == (8192, 4096, (32, 128, 128))
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.shared_size, moe.shared_gate) == (512, 10, 512, True)
    assert (config.rope.rotary_dim, config.rope.theta) == (64, 1e7)
    assert config.norm_offset
    assert config.attention_gate
    assert read(QWEN_3_NEXT_80B, mlp_only_layers=[3]).layer_blocks(3) == ("attention", "mlp")


def test_qwen_3_5() -> None:
    config, ignored = config_from_huggingface(QWEN_3_5_35B)
    assert ignored == ("vision_config",)
    assert config.architecture == "qwen3_5_moe"
    assert Counter(config.layer_kinds) == {"gated_delta": 30, "attention": 10}
    assert config.attention_layers == tuple(range(3, 40, 4))
    assert (config.rope.rotary_dim, config.rope.sections) == (64, (11, 11, 10))
    assert config.mtp_kinds == ("attention",)
    assert config.mtp_blocks(0) == ("attention", "moe")
    assert config.intermediate_size == 0


def test_mamba_2() -> None:
    config = read(MAMBA_CODESTRAL_7B)
    assert config.layer_kinds == ("mamba2",) * 64
    assert config.layer_blocks(0) == ("mamba2",)
    assert config.attention_layers == ()
    mamba = config.mamba2
    assert mamba is not None
    assert (mamba.inner_size, mamba.conv_size, mamba.input_size) == (8192, 10240, 18560)
    assert (mamba.dt_min, mamba.dt_max) == (0.0, math.inf)
    spelt = {"time_step_limit": [0.5, {"__float__": "Infinity"}]}
    assert read(MAMBA_CODESTRAL_7B, **spelt).mamba2.dt_min == 0.5  # type: ignore[union-attr]


def test_nemotron_3() -> None:
    config = read(NEMOTRON_3_NANO)
    assert Counter(config.layer_kinds) == {"mamba2": 23, "moe": 23, "attention": 6}
    assert config.mixer_only
    assert not config.rotary
    assert config.activation == "relu_squared"
    moe, mamba = config.moe, config.mamba2
    assert moe is not None
    assert (moe.scoring, moe.selection_bias, moe.scale, moe.shared_size) == (
        "sigmoid", True, 2.5, 3712,
    )  # fmt: skip
    assert mamba is not None
    assert mamba.dt_min == 0.001
    names = ["mamba", "moe", "attention"]
    assert read(NEMOTRON_3_NANO, layers_block_type=names).layer_kinds == (
        "mamba2", "moe", "attention",
    )  # fmt: skip


def test_bamba() -> None:
    config = read(BAMBA_9B)
    assert config.attention_layers == (9, 18, 27)
    assert config.layer_blocks(9) == ("attention", "mlp")
    assert config.rope.rotary_dim == 64
    assert read(BAMBA_9B, mamba_d_head="auto") == config


@pytest.mark.parametrize("name", REAL_HYBRIDS)
def test_transformers_5_writes_the_same_model(name: str) -> None:
    old = REAL_HYBRIDS[name]
    saved = transformers.AutoConfig.for_model(**old).to_dict()
    assert read(saved | {"architectures": old["architectures"]}) == read(old)


@pytest.mark.parametrize("name", REAL_HYBRIDS)
def test_absent_options_have_the_defaults_of_transformers(name: str) -> None:
    wrapped = name == "qwen3_5_moe"
    old = REAL_HYBRIDS[name]["text_config"] if wrapped else REAL_HYBRIDS[name]
    required = {"architectures", "model_type", "hidden_size", "vocab_size", "num_hidden_layers",
                "num_attention_heads", "intermediate_size", "hybrid_override_pattern"}  # fmt: skip
    small = {key: value for key, value in old.items() if key in required}
    full = type(transformers.AutoConfig.for_model(**old))(**small).to_dict()
    assert read(full) == read(small)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_next", {"output_gate_type": "sigmoid"}, "output_gate_type"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 48}, "sliding_attention"),
        ("qwen3_next", {"linear_num_value_heads": 24}, "24 value heads"),
        ("qwen3_next", {"partial_rotary_factor": 0.001}, "partial_rotary_factor"),
        ("qwen3_next", {"rope_scaling": {"mrope_section": [1, 2], "type": "default"}}, "mrope"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "1 taps"),
        ("mamba2", {"expand": 3}, "expand is 3"),
        ("mamba2", {"n_groups": 3}, "3 groups"),
        ("mamba2", {"time_step_limit": [1.0, 0.0]}, "time_step_limit"),
        ("nemotron_h", {"hybrid_override_pattern": "MOE"}, "'O'"),
        ("nemotron_h", {"hybrid_override_pattern": ...}, "layers_block_type"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"topk_group": 3, "n_group": 2}, "topk_group"),
        ("nemotron_h", {"sliding_window": 512}, "sliding_window"),
        ("nemotron_h", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias"),
        ("bamba", {"attn_rotary_emb": 128}, "attn_rotary_emb"),
        ("bamba", {"attn_layer_indices": [32]}, "attn_layer_indices"),
        ("bamba", {"mamba_d_head": 32}, "mamba_expand"),
    ],
)  # fmt: skip
def test_refusals_name_the_option(base: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        read(REAL_HYBRIDS[base], **change)


def test_gguf_of_qwen_3_5() -> None:
    config = read_gguf(QWEN35_MOE)
    expected = config_from_huggingface(QWEN_3_5_35B)[0]
    assert (config.num_layers, config.mtp_kinds) == (40, ("attention",))
    assert config.layer_kinds == expected.layer_kinds
    assert config.gated_delta is not None
    assert config.gated_delta.tiled_values
    assert config.moe == expected.moe
    assert config.rope == expected.rope


def test_gguf_of_mamba_models() -> None:
    mamba = read_gguf(MAMBA2, "blk.0.ssm_conv1d.bias")
    assert mamba.mamba2 == read(MAMBA_CODESTRAL_7B).mamba2
    assert mamba.max_seq_len == 2**20
    nemotron = read_gguf(NEMOTRON_H_MOE, "blk.0.ssm_conv1d.bias")
    assert nemotron.mamba2 == read(NEMOTRON_3_NANO).mamba2
    assert nemotron.layer_kinds == ("mamba2", "moe", "attention", "moe", "mamba2", "mlp")
    assert (nemotron.intermediate_size, nemotron.num_kv_heads) == (96, 2)


@pytest.mark.parametrize(
    ("metadata", "change", "named"),
    [
        (QWEN35_MOE, {"nextn_predict_layers": 41}, "nextn_predict_layers is 41"),
        (QWEN35_MOE, {"ssm__inner_size": 4095}, "ssm.inner_size is 4095"),
        (QWEN35_MOE, {"expert_gating_func": 2}, "expert_gating_func"),
        (QWEN35_MOE, {"rope__dimension_sections": [1, 2]}, "dimension_sections"),
        (MAMBA2, {"attention__head_count": 3}, "attention.head_count"),
        (MAMBA2, {"ssm__dt_b_c_rms": True}, "ssm.dt_b_c_rms"),
        (NEMOTRON_H_MOE, {"attention__head_count_kv": [0, 2, 4]}, "head_count_kv"),
        (NEMOTRON_H_MOE, {"expert_gating_func": 1}, "expert_gating_func"),
    ],
)
def test_gguf_refusals_name_the_key(
    metadata: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFileError, match=named):
        read_gguf(metadata, **change)


def test_a_granite_hybrid_is_not_taken_for_bamba() -> None:
    metadata = {
        "general.architecture": "granitehybrid",
        "granitehybrid.block_count": 1,
        "granitehybrid.embedding_length": 64,
        "granitehybrid.rope.scaling.finetuned": False,
    }
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.finetuned.*Bamba"):
        read_gguf(metadata)
