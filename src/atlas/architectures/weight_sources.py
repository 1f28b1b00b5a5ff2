"""Where each canonical weight lies in a file, and what is done to it on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FileKind = Literal["gguf", "safetensors"]
Shape = tuple[int, ...]


class Shaped(Protocol):
    """A tensor of a file; `shape` is row-major."""

    @property
    def shape(self) -> Shape: ...


Tensors = Mapping[str, Shaped]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` … `stop` − 1 of each of `groups` equal groups of a tensor's rows."""

    groups: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Heads stored as value head j of every key head in turn, from row `first` on.

    ``per_key_head`` value heads belong to each of ``num_key_heads`` key heads.
    """

    per_key_head: int
    num_key_heads: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """The file's tensors behind one canonical weight.

    Parameters
    ----------
    tensors : tuple of str
        Names in the file; several (one per expert) are stacked by rows.
    shape : tuple of int
        The shape that each of them must have.
    interleaved_heads : int
        Not 0: rows of that many heads are stored in pairs for interleaved RoPE.
    part : Part, optional
        The rows that are this weight's; default: all.
    tiles : Tiles, optional
        Order of the heads in those rows.
    offset : float
        Added to a vector: 1 where the file stores w for a norm that multiplies by 1 + w.
    is_negated_exp : bool
        The file stores −exp(w) of a vector w.
    """

    tensors: tuple[str, ...]
    shape: Shape
    interleaved_heads: int = 0
    part: Part | None = None
    tiles: Tiles | None = None
    offset: float = 0.0
    is_negated_exp: bool = False

    @property
    def share(self) -> float:
        """The part of the tensors' rows that are this weight's."""
        if self.part is None:
            return 1.0
        rows = prod(self.shape[: max(1, len(self.shape) - 1)])
        return self.part.groups * (self.part.stop - self.part.start) / rows

    @property
    def row_range(self) -> slice | None:
        """The rows, where they lie one after the other in canonical order."""
        if self.part is None or self.part.groups > 1 or self.tiles is not None:
            return None
        return slice(self.part.start, self.part.stop)

    def row_index(self) -> NDArray[np.int64] | None:
        """Rows of the file's tensor in canonical order; None where they already are."""
        rows = np.arange(prod(self.shape[: max(1, len(self.shape) - 1)]))
        if self.interleaved_heads:
            # File row 2j + s of a head is row j of its half s: we rotate half with half.
            return rows.reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if self.part is None and self.tiles is None:
            return None
        if self.part is not None:
            groups = rows.reshape(self.part.groups, -1)
            rows = groups[:, self.part.start : self.part.stop].reshape(-1)
        if self.tiles is not None:
            first, tiled = rows[: self.tiles.first], rows[self.tiles.first :]
            heads = tiled.reshape(self.tiles.per_key_head, self.tiles.num_key_heads, -1)
            rows = np.concatenate([first, heads.swapaxes(0, 1).reshape(-1)])
        return rows

    def values(self, stored: NDArray[np.float32]) -> NDArray[np.float32]:
        """The float32 array that an op reads, flat, from the file's tensor, flat."""
        values, index = stored, self.row_index()
        if index is not None:
            rows = prod(self.shape[: max(1, len(self.shape) - 1)])
            values = values.reshape(rows, -1)[index].reshape(-1)
        if self.is_negated_exp:
            values = np.log(-values)
        return values + np.float32(self.offset) if self.offset else values


def split_layer(name: str) -> tuple[str, int, str]:
    """``layers.3.q_proj`` into its stem, layer and leaf: ``layers``, 3, ``q_proj``."""
    stem, _, rest = name.partition("layers.")
    layer_idx, _, leaf = rest.partition(".")
    return f"{stem}layers", int(layer_idx), leaf


def experts_source(
    tensors: Tensors, num_experts: int, layer: str, leaf: str, shape: Shape, gated: bool
) -> Source:
    """Experts of a Hugging Face folder: one by one or, as transformers 5 keeps them, fused."""
    rows, cols = shape[0] // num_experts, shape[1]
    projection = leaf.removeprefix("experts.")
    fused = "gate_up_proj" if gated and projection != "down_proj" else projection
    if f"{layer}.experts.{fused}" not in tensors:
        names = tuple(f"{layer}.experts.{e}.{projection}.weight" for e in range(num_experts))
        return Source(names, (rows, cols))
    names = (f"{layer}.experts.{fused}",)
    if fused != "gate_up_proj":
        return Source(names, (num_experts, rows, cols))
    return Source(names, (num_experts, 2 * rows, cols), part=half(num_experts, rows, projection))


def half(groups: int, rows: int, projection: str) -> Part:
    """The gate or the up projection of a fused pair with `rows` rows each, in every group."""
    start = 0 if projection == "gate_proj" else rows
    return Part(groups, start, start + rows)
