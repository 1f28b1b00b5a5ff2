"""Hostile config.json and GGUF metadata end in a typed error or a sound ModelConfig."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas.architectures import config_from_gguf, config_from_huggingface, expected_weights
from atlas.errors import ModelFileError
from atlas.layers.rope import rope_table
from tests.helpers.real_configs import LLAMA_3_1_8B, REAL, REAL_HYBRIDS
from tests.helpers.real_metadata import METADATA, tensors_for

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.integers(-2, 8)
    | st.text(max_size=8)
    | st.sampled_from(["default", "yarn", "llama3", "linear", "silu", "full_attention", "M-*E"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
ROPE_KEYS = [
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "attention_factor",
]  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_option_may_be_anything(data: st.DataObject) -> None:
    """A config read from hostile JSON is a ModelConfig or a typed error, never another one."""
    real = REAL | REAL_HYBRIDS
    base = real[data.draw(st.sampled_from(sorted(real)))]
    keys = data.draw(st.lists(st.sampled_from(sorted(base)), max_size=3, unique=True))
    changes: dict[str, Any] = {key: data.draw(JSON | st.just(...)) for key in keys}
    if data.draw(st.booleans()):
        section = st.dictionaries(st.sampled_from(ROPE_KEYS), JSON, max_size=8)
        changes["rope_scaling"] = data.draw(section)
    generation = data.draw(st.none() | st.fixed_dictionaries({"eos_token_id": JSON}))
    changed = {key: value for key, value in (base | changes).items() if value is not ...}
    if isinstance(text := changed.get("text_config"), dict) and text:
        inner = data.draw(st.lists(st.sampled_from(sorted(text)), max_size=3, unique=True))
        changed["text_config"] = text | {key: data.draw(JSON) for key in inner}
    try:
        config, _ = config_from_huggingface(changed, generation)
    except ModelFileError as error:
        message = str(error)
    else:
        message = ""
        assert len(config.windows) == config.num_layers
        assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
        assert expected_weights(config)
        if config.attention_layers and config.rotary:
            assert np.isfinite(rope_table(config.rope, config.head_dim, 3)).all()
    assert len(message) < 2000


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=12) | st.sampled_from(sorted(LLAMA_3_1_8B)), JSON))
def test_any_object_is_a_config_or_a_typed_error(options: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        config_from_huggingface(options)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_gguf_key_may_be_anything(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(METADATA)))
    base = METADATA[name]
    keys = data.draw(st.lists(st.sampled_from(sorted(base)), max_size=3, unique=True))
    values = JSON | st.sampled_from([np.zeros(3), np.arange(4), np.float32("nan")])
    changed = base | {key: data.draw(values) for key in keys}
    extra = data.draw(st.none() | st.sampled_from(GGUF_KEYS))
    if extra is not None:
        changed[f"{base['general.architecture']}.{extra}"] = data.draw(values)
    try:
        config, _ = config_from_gguf(changed, tensors_for(base), origin="x.gguf")
    except ModelFileError as error:
        message = str(error)
    else:
        message = ""
        assert len(config.windows) == config.num_layers
        assert expected_weights(config)
        if config.attention_layers and config.rotary:
            assert np.isfinite(rope_table(config.rope, config.head_dim, 3)).all()
    assert len(message) < 2000


GGUF_KEYS = [
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "attention.scale",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.key_length",
    "rope.freq_base_swa", "expert_weights_norm", "expert_gating_func", "vocab_size",
]  # fmt: skip
