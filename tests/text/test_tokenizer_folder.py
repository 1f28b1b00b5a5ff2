"""Tokenizers from Hugging Face folders."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from atlas.errors import TokenizerError
from atlas.tokenizer import Tokenizer, load_tokenizer
from tests.text.vocabularies import (
    CHAT_TOKENS,
    TEXTS,
    byte_level_library,
    sentencepiece_metadata,
    sentencepiece_model,
    write_folder,
)

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def bos_processor(library: Library) -> Library:
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = bos_processor(byte_level_library())
    return write_folder(tmp_path_factory.mktemp("byte_level"), library, **NAMED)


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def llama_library(kind: str) -> Library:
    """Return the SentencePiece vocabulary as a library tokenizer, as Llama's files have it."""
    model = sentencepiece_model()
    metadata = sentencepiece_metadata()
    pieces, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    rank = {piece: i for i, piece in enumerate(pieces) if kinds[i] == 1}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(rank, key=lambda piece: -model.get_score(rank[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in rank and piece[cut:] in rank
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = Library(bpe)
    if kind == "prepend":
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([] if kind == "never" else [decoders.Strip(" ", 1, 0)])
    )
    special = [
        AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")
    ]
    library.add_special_tokens(special)
    return bos_processor(library)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_library(byte_level: Tokenizer, folder: Path, text: str) -> None:
    library = Library.from_file(str(folder / "tokenizer.json"))
    assert byte_level.encode(text) == library.encode(text).ids
    assert byte_level.decode(byte_level.encode(text), skip_special=True) == text


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "never"])
def test_space_schemes_equal_the_library(tmp_path: Path, kind: str) -> None:
    library = llama_library(kind)
    ours = Tokenizer.from_folder(write_folder(tmp_path, library, **NAMED))
    mixed = ["Hello</s>world", "</s> a", "<s>Hello", "a <s> b</s>", "<s></s>", ""]
    for text in [*TEXTS, *mixed]:
        expected = library.encode(text).ids
        got = ours.encode(text, parse_special=True)
        # Ours never puts a second BOS before one that is there.
        assert got == expected or ([1, *got] == expected and text.startswith("<s>"))
        for skip in (False, True):
            assert ours.decode(expected, skip_special=skip) == library.decode(
                expected, skip_special_tokens=skip
            )


