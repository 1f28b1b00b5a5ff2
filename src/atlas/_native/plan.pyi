from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ENTRY: np.dtype[np.void]
ACTION: np.dtype[np.void]

class Plan:
    step_id: int
    num_seqs: int
    num_decode: int
    num_rows: int
    num_logits: int
    padded_batch: int
    one_by_one: bool
    outstanding: bool
    refused: list[tuple[int, int]]
    block_size: int
    owner: Any
    @property
    def entries(self) -> NDArray[np.void]: ...
    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def source_rows(self) -> NDArray[np.int32]: ...
    @property
    def actions(self) -> NDArray[np.void]: ...
    @property
    def action_blocks(self) -> NDArray[np.int32]: ...
    @property
    def command(self) -> Literal["none", "decode", "prefill", "mixed"]: ...
