"""Stop strings: what is withheld, what wins, and which tokens remain."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.detokenizer import Detokenizer
from atlas.errors import InvalidArgumentError
from atlas.stops import StopMatcher, TextDelta, TextStream
from atlas.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_metadata, sentencepiece_metadata

STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=4)


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the stop that is complete first, of several the longest, by trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def naive_held(text: str, stops: list[str]) -> int:
    prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
    return max(n for n in range(len(text) + 1) if text[len(text) - n :] in prefixes | {""})


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.text("ab🙂c", max_size=5), max_size=8), stops=STOPS)
def test_matcher_equals_the_naive_definition(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    whole, given_out = "", ""
    expected, expected_stop = naive_stop("".join(pieces), stops)
    for piece in pieces:
        whole += piece
        text, stop = matcher.push(piece)
        given_out += text
        before, so_far = naive_stop(whole, stops)
        assert stop == so_far
        if stop is None:
            held = naive_held(whole, stops)
            assert matcher.num_held == held
            assert given_out == whole[: len(whole) - held]
        else:
            assert given_out == before
    given_out += matcher.flush()
    assert (given_out, matcher.matched) == (expected, expected_stop)


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (["STOP"], ["a ST", "OP b"], "a ", "STOP"),
        (["STOP"], ["a ST", "ART"], "a START", None),
        (["STOP"], ["a STO"], "a STO", None),
        (["abcd", "bc"], ["abcd"], "a", "bc"),  # complete first
        (["bc", "abc"], ["xabc"], "x", "abc"),  # complete together: the longest
        (["aab"], ["aaaab"], "aa", "aab"),
        (["\n\n", "\n"], ["x\n\n"], "x", "\n"),
        (["🙂"], ["x🙂y"], "x", "🙂"),
        ([], ["abc"], "abc", None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], text: str, stop: str | None) -> None:
    matcher = StopMatcher(stops)
    given_out = "".join(matcher.push(piece)[0] for piece in pieces) + matcher.flush()
    assert (given_out, matcher.matched) == (text, stop)


def test_text_after_a_stop_is_dropped() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("c") == ("", "x")
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", ["STOP", [""], ["a", None], [3]])
def test_bad_stops_are_refused(stops: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="stop"):
        StopMatcher(stops)


TOKENIZERS = [
    Tokenizer.from_gguf(byte_level_metadata()),
    Tokenizer.from_gguf(sentencepiece_metadata()),
]
WORDS = ["a", "b", "ab", " a", "ba", "🙂", "語", " "]


def token_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    cut = [tokenizer.encode(word, add_special=False) for word in WORDS]
    emoji = {tokenizer.token_bytes(i): i for i in single}
    parts = st.one_of(
        st.sampled_from(cut),
        st.sampled_from("🙂語é".encode()).map(lambda byte: [emoji[bytes([byte])]]),
        st.sampled_from(sorted(tokenizer.special_token_ids)).map(lambda i: [i]),
    )
    return st.lists(parts, max_size=12).map(lambda lists: [i for part in lists for i in part])


@settings(max_examples=400, deadline=None)
@given(data=st.data(), stops=STOPS, include_stop=st.booleans(), skip=st.booleans())
def test_stream_equals_the_naive_definition(
    data: st.DataObject, stops: list[str], include_stop: bool, skip: bool
) -> None:
    tokenizer = TOKENIZERS[data.draw(st.integers(0, 1))]
    ids = data.draw(token_lists(tokenizer))
    stream = TextStream(tokenizer, stops, include_stop=include_stop, skip_special=skip)
    # Where the text of each token ends, by decoding every prefix.
    ends = [len(tokenizer.decode(ids[: n + 1], skip_special=skip)) for n in range(len(ids))]
    text, stop = naive_stop(tokenizer.decode(ids, skip_special=skip), stops)
    if stop is not None and include_stop:
        text += stop
    given_out = ""
    for delta in [*map(stream.push, ids), stream.finish()]:
        given_out += delta.text
        assert text.startswith(given_out)
        if stream.stop is None:
            pushed = [end for end in ends if end <= len(given_out)]
            assert delta.num_tokens_final <= len(pushed)
    assert (given_out, stream.stop) == (text, stop)
    # Tokens after the one that completed the stop are not taken.
    detokenizer, certain, reached = Detokenizer(tokenizer, skip_special=skip), "", 0
    while reached < len(ids) and naive_stop(certain, stops)[1] is None:
        certain += detokenizer.push(ids[reached])
        reached += 1
    kept = sum(1 for end in ends[:reached] if end <= len(text))
    assert stream.num_tokens_final == kept


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    stops=st.just([]) | STOPS,
    cuts=st.lists(st.integers(0, 40), max_size=3),
    skip=st.booleans(),
    continues=st.booleans(),
)
def test_many_tokens_at_once_are_as_one_by_one(
    data: st.DataObject, stops: list[str], cuts: list[int], skip: bool, continues: bool
) -> None:
    tokenizer = TOKENIZERS[data.draw(st.integers(0, 1))]
    ids = data.draw(token_lists(tokenizer))
    options = {"skip_special": skip, "continues": continues, "vocab_size": tokenizer.vocab_size + 9}
    single, several = (TextStream(tokenizer, stops, **options) for _ in range(2))
    for first, last in pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        part = [*ids[first:last], tokenizer.vocab_size + 3]  # ids of padding have no text
        given_out = "".join(single.push(token_id).text for token_id in part)
        assert several.extend(part) == given_out
        assert several.num_tokens_final == single.num_tokens_final
        assert several.stop == single.stop
    assert several.finish() == single.finish()


def ids_for(tokenizer: Tokenizer, *texts: str) -> list[int]:
    known = {tokenizer.token_bytes(i).decode("latin-1"): i for i in range(tokenizer.vocab_size)}
    return [known[text] for text in texts]


def test_a_stop_in_the_middle_of_a_token_trims_the_token() -> None:
    tokenizer = TOKENIZERS[0]
    ids = ids_for(tokenizer, "x", "self", "y")
    stream = TextStream(tokenizer, ["el"])
    assert stream.push(ids[0]) == TextDelta("x", 1)
    assert stream.push(ids[1]) == TextDelta("s", 1, "el")
    assert stream.push(ids[2]) == TextDelta("", 1, "el")
    assert stream.finish() == TextDelta("", 1, "el")


def test_a_token_that_ends_at_the_cut_stays() -> None:
    tokenizer = TOKENIZERS[0]
    ids = ids_for(tokenizer, "self", "!", "!")
    stream = TextStream(tokenizer, ["!!"])
    assert stream.push(ids[0]) == TextDelta("self", 1)
    assert stream.push(ids[1]) == TextDelta("", 1)
    assert stream.push(ids[2]) == TextDelta("", 1, "!!")
    included = TextStream(tokenizer, ["!!"], include_stop=True)
    assert [included.push(i).num_tokens_final for i in ids] == [1, 1, 3]


def test_held_tokens_are_released_at_the_end() -> None:
    tokenizer = TOKENIZERS[0]
    ids = ids_for(tokenizer, "a", "!", "\xf0")
    stream = TextStream(tokenizer, ["!?"])
    assert [stream.push(i) for i in ids] == [TextDelta("a", 1), TextDelta("", 1), TextDelta("", 1)]
    assert stream.finish() == TextDelta("!\ufffd", 3)