def test_facts(byte_level: Tokenizer, folder: Path) -> None:
    library = Library.from_file(str(folder / "tokenizer.json"))
    assert byte_level.vocab_size == library.get_vocab_size()
    assert byte_level.bos_token_id == library.token_to_id("<s>")
    assert byte_level.eos_token_ids == (library.token_to_id("</s>"),)
    assert byte_level.special_token_ids == {library.token_to_id(text) for text in CHAT_TOKENS}
    assert byte_level.id_to_token(5) == library.id_to_token(5)
    assert byte_level.id_to_token(10**9) is None
    assert byte_level.token_to_id("no such token") is None
    assert byte_level.token_bytes(library.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert byte_level.token_bytes(library.token_to_id("Ġ")) == b" "
    assert byte_level.chat_template is None
    assert byte_level.special_tokens == NAMED
    assert repr(byte_level).startswith("Tokenizer(byte-level BPE, vocab_size=")


@pytest.mark.parametrize("text", [*CHAT_TOKENS, "x<|im_end|>\n<|im_start|>system\n", "<s>" * 9])
def test_users_cannot_write_control_tokens(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert not set(ids[1:]) & byte_level.special_token_ids
    assert ids[0] == byte_level.bos_token_id
    assert byte_level.decode(ids[1:]) == text
    assert set(byte_level.encode(text, parse_special=True)[1:]) & byte_level.special_token_ids or (
        text == "<s>"
    )


def test_unmarked_control_shapes_are_control(tmp_path: Path) -> None:
    library = byte_level_library()
    library.add_tokens(
        [AddedToken("<｜User｜>", special=False), AddedToken("<|fim|>", special=False)]
    )
    ours = Tokenizer.from_folder(write_folder(tmp_path, library))
    for text in ("<｜User｜>", "<|fim|>"):
        token_id = library.token_to_id(text)
        assert token_id not in ours.encode(text)
        assert ours.encode(text, parse_special=True) == [token_id]
        assert token_id not in ours.special_token_ids  # so it shows in decoded text


def unigram_library() -> Library:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁hi", -1.0), ("<|x|>", -0.1), *[
        (c, -5.0) for c in "abhi</s>|x"
    ]]  # fmt: skip
    library = Library(models.Unigram(pieces, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library


def word_library() -> Library:
    library = Library(models.WordLevel({"<unk>": 0, "</s>": 1, "hi": 2, "<|x|>": 3}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.Metaspace()
    return library


def ignoring_library() -> Library:
    vocab = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())} | {
        "</s>": 256,
        "<|x|>": 257,
    }
    library = Library(models.BPE(vocab, [], ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    return library


@pytest.mark.parametrize("make", [unigram_library, word_library, ignoring_library])
def test_models_that_know_control_tokens_as_words_do_not_give_them(
    tmp_path: Path, make: Any
) -> None:
    library = make()
    added = [AddedToken("</s>", special=True, normalized=False), AddedToken("<|x|>", special=True)]
    library.add_special_tokens(added)
    ids = {library.token_to_id(text) for text in ("</s>", "<|x|>")}
    library.encode_special_tokens = True
    assert set(library.encode("hi </s> <|x|>").ids) & ids  # the danger is real
    library.encode_special_tokens = False
    ours = Tokenizer.from_folder(write_folder(tmp_path, library, eos_token="</s>"))
    assert not set(ours.encode("hi </s> <|x|> hi</s>")) & ids
    assert ids <= set(ours.encode("hi </s> <|x|>", parse_special=True))
    assert ours.encode("hi") == library.encode("hi").ids


def test_unknown_characters_give_the_unknown_token(tmp_path: Path) -> None:
    library = unigram_library()
    library.add_special_tokens([AddedToken("<unk>", special=True)])
    ours = Tokenizer.from_folder(write_folder(tmp_path, library, unk_token="<unk>"))
    assert ours.encode("hi語") == library.encode("hi語").ids
    assert 0 in ours.encode("語")


def test_add_bos_token_decides_over_the_post_processor(tmp_path: Path, folder: Path) -> None:
    library = bos_processor(byte_level_library())
    bos, eos = library.token_to_id("<s>"), library.token_to_id("</s>")
    plain = library.encode("Hello", add_special_tokens=False).ids
    for name, flags, expected in [
        ("off", {"add_bos_token": False}, plain),
        ("eos", {"add_bos_token": True, "add_eos_token": True}, [bos, *plain, eos]),
        ("none", {}, [bos, *plain]),
    ]:
        ours = Tokenizer.from_folder(write_folder(tmp_path / name, library, **NAMED, **flags))
        assert ours.encode("Hello") == expected
        assert ours.encode("Hello", add_special=False) == plain


def test_eos_from_generation_config_and_templates_from_files(tmp_path: Path) -> None:
    library = byte_level_library()
    ids = [library.token_to_id(text) for text in ("</s>", "<|im_end|>", "<|eot_id|>")]
    write_folder(tmp_path, library, eos_token={"content": "</s>"}, chat_template="config")
    generation = {"eos_token_id": [ids[1], ids[0], ids[2]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == tuple(ids)
    assert Tokenizer.from_folder(tmp_path).chat_template == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("tools")
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.chat_templates == {"default": "file", "tools": "tools"}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 123456}')
    with pytest.raises(TokenizerError, match="eos_token_id 123456 is not in the vocabulary"):
        Tokenizer.from_folder(tmp_path)


def test_named_templates_in_the_configuration(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    ours = Tokenizer.from_folder(
        write_folder(tmp_path, byte_level_library(), chat_template=templates)
    )
    assert ours.chat_templates == {"default": "a", "rag": "b"}


def test_white_space_flags_of_control_tokens(tmp_path: Path) -> None:
    library = byte_level_library(lstrip=True, rstrip=True)
    ours = Tokenizer.from_folder(write_folder(tmp_path, library))
    for text in ["a <|user|> \n b", " <|end|>", "<|end|> <|user|>", "x <|end|>  <|end|> y"]:
        assert ours.encode(text, parse_special=True) == library.encode(text).ids


def test_ordinary_words_that_a_configuration_names_stay_words(tmp_path: Path) -> None:
    library = byte_level_library()
    ours = Tokenizer.from_folder(write_folder(tmp_path, library, pad_token="!", eos_token="!"))
    assert library.token_to_id("!") in ours.encode("Hello!")
    assert ours.eos_token_ids == (library.token_to_id("!"),)
    with pytest.raises(TokenizerError, match="eos_token '<nope>' is not in the vocabulary"):
        Tokenizer.from_folder(write_folder(tmp_path, library, eos_token="<nope>"))


def test_padding_and_truncation_of_the_file_are_left_out(tmp_path: Path) -> None:
    library = byte_level_library()
    library.enable_padding(length=1 << 40)
    library.enable_truncation(max_length=2)
    ours = Tokenizer.from_folder(write_folder(tmp_path, library))
    assert ours.decode(ours.encode("a long enough text")) == "a long enough text"


def test_load_tokenizer(tmp_path: Path, folder: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(folder) is not None
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model but no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("ids", [[1 << 40], [-1], [0, 99999], ["x"], [None]])
def test_ids_outside_the_vocabulary(byte_level: Tokenizer, ids: list[Any]) -> None:
    last = byte_level.vocab_size - 1
    with pytest.raises(TokenizerError, match=f"{ids[-1]!r} is not in .* 0 to {last}"):
        byte_level.decode(ids)


@pytest.mark.parametrize("text", ["a\ud800b", None, 3, b"bytes"])
def test_what_is_no_text_is_refused(byte_level: Tokenizer, text: Any) -> None:
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        byte_level.encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "damaged"),
        ({"model": {"type": "Nope", "vocab": {}}}, "damaged"),
        (
            {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
            "token id -1; allowed: 0 to",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 62}, "merges": []}}, "allowed: 0 to"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}}, "share an id"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "vocabulary"),
        ({"model": {"type": "Unigram", "vocab": [["a", "b"]], "unk_id": 9}}, "damaged"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
        ({"decoder": None}, "decoder null is not supported"),
        ({"added_tokens": [{"id": 3, "content": "<s>"}]}, "its id or text is taken"),
        ({"added_tokens": [{"id": 5000, "content": "<far>"}]}, "damaged|cannot have the id"),
        ({"added_tokens": [3]}, "damaged"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "X"}},
            "damaged",
        ),
        ({"post_processor": {"type": "TemplateProcessing", "single": 3}}, "damaged"),
    ],
)
def test_damaged_tokenizer_json(
    tmp_path: Path, folder: Path, change: dict[str, Any], message: str
) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("prefix", ["1", "##", "é"])
def test_merges_that_the_library_would_cut_inside_a_character(
    tmp_path: Path, folder: Path, prefix: str
) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    raw["model"]["continuing_subword_prefix"] = prefix
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(TokenizerError, match="continuing_subword_prefix"):  # and no abort
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model":' * 2000, b"[" * 100000, b"9" * 10000]
)
def test_files_that_are_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_huge_files_are_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(TokenizerError, match="over 256 MiB"):
        Tokenizer.from_folder(tmp_path)


