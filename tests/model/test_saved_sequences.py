"""Saved sequences: bitwise the same afterwards, and nothing foreign or damaged gets in."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.cache.sequence_file import (
    SavedSequence,
    SequenceHeader,
    SequenceLayout,
    fingerprint,
    read_sequence,
    write_sequence,
)
from atlas.errors import CapabilityError, InvalidArgumentError, KvExhausted, SequenceStateError
from atlas.model import Model
from atlas.model.load import LoadedModel
from tests.helpers.random_model import load_random, random_model, shared_random
from tests.model.checks import PROMPT, bits, prefilled, row_after, state, unchanged

TEXT = [*PROMPT, *PROMPT[::-1]]
N = len(TEXT)
OPTIONS: dict[str, Any] = {"threads": 1, "kv_tokens": 320, "max_seq_len": 200}


def save(model: Model, text: list[int] = TEXT, num_prompt: int = 30) -> bytes:
    """A saved sequence: a prompt, and the rest of the text as step tokens."""
    seq = prefilled(model, text[:num_prompt])
    for token in text[num_prompt:]:
        model.forward.decode(token, seq)
    writer = io.BytesIO()
    model.lifecycle.save_sequence_state(seq, writer)
    model.lifecycle.free_sequence(seq)
    return writer.getvalue()


@cache
def image() -> bytes:
    """One of the model that ``loaded`` is."""
    with random_model(**OPTIONS) as loaded:
        return save(loaded.model)


def blocks_of(text: list[int]) -> int:
    return -(-len(text) // 16)


@pytest.mark.contract("lifecycle.save_sequence_state", "lifecycle.restore_sequence_state")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_a_restored_sequence_continues_bitwise(loaded: LoadedModel, length: int) -> None:
    """In another process's model, say: here another model of the same weights."""
    model, text = loaded.model, TEXT[:length]
    raw = save(model, text, max(1, length - 3))
    with random_model(**OPTIONS | {"threads": 2}) as other:
        lifecycle = other.model.lifecycle
        occupied = prefilled(other.model, PROMPT[:5])
        seq = lifecycle.alloc_sequence()
        lifecycle.restore_sequence_state(seq, blocks_of(text), io.BytesIO(raw))
        assert seq.tokens.tolist() == text
        assert (seq.seq_len, seq.prompt_len) == (length, max(1, length - 3))
        assert seq.kv_valid_tokens == length
        assert lifecycle.num_free_blocks == 20 - 1 - blocks_of(text)
        for token in (3, 141, 59):
            text.append(token)
            assert bits(other.model.forward.decode(token, seq)) == row_after(model, text)
        assert bits(other.model.forward.decode(1, occupied)) == row_after(model, [*PROMPT[:5], 1])


@pytest.mark.contract("lifecycle.save_sequence_state")
def test_saving_changes_nothing(loaded: LoadedModel) -> None:
    model = loaded.model
    seq = prefilled(model, TEXT)
    writer = io.BytesIO()
    with unchanged(model, seq):
        model.lifecycle.save_sequence_state(seq, writer)
    core = loaded.core
    kv = b"".join(
        pool[block].tobytes()
        for layer in zip(core.pools.keys, core.pools.values, strict=True)
        for block in seq.block_table
        for pool in layer
    )
    assert len(kv) == 3 * model.lifecycle.kv_block_bytes
    assert kv in writer.getvalue()
    assert len(writer.getvalue()) - len(kv) < 600
    model.verify.decode_verify([1, 2], seq)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="verify"):
        model.lifecycle.save_sequence_state(seq, io.BytesIO())


def test_an_empty_sequence_can_be_saved(model: Model) -> None:
    lifecycle, writer = model.lifecycle, io.BytesIO()
    lifecycle.save_sequence_state(lifecycle.alloc_sequence(), writer)
    seq = lifecycle.alloc_sequence()
    lifecycle.restore_sequence_state(seq, 0, io.BytesIO(writer.getvalue()))
    assert (seq.seq_len, lifecycle.num_free_blocks) == (0, 20)


