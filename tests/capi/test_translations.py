"""Translations from C: requests with languages and beams, atlas_translate, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from tests.capi.interface import CallError, call, ffi, info, make, name_of, read_text, struct

SENTENCES = ["Hello world", "naïve café", "x = 1"]
LANGUAGES = {"source": "eng_Latn", "target": "deu_Latn"}


@pytest.fixture(scope="module")
def loaded(nllb_model: Path) -> Iterator[Any]:
    handle = make("engine", "engine_load", str(nllb_model).encode(), ffi.NULL)
    yield handle
    left = ffi.new("size_t *")
    call("engine_step", handle, left)
    assert left[0] == 0
    info_after = info("engine", handle)
    assert info_after.num_free_blocks == info_after.num_blocks
    call("engine_free", handle)


class Kept:
    """C strings and structs that live as long as this."""

    def __init__(self) -> None:
        self._all: list[Any] = []

    def text(self, text: str) -> Any:
        return self.keep(ffi.new("char[]", text.encode()))

    def texts(self, texts: list[str]) -> Any:
        return self.keep(ffi.new("char *[]", [self.text(text) for text in texts]))

    def keep(self, item: Any) -> Any:
        self._all.append(item)
        return item

    def request(self, **members: Any) -> Any:
        """A request's struct; str members become C strings."""
        made = {
            name: self.text(value) if isinstance(value, str) else value
            for name, value in members.items()
        }
        return self.keep(struct("request_params", **made))


@pytest.fixture
def kept() -> Kept:
    return Kept()


def beams(**options: object) -> Any:
    handle = make("beam_search", "beam_search_create")
    for key, value in options.items():
        call("beam_search_set", handle, key.encode(), str(value).encode())
    return handle


def translated(engine: Any, kept: Kept, texts: list[str], search: Any, each: int = 1) -> list[Any]:
    """The events' contents of atlas_translate."""
    results = ffi.new("atlas_event *[]", len(texts) * each)
    call(
        "translate", engine, kept.texts(texts), len(texts), b"eng_Latn", b"deu_Latn", search,
        results, len(texts) * each,
    )  # fmt: skip
    told = [kept.keep(info("event", event)) for event in results]
    kept.keep(results)
    return told


def refused(status: str, match: str, name: str, *arguments: Any) -> None:
    with pytest.raises(CallError, match=match) as caught:
        call(name, *arguments)
    assert name_of(caught.value.status) == f"ERROR_{status}"


# -- what is given back -----------------------------------------------------------------------


def test_texts_together(loaded: Any, translator: Engine, kept: Kept) -> None:
    told = translated(loaded, kept, SENTENCES, ffi.NULL)
    for found, want in zip(told, translator.translate(SENTENCES, **LANGUAGES), strict=True):
        assert ffi.string(found.text).decode() == want.text
        assert tuple(found.tokens[0 : found.num_tokens]) == want.token_ids
        assert found.score == want.score
        assert found.prompt_tokens == len(want.source_token_ids)
        assert (found.is_last, found.sample, found.error) == (1, 0, 0)


def test_several_of_each(loaded: Any, translator: Engine, kept: Kept) -> None:
    options = {
        "num_beams": 6, "num_return": 3, "max_tokens": 12, "length_penalty": 0.6,
        "early_stopping": "never", "no_repeat_ngram": 2,
    }  # fmt: skip
    search = beams(**options)
    told = translated(loaded, kept, SENTENCES, search, each=3)
    found = translator.translate(SENTENCES, **LANGUAGES, **options)
    assert [(ffi.string(t.text).decode(), t.score, t.sample) for t in told] == [
        (h.text, h.score, j) for one in found for j, h in enumerate(one.hypotheses)
    ]
    call("beam_search_free", search)


def test_handles_of_results_are_reused(loaded: Any, kept: Kept) -> None:
    results = ffi.new("atlas_event *[]", 1)
    arguments = (b"eng_Latn", b"deu_Latn", ffi.NULL, results, 1)
    call("translate", loaded, kept.texts(["Hello"]), 1, *arguments)
    first = results[0]
    call("translate", loaded, kept.texts(["world"]), 1, *arguments)
    assert results[0] == first
    call("event_free", first)


