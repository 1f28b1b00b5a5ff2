"""cuBLASLt through nvmath's bindings: descriptors, algorithms, and the arguments of a call.

Rows here, columns there: out [m, n] = x [m, k] · Wᵀ is, column by column, outᵀ = W · xᵀ, so W is A,
transposed, and x is B.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import CapabilityError

WORKSPACE_BYTES = 32 << 20
"""What an algorithm may use."""
_BFLOAT16, _FLOAT32 = 14, 0  # cudaDataType_t
_COMPUTE_FLOAT32 = 68  # cublasComputeType_t
_TRANSPOSED = 1  # cublasOperation_t
_ALIGNMENT = 16  # bytes that every address is a multiple of
_WANTED = 8  # algorithms asked for
Algorithm = NDArray[Any]
"""An opaque ``cublasLtMatmulAlgo_t``."""


@dataclass(frozen=True, slots=True)
class Product:
    """out [m, n] = x [m, k] · Wᵀ: sizes, and elements from a row to the next.

    ``out_type`` is bfloat16 or float32.
    """

    m: int
    n: int
    k: int
    w_stride: int
    x_stride: int
    out_stride: int
    out_type: str


class CublasLt:
    """A handle, and the descriptors of the products that were asked for; they live as long.

    Raises
    ------
    CapabilityError
        The bindings or the library are missing, or it does not start.
    """

    def __init__(self) -> None:
        try:
            self._lt: Any = importlib.import_module("nvmath.bindings.cublasLt")
            pathfinder = importlib.import_module("cuda.pathfinder")
            library = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
            entry = ctypes.cast(library.cublasLtMatmul, ctypes.c_void_p).value
        except (ImportError, OSError, RuntimeError) as error:
            raise CapabilityError(f"cuBLASLt is not usable: {error}") from error
        try:
            self._handle = int(self._lt.create())
        except self._lt.cuBLASLtError as error:
            raise CapabilityError(f"cuBLASLt does not start: {error}") from error
        assert entry is not None
        self.function: int = entry
        self._scalars = np.array([0.0, 1.0], np.float32)  # of alpha and beta
        self._operation = int(self._lt.matmul_desc_create(_COMPUTE_FLOAT32, _FLOAT32))
        self._set("matmul_desc", self._operation, "MatmulDescAttribute", "TRANSA", _TRANSPOSED)
        self._preference = int(self._lt.matmul_preference_create())
        self._prefer("MAX_WORKSPACE_BYTES", WORKSPACE_BYTES, np.uint64)
        self._prefer("REDUCTION_SCHEME_MASK", 0, np.uint32)  # K is not split
        for operand in "ABCD":
            self._prefer(f"MIN_ALIGNMENT_{operand}_BYTES", _ALIGNMENT, np.uint32)
        self._layouts: dict[tuple[int, int, int, int], int] = {}

    def algorithms(self, product: Product) -> list[Algorithm]:
        """Algorithms for a product, the one that cuBLASLt expects to be fastest first."""
        results = np.zeros(_WANTED, self._lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        layouts = self._layouts_of(product)
        try:
            self._lt.matmul_algo_get_heuristic(
                self._handle, self._operation, *layouts, self._preference, _WANTED,
                results.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        except self._lt.cuBLASLtError:
            return []  # none for these sizes
        found = [results["algo"][i : i + 1].copy() for i in range(int(count[0]))]
        return [algorithm for algorithm in found if self.takes(product, algorithm)]

    def takes(self, product: Product, algorithm: Algorithm) -> bool:
        """Whether an algorithm computes a product within the workspace."""
        result = np.zeros(1, self._lt.matmul_heuristic_result_dtype)
        layouts = self._layouts_of(product)
        try:
            self._lt.matmul_algo_check(
                self._handle, self._operation, *layouts, algorithm.ctypes.data, result.ctypes.data
            )
        except self._lt.cuBLASLtError:
            return False
        return bool(result["state"][0] == 0 and result["workspace_size"][0] <= WORKSPACE_BYTES)

    def arguments(
        self,
        product: Product,
        algorithm: Algorithm,
        w: int,
        x: int,
        out: int,
        workspace: int,
        *,
        adds: bool = False,
    ) -> tuple[int, ...]:
        """The arguments of ``cublasLtMatmul`` but the stream, given addresses.

        ``adds``: to what ``out`` holds. Scalars are read at every call, and live as long as this.
        """
        a, b, c, d = self._layouts_of(product)
        zero = self._scalars.ctypes.data
        one = zero + self._scalars.itemsize
        return (
            self._handle, self._operation, one, w, a, x, b,
            one if adds else zero, out, c, out, d,
            algorithm.ctypes.data, workspace, WORKSPACE_BYTES,
        )  # fmt: skip

    def describe(self, algorithm: Algorithm) -> dict[str, int]:
        """What an algorithm is made of, for the record."""
        names = self._lt.MatmulAlgoConfigAttribute
        found = {}
        for name in ("ID", "TILE_ID", "STAGES_ID", "SPLITK_NUM", "CLUSTER_SHAPE_ID"):
            value, written = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
            size = np.dtype(
                self._lt.get_matmul_algo_config_attribute_dtype(int(names[name]))
            ).itemsize
            self._lt.matmul_algo_config_get_attribute(
                algorithm.ctypes.data, int(names[name]), value.ctypes.data, size,
                written.ctypes.data,
            )  # fmt: skip
            found[name.lower()] = int(value[0])
        return found

    def close(self) -> None:
        """Free the descriptors and the handle; idempotent. Recorded calls are invalid after it."""
        if not self._handle:
            return
        while self._layouts:
            self._lt.matrix_layout_destroy(self._layouts.popitem()[1])
        self._lt.matmul_preference_destroy(self._preference)
        self._lt.matmul_desc_destroy(self._operation)
        self._lt.destroy(self._handle)
        self._handle = 0

    def _layouts_of(self, product: Product) -> tuple[int, int, int, int]:
        out = _BFLOAT16 if product.out_type == "bfloat16" else _FLOAT32
        d = self._layout(out, product.n, product.m, product.out_stride)
        return (
            self._layout(_BFLOAT16, product.k, product.n, product.w_stride),
            self._layout(_BFLOAT16, product.k, product.m, product.x_stride),
            d,
            d,
        )

    def _layout(self, type: int, rows: int, columns: int, stride: int) -> int:
        key = (type, rows, columns, stride)
        if key not in self._layouts:
            self._layouts[key] = int(self._lt.matrix_layout_create(*key))
        return self._layouts[key]

    def _prefer(self, name: str, number: int, dtype: Any) -> None:
        self._set(
            "matmul_preference", self._preference, "MatmulPreferenceAttribute", name, number, dtype
        )

    def _set(
        self, of: str, target: int, names: str, name: str, number: int, dtype: Any = np.int32
    ) -> None:
        value = np.array([number], dtype)
        attribute = int(getattr(self._lt, names)[name])
        setter = getattr(self._lt, f"{of}_set_attribute")
        setter(target, attribute, value.ctypes.data, value.nbytes)