@pytest.mark.contract("lifecycle.restore_sequence_state")
def test_restore_takes_the_blocks_it_is_told_to(model: Model) -> None:
    lifecycle, seq = model.lifecycle, model.lifecycle.alloc_sequence()
    for num_blocks in (-1, 14):
        with (
            unchanged(model, seq),
            pytest.raises(InvalidArgumentError, match=f"num_blocks is {num_blocks}"),
        ):
            lifecycle.restore_sequence_state(seq, num_blocks, io.BytesIO(image()))
    with unchanged(model, seq), pytest.raises(InvalidArgumentError, match=r"is 2; .* fills 3"):
        lifecycle.restore_sequence_state(seq, 2, io.BytesIO(image()))
    lifecycle.restore_sequence_state(seq, 13, io.BytesIO(image()))
    assert (seq.seq_len, len(seq.block_table)) == (N, 13)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="holds 40 positions"):
        lifecycle.restore_sequence_state(seq, 3, io.BytesIO(image()))


@pytest.mark.contract("lifecycle.restore_sequence_state")
def test_a_pool_that_is_too_full(model: Model) -> None:
    lifecycle = model.lifecycle
    hog, seq, reader = lifecycle.alloc_sequence(), lifecycle.alloc_sequence(), io.BytesIO(image())
    second = lifecycle.alloc_sequence()
    lifecycle.reserve(hog, 200)
    lifecycle.reserve(second, 80)
    with unchanged(model, seq), pytest.raises(KvExhausted, match="3 KV blocks needed, 2"):
        lifecycle.restore_sequence_state(seq, 3, reader)
    lifecycle.free_sequence(second)
    lifecycle.restore_sequence_state(seq, 3, reader)
    assert seq.tokens.tolist() == TEXT


def test_saved_files_follow_one_another(model: Model) -> None:
    """A restore reads no byte beyond its own, from a reader that gives a few at a time too."""

    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 7))

    reader = Trickle(image() + save(model, PROMPT) + b"rest")
    for text in (TEXT, PROMPT):
        seq = model.lifecycle.alloc_sequence()
        model.lifecycle.restore_sequence_state(seq, blocks_of(text), reader)
        assert bits(model.forward.decode(8, seq)) == row_after(model, [*text, 8])
    assert reader.read(9) == b"rest"


def test_blocks_of_generated_tokens_stay_what_they_are(cached: LoadedModel) -> None:
    """A sequence that began on generated blocks caches as such after a restore too."""
    model, core = cached.model, cached.core
    first = prefilled(model, TEXT[:10])
    for token in TEXT[10:33]:
        model.forward.decode(token, first)
    model.lifecycle.cache_sequence(first)
    raw = save(model, TEXT, N)
    assert core.prefix_cache is not None
    model.lifecycle.free_sequence(first)
    core.prefix_cache.clear()
    seq = model.lifecycle.alloc_sequence()
    model.lifecycle.restore_sequence_state(seq, 3, io.BytesIO(raw))
    assert (seq.prompt_len, seq.num_exact) == (N, 0)
    model.lifecycle.cache_sequence(seq)
    core.reuse_generated = False
    assert prefilled(model, TEXT).matched_tokens == 0


# -- foreign and damaged ----------------------------------------------------------------------


def refuses(model: Model, raw: bytes, reason: str, num_blocks: int = 3) -> None:
    seq = model.lifecycle.alloc_sequence()
    model.lifecycle.reserve(seq, 20)
    with unchanged(model, seq), pytest.raises(InvalidArgumentError, match=reason):
        model.lifecycle.restore_sequence_state(seq, num_blocks, io.BytesIO(raw))
    model.lifecycle.free_sequence(seq)


@pytest.mark.contract("lifecycle.restore_sequence_state")
@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("dense", {"seed": 1}, "weights="),
        ("dense", {"kv_dtype": "float16"}, "kv="),
        ("dense", {"format": "f16"}, "weights="),
        ("gemma", {}, "config="),
    ],
)
def test_another_models_sequence(
    model: Model, name: str, options: dict[str, Any], word: str
) -> None:
    try:
        with random_model(name, **OPTIONS | options) as other:
            raw = save(other.model)
    except CapabilityError:
        pytest.skip("this CPU target has no float16 KV")
    refuses(model, raw, rf"saved by another model .*{word}.* \(here {word}")


