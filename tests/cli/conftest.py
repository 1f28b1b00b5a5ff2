"""The ``atlas`` command in this process, and a model file for it without an inference library."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from atlas.cli import run
from atlas.ops.blocks import FORMATS
from tests.cli.outcome import Command, Outcome
from tests.helpers.gguf_writer import Tensor, gguf_bytes
from tests.helpers.smollm2 import require_smollm2


@pytest.fixture
def atlas_command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``atlas`` with these arguments."""

    def command(*arguments: str) -> Outcome:
        status = run(arguments)
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return command


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The short name of the model."""
    return require_smollm2()


@pytest.fixture(scope="session")
def mixed_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of one layer: formats with a kernel, formats to be widened, an unknown option."""
    metadata: dict[str, object] = {
        "general.architecture": "qwen3",
        "qwen3.block_count": 1,
        "qwen3.context_length": 64,
        "qwen3.embedding_length": 256,
        "qwen3.feed_forward_length": 512,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 64,
        "qwen3.attention.value_length": 64,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.rope.freq_base": 1e6,
        "qwen3.tail_light": 3.0,
    }
    block = {
        "attn_norm": ("f32", (256,)),
        "attn_q": ("q5_k", (256, 256)),
        "attn_k": ("q4_k", (128, 256)),
        "attn_v": ("q6_k", (128, 256)),
        "attn_output": ("q3_k", (256, 256)),
        "attn_q_norm": ("f32", (64,)),
        "attn_k_norm": ("f32", (64,)),
        "ffn_norm": ("f32", (256,)),
        "ffn_gate": ("bf16", (512, 256)),
        "ffn_up": ("bf16", (512, 256)),
        "ffn_down": ("iq4_xs", (256, 512)),
    }
    tensors = [
        zeros("token_embd.weight", "q8_0", (128, 256)),
        zeros("output_norm.weight", "f32", (256,)),
        *(zeros(f"blk.0.{name}.weight", *entry) for name, entry in block.items()),
    ]
    path = tmp_path_factory.mktemp("cli") / "mixed.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def zeros(name: str, format: str, shape: tuple[int, ...]) -> Tensor:
    layout = FORMATS[format]
    return Tensor(name, format, shape, bytes(prod(shape) // layout.block_len * layout.block_bytes))
