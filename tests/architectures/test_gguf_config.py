"""GGUF metadata of real models, what it leaves to the tensors, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.architectures import config_from_gguf
from atlas.config import ModelConfig
from atlas.errors import ModelFileError, UnsupportedModelError
from tests.helpers.real_metadata import (
    GEMMA2_27B,
    GEMMA3_4B,
    METADATA,
    QWEN3_MOE,
    SMOLLM2,
    tensors_for,
)


def read(metadata: dict[str, Any], *extra: str, **changes: Any) -> ModelConfig:
    """`metadata` with changes; ``__`` stands for a dot, ``...`` removes a key."""
    name = metadata["general.architecture"]
    changed = metadata | {
        key.replace("__", ".") if key.startswith(("general", "tokenizer", "split"))
        else f"{name}.{key.replace('__', '.')}": value
        for key, value in changes.items()
    }  # fmt: skip
    changed = {key: value for key, value in changed.items() if value is not ...}
    return config_from_gguf(changed, tensors_for(metadata, *extra), origin="model.gguf")[0]


def test_smollm2() -> None:
    config = read(SMOLLM2)
    assert (config.architecture, config.vocab_size, config.head_dim) == ("llama", 49152, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.rope.theta == 1e5
    assert config.tie_embeddings
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2,)
    assert config.windows == (None,) * 30
    assert not read(SMOLLM2, "output.weight").tie_embeddings


def test_biases_are_read_off_the_tensors() -> None:
    assert not read(SMOLLM2).qkv_bias
    config = read(SMOLLM2, "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias")
    assert config.qkv_bias
    assert config.output_bias
    assert config.mlp_bias


def test_rope_scaling() -> None:
    linear = read(SMOLLM2, rope__scaling__type="linear", rope__scaling__factor=4.0).rope
    assert (linear.scaling, linear.factor) == ("linear", 4.0)
    assert read(SMOLLM2, rope__scaling__factor=4.0).rope == linear  # the type's default
    assert read(SMOLLM2, rope__scale_linear=4.0).rope == linear  # an older key
    assert read(SMOLLM2, rope__scaling__type="none", rope__scaling__factor=4.0).rope.factor == 1.0
    yarn = read(
        SMOLLM2,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=2048,
    ).rope
    assert (yarn.scaling, yarn.original_max_seq_len) == ("yarn", 2048)
    assert yarn.attention_factor == pytest.approx(1.1386294)


def test_mixture_of_experts() -> None:
    moe = read(QWEN3_MOE).moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (128, 8, 768)
    assert moe.normalize_top_k
    assert moe.sparse_layers == (True,) * 48
    plain = read(QWEN3_MOE, expert_weights_norm=False).moe
    assert plain is not None
    assert not plain.normalize_top_k


def test_gemma_2() -> None:
    config = read(GEMMA2_27B)
    assert config.attention_scale == 144**-0.5  # the 27B model: hidden size over heads
    assert read(GEMMA2_27B, block_count=42).attention_scale == 128**-0.5
    assert read(GEMMA2_27B, attention__scale=0.25).attention_scale == 0.25
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.windows == (4096, None) * 23
    assert not config.norm_offset
    assert config.eos_token_ids == (1, 107)


def test_gemma_3() -> None:
    config = read(GEMMA3_4B)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (config.rope.scaling, config.rope.factor) == ("linear", 8.0)
    assert config.rope_local is not None
    assert (config.rope_local.theta, config.rope_local.scaling) == (1e4, "none")
    assert read(GEMMA3_4B, rope__freq_base_swa=5e4).rope_local != config.rope_local
    pattern = np.arange(34) % 2 == 0
    assert read(GEMMA3_4B, attention__sliding_window_pattern=pattern).windows == (1024, None) * 17
    assert read(GEMMA3_4B, attention__sliding_window=...).windows == (None,) * 34


def test_a_window_in_a_llama_file_holds_for_every_layer() -> None:
    """Mistral models come as llama files."""
    assert read(SMOLLM2, attention__sliding_window=4096).windows == (4096,) * 30


def test_keys_that_nothing_reads_are_reported() -> None:
    metadata = SMOLLM2 | {"llama.swizzle": 3, "other.key": 1}
    _, ignored = config_from_gguf(metadata, tensors_for(SMOLLM2), origin="x")
    assert ignored == ("llama.swizzle",)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general__architecture": "mamba"}, "general.architecture 'mamba'.*qwen3moe"),
        ({"general__type": "adapter"}, "general.type is 'adapter'"),
        ({"expert_count": 8}, "llama.expert_count is 8"),
        ({"rope__scaling__type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"rope__scaling__yarn_attn_factor": 2.0}, "yarn_attn_factor"),
        ({"rope__dimension_count": 32}, "rope.dimension_count is 32"),
        ({"attention__value_length": 32}, "attention.value_length is 32"),
        ({"attention__causal": False}, "attention.causal is False"),
        ({"pooling_type": 1}, "pooling_type is 1"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"rope__freq_base_swa": 5e4}, "rope.freq_base_swa"),
        ({"split__count": 3}, "split.count is 3"),
    ],
)
def test_refusals_name_the_key(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(SMOLLM2, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_count": ...}, "llama.block_count is missing"),
        ({"block_count": 2**31}, "llama.block_count is 2147483648"),
        ({"embedding_length": "576"}, "llama.embedding_length is '576'"),
        ({"attention__head_count": np.array([9, 9])}, "llama.attention.head_count is"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"vocab_size": 50000}, "llama.vocab_size is 50000"),
        ({"tokenizer__ggml__eos_token_id": 99999}, "eos_token_id is 99999"),
    ],
)
def test_malformed_keys_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        read(SMOLLM2, **change)


def test_a_file_without_embedding() -> None:
    with pytest.raises(ModelFileError, match=r"token_embd\.weight is missing"):
        config_from_gguf(SMOLLM2, {}, origin="x")


@pytest.mark.parametrize("name", METADATA)
def test_sizes_are_those_of_the_file(name: str) -> None:
    metadata = METADATA[name]
    prefix = metadata["general.architecture"]
    config = read(metadata)
    assert config.hidden_size == metadata[f"{prefix}.embedding_length"]
    assert config.max_seq_len == metadata[f"{prefix}.context_length"]
