"""config.json of real models, both spellings of RoPE, refusals, and hostile options."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas.architectures import config_from_huggingface, supported
from atlas.config import ModelConfig
from atlas.errors import ModelFileError, UnsupportedModelError
from tests.helpers.reference import ARCHITECTURES

# Options as the models' own config.json files have them on the Hub, in the older spelling.
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN_2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_2_27B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
REAL = {
    "llama": LLAMA_3_1_8B,
    "mistral": MISTRAL_7B,
    "qwen2": QWEN_2_5,
    "qwen3_moe": QWEN_3_30B,
    "gemma2": GEMMA_2_27B,
    "gemma3": GEMMA_3_1B,
}


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
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)


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
    assert ours.num_kv_heads == config.num_key_value_heads
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
        ("llama", {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, "mamba2"),
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
    assert supported() == ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")


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


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.integers(-2, 8)
    | st.text(max_size=8)
    | st.sampled_from(["default", "yarn", "llama3", "linear", "silu", "full_attention"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
ROPE_KEYS = (
    "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate attention_factor"
).split()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_option_may_be_anything(data: st.DataObject) -> None:
    """A config read from hostile JSON is a ModelConfig or a typed error, never another one."""
    base = REAL[data.draw(st.sampled_from(sorted(REAL)))]
    keys = data.draw(st.lists(st.sampled_from(sorted(base)), max_size=3, unique=True))
    changes: dict[str, Any] = {key: data.draw(JSON | st.just(...)) for key in keys}
    if data.draw(st.booleans()):
        section = st.dictionaries(st.sampled_from(ROPE_KEYS), JSON, max_size=8)
        changes["rope_scaling"] = data.draw(section)
    generation = data.draw(st.none() | st.fixed_dictionaries({"eos_token_id": JSON}))
    changed = {key: value for key, value in (base | changes).items() if value is not ...}
    try:
        config, _ = config_from_huggingface(changed, generation)
    except ModelFileError as error:
        assert len(str(error)) < 2000
    else:
        assert len(config.windows) == config.num_layers
        assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=12) | st.sampled_from(sorted(LLAMA_3_1_8B)), JSON))
def test_any_object_is_a_config_or_a_typed_error(options: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        config_from_huggingface(options)
