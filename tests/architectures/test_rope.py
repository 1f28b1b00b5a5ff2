"""cos and sin tables against transformers' rotary modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from atlas.architectures import config_from_huggingface
from atlas.config import RopeConfig
from atlas.errors import InvalidArgumentError
from atlas.layers.rope import inverse_frequencies, rope_table
from tests.helpers.reference import ARCHITECTURES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SECTIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": YARN,
    "yarn_betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_attention_factor": YARN | {"attention_factor": 1.25},
    "yarn_mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn_narrow": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 80), (1e6, 128)])
def test_table_equals_transformers(section: str, theta: float, head_dim: int) -> None:
    """Even at position 8191 the angles agree: an error there of 1e-3 would be usual."""
    max_len = 8192
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        rope_parameters=SECTIONS[section] | {"rope_theta": theta},
    )
    positions = torch.arange(max_len)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    rope = config_from_huggingface(config.to_dict())[0].rope
    table = rope_table(rope, head_dim, max_len)
    assert table.dtype == np.float32
    assert table.shape == (max_len, 2, head_dim // 2)
    half = head_dim // 2
    np.testing.assert_allclose(table[:, 0], cos[0, :, :half].numpy(), atol=1e-5, rtol=0)
    np.testing.assert_allclose(table[:, 1], sin[0, :, :half].numpy(), atol=1e-5, rtol=0)


def test_both_tables_of_gemma_3() -> None:
    config = ARCHITECTURES["gemma3"]()
    ours = config_from_huggingface(config.to_dict())[0]
    module = Gemma3RotaryEmbedding(config)
    assert ours.rope_local is not None
    for rope, kind in ((ours.rope, "full_attention"), (ours.rope_local, "sliding_attention")):
        cos, sin = module(torch.zeros(1), torch.arange(100)[None], kind)
        table = rope_table(rope, config.head_dim, 100)
        np.testing.assert_allclose(table[:, 0], cos[0, :, :16].numpy(), atol=1e-6, rtol=0)
        np.testing.assert_allclose(table[:, 1], sin[0, :, :16].numpy(), atol=1e-6, rtol=0)


def test_rows_do_not_depend_on_the_length() -> None:
    rope = RopeConfig(theta=5e5)
    np.testing.assert_array_equal(rope_table(rope, 64, 5000)[:100], rope_table(rope, 64, 100))
    np.testing.assert_array_equal(rope_table(rope, 64, 5000)[:4500], rope_table(rope, 64, 4500))


def test_divisors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(), 8)
    divided = inverse_frequencies(RopeConfig(divisors=(1.0, 2.0, 4.0, 8.0)), 8)
    np.testing.assert_array_equal(divided, plain / np.array([1, 2, 4, 8], dtype=np.float32))
    with pytest.raises(InvalidArgumentError, match="3 rope divisors; allowed: 4"):
        inverse_frequencies(RopeConfig(divisors=(1.0, 2.0, 4.0)), 8)


def test_part_of_a_head() -> None:
    table = rope_table(RopeConfig(rotary_dim=16), 64, 10)
    np.testing.assert_array_equal(table, rope_table(RopeConfig(), 16, 10))


@pytest.mark.parametrize(
    ("rotary_dim", "max_len", "named"),
    [(128, 4, "rotary_dim is 128"), (7, 4, "rotary_dim is 7"), (None, 0, "max_len is 0")],
)
def test_bad_sizes(rotary_dim: int | None, max_len: int, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        rope_table(RopeConfig(rotary_dim=rotary_dim), 64, max_len)
