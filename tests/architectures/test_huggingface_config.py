"""config.json of real models, both spellings of RoPE, refusals and malformed options."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from atlas.architectures import config_from_huggingface, supported
from atlas.config import ModelConfig
from atlas.errors import ModelFileError, UnsupportedModelError
from tests.helpers.real_configs import (
    GEMMA_2_27B,
    GEMMA_3_1B,
    LLAMA_3_1_8B,
    MISTRAL_7B,
    QWEN_2_5,
    QWEN_3_30B,
    REAL,
)
from tests.helpers.reference import ARCHITECTURES


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    """`config` with `changes`; ``...`` removes an option."""
    changed = {key: value for key, value in (config | changes).items() if value is not ...}
    return config_from_huggingface(changed)[0]


def test_llama_3() -> None:
    config = read(LLAMA_3_1_8B)
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("llama", 128, 8)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.rope.scaling, config.rope.theta, config.rope.factor) == ("llama3", 5e5, 8.0)
    assert config.rope.original_max_seq_len == 8192
    assert config.windows == (None,) * 32
    assert config.attention_scale == 128**-0.5
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)
    assert not config.qk_norm


def test_biases_of_llama_and_qwen() -> None:
    biased = read(LLAMA_3_1_8B, attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias
    assert biased.output_bias
    assert biased.mlp_bias
    qwen = read(QWEN_2_5)
    assert qwen.qkv_bias
    assert not qwen.output_bias


def test_mistral_windows() -> None:
    assert read(MISTRAL_7B).windows == (4096,) * 32
    assert read(MISTRAL_7B, sliding_window=...).windows == (4096,) * 32  # the class's default
    assert read(MISTRAL_7B, sliding_window=None).windows == (None,) * 32
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        read(MISTRAL_7B, layer_types=["full_attention"] * 32)


def test_qwen_windows() -> None:
    assert read(QWEN_2_5).windows == (None,) * 24
    windows = read(QWEN_2_5, use_sliding_window=True).windows
    assert windows == (None,) * 21 + (32768,) * 3
    types = ["sliding_attention", "full_attention"] * 12
    windows = read(QWEN_2_5, use_sliding_window=True, layer_types=types).windows
    assert windows == (32768, None) * 12
    with pytest.raises(ModelFileError, match="sliding_window"):
        read(QWEN_2_5, layer_types=types)


def test_qwen_moe() -> None:
    config = read(QWEN_3_30B)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k) == (128, 8)
    assert config.moe.intermediate_size == 768
    assert config.moe.normalize_top_k
    assert config.moe.sparse_layers == (True,) * 48
    assert config.qk_norm
    assert config.head_dim == 128
    mixed = read(QWEN_3_30B, decoder_sparse_step=2, mlp_only_layers=[3])
    assert mixed.moe is not None
    assert mixed.moe.sparse_layers[:6] == (False, True, False, False, False, True)
    renamed = read(QWEN_3_30B, num_experts=..., num_local_experts=64)  # transformers 5
    assert renamed.moe is not None
    assert renamed.moe.num_experts == 64


def test_gemma_2() -> None:
    config = read(GEMMA_2_27B)
    assert config.attention_scale == 144**-0.5
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.windows == (4096, None) * 23
    assert config.embedding_scale == 4608**0.5
    assert config.activation == "gelu_tanh"
    assert config.tie_embeddings
    assert config.post_norms
    assert config.norm_offset
    uncapped = read(GEMMA_2_27B, attn_logit_softcapping=None, final_logit_softcapping=...)
    assert (uncapped.attention_softcap, uncapped.final_softcap) == (None, 30.0)


def test_gemma_3() -> None:
    config = read(GEMMA_3_1B)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert config.rope.theta == 1e6
    assert config.rope_local is not None
    assert config.rope_local.theta == 1e4
    assert config.qk_norm
    assert (config.attention_softcap, config.final_softcap) == (None, None)
    assert config.eos_token_ids == (1, 106)
    scaled = read(GEMMA_3_1B, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (scaled.rope.scaling, scaled.rope.factor, scaled.rope.theta) == ("linear", 8.0, 1e6)
    assert scaled.rope_local == config.rope_local


@pytest.mark.parametrize("name", REAL)
def test_transformers_5_writes_the_same_model(name: str) -> None:
    """What transformers reads from an old config.json and saves again means the same to us."""
    old = REAL[name]
    saved = transformers.AutoConfig.for_model(**old).to_dict()
    assert "rope_scaling" not in saved
    assert "rope_parameters" in saved
    assert read(saved | {"architectures": old["architectures"]}) == read(old)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_windows_and_types_agree_with_transformers(name: str) -> None:
    config = ARCHITECTURES[name]()
    ours = read(config.to_dict())
    types = getattr(config, "layer_types", None)
    if types is not None:
        expected = [kind == "sliding_attention" for kind in types]
        assert [window is not None for window in ours.windows] == expected
    assert ours.tie_embeddings == config.tie_word_embeddings
    assert ours.num_kv_heads == getattr(config, "num_key_value_heads", 0)
    assert ours.eos_token_ids == (config.eos_token_id,)


def test_yarn_attention_factor() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read(QWEN_2_5, rope_scaling=yarn).rope
    assert rope.scaling == "yarn"
    assert rope.attention_factor == pytest.approx(1.1386294)
    assert (
        read(QWEN_2_5, rope_scaling=yarn | {"attention_factor": 1.5}).rope.attention_factor == 1.5
    )
    mscale = yarn | {"mscale": 0.707, "mscale_all_dim": 1.0}
    factor = read(QWEN_2_5, rope_scaling=mscale).rope.attention_factor
    assert factor == pytest.approx((0.0707 * 1.3862944 + 1) / 1.1386294)


def test_end_of_text_is_what_either_file_declares() -> None:
    config, _ = config_from_huggingface(QWEN_2_5, {"eos_token_id": [151645, 151643]})
    assert config.eos_token_ids == (151645, 151643)
    assert read(LLAMA_3_1_8B, eos_token_id=None).eos_token_ids == ()
    assert read(MISTRAL_7B, eos_token_id=...).eos_token_ids == (2,)  # the class's default


def test_options_that_nothing_reads_are_reported() -> None:
    _, ignored = config_from_huggingface(LLAMA_3_1_8B | {"swizzle": 3})
    assert ignored == ("swizzle",)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        ("llama", {"model_type": "rwkv7", "architectures": ["Rwkv7ForCausalLM"]}, "rwkv7"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClass"),
        ("llama", {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
         "Gemma3ForConditionalGeneration"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]},
                   "rope_scaling": None}, "mrope_section"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("llama", {"head_dim": 127}, "head_dim is 127"),
        ("llama", {"num_key_value_heads": 5}, "num_kv_heads 5"),
        ("llama", {"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ("qwen2", {"layer_types": ["linear_attention"] * 24}, "linear_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
    ],
)  # fmt: skip
def test_refusals_name_the_option(base: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(REAL[base], **change)


def test_the_refusal_of_an_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(LLAMA_3_1_8B, model_type="rwkv")
    for word in ("rwkv", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "gemma3_text"):
        assert word in str(caught.value)
    dense = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")
    recurrent = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "mamba2", "nemotron_h", "bamba")
    assert supported() == dense + recurrent


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; allowed: an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_size": 32000.0}, "vocab_size is 32000.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"model_type": 7}, "model_type is 7"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "not a multiple of 7 heads"),
    ],
)
def test_malformed_options_name_key_value_and_what_is_allowed(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(LLAMA_3_1_8B, **change)
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)
