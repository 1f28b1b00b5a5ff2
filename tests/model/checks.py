"""What tests of the groups share: comparing logits, and sequences before and after a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.logits_view import LogitsView
from atlas.model.sequence import SequenceState

PROMPT = [5, 17, 3, 99, 202, 0, 64, 31, 8, 150, 77, 12, 200, 41, 9, 110, 33, 2, 71, 190]
OTHER = [9, 8, 7, 6, 55, 4, 3]


def assert_logits(view: LogitsView | None, expected: NDArray[Any]) -> None:
    """The view's rows are these, per row within 1e-4 of the greatest."""
    assert view is not None
    rows = np.asarray(view)
    assert rows.shape == expected.shape
    error = np.abs(rows - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() <= 1e-4


def prefilled(model: Model, tokens: Sequence[int]) -> SequenceState:
    """A new sequence that holds a prompt."""
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(tokens, seq, logits="none")
    assert seq.seq_len == len(tokens)
    return seq


def state(seq: SequenceState) -> dict[str, object]:
    """All that a call may change."""
    return {
        "tokens": seq.tokens.tolist(),
        "blocks": seq.block_table.tolist(),
        "seq_len": seq.seq_len,
        "prompt_len": seq.prompt_len,
        "kv_valid_tokens": seq.kv_valid_tokens,
        "verify_rows": seq.verify_rows,
        "status": seq.status,
    }


@contextmanager
def unchanged(model: Model, *seqs: SequenceState) -> Iterator[None]:
    """The block leaves the sequences and the pool as they were."""
    before = [state(seq) for seq in seqs], model.lifecycle.num_free_blocks
    yield
    assert ([state(seq) for seq in seqs], model.lifecycle.num_free_blocks) == before


def row_after(model: Model, tokens: Sequence[int]) -> bytes:
    """The logits after ``tokens``, run by themselves without the prefix cache."""
    seq, cut = model.lifecycle.alloc_sequence(), len(tokens) // 2
    if cut:
        model.forward.prefill_chunk(tokens, seq, 0, cut, False, logits="all")
    row = bits(model.forward.prefill_chunk(tokens, seq, cut, len(tokens) - cut, True))
    model.lifecycle.free_sequence(seq)
    return row


def bits(view: LogitsView | None) -> bytes:
    """The bytes of a view's last row."""
    assert view is not None
    return view.numpy()[-1].tobytes()


def assert_accounted(loaded: LoadedModel, seqs: Sequence[SequenceState]) -> None:
    """Every reference on a block is a sequence's or the prefix cache's, and no block is lost."""
    core = loaded.core
    held = Counter(block for seq in seqs for block in seq.block_table.tolist())
    cached = 0
    for block in range(core.blocks.num_total):
        extra = core.blocks.references(block) - held[block]
        assert extra in (0, 1)
        cached += extra
    assert cached == (core.prefix_cache.num_blocks if core.prefix_cache is not None else 0)
    used = sum(core.blocks.references(block) > 0 for block in range(core.blocks.num_total))
    assert used + core.blocks.num_free == core.blocks.num_total
