"""What a launched step will have chosen: tokens, and rows of logits for whoever needs them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class StepResult(Protocol):
    """A step that was launched. Reading it waits for the device; it is read before the next but
    one is launched."""

    def tokens(self) -> Ints:
        """int32 [L]: the token of each logits row; −1 marks a row that is not finite."""
        ...

    def logits(self, row: int) -> Floats:
        """float32 [C] of one of the rows that were asked for at launch."""
        ...


class FinishedStep:
    """The result of a step that ran in the caller's thread.

    Parameters
    ----------
    tokens : int32 [L] or None
        None where nobody asked for the greedy choice.
    logits : float32 [L, C]
        Rows of the arena.
    kept_rows : iterable of int
        Rows to copy out of the arena now, because another step may run before they are read.
    """

    def __init__(self, tokens: Ints | None, logits: Floats, kept_rows: Any = ()) -> None:
        self._tokens = tokens
        self._logits = logits
        self._kept = {row: logits[row].copy() for row in kept_rows}

    def tokens(self) -> Ints:
        assert self._tokens is not None, "nobody asked for tokens when the step was launched"
        return self._tokens

    def logits(self, row: int) -> Floats:
        kept = self._kept.get(row)
        chosen: Floats = self._logits[row] if kept is None else kept
        return chosen
