"""Recurrent state after 32,768 tokens against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from atlas.model.load import LoadOptions, load_model
from atlas.weights.checkpoint import open_checkpoint
from tests.helpers.reference import ARCHITECTURES, randomize

NUM_TOKENS = 32768
TOLERANCE = 1e-4


def long_memory(name: str, **options: Any) -> transformers.PreTrainedModel:
    """A model some of whose recurrent heads remember thousands of tokens."""
    config = ARCHITECTURES[name]()
    for key, value in options.items():
        setattr(config, key, value)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, model.config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.copy_(torch.linspace(-9.0, 0.0, parameter.numel()))
    return model


def relative(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """max |a − b| / max |b|."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "qwen3_5",  # of whose layers transformers wants one to attend
            {"layer_types": ["linear_attention", "linear_attention", "full_attention"],
             "num_attention_heads": 1, "max_position_embeddings": NUM_TOKENS},
        ),
        ("mamba2", {"num_hidden_layers": 2, "chunk_size": 64}),
    ],
    ids=["gated_delta", "mamba2"],
)  # fmt: skip
def test_state_and_logits_after_32k_tokens(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = long_memory(name, **options)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(13).integers(3, 197, NUM_TOKENS).tolist()
    with torch.inference_mode():
        result = model(torch.tensor([ids]), use_cache=True, logits_to_keep=8)
    with open_checkpoint(tmp_path) as checkpoint:
        loaded = load_model(checkpoint, LoadOptions(threads=2, max_seq_len=NUM_TOKENS))
    core, forward = loaded.core, loaded.model.forward
    seq = loaded.model.lifecycle.alloc_sequence()
    forward.prefill_chunk(ids, seq, 0, NUM_TOKENS - 8, False, logits="none")
    view = forward.prefill_chunk(ids, seq, NUM_TOKENS - 8, 8, True, logits="all")
    assert view is not None
    assert relative(view.numpy(), result.logits[0].numpy()) <= TOLERANCE
    assert core.states is not None
    assert seq.held is not None
    assert seq.held.slot is not None
    for i, states in enumerate(core.states.pools.states):
        expected = result.cache.get_recurrent_state(i, state_idx=0)[0].numpy()
        for head, (ours, theirs) in enumerate(zip(states[seq.held.slot], expected, strict=True)):
            assert relative(ours, theirs) <= TOLERANCE, f"layer {i}, head {head}"
    core.close()
