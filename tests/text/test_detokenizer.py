"""Incremental decoding equals decoding the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from atlas.detokenizer import Detokenizer, byte_alphabet
from atlas.errors import TokenizerError
from atlas.tokenizer import Tokenizer
from tests.text.vocabularies import TEXTS, byte_level_metadata, sentencepiece_metadata

TOKENIZERS = {
    "byte-level": Tokenizer.from_gguf(byte_level_metadata()),
    "sentencepiece": Tokenizer.from_gguf(sentencepiece_metadata()),
    "no-prefix": Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False)),
}
# Every length of UTF-8, cut characters, bytes that are never valid, spaces and control tokens.
SEQUENCES = ["é", "語", "🙂", "👩‍👧", " ", "  a", "a", "\n"]
BYTES = [b"\xff", b"\xc0\x80", b"\xe8\xaa", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\x80", b"\xf5"]


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the id of the token of each single byte."""
    found: dict[int, int] = {}
    for token_id in range(tokenizer.vocab_size - 1, -1, -1):
        piece = tokenizer.token_bytes(token_id)
        if len(piece) == 1:
            found[piece[0]] = token_id
    assert len(found) == 256
    return found


@pytest.fixture(params=sorted(TOKENIZERS), scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    tokenizer = TOKENIZERS[name]
    single = byte_ids(tokenizer)
    spelled = st.sampled_from([text.encode() for text in SEQUENCES] + BYTES)
    return st.lists(
        st.one_of(
            spelled.map(lambda piece: [single[byte] for byte in piece]),
            st.sampled_from(TEXTS[:12]).map(lambda text: tokenizer.encode(text, add_special=False)),
            st.sampled_from(sorted(tokenizer.special_token_ids)).map(lambda i: [i]),
            st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i]),
        ),
        max_size=8,
    ).map(lambda parts: [token_id for part in parts for token_id in part])


CASES = st.sampled_from(sorted(TOKENIZERS)).flatmap(
    lambda name: st.tuples(st.just(name), ids_of(name), st.booleans(), st.booleans())
)


@settings(max_examples=300, deadline=None)
@given(case=CASES)
def test_pieces_join_to_the_full_decode(case: tuple[str, list[int], bool, bool]) -> None:
    name, ids, skip_special, continues = case
    tokenizer = TOKENIZERS[name]
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continues=continues)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces.append(detokenizer.flush())
    whole = tokenizer.decode(ids, skip_special=skip_special, continues=continues)
    assert "".join(pieces) == whole
    # After flush it starts afresh.
    again = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
    assert again == pieces


@settings(max_examples=100, deadline=None)
@given(case=CASES, data=st.data())
def test_a_copy_goes_its_own_way(
    case: tuple[str, list[int], bool, bool], data: st.DataObject
) -> None:
    name, ids, skip_special, continues = case
    tokenizer = TOKENIZERS[name]
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continues=continues)
    head = "".join(detokenizer.push(token_id) for token_id in ids[:cut])
    twin = detokenizer.copy()
    other = [byte_ids(tokenizer)[0xF0]]
    for branch, tail in ((twin, other), (detokenizer, ids[cut:])):
        text = head + "".join(branch.push(token_id) for token_id in tail) + branch.flush()
        whole = tokenizer.decode(ids[:cut] + tail, skip_special=skip_special, continues=continues)
        assert text == whole


def test_characters_are_given_out_whole(tokenizer: Tokenizer) -> None:
    single = byte_ids(tokenizer)
    detokenizer = Detokenizer(tokenizer, continues=True)
    pieces = [detokenizer.push(single[byte]) for byte in "aé語🙂".encode()]
    assert pieces == ["a", "", "é", "", "", "語", "", "", "", "🙂"]
    assert [detokenizer.push(single[byte]) for byte in b"\xf0\x9f\x99"] == ["", "", ""]
    assert detokenizer.num_pending_bytes == 3
    assert detokenizer.push(single[ord("b")]) == "\ufffdb"
    assert detokenizer.push(single[0xFF]) == "\ufffd"
    assert detokenizer.push(single[0xE8]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_first_space_of_sentencepiece() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    space = tokenizer.encode("a b", add_special=False)
    assert tokenizer.decode(space) == "a b"
    assert tokenizer.decode(space, continues=True) == " a b"
    assert tokenizer.decode([1, *space]) == "<s> a b"
    assert tokenizer.decode([1, *space], skip_special=True) == "a b"
    assert TOKENIZERS["no-prefix"].decode(space) == " a b"


def test_unknown_ids_are_refused_and_change_nothing(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    with pytest.raises(TokenizerError, match=f"ids run from 0 to {tokenizer.vocab_size - 1}"):
        detokenizer.push(tokenizer.vocab_size)
    ids = tokenizer.encode("hello 語", add_special=False)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == "hello 語"


def test_byte_alphabet_is_the_librarys() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == 0x20


def test_ids_of_a_padded_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    size = max(tokenizer.tokens) + 1
    stream = Detokenizer(tokenizer, vocab_size=size + 8)
    assert stream.push(size + 7) == ""
    with pytest.raises(TokenizerError, match="vocabulary"):
        stream.push(size + 8)
    with pytest.raises(TokenizerError, match="vocabulary"):
        Detokenizer(tokenizer).push(size)
