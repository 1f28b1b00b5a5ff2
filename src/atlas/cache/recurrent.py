"""The recurrent pools: state and convolution tail of every recurrent layer, by slot.

One index space holds whatever a state can be kept for, so that every transfer goes from slot to
slot: slots of running sequences first, then snapshots, then checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas import pages
from atlas.config import ModelConfig
from atlas.errors import InvalidArgumentError
from atlas.layers.step import Array

CHECKPOINT_ROWS = 16
"""Rows after a checkpoint that a rollback can end at, and so the most rows of a verify."""


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """How many slots of each use there are, in the order of their numbers."""

    running: int
    snapshots: int
    checkpoints: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.running + self.snapshots + self.checkpoints

    @property
    def first_checkpoint(self) -> int:
        """Number of the first checkpoint's slot."""
        return self.running + self.snapshots


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentPools:
    """Arrays of the recurrent layers, in their order.

    Attributes
    ----------
    states : tuple of float32 [S, …]
        [S, HV, K, V] of a gated delta layer, [S, H, P, N] of a Mamba-2 layer.
    tails : tuple of float32 [S, W − 1, C]
    kept_inputs : tuple of float32 [checkpoints · CHECKPOINT_ROWS, M]
        A layer's projected inputs of the rows after each checkpoint.
    counts : SlotCounts
    """

    states: tuple[Array, ...]
    tails: tuple[Array, ...]
    kept_inputs: tuple[Array, ...]
    counts: SlotCounts

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(pool[0].nbytes for pool in (*self.states, *self.tails))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(pool.nbytes for pool in (*self.states, *self.tails, *self.kept_inputs))

    def copy(self, source: int, target: int) -> None:
        """Make slot ``target`` equal to ``source``, all layers."""
        for pool in (*self.states, *self.tails):
            pool[target] = pool[source]

    def zero(self, slot: int) -> None:
        """The state of a sequence that has absorbed nothing."""
        for pool in (*self.states, *self.tails):
            pool[slot] = 0

    def read(self, slot: int) -> list[Array]:
        """Copies of a slot, layer by layer, state then tail."""
        return [pool[slot].copy() for layer in self._layers() for pool in layer]

    def write(self, slot: int, parts: list[Array]) -> None:
        """What :meth:`read` gave, into another slot."""
        pools = [pool for layer in self._layers() for pool in layer]
        for pool, part in zip(pools, parts, strict=True):
            pool[slot] = part

    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what :meth:`read` gives."""
        return tuple(pool.shape[1:] for layer in self._layers() for pool in layer)

    def _layers(self) -> list[tuple[Array, Array]]:
        return list(zip(self.states, self.tails, strict=True))


def recurrent_shapes(config: ModelConfig, counts: SlotCounts) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of every array of the pools, by attribute; empty lists without recurrent layers."""
    layers = [config.recurrent(i) for i in config.recurrent_layers]
    rows = counts.checkpoints * CHECKPOINT_ROWS
    return {
        "states": [(counts.total, *sizes.state_shape) for sizes in layers],
        "tails": [(counts.total, sizes.conv_width - 1, sizes.conv_size) for sizes in layers],
        "kept_inputs": [(rows, sizes.input_size) for sizes in layers],
    }


def recurrent_bytes(config: ModelConfig, counts: SlotCounts) -> int:
    """Bytes of the pools before anything is allocated."""
    shapes = recurrent_shapes(config, counts)
    return sum(4 * int(np.prod(shape)) for group in shapes.values() for shape in group)


def allocate_recurrent(config: ModelConfig, counts: SlotCounts) -> RecurrentPools | None:
    """Zeroed pools, None without recurrent layers; slots that are not used cost no memory."""
    if not config.recurrent_layers:
        return None
    if counts.running < 1:
        raise InvalidArgumentError(f"{counts.running} recurrent slots; allowed: 1 or more")
    arrays = {
        name: tuple(pages.zeros(shape, np.float32) for shape in group)
        for name, group in recurrent_shapes(config, counts).items()
    }
    return RecurrentPools(**arrays, counts=counts)
