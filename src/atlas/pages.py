"""Arrays on pages of their own: untouched pages cost no memory, freed ones go back at once.

The allocator behind NumPy reuses what was freed. A large zeroed array may then be cleared by hand,
which makes all of it resident, and the memory of a closed model stays with the process.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALL_BYTES = 64 << 10  # below, a mapping is not worth its pages


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A zeroed array; at least 64-byte aligned where it is large.

    Raises
    ------
    MemoryError
        The system has no room for it.
    """
    kind = np.dtype(dtype)
    count = shape if isinstance(shape, int) else prod(shape)
    nbytes = count * kind.itemsize
    if nbytes < _SMALL_BYTES:
        return np.zeros(shape, kind)
    try:
        # Private: a forked child's writes must not reach its parent.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error.strerror}") from error
    return np.frombuffer(pages, kind, count).reshape(shape)
