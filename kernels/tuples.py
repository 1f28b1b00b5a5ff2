"""A function of each member of a tuple: what a warp does to several things side by side."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device


def each(count: int, function: Any) -> Any:
    """A device function: (a, b, c) → (function(a[0], b[0], c), function(a[1], b[1], c), …).

    Straight-line code, member after member: tuples of ``count`` are halved until one is left.
    """
    if count == 1:

        @device
        def one(a, b, c):
            return (function(a[0], b[0], c),)

        return one
    half = count // 2
    low, high = each(half, function), each(count - half, function)

    @device
    def all_of_them(a, b, c):
        return low(a[:half], b[:half], c) + high(a[half:], b[half:], c)

    return all_of_them
