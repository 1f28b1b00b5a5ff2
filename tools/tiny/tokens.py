"""The byte-level BPE, and documents as token streams."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import Document

END = "<|endoftext|>"  # id 0: before and after every document


def train_tokenizer(documents: Iterable[Document], vocab_size: int, seed: int) -> Tokenizer:
    """Learn merges from prose first: all documentation and a third of the code."""
    draw = random.Random(seed)
    texts = [d.text for d in documents if d.kind == "docs" or draw.random() < 0.33]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def stream(tokenizer: Tokenizer, documents: Iterable[Document]) -> np.ndarray:
    """All documents in order, int32, END between them and at both ends."""
    end = tokenizer.token_to_id(END)
    parts = [np.array([end], np.int32)]
    for encoding in tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False):
        parts += [np.array(encoding.ids, np.int32), parts[0]]
    return np.concatenate(parts)
