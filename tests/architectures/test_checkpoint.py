"""A checkpoint opens only if every weight is there, once, in its shape, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas.errors import InvalidArgumentError, ModelFileError, UnsupportedModelError
from atlas.ops.blocks import dequantize
from atlas.weights.checkpoint import Checkpoint, open_checkpoint
from tests.helpers.plain_decoder import load_weights
from tests.helpers.reference import ReferenceModel
from tests.helpers.reference_gguf import write_gguf

GetReference = Callable[[str], ReferenceModel]
Tensors = dict[str, np.ndarray]


def edited(
    model: ReferenceModel,
    folder: Path,
    edit: Callable[[Tensors], object] = lambda tensors: None,
    **options: Any,
) -> Checkpoint:
    """Open a copy of `model` whose tensors went through `edit` and whose config has `options`."""
    tensors = load_file(model.directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((model.directory / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | options))
    return open_checkpoint(folder)


def test_an_unchanged_copy_opens(reference: GetReference, tmp_path: Path) -> None:
    model = reference("qwen2_window")
    checkpoint = edited(model, tmp_path)
    total = sum(p.numel() for p in model.model.parameters()) * 4
    assert checkpoint.nbytes == total
    assert checkpoint.metadata["model_type"] == "qwen2"
    assert set(checkpoint.weight_formats().values()) == {"f32"}
    assert "layers.2.down_proj" in checkpoint.weight_formats()
    checkpoint.release("layers.0.q_proj")
    assert checkpoint.matrix("layers.0.q_proj").rows == 64
    with pytest.raises(InvalidArgumentError, match=r"layers\.9\.q_proj"):
        checkpoint.matrix("layers.9.q_proj")
    checkpoint.close()
    checkpoint.close()


def test_everything_missing_and_unexpected_is_named_at_once(
    reference: GetReference, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.1.self_attn.q_norm.weight"] = np.ones(16, np.float32)
        up = "model.layers.1.mlp.up_proj.weight"
        tensors[up] = np.ascontiguousarray(tensors[up][:-1])

    with pytest.raises(ModelFileError) as caught:
        edited(reference("llama2"), tmp_path, edit)
    for part in (
        "missing: model.layers.0.self_attn.q_proj.weight, model.norm.weight",
        "unexpected: model.layers.1.self_attn.q_norm.weight",
        "wrong shape: model.layers.1.mlp.up_proj.weight [95, 64] (needs [96, 64])",
        str(tmp_path),
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_hidden_layers": 3}, "missing: model.layers.2."),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1."),
        ({"num_hidden_layers": 4096}, "more"),
        ({"vocab_size": 196}, "model.embed_tokens.weight [197, 64] (needs [196, 64])"),
        ({"attention_bias": True}, "missing: model.layers.0.self_attn.q_proj.bias"),
        ({"head_dim": 32}, "q_proj.weight [64, 64] (needs [128, 64])"),
    ],
)
def test_a_config_of_another_model(
    options: dict[str, Any], named: str, reference: GetReference, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError) as caught:
        edited(reference("llama2"), tmp_path, **options)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 5000


def test_old_rotary_buffers_are_ignored(reference: GetReference, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        tensors[name] = np.ones(8, np.float32)

    edited(reference("llama2"), tmp_path, edit).close()


def test_an_unsupported_dtype_is_refused(reference: GetReference, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].astype(np.float64)

    with pytest.raises(UnsupportedModelError, match=r"(?i)\bf64\b"):
        edited(reference("llama2"), tmp_path, edit)


def test_a_tied_head(reference: GetReference, tmp_path: Path) -> None:
    """Absent or equal: tied. Different: the file's own, as in transformers 5."""
    model = reference("smollm2")
    for name in ("absent", "equal", "different", "only_head"):
        (tmp_path / name).mkdir()
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    checkpoint = edited(model, tmp_path / "absent")
    assert checkpoint.config.tie_embeddings
    assert "head" not in checkpoint.weight_formats()
    weights = load_weights(checkpoint)

    def equal(tensors: Tensors) -> None:
        tensors[head] = tensors[embedding].copy()

    assert edited(model, tmp_path / "equal", equal).config.tie_embeddings

    def different(tensors: Tensors) -> None:
        tensors[head] = tensors[embedding] + np.float32(1)

    checkpoint = edited(model, tmp_path / "different", different)
    assert not checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(
        dequantize(checkpoint.matrix("head")), weights["embedding"] + np.float32(1)
    )

    def only_head(tensors: Tensors) -> None:
        tensors[head] = tensors.pop(embedding)

    checkpoint = edited(model, tmp_path / "only_head", only_head)
    assert checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(load_weights(checkpoint)["embedding"], weights["embedding"])

    def neither(tensors: Tensors) -> None:
        del tensors[embedding]

    (tmp_path / "neither").mkdir()
    with pytest.raises(ModelFileError, match=r"missing: model\.embed_tokens\.weight"):
        edited(model, tmp_path / "neither", neither)


