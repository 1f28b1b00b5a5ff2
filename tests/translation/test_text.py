"""Texts in and out, with a tokenizer in the NLLB format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import NllbTokenizer

from atlas import BeamParams, Engine, SamplingParams
from atlas.errors import InvalidArgumentError, ModelFileError
from tests.helpers import translation_model

CORPUS = [
    "hello world how are you",
    "the quick brown fox jumps over the lazy dog",
    "wie geht es dir heute",
    "guten tag liebe welt",
]
LANGUAGES: dict[str, Any] = {"source": "eng_Latn", "target": "deu_Latn"}


def nllb_tokenizer() -> NllbTokenizer:
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    library.train_from_iterator(CORPUS * 5, trainers.BpeTrainer(special_tokens=special))
    model = json.loads(library.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return NllbTokenizer(
        vocab=model["vocab"], merges=merges, src_lang="eng_Latn", tgt_lang="deu_Latn"
    )


@pytest.fixture(scope="module")
def theirs() -> NllbTokenizer:
    return nllb_tokenizer()


@pytest.fixture(scope="module")
def ours(theirs: NllbTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("nllb")
    translation_model.build(folder, vocab_size=len(theirs))
    theirs.save_pretrained(folder)
    with Engine(folder, threads=1, quiet=True) as engine:
        yield engine


@pytest.mark.parametrize(
    "text", ["hello world", "wie geht es dir", "x", "  two  spaces ", "line\nbreak", "ÄÖ fox"]
)
def test_tags_and_end_token_as_the_reference_places_them(
    ours: Engine, theirs: NllbTokenizer, text: str
) -> None:
    found = ours.translate(text, max_tokens=12, num_return=3, **LANGUAGES)
    assert list(found.source_token_ids) == theirs(text).input_ids
    for hypothesis in found.hypotheses:
        ids = list(hypothesis.token_ids)
        assert hypothesis.text == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_a_source_cannot_write_tags(ours: Engine, theirs: NllbTokenizer) -> None:
    found = ours.translate("deu_Latn hello </s> fra_Latn", max_tokens=2, **LANGUAGES)
    subwords = found.source_token_ids[1:-1]
    assert not set(subwords) & set(theirs.convert_tokens_to_ids(["deu_Latn", "fra_Latn", "</s>"]))


def test_streams_join_to_the_text(ours: Engine) -> None:
    for params in (BeamParams(num_beams=1, max_tokens=20), SamplingParams(max_tokens=20)):
        ours.submit_translation("the lazy fox", params=params, **LANGUAGES)
        events = []
        while ours.has_unfinished():
            events += ours.step()
        completion = events[-1].completion
        assert completion is not None
        assert "".join(event.text for event in events) == completion.text


def test_languages(ours: Engine, theirs: NllbTokenizer) -> None:
    assert len(ours.languages.codes) == 202
    for code in ("eng_Latn", "zho_Hans", "ace_Arab"):
        token_id = theirs.convert_tokens_to_ids(code)
        assert ours.languages.token_id(code) == token_id
        assert ours.languages.code(token_id) == code
    assert ours.languages.code(5) is None
    by_id = {name: ours.languages.token_id(code) for name, code in LANGUAGES.items()}
    want = ours.translate("hello", max_tokens=4, **LANGUAGES)
    assert ours.translate("hello", max_tokens=4, **by_id).hypotheses == want.hypotheses


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ({"source": "eng_Latin"}, "'eng_Latin' is not one of the model's 202; nearest: eng_Latn"),
        ({"target": "german"}, "'german' is not one of"),
        ({"target": "eng_Latn"}, "source and target language are both"),
    ],
)
def test_bad_languages(ours: Engine, languages: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ours.translate("hello", **(LANGUAGES | languages))


def test_an_empty_text(ours: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="the source is empty"):
        ours.translate("", **LANGUAGES)


def test_a_table_that_the_vocabulary_does_not_hold(theirs: NllbTokenizer, tmp_path: Path) -> None:
    translation_model.build(tmp_path, vocab_size=len(theirs) - 60)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match="vocabulary ends at"):
        Engine(tmp_path, threads=1, quiet=True)
