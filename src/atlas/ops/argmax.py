"""Greedy choice."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.spec import op


@op
def argmax(logits: NDArray[np.float32], *, out: NDArray[np.int32]) -> None:
    """out[i] = the lowest id of the greatest logit in row i; −1 if a value is not finite.

    Parameters
    ----------
    logits : float32 [L, C]
    out : int32 [L]
        Written.
    """
    out[...] = np.where(np.isfinite(logits).all(axis=-1), np.argmax(logits, axis=-1), -1)
