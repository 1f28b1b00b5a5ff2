"""The CUDA ops against the NumPy definitions: small cases on the PTX machine, all on a GPU."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

from atlas.backends.cuda import NOT_OFFERED
from atlas.errors import CapabilityError, ShapeError
from atlas.ops import OPS
from atlas.ops.blocks import FORMATS, HostMatrix, dequantize
from tests.kernels.launches import Bench, rounded
from tests.kernels.op_launches import _FLOAT32, BenchQueue, run_op
from tests.ops import cases

BF16 = 2.0**-8
"""Half a unit of bf16: what a result may be off by, beside the case's own tolerance."""

ROUNDED_INSIDE = {
    "encoder_attention": 4e-3,
    "cross_attention": 4e-3,
    "attention_prefill": 4e-3,
    "attention_step": 4e-3,
    "attention_step_gated": 8e-3,
    "prepare_heads": 4e-3,
    "linear_add": 4e-3,
    "linear_gated": 1e-2,
    "rmsnorm_linear": 1e-2,
    "rmsnorm_linear_gated": 2e-2,
    "moe_experts": 2e-2,
    "moe_router": 1e-2,
    "moe_block": 2e-2,
    "gated_delta_prefill": 2e-2,
    "mamba2_prefill": 2e-2,
}
REFUSED = (
    "K20", "K7", "83", "gelu", "relu_squared", "sections", "softmax-E16", "G3of8", "G1of3",
    "K64-V128", "K128-V64", "K16-V80", "H4-G2", "H3-G1-P20", "H6-G6", "T3-H3-strided",
    "D107", "D224",
)  # fmt: skip
"""Parts of the names of cases that no kernel takes."""
"""Ops that round to bf16 on the way: weights of attention, gate and up; of the greatest result."""


def _on_machine(op: str, case: cases.Case) -> bool:
    """Small enough for the PTX machine."""
    heavy = {
        "attention_prefill", "attention_step", "attention_step_gated", "encoder_attention",
        "cross_attention",
    }  # fmt: skip
    sizes = [a.rows * a.cols for a in case.args if isinstance(a, HostMatrix)]
    return (
        max(sizes, default=0) <= 49_152
        and "long" not in case.id
        and (op not in heavy or "K64" in case.id)
    )


def _is_quantised(case: cases.Case) -> bool:
    matrices = [value for value in case.args if isinstance(value, HostMatrix)]
    return all(FORMATS[matrix.format].is_quantized for matrix in matrices)


def _cases(op: str) -> list[Any]:
    marked = []
    for case in getattr(cases, op)():
        if _on_machine(op, case):
            marked.append(pytest.param("machine", op, case, id=f"machine-{op}-{case.id}"))
        marked.append(
            pytest.param("gpu", op, case, id=f"gpu-{op}-{case.id}", marks=pytest.mark.gpu)
        )
    return marked


CASES = [case for op in sorted(set(OPS) - NOT_OFFERED) for case in _cases(op)]


def _implementation(op: str) -> Any:
    file = OPS[op].__module__.rpartition(".")[2]
    return getattr(importlib.import_module(f"atlas.backends.cuda.{file}"), op)


def _defined(op: str, names: list[str], case: cases.Case) -> dict[str, np.ndarray]:
    """The definition's results for the values that the device gets: rounded to bf16."""
    copies: dict[int, Any] = {}

    def given(name: str, value: Any) -> Any:
        if isinstance(value, HostMatrix):
            weights = rounded(dequantize(value), "bf16")
            is_table = op == "embedding" and FORMATS[value.format].is_quantized
            weights = dequantize(value) if is_table else weights
            return HostMatrix("f32", value.rows, value.cols, weights)
        if not isinstance(value, np.ndarray) or value.dtype.kind == "i":
            return copies.setdefault(id(value), value.copy()) if hasattr(value, "copy") else value
        values = value.astype(np.float32)
        if name not in _FLOAT32.get(op, ()):
            values = rounded(values, "bf16")
        return copies.setdefault(id(value), values)

    args = [given(name, value) for name, value in zip(names, case.args, strict=False)]
    kwargs = {name: given(name, value) for name, value in case.kwargs.items()}
    OPS[op](*args, **kwargs)
    return {name: copies[id(value)] for name, value in case.written.items()}


@pytest.mark.parametrize(("bench", "op", "case"), CASES, indirect=["bench"])
def test_cuda(bench: Bench, op: str, case: cases.Case) -> None:
    _check(bench, bench.memory.arch if hasattr(bench.memory, "arch") else "sm_80", op, case)


HOPPER_CASES = [
    pytest.param("machine", op, case, id=f"{op}-{case.id}")
    for op in ("linear", "linear_add", "linear_gated")
    for case in getattr(cases, op)()
    if _on_machine(op, case) and _is_quantised(case) and not case.id.endswith(("T2", "T3", "T4"))
]


@pytest.mark.parametrize(("bench", "op", "case"), HOPPER_CASES, indirect=["bench"])
def test_quantised_products_on_sm_90a(bench: Bench, op: str, case: cases.Case) -> None:
    """The machine has TMA tiles and ``wgmma``, but no clusters, which bf16 products may take."""
    _check(bench, "sm_90a", op, case)


def _check(bench: Bench, arch: str, op: str, case: cases.Case) -> None:
    names = list(inspect.signature(OPS[op]).parameters)
    queue = BenchQueue(bench, arch)
    try:
        got = run_op(queue, op, _implementation(op), names, case)
    except (CapabilityError, ShapeError) as error:
        refused = str(error)
    else:
        refused = ""
    if refused:  # heads or rows that no kernel takes: by name, and nothing was launched
        assert not queue.launched
        assert "allow" in refused
        assert any(part in case.id or part in refused for part in REFUSED), refused
        return
    want = _defined(op, names, case)
    for key, values in want.items():
        is_exact = case.tolerance == 0.0 and key in _FLOAT32.get(op, ())
        if values.dtype.kind == "i" or is_exact:
            np.testing.assert_array_equal(got[key], values, err_msg=key)
            continue
        slack = 0 if key in _FLOAT32.get(op, ()) else BF16
        scale = ROUNDED_INSIDE.get(op, case.tolerance)
        bound = scale * np.nanmax(np.abs(values)) + slack * np.abs(values)
        near = np.abs(got[key] - values) <= bound + 1e-30
        near |= np.isnan(got[key]) & np.isnan(values)  # what the op leaves alone
        assert near.all(), (
            key, np.abs(got[key] - values).max(), queue.launched,
        )  # fmt: skip
