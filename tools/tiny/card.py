"""The model card and the picture of the loss."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .network import Network
from .tokens import END

TEMPERATURE = 0.7
PROMPTS = (
    "The quick start ",
    "The capital of France is",
    "This module provides",
    "def read_file(path):\n    ",
    "Return a new list containing",
    "What's New in Python",
)

CARD = """\
---
license: psf-2.0
language: en
tags: [hybrid, mtp]
---
# atlas-tiny

A {parameters:.2f} M parameter hybrid in the Qwen3.5 text format with an MTP head: {layers} layers,
of which {attention} are full attention and the others gated delta networks, hidden size {hidden},
its own byte-level BPE of {vocab} tokens, tied embeddings, bfloat16 ({megabytes:.2f} MB). It exists
so that an engine can be installed, tried and tested offline: it continues text in the manner of
Python's documentation and library. It knows nothing else, follows no instructions, repeats itself
and makes facts up.

## Training

`tools/train_tiny.py` of the repository, seed {seed}: {steps} steps of {batch} tokens in windows of
{length} ({seconds:.0f} s on one {device}, compiling included), AdamW, learning rate
{learning_rate:g} falling linearly to nothing, weight decay {weight_decay:g}, dropout {dropout:g}.
The MTP head was trained jointly (weight {mtp_weight:g}) on what the main head says one row later.
Windows are drawn at random: {mixture}.

Text, under the Python Software Foundation licence (see `LICENSE-PSF`):

{sources}

{training_bytes:.1f} MB were trained on. One topic in twelve (a module's code, tests and
documentation together, by a hash of its name) was held out.

## Figures

On the held-out documentation and code ({held_bytes:.0f} kB), with the exported bfloat16
weights:

| | bits per byte |
|---|---|
| **atlas-tiny** | **{bits[model]:.3f}** |
| interpolated Kneser–Ney 5-gram over the same tokens, same training text | {bits[ngram]:.3f} |
| `xz -9e` of the held-out text | {bits[xz]:.3f} |
| `xz -9e` once it has seen the training documentation and code | {bits[xz_after]:.3f} |

The MTP head's argmax for the token after next is the main head's in **{mtp_agreement:.1%}** of the
held-out rows (the acceptance of one greedy draft).

The loss curve is [`docs/atlas-tiny-loss.png`](../../../../docs/atlas-tiny-loss.png) of the
repository.

## Samples

Up to {sample_tokens} tokens after each prompt, first the likeliest ones, then drawn.

{samples}"""


@torch.no_grad()
def continuation(
    network: Network, tokenizer: Tokenizer, prompt: str, count: int, temperature: float = 0.0
) -> str:
    """Up to ``count`` tokens after ``prompt``, the whole text run again for each; seed 0."""
    draw = torch.Generator().manual_seed(0)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    start, end = len(ids), tokenizer.token_to_id(END)
    while len(ids) < start + count:
        rows, _ = network(torch.tensor([ids]))
        logits = network.logits(rows[0, -1])
        if temperature > 0:
            ids.append(
                int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw))
            )
        else:
            ids.append(int(logits.argmax()))
        if ids[-1] == end:
            break
    return tokenizer.decode(ids[start:])


def samples(network: Network, tokenizer: Tokenizer, count: int) -> str:
    """Continuations of ``PROMPTS`` as Markdown."""
    parts = []
    for prompt in PROMPTS:
        parts.append(f"### `{prompt!r}`\n")
        for temperature, name in ((0.0, "Greedy"), (TEMPERATURE, f"Temperature {TEMPERATURE}")):
            text = continuation(network, tokenizer, prompt, count, temperature)
            parts.append(f"{name}:\n\n```text\n{prompt}{text}\n```\n")
    return "\n".join(parts)


def write_card(folder: Path, figures: Mapping[str, Any]) -> None:
    (folder / "README.md").write_text(CARD.format(**figures), encoding="utf-8")


def plot(curve: Path, picture: Path) -> None:
    """Loss in nats per token against steps, from the CSV of a training run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with curve.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (
        ("loss", "next token, training", {"color": "tab:blue", "alpha": 0.4, "linewidth": 0.8}),
        ("mtp_loss", "MTP head, training", {"color": "tab:orange", "alpha": 0.4, "linewidth": 0.8}),
        ("held_out", "next token, held out", {"color": "tab:blue", "marker": ".", "markersize": 3}),
        (
            "held_out_mtp",
            "MTP head, held out",
            {"color": "tab:orange", "marker": ".", "markersize": 3},
        ),
    ):
        points = [(int(row["step"]), float(row[key])) for row in rows if row[key]]
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="nats per token", ylim=(1.0, 4.5), title="atlas-tiny")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
