"""What a step of beam search wants of a row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.elementary import exp32, tree_sum
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]


@op
def top_candidates(
    logits: Float, banned: Int, cu_banned: Int, *, ids: Int, values: Float, totals: Float
) -> None:
    """The k greatest logits of each row that are not banned, and the row's softmax total.

    A candidate's log-probability is ``values[i, j] − log(totals[i])``: banned ids keep their
    share of the total.

    Parameters
    ----------
    logits : float32 [L, C]
    banned : int32 [NB]
        Ids that may not be candidates, row after row.
    cu_banned : int32 [L + 1]
        Row i's are banned[cu_banned[i]] … banned[cu_banned[i + 1] − 1].
    ids : int32 [L, k]
        Written, greatest logit first, the lower id first of two equal ones. −1 where fewer than k
        ids are left, and in the whole of a row that holds a NaN or infinity.
    values : float32 [L, k]
        Written: logit − greatest logit of the row, banned ones included; −∞ beside an id of −1.
    totals : float32 [L]
        Written: Σ exp32(logit − greatest); NaN for a row that is not finite.

    Notes
    -----
    Order: the total is ``elementary.tree_sum``, ids ascending. The same logits give the same bits
    on every backend, so that a search takes the same way on all of them.
    """
    k = ids.shape[1]
    for i, row in enumerate(logits):
        ids[i], values[i] = -1, -np.inf
        if not np.isfinite(row).all():
            totals[i] = np.nan
            continue
        with np.errstate(over="ignore"):
            shifted = row - row.max()
        totals[i] = tree_sum(exp32(shifted))
        allowed = np.setdiff1d(np.arange(len(row)), banned[cu_banned[i] : cu_banned[i + 1]])
        best = allowed[np.argsort(-shifted[allowed], kind="stable")[:k]]
        ids[i, : len(best)] = best
        values[i, : len(best)] = shifted[best]
