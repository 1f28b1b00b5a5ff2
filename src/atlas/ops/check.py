"""Named-dimension checks: state the shapes of a call once, at its boundary."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ShapeError


def match_dims(*pairs: object, dtype: object = None) -> dict[str, int]:
    """Bind dimension names to sizes: ``match_dims("T D", x, "D", weight)``.

    Parameters
    ----------
    *pairs
        Alternating specifications and arrays (anything with ``shape``). A token of a
        specification is a name, bound at its first use, or a literal size.
    dtype
        If given, every array's dtype must be this one.

    Returns
    -------
    dict
        Size of each name.

    Raises
    ------
    ShapeError
        A rank, a size or a dtype disagrees; the message names it.
    """
    sizes: dict[str, int] = {}
    for spec, array in zip(pairs[::2], pairs[1::2], strict=True):
        names = _parsed(str(spec))
        shape: tuple[int, ...] = array.shape  # type: ignore[attr-defined]
        if len(shape) != len(names):
            raise ShapeError(f"expected [{spec}], got shape {shape}")
        for (name, literal), size in zip(names, shape, strict=True):
            expected = sizes.setdefault(name, size) if literal is None else literal
            if size != expected:
                raise ShapeError(f"{name} is {expected}, but [{spec}] has shape {shape}")
        if dtype is not None and array.dtype != np.dtype(dtype):  # type: ignore
            raise ShapeError(f"[{spec}] has dtype {array.dtype}, allowed: {np.dtype(dtype)}")  # type: ignore
    return sizes


@cache  # a model's specifications are few, and a step's recording states each many times
def _parsed(spec: str) -> tuple[tuple[str, int | None], ...]:
    """Names of a specification, each with its size where it is a literal."""
    return tuple((name, int(name) if name.isdigit() else None) for name in spec.split())


def require_contiguous(**arrays: NDArray[Any] | None) -> None:
    """Refuse, by name, an array that is not contiguous."""
    for name, array in arrays.items():
        if array is not None and not array.flags.c_contiguous:
            raise ShapeError(f"{name} must be contiguous")


def require_rows(**arrays: NDArray[Any]) -> None:
    """Refuse an array whose rows, of two dimensions or more, are not contiguous in themselves."""
    for name, array in arrays.items():
        if array.size and not array[0].flags.c_contiguous:
            raise ShapeError(f"a row of {name} must be contiguous")


def match_sequences(
    slots: NDArray[Any], cu_rows: NDArray[Any], positions: NDArray[Any], num_rows: int
) -> None:
    """int32 [N], [N + 1] and [T]."""
    match_dims("N", slots, f"{len(slots) + 1}", cu_rows, f"{num_rows}", positions, dtype="int32")
