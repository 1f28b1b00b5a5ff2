"""What CPython's compiler did to a kernel's source that a kernel cannot bear.

Numba compiles bytecode. CPython copies a few last instructions of a function into each branch that
leads there (up to four, from 3.12 on): of ``sync_threads()`` behind ``if`` and ``else`` one barrier
becomes two, one in each branch, and threads that part there wait at different ones forever.
"""

from __future__ import annotations

import dis
import inspect
import linecache
from collections.abc import Callable, Iterator
from typing import Any

_MARK = "takes_threads_together"


def mark_collective(called: Any) -> Any:
    """``called``, known as something in which threads take part together."""
    setattr(called, _MARK, True)
    return called


def is_collective(function: Callable[..., Any]) -> bool:
    """Whether a function names anything that was marked."""
    return any(getattr(value, _MARK, False) for value in _named(function).values())


def copied_calls(function: Callable[..., Any]) -> Iterator[tuple[int, str]]:
    """Line and text of each call that stands in the bytecode once more.

    One in the condition of a ``while`` does, too: it is tested before the loop and at its end.
    """
    seen = set()
    for instruction in dis.get_instructions(function):
        place = instruction.positions
        if instruction.opname.startswith("CALL") and place is not None and place.lineno:
            if place in seen:
                line = linecache.getline(function.__code__.co_filename, place.lineno)
                # Columns count bytes.
                yield place.lineno, line.encode()[place.col_offset :].decode(errors="replace")
            seen.add(place)


def refuse_copied_calls(function: Callable[..., Any]) -> None:
    """Raise for a function of which a collective call was copied, before it can hang a GPU.

    Raises
    ------
    SyntaxError
        Names the file and the line, and what helps.
    """
    named = _named(function)
    for line, text in copied_calls(function):
        name = text.partition("(")[0].strip()
        if name not in named or getattr(named[name], _MARK, False):
            raise SyntaxError(
                f"{function.__code__.co_filename}:{line}: this Python's compiler made two calls of "
                f"{name} in {function.__name__}; threads that take part together would wait at "
                "either. Let more than this call follow a branch at the end of a function, and "
                "keep it out of the condition of a 'while'."
            )


def _named(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function's names mean: globals, and variables of the functions around it."""
    found = inspect.getclosurevars(function)
    return {**found.builtins, **found.globals, **found.nonlocals}
