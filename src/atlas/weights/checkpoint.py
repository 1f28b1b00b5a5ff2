"""A model's configuration and canonical weights, whatever kind of file holds them.

Opening reads no weight, but proves that the load will succeed: every parameter that the
configuration asks for is there, once, with its shape and in a supported format, and no tensor is
left over.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atlas.architectures import m2m100
from atlas.architectures.families import family_named
from atlas.architectures.gguf_config import config_from_gguf, with_rope_divisors
from atlas.architectures.gguf_names import gguf_sources
from atlas.architectures.huggingface_config import config_from_huggingface
from atlas.architectures.huggingface_names import (
    embedding_tensor,
    huggingface_sources,
    vision_tensors,
)
from atlas.architectures.weight_sources import FileKind, Source
from atlas.config import ModelConfig
from atlas.errors import AtlasError, InvalidArgumentError, ModelFileError
from atlas.ops.blocks import HostMatrix
from atlas.weights.gguf import GgufFile
from atlas.weights.locate import ModelLocation, locate
from atlas.weights.safetensors import SafetensorsFolder, read_json

_HEAD = "lm_head.weight"
_ROPE_FREQS = "rope_freqs.weight"
_NAMES_SHOWN = 20


class _StoredTensor(Protocol):
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class _WeightFile(Protocol):
    """What GgufFile and SafetensorsFolder have in common."""

    @property
    def path(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, _StoredTensor]: ...
    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]: ...
    def matrix(self, name: str) -> HostMatrix: ...
    def vector(self, name: str) -> NDArray[np.float32]: ...
    def check_supported(self) -> None: ...
    def release(self, name: str) -> None: ...
    def close(self) -> None: ...


class Checkpoint:
    """An open model: its configuration, and its weights under canonical names.

    Made by :func:`open_checkpoint`. Rows of q and k are in rotate-half order and Gemma's norms
    hold the factor itself (1 + w) whichever file they came from. The output head is tied when
    the file has none; a folder whose config ties it and that holds one nonetheless is tied if
    the two are equal, else the file's head is used (as transformers 5 does).

    Attributes
    ----------
    config : ModelConfig
        With ``tie_embeddings`` and ``rope.divisors`` as the file's tensors have them.
    format_name : {"gguf", "safetensors"}
    path : str
        The file or folder.
    metadata : dict
        GGUF metadata, or config.json, unchanged until :meth:`forget_metadata`.
    ignored_options : tuple of str
        Options of the file that nothing reads, those known to be harmless left out.
    """

    def __init__(
        self,
        file: _WeightFile,
        config: ModelConfig,
        kind: FileKind,
        metadata: dict[str, Any],
        ignored_options: tuple[str, ...] = (),
        consumed: Iterable[str] = (),
    ) -> None:
        self.config = config
        self.format_name = kind
        self.path = file.path
        self.metadata = metadata
        self.ignored_options = ignored_options
        self._file = file
        _check_expert_count(file, config, kind)
        find = gguf_sources if kind == "gguf" else huggingface_sources
        self._sources = find(config, file.tensors)
        _check_complete(file, self._sources, frozenset(consumed))
        file.check_supported()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in the file."""
        return sum(self.stored_bytes(name) for name in self._sources)

    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        """Real path, bytes and time of change (ns) of each weight file."""
        return self._file.identity

    def weight_formats(self) -> dict[str, str]:
        """Every canonical name, in load order, with the format its file stores it in."""
        return {
            name: self._file.tensors[source.tensors[0]].format
            for name, source in self._sources.items()
        }

    def stored_bytes(self, name: str) -> int:
        """Bytes of a weight in its file; of a tensor that holds several weights, its share."""
        source = self._source(name)
        nbytes = sum(self._file.tensors[tensor].nbytes for tensor in source.tensors)
        return round(nbytes * source.share)

    def matrix(self, name: str) -> HostMatrix:
        """A weight matrix: a view of the mapped file, or a copy where rows had to be gathered
        (q and k of Llama GGUF files, gated queries) or stacked (experts stored one by one)."""
        source = self._source(name)
        if len(source.shape) == 1:  # one row, whose dimension of size 1 the converter dropped
            row = self._file.vector(source.tensors[0])[None]
            return HostMatrix("f32", 1, row.shape[1], row)
        parts = [self._file.matrix(tensor) for tensor in source.tensors]
        first = parts[0]
        if len(parts) > 1:
            data = np.concatenate([part.data for part in parts])
            return HostMatrix(first.format, len(data), first.cols, data)
        if (rows := source.row_range) is not None:
            return first.row_slice(rows.start, rows.stop)
        index = source.row_index()
        return first if index is None else first.take_rows(index)

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's factors, a bias or a convolution's taps: a new float32 array, flat."""
        source = self._source(name)
        return source.values(self._file.vector(source.tensors[0]))

    def release(self, name: str) -> None:
        """Drop a weight's pages from memory: it was repacked. Views of it stay valid."""
        for tensor in self._source(name).tensors:
            self._file.release(tensor)

    def forget_metadata(self) -> None:
        """Empty ``metadata``, of which a GGUF file's vocabulary alone takes megabytes."""
        self.metadata.clear()

    def close(self) -> None:
        """Close the file. Idempotent; views handed out stay valid."""
        self._file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self.config.architecture}, {self.format_name})"

    def _source(self, name: str) -> Source:
        try:
            return self._sources[name]
        except KeyError:
            raise InvalidArgumentError(
                f"weight {name!r} is not one of the {len(self._sources)} of {self.path}"
            ) from None


