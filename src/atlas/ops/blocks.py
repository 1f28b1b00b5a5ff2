"""Weight formats: how a matrix is laid out in a file, and what its bytes mean.

A quantised row is a run of blocks; a block holds `block_len` weights in `block_bytes` bytes.
The formulas are ggml's, in float32 and in ggml's order, so :func:`dequantize` gives the bits
that ggml gives. Everything is NumPy: this is the reference the kernels are compared with, and
the code that runs once at load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import InvalidArgumentError, ShapeError, UnsupportedModelError
from atlas.ops import blocks_32, blocks_k
from atlas.ops.blocks_32 import BlockCodes, Bytes, Floats

# Weights handled at a time: temporaries stay in the second-level cache.
_CHUNK_WEIGHTS = 1 << 17


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way to store weights.

    Parameters
    ----------
    name : str
        Lower case, as everywhere in Atlas: ``q4_k``.
    ggml_type : int
        The type number in a GGUF file.
    block_len : int
        Weights in a block; 1 for the float formats.
    block_bytes : int
        Bytes of a block.
    """

    name: str
    ggml_type: int
    block_len: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether weights are integers with a scale per block."""
        return self.block_len > 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of :attr:`HostMatrix.data` (bf16 as uint16, blocks as uint8)."""
        return np.dtype(_FLOAT_DTYPES.get(self.name, np.uint8))

    def row_elements(self, cols: int) -> int:
        """Elements of :attr:`dtype` in a row of `cols` weights."""
        return cols // self.block_len * self.block_bytes if self.is_quantized else cols


_FLOAT_DTYPES: dict[str, type[np.generic]] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
}

FORMATS: dict[str, BlockFormat] = {
    entry.name: entry
    for entry in (
        BlockFormat("f32", 0, 1, 4),
        BlockFormat("f16", 1, 1, 2),
        BlockFormat("bf16", 30, 1, 2),
        BlockFormat("q4_0", 2, 32, 18),
        BlockFormat("q4_1", 3, 32, 20),
        BlockFormat("q5_0", 6, 32, 22),
        BlockFormat("q5_1", 7, 32, 24),
        BlockFormat("q8_0", 8, 32, 34),
        BlockFormat("q2_k", 10, 256, 84),
        BlockFormat("q3_k", 11, 256, 110),
        BlockFormat("q4_k", 12, 256, 144),
        BlockFormat("q5_k", 13, 256, 176),
        BlockFormat("q6_k", 14, 256, 210),
        BlockFormat("iq4_nl", 20, 32, 18),
        BlockFormat("iq4_xs", 23, 256, 136),
    )
}
_FORMAT_OF_GGML = {entry.ggml_type: entry for entry in FORMATS.values()}

# The other type numbers that ggml has or had: known, so that a refusal can name them.
_UNSUPPORTED_GGML = {
    4: "q4_2", 5: "q4_3", 9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs",
    19: "iq1_s", 21: "iq3_s", 22: "iq2_s", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8", 34: "tq1_0", 35: "tq2_0",
    36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
}  # fmt: skip


def name_of_ggml(type_id: int) -> str:
    """The lower-case name of a ggml type number, supported or not; ``ggml type N`` if unknown."""
    known = _FORMAT_OF_GGML.get(type_id)
    return known.name if known else _UNSUPPORTED_GGML.get(type_id, f"ggml type {type_id}")


def format_of_ggml(type_id: int) -> BlockFormat:
    """The format with this ggml type number.

    Raises
    ------
    UnsupportedModelError
        No such format here; the message names the type and the supported list.
    """
    try:
        return _FORMAT_OF_GGML[type_id]
    except KeyError:
        raise _unsupported(name_of_ggml(type_id)) from None


def format_named(name: str) -> BlockFormat:
    """The format called `name`; an UnsupportedModelError with the supported list if none is."""
    try:
        return FORMATS[name]
    except KeyError:
        raise _unsupported(name) from None


