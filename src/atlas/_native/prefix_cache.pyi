import enum

import numpy as np
from numpy.typing import NDArray

from atlas._native.block_pool import BlockPool
from atlas._native.radix_tree import RadixTree

class MissReason(enum.IntEnum):
    COMPLETE = 0
    COLD = 1
    DIVERGED = 2
    GENERATED = 3
    CAPPED = 4
    SNAPSHOT = 5

class PrefixMatch:
    num_tokens: int
    blocks: NDArray[np.uint32]
    exact_tokens: int
    snapshot_id: int | None
    snapshot_tokens: int
    cached_tokens: int
    reason: MissReason

class PrefixCache(RadixTree):
    recurrent: bool
    num_snapshots: int
    hits: int
    matched_tokens: int
    evicted_blocks: int
    upgraded_blocks: int
    def __init__(
        self, pool: BlockPool, block_size: int = 16, *, recurrent: bool = False
    ) -> None: ...
    @property
    def misses(self) -> dict[MissReason, int]: ...
    def match(
        self, tokens: NDArray[np.int32], seed: int, reuse_generated: bool, max_tokens: int
    ) -> PrefixMatch: ...
    def insert(
        self,
        tokens: NDArray[np.int32],
        block_table: NDArray[np.uint32],
        num_valid_tokens: int,
        prompt_len: int,
        seed: int,
    ) -> int: ...
    def evict(self, num_blocks: int) -> int: ...
    def reclaim_for(
        self, tokens: NDArray[np.int32], seed: int, reuse_generated: bool, blocks_needed: int
    ) -> tuple[int, int, bool]: ...
    def clear(self) -> int: ...
    def attach_snapshot(
        self,
        tokens: NDArray[np.int32],
        num_tokens: int,
        seed: int,
        snapshot_id: int,
        generated: bool = False,
    ) -> int | None: ...
    def detach_snapshot(
        self, tokens: NDArray[np.int32], num_tokens: int, seed: int
    ) -> int | None: ...
    def evict_snapshots(self, count: int) -> list[int]: ...
    def drain_snapshots(self) -> list[int]: ...