def test_submitted_requests_of_every_kind(loaded: Any, translator: Engine, kept: Kept) -> None:
    """Beams of several widths, greedy and sampled, as text and as ids, in one engine."""
    search = beams(num_beams=4, num_return=2, max_tokens=10)
    greedy = beams(num_beams=1, max_tokens=10)
    sampling = make("sampling", "sampling_create")
    for key, value in {"temperature": "1", "seed": "7", "n": "2", "max_tokens": "10"}.items():
        call("sampling_set", sampling, key.encode(), value.encode())
    tokens = translator.tokenizer.encode("Hello world", add_special=False)
    tags = {
        "source_tag": translator.languages.token_id("eng_Latn"),
        "target_tag": translator.languages.token_id("deu_Latn"),
    }
    codes = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    ids = {"tokens": kept.keep(ffi.new("int32_t[]", tokens)), "num_tokens": len(tokens)}
    requests: list[dict[str, Any]] = [
        {"text": "Hello world", "beam_search": search} | codes,
        {"text": "Hello world", "beam_search": greedy} | codes,
        {"text": "Hello world", "sampling": sampling} | codes,
        {"beam_search": search} | ids | tags,
    ]
    handles, ended = [], {}
    for number, members in enumerate(requests):
        request = kept.request(user=ffi.cast("void *", number + 1), **members)
        handles.append(make("request", "request_submit", loaded, request))
    event, texts = ffi.new("atlas_event **"), {}
    last = 0
    while last < len(requests):
        call("engine_poll", loaded, -1, event)
        told = info("event", event[0])
        key = (int(ffi.cast("intptr_t", told.user)) - 1, told.sample)
        texts[key] = texts.get(key, "") + ffi.string(told.text).decode()
        assert math.isnan(told.score) == (not told.finish_reason or key[0] == 2)
        if told.finish_reason:
            ended[key] = told.score
        last += told.is_last
    call("event_free", event[0])
    wants = [
        translator.translate("Hello world", num_return=2, max_tokens=10, **LANGUAGES),
        translator.translate("Hello world", num_beams=1, max_tokens=10, **LANGUAGES),
        translator.translate(
            "Hello world", params=SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=10),
            **LANGUAGES,
        ),
    ]  # fmt: skip
    wants.append(wants[0])
    for number, want in enumerate(wants):
        for j, hypothesis in enumerate(want.hypotheses):
            assert texts.pop((number, j)) == hypothesis.text
            score = ended.pop((number, j))
            assert math.isnan(score) if hypothesis.score is None else score == hypothesis.score
    assert not texts
    for handle in handles:
        call("request_free", handle)
    call("beam_search_free", search)
    call("beam_search_free", greedy)
    call("sampling_free", sampling)


def test_one_request_to_its_end(loaded: Any, translator: Engine, kept: Kept) -> None:
    """Greedy, so that pieces come one by one."""
    greedy, pieces = beams(num_beams=1, max_tokens=8), []

    @ffi.callback("int32_t(void *, atlas_event *)")
    def watch(user: Any, event: Any) -> int:
        pieces.append(ffi.string(info("event", event).text).decode())
        return 0

    request = kept.request(
        text="Hello world", beam_search=greedy, source_language="eng_Latn",
        target_language="deu_Latn",
    )  # fmt: skip
    result = ffi.new("atlas_event **")
    call("engine_generate", loaded, request, watch, result)
    want = translator.translate("Hello world", num_beams=1, max_tokens=8, **LANGUAGES)
    told = info("event", result[0])
    assert (ffi.string(told.text).decode(), told.score) == (want.text, want.score)
    assert "".join(pieces) == want.text
    assert len(pieces) > 2
    call("event_free", result[0])
    call("beam_search_free", greedy)


def test_cancelled(loaded: Any, kept: Kept) -> None:
    request = kept.request(
        text="Hello", source_language="eng_Latn", target_language="deu_Latn", user=ffi.NULL
    )
    handle = make("request", "request_submit", loaded, request)
    call("engine_step", loaded, ffi.new("size_t *"))
    call("request_cancel", handle)
    event = ffi.new("atlas_event **")
    call("engine_poll", loaded, -1, event)
    told = info("event", event[0])
    assert (told.finish_reason, told.is_last, math.isnan(told.score)) == (3, 1, True)
    call("event_free", event[0])
    call("request_free", handle)