def _unsupported(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"weight format {name} is not supported; supported: {', '.join(FORMATS)}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class HostMatrix:
    """A weight matrix in host memory, in the format of its file.

    Parameters
    ----------
    format : str
        A key of :data:`FORMATS`.
    rows, cols : int
        Rows are output features, columns input features: ``y = W x``.
    data : ndarray, C-contiguous
        float32, float16 or uint16 (bf16) ``[rows, cols]``, or for a quantised format uint8
        ``[rows, cols // block_len * block_bytes]``. May be a read-only view of a mapped file.

    Raises
    ------
    UnsupportedModelError
        Unknown format, or `cols` is not a multiple of its block length.
    ShapeError
        `data` has another shape, dtype or order.
    """

    format: str
    rows: int
    cols: int
    data: NDArray[Any]

    def __post_init__(self) -> None:
        layout = format_named(self.format)
        if self.cols % layout.block_len:
            raise UnsupportedModelError(
                f"{self.cols} columns of {self.format}; allowed: multiples of {layout.block_len}"
            )
        shape = (self.rows, layout.row_elements(self.cols))
        data = self.data
        if data.shape != shape or data.dtype != layout.dtype or not data.flags.c_contiguous:
            raise ShapeError(
                f"{self.format} matrix [{self.rows}, {self.cols}] with data {data.dtype} "
                f"{list(data.shape)}; needs C-contiguous {layout.dtype} {list(shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.data.nbytes

    def row_slice(self, start: int, stop: int) -> HostMatrix:
        """Rows `start` … `stop` - 1 as a view; ``0 <= start <= stop <= rows``."""
        if not 0 <= start <= stop <= self.rows:
            raise InvalidArgumentError(
                f"rows {start}:{stop} of a matrix with {self.rows} rows; "
                f"allowed: 0 <= start <= stop <= {self.rows}"
            )
        return HostMatrix(self.format, stop - start, self.cols, self.data[start:stop])

    def take_rows(self, index: NDArray[np.integer[Any]]) -> HostMatrix:
        """A copy of the rows named by `index` (1-D integers in ``[0, rows)``), in that order."""
        index = np.asarray(index)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
            raise ShapeError(f"row index is {index.dtype} {list(index.shape)}; needs 1-D integers")
        if index.size and not (index.min() >= 0 and index.max() < self.rows):
            raise InvalidArgumentError(
                f"row index spans {index.min()} … {index.max()}; allowed: 0 … {self.rows - 1}"
            )
        return HostMatrix(self.format, index.size, self.cols, self.data[index])


@dataclass(frozen=True, slots=True, eq=False)
class IntegerBlocks:
    """A quantised matrix in one common form: ``w = scale * q + minimum`` per block.

    Parameters
    ----------
    q : uint8 [rows, cols]
        The file's integers, exact, moved up to be unsigned where the format has a sign.
    scale, minimum : float32 [rows, cols // block_len]
    block_len : int
        16 (Q2_K, Q3_K, Q6_K) or 32.
    """

    q: Bytes
    scale: Floats
    minimum: Floats
    block_len: int


def dequantize(matrix: HostMatrix) -> Floats:
    """The weights as a new float32 array [rows, cols], bit for bit ggml's."""
    out = np.empty((matrix.rows, matrix.cols), dtype=np.float32)
    if matrix.format == "bf16":
        np.left_shift(matrix.data, np.uint32(16), out=out.view(np.uint32))
    elif not format_named(matrix.format).is_quantized:
        np.copyto(out, matrix.data)
    else:
        for start, stop, blocks in _unpacked_chunks(matrix):
            values = out[start:stop].reshape(blocks.codes.shape)
            np.subtract(blocks.codes, np.float32(blocks.offset), out=values)
            values *= blocks.scale
            if blocks.minimum is not None:
                values += blocks.minimum
    return out


def integers(matrix: HostMatrix) -> IntegerBlocks:
    """Take a quantised matrix apart into integers, scales and minima.

    The integers are those of the file; scales are the float32 products ggml forms (block scale
    times sub-block multiplier). Where the format subtracts an offset from its integers, the
    minimum is ``-offset * scale``, exact because every offset is a power of two.

    Raises
    ------
    UnsupportedModelError
        A float format: it has no integers.
    """
    if not format_named(matrix.format).is_quantized:
        raise UnsupportedModelError(
            f"{matrix.format} has no integers; allowed: {', '.join(_UNPACK)}"
        )
    block_len = 16 if matrix.format in ("q2_k", "q3_k", "q6_k") else 32
    q = np.empty((matrix.rows, matrix.cols), dtype=np.uint8)
    scale = np.empty((matrix.rows, matrix.cols // block_len), dtype=np.float32)
    minimum = np.empty_like(scale)
    for start, stop, blocks in _unpacked_chunks(matrix):
        q[start:stop] = blocks.codes.reshape(-1, matrix.cols)
        scale[start:stop] = blocks.scale.reshape(-1, scale.shape[1])
        lowest = blocks.minimum
        if lowest is None:
            lowest = blocks.scale * np.float32(-blocks.offset)
        minimum[start:stop] = lowest.reshape(-1, scale.shape[1])
    return IntegerBlocks(q, scale, minimum, block_len)


def quantize(weights: Floats | HostMatrix, format: str) -> HostMatrix:
    """Quantise weights to Q8_0 or Q4_0, rounding as ggml's reference does.

    Parameters
    ----------
    weights : float32 [rows, cols] or HostMatrix
        A HostMatrix is widened a few rows at a time, so that no float32 copy is made.
    format : str
        ``q8_0`` or ``q4_0``.

    Raises
    ------
    UnsupportedModelError
        Another format, or `cols` is not a multiple of 32.
    ShapeError
        `weights` is not a 2-D float32 array.
    InvalidArgumentError
        A block's scale is NaN or beyond float16.
    """
    pack = _PACK.get(format)
    if pack is None:
        raise UnsupportedModelError(f"cannot quantize to {format}; allowed: {', '.join(_PACK)}")
    if isinstance(weights, HostMatrix):
        rows, cols = weights.rows, weights.cols
    else:
        if weights.ndim != 2 or weights.dtype != np.float32:
            raise ShapeError(
                f"weights are {weights.dtype} {list(weights.shape)}; needs float32 [rows, cols]"
            )
        rows, cols = weights.shape
    layout = FORMATS[format]
    if cols % layout.block_len:
        raise UnsupportedModelError(
            f"cannot quantize {cols} columns to {format}; allowed: multiples of {layout.block_len}"
        )
    data = np.empty((rows, layout.row_elements(cols)), dtype=np.uint8)
    for start, stop in _row_chunks(rows, cols):
        if isinstance(weights, HostMatrix):
            part = dequantize(weights.row_slice(start, stop))
        else:
            part = weights[start:stop]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            packed = pack(part.reshape(-1, layout.block_len))
        if not np.isfinite(packed[:, :2].view("<f2")).all():
            raise InvalidArgumentError(
                f"rows {start}:{stop} hold NaN, infinity or weights too large for a {format} "
                "scale; allowed: finite weights whose block scale fits float16"
            )
        data[start:stop] = packed.reshape(stop - start, -1)
    return HostMatrix(format, rows, cols, data)


def _row_chunks(rows: int, cols: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_WEIGHTS // max(cols, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _unpacked_chunks(matrix: HostMatrix) -> Iterator[tuple[int, int, BlockCodes]]:
    """A few rows at a time: (first row, row after the last, their blocks taken apart)."""
    unpack, block_bytes = _UNPACK[matrix.format], FORMATS[matrix.format].block_bytes
    for start, stop in _row_chunks(matrix.rows, matrix.cols):
        yield start, stop, unpack(matrix.data[start:stop].reshape(-1, block_bytes))


_UNPACK: dict[str, Callable[[Bytes], BlockCodes]] = {
    "q4_0": blocks_32.unpack_q4_0,
    "q4_1": blocks_32.unpack_q4_1,
    "q5_0": blocks_32.unpack_q5_0,
    "q5_1": blocks_32.unpack_q5_1,
    "q8_0": blocks_32.unpack_q8_0,
    "q2_k": blocks_k.unpack_q2_k,
    "q3_k": blocks_k.unpack_q3_k,
    "q4_k": blocks_k.unpack_q4_k,
    "q5_k": blocks_k.unpack_q5_k,
    "q6_k": blocks_k.unpack_q6_k,
    "iq4_nl": blocks_32.unpack_iq4_nl,
    "iq4_xs": blocks_k.unpack_iq4_xs,
}


_PACK: dict[str, Callable[[Floats], Bytes]] = {
    "q8_0": blocks_32.pack_q8_0,
    "q4_0": blocks_32.pack_q4_0,
}
