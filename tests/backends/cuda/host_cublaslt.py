"""cuBLASLt on the host's memory: algorithms that sum in one order or another.

``bindings`` stands for nvmath's module, so that ``CublasLt`` itself runs; ``HostQueue`` has the
kernels of ours that follow a product.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atlas.backends.cuda import cublaslt
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import Queue
from tests.backends.cuda.host_gpu import on_host
from tests.kernels.launches import decode, encode, rounded
from tests.native.test_cuda_launch import MATMUL

Array = np.ndarray[Any, Any]
ASCENDING, DESCENDING, ONWARD = 1, 2, 3
"""Algorithms: the step GEMM's order in a chain; the reverse; one that starts with what C holds."""
_RESULT = np.dtype([("algo", "<i8"), ("workspace_size", "<u8"), ("state", "<i4")])
_STEP_K = 16
_TYPES = {0: "float32", 14: "bfloat16"}


def chain(x: Array, w: Array, start: Array | float = 0.0, *, descending: bool = False) -> Array:
    """x · wᵀ, 16 of K at a time in a float32 accumulator."""
    total = np.full((len(x), len(w)), start, np.float32)
    steps = range(0, x.shape[1], _STEP_K)
    for at in reversed(steps) if descending else steps:
        part = slice(at, at + _STEP_K)
        total = (total + x[:, part].astype(np.float64) @ w[:, part].T).astype(np.float32)
    return total


class HostCublasLt:
    """The library and its bindings.

    Attributes
    ----------
    offered : list of int
        The algorithms that it suggests, in order.
    asked : set of (int, int, int)
        (n, k, elements from a row to the next) of the W that it was asked about.
    calls : list of dict
        What each call was given: ``algorithm``, ``k``, ``beta``; addresses ``w``, ``x``, ``out``.
    """

    def __init__(self, *offered: int) -> None:
        self.offered = list(offered)
        self.asked: set[tuple[int, int, int]] = set()
        self.calls: list[dict[str, Any]] = []
        self.function = MATMUL(self._matmul)
        self._layouts: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> cublaslt.CublasLt:
        """A handle of it."""

        def nothing(*args: int) -> int:
            return 1

        names = dict.fromkeys(("TRANSA", "MAX_WORKSPACE_BYTES", "REDUCTION_SCHEME_MASK"), 0)
        names |= {f"MIN_ALIGNMENT_{operand}_BYTES": 0 for operand in "ABCD"}
        bindings = SimpleNamespace(
            cuBLASLtError=RuntimeError,
            MatmulDescAttribute=names,
            MatmulPreferenceAttribute=names,
            create=nothing,
            matmul_desc_create=nothing,
            matmul_desc_set_attribute=nothing,
            matmul_preference_create=nothing,
            matmul_preference_set_attribute=nothing,
            matmul_heuristic_result_dtype=_RESULT,
            matmul_algo_get_heuristic=self._suggest,
            matmul_algo_check=nothing,
            matrix_layout_create=self._layout,
            load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=name),
        )
        library = SimpleNamespace(cublasLtMatmul=self.function)
        with monkeypatch.context() as patched:
            patched.setattr(cublaslt.importlib, "import_module", lambda name: bindings)
            patched.setattr(cublaslt.ctypes, "CDLL", lambda path: library)
            return cublaslt.CublasLt()

    def _suggest(self, *args: int) -> None:
        wanted, results, count = args[-3:]
        _, k, n, stride = self._layouts[args[2]]
        self.asked.add((n, k, stride))
        found = np.zeros(wanted, _RESULT)
        found["algo"][: len(self.offered)] = self.offered
        ctypes.memmove(results, found.ctypes.data, found.nbytes)
        ctypes.c_int32.from_address(count).value = len(self.offered)

    def _layout(self, *layout: int) -> int:
        self._layouts.append(layout)
        return len(self._layouts) - 1

    def _operand(self, address: int, layout: int) -> tuple[DeviceArray, Array]:
        """A column-major matrix as rows, and its values."""
        type, columns, rows, stride = self._layouts[layout]
        array = DeviceArray(address, (rows, columns), _TYPES[type])
        array.strides = (stride * array.itemsize, array.itemsize)
        values = on_host(array)
        return array, values if type == 0 else decode(values, "bf16")

    def _matmul(self, *args: int) -> int:
        alpha, w_at, a, x_at, b, beta, c_at, c, out_at, d, algorithm = args[2:13]
        _, w = self._operand(w_at, a)
        _, x = self._operand(x_at, b)
        out, held = self._operand(out_at, d)
        assert (c_at, c) == (out_at, d), "what is added to lies in place"
        scalars = [ctypes.c_float.from_address(at).value for at in (alpha, beta)]
        chosen = ctypes.c_int64.from_address(algorithm).value
        call = {"algorithm": chosen, "w": w_at, "x": x_at, "out": out_at, "k": w.shape[1]}
        self.calls.append(call | {"beta": scalars[1]})
        assert scalars[0] == 1
        adds = scalars[1] == 1
        if chosen == ONWARD:
            total = chain(x, w, held if adds else 0.0)
        else:
            total = chain(x, w, descending=chosen == DESCENDING)
            total = total + held if adds else total  # C is not read where beta is 0
        on_host(out)[...] = encode(total, "f32" if out.dtype == "float32" else "bf16")
        return 0


class HostQueue(Queue):
    """An eager queue that has the kernels of products; ``launched`` are their names."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.launched: list[str] = []

    def launch(self, kernel: str, grid: Any, args: tuple[Any, ...], keep: object = None) -> None:
        self.launched.append(kernel)
        getattr(self, f"_{kernel}")(*args)

    def _gemm_finish(
        self, sums: DeviceArray, bias: Any, residual: Any, out: DeviceArray, n: int, *numbers: int
    ) -> None:
        assert numbers == (4 * n, out.strides[0], out.strides[0], int(out.dtype == "float32"))
        total = on_host(sums) + (0 if isinstance(bias, int) else on_host(bias))
        if not isinstance(residual, int):
            total = rounded(total, "bf16") + decode(on_host(residual), "bf16")
        on_host(out)[...] = encode(total, "f32" if numbers[-1] else "bf16")

    def _add_bf16(self, x: DeviceArray, y: DeviceArray, out: DeviceArray, *sizes: int) -> None:
        total = decode(on_host(x), "bf16") + decode(on_host(y), "bf16")
        on_host(out)[...] = encode(total, "bf16")

    _add_bf16_scalar = _add_bf16

    def _count_differences(self, a: DeviceArray, b: DeviceArray, count: int, words: int) -> None:
        ours, theirs = (on_host(DeviceArray(at.address, (words,), "int32")) for at in (a, b))
        ctypes.c_int32.from_address(count).value = int((ours != theirs).sum())