@pytest.mark.contract("lifecycle.restore_sequence_state")
def test_another_instruction_set(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = image()
    monkeypatch.setattr(type(loaded.core.runtime), "fingerprint", "cpu-other")
    refuses(loaded.model, raw, r"numerics=cpu-\w+ \(here numerics=cpu-other\)")


def test_one_changed_weight_is_another_model() -> None:
    loaded = load_random(**OPTIONS)
    before = fingerprint(loaded.core)
    weights: Any = loaded.core.network.weights
    weights.vectors["final_norm"][3] += 1
    try:
        assert fingerprint(loaded.core) != before
    finally:
        weights.vectors["final_norm"][3] -= 1
    assert fingerprint(loaded.core) == before
    loaded.core.close()


@pytest.mark.contract("lifecycle.restore_sequence_state")
def test_what_is_no_saved_sequence(model: Model) -> None:
    refuses(model, b"", "ends within its magic: 0 of 8 bytes")
    refuses(model, b"GGUF" + image(), "not a saved sequence")
    refuses(model, image()[:8] + struct.pack("<I", 2) + image()[12:], "version .* is 2; allowed: 1")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    """Bits flipped, bytes lost, bytes put in: refused, and the sequence is as before."""
    raw = bytearray(image())
    at = data.draw(st.one_of(st.integers(0, 400), st.integers(0, len(raw) - 1)))
    way = data.draw(st.sampled_from(["flip", "cut", "drop", "insert"]))
    if way == "flip":
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    elif way == "cut":
        del raw[at:]
    elif way == "drop":
        del raw[at]
    else:
        raw[at:at] = bytes([raw[at] ^ 0x55])
    loaded = shared_random("dense", **OPTIONS)
    model = loaded.model
    seq = model.lifecycle.alloc_sequence()
    before = state(seq), model.lifecycle.num_free_blocks
    with pytest.raises(InvalidArgumentError):
        model.lifecycle.restore_sequence_state(seq, 13, io.BytesIO(bytes(raw)))
    assert (state(seq), model.lifecycle.num_free_blocks) == before


def forged(core: Any, **changes: Any) -> bytes:
    """A file with a valid checksum, whose counts or ids are not."""
    layout = SequenceLayout.of(core)
    counts = {"seq_len": 2, "prompt_len": 2, "exact_len": 2, "kv_valid_tokens": 2}
    counts |= {name: value for name, value in changes.items() if name in counts}
    words = layout.fingerprint.encode()
    raw = b"ATLASSEQ" + struct.pack("<II", 1, len(words)) + words
    raw += struct.pack("<4q", *counts.values())
    raw += np.array(changes.get("tokens", [1, 2]), "<i4").tobytes()
    raw += bytes(sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in layout.block_parts))
    raw += changes.get("sections", struct.pack("<I", 0))
    return raw + struct.pack("<I", zlib.crc32(raw))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": -1}, "seq_len .* is -1"),
        ({"seq_len": 201}, "seq_len .* is 201; allowed: 0 … max_seq_len 200"),
        ({"seq_len": 2**62}, "seq_len"),
        ({"seq_len": 200}, "ends within its"),
        ({"prompt_len": 3}, "prompt_len is 3; allowed: 0 … seq_len 2"),
        ({"prompt_len": -1}, "prompt_len is -1"),
        ({"prompt_len": 1}, "exact_len is 2; allowed: 0 … prompt_len 1"),
        ({"kv_valid_tokens": 3}, "kv_valid_tokens is 3"),
        ({"tokens": [1, 203]}, "ids 1 … 203; allowed: 0 … 202"),
        ({"tokens": [-1, 2]}, "ids -1 … 2"),
        ({"sections": struct.pack("<I", 2**32 - 1)}, "name of a section"),
        ({"sections": struct.pack("<II", 1, 2**31)}, "has 2147483648 bytes; allowed: 4096"),
        ({"sections": struct.pack("<II3sQ", 1, 3, b"abc", 2**63)}, "within its section 'abc'"),
        ({"sections": struct.pack("<II2sQ", 1, 2, b"\xff\xff", 0)}, "not UTF-8"),
    ],
)
def test_counts_that_lie(loaded: LoadedModel, changes: dict[str, Any], reason: str) -> None:
    good = forged(loaded.core)
    loaded.model.lifecycle.restore_sequence_state(
        loaded.model.lifecycle.alloc_sequence(), 1, io.BytesIO(good)
    )
    refuses(loaded.model, forged(loaded.core, **changes), reason, 13)


