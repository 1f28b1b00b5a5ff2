"""NLLB's tokenizer and languages: ids, tags and end token as transformers places them, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas import Engine
from atlas.errors import InvalidArgumentError, ModelFileError, PromptTooLongError, TokenizerError
from atlas.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import nllb
from tests.helpers.nllb import CODES, ReferenceNllb, change_json
from tests.text.vocabularies import TEXTS

SENTENCES = ["Hello world", "  spaces   inside  ", "ﬁne Ａ½", "日本語のテキスト ☃", "Grüße, naïve."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ReferenceNllb:
    return nllb.build(tmp_path_factory.mktemp("nllb"))


@pytest.fixture(scope="module")
def translator(folder: ReferenceNllb) -> Iterator[Engine]:
    with Engine(folder.directory, threads=1, quiet=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(folder: ReferenceNllb) -> Tokenizer:
    found = load_tokenizer(folder.directory)
    assert found is not None
    return found


def copy_of(folder: ReferenceNllb, target: Path) -> Path:
    shutil.copytree(folder.directory, target)
    return target


# -- as transformers does it ------------------------------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS, *SENTENCES])
def test_subwords(tokenizer: Tokenizer, folder: ReferenceNllb, text: str) -> None:
    want = folder.tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.encode(text, add_special=False) == want
    got = tokenizer.decode(want, skip_special=True)
    assert got.strip() == folder.tokenizer.decode(want, skip_special_tokens=True).strip()


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_any_text_has_the_same_subwords(
    tokenizer: Tokenizer, folder: ReferenceNllb, text: str
) -> None:
    for special in folder.tokenizer.all_special_tokens:
        if special in text:  # never a tag here; transformers makes it one
            return
    want = folder.tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.encode(text, add_special=False) == want


@pytest.mark.parametrize("source", ["eng_Latn", "zho_Hant"])
@pytest.mark.parametrize("legacy", [False, True])
def test_tag_and_end_token_stand_where_transformers_puts_them(
    folder: ReferenceNllb, tmp_path: Path, source: str, legacy: bool
) -> None:
    model = copy_of(folder, tmp_path / "model")
    reference = nllb.write_tokenizer(model, legacy_behaviour=legacy)
    reference.src_lang = source
    with Engine(model, threads=1, quiet=True) as engine:
        for text in SENTENCES:
            got = engine.translate(text, source=source, target="deu_Latn", max_tokens=1)
            assert list(got.source_token_ids) == reference(text).input_ids
            assert got.source_token_ids[-1 if legacy else 0] == engine.languages.token_id(source)


@pytest.mark.parametrize("target", ["deu_Latn", "fra_Latn", "jpn_Jpan"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_translations_are_those_of_transformers(
    translator: Engine, folder: ReferenceNllb, target: str, num_beams: int
) -> None:
    """The target's tag is forced, and no tag, end token or space of it is in the text."""
    for text in SENTENCES:
        got = translator.translate(
            text, source="eng_Latn", target=target, num_beams=num_beams, max_tokens=16
        )
        want = folder.translate(text, "eng_Latn", target, num_beams=num_beams, max_new_tokens=17)
        assert [got.text] == want
        assert got.text
        assert not set(got.token_ids) & {2, *map(translator.languages.token_id, CODES)}


def test_translations_that_end(tmp_path: Path) -> None:
    ending = nllb.build(tmp_path / "model", seed=6)
    reasons = []
    with Engine(ending.directory, threads=1, quiet=True) as engine:
        for target in ("deu_Latn", "fra_Latn"):
            for num_beams in (1, 4):
                got = engine.translate(
                    "Hello world", source="eng_Latn", target=target, num_beams=num_beams,
                    max_tokens=16,
                )  # fmt: skip
                reasons.append(got.finish_reason)
                assert [got.text] == ending.translate(
                    "Hello world", "eng_Latn", target, num_beams=num_beams, max_new_tokens=17
                )
                assert 2 not in got.token_ids
    assert {"stop", "length"} == set(reasons)


def test_legacy_translations_are_those_of_transformers(
    folder: ReferenceNllb, tmp_path: Path
) -> None:
    model = copy_of(folder, tmp_path / "model")
    reference = nllb.write_tokenizer(model, legacy_behaviour=True)
    legacy = ReferenceNllb(model, folder.translator, reference)
    with Engine(model, threads=1, quiet=True) as engine:
        got = engine.translate(SENTENCES[0], source="eng_Latn", target="deu_Latn", max_tokens=16)
    want = legacy.translate(SENTENCES[0], "eng_Latn", "deu_Latn", num_beams=4, max_new_tokens=17)
    assert [got.text] == want


