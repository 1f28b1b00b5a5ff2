"""Folders of translation models: what is read, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas import Engine
from atlas.architectures.m2m100 import config_from_m2m100
from atlas.errors import (
    AtlasError,
    CapabilityError,
    InvalidArgumentError,
    ModelFileError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from atlas.weights.checkpoint import open_checkpoint
from tests.helpers.translation_model import SOURCE, TARGET, ReferenceTranslator

NLLB_600M: dict[str, Any] = {
    "_name_or_path": "facebook/nllb-200-distilled-600M",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["M2M100ForConditionalGeneration"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "decoder_layerdrop": 0,
    "decoder_layers": 12,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layerdrop": 0,
    "encoder_layers": 12,
    "eos_token_id": 2,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 200,
    "max_position_embeddings": 1024,
    "model_type": "m2m_100",
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "scale_embedding": True,
    "tokenizer_class": "NllbTokenizer",
    "torch_dtype": "float32",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": 256206,
}


def test_config_of_nllb() -> None:
    config, ignored = config_from_m2m100(NLLB_600M)
    assert ignored == ()
    assert config.encoder is not None
    assert (config.encoder.num_layers, config.num_layers, config.hidden_size) == (12, 12, 1024)
    assert (config.head_dim, config.embedding_scale, config.vocab_size) == (64, 32.0, 256206)
    assert (config.encoder.start_token_id, config.encoder.padding_token_id) == (2, 1)
    assert config.eos_token_ids == (2,)
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["M2M100Model"]}, UnsupportedModelError, "M2M100Model"),
        ({"activation_function": "swish"}, UnsupportedModelError, "'swish'; allowed: relu"),
        ({"d_model": 1000}, ModelFileError, "decoder_attention_heads is 16; allowed: a divisor"),
        ({"encoder_layers": 0}, ModelFileError, "encoder_layers is 0"),
        ({"encoder_ffn_dim": "4096"}, ModelFileError, "encoder_ffn_dim is '4096'"),
        ({"vocab_size": None}, ModelFileError, "vocab_size is missing"),
        ({"pad_token_id": 256206}, ModelFileError, "pad_token_id is 256206"),
        ({"decoder_start_token_id": -1}, ModelFileError, "decoder_start_token_id is -1"),
        ({"eos_token_id": [2, -1]}, ModelFileError, "eos_token_id"),
        ({"quantization_config": {"x": 1}}, UnsupportedModelError, "quantization_config"),
        ({"normalize_before": False}, UnsupportedModelError, "normalize_before is False"),
    ],
)
def test_config_refused(changes: dict[str, Any], error: type[AtlasError], message: str) -> None:
    with pytest.raises(error, match=message):
        config_from_m2m100(NLLB_600M | changes)


def test_what_nothing_reads_is_named() -> None:
    assert config_from_m2m100(NLLB_600M | {"novelty": 3})[1] == ("novelty",)


@pytest.fixture
def folder(reference: ReferenceTranslator, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(reference.directory, tmp_path / "model"))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_any_of_the_tied_matrices_will_do(folder: Path) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        (name,) = (n for n in tensors if "shared" in n or "lm_head" in n or "embed_tokens" in n)
        table = tensors.pop(name)
        tensors["lm_head.weight"] = table
        tensors["model.decoder.embed_tokens.weight"] = table.copy()
        tensors["model.encoder.embed_positions.weights"] = np.zeros((130, 64), np.float32)

    with open_checkpoint(changed(folder, rename)) as checkpoint:
        assert checkpoint.matrix("embedding").rows == 120


def test_tied_matrices_that_differ(folder: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.encoder.embed_tokens.weight"] = np.zeros((120, 64), np.float32)

    with pytest.raises(ModelFileError, match=r"embed_tokens.*differs from.*one matrix for both"):
        open_checkpoint(changed(folder, add))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.encoder.layers.1.fc1.bias", "missing: model.encoder.layers.1.fc1.bias"),
        ("model.decoder.layers.2.encoder_attn.k_proj.weight", "missing"),
    ],
)
def test_missing_weights(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(changed(folder, lambda tensors: tensors.pop(name)))


def test_a_hostile_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**9}))
    with pytest.raises(ModelFileError, match="eos_token_id is 1000000000"):
        open_checkpoint(folder)


def test_several_end_tokens(folder: Path, reference: ReferenceTranslator) -> None:
    """Enough candidates are kept that every beam may end at once in each of them."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 30, 31]}))
    reference.model.generation_config.eos_token_id = [2, 30, 31]
    try:
        with Engine(folder, threads=1, quiet=True) as engine:
            for seed in range(4):
                text = reference.text(9, seed=seed)
                got = engine.translate(
                    text, source=SOURCE, target=TARGET, num_beams=3, num_return=3, max_tokens=10
                )
                (want,) = reference.translate([text], 10, 3, num_return_sequences=3)
                assert [h.score for h in got.hypotheses] == pytest.approx(
                    [score for _, score in want], abs=1e-4
                )
    finally:
        reference.model.generation_config.eos_token_id = 2


def test_shorter_than_the_model_allows(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, max_seq_len=20, quiet=True) as engine:
        with pytest.raises(InvalidArgumentError, match="allowed: up to 18"):
            engine.translate([20] * 19, source=SOURCE, target=TARGET)
        found = engine.translate([20] * 18, source=SOURCE, target=TARGET, max_tokens=500)
        assert len(found.token_ids) <= 18
    with pytest.raises(InvalidArgumentError, match="max_seq_len is 129"):
        Engine(reference.directory, max_seq_len=129, quiet=True)


def test_memory_limit(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, quiet=True) as engine:
        plan = engine._loaded.plan
    limit = plan.weights + plan.buffers + plan.kv_pool // 2
    with Engine(reference.directory, threads=1, memory_limit=limit, quiet=True) as engine:
        assert 0 < engine.model.lifecycle.num_total_blocks < plan.kv_pool
        assert engine._loaded.plan.total <= limit
    with pytest.raises(OutOfMemoryError):
        Engine(reference.directory, memory_limit=plan.weights, quiet=True)


def test_weights_are_shared(reference: ReferenceTranslator) -> None:
    with (
        Engine(reference.directory, threads=1, quiet=True) as one,
        Engine(reference.directory, threads=1, quiet=True) as other,
    ):
        ours, theirs = (e._loaded.core.network.decoder.head for e in (one, other))  # type: ignore[attr-defined]
        assert ours.matrices[0] is theirs.matrices[0]


def test_small_heads_are_refused_by_a_gpu_by_name(reference: ReferenceTranslator) -> None:
    pytest.importorskip("atlas_kernels")
    with pytest.raises(CapabilityError, match="head_dim is 16; the CUDA kernels allow"):
        Engine(reference.directory, device="cuda", quiet=True)


def test_described(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, quiet=True) as engine:
        assert engine.describe()["model"] == "m2m_100, 2 + 3 layers × 64"
