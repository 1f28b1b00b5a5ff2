"""Translations: requests with two languages, and many texts from beginning to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas.capi._binding import ffi
from atlas.capi.calls import exported
from atlas.capi.engine import engine_of
from atlas.capi.events import EventTarget, News
from atlas.capi.handles import HANDLES
from atlas.capi.memory import (
    MAX_PROMPT_IDS,
    NUL_TERMINATED,
    number,
    read_ids,
    read_name,
    read_text,
    require,
    require_buffer,
    write_text,
)
from atlas.capi.options import BeamSearchSet
from atlas.capi.samplers import sampling_of
from atlas.errors import InvalidArgumentError, PromptTooLongError, ShapeError
from atlas.translation import BeamParams

if TYPE_CHECKING:
    from atlas.engine import Engine
    from atlas.event import Event
    from atlas.live_request import Sink
    from atlas.request import Completion
    from atlas.sampling import SamplingParams
    from atlas.translation import Language, Source
    from atlas.translation_request import TranslationRequest

_MAX_TEXTS = 1 << 20


def asks_for_translation(given: Any) -> bool:
    """Whether a request's struct has members that only a translation model understands."""
    languages = (given.source_language, given.target_language, given.source_tag, given.target_tag)
    return any(languages) or bool(given.beam_search)


def translation_request(engine: Engine, given: Any, sink: Sink) -> TranslationRequest:
    """The translation that a request's struct asks for: checked, not yet submitted."""
    translating = engine._translator("translate")
    if given.sampling and given.beam_search:
        raise InvalidArgumentError(
            "sampling and beam_search are both set; allowed: one of them, for sampling parameters "
            "have no meaning in a beam search"
        )
    search: BeamParams | SamplingParams = (
        sampling_of(given.sampling) if given.sampling else _beams_of(given.beam_search)
    )
    default = translating.intake.has_default_languages
    source = _language(given.source_language, given.source_tag, "source", default)
    target = _language(given.target_language, given.target_tag, "target", default)
    text = _text(given, translating.intake.max_source_len)
    return translating.request(text, source, target, search, {}, sink, priority=given.priority)


def _beams_of(handle: Any) -> BeamParams:
    """The parameters of a beam search handle, or of NULL."""
    return BeamParams() if not handle else HANDLES.get(number(handle), BeamSearchSet).params()


def _language(code: Any, tag: int, what: str, has_default: bool) -> Language:
    if code and tag:
        raise InvalidArgumentError(
            f"{what}_language and {what}_tag are both set; allowed: one of the two"
        )
    if code:
        return read_name(code, f"{what}_language")
    if not tag and not has_default:
        raise InvalidArgumentError(
            f"{what}_language and {what}_tag are unset; allowed: one of the two, or to set "
            "default languages first"
        )
    return tag


def _text(given: Any, max_source_len: int) -> Source:
    if (given.text == ffi.NULL) == (given.tokens == ffi.NULL):
        raise InvalidArgumentError("text and tokens: both or neither is set; allowed: one of them")
    if given.text != ffi.NULL:
        return read_text(given.text, given.text_len, "text")
    if given.num_tokens > max_source_len:
        raise PromptTooLongError(
            f"the source has {given.num_tokens} subwords; allowed: up to {max_source_len - 2}"
        )
    ids: list[int] = read_ids(given.tokens, given.num_tokens, MAX_PROMPT_IDS, "tokens").tolist()
    return ids


@exported
def engine_get_languages(handle: Any, buffer: Any, capacity: int, length: Any) -> None:
    """The codes of the model's languages, one a line."""
    engine = engine_of(handle)
    require_buffer(buffer, capacity, length)
    write_text("\n".join(engine.languages.codes), buffer, capacity, length)


@exported
def engine_set_default_languages(handle: Any, source_language: Any, target_language: Any) -> None:
    """The languages of requests that name none."""
    engine = engine_of(handle)
    source = read_name(source_language, "source_language")
    engine.set_default_languages(source, read_name(target_language, "target_language"))


@exported
def translate(
    handle: Any,
    texts: Any,
    num_texts: int,
    source_language: Any,
    target_language: Any,
    beam_search: Any,
    results: Any,
    num_results: int,
) -> None:
    """Translate texts, all of them together."""
    engine = engine_of(handle)
    engine._require_open()
    translating = engine._translator("translate")
    search = _beams_of(beam_search)
    if not 1 <= num_texts <= _MAX_TEXTS:
        raise InvalidArgumentError(f"num_texts is {num_texts}; allowed: 1 … {_MAX_TEXTS}")
    if num_results != num_texts * search.num_return:
        raise ShapeError(
            f"num_results is {num_results}; allowed: num_texts × num_return, "
            f"{num_texts} × {search.num_return}"
        )
    require(texts, "texts")
    require(results, "results")
    targets = [EventTarget(results + i) for i in range(num_results)]
    sources = [read_text(texts[i], NUL_TERMINATED, f"texts[{i}]") for i in range(num_texts)]
    default = translating.intake.has_default_languages
    source = _language(source_language, 0, "source", default)
    target = _language(target_language, 0, "target", default)
    done: dict[str, Completion] = {}

    def keep(event: Event) -> None:
        if event.completion is not None:
            done[event.request_id] = event.completion

    requests = translating.requests(sources, source, target, search, keep, numbered=num_texts > 1)
    engine._run(requests, lambda: len(done) == num_texts, refuse=num_texts == 1)
    engine._require_open()  # its end has ended the requests
    completions = [done[request.request_id] for request in requests]
    for i, place in enumerate(targets):
        place.put(News.whole(completions[i // search.num_return], ffi.NULL, i % search.num_return))
    for completion in completions:
        if completion.error is not None:
            raise completion.error
