"""Engines and models on a GPU that is the host's memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from atlas.backends.cuda import backend, device, probe, runtime, sampling
from atlas.ops import linear
from tests.backends.cuda.host_gpu import (
    HostGpu,
    HostKernels,
    exact_product,
    host_ops,
    host_sample,
    host_score,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostGpu]:
    """``device="cuda"`` means this one; nothing of it may be left at the end."""
    made = HostGpu()
    monkeypatch.delenv("ATLAS_DEVICE", raising=False)
    monkeypatch.setattr(device, "Driver", lambda: made)
    monkeypatch.setattr(device, "KernelTable", HostKernels)
    monkeypatch.setattr(runtime, "implementations", lambda name: host_ops(made))
    monkeypatch.setattr(sampling, "sample", host_sample(made))
    monkeypatch.setattr(sampling, "score", host_score(made))
    monkeypatch.setattr(runtime, "open_products", lambda device: None)
    monkeypatch.setattr(runtime, "SCRATCH_BYTES", 1 << 16)
    monkeypatch.setattr(backend, "SCRATCH_BYTES", 1 << 16)
    monkeypatch.setattr(backend, "RESERVE_BYTES", 0)
    monkeypatch.setattr(runtime.CudaRuntime, "fingerprint", "cuda-host")
    monkeypatch.setattr(linear, "product", exact_product)
    monkeypatch.setattr(probe, "find_gpu", lambda: probe.FoundGpu(True, "the host's memory"))
    yield made
    if made.failure is None:
        left = {kind: count for kind, count in made.live.items() if count}
        assert left == {}


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``device="cuda"`` on the host's memory and, under ``-m gpu``, on a GPU."""
    monkeypatch.setattr(runtime.CudaRuntime, "tail_least", 0)  # prompts of these tests are short
    if request.param == "host":
        request.getfixturevalue("gpu")
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose heads have the least size that the CUDA kernels take."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 203,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (203, 128), "lm_head": (203, 128), "model.norm": (128,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}self_attn.q_proj": (256, 128),
            f"{layer}self_attn.k_proj": (128, 128),
            f"{layer}self_attn.v_proj": (128, 128),
            f"{layer}self_attn.o_proj": (128, 256),
            f"{layer}self_attn.q_norm": (64,),
            f"{layer}self_attn.k_norm": (64,),
            f"{layer}mlp.gate_proj": (192, 128),
            f"{layer}mlp.up_proj": (192, 128),
            f"{layer}mlp.down_proj": (128, 192),
            f"{layer}input_layernorm": (128,),
            f"{layer}post_attention_layernorm": (128,),
        }
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    tensors = {
        f"{name}.weight": (rng.standard_normal(shape) * 0.12 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, made / "model.safetensors")
    return made
