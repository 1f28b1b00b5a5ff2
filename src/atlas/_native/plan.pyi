from enum import IntEnum, IntFlag
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ENTRY: np.dtype[np.void]
ACTION: np.dtype[np.void]

class EntryKind(IntEnum):
    STEP = 0
    PROMPT = 1

class EntryFlag(IntFlag):
    LAST_CHUNK = 1
    SAMPLES = 2
    REPLAY = 4
    POLL_CALIBRATION = 8
    NORMALIZE = 16
    SNAPSHOT = 32
    FIRST_CHUNK = 64

class ActionKind(IntEnum):
    COPY_BLOCK = 0
    SPILL = 1
    RESTORE = 2
    REQUEUE = 3
    MOVE_SLOT = 4
    ZERO_SLOT = 5
    RESTORE_SNAPSHOT = 6

class FinishReason(IntEnum):
    LENGTH = 1
    STOP = 2
    CANCELLED = 3
    ERROR = 4
    EXHAUSTED = 5

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