def test_languages_and_capabilities(
    loaded: Any, model: Path, translator: Engine, nllb_model: Path
) -> None:
    assert read_text("engine_get_languages", loaded).split("\n") == list(translator.languages.codes)
    has = ffi.new("int32_t *")
    plain = make("engine", "engine_load", str(model).encode(), ffi.NULL)
    for engine, answer in ((loaded, 1), (plain, 0)):
        call("engine_has", engine, b"request.translate", has)
        assert has[0] == answer
    call("engine_free", plain)


def test_default_languages(nllb_model: Path, translator: Engine, kept: Kept) -> None:
    """For requests, and for sequences driven by hand, which have no other way to get any."""
    engine = make("engine", "engine_load", str(nllb_model).encode(), ffi.NULL)
    sequence, prompt = make("sequence", "sequence_create", engine, 0), [20, 21, 22]
    ids = kept.keep(ffi.new("int32_t[]", prompt))
    refused("INVALID_ARGUMENT", "no default", "sequence_prefill", sequence, ids, 3, 0, ffi.NULL)
    for source, target, match in (
        (b"eng", b"deu_Latn", "nearest: eng_Latn"),
        (b"eng_Latn", b"eng_Latn", "allowed: two languages"),
        (ffi.NULL, b"eng_Latn", "source_language is NULL"),
    ):
        refused("INVALID_ARGUMENT", match, "engine_set_default_languages", engine, source, target)
    call("engine_set_default_languages", engine, b"eng_Latn", b"deu_Latn")
    logits = ffi.new("atlas_logits **")
    call("sequence_prefill", sequence, ids, 3, 0, logits)
    token = ffi.new("int32_t *")
    call("logits_argmax", logits[0], 0, token)
    want = translator.translate(prompt, num_beams=1, max_tokens=1, **LANGUAGES)
    assert (token[0],) == want.token_ids
    request = kept.request(text="Hello world")
    result = ffi.new("atlas_event **")
    call("engine_generate", engine, request, ffi.NULL, result)
    text = ffi.string(info("event", result[0]).text).decode()
    assert text == translator.translate("Hello world", **LANGUAGES).text
    arguments = (kept.texts(["Hello world"]), 1, ffi.NULL, b"fra_Latn", ffi.NULL, result, 1)
    call("translate", engine, *arguments)
    want = translator.translate("Hello world", source="eng_Latn", target="fra_Latn")
    assert ffi.string(info("event", result[0]).text).decode() == want.text
    call("logits_free", logits[0])
    call("sequence_free", sequence)
    call("event_free", result[0])
    call("engine_free", engine)


# -- refusals ---------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "text": "Hello", "source_language": "eng_Latn", "target_language": "deu_Latn",
}  # fmt: skip


@pytest.mark.parametrize(
    ("members", "status", "match"),
    [
        ({"text": ""}, "INVALID_ARGUMENT", "the source is empty"),
        ({"text": "x " * 200}, "PROMPT_TOO_LONG", "subwords; allowed: up to 126"),
        ({"num_tokens": 10**6}, "PROMPT_TOO_LONG", "has 1000000 subwords; allowed: up to 126"),
        ({"target_language": "eng_Latn"}, "INVALID_ARGUMENT", "are both 704; allowed: two"),
        ({"source_language": "eng"}, "INVALID_ARGUMENT", "'eng' is not .* nearest: eng_Latn"),
        ({"target_language": ""}, "INVALID_ARGUMENT", "'' is not one of the model's 7"),
        ({"source_language": ffi.NULL}, "INVALID_ARGUMENT", "source_language .* are unset"),
        ({"target_language": ffi.NULL}, "INVALID_ARGUMENT", "target_language .* are unset"),
        ({"source_tag": 704}, "INVALID_ARGUMENT", "source_tag are both set; allowed: one"),
        ({"source_language": ffi.NULL, "source_tag": 711}, "INVALID_ARGUMENT", "is 711; allowed"),
        ({"source_language": ffi.NULL, "source_tag": -5}, "INVALID_ARGUMENT", "is -5; allowed"),
        ({"text": ffi.NULL}, "INVALID_ARGUMENT", "text and tokens: both or neither"),
    ],
)
def test_bad_requests(
    loaded: Any, kept: Kept, members: dict[str, Any], status: str, match: str
) -> None:
    if "num_tokens" in members:
        members = members | {"text": ffi.NULL, "tokens": kept.keep(ffi.new("int32_t[]", 3))}
    request = kept.request(**GOOD | members)
    out, result = ffi.new("atlas_request **"), ffi.new("atlas_event **")
    refused(status, match, "request_submit", loaded, request, out)
    refused(status, match, "engine_generate", loaded, request, ffi.NULL, result)
    assert out[0] == result[0] == ffi.NULL


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("num_beams", "0", "num_beams is 0"),
        ("num_beams", "17", "num_beams is 17; allowed: 1 … 16"),
        ("num_beams", "many", "num_beams is 'many'; allowed: an integer"),
        ("num_return", "17", "num_return is 17"),
        ("length_penalty", "nan", "length_penalty is 'nan'; allowed: a number"),
        ("early_stopping", "soon", "early_stopping is 'soon'; allowed"),
        ("no_repeat_ngram", "-1", "no_repeat_ngram is -1"),
        ("max_tokens", "0", "max_tokens is 0"),
        ("temperature", "1", "unknown beam search parameter 'temperature'; did you mean"),
        ("num_beam", "1", "did you mean 'num_beams'"),
    ],
)
def test_bad_beam_search_parameters(key: str, value: str, match: str) -> None:
    search = beams()
    refused("INVALID_ARGUMENT", match, "beam_search_set", search, key.encode(), value.encode())
    call("beam_search_free", search)


