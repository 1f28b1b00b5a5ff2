"""Figures on held-out text: bits per byte, baselines, and how often the MTP head is right."""

from __future__ import annotations

import lzma
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .network import Network


class Score(NamedTuple):
    """What ``score`` measures."""

    bits: float
    agreed: int  # rows where both heads' argmax is the same token
    rows: int

    @property
    def agreement(self) -> float:
        return self.agreed / self.rows


@torch.no_grad()
def score(network: Network, tokens: np.ndarray, length: int = 2048, rows: int = 8) -> Score:
    """Bits of ``tokens[1:]``, and the agreement of the MTP head with the main head.

    Windows of ``length`` overlap by half and only the second half of each counts (of the first,
    all), so a token has at least ``length`` / 2 before it. The heads agree on a row where the
    argmax of the MTP head, given row i and token i+1, is that of the main head at row i+1: there a
    greedy draft would be accepted.
    """
    device = network.model.embed_tokens.weight.device
    half = length // 2
    padded = np.pad(tokens, (0, length + 1))
    nats, agreed, counted = 0.0, 0, 0
    firsts = list(range(0, max(len(tokens) - 1 - half, 1), half))
    for begin in range(0, len(firsts), rows):
        batch = firsts[begin : begin + rows]
        x = torch.from_numpy(np.stack([padded[f : f + length + 1] for f in batch])).long()
        x = x.to(device)
        row = torch.tensor(batch, device=device)[:, None] + torch.arange(length, device=device)
        counts = (row + 1 < len(tokens)) & ((row >= half) | (row[:, :1] == 0))
        counts &= (torch.arange(length, device=device) >= half) | (row[:, :1] == 0)
        main, ahead = network(x[:, :-1], x[:, 1:])
        logits = network.logits(main).float()
        each = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        nats += each.view_as(counts)[counts].double().sum().item()
        same = network.logits(ahead[:, :-1]).argmax(-1) == logits[:, 1:].argmax(-1)
        agreed += int(same[counts[:, 1:]].sum())
        counted += int(counts[:, 1:].sum())
    return Score(nats / math.log(2), agreed, counted)


def xz_bits(text: bytes, before: bytes = b"") -> int:
    """Bits that ``xz -9e`` needs for ``text``, with ``before`` compressed ahead of it for free."""
    options = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    alone = len(lzma.compress(before, filters=options)) if before else 0
    return 8 * (len(lzma.compress(before + text, filters=options)) - alone)


class KneserNey:
    """An interpolated Kneser–Ney n-gram model over token ids (Chen and Goodman 1999, §2.7).

    The highest order counts occurrences, lower ones the distinct tokens seen before; one discount
    n₁ / (n₁ + 2 n₂) per order. Below unigrams lies the uniform distribution.
    """

    def __init__(self, tokens: np.ndarray, order: int, vocab_size: int) -> None:
        self.order, self.vocab_size = order, vocab_size
        self._tables: list[tuple[np.ndarray, ...]] = []
        grams = counts = None
        for n in range(order, 0, -1):
            if n == order:
                grams, counts = np.unique(self._encode(tokens, n), return_counts=True)
            else:  # drop the oldest token: how many distinct ones preceded the rest
                rest = grams % np.int64(vocab_size) ** n
                grams, counts = np.unique(rest, return_counts=True)
            once, twice = (counts == 1).sum(), (counts == 2).sum()
            discount = once / (once + 2 * twice) if once else 0.5
            contexts, first = np.unique(grams // vocab_size, return_index=True)
            totals = np.add.reduceat(counts, first)
            kinds = np.diff(np.append(first, len(grams)))
            self._tables.append((grams, counts, contexts, totals, kinds, np.float64(discount)))

    def _encode(self, tokens: np.ndarray, n: int) -> np.ndarray:
        """Each run of n tokens as one integer, the oldest most significant."""
        code = np.zeros(len(tokens) - n + 1, np.int64)
        for i in range(n):
            code = code * self.vocab_size + tokens[i : len(tokens) - n + 1 + i]
        return code

    def bits(self, tokens: np.ndarray) -> float:
        """Bits of ``tokens[1:]``, each given up to order − 1 before it."""
        probability = np.full(len(tokens) - 1, 1.0 / self.vocab_size)
        for n, table in zip(range(1, self.order + 1), reversed(self._tables), strict=True):
            grams, counts, contexts, totals, kinds, discount = table
            codes = self._encode(tokens, n)[1 if n == 1 else 0 :]
            at = slice(max(n - 2, 0), None)  # tokens with n − 1 before them
            lower = probability[at]
            place = np.minimum(
                np.searchsorted(contexts, codes // self.vocab_size), len(contexts) - 1
            )
            known = contexts[place] == codes // self.vocab_size
            spot = np.minimum(np.searchsorted(grams, codes), len(grams) - 1)
            count = np.where(grams[spot] == codes, counts[spot], 0)
            own = np.maximum(count - discount, 0) / totals[place]
            probability[at] = np.where(
                known, own + discount * kinds[place] / totals[place] * lower, lower
            )
        return float(-np.log2(probability).sum())
