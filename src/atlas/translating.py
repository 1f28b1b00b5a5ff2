"""Translations on an engine: requests made, submitted, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.errors import AtlasError, InvalidArgumentError
from atlas.languages import Languages
from atlas.translation_intake import Params, TranslationIntake
from atlas.translation_loop import TranslationLoop
from atlas.translation_request import TranslationRequest, translation_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from atlas.event import Event
    from atlas.generation import Weights
    from atlas.live_request import Sink
    from atlas.model.translator_core import TranslatorCore
    from atlas.request import Completion
    from atlas.scheduling import SchedulingOptions
    from atlas.tokenizer import Tokenizer
    from atlas.translation import Language, Source, Translation


class Translating:
    """What an engine with an encoder-decoder has in place of generation.

    Parameters
    ----------
    core : TranslatorCore
    tokenizer : Tokenizer or None
    path : str
        Of the model, for messages.
    weights : callable
        The samplers' exponential.
    options : SchedulingOptions

    Attributes
    ----------
    intake : TranslationIntake
    loop : TranslationLoop
    """

    def __init__(
        self,
        core: TranslatorCore,
        tokenizer: Tokenizer | None,
        path: str,
        weights: Weights,
        options: SchedulingOptions,
    ) -> None:
        languages = None
        if tokenizer is not None:
            languages = Languages.from_folder(
                Path(path), tokenizer, core.config.vocab_size, core.reserved_ids
            )
            core.language_ids = languages.token_ids
            core.tag_last = languages.tag_last
        self.intake = TranslationIntake(core, tokenizer, languages, path, weights)
        self.loop = TranslationLoop(core, options)

    def request(
        self,
        text: Source,
        source: Language,
        target: Language,
        params: Params | None,
        fields: dict[str, Any],
        sink: Sink,
        **identity: Any,
    ) -> TranslationRequest:
        """A request, not yet submitted; ``Engine.submit_translation`` documents it."""
        search = self.intake.search(params, fields)
        return self.intake.translation(text, source, target, search, sink, **identity)

    def requests(
        self,
        texts: Sequence[Source],
        source: Language,
        target: Language,
        search: Params,
        sink: Sink,
        *,
        numbered: bool,
    ) -> list[TranslationRequest]:
        """One for each text, none submitted; ``numbered``: a refusal says of which text."""
        made = []
        for index, text in enumerate(texts):
            try:
                made.append(self.intake.translation(text, source, target, search, sink))
            except AtlasError as error:
                raise type(error)(f"texts[{index}]: {error}" if numbered else str(error)) from error
        return made

    def translate(
        self,
        texts: Source | Sequence[Source],
        source: Language,
        target: Language,
        params: Params | None,
        fields: dict[str, Any],
        run: Callable[..., None],
    ) -> Translation | list[Translation]:
        """``Engine.translate``; ``run`` submits requests and steps until they have ended."""
        single = is_single_source(texts)
        search = self.intake.search(params, fields)
        done: dict[str, Completion] = {}

        def keep(event: Event) -> None:
            if event.completion is not None:
                done[event.request_id] = event.completion

        sources: Any = [texts] if single else texts
        requests = self.requests(sources, source, target, search, keep, numbered=not single)
        run(requests, lambda: len(done) == len(requests), refuse=single)
        results = [translation_of(request, done[request.request_id]) for request in requests]
        if not single:
            return results
        (found,) = results
        failed = all(hypothesis.finish_reason == "error" for hypothesis in found.hypotheses)
        if found.error is not None and failed:
            raise found.error
        return found


def is_single_source(texts: Any) -> bool:
    """Whether the argument of ``translate`` is one source: a text, or a sequence of ids."""
    if isinstance(texts, str):
        return True
    is_sequence = isinstance(texts, Sequence) or getattr(texts, "ndim", 0) > 0
    if not is_sequence or isinstance(texts, bytes | bytearray):
        raise InvalidArgumentError(
            f"texts is a {type(texts).__name__}; allowed: str, token ids, or a list of these"
        )
    if not len(texts):
        raise InvalidArgumentError("texts is empty; allowed: a text, token ids, or several of them")
    nested = [isinstance(item, str | Sequence) or getattr(item, "ndim", 0) > 0 for item in texts]
    if any(nested) != all(nested):
        raise InvalidArgumentError("texts mix token ids with sources; allowed: one or the other")
    return not nested[0]