@pytest.mark.parametrize("gives", [None, "text", b"too many bytes"])
def test_a_reader_that_misbehaves(model: Model, gives: Any) -> None:
    class Reader(io.RawIOBase):
        def read(self, size: int = -1, /) -> Any:
            return gives

    seq, reader = model.lifecycle.alloc_sequence(), Reader()
    broken: Any = reader
    with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="reader gave"):
        model.lifecycle.restore_sequence_state(seq, 3, broken)


def test_a_reader_that_raises(model: Model) -> None:
    class Reader(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 3000:
                raise OSError("the disk is gone")
            return super().read(size)

    seq = model.lifecycle.alloc_sequence()
    with unchanged(model, seq), pytest.raises(OSError, match="gone"):
        model.lifecycle.restore_sequence_state(seq, 3, Reader(image()))


# -- the file itself --------------------------------------------------------------------------


@pytest.fixture
def written(loaded: LoadedModel) -> Callable[..., SavedSequence]:
    """Write and read back a sequence of two tokens with the given sections."""
    layout = SequenceLayout.of(loaded.core)
    parts = [np.full((1, *shape), i, dtype) for i, (shape, dtype) in enumerate(layout.block_parts)]

    def through(sections: dict[str, bytes]) -> SavedSequence:
        header = SequenceHeader(layout.fingerprint, 2, 1, 0, 2)
        file = io.BytesIO()
        write_sequence(file, header, np.array([4, 5], np.int32), parts, sections)
        file.seek(0)
        saved = read_sequence(file, layout)
        assert saved.header == header
        assert saved.tokens.tolist() == [4, 5]
        for part, again in zip(parts, saved.parts, strict=True):
            np.testing.assert_array_equal(part, again)
        return saved

    return through


@given(st.dictionaries(st.text(max_size=12), st.binary(max_size=40), max_size=4))
@settings(max_examples=20, deadline=None)
def test_sections_come_back(sections: dict[str, bytes]) -> None:
    layout = SequenceLayout("fingerprint", (), 16, 100, 10)
    file = io.BytesIO()
    header = SequenceHeader("fingerprint", 0, 0, 0, 0)
    write_sequence(file, header, np.empty(0, np.int32), [], sections)
    file.seek(0)
    assert read_sequence(file, layout).sections == sections


def test_parts_come_back(written: Callable[..., SavedSequence]) -> None:
    assert written({}).sections == {}
    assert written({"sampler": b"123"}).sections == {"sampler": b"123"}


def test_a_file_is_not_written_from_parts_that_disagree() -> None:
    tokens, parts = np.array([1, 2], np.int32), [np.zeros((1, 2)), np.zeros((2, 2))]
    for header, given_parts, reason in (
        (SequenceHeader("f", 3, 0, 0, 0), parts, "2 tokens for seq_len 3"),
        (SequenceHeader("f", 2, 3, 0, 0), parts, "prompt_len is 3"),
        (SequenceHeader("f", 2, 0, 0, 0), parts, "1 blocks of K, 2 of V"),
        (SequenceHeader("f", 2, 0, 0, 0), parts[:1], "1 blocks of K, 0 of V"),
        (SequenceHeader("f" * 5000, 2, 0, 0, 0), [], "5000 bytes; allowed: 4096"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            write_sequence(io.BytesIO(), header, tokens, given_parts)
