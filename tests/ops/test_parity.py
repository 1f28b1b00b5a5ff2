"""Every op × backend × case: outputs and final state against the NumPy definition."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from atlas.backends.cpu.device import CpuDevice, Queue
from atlas.backends.cpu.pack import pack
from atlas.backends.cpu.target import simd_level
from atlas.errors import CapabilityError
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
