"""Multi-token prediction heads: loaded with the model, from every kind of file, never dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from atlas.errors import ModelFileError
from atlas.layers.attention import Attention
from atlas.layers.mlp import Mlp
from atlas.layers.moe import Moe
from atlas.model.load import LoadOptions, load_model, plan_load
from atlas.ops.blocks import dequantize
from atlas.weights.checkpoint import Checkpoint, open_checkpoint
from tests.helpers.reference import ReferenceModel
from tests.helpers.reference_gguf import write_gguf

Floats = NDArray[np.float32]
GetReference = Callable[[str], ReferenceModel]


def qwen_head(model: ReferenceModel) -> dict[str, Floats]:
    """A head whose layer is shaped as one of the model's that attend."""
    rng = np.random.default_rng(3)
    config = model.model.config
    hidden = config.hidden_size
    stem = f"model.layers.{config.layer_types.index('full_attention')}."
    shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
    } | {
        name.replace(stem, "mtp.layers.0."): values.shape
        for name, values in stored(model).items()
        if name.startswith(stem)
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def nemotron_head(model: ReferenceModel) -> dict[str, Floats]:
    """Attention, then experts, shaped as the model's own."""
    rng = np.random.default_rng(4)
    hidden, kinds = model.model.config.hidden_size, model.model.config.layers_block_type
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden),
        "mtp.layers.0.enorm.weight": (hidden,),
        "mtp.layers.0.hnorm.weight": (hidden,),
        "mtp.layers.1.final_layernorm.weight": (hidden,),
    }
    for i, kind in enumerate(("full_attention", "moe")):
        stem = f"backbone.layers.{kinds.index(kind)}."
        shapes |= {
            name.replace(stem, f"mtp.layers.{i}."): values.shape
            for name, values in stored(model).items()
            if name.startswith(stem)
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def stored(model: ReferenceModel) -> dict[str, Floats]:
    """The folder's tensors."""
    return load_file(model.directory / "model.safetensors")


def folder(model: ReferenceModel, head: dict[str, Floats], path: Path, **options: Any) -> Path:
    """A copy of the model's folder with the head's tensors, and other options."""
    config = model.model.config.__class__.from_pretrained(model.directory)
    for name, value in options.items():
        setattr(config, name, value)
    config.save_pretrained(path)
    save_file(stored(model) | head, path / "model.safetensors")
    return path


def head_of(checkpoint: Checkpoint) -> dict[str, Floats]:
    """Canonical weights of the head, flat."""
    names = [name for name in checkpoint.weight_formats() if name.startswith("mtp.")]
    return {
        name: checkpoint.vector(name)
        if name.endswith(("norm", "bias"))
        else dequantize(checkpoint.matrix(name)).reshape(-1)
        for name in names
    }


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_qwen_heads(name: str, reference: GetReference, tmp_path: Path) -> None:
    model = reference(name)
    head = qwen_head(model)
    with open_checkpoint(folder(model, head, tmp_path)) as checkpoint:
        assert checkpoint.config.mtp_kinds == ("attention",)
        weights = head_of(checkpoint)
        np.testing.assert_array_equal(weights["mtp.in_proj"], head["mtp.fc.weight"].reshape(-1))
        np.testing.assert_array_equal(weights["mtp.final_norm"], head["mtp.norm.weight"] + 1)
        embedding_norm = head["mtp.pre_fc_norm_embedding.weight"]
        np.testing.assert_array_equal(weights["mtp.embedding_norm"], embedding_norm + 1)
        queries = head["mtp.layers.0.self_attn.q_proj.weight"].reshape(3, 2, 32, 64)
        np.testing.assert_array_equal(weights["mtp.layers.0.q_proj"], queries[:, 0].reshape(-1))
        np.testing.assert_array_equal(
            weights["mtp.layers.0.q_gate_proj"], queries[:, 1].reshape(-1)
        )
        loaded = load_model(checkpoint, LoadOptions())
        assert {name: loaded.formats[name] for name in weights} == dict.fromkeys(weights, "f32")
    mtp = loaded.core.network.mtp
    assert mtp is not None
    attention, feed_forward = mtp.blocks
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, Mlp if name == "qwen3_5" else Moe)
    assert (mtp.inputs.rows, mtp.inputs.matrices[0].cols) == (64, 128)
    np.testing.assert_array_equal(mtp.hidden_norm, weights["mtp.hidden_norm"])
    loaded.core.close()


def test_the_head_takes_no_part_in_the_forward(reference: GetReference, tmp_path: Path) -> None:
    model = reference("qwen3_5")
    rows = []
    for head in ({}, qwen_head(model)):
        path = folder(model, head, tmp_path / str(len(head)))
        with open_checkpoint(path) as checkpoint:
            loaded = load_model(checkpoint, LoadOptions())
        seq = loaded.model.lifecycle.alloc_sequence()
        view = loaded.model.forward.prefill(model.prompt(20), seq)
        assert view is not None
        rows.append(view.numpy().copy())
        loaded.core.close()
    np.testing.assert_array_equal(rows[0], rows[1])


def test_a_head_is_whole_or_refused(reference: GetReference, tmp_path: Path) -> None:
    model = reference("qwen3_5")
    head = qwen_head(model)
    del head["mtp.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"missing: mtp\.layers\.0\.mlp\.up_proj\.weight"):
        open_checkpoint(folder(model, head, tmp_path / "a"))
    whole = qwen_head(model)
    second = {
        name.replace("layers.0", "layers.1"): w for name, w in whole.items() if "layers" in name
    }
    with pytest.raises(ModelFileError, match=r"unexpected: mtp\.layers\.1"):
        open_checkpoint(folder(model, whole | second, tmp_path / "b"))
    path = folder(model, whole | second, tmp_path / "c", mtp_num_hidden_layers=2)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.mtp_kinds == ("attention",) * 2
        with_head = plan_load(checkpoint, LoadOptions()).memory.weights
    with open_checkpoint(folder(model, {}, tmp_path / "d")) as checkpoint:
        assert checkpoint.config.mtp_kinds == ()
        assert plan_load(checkpoint, LoadOptions()).memory.weights < with_head


def test_nemotron_heads(reference: GetReference, tmp_path: Path) -> None:
    model = reference("nemotron_h_moe")
    head = nemotron_head(model)
    path = folder(model, head, tmp_path, num_nextn_predict_layers=1)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.mtp_kinds == ("attention", "moe")
        weights = head_of(checkpoint)
        expected = head["mtp.layers.0.eh_proj.weight"].reshape(-1)
        np.testing.assert_array_equal(weights["mtp.in_proj"], expected)
        final = head["mtp.layers.1.final_layernorm.weight"]
        np.testing.assert_array_equal(weights["mtp.final_norm"], final)
        loaded = load_model(checkpoint, LoadOptions())
    mtp = loaded.core.network.mtp
    assert mtp is not None
    assert [type(block) for block in mtp.blocks] == [Attention, Moe]
    loaded.core.close()


def test_gguf_heads_lie_in_blocks_behind_the_model(reference: GetReference, tmp_path: Path) -> None:
    model = reference("qwen3_5")
    head = qwen_head(model)
    with open_checkpoint(folder(model, head, tmp_path / "folder")) as checkpoint:
        expected = head_of(checkpoint)
    path = write_gguf(model, tmp_path / "model.gguf", mtp=head)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.mtp_kinds == ("attention",)
        assert checkpoint.config.num_layers == 3
        actual = head_of(checkpoint)
        assert checkpoint.ignored_options == ()
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)
