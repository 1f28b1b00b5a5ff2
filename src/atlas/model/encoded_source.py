"""A source that the encoder has read: where its keys and values lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from atlas._native.block_pool import BlockPool


class EncodedSource:
    """Blocks of the KV pools that hold a source's cross-attention K and V, written once.

    Every sequence that translates the source holds it: the beams of a request, and forks.

    Attributes
    ----------
    token_ids : int32 [S]
        Language tag, subwords, end token.
    blocks : int32 [⌈S / block size⌉]
    """

    def __init__(self, pool: BlockPool, block_size: int, token_ids: NDArray[np.int32]) -> None:
        self.token_ids = token_ids
        self.blocks = np.array(pool.allocate(-(-len(token_ids) // block_size)), np.int32)
        self._pool = pool
        self._num_holders = 1

    def __len__(self) -> int:
        return len(self.token_ids)

    def slots(self, block_size: int) -> NDArray[np.int32]:
        """block · S + offset of each token, int32 [S]."""
        block, offset = np.divmod(np.arange(len(self), dtype=np.int32), block_size)
        return self.blocks[block] * block_size + offset

    def retain(self) -> EncodedSource:
        """One holder more."""
        self._num_holders += 1
        return self

    def release(self) -> None:
        """One holder less; the last one's blocks go back."""
        self._num_holders -= 1
        if not self._num_holders:
            for block in self.blocks.tolist():
                self._pool.release(block)
