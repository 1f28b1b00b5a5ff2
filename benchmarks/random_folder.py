"""Hugging Face folders of any decoder's shape with random bf16 weights, written in seconds.

Every tensor's bytes begin somewhere in one random buffer and go round it, so that 16 GB take no
longer than the file system does. The tokenizer has as many tokens and merges as the model's
vocabulary: reading it is a part of loading.
"""

from __future__ import annotations

import json
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from atlas.architectures.families import family_named
from atlas.architectures.huggingface_config import config_from_huggingface
from atlas.architectures.huggingface_names import huggingface_sources
from atlas.config import ModelConfig

SHARD_BYTES = 4_000_000_000  # as Qwen3-8B is cut
_INDEX = "model.safetensors.index.json"
_END = "<|endoftext|>"
_BUFFER_LEN = (32 << 20) + 4099  # bf16 elements; not a multiple of any width, so rows differ
_ASCII_LETTERS = 94
_FREE_BYTES = 1 << 30  # left on the disk, for the tokenizer and for others


def huggingface_mapping(config: ModelConfig) -> dict[str, Any]:
    """config.json of a decoder of the Llama and Qwen families; its last token ends the text."""
    family = family_named(config.architecture)
    mapping: dict[str, Any] = {
        "architectures": [family.huggingface_class],
        "model_type": family.model_type or family.name,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": config.vocab_size - 1,
    }
    if (moe := config.moe) is not None:
        mapping |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
        }
        # Qwen3.5 always normalises and has a shared expert.
        if moe.shared_size:
            mapping["shared_expert_intermediate_size"] = moe.shared_size
        else:
            mapping["norm_topk_prob"] = moe.normalize_top_k
    if (delta := config.gated_delta) is not None:
        kinds = {"gated_delta": "linear_attention", "attention": "full_attention"}
        mapping |= {
            "layer_types": [kinds[kind] for kind in config.layer_kinds],
            "partial_rotary_factor": (config.rope.rotary_dim or config.head_dim) / config.head_dim,
            "linear_num_key_heads": delta.num_key_heads,
            "linear_num_value_heads": delta.num_value_heads,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_conv_kernel_dim": delta.conv_width,
            "mtp_num_hidden_layers": 0,
        }
    return mapping


class RandomFolder:
    """A folder of one shape, written or found.

    Parameters
    ----------
    path : Path
    config : ModelConfig
        Of a decoder.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self._mapping = huggingface_mapping(config)
        self._sources = huggingface_sources(config_from_huggingface(self._mapping)[0], {})
        self._shapes = {
            tensor: source.shape for source in self._sources.values() for tensor in source.tensors
        }
        self._shards = self._cut()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(2 * prod(shape) for shape in self._shapes.values())

    @property
    def files(self) -> list[Path]:
        """The files with tensors."""
        return [self.path / name for name in self._shards]

    def is_complete(self) -> bool:
        """Whether the folder holds this model; the index is written last."""
        try:
            config = json.loads((self.path / "config.json").read_bytes())
            index = json.loads((self.path / _INDEX).read_bytes())
        except (OSError, ValueError):
            return False
        same = config == self._mapping and index == self._index()
        return same and all(
            file.exists() and file.stat().st_size == self._file_bytes(file.name)
            for file in self.files
        )

    def write(self) -> None:
        """Write it; SystemExit where it does not fit or something else is there."""
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.iterdir()):
            raise SystemExit(f"{self.path} holds something else; name a new or an empty folder")
        free, needed = shutil.disk_usage(self.path).free, self.nbytes + _FREE_BYTES
        if free < needed:
            raise SystemExit(
                f"{self.path}: {free / 1e9:.1f} GB are free there; the model and some room take "
                f"{needed / 1e9:.1f} GB. --folder names a place on another disk"
            )
        values = np.random.default_rng(0).standard_normal(_BUFFER_LEN, np.float32)
        values *= np.float32(0.02)
        buffer = (values.view(np.uint32) >> 16).astype(np.uint16).data.cast("B")
        with ThreadPoolExecutor(len(self._shards)) as pool:
            list(pool.map(lambda name: self._write_shard(name, buffer), self._shards))
        vocab_size = self._mapping["vocab_size"]
        random_tokenizer(vocab_size).save(str(self.path / "tokenizer.json"))
        (self.path / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}))
        (self.path / "config.json").write_text(json.dumps(self._mapping, indent=2))
        (self.path / _INDEX).write_text(json.dumps(self._index(), indent=2))

    def _cut(self) -> dict[str, list[str]]:
        """Tensors by file: in the model's order, sorted within a file, always several files."""
        limit = min(SHARD_BYTES, -(-self.nbytes // 2))
        shards: list[list[str]] = [[]]
        taken = 0
        for name, shape in self._shapes.items():
            nbytes = 2 * prod(shape)
            if taken and taken + nbytes > limit:
                shards.append([])
                taken = 0
            shards[-1].append(name)
            taken += nbytes
        return {
            f"model-{i:05d}-of-{len(shards):05d}.safetensors": sorted(names)
            for i, names in enumerate(shards, 1)
        }

    def _index(self) -> dict[str, Any]:
        weight_map = {name: file for file, names in self._shards.items() for name in names}
        return {
            "metadata": {"total_size": self.nbytes},
            "weight_map": dict(sorted(weight_map.items())),
        }

    def _header(self, file_name: str) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self._shards[file_name]:
            shape = self._shapes[name]
            begin, end = end, end + 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that tensors are aligned
        return len(text).to_bytes(8, "little") + text

    def _file_bytes(self, file_name: str) -> int:
        tensors = sum(2 * prod(self._shapes[name]) for name in self._shards[file_name])
        return len(self._header(file_name)) + tensors

    def _write_shard(self, file_name: str, buffer: memoryview) -> None:
        constants = self._constants()
        with open(self.path / file_name, "wb") as file:
            file.write(self._header(file_name))
            for name in self._shards[file_name]:
                if name in constants:
                    file.write(_bf16(constants[name]) * prod(self._shapes[name]))
                else:
                    start = zlib.crc32(name.encode()) % _BUFFER_LEN
                    _write_round(file, buffer, 2 * start, 2 * prod(self._shapes[name]))

    def _constants(self) -> dict[str, float]:
        """Norms and convolutions that keep the size of what they read; other vectors are zero."""
        found = {}
        for name, source in self._sources.items():
            if len(source.shape) == 1 or name.endswith(".conv"):
                value = 1.0 if "norm" in name else 0.5 if name.endswith(".conv") else 0.0
                found[source.tensors[0]] = value - source.offset
        return found


def _bf16(value: float) -> bytes:
    return np.float32(value).tobytes()[2:]


def _write_round(file: BinaryIO, buffer: memoryview, start: int, nbytes: int) -> None:
    """So many bytes of the buffer from ``start`` on, and again from its beginning."""
    while nbytes:
        piece = buffer[start : start + nbytes]
        file.write(piece)
        start, nbytes = 0, nbytes - len(piece)


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of so many tokens: all bytes, random merges, and one that ends the text."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())  # ASCII first
    vocabulary = {letter: i for i, letter in enumerate(tokens)}
    merges = []
    rng = np.random.default_rng(0)
    while len(tokens) < vocab_size - 1:
        left = tokens[int(rng.integers(len(tokens)))]
        right = tokens[int(rng.integers(_ASCII_LETTERS))]
        if left + right not in vocabulary:
            merges.append((left, right))
            vocabulary[left + right] = len(tokens)
            tokens.append(left + right)
    library = Tokenizer(models.BPE(vocabulary, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    return library
