"""Loading hybrids: the plan, weights that stay in floats, weights that models share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atlas.config import ModelConfig
from atlas.errors import InvalidArgumentError, UnsupportedModelError
from atlas.layers.attention import Attention
from atlas.layers.gated_delta import GatedDelta
from atlas.layers.mamba2 import Mamba2
from atlas.layers.mlp import Mlp
from atlas.layers.moe import Moe
from atlas.model.load import LoadedModel, LoadOptions, load_model, plan_load
from tests.helpers.random_model import CONFIGS, RandomCheckpoint, load_random, random_model

HYBRIDS = ("delta", "delta_moe", "mamba", "mixers", "mamba_alone")
PROMPT = list(range(3, 60))


def last_row(loaded: LoadedModel) -> np.ndarray:
    seq = loaded.model.lifecycle.alloc_sequence()
    view = loaded.model.forward.prefill(PROMPT, seq)
    assert view is not None
    row = view.numpy()[0].copy()
    loaded.model.lifecycle.free_sequence(seq)
    return row


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_plan_is_what_a_load_takes(name: str) -> None:
    checkpoint: Any = RandomCheckpoint(CONFIGS[name], "bf16", seed=70)
    options = LoadOptions(max_running=3, state_snapshots=5, max_seq_len=64)
    plan = plan_load(checkpoint, options)
    assert plan.memory.recurrent > 0
    loaded = load_model(checkpoint, options)
    # Stacked matrices share tiles of 16 rows, which shows in shapes as odd as these.
    assert loaded.plan.weights == pytest.approx(plan.memory.weights, rel=0.05)
    assert replace(loaded.plan, weights=plan.memory.weights) == plan.memory
    assert loaded.formats == plan.formats
    loaded.core.close()


def test_recurrent_slots_are_counted_before_anything_is_allocated() -> None:
    checkpoint: Any = RandomCheckpoint(CONFIGS["delta"])
    few = plan_load(checkpoint, LoadOptions(max_running=1, state_snapshots=0)).memory
    many = plan_load(checkpoint, LoadOptions(max_running=1, state_snapshots=10)).memory
    delta = CONFIGS["delta"].gated_delta
    assert delta is not None
    tail = (delta.conv_width - 1) * delta.conv_size
    slot = 2 * 4 * (int(np.prod(delta.state_shape)) + tail)  # two layers, float32
    assert many.recurrent - few.recurrent == 10 * slot
    dense: Any = RandomCheckpoint(CONFIGS["dense"])
    assert plan_load(dense, LoadOptions()).memory.recurrent == 0
    with pytest.raises(
        InvalidArgumentError, match="state_snapshots is -1; allowed: an integer of 0"
    ):
        LoadOptions(state_snapshots=-1)


def test_blocks_follow_the_kinds_of_layers() -> None:
    expected: dict[str, list[type]] = {
        "delta_moe": [GatedDelta, Moe, Attention, Mlp, GatedDelta, Moe],
        "mamba": [Mamba2, Mlp, Attention, Mlp, Mamba2, Mlp],
        "mixers": [Mamba2, Moe, Attention, Mlp, Mamba2],
        "mamba_alone": [Mamba2] * 3,
    }
    for name, kinds in expected.items():
        with random_model(name) as loaded:
            assert [type(block) for block in loaded.core.network.blocks] == kinds
            assert len(loaded.core.pools.keys) == kinds.count(Attention)


def test_sensitive_matrices_stay_in_floats_when_the_rest_is_quantised() -> None:
    with random_model("delta_wide", "bf16", quantize="q8_0") as loaded:
        formats = loaded.formats
        assert formats["layers.0.delta.q_proj"] == formats["layers.0.delta.out_proj"] == "q8_0"
        assert formats["layers.0.delta.a_proj"] == formats["layers.0.delta.b_proj"] == "bf16"
        assert formats["layers.0.delta.conv"] == "f32"
        block = loaded.core.network.blocks[0]
        assert isinstance(block, GatedDelta)
        assert [matrix.format for matrix in block.inputs.matrices] == ["q8_0", "bf16"]
        quantised = last_row(loaded)
    with random_model("delta_wide", "bf16") as loaded:
        exact = last_row(loaded)
    assert np.abs(quantised - exact).max() < 0.2 * np.abs(exact).max()
    assert (quantised != exact).any()


def test_models_on_one_file_share_weights_but_no_state() -> None:
    first, second = load_random("delta", seed=71), load_random("delta", seed=71)
    ours, theirs = first.core.network.blocks[0], second.core.network.blocks[0]
    assert isinstance(ours, GatedDelta)
    assert isinstance(theirs, GatedDelta)
    assert ours.conv_weight is theirs.conv_weight
    assert ours.conv_weight.shape == (4, CONFIGS["delta"].recurrent(0).conv_size)
    assert not np.shares_memory(ours.states, theirs.states)
    np.testing.assert_array_equal(last_row(first), last_row(second))
    first.core.close()
    second.core.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_kinds": ("attention",)}, "1 layer kinds for 3 layers"),
        ({"layer_kinds": ("mamba2", "attention", "mamba2")}, "mamba2 layer without mamba2 sizes"),
        ({"layer_kinds": ("gated_delta", "mlp", "attention")}, "mixer_only"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
    ],
)
def test_configurations_that_contradict_themselves(change: dict[str, Any], named: str) -> None:
    config: ModelConfig = CONFIGS["delta"]
    with pytest.raises(UnsupportedModelError, match=named):
        replace(config, **change)
