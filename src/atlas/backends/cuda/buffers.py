"""A step's activations in device memory: types, rows, bytes; and arrays read back to the host."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.backend import Shapes
from atlas.backends.cuda.array import ITEM_BYTES, DeviceArray
from atlas.backends.cuda.candidates import candidates_bytes
from atlas.backends.cuda.fetch import pieces_bytes
from atlas.backends.cuda.inputs import InputLayout, input_names, is_translation
from atlas.backends.cuda.memory import Arena, aligned
from atlas.backends.cuda.sampling import table_bytes
from atlas.errors import InvalidArgumentError

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice

_FLOAT32 = ("router", "expert_weights", "convolved", "recurred", "logits")
_ROW_ALIGNMENT = 16  # bytes: rows are read and written by vectors of this size


def element_type(name: str) -> str:
    """The type of a buffer of ``StepBuffers`` or ``TranslationBuffers``."""
    if name == "expert_ids":
        return "int32"
    return "float32" if name in _FLOAT32 else "bfloat16"


def take_rows(arena: Arena, name: str, shape: tuple[int, ...]) -> DeviceArray:
    """A buffer, zeroed, whose rows begin at multiples of 16 bytes."""
    dtype = element_type(name)
    whole = arena.take(padded_shape(name, shape), dtype, zero=True)
    return whole if whole.shape == shape else whole[:, : shape[1]]


def padded_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A buffer's shape in memory: choices of experts lie without gaps, other rows are padded."""
    if len(shape) != 2 or name.startswith("expert_"):
        return shape
    per_vector = _ROW_ALIGNMENT // ITEM_BYTES[element_type(name)]
    return shape[0], -(-shape[1] // per_vector) * per_vector


def buffer_bytes(shapes: Shapes) -> int:
    """Bytes of the arena that ``CudaRuntime.buffers`` takes."""
    layout = InputLayout(shapes)
    total = aligned(layout.nbytes) + pieces_bytes(layout) + aligned(4 * shapes["logits"][0])
    total += table_bytes(shapes["block_tables"][0])
    if is_translation(shapes):
        total += candidates_bytes(shapes)
    inputs = input_names(shapes)
    for name, shape in shapes.items():
        if name in inputs:
            continue
        total += aligned(ITEM_BYTES[element_type(name)] * prod(padded_shape(name, shape)))
    return total


def read_array(device: CudaDevice, array: DeviceArray) -> NDArray[Any]:
    """A copy of a device array with contiguous rows, in host memory; bfloat16 as float32."""
    kind: Any = np.uint16 if array.dtype == "bfloat16" else np.dtype(array.dtype)
    if array.is_contiguous:
        out = np.empty(array.shape, kind)
        if out.nbytes:
            device.copy_out(out.ctypes.data, array.address, out.nbytes)
    else:
        out = np.empty(array.shape, kind)
        for i in range(len(array)):
            row = array[i]
            if not row.is_contiguous:
                raise InvalidArgumentError(f"{array!r} with strides {array.strides}: no plain rows")
            device.copy_out(out[i].ctypes.data, row.address, row.nbytes)
    device.synchronize()
    if array.dtype == "bfloat16":
        return (out.astype(np.uint32) << 16).view(np.float32)
    return out
