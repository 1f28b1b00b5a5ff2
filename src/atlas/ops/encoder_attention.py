"""Attention of an encoder: every row of a sequence sees all its rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.spec import op

Float = NDArray[np.float32]


@op
def encoder_attention(
    q: Float, k: Float, v: Float, cu_rows: NDArray[np.int32], scale: float, *, out: Float
) -> None:
    """Bidirectional attention within each sequence of a ragged batch.

    Parameters
    ----------
    q, k, v : float32 [T, H, K]
        Rows may be strided.
    cu_rows : int32 [N + 1]
        Rows cu_rows[n] … cu_rows[n + 1] − 1 are sequence n, which may be empty. Rows from
        cu_rows[N] on are nobody's, and left as they are.
    scale : float
        Multiplies q · k.
    out : float32 [T, H, K]
        Written; contiguous.

    Notes
    -----
    Order: that of ``attention_prefill``, with every key of the sequence in sight: it does not
    depend on the batch.

    Source
    ------
    Vaswani et al., "Attention Is All You Need" (2017), arXiv 1706.03762.
    """
    for n in range(len(cu_rows) - 1):
        rows = slice(cu_rows[n], cu_rows[n + 1])
        if not len(q[rows]):
            continue
        scores = np.einsum("thk,shk->hts", q[rows], k[rows]) * np.float32(scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[rows] = np.einsum("hts,shk->thk", weights, v[rows])