def test_a_head_that_the_config_promises_must_be_there(
    reference: GetReference, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=r"missing: lm_head\.weight"):
        edited(reference("smollm2"), tmp_path, tie_word_embeddings=False)


def test_fused_experts(reference: GetReference, tmp_path: Path) -> None:
    """transformers 5 saves experts one by one, or fused as it holds them."""
    model = reference("qwen3_moe_mixed")
    model.model.save_pretrained(tmp_path, save_original_format=False)
    with open_checkpoint(model.directory) as single, open_checkpoint(tmp_path) as fused:
        assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(
            tmp_path / "model.safetensors"
        )
        expected, actual = load_weights(single), load_weights(fused)
    assert list(actual) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


def test_experts_in_several_formats(reference: GetReference, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.experts.3.up_proj.weight"
        tensors[name] = tensors[name].astype(np.float16)

    with pytest.raises(ModelFileError, match=r"several formats.*layers\.0\.experts\.up_proj"):
        edited(reference("qwen3_moe"), tmp_path, edit)


def test_absurd_expert_counts(reference: GetReference, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="4096 experts"):
        edited(reference("qwen3_moe"), tmp_path, num_local_experts=4096, num_experts_per_tok=2)


def test_a_sharded_folder(reference: GetReference, tmp_path: Path) -> None:
    model = reference("qwen3")
    model.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with open_checkpoint(model.directory) as single, open_checkpoint(tmp_path) as sharded:
        expected, actual = load_weights(single), load_weights(sharded)
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


def test_quantised_rows_are_gathered_exactly(reference: GetReference, tmp_path: Path) -> None:
    """q of a Llama GGUF file is in interleaved order; the rows of its blocks are moved whole."""
    model = reference("llama2")
    path = write_gguf(model, tmp_path / "q8.gguf", quantize=gguf.GGMLQuantizationType.Q8_0)
    with open_checkpoint(path) as checkpoint, open_checkpoint(model.directory) as folder:
        assert checkpoint.weight_formats()["layers.0.q_proj"] == "q8_0"
        assert checkpoint.weight_formats()["final_norm"] == "f32"
        for name in ("layers.0.q_proj", "layers.1.k_proj", "layers.0.v_proj"):
            exact = dequantize(folder.matrix(name))
            expected = gguf.dequantize(
                gguf.quantize(exact, gguf.GGMLQuantizationType.Q8_0),
                gguf.GGMLQuantizationType.Q8_0,
            )
            np.testing.assert_array_equal(dequantize(checkpoint.matrix(name)), expected)


def test_rope_divisors(reference: GetReference, tmp_path: Path) -> None:
    model = reference("llama3_rope")
    divisors = open_checkpoint(write_gguf(model, tmp_path / "a.gguf")).config.rope.divisors
    assert divisors is not None
    assert (divisors[0], divisors[-1]) == (1.0, 8.0)
    for name, values in {
        "short": np.ones(15, np.float32),
        "zero": np.zeros(16, np.float32),
        "nan": np.full(16, np.nan, np.float32),
    }.items():
        path = write_gguf(model, tmp_path / f"{name}.gguf", rope_freqs=values)
        with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
            open_checkpoint(path)
    path = write_gguf(
        reference("qwen3"), tmp_path / "qwen.gguf", rope_freqs=np.ones(16, np.float32)
    )
    with pytest.raises(ModelFileError, match=r"unexpected: rope_freqs\.weight"):
        open_checkpoint(path)


def test_the_end_of_text_may_be_in_generation_config(
    reference: GetReference, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert edited(reference("llama2"), tmp_path).config.eos_token_ids == (2, 7)
