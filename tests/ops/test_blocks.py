"""Weight formats against the gguf package: the bits of dequantisation, integers, rounding."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as reference
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import InvalidArgumentError, ShapeError, UnsupportedModelError
from atlas.ops.blocks import (
    FORMATS,
    HostMatrix,
    dequantize,
    format_named,
    format_of_ggml,
    integers,
    name_of_ggml,
    quantize,
)

QUANTIZED = [name for name, layout in FORMATS.items() if layout.is_quantized]

# Where the float16 scales of a block begin, in bytes.
SCALE_BYTES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_k": [80, 82],
    "q3_k": [108], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0],
}  # fmt: skip


def random_matrix(format: str, rows: int, cols: int, seed: int = 0) -> HostMatrix:
    """Random bytes; scales are random float16 of either sign, subnormal to large, but finite."""
    rng = np.random.default_rng(seed)
    layout = FORMATS[format]
    if not layout.is_quantized:
        raw = rng.integers(0, 1 << 16, (rows, cols), dtype=np.uint16)
        raw[(raw & 0x7F80) == 0x7F80] = 0x1234  # not NaN or infinite in bf16, nor in float16
        if format == "f32":
            return HostMatrix(format, rows, cols, rng.standard_normal((rows, cols), np.float32))
        return HostMatrix(format, rows, cols, raw.view(layout.dtype))
    blocks = rng.integers(0, 256, (rows * cols // layout.block_len, layout.block_bytes), np.uint8)
    for start in SCALE_BYTES[format]:
        scale = blocks[:, start : start + 2].copy().view(np.uint16)
        scale[(scale & 0x7C00) == 0x7C00] &= 0xBFFF
        blocks[:, start : start + 2] = scale.view(np.uint8)
    return HostMatrix(format, rows, cols, blocks.reshape(rows, -1))


def reference_dequantize(matrix: HostMatrix) -> np.ndarray:
    return reference.dequantize(
        matrix.data.view(np.uint8), GGMLQuantizationType[matrix.format.upper()]
    )


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


def test_the_table_agrees_with_ggml():
    for name, layout in FORMATS.items():
        known = GGMLQuantizationType[name.upper()]
        assert layout.ggml_type == known
        assert (layout.block_len, layout.block_bytes) == GGML_QUANT_SIZES[known]
        assert format_of_ggml(known) is layout
    for known in GGMLQuantizationType:
        assert name_of_ggml(known) == known.name.lower()


@pytest.mark.parametrize(("type_id", "name"), [(16, "iq2_xxs"), (34, "tq1_0"), (39, "mxfp4")])
def test_an_unsupported_type_is_refused_by_name(type_id, name):
    with pytest.raises(UnsupportedModelError, match=rf"{name} .*supported: f32, .*, iq4_xs"):
        format_of_ggml(type_id)


def test_an_unknown_type_is_refused_by_number():
    with pytest.raises(UnsupportedModelError, match="ggml type 77 is not supported"):
        format_of_ggml(77)
    with pytest.raises(UnsupportedModelError, match="Q4_K is not supported"):
        format_named("Q4_K")


# 301 rows of 512 are more than one chunk; 3 rows of 1,024 are one.
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (3, 1024), (301, 512)])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_gives_the_bits_of_the_reference(format, rows, cols):
    matrix = random_matrix(format, rows, cols, seed=rows)
    weights = dequantize(matrix)
    assert weights.dtype == np.float32
    assert weights.flags.writeable
    np.testing.assert_array_equal(bits(weights), bits(reference_dequantize(matrix)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(QUANTIZED), st.data())
def test_dequantize_any_bytes(format, data):
    layout = FORMATS[format]
    raw = data.draw(st.binary(min_size=layout.block_bytes, max_size=layout.block_bytes))
    matrix = HostMatrix(format, 1, layout.block_len, np.frombuffer(raw, np.uint8)[None])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantize(matrix), reference_dequantize(matrix))


@pytest.mark.parametrize("format", QUANTIZED)
def test_integers_mean_the_same_weights(format):
    matrix = random_matrix(format, 37, 1024)
    blocks = integers(matrix)
    assert blocks.block_len == (16 if format in ("q2_k", "q3_k", "q6_k") else 32)
    assert blocks.q.shape == (37, 1024)
    assert blocks.q.dtype == np.uint8
    assert blocks.scale.shape == blocks.minimum.shape == (37, 1024 // blocks.block_len)
    assert blocks.scale.dtype == blocks.minimum.dtype == np.float32
    # In float64 the common form has no rounding of its own; the reference rounds to float32.
    scale, minimum = (
        np.repeat(array.astype(np.float64), blocks.block_len, axis=1)
        for array in (blocks.scale, blocks.minimum)
    )
    expected = reference_dequantize(matrix).astype(np.float64)
    size = np.abs(scale) * blocks.q + np.abs(minimum)
    assert (np.abs(scale * blocks.q + minimum - expected) <= 2.0**-22 * size).all()


@pytest.mark.parametrize("format", ["q4_0", "q5_0", "q8_0", "q3_k", "q6_k", "iq4_nl", "iq4_xs"])
def test_integers_of_symmetric_formats_are_exact(format):
    matrix = random_matrix(format, 5, 512, seed=3)
    blocks = integers(matrix)
    scale, minimum = (
        np.repeat(array.astype(np.float64), blocks.block_len, axis=1)
        for array in (blocks.scale, blocks.minimum)
    )
    exact = (scale * blocks.q + minimum).astype(np.float32)
    np.testing.assert_array_equal(exact, dequantize(matrix))


def test_integers_of_a_float_format_are_refused():
    with pytest.raises(UnsupportedModelError, match="f16 has no integers; allowed: q4_0"):
        integers(random_matrix("f16", 1, 32))


def hard_weights(rows: int, cols: int) -> np.ndarray:
    """Normal weights, plus blocks of zeros, ties, tiny and large values."""
    weights = np.random.default_rng(5).standard_normal((rows, cols), dtype=np.float32)
    weights[0] = 0
    weights[1] = np.resize(np.arange(-127, 128, dtype=np.float32) / 2, cols)
    weights[1, ::32] = 127  # scale 1: halves must round away from zero
    weights[2] *= np.float32(1e-42)
    weights[3] *= np.float32(2e4)
    weights[4] = -np.abs(weights[4])
    weights[5, ::32] = np.nextafter(np.float32(0.5), np.float32(0))
    weights[5, 1::32] = 127
    return weights


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_quantize_rounds_as_the_reference(format):
    weights = hard_weights(300, 640)
    matrix = quantize(weights, format)
    with np.errstate(all="ignore"):
        expected = reference.quantize(weights, GGMLQuantizationType[format.upper()])
    # The reference casts NaN for scales whose reciprocal overflows; there every weight is 0 here.
    tiny = slice(2, 3)
    assert not dequantize(matrix.row_slice(2, 3)).any()
    np.testing.assert_array_equal(
        np.delete(matrix.data, tiny, axis=0), np.delete(expected, tiny, axis=0)
    )


def test_quantize_widens_a_matrix():
    source = random_matrix("bf16", 9, 64)
    source = HostMatrix("bf16", 9, 64, source.data & 0xBFFF)  # magnitudes below 2
    np.testing.assert_array_equal(
        quantize(source, "q8_0").data, quantize(dequantize(source), "q8_0").data
    )


def test_quantize_refusals():
    good = np.ones((2, 64), np.float32)
    with pytest.raises(UnsupportedModelError, match="q6_k; allowed: q8_0, q4_0"):
        quantize(good, "q6_k")
    with pytest.raises(UnsupportedModelError, match="48 columns to q8_0; allowed: multiples of 32"):
        quantize(good[:, :48], "q8_0")
    with pytest.raises(ShapeError, match=r"float64 \[2, 64\]"):
        quantize(good.astype(np.float64), "q8_0")
    for bad in (np.nan, np.inf, 3e38):
        weights = good.copy()
        weights[1, 5] = bad
        for format in ("q8_0", "q4_0"):
            with pytest.raises(InvalidArgumentError, match="rows 0:2"):
                quantize(weights, format)


def test_a_matrix_checks_its_data():
    with pytest.raises(UnsupportedModelError, match="48 columns of q8_0; allowed: multiples of 32"):
        HostMatrix("q8_0", 1, 48, np.zeros((1, 51), np.uint8))
    with pytest.raises(ShapeError, match=r"needs C-contiguous uint8 \[2, 34\]"):
        HostMatrix("q8_0", 2, 32, np.zeros((2, 32), np.uint8))
    with pytest.raises(ShapeError, match="needs C-contiguous uint16"):
        HostMatrix("bf16", 2, 3, np.zeros((2, 3), np.float16))
    with pytest.raises(ShapeError, match="C-contiguous"):
        HostMatrix("f32", 2, 3, np.zeros((3, 2), np.float32).T)


@pytest.mark.parametrize("format", FORMATS)
def test_row_slices_and_row_copies(format):
    matrix = random_matrix(format, 6, 256)
    weights = dequantize(matrix)
    part = matrix.row_slice(2, 5)
    assert np.shares_memory(part.data, matrix.data)
    assert part.nbytes * 2 == matrix.nbytes
    np.testing.assert_array_equal(dequantize(part), weights[2:5])
    index = np.array([5, 0, 0, 3])
    np.testing.assert_array_equal(dequantize(matrix.take_rows(index)), weights[index])
    assert matrix.row_slice(3, 3).rows == 0
    assert dequantize(matrix.row_slice(3, 3)).shape == (0, 256)


def test_rows_out_of_range_are_refused():
    matrix = random_matrix("f32", 4, 8)
    with pytest.raises(InvalidArgumentError, match="rows 2:5"):
        matrix.row_slice(2, 5)
    with pytest.raises(InvalidArgumentError, match="spans -1 … 3; allowed: 0 … 3"):
        matrix.take_rows(np.array([-1, 3]))
    with pytest.raises(ShapeError, match="needs 1-D integers"):
        matrix.take_rows(np.array([True, False, True, True]))
