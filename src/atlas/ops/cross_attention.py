"""Attention of a decoder over the keys and values of its source."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.attention import attention_prefill
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]


@op
def cross_attention(
    q: Float,
    k_pool: NDArray[np.floating],
    v_pool: NDArray[np.floating],
    source_tables: Int,
    cu_rows: Int,
    max_rows: int,
    source_lens: Int,
    scale: float,
    *,
    out: Float,
) -> None:
    """Every row sees all keys of its source; the beams of a request share one source.

    Parameters
    ----------
    q : float32 [T, H, K]
        Rows may be strided. Query head h reads key head ⌊h · HK / H⌋.
    k_pool, v_pool : float32 or float16 [B, HK, K, S], [B, HK, S, K]
    source_tables : int32 [G, M]
        Blocks of each source; computed once, never written again.
    cu_rows : int32 [G + 1]
        Rows cu_rows[g] … cu_rows[g + 1] − 1 belong to source g, which may have none.
    max_rows : int
        No source has more rows; no result depends on it.
    source_lens : int32 [G]
        Keys of each source, at least 1.
    scale : float
        Multiplies q · k.
    out : float32 [T, H, K]
        Written; contiguous.

    Notes
    -----
    Order: that of ``attention_prefill`` at the source's last position, whatever rows share it.

    Source
    ------
    Vaswani et al., "Attention Is All You Need" (2017), arXiv 1706.03762, section 3.2.3.
    """
    last = np.repeat(source_lens - 1, np.diff(cu_rows)).astype(np.int32)
    attention_prefill(q, k_pool, v_pool, source_tables, cu_rows, last, scale, None, None, out=out)
