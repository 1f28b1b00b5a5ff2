"""Damaged and hostile GGUF files: a ModelFileError in bounded time and memory, nothing else."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from atlas.errors import ModelFileError, UnsupportedModelError
from atlas.ops.blocks import dequantize
from atlas.weights.gguf import GgufFile
from tests.helpers.gguf_writer import ARRAY, STRING, Raw, Tensor, gguf_bytes, random_tensor, tensor

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.eps": 1e-5,
    "flag": True,
    "tokenizer.ggml.tokens": ["a", "bc", ""],
    "tokenizer.ggml.token_type": np.array([1, 3, 1], np.int32),
    "nested": [np.array([1], np.uint8)],
}
TENSORS = [
    random_tensor("norm", "f32", (4,)),
    random_tensor("w", "q8_0", (2, 32)),
    random_tensor("k", "q4_k", (1, 256)),
]
VALID = gguf_bytes(METADATA, TENSORS)


def read_everything(path: Path) -> None:
    """Open, and touch every tensor."""
    with GgufFile(path) as file, np.errstate(all="ignore"):
        for name, entry in file.tensors.items():
            if len(entry.shape) == 1:
                file.vector(name)
            else:
                dequantize(file.matrix(name))


def refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message) as caught:
            read_everything(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_the_valid_file_is_read(tmp_path):
    path = tmp_path / "valid.gguf"
    path.write_bytes(VALID)
    read_everything(path)


def test_not_a_file(tmp_path):
    for path, message in (
        (tmp_path / "missing.gguf", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "nul\0", "null"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(ModelFileError, match=message):
            GgufFile(path)


def test_a_fifo_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile(tmp_path / "fifo")


BIG = 2**60

HOSTILE = [
    (b"", "empty"),
    (b"GGUF", "the version at byte 4 needs 4 bytes; 0 are left"),
    (b"GGML" + bytes(33), "not a GGUF file: it begins with b'GGML'"),
    (VALID[:37], "number of metadata keys is 7; allowed: .* hold at most 0|number of tensors"),
    (VALID[:24] + bytes(13), "number of tensors is 3"),
    (gguf_bytes({}, [], num_tensors=BIG), f"number of tensors is {BIG}; allowed"),
    (gguf_bytes({}, [], num_keys=BIG), f"number of metadata keys is {BIG}; allowed"),
    (gguf_bytes({}, [], num_keys=2**64 - 1), "number of metadata keys is"),
    (gguf_bytes(METADATA, [], num_keys=8), "metadata key 7|number of metadata keys"),
    (gguf_bytes([("a", 1), ("a", 2)], []), "metadata key a appears twice"),
    (gguf_bytes({"": 1}, []), "metadata key 0 is ''"),
    (gguf_bytes({"\x1b[2J": 1}, []), "printable"),
    (gguf_bytes({"k": Raw(struct.pack("<IB", 13, 0))}, []), "value type 13; allowed: 0 … 12"),
    (gguf_bytes({"k": Raw(struct.pack("<IB", 7, 2))}, []), "boolean other than 0 and 1"),
    (gguf_bytes({"k": Raw(struct.pack("<IQ", STRING, BIG))}, []), f"k is {BIG} bytes long"),
    (gguf_bytes({"k": Raw(struct.pack("<IQ", STRING, 99))}, []), "the value of k .* needs 99"),
    (gguf_bytes({"k": Raw(struct.pack("<IIQ", ARRAY, 0, 2**33))}, []), "the length of k is"),
    (gguf_bytes({"k": Raw(struct.pack("<IIQ", ARRAY, STRING, 2**33))}, []), "the length of k"),
    (gguf_bytes({"k": Raw(struct.pack("<IIQ", ARRAY, ARRAY, 2**33))}, []), "the length of k"),
    (gguf_bytes({"k": Raw(struct.pack("<IIQ", ARRAY, 77, 0))}, []), "value type 77"),
    (
        gguf_bytes({"k": Raw(struct.pack("<IIQQ", ARRAY, STRING, 1, BIG))}, []),
        "string 0 of k .* needs",
    ),
    (
        gguf_bytes({"k": Raw(struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 50)}, []),
        "k nests arrays deeper than 4",
    ),
    (
        gguf_bytes({"k": [np.array([], np.uint8)] * 70_000}, []),
        "k brings the number of arrays above 65536",
    ),
    (gguf_bytes({"general.alignment": 24}, []), "general.alignment is 24; allowed: a power of"),
    (gguf_bytes({"general.alignment": 0}, []), "general.alignment is 0"),
    (gguf_bytes({"general.alignment": 1 << 30}, []), "general.alignment is 1073741824"),
    (gguf_bytes({"general.alignment": "32"}, []), "general.alignment is '32'"),
    (gguf_bytes({}, TENSORS[:1] * 2), "tensor norm appears twice"),
    (gguf_bytes({}, [Tensor("t", "f32", (), bytes(64))]), "t has 0 dimensions; allowed: 1 … 4"),
    (gguf_bytes({}, [Tensor("t", "f32", (1,) * 5, bytes(4))]), "t has 5 dimensions"),
    (gguf_bytes({}, [Tensor("t", "f32", (4, 0), b"1234")]), r"t has dimensions \[0, 4\]"),
    (gguf_bytes({}, [Tensor("t", "q8_0", (1, 33), bytes(64))]), "rows of 33 q8_0 weights"),
    (gguf_bytes({}, [Tensor("t", "f32", (5,), bytes(16))]), r"t \[5\] \(f32\) takes bytes"),
    (gguf_bytes({}, [Tensor("t", "f32", (2**62, 4), bytes(16))]), "takes bytes"),
    (gguf_bytes({}, [Tensor("t", "f32", (2**63,) * 4, bytes(16))]), "takes bytes"),
    (gguf_bytes({}, [Tensor("t", "f32", (4,), bytes(64), offset=2**63)]), "takes bytes"),
    (gguf_bytes({}, [Tensor("t", "f32", (4,), bytes(64), offset=8)]), "t at offset 8; allowed"),
    (gguf_bytes({}, [Tensor("t", "f32", (4,), b"", type_id=16)]), "takes bytes"),
    (
        gguf_bytes({}, [TENSORS[1], Tensor("t", "f32", (4,), bytes(16), offset=32)]),
        "t at byte .* overlaps w",
    ),
    (
        gguf_bytes({}, [TENSORS[1], Tensor("t", "f32", (4,), bytes(16), offset=0)]),
        "overlaps",
    ),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE, ids=[text for _, text in HOSTILE])
def test_hostile_files(tmp_path, content, message):
    refused(tmp_path, content, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_bytes({}, [], version=1), "GGUF version 1; supported: 2 and 3"),
        (gguf_bytes({}, [], version=4), "GGUF version 4; supported"),
        (gguf_bytes({}, [], version=3 << 24), "GGUF version 3 in big-endian order"),
        (gguf_bytes({"split.count": 3}, []), r"one of 3 shards \(split.count\)"),
    ],
)
def test_unsupported_files(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        GgufFile(path)


def test_truncated_at_every_byte(tmp_path):
    path = tmp_path / "short.gguf"
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])
        with pytest.raises(ModelFileError):
            read_everything(path)


def test_a_long_file_of_empty_strings_is_bounded(tmp_path):
    """A 2 MB array of empty strings costs a list, not more."""
    count = 250_000
    content = Raw(struct.pack("<IIQ", ARRAY, STRING, count) + bytes(8 * count))
    refused(tmp_path, gguf_bytes({"k": content, "l": Raw(b"\x63\0\0\0")}, []), "l has value type")


def opens_or_refuses(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        read_everything(path)
    except ModelFileError:
        event("refused")
    else:
        event("opened")


FUZZ = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(VALID) - 1),
            st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x80", struct.pack("<Q", BIG), b"\xff" * 8])
            | st.binary(min_size=1, max_size=8),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_mutated_files(tmp_path, edits):
    content = bytearray(VALID)
    for position, patch in edits:
        content[position : position + len(patch)] = patch
    opens_or_refuses(tmp_path / "mutated.gguf", bytes(content))


@FUZZ
@given(st.integers(0, len(VALID)), st.integers(0, len(VALID)), st.binary(max_size=40))
def test_spliced_files(tmp_path, start, stop, insert):
    opens_or_refuses(tmp_path / "spliced.gguf", VALID[:start] + insert + VALID[stop:])


@FUZZ
@given(st.binary(max_size=200))
@example(bytes(37))
def test_random_content(tmp_path, content):
    opens_or_refuses(tmp_path / "random.gguf", b"GGUF\3\0\0\0" + content)


def test_float_tensors_may_hold_anything(tmp_path):
    values = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, [tensor("v", values, "f32")]))
    with GgufFile(path) as file:
        assert file.vector("v").tobytes() == values.tobytes()
