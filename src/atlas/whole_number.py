"""Integer arguments: any integer type, no fractions, within bounds."""

from __future__ import annotations

import operator
from typing import Any

from atlas.errors import InvalidArgumentError, shown

MOST = 2**62
"""Bound of counts that have no other: they must fit the native counters."""


def whole_number(name: str, value: Any, least: int, most: int = MOST) -> int:
    """``value`` as an int.

    Raises
    ------
    InvalidArgumentError
        No integer (bool included), or outside ``least`` … ``most``; names value and bounds.
    """
    bounds = f"{least} or more" if most == MOST else f"{least} … {most}"
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise InvalidArgumentError(f"{name} is {shown(value)}; allowed: an integer, {bounds}")
    return number
