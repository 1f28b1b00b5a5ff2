"""What ops ask of arrays in device memory before they launch: dimensions, types, contiguity."""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import Argument
from atlas.errors import CapabilityError, ShapeError
from atlas.ops.check import match_dims

Args = tuple[Argument, ...]
"""Arguments of a launch."""
SHORT = {"bfloat16": "bf16", "float32": "f32"}
"""Names of activation types in the kernels' variants."""


def match(dtype: str, *pairs: object) -> dict[str, int]:
    """``match_dims`` of device arrays that all have one type."""
    for spec, array in zip(pairs[::2], pairs[1::2], strict=True):
        if array.dtype != dtype:  # type: ignore[attr-defined]
            raise ShapeError(f"[{spec}] has dtype {array.dtype}, allowed: {dtype}")  # type: ignore
    return match_dims(*pairs)


def activation_type(*arrays: DeviceArray) -> str:
    """``bf16`` or ``f32``: the one type of some activations."""
    first = arrays[0].dtype
    if first not in SHORT:
        raise ShapeError(f"activations are {first}; allowed: {', '.join(SHORT)}")
    for array in arrays[1:]:
        if array.dtype != first:
            raise ShapeError(f"activations are {first} and {array.dtype}; allowed: one type")
    return SHORT[first]


def require_contiguous_rows(**arrays: DeviceArray) -> None:
    """Everything within a row lies without gaps; the rows may be strided."""
    for name, array in arrays.items():
        if not array.rows_contiguous:
            raise ShapeError(f"rows of {name} must be contiguous; strides are {array.strides}")


def is_aligned(num_bytes: int, *arrays: DeviceArray) -> bool:
    """Whether addresses and strides, but the innermost, are multiples of ``num_bytes``."""
    return not any(
        number % num_bytes for array in arrays for number in (array.address, *array.strides[:-1])
    )


def row_suffix(columns: int, width: int, *arrays: DeviceArray) -> str:
    """ "" where a kernel may take ``width`` elements at once, ``_scalar`` where it may not."""
    whole = columns % width == 0
    fits = all(is_aligned(min(16, width * array.itemsize), array) for array in arrays)
    return "" if whole and fits else "_scalar"


def require(condition: bool, what: str, value: object, allowed: str) -> None:
    """A CapabilityError that names the value and what the kernels allow."""
    if not condition:
        raise CapabilityError(f"{what} is {value}; the CUDA kernels allow {allowed}")
