import numpy as np
from numpy.typing import NDArray

from atlas._native.block_pool import BlockPool
from atlas._native.sequence import Sequence

Ints = NDArray[np.int32]

class SourceRows:
    seqs: list[Sequence]
    num_tokens: int
    source_len: int
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        source_blocks: Ints,
        source_len: int,
        first_tokens: Ints,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def tokens(self) -> Ints: ...
    @property
    def num_blocks(self) -> int: ...
    def go_on(self, parents: Ints, tokens: Ints) -> None: ...
    def release(self) -> None: ...

def blocks_needed(sources: list[SourceRows]) -> int: ...
def longest(sources: list[SourceRows]) -> int: ...
def reserve(sources: list[SourceRows]) -> Ints: ...
def advance(sources: list[SourceRows]) -> None: ...
def write_rows(
    sources: list[SourceRows],
    token_ids: Ints,
    positions: Ints,
    slots: Ints,
    cu_rows: Ints,
    block_tables: Ints,
    logits_rows: Ints,
    source_cu_rows: Ints,
    source_lens: Ints,
    source_tables: Ints,
) -> tuple[int, int, int, int]: ...