def test_beam_search_parameters_by_number() -> None:
    search = beams()
    call("beam_search_set_integer", search, b"early_stopping", 1)
    call("beam_search_set_number", search, b"length_penalty", 1.4)
    call("beam_search_set", search, b"max_tokens", b"null")
    bad = (("integer", b"num_beams", 17), ("number", b"num_beams", 2.5), ("number", b"x", 1.0))
    for kind, key, value in bad:
        refused("INVALID_ARGUMENT", "allowed", f"beam_search_set_{kind}", search, key, value)
    refused(
        "INVALID_ARGUMENT", "length_penalty", "beam_search_set_number", search, b"length_penalty",
        math.inf,
    )  # fmt: skip
    call("beam_search_free", search)


def test_sampling_parameters_beside_beams(loaded: Any, kept: Kept) -> None:
    search, sampling = beams(), make("sampling", "sampling_create")
    request = kept.request(**GOOD, beam_search=search, sampling=sampling)
    match = "sampling and beam_search are both set; .* no meaning in a beam search"
    refused(
        "INVALID_ARGUMENT", match, "request_submit", loaded, request, ffi.new("atlas_request **")
    )
    call("beam_search_set", search, b"num_beams", b"2")
    call("beam_search_set", search, b"num_return", b"3")
    request = kept.request(**GOOD, beam_search=search)
    match = r"num_return is 3; allowed: 1 … num_beams \(2\)"
    refused(
        "INVALID_ARGUMENT", match, "request_submit", loaded, request, ffi.new("atlas_request **")
    )
    call("beam_search_set", search, b"num_return", b"2")
    match = "n, num_return or prompt_logprobs is set"
    refused("INVALID_ARGUMENT", match, "engine_generate", loaded, request, ffi.NULL, ffi.NULL)
    call("beam_search_free", search)
    call("sampling_free", sampling)


