"""The file form of a sequence: its tokens and KV, checked from the first byte to the last.

Little-endian, in this order:

    "ATLASSEQ"            8 bytes
    version               uint32
    fingerprint           uint32 length, UTF-8: what the KV's bits depend on
    counts                int64 × 4: seq_len, prompt_len, exact_len, kv_valid_tokens
    token ids             int32 [seq_len]
    KV                    layer by layer, block by block, K then V, as the pools hold them
    sections              uint32 count; each: uint32 length and UTF-8 name, uint64 size, bytes
    checksum              uint32, CRC-32 of everything before it

A section is whatever its writer keeps beside the KV (a sampler's position, say), under a name.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from atlas.errors import InvalidArgumentError
from atlas.layers.step import Array

if TYPE_CHECKING:
    from atlas.model.core import ModelCore

Ints = NDArray[np.int32]
MAGIC = b"ATLASSEQ"
VERSION = 1
_COUNTS = ("seq_len", "prompt_len", "exact_len", "kv_valid_tokens")
_MAX_NAME = 4096  # bytes of a fingerprint or of a section's name
_PIECE = 1 << 20  # read at a time: memory grows with what the reader gives, not with its claims
_SAMPLED = 1 << 20  # weights of more bytes are sampled by their digest
_SAMPLES, _SAMPLE_BYTES = 256, 1024


@dataclass(frozen=True, slots=True)
class SequenceHeader:
    """What a file says about its sequence.

    Attributes
    ----------
    fingerprint : str
        Of the model that made the KV, as :func:`fingerprint` gives it.
    seq_len : int
        Positions whose KV follows.
    prompt_len : int
        Positions from here on are step tokens.
    exact_len : int
        Positions whose KV only prompt tokens went into, 0 … ``prompt_len``.
    kv_valid_tokens : int
        Cap on the tokens whose blocks may be cached.
    """

    fingerprint: str
    seq_len: int
    prompt_len: int
    exact_len: int
    kv_valid_tokens: int

    def check(self) -> None:
        """Raise InvalidArgumentError unless the counts fit each other."""
        for name in _COUNTS[1:]:
            if not 0 <= getattr(self, name) <= self.seq_len:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}; allowed: 0 … seq_len {self.seq_len}"
                )
        if self.exact_len > self.prompt_len:
            raise InvalidArgumentError(
                f"exact_len is {self.exact_len}; allowed: 0 … prompt_len {self.prompt_len}"
            )


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """What a model takes: every size of a file follows from it and from ``seq_len``.

    Attributes
    ----------
    fingerprint : str
    block_parts : tuple of (shape, dtype)
        One block of each pool: layer by layer, K then V.
    block_size, max_seq_len, vocab_size : int
    """

    fingerprint: str
    block_parts: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    block_size: int
    max_seq_len: int
    vocab_size: int

    @classmethod
    def of(cls, core: ModelCore) -> SequenceLayout:
        """The layout of a model's sequences."""
        return cls(
            fingerprint(core),
            core.pools.block_parts,
            core.pools.block_size,
            core.limits.max_seq_len,
            core.config.vocab_size,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """What :func:`read_sequence` read; ``parts`` are as ``KvPools.read`` gives them."""

    header: SequenceHeader
    tokens: Ints
    parts: list[Array]
    sections: dict[str, bytes] = field(default_factory=dict)


def fingerprint(core: ModelCore) -> str:
    """What the bits of a model's KV depend on, as ``name=value`` words.

    Configuration, weights in the formats they have in memory, the cache's type and block size,
    and the instruction set. Matrices of more than 1 MiB enter with 256 samples of 1 KiB.
    """
    weights = hashlib.sha256()
    held: Any = core.network.weights
    for name, format in sorted(held.formats.items()):
        weights.update(f"{name}:{format};".encode())
    for name, vector in sorted(held.vectors.items()):
        weights.update(name.encode() + vector.tobytes())
    for names, matrix in sorted(held.matrices.items()):
        size = matrix.data.nbytes
        weights.update(f"{'+'.join(names)}:{size};".encode())
        starts, count = [0], size
        if size > _SAMPLED:
            starts = np.linspace(0, size - _SAMPLE_BYTES, _SAMPLES, dtype=np.int64).tolist()
            count = _SAMPLE_BYTES
        for piece in core.runtime.read_bytes(matrix.data, starts, count):
            weights.update(piece)
    words = {
        "config": hashlib.sha256(repr(core.config).encode()).hexdigest()[:16],
        "weights": weights.hexdigest()[:32],
        "kv": core.pools.dtype,
        "block": core.pools.block_size,
        "numerics": core.runtime.fingerprint,
    }
    return " ".join(f"{name}={value}" for name, value in words.items())


def write_sequence(
    writer: BinaryIO,
    header: SequenceHeader,
    tokens: Ints,
    parts: Iterable[Array],
    sections: Mapping[str, bytes] | None = None,
) -> None:
    """Write one sequence.

    Parameters
    ----------
    writer : binary file
        Written to in order, from where it stands.
    header : SequenceHeader
    tokens : int32 [seq_len]
    parts : iterable of arrays [blocks, …]
        Layer by layer, K then V, as ``KvPools.read`` gives them; taken two at a time.
    sections : mapping of str to bytes, optional

    Raises
    ------
    InvalidArgumentError
        Header, tokens and parts disagree.
    """
    header.check()
    if len(tokens) != header.seq_len:
        raise InvalidArgumentError(f"{len(tokens)} tokens for seq_len {header.seq_len}")
    target = _Target(writer)
    target.put(MAGIC + struct.pack("<I", VERSION))
    target.put_text(header.fingerprint)
    target.put(struct.pack("<4q", *(getattr(header, name) for name in _COUNTS)))
    target.put(np.ascontiguousarray(tokens, "<i4").tobytes())
    pending = iter(parts)
    for keys in pending:
        values = next(pending, ())
        if len(values) != len(keys):
            raise InvalidArgumentError(f"{len(keys)} blocks of K, {len(values)} of V in a layer")
        for k_block, v_block in zip(keys, values, strict=True):
            target.put(k_block.tobytes())
            target.put(v_block.tobytes())
    target.put(struct.pack("<I", len(sections or {})))
    for name, content in (sections or {}).items():
        target.put_text(name)
        target.put(struct.pack("<Q", len(content)))
        target.put(content)
    target.put(struct.pack("<I", target.checksum))


def read_sequence(reader: BinaryIO, layout: SequenceLayout) -> SavedSequence:
    """Read one sequence that a model of this layout wrote, and no byte more.

    Raises
    ------
    InvalidArgumentError
        The file is of another kind, version or model, is damaged, or ends too early.
    """
    source = _Source(reader)
    if source.take(len(MAGIC), "magic") != MAGIC:
        raise InvalidArgumentError("this is not a saved sequence: it does not begin with ATLASSEQ")
    (version,) = struct.unpack("<I", source.take(4, "version"))
    if version != VERSION:
        raise InvalidArgumentError(
            f"version of the saved sequence is {version}; allowed: {VERSION}"
        )
    _require_same(source.take_text("fingerprint"), layout.fingerprint)
    counts = struct.unpack("<4q", source.take(32, "counts"))
    header = SequenceHeader(layout.fingerprint, *counts)
    if not 0 <= header.seq_len <= layout.max_seq_len:
        raise InvalidArgumentError(
            f"seq_len of the saved sequence is {header.seq_len}; "
            f"allowed: 0 … max_seq_len {layout.max_seq_len}"
        )
    header.check()
    tokens = np.empty(header.seq_len, "<i4")
    source.fill(tokens, "token ids")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < layout.vocab_size:
        raise InvalidArgumentError(
            f"the saved sequence holds ids {tokens.min()} … {tokens.max()}; "
            f"allowed: 0 … {layout.vocab_size - 1}"
        )
    num_blocks = -(-header.seq_len // layout.block_size)
    parts = [np.empty((num_blocks, *shape), dtype) for shape, dtype in layout.block_parts]
    for layer_idx, (keys, values) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        for block in range(num_blocks):
            source.fill(keys[block], f"K of layer {layer_idx}")
            source.fill(values[block], f"V of layer {layer_idx}")
    sections: dict[str, bytes] = {}
    (count,) = struct.unpack("<I", source.take(4, "number of sections"))
    for _ in range(count):
        name = source.take_text("name of a section")
        (size,) = struct.unpack("<Q", source.take(8, f"size of section {name!r}"))
        sections[name] = source.take(size, f"section {name!r}")
    expected = source.checksum
    (checksum,) = struct.unpack("<I", source.take(4, "checksum"))
    if checksum != expected:
        raise InvalidArgumentError("the saved sequence is damaged: its checksum does not match")
    return SavedSequence(header, tokens.astype(np.int32), parts, sections)


def _require_same(found: str, expected: str) -> None:
    if found == expected:
        return
    theirs, ours = found.split(" "), expected.split(" ")
    differing = [
        f"{word} (here {mine})" for word, mine in zip(theirs, ours, strict=False) if word != mine
    ]
    raise InvalidArgumentError(
        "the sequence was saved by another model or with other numerics: "
        + (", ".join(differing) or f"{found!r} (here {expected!r})")
    )


class _Target:
    """A writer with a running checksum."""

    def __init__(self, writer: BinaryIO) -> None:
        self._writer = writer
        self.checksum = 0

    def put(self, content: bytes) -> None:
        self.checksum = zlib.crc32(content, self.checksum)
        rest = memoryview(content)
        while len(rest):
            written = self._writer.write(rest)
            if not written:
                raise InvalidArgumentError(f"writer took {written!r} of {len(rest)} bytes")
            rest = rest[written:]

    def put_text(self, text: str) -> None:
        encoded = text.encode()
        if len(encoded) > _MAX_NAME:
            raise InvalidArgumentError(f"a name of {len(encoded)} bytes; allowed: {_MAX_NAME}")
        self.put(struct.pack("<I", len(encoded)) + encoded)


class _Source:
    """A reader with a running checksum, which never takes more than was asked for."""

    def __init__(self, reader: BinaryIO) -> None:
        self._reader = reader
        self.checksum = 0

    def take(self, size: int, what: str) -> bytes:
        """Exactly ``size`` bytes."""
        taken = bytearray()
        while len(taken) < size:
            asked = min(size - len(taken), _PIECE)
            piece = self._reader.read(asked)
            if not isinstance(piece, bytes | bytearray | memoryview) or len(piece) > asked:
                raise InvalidArgumentError(
                    f"reader gave {type(piece).__name__}; allowed: up to {asked} bytes"
                )
            if not len(piece):
                raise InvalidArgumentError(
                    f"the saved sequence ends within its {what}: {len(taken)} of {size} bytes"
                )
            taken += piece
        self.checksum = zlib.crc32(taken, self.checksum)
        return bytes(taken)

    def fill(self, array: Array, what: str) -> None:
        """As many bytes as the array, which is contiguous, holds."""
        taken = np.frombuffer(self.take(array.nbytes, what), array.dtype)
        array[...] = taken.reshape(array.shape)

    def take_text(self, what: str) -> str:
        (size,) = struct.unpack("<I", self.take(4, what))
        if size > _MAX_NAME:
            raise InvalidArgumentError(
                f"the saved sequence's {what} has {size} bytes; allowed: {_MAX_NAME}"
            )
        try:
            return self.take(size, what).decode()
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"the saved sequence's {what} is not UTF-8: {error}"
            ) from None
