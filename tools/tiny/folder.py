"""The model folder: Hugging Face's Qwen3.5 text format, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .network import Network
from .tokens import END


def write_weights(network: Network, folder: Path) -> None:
    """Weights in bfloat16 and ``config.json``; a reader never sees half a file."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.part"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    _write_json(folder / "config.json", network.config)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, length: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }
    _write_json(folder / "tokenizer_config.json", config)
    end = tokenizer.token_to_id(END)
    _write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": end, "pad_token_id": end},
    )


def read_network(folder: Path) -> Network:
    """The exported weights, in float32 arithmetic."""
    network = Network(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network.eval()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
