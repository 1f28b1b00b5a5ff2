"""What CPython's compiler did to a kernel's source that a kernel cannot bear.

Numba compiles bytecode. CPython copies a few last instructions of a function into each branch that
leads there (up to four, from 3.12 on): of ``sync_threads()`` behind ``if`` and ``else`` one barrier
becomes two, one in each branch, and threads that part there wait at different ones forever.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any


def copied_calls(function: Callable[..., Any]) -> list[int]:
    """Lines of calls that stand in the bytecode more than once.

    Those in the condition of a ``while`` do, too: it is tested before the loop and at its end.
    """
    seen, copied = set(), []
    for instruction in dis.get_instructions(function):
        if not instruction.opname.startswith("CALL") or instruction.opname == "CALL_INTRINSIC_1":
            continue
        place = instruction.positions
        assert place is not None
        if place in seen and place.lineno is not None:
            copied.append(place.lineno)
        seen.add(place)
    return copied


def refuse_copied_calls(function: Callable[..., Any]) -> None:
    """Raise for a function some of whose calls were copied, before it can hang a GPU.

    Raises
    ------
    SyntaxError
        Names the file and the line, and what helps.
    """
    for line in copied_calls(function):
        raise SyntaxError(
            f"{function.__code__.co_filename}:{line}: this Python's compiler made two calls of the "
            f"one in {function.__name__}; threads that take part together would wait at either. "
            "Let more than this one call stand behind a branch, at the end of a function, and none "
            "in the condition of a 'while'."
        )
