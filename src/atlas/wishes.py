"""What requests want of a step beside the logits of their rows and a greedy choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from atlas._native.plan import EntryFlag, Plan
from atlas.live_request import LiveRequest
from atlas.sampling_table import Draw

_SAMPLES = int(EntryFlag.SAMPLES)  # an enum would be slow
_COLUMNS = (
    *("handle", "kind", "flags", "start", "rows"),
    *("first_row", "first_logits", "num_logits", "source"),
)


class Wishes(NamedTuple):
    """What a step must give.

    Attributes
    ----------
    tokens : bool
        The device's choice of a token for some row.
    host_rows : list of int
        Logits rows that the host will read: to sample, or to score prompt tokens.
    draws : list of Draw
        Tokens that the device chooses with a request's parameters.
    """

    tokens: bool
    host_rows: list[int]
    draws: list[Draw]


def wishes_of(
    plan: Plan, attended: Set[int], by_handle: Mapping[int, tuple[LiveRequest, int]]
) -> Wishes:
    """The wishes of a plan's requests; those that are not ``attended`` want a greedy choice.

    Where several samples begin with one row, each draws from it, and the host does that.
    """
    host_rows: list[int] = []
    draws: list[Draw] = []
    num_chosen_here = 0
    for entry in _entries(plan, attended):
        handle, kind, flags, start, rows, first_row, first, count, source = entry
        request, index = by_handle[handle]
        due = request.due(index, kind)
        one, last = request.generations[0], first + count - 1
        num_chosen_here += one.needs_logits
        if request.params.prompt_logprobs is not None:
            host_rows += range(first, first + count)
        elif count and (one.needs_logits or (one.draws_on_device and len(due) > 1)):
            host_rows.append(last)
        if flags & _SAMPLES and len(due) == 1 and due[0].draws_on_device:
            draws.append(due[0].draw(last, start + rows, first_row if source >= 0 else -1))
    return Wishes(num_chosen_here < plan.num_seqs, host_rows, draws)


def _entries(plan: Plan, attended: Set[int]) -> Iterable[tuple[int, ...]]:
    """The attended entries, the ``_COLUMNS`` of each."""
    if not attended:
        return ()
    handles = plan.entries["handle"].tolist()
    entries = plan.entries[[i for i, handle in enumerate(handles) if handle in attended]]
    return zip(*(entries[name].tolist() for name in _COLUMNS), strict=True)