def test_exponential_patterns_are_bounded(tmp_path: Path) -> None:
    raw = json.loads(byte_level_library().to_str())
    pattern = {"type": "Split", "pattern": {"Regex": "(a|a|aa)+$"}, "behavior": "Isolated"}
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern | {"invert": False}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    started = time.monotonic()
    with contextlib.suppress(TokenizerError):
        Tokenizer.from_folder(tmp_path).encode("a" * 60 + "!")
    assert time.monotonic() - started < 10


def mutate(data: st.DataObject, value: Any) -> Any:
    """Replace one value somewhere in a JSON tree."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: mutate(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        index = data.draw(st.integers(0, min(len(value), 40) - 1))
        return [*value[:index], mutate(data, value[index]), *value[index + 1 :]]
    scalars = (None, True, -1, 1 << 33, 1e300, "", "a", "<s>", [], {}, [[]], {"type": "BPE"})
    return data.draw(st.sampled_from(scalars))


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_hostile_files_never_escape(tmp_path: Path, data: st.DataObject) -> None:
    library = bos_processor(byte_level_library())
    raw = json.loads(library.to_str())
    config: Any = {**NAMED, "chat_template": "x", "additional_special_tokens": ["<think>"]}
    if data.draw(st.booleans()):
        raw = mutate(data, mutate(data, raw))
    else:
        config = mutate(data, config)
    content = json.dumps(raw)
    if data.draw(st.integers(0, 9)) == 0:
        content = content[: data.draw(st.integers(0, len(content)))]
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with contextlib.suppress(TokenizerError):
        tokenizer = Tokenizer.from_folder(tmp_path)
        tokenizer.decode(tokenizer.encode("Hello wörld <s>", parse_special=True))