def test_a_folder_as_transformers_4_wrote_it(
    translator: Engine, folder: ReferenceNllb, tmp_path: Path
) -> None:
    """Merges as strings, the old order of tags in the post-processor, additional special tokens."""
    model = copy_of(folder, tmp_path / "model")
    raw = json.loads((model / "tokenizer.json").read_text())
    raw["model"]["merges"] = [" ".join(merge) for merge in raw["model"]["merges"]]
    metaspace = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    raw["pre_tokenizer"] = {
        "type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
    }  # fmt: skip
    raw["decoder"] = metaspace
    single = raw["post_processor"]["single"]
    raw["post_processor"]["single"] = [single[1], single[2], single[0]]  # text, end, tag
    (model / "tokenizer.json").write_text(json.dumps(raw))
    change_json(
        model / "tokenizer_config.json",
        extra_special_tokens=None,
        legacy_behaviour=None,
        added_tokens_decoder={
            str(token["id"]): {"content": token["content"]} for token in raw["added_tokens"]
        },
    )
    (model / "special_tokens_map.json").write_text(
        json.dumps({"additional_special_tokens": CODES, "eos_token": "</s>"})
    )
    languages = {"source": "zho_Hant", "target": "eng_Latn"}
    with Engine(model, threads=1, quiet=True) as engine:
        assert engine.languages.codes == CODES
        for text in map(str.strip, SENTENCES):  # the old splitter drops spaces at the ends
            got = engine.translate(text, max_tokens=8, **languages)
            want = translator.translate(text, max_tokens=8, **languages)
            assert got.source_token_ids == want.source_token_ids
            assert got.hypotheses == want.hypotheses


def test_streamed_text_joins_to_the_translation(translator: Engine) -> None:
    languages = {"source": "eng_Latn", "target": "fra_Latn"}
    whole = translator.translate("Hello world", num_beams=1, max_tokens=12, **languages)
    request_id = translator.submit_translation(
        "Hello world", num_beams=1, max_tokens=12, **languages
    )
    pieces = []
    while translator.has_unfinished():
        pieces += [event.text for event in translator.step() if event.request_id == request_id]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == whole.text


# -- languages --------------------------------------------------------------------------------


def test_the_table(translator: Engine, folder: ReferenceNllb) -> None:
    languages = translator.languages
    assert languages.codes == CODES
    for code in CODES:
        assert languages.token_id(code) == folder.tokenizer.convert_tokens_to_ids(code)
        assert languages.code(languages.token_id(code)) == code
    assert languages.code(5) is None
    assert repr(languages) == "Languages(7: ace_Arab, deu_Latn, eng_Latn …)"


def test_a_languages_id_serves_as_well(translator: Engine) -> None:
    ids = map(translator.languages.token_id, ("eng_Latn", "deu_Latn"))
    by_id = translator.translate("Hello", source=next(ids), target=next(ids), max_tokens=5)
    by_code = translator.translate("Hello", source="eng_Latn", target="deu_Latn", max_tokens=5)
    assert by_id.token_ids == by_code.token_ids


