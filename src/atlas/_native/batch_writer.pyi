import numpy as np
from numpy.typing import NDArray

from atlas._native.plan import Plan

def write_batch(
    plan: Plan,
    token_ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    slots: NDArray[np.int32],
    cu_rows: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    logits_rows: NDArray[np.int32],
    state_slots: NDArray[np.int32] | None = None,
) -> None: ...
