"""Every op × backend × case: outputs and final state against the NumPy definition."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from atlas.backends.cpu.device import CpuDevice, Queue
from atlas.backends.cpu.pack import pack
from atlas.backends.cpu.target import simd_level
from atlas.errors import CapabilityError, ShapeError
from atlas.ops import OPS
from atlas.ops.blocks import HostMatrix
from atlas.ops.select import bind, implementations
from tests.ops import cases

CASES = [
    pytest.param(name, case, id=f"{name}-{case.id}")
    for name in sorted(OPS)
    if hasattr(cases, name)
    for case in getattr(cases, name)()
]


@cache
def _ops(threads: int) -> Any:
    return bind(implementations("cpu"), Queue(CpuDevice(threads)))


def _clone(value: Any, copies: dict[int, Any]) -> Any:
    """A copy with the same strides, one for each object however often it occurs."""
    if not isinstance(value, np.ndarray):
        return value
    if id(value) not in copies:
        root = value if value.base is None else value.base
        offset = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        copies[id(value)] = np.ndarray(value.shape, value.dtype, root.copy(), offset, value.strides)
    return copies[id(value)]


def _run(call: Any, case: cases.Case, packed: bool) -> dict[str, np.ndarray]:
    """The written arrays after a call on copies of the arguments."""
    copies: dict[int, Any] = {}
    args = tuple(_clone(value, copies) for value in case.args)
    kwargs = {key: _clone(value, copies) for key, value in case.kwargs.items()}
    written = {key: _clone(value, copies) for key, value in case.written.items()}
    if packed:
        args = tuple(pack([a], case.groups_of(a)) if isinstance(a, HostMatrix) else a for a in args)
    call(*args, **kwargs)
    return written


def test_every_op_has_cases() -> None:
    assert [name for name in OPS if not hasattr(cases, name)] == []


def _has_float16_pools(case: cases.Case) -> bool:
    arrays = (*case.args, *case.kwargs.values())
    return any(isinstance(item, np.ndarray) and item.dtype == np.float16 for item in arrays)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_cpu(name: str, case: cases.Case) -> None:
    if simd_level() == "plain" and _has_float16_pools(case):
        with pytest.raises(CapabilityError, match="float16 KV"):
            _run(getattr(_ops(1), name), case, packed=True)
        return
    expected = _run(OPS[name], case, packed=False)
    actual = _run(getattr(_ops(1), name), case, packed=True)
    for key, want in expected.items():
        got = actual[key]
        assert got.shape == want.shape
        if case.tolerance == 0.0 or want.dtype.kind == "i":
            np.testing.assert_array_equal(got, want, err_msg=key)
        else:
            bound = case.tolerance * np.abs(want).max()
            np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=key)
    # Results do not depend on the number of threads.
    for threads in (2, 3):
        again = _run(getattr(_ops(threads), name), case, packed=True)
        for key in expected:
            assert again[key].tobytes() == actual[key].tobytes(), f"{key} with {threads} threads"


@pytest.mark.parametrize(
    "case", [c for c in cases.linear() if c.id.endswith(("-T9", "-T28"))], ids=lambda case: case.id
)
def test_linear_rows_are_independent(case: cases.Case) -> None:
    """A row's bits are the same alone and among others."""
    x, weight, bias = case.args
    whole = _run(_ops(2).linear, case, packed=True)["out"]
    for row in range(len(x)):
        alone = np.empty((1, weight.rows), np.float32)
        _ops(2).linear(x[row : row + 1], pack([weight]), bias, out=alone)
        assert alone.tobytes() == whole[row].tobytes()


@pytest.mark.parametrize("threads", [1, 2, 20])
def test_prompt_rows_that_are_left_out(threads: int) -> None:
    """The others have the bits that they have beside these, also where threads share segments."""
    case = next(case for case in cases.attention_prefill() if case.id.startswith("K96"))
    whole = _run(_ops(threads).attention_prefill, case, packed=True)["out"]
    cu_rows = case.args[4]
    begins, lengths = cu_rows[:-1], np.diff(cu_rows)
    for left_out in (lengths, lengths - 1, lengths // 2, 0 * lengths):
        first_rows = (begins + left_out).astype(np.int32)
        kwargs = {**case.kwargs, "first_rows": first_rows}
        wanted = np.concatenate(
            [np.arange(*ends) for ends in zip(first_rows, cu_rows[1:], strict=True)]
        ).astype(int)
        for call in (OPS["attention_prefill"], _ops(threads).attention_prefill):
            got = _run(call, replace(case, kwargs=kwargs), packed=True)["out"][wanted]
            if call is OPS["attention_prefill"]:
                bound = case.tolerance * np.abs(whole).max()
                np.testing.assert_allclose(got, whole[wanted], rtol=0, atol=bound)
            else:
                assert got.tobytes() == whole[wanted].tobytes()
    wrong = replace(case, kwargs={**case.kwargs, "first_rows": cu_rows})
    with pytest.raises(ShapeError, match="N is 8"):
        _run(_ops(threads).attention_prefill, wrong, packed=True)
