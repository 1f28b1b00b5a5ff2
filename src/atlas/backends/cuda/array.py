"""Views of device memory with NumPy's manners: slices, reshapes, strides in bytes."""

from __future__ import annotations

import math
from typing import Any

from atlas.backends.cuda import dlpack
from atlas.errors import ShapeError

ITEM_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8, "uint8": 1,
}  # fmt: skip
_TYPE_STRINGS = {
    "float16": "<f2", "float32": "<f4", "int32": "<i4", "int64": "<i8", "uint8": "|u1",
}  # fmt: skip


class DeviceArray:
    """An array in device memory; a view never copies.

    Parameters
    ----------
    address : int
        Of the first element.
    shape : tuple of int
    dtype : str
        A key of ``ITEM_BYTES``: bfloat16 has no NumPy type, so types go by name.
    strides : tuple of int, optional
        Bytes between neighbours along each axis; default: contiguous.
    owner : object
        What keeps the memory.
    """

    __slots__ = ("address", "dtype", "owner", "shape", "strides")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        strides: tuple[int, ...] | None = None,
        owner: object = None,
    ) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.strides = contiguous_strides(shape, ITEM_BYTES[dtype]) if strides is None else strides
        self.owner = owner

    # -- shape --------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie in C order without gaps."""
        return _same_strides(self.shape, self.strides, self.itemsize)

    @property
    def rows_contiguous(self) -> bool:
        """Whether all axes but the first are in C order without gaps: rows may be strided."""
        return _same_strides(self.shape[1:], self.strides[1:], self.itemsize)

    def __len__(self) -> int:
        return self.shape[0]

    # -- views --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> DeviceArray:
        """Integers (from the front only), slices with step 1, None and Ellipsis."""
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            named = sum(item is not None and item is not Ellipsis for item in keys)
            keys[at : at + 1] = [slice(None)] * (self.ndim - named)
        address, shape, strides = self.address, [], []
        axis = 0
        for item in keys:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            if axis == self.ndim:
                raise IndexError(f"{key} has too many indices for shape {self.shape}")
            size, stride = self.shape[axis], self.strides[axis]
            if isinstance(item, slice):
                start, stop, step = item.indices(size)
                if step != 1:
                    raise IndexError(f"step {step} in {key}; allowed: 1")
                address += start * stride
                shape.append(max(0, stop - start))
                strides.append(stride)
            else:
                index = int(item)
                if not 0 <= index < size:
                    raise IndexError(f"index {index} for {size} elements; allowed: 0 … {size - 1}")
                address += index * stride
            axis += 1
        return DeviceArray(
            address,
            (*shape, *self.shape[axis:]),
            self.dtype,
            (*strides, *self.strides[axis:]),
            self.owner,
        )

    def reshape(self, *shape: int, copy: bool = False) -> DeviceArray:
        """The same elements in another shape; ShapeError where that would take a copy."""
        if copy:
            raise ShapeError("a device array is reshaped without a copy; pass copy=False")
        if math.prod(shape) != self.size:
            raise ShapeError(f"{self.shape} does not reshape to {shape}")
        strides = _reshaped_strides(self, shape)
        return DeviceArray(self.address, tuple(shape), self.dtype, strides, self.owner)

    def view(self, dtype: str) -> DeviceArray:
        """The same bytes as elements of another type of the same size."""
        if ITEM_BYTES[dtype] != self.itemsize:
            raise ShapeError(f"{self.dtype} viewed as {dtype}: the sizes differ")
        return DeviceArray(self.address, self.shape, dtype, self.strides, self.owner)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {list(self.shape)} at {self.address:#x})"

    # -- other libraries ----------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of Numba's interface; bfloat16, which it cannot express, goes by DLPack."""
        if self.dtype not in _TYPE_STRINGS:
            raise AttributeError(f"__cuda_array_interface__ has no {self.dtype}; use DLPack")
        return {
            "shape": self.shape,
            "typestr": _TYPE_STRINGS[self.dtype],
            "data": (self.address, False),
            "strides": None if self.is_contiguous else self.strides,
            "version": 3,
        }

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule over the same memory, which the consumer must not outlive.

        Nothing is ordered between the consumer's ``stream`` and the model's: synchronise first.
        """
        if copy:
            raise BufferError("a device array is exported without a copy")
        if dl_device is not None and dl_device != self.__dlpack_device__():
            raise BufferError(f"this array is on device {self.__dlpack_device__()}")
        return dlpack.capsule(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, ordinal): CUDA memory."""
        return dlpack.CUDA, getattr(self.owner, "ordinal", 0)


def contiguous_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Bytes between neighbours along each axis in C order."""
    strides = [item_bytes] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _same_strides(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    """Whether axes of more than one element have C order's strides."""
    expected = contiguous_strides(shape, item_bytes)
    return 0 in shape or all(
        size == 1 or stride == want
        for size, stride, want in zip(shape, strides, expected, strict=True)
    )


def _reshaped_strides(array: DeviceArray, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the new shape: runs of old axes without gaps are split and joined."""
    if not array.size:
        return contiguous_strides(shape, array.itemsize)
    # Joined: (elements, stride of the last element) of each run of axes that lies without gaps.
    runs: list[list[int]] = []
    for size, stride in zip(array.shape, array.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    runs = runs or [[1, array.itemsize]]
    strides: list[int] = []
    left, stride = runs[-1]
    for size in reversed(shape):
        if left == 1 and size > 1:
            runs.pop()
            left, stride = runs[-1]
        if left % size:
            raise ShapeError(
                f"{list(array.shape)} with strides {array.strides} does not reshape to "
                f"{list(shape)} without a copy"
            )
        strides.append(stride)
        left //= size
        stride *= size
    return tuple(reversed(strides))
