"""A step's keys and values that the pools do not hold yet: what attention does with them.

``attention_decode`` has none, since a kernel before it stores them; ``attention_step`` fills them
in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas_kernels._cuda import device, i32


@dataclass(frozen=True, slots=True)
class FreshRows:
    """Device functions for keys and values that are not in the pools yet.

    Attributes
    ----------
    first : (latest, first_row, positions) → the first position that is not in the pools
    warm : (base, fresh, first_row, position, count)
        Before the wait: ask for the constants of ``turn`` and the slots of ``count`` rows.
    copy : (base, fresh, first_row, head, count)
        Start copying them to shared memory, with the queries.
    turn : (base, fresh, warp, position, begin, rows, group, count)
        Normalise and rotate the queries and ``count`` keys, once they are there.
    store : (base, fresh, first_row, position, head, kv_heads, begin, end, split, pools)
        Write those of the thread block's own rows, in a split, into the pools.
    patch : (base, at, block, position, count, which)
        Put a block's own into the copy ``at`` of its keys (0) or values (1).
    """

    first: Any
    warm: Any
    copy: Any
    turn: Any
    store: Any
    patch: Any


NO_FRESH_ROWS = FreshRows(
    device(lambda latest, first_row, positions: i32(latest + 1)),
    device(lambda base, fresh, first_row, position, count: None),
    device(lambda base, fresh, first_row, head, count: None),
    device(lambda base, fresh, warp, position, begin, rows, group, count: None),
    device(lambda base, fresh, first_row, position, head, kv_heads, begin, end, split, pools: None),
    device(lambda base, at, block, position, count, which: None),
)
