"""A kernel's calls stand in its bytecode once: ``atlas_kernels.bytecode``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import atlas_kernels
import pytest
from atlas_kernels.bytecode import (
    copied_calls,
    is_collective,
    mark_collective,
    refuse_copied_calls,
)

SOURCES = sorted(Path(atlas_kernels.__path__[0]).glob("*.py"))


@mark_collective
def barrier() -> None:
    """In place of one."""


def choose(value: Any) -> Any:
    return value


def ends_in_a_barrier(a: int) -> None:
    if a == 0:
        choose(a)
    else:
        choose(-a)
    barrier()


def waits_in_a_while(a: int) -> int:
    while barrier() is None:
        a += 1
    return a


def asks_in_a_while(a: int) -> int:
    while choose(a) < 5:
        a += 1
    return a


def does_more_behind_the_branch(a: int) -> Any:
    if a == 0:
        choose(a)
    else:
        choose(-a)
    barrier()
    return choose(a)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython copies no call from 3.11 back")
def test_a_barrier_behind_a_branch_is_refused() -> None:
    with pytest.raises(SyntaxError, match=r"ends_in_a_barrier; threads that take part"):
        refuse_copied_calls(ends_in_a_barrier)


def test_a_call_in_the_condition_of_a_while_is_refused() -> None:
    with pytest.raises(SyntaxError, match=rf"{__file__}:\d+: .* waits_in_a_while"):
        refuse_copied_calls(waits_in_a_while)


def test_others_are_not() -> None:
    assert list(copied_calls(does_more_behind_the_branch)) == []
    refuse_copied_calls(does_more_behind_the_branch)
    assert [text.split("(")[0] for _, text in copied_calls(asks_in_a_while)] == ["choose"]
    refuse_copied_calls(asks_in_a_while)  # no harm: nobody waits there


def test_what_takes_threads_together_is_known() -> None:
    assert is_collective(ends_in_a_barrier)
    assert not is_collective(asks_in_a_while)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_source_has_what_a_python_could_copy(source: Path) -> None:
    """Whichever Python runs this: ``else``, behind which a call of no argument ends a function."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            before, last = node.body[-2:]
            if isinstance(before, ast.If) and before.orelse and isinstance(last, ast.Expr):
                is_bare = isinstance(last.value, ast.Call) and not last.value.args
                assert not is_bare, f"{node.name}, line {last.lineno}"
