"""The language model inside a multimodal folder: read as it is, the vision part named and left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from atlas.architectures import config_from_huggingface
from atlas.errors import ModelFileError, UnsupportedModelError
from atlas.model.load import LoadOptions, load_model
from atlas.weights.checkpoint import open_checkpoint
from tests.helpers.reference import ARCHITECTURES, randomize

_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def wrapped(name: str, tied: bool = False) -> Any:
    """A small multimodal model around the reference language model ``name``."""
    text = ARCHITECTURES[name]().to_dict()
    text.pop("tie_word_embeddings", None)
    kind = "Qwen3_5Moe" if "moe" in name else "Qwen3_5"
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=_VISION, tie_word_embeddings=tied
    )
    config.text_config.tie_word_embeddings = tied
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    randomize(model, model.config.text_config)
    return model


@pytest.mark.parametrize(("name", "tied"), [("qwen3_5", True), ("qwen3_5_moe", False)])
def test_the_language_model_of_a_wrapper(name: str, tied: bool, tmp_path: Path) -> None:
    model = wrapped(name, tied)
    model.save_pretrained(tmp_path)
    ids = [int(i) for i in np.random.default_rng(7).integers(3, 197, 30)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.architecture == name
        assert checkpoint.config.tie_embeddings == tied
        assert any("tensors of the vision part" in item for item in checkpoint.ignored_options)
        assert "vision_config" in checkpoint.ignored_options
        loaded = load_model(checkpoint, LoadOptions())
    seq = loaded.model.lifecycle.alloc_sequence()
    view = loaded.model.forward.prefill_chunk(ids, seq, 0, len(ids), True, logits="all")
    assert view is not None
    error = np.abs(view.numpy() - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() <= 1e-4
    loaded.core.close()


def test_other_wrappers_and_wrong_text_models_are_refused(tmp_path: Path) -> None:
    wrapped("qwen3_5").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="Qwen3VLForConditionalGeneration"):
        config_from_huggingface(
            config
            | {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
        )
    text = config["text_config"] | {"model_type": "llama"}
    with pytest.raises(UnsupportedModelError, match=r"text_config\.model_type is 'llama'"):
        config_from_huggingface(config | {"text_config": text})
    with pytest.raises(ModelFileError, match="text_config is 3"):
        config_from_huggingface(config | {"text_config": 3})
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    for changed in (
        config | quantized,
        config | {"text_config": config["text_config"] | quantized},
    ):
        with pytest.raises(UnsupportedModelError, match="fp8"):
            config_from_huggingface(changed)
