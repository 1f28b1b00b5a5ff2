"""Hugging Face folders: well-formed, contradictory, damaged and hostile."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from atlas.errors import ClosedError, ModelFileError, UnsupportedModelError
from atlas.ops.blocks import dequantize
from atlas.weights.safetensors import SafetensorsFolder, read_json


def example_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(5, 8, generator=generator),
        "half": torch.randn(3, 8, generator=generator).half(),
        "experts": torch.randn(2, 3, 4, generator=generator).bfloat16(),
        "norm": torch.randn(7, generator=generator).bfloat16(),
    }


def test_one_file(tmp_path):
    tensors = example_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsFolder(tmp_path) as folder:
        assert set(folder.tensors) == set(tensors)
        assert folder.tensors["embed"].shape == (5, 8)
        assert folder.tensors["embed"].nbytes == 160
        assert folder.tensors["embed"].file == "model.safetensors"
        for name, format in (("embed", "f32"), ("half", "f16"), ("experts", "bf16")):
            matrix = folder.matrix(name)
            assert matrix.format == folder.tensors[name].format == format
            assert not matrix.data.flags.writeable
            expected = tensors[name].float().numpy().reshape(matrix.rows, matrix.cols)
            np.testing.assert_array_equal(dequantize(matrix), expected)
            folder.release(name)
        vector = folder.vector("norm")
        np.testing.assert_array_equal(vector, tensors["norm"].float().numpy())
        folder.check_supported()
        with pytest.raises(ModelFileError, match="no tensor nothing among its 4"):
            folder.matrix("nothing")
        with pytest.raises(ModelFileError, match=r"shape \[7\]; a matrix needs 2 or more"):
            folder.matrix("norm")
        view = folder.matrix("embed")
    np.testing.assert_array_equal(view.data, tensors["embed"].numpy())
    with pytest.raises(ClosedError):
        folder.matrix("embed")


def write_shards(
    folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, object]
) -> None:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_shards(tmp_path):
    a, b = torch.ones(2, 3), torch.zeros(4)
    write_shards(tmp_path, {ONE: {"a": a}, TWO: {"b": b}}, {"a": ONE, "b": TWO})
    with SafetensorsFolder(tmp_path) as folder:
        assert folder.matrix("a").data.tolist() == a.tolist()
        assert folder.vector("b").tolist() == b.tolist()
        assert folder.tensors["b"].file == TWO


@pytest.mark.parametrize(
    ("shards", "weight_map", "message"),
    [
        ({ONE: ["a"]}, {"a": ONE, "b": TWO}, f"{TWO}: No such file"),
        ({ONE: ["a"]}, {"a": ONE, "b": ONE}, f"tensor b is not in {ONE}"),
        ({ONE: ["a", "b"]}, {"a": ONE}, "holds tensor b, which the index places in no file"),
        ({ONE: ["a"], TWO: ["a", "b"]}, {"a": ONE, "b": TWO}, "tensor a is in .* and in"),
        ({ONE: ["a"], TWO: ["b"]}, {"a": TWO, "b": ONE}, f"holds tensor a, .* places in {TWO}"),
        ({}, {"a": "../other.safetensors"}, "allowed: the name of a .safetensors file"),
        ({}, {"a": "/etc/passwd"}, "allowed: the name"),
        ({}, {"a": ["x"]}, "allowed: the name"),
        ({}, {"a": "x\0.safetensors"}, "allowed: the name"),
        ({}, {}, "weight_map is {}"),
    ],
)  # fmt: skip
def test_an_index_that_contradicts_its_shards(tmp_path, shards, weight_map, message):
    files = {name: {key: torch.ones(2) for key in keys} for name, keys in shards.items()}
    write_shards(tmp_path, files, weight_map)
    with pytest.raises(ModelFileError, match=message):
        SafetensorsFolder(tmp_path)


def test_no_weights(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            ModelFileError, match=r"no safetensors weights; needs model\.safetensors"
        ):
            SafetensorsFolder(path)


def test_unsupported_dtypes_fail_when_used(tmp_path):
    save_file({"ids": torch.arange(4), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as folder:
        assert folder.vector("w").tolist() == [1, 1]
        with pytest.raises(
            UnsupportedModelError, match=r"tensor ids has type I64, .*supported: f32"
        ):
            folder.vector("ids")
        with pytest.raises(UnsupportedModelError, match=r"I64 in 1 tensors \(ids\)"):
            folder.check_supported()


def test_empty_and_scalar_tensors_are_refused_when_used(tmp_path):
    tensors = {"none": torch.ones(0, 3), "scalar": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as folder:
        with pytest.raises(ModelFileError, match="none of them 0"):
            folder.matrix("none")
        with pytest.raises(ModelFileError, match="a vector needs 1 dimension"):
            folder.vector("scalar")
        folder.release("none")


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: object, begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_misaligned_tensor_is_copied(tmp_path):
    values = np.arange(4, dtype=np.float32)
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2, 2], 1, 17)}
    (tmp_path / "model.safetensors").write_bytes(file_bytes(header, b"x" + values.tobytes()))
    with SafetensorsFolder(tmp_path) as folder:
        data = folder.matrix("b").data
        assert data.flags.aligned
        np.testing.assert_array_equal(data.ravel(), values)


HOSTILE = [
    (b"", "empty"),
    (b"1234567", "7 bytes; a safetensors file has 8 or more"),
    (file_bytes({}, length=2**60), f"header length is {2**60}; allowed: at most 2"),
    (file_bytes(b"{", b""), "not valid JSON"),
    (file_bytes(b"\xff\xfe"), "not valid JSON"),
    (file_bytes(b"[" * 100_000), "not valid JSON|too deeply"),
    (file_bytes(b'{"a":' * 100_000), "not valid JSON|too deeply"),
    (file_bytes(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    (file_bytes([]), r"holds \[\]; needs a JSON object"),
    (file_bytes(b'{"a": {}, "a": {}}'), "key 'a' appears twice"),
    (file_bytes({"a": 1}), "tensor 'a' is 1; needs dtype"),
    (file_bytes({"a": entry("F32", [1], 0, 4)}), "within 0 bytes"),
    (file_bytes({"a": entry("F32", [1], 4, 0)}, bytes(4)), "needs dtype"),
    (file_bytes({"a": entry("F32", [True], 0, 4)}, bytes(4)), "needs dtype"),
    (file_bytes({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "needs dtype"),
    (file_bytes({"a": entry("F32", [1.0], 0, 4)}, bytes(4)), "needs dtype"),
    (file_bytes({"a": entry("F32", [2**70], 0, 4)}, bytes(4)), "needs dtype"),
    (file_bytes({"a": entry("F32", [1] * 9, 0, 4)}, bytes(4)), "at most 8 sizes"),
    (file_bytes({"a\x1b": entry("F32", [1], 0, 4)}, bytes(4)), "needs dtype"),
    (file_bytes({"a": entry("F32", [2**40, 2**40], 0, 4)}, bytes(4)), "has 4 bytes; needs"),
    (file_bytes({"a": entry("F32", [2], 0, 4)}, bytes(4)), "has 4 bytes; needs 8"),
    (file_bytes({"a": entry("F32", [1], 0, 4)}, bytes(5)), "tensors end at byte"),
    (file_bytes({"a": entry("F32", [1], 4, 8)}, bytes(8)), "begins at byte"),
    (
        file_bytes({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, bytes(4)),
        "begins at byte",
    ),
    (file_bytes({"a": entry("q4_0", [32], 0, 18)}, bytes(18)), "q4_0"),
    (file_bytes({"a": entry("I64", [3], 0, 4)}, bytes(4)), "model.safetensors"),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE, ids=[text for _, text in HOSTILE])
def test_hostile_files(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        SafetensorsFolder(tmp_path)


VALID = save(example_tensors())


def opens_or_refuses(folder_path: Path, content: bytes) -> None:
    (folder_path / "model.safetensors").write_bytes(content)
    try:
        with SafetensorsFolder(folder_path) as folder:
            for name, tensor in folder.tensors.items():
                if len(tensor.shape) == 1:
                    folder.vector(name)
                else:
                    dequantize(folder.matrix(name))
    except ModelFileError:
        event("refused")
    else:
        event("opened")


def test_truncated_at_every_byte(tmp_path):
    for length in range(len(VALID)):
        (tmp_path / "model.safetensors").write_bytes(VALID[:length])
        with pytest.raises(ModelFileError):
            SafetensorsFolder(tmp_path)


FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from([b"9", b"0", b"-", b'"', b"]", b"}", b"\\", b"\xff", b"F16", b"null"])
            | st.binary(min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_mutated_files(tmp_path, edits):
    content = bytearray(VALID)
    for position, patch in edits:
        content[position : position + len(patch)] = patch
    opens_or_refuses(tmp_path, bytes(content))


JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "f32", "q8_0"]) | JSON_VALUE,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON_VALUE,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | JSON_VALUE,
    }
)


@FUZZ
@given(st.dictionaries(st.text(max_size=3), ENTRY | JSON_VALUE, max_size=3), st.binary(max_size=16))
def test_random_headers(tmp_path, header, data):
    opens_or_refuses(tmp_path, file_bytes(header, data))


@FUZZ
@given(JSON_VALUE)
def test_random_indexes(tmp_path, weight_map):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFileError):
        SafetensorsFolder(tmp_path)


def test_read_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, 2.5, null], "limit": Infinity}')
    assert read_json(path) == {"a": [1, 2.5, None], "limit": float("inf")}
    with pytest.raises(ModelFileError, match="40 bytes; allowed: at most 39"):
        read_json(path, max_bytes=39)
    with pytest.raises(ModelFileError, match="No such file"):
        read_json(tmp_path / "missing.json")
