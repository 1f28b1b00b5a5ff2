"""The model in the package: its greedy tokens are transformers', and its MTP head is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

import atlas
from atlas.weights.locate import locate

FOLDER = Path(locate("atlas-tiny").path)
PROMPTS = (
    "The quick start ",
    "The capital of France is",
    "This module provides",
    "def read_file(path):\n    ",
    "naïve → 123",
    "Return a new list containing " * 30,  # several chunks of a recurrence, all of a block
)
NUM_GREEDY = 64


@pytest.fixture(scope="module")
def engine() -> Iterator[atlas.Engine]:
    with atlas.Engine(dtype="float32", quiet=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval()


@pytest.mark.cpu
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt[:12])
def test_greedy_tokens_are_those_of_transformers(
    engine: atlas.Engine, reference: Any, prompt: str
) -> None:
    """One forward of the reference over all of them: each token is the best after the others."""
    params = atlas.SamplingParams(max_tokens=NUM_GREEDY, ignore_eos=True)
    tokens = list(engine.generate(prompt, params).token_ids)
    ids = engine.tokenizer.encode(prompt)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*ids, *tokens[:-1]]]), use_cache=False).logits[0]
    assert logits[len(ids) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.cpu
def test_logits_are_those_of_transformers(engine: atlas.Engine, reference: Any) -> None:
    ids = engine.tokenizer.encode(PROMPTS[-1])
    model = engine.model
    seq = model.lifecycle.alloc_sequence()
    ours = model.forward.prefill(ids, seq).numpy()[0].copy()
    model.lifecycle.free_sequence(seq)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids]), use_cache=False).logits[0, -1].numpy()
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_the_mtp_head_is_loaded(engine: atlas.Engine) -> None:
    loaded = engine._loaded
    assert loaded.core.config.mtp_kinds == ("attention",)
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("mtp.")]  # noqa: SIM118
        stored_norm = file.get_tensor("mtp.norm.weight").float().numpy()
    ours = [name for name in loaded.formats if name.startswith("mtp.")]
    assert len(ours) == len(names) + 1 == 16  # the file's q_proj is a query and its gate
    head = loaded.core.network.mtp
    assert head is not None
    assert len(head.blocks) == 2  # attention and MLP
    np.testing.assert_array_equal(np.asarray(head.final_norm), 1.0 + stored_norm)


def test_it_is_what_an_engine_without_a_name_opens(engine: atlas.Engine) -> None:
    assert Path(engine.path) == Path(atlas.__file__).resolve().parent / "data/atlas-tiny"
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (FOLDER / "LICENSE-PSF").read_text()