def test_bad_calls_of_translate(loaded: Any, kept: Kept) -> None:
    results = ffi.new("atlas_event *[]", 4)

    def fails(status: str, match: str, texts: Any, count: int, places: int, **other: Any) -> None:
        refused(
            status, match, "translate", loaded, texts, count, other.get("source", b"eng_Latn"),
            other.get("target", b"deu_Latn"), other.get("search", ffi.NULL),
            other.get("results", results), places,
        )  # fmt: skip
        assert all(result == ffi.NULL for result in results)

    good = kept.texts(["a", "b"])
    fails("INVALID_ARGUMENT", r"texts\[1\]: the source is empty", kept.texts(["a", ""]), 2, 2)
    fails("PROMPT_TOO_LONG", r"texts\[0\]: the source has", kept.texts(["x " * 200, "a"]), 2, 2)
    fails("INVALID_ARGUMENT", "nearest: eng_Latn", good, 2, 2, source=b"eng")
    fails("INVALID_ARGUMENT", "are both 703", good, 2, 2, source=b"deu_Latn")
    fails("INVALID_ARGUMENT", "source_language and .* unset", good, 2, 2, source=ffi.NULL)
    fails("INVALID_ARGUMENT", "target_language and .* unset", good, 2, 2, target=ffi.NULL)
    fails("INVALID_ARGUMENT", "texts is NULL", ffi.NULL, 2, 2)
    fails("INVALID_ARGUMENT", "results is NULL", good, 2, 2, results=ffi.NULL)
    fails("INVALID_ARGUMENT", "num_texts is 0", good, 0, 0)
    fails("INVALID_ARGUMENT", "num_texts is", good, 2**60, 2**60)
    fails("SHAPE", "num_results is 3; allowed: num_texts × num_return, 2 × 1", good, 2, 3)
    fails("INVALID_ARGUMENT", "beam search handle|not an Atlas handle", good, 2, 2,
          search=ffi.cast("atlas_beam_search *", 12345))  # fmt: skip
    broken = kept.keep(ffi.new("char *[]", [kept.text("a"), ffi.NULL]))
    fails("INVALID_ARGUMENT", r"texts\[1\] is NULL", broken, 2, 2)
    latin1 = kept.keep(ffi.new("char *[]", [kept.keep(ffi.new("char[]", b"caf\xe9"))]))
    fails("INVALID_ARGUMENT", "not UTF-8", latin1, 1, 1)


def test_a_decoder_only_model_refuses(model: Path, kept: Kept) -> None:
    engine = make("engine", "engine_load", str(model).encode(), ffi.NULL)
    match, search = "needs a translation model", beams()
    out = ffi.new("atlas_request **")
    for members in (
        {"source_language": "eng_Latn"}, {"target_tag": 3}, {"beam_search": search},
    ):  # fmt: skip
        request = kept.request(text="Hello", **members)
        refused("CAPABILITY", match, "request_submit", engine, request, out)
        refused("CAPABILITY", match, "engine_generate", engine, request, ffi.NULL, ffi.NULL)
    results = ffi.new("atlas_event *[]", 1)
    refused(
        "CAPABILITY", match, "translate", engine, kept.texts(["a"]), 1, b"eng_Latn", b"deu_Latn",
        ffi.NULL, results, 1,
    )  # fmt: skip
    length = ffi.new("size_t *")
    refused("CAPABILITY", match, "engine_get_languages", engine, ffi.NULL, 0, length)
    call("beam_search_free", search)
    call("engine_free", engine)


def test_a_folder_that_contradicts_itself(nllb_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(nllb_model, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["extra_special_tokens"].append("spa_Latn")
    path.write_text(json.dumps(config))
    refused(
        "MODEL_FILE", "lists the language spa_Latn", "engine_load", str(folder).encode(), ffi.NULL,
        ffi.new("atlas_engine **"),
    )  # fmt: skip


def test_a_full_cache_is_the_requests_error(nllb_model: Path, kept: Kept) -> None:
    options = make("load_options", "load_options_create")
    call("load_options_set_integer", options, b"kv_tokens", 64)
    engine = make(
        "engine", "engine_load", str(nllb_model).encode(), struct("load_params", options=options)
    )
    call("load_options_free", options)
    results = ffi.new("atlas_event *[]", 2)
    wide = beams(num_beams=16, max_tokens=60)
    refused(
        "KV_EXHAUSTED", "kv_tokens", "translate", engine, kept.texts(["Hello", "world"]), 2,
        b"eng_Latn", b"deu_Latn", wide, results, 2,
    )  # fmt: skip
    assert {info("event", event).error for event in results} == {8}
    refused(
        "KV_EXHAUSTED", "kv_tokens", "translate", engine, kept.texts(["Hello"]), 1,
        b"eng_Latn", b"deu_Latn", wide, results, 1,
    )  # fmt: skip
    small = beams(num_beams=1, max_tokens=3)
    assert translated(engine, kept, ["Hello"], small)
    call("beam_search_free", wide)
    call("beam_search_free", small)
    call("engine_free", engine)


def test_an_older_callers_struct(loaded: Any, kept: Kept) -> None:
    """A header without languages: what it does not know is as if unset."""
    request = kept.request(text="Hello")
    request.struct_size = 64
    refused(
        "INVALID_ARGUMENT", "source_language and source_tag are unset", "request_submit", loaded,
        request, ffi.new("atlas_request **"),
    )  # fmt: skip