def open_checkpoint(model: ModelLocation | str | os.PathLike[str]) -> Checkpoint:
    """Open a model: a GGUF file, or a folder with config.json and safetensors files.

    Raises
    ------
    ModelFileError
        A file is missing or damaged, an option malformed, a weight missing, of another shape or
        unexpected. Everything missing and unexpected is named at once.
    UnsupportedModelError
        An architecture, option or tensor type without support.
    """
    location = model if isinstance(model, ModelLocation) else locate(model)
    return _open_gguf(location) if location.kind == "gguf" else _open_folder(location)


def _open_gguf(location: ModelLocation) -> Checkpoint:
    file = GgufFile(location.path)
    try:
        config, ignored = config_from_gguf(file.metadata, file.tensors, origin=file.path)
        consumed = []
        if family_named(config.architecture).gguf_name == "llama" and _ROPE_FREQS in file.tensors:
            config = with_rope_divisors(config, _rope_divisors(file, config))
            consumed.append(_ROPE_FREQS)
        return Checkpoint(file, config, "gguf", file.metadata, ignored, consumed)
    except AtlasError:
        file.close()
        raise


def _open_folder(location: ModelLocation) -> Checkpoint:
    options = read_json(os.path.join(location.path, "config.json"))
    generation_path = os.path.join(location.path, "generation_config.json")
    generation = read_json(generation_path) if os.path.exists(generation_path) else None
    is_translator = options.get("model_type") == m2m100.MODEL_TYPE
    read = m2m100.config_from_m2m100 if is_translator else config_from_huggingface
    config, ignored = read(options, generation, origin=os.path.join(location.path, "config.json"))
    folder = SafetensorsFolder(location.path)
    try:
        if is_translator:
            consumed = _translator_copies(folder, config)
            return Checkpoint(folder, config, "safetensors", options, ignored, consumed)
        # Old checkpoints kept the rotary frequencies as a buffer; they follow from the config.
        consumed = [name for name in folder.tensors if name.endswith(".rotary_emb.inv_freq")]
        if vision := vision_tensors(folder.tensors):
            consumed += vision
            ignored += (f"{len(vision)} tensors of the vision part",)
        if not any(name.startswith("mtp.") for name in folder.tensors):
            config = replace(config, mtp_kinds=())
        embedding = embedding_tensor(config, folder.tensors)
        if config.tie_embeddings and embedding in folder.tensors and _HEAD in folder.tensors:
            if _are_equal(folder, embedding, _HEAD):
                consumed.append(_HEAD)
            else:
                config = replace(config, tie_embeddings=False)
        return Checkpoint(folder, config, "safetensors", options, ignored, consumed)
    except AtlasError:
        folder.close()
        raise