@pytest.mark.parametrize(
    ("code", "near"), [("eng_latn", "eng_Latn"), ("deu", "deu_Latn"), ("zho_Hant ", "zho_Hant")]
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_an_unknown_language_is_refused_with_the_nearest(
    translator: Engine, side: str, code: str, near: str
) -> None:
    languages: dict[str, Any] = {"source": "fra_Latn", "target": "jpn_Jpan"} | {side: code}
    match = f"language {code!r} is not one of the model's 7; nearest: {near}"
    with pytest.raises(InvalidArgumentError, match=match):
        translator.translate("Hello", **languages)
    assert not translator.has_unfinished()


def test_a_source_that_names_a_language_stays_text(
    translator: Engine, tokenizer: Tokenizer
) -> None:
    got = translator.translate("deu_Latn </s>", source="eng_Latn", target="fra_Latn", max_tokens=1)
    assert got.source_token_ids[0] == translator.languages.token_id("eng_Latn")
    assert tokenizer.decode(got.source_token_ids[1:-1]) == "deu_Latn </s>"
    assert not {2, translator.languages.token_id("deu_Latn")} & set(got.source_token_ids[1:-1])


def test_m2m100s_codes(folder: ReferenceNllb, tmp_path: Path) -> None:
    """A tokenizer.json whose tags are written ``__en__``."""
    model = copy_of(folder, tmp_path / "model")
    nllb.write_tokenizer(model, codes=("__de__", "__en__", "__fr__", "eng_Latn"))
    with Engine(model, threads=1, quiet=True) as engine:
        assert engine.languages.codes == ("de", "en", "eng_Latn", "fr")
        got = engine.translate("Hello", source="en", target="de", max_tokens=3)
        assert got.source_token_ids[0] == engine.languages.token_id("en")
        with pytest.raises(InvalidArgumentError, match="nearest: "):
            engine.translate("Hello", source="en", target="__de__")


def test_a_folder_of_sentencepiece_and_a_word_list_is_refused_by_name(
    folder: ReferenceNllb, tmp_path: Path
) -> None:
    model = copy_of(folder, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    names = ("sentencepiece.bpe.model", "vocab.json")
    for name in names:
        (model / name).write_bytes(b"{}")
    with pytest.raises(
        TokenizerError, match=r"bpe\.model and vocab\.json but no tokenizer\.json: M2M"
    ):
        Engine(model, quiet=True)
    for name in names:  # as the message says
        (model / name).unlink()
    with Engine(model, threads=1, quiet=True) as engine:
        assert engine.translate([20, 21], source=704, target=703, max_tokens=2).token_ids
        with pytest.raises(TokenizerError, match="has no tokenizer files"):
            engine.translate("Hello", source=704, target=703)


# -- a folder that contradicts itself ---------------------------------------------------------


def refused(model: Path, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        Engine(model, threads=1, quiet=True)


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_listed_language_without_a_token(
    folder: ReferenceNllb, tmp_path: Path, key: str, name: str
) -> None:
    model = copy_of(folder, tmp_path / "model")
    if not (model / name).exists():
        (model / name).write_text("{}")
        change_json(model / "tokenizer_config.json", extra_special_tokens=None)
    change_json(model / name, **{key: [*CODES, "spa_Latn"]})
    refused(model, "lists the language spa_Latn, which is no special token of tokenizer.json's")


def test_another_id_in_the_configuration(folder: ReferenceNllb, tmp_path: Path) -> None:
    """As transformers 4 wrote the table."""
    model = copy_of(folder, tmp_path / "model")
    ids = {code: folder.tokenizer.convert_tokens_to_ids(code) for code in CODES}
    table: dict[str, Any] = {str(ids[code]): {"content": code} for code in CODES}
    change_json(model / "tokenizer_config.json", added_tokens_decoder=table)
    Engine(model, threads=1, quiet=True).close()
    table[str(ids["eng_Latn"])], table[str(ids["deu_Latn"])] = (
        {"content": "deu_Latn"},
        {"content": "eng_Latn"},
    )
    change_json(model / "tokenizer_config.json", added_tokens_decoder=table)
    refused(
        model, f"the language eng_Latn the id {ids['deu_Latn']}; tokenizer.json: {ids['eng_Latn']}"
    )


def test_a_tag_behind_the_models_vocabulary(folder: ReferenceNllb, tmp_path: Path) -> None:
    model = copy_of(folder, tmp_path / "model")
    nllb.write_tokenizer(model, codes=(*CODES, "ita_Latn", "spa_Latn", "swe_Latn"))
    refused(model, "language swe_Latn has the id 711; the model's vocabulary ends at 710")


def test_a_tag_that_is_the_end_token(folder: ReferenceNllb, tmp_path: Path) -> None:
    model = copy_of(folder, tmp_path / "model")
    raw = json.loads((model / "tokenizer.json").read_text())
    raw["model"]["vocab"]["eng_Latn"] = raw["model"]["vocab"].pop("</s>")
    swapped = {"eng_Latn": "</s>", "</s>": "eng_Latn"}
    for token in raw["added_tokens"]:
        token["content"] = swapped.get(token["content"], token["content"])
    raw["post_processor"] = None
    (model / "tokenizer.json").write_text(json.dumps(raw))
    refused(model, "eng_Latn has the id 2, which is the model's start, end or padding token")


def test_a_flag_that_is_none(folder: ReferenceNllb, tmp_path: Path) -> None:
    model = copy_of(folder, tmp_path / "model")
    change_json(model / "tokenizer_config.json", legacy_behaviour="yes")
    refused(model, "legacy_behaviour is 'yes'; allowed: true, false")


# -- bad sources ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "error", "match"),
    [
        ("", {}, InvalidArgumentError, "the source is empty"),
        (["a", ""], {}, InvalidArgumentError, "the source is empty"),
        ("x " * 200, {}, PromptTooLongError, "subwords; allowed: up to 126"),
        ("a", {"target": "eng_Latn"}, InvalidArgumentError, "are both 704; allowed: two"),
        ("a", {"source": 20}, InvalidArgumentError, "language is 20, which is no language's tag"),
        ("a", {"num_beams": 17}, InvalidArgumentError, "num_beams is 17"),
        ("a", {"top_p": 0.5}, InvalidArgumentError, "top_p has no meaning in a beam search"),
        ("\ud800", {}, TokenizerError, "cannot be encoded"),
    ],
)
def test_bad_input(
    translator: Engine, text: Any, options: Any, error: type[Exception], match: str
) -> None:
    languages = {"source": "eng_Latn", "target": "deu_Latn"}
    with pytest.raises(error, match=match):
        translator.translate(text, **languages | options)
    assert not translator.has_unfinished()
    assert translator.translate("Hello", max_tokens=2, **languages).token_ids
