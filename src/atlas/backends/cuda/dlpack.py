"""Device arrays as DLPack capsules: how torch, cupy and JAX take them without a copy.

Source: dlpack.h, version 0.8 (``DLManagedTensor``), which every consumer reads.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas.backends.cuda.array import DeviceArray

CUDA = 2
"""kDLCUDA."""
_TYPES = {
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float16": (2, 16),
    "float32": (2, 32),
    "bfloat16": (4, 16),
}  # (code, bits)
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]
_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_HELD: dict[int, tuple[Any, ...]] = {}  # what exported tensors point to, by their address


def _delete(managed: Any) -> None:
    _HELD.pop(ctypes.addressof(managed.contents), None)


def _drop(capsule: int) -> None:
    """A capsule that nobody took: its tensor goes with it. A taken one has another name."""
    api = ctypes.pythonapi
    if api.PyCapsule_IsValid(ctypes.c_void_p(capsule), _NAME):
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        _HELD.pop(api.PyCapsule_GetPointer(ctypes.c_void_p(capsule), _NAME), None)


_delete_function, _drop_function = _DELETER(_delete), _DESTRUCTOR(_drop)  # kept for ever


def capsule(array: DeviceArray) -> object:
    """A ``dltensor`` capsule; it keeps the array's owner until the consumer is done."""
    code, bits = _TYPES[array.dtype]
    ndim = array.ndim
    shape = (ctypes.c_int64 * ndim)(*array.shape)
    strides = (ctypes.c_int64 * ndim)(*(stride // array.itemsize for stride in array.strides))
    device = _Device(*array.__dlpack_device__())
    tensor = _Tensor(array.address, device, ndim, _Type(code, bits, 1), shape, strides, 0)
    managed = _Managed(tensor, None, _delete_function)
    address = ctypes.addressof(managed)
    _HELD[address] = managed, shape, strides, array
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR)
    return new(address, _NAME, _drop_function)