def _translator_copies(folder: SafetensorsFolder, config: ModelConfig) -> list[str]:
    """Tensors of an encoder-decoder that follow from others: tied matrices, position tables.

    Raises
    ------
    ModelFileError
        The embeddings of source and target differ, or a head that the config ties to them.
    """
    first = m2m100.tensor_name(config, "embedding", folder.tensors)
    copies = m2m100.tied_copies(config, folder.tensors)
    for name in copies:
        if not _are_equal(folder, first, name):
            raise ModelFileError(
                f"{folder.path}: {name} differs from {first}; allowed: one matrix for both"
            )
    return copies + [name for name in folder.tensors if m2m100.is_position_table(name)]


def _rope_divisors(file: GgufFile, config: ModelConfig) -> tuple[float, ...]:
    divisors = file.vector(_ROPE_FREQS)
    if divisors.size != config.head_dim // 2:
        raise ModelFileError(
            f"{file.path}: {_ROPE_FREQS} has {divisors.size} values; "
            f"needs {config.head_dim // 2}, half the head size"
        )
    if not ((divisors >= 1e-6) & (divisors <= 1e6)).all():  # a NaN fails both
        raise ModelFileError(
            f"{file.path}: {_ROPE_FREQS} spans {divisors.min()} … {divisors.max()}; "
            "allowed: 1e-6 … 1e6"
        )
    return tuple(float(divisor) for divisor in divisors)


def _are_equal(folder: SafetensorsFolder, first: str, second: str) -> bool:
    """Whether two tensors are the same, bit for bit; read a few rows at a time."""
    a, b = folder.tensors[first], folder.tensors[second]
    if (a.format, a.shape) != (b.format, b.shape):
        return False
    left, right = folder.matrix(first).data, folder.matrix(second).data
    step = max(1, (1 << 20) // left.shape[1])
    equal = all(
        left[start : start + step].tobytes() == right[start : start + step].tobytes()
        for start in range(0, len(left), step)
    )
    folder.release(second)
    return equal


def _check_expert_count(file: _WeightFile, config: ModelConfig, kind: FileKind) -> None:
    """Refuse absurd expert counts before as many names are made."""
    moe, num_tensors = config.moe, len(file.tensors)
    fused = (".experts.gate_up_proj", ".experts.up_proj")
    if moe is None or kind == "gguf" or any(name.endswith(fused) for name in file.tensors):
        return
    each = 3 if config.has_mlp_gate else 2
    if moe.num_experts * sum(moe.sparse_layers) * each > num_tensors:
        raise ModelFileError(
            f"{file.path}: the config has {moe.num_experts} experts in each of "
            f"{sum(moe.sparse_layers)} layers, {each} tensors each; the file has {num_tensors} "
            "tensors"
        )


def _check_complete(
    file: _WeightFile, wanted: Mapping[str, Source], consumed: frozenset[str]
) -> None:
    """Every wanted tensor is there with its shape, and no other is, bar the `consumed`."""
    tensors = file.tensors
    shapes = {tensor: source.shape for source in wanted.values() for tensor in source.tensors}
    problems = [
        ("missing", [name for name in shapes if name not in tensors]),
        ("unexpected", [name for name in tensors if name not in shapes and name not in consumed]),
        (
            "of the wrong shape",
            [
                f"{name} {list(tensors[name].shape)} (needs {list(shape)})"
                for name, shape in shapes.items()
                if name in tensors and tuple(tensors[name].shape) != shape
            ],
        ),
        (
            "in several formats for one weight",
            [
                name
                for name, source in wanted.items()
                if len({tensors[part].format for part in source.tensors if part in tensors}) > 1
            ],
        ),
    ]
    found = [f"{what}: {_some(names)}" for what, names in problems if names]
    if found:
        raise ModelFileError(f"{file.path}: weights do not fit the model; {'; '.join(found)}")


def _some(names: list[str]) -> str:
    """The first names and how many more there are: a hostile file can name very many."""
    shown = ", ".join(name[:200] for name in names[:_NAMES_SHOWN])
    hidden = len(names) - _NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
