"""From what callers give to what is translated: texts to ids, languages to tags, limits checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas.errors import CapabilityError, InvalidArgumentError, TokenizerError, shown
from atlas.generation import Weights
from atlas.intake import Intake, Messages, Prompt, checked_priority, checked_request_id
from atlas.live_request import Sink
from atlas.model.translator_core import TranslatorCore
from atlas.sampling import SamplingParams
from atlas.translation import BeamParams, Language, Source
from atlas.translation_request import TranslationRequest

if TYPE_CHECKING:
    from atlas.languages import Languages
    from atlas.tokenizer import Tokenizer

Params = BeamParams | SamplingParams


class TranslationIntake(Intake):
    """Checks and prepares requests for one encoder-decoder.

    Parameters
    ----------
    core : TranslatorCore
    tokenizer : Tokenizer or None
        None: sources of token ids work, and languages by id.
    languages : Languages or None
    path : str
        Of the model, for messages.
    weights : callable
        The samplers' exponential.
    """

    continues = False

    def __init__(
        self,
        core: TranslatorCore,
        tokenizer: Tokenizer | None,
        languages: Languages | None,
        path: str,
        weights: Weights,
    ) -> None:
        super().__init__(core, tokenizer, path, weights)
        self._translator = core
        self._languages = languages
        self.eos_token_ids = core.config.eos_token_ids  # those that end a search

    @property
    def languages(self) -> Languages:
        """The model's table of languages, or TokenizerError without one."""
        if self._languages is None:
            raise TokenizerError(
                f"{self._path} has no tokenizer files; allowed: languages by token id"
            )
        return self._languages

    @property
    def max_source_len(self) -> int:
        """Positions of the encoder; tag and end token take two."""
        return self._translator.max_source_len

    def prompt_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Refused: a translation has a source and two languages in place of a prompt."""
        raise CapabilityError(
            f"{self._path} is a translation model and completes no prompts; "
            "allowed: engine.translate, engine.submit_translation"
        )

    def chat_ids(
        self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]
    ) -> list[int]:
        """Refused, as :meth:`prompt_ids`."""
        raise CapabilityError(f"{self._path} is a translation model and holds no conversations")

    def language_id(self, language: Language) -> int:
        """The token id of a code, or the id itself."""
        if isinstance(language, str):
            return self.languages.token_id(language)
        if isinstance(language, bool) or not isinstance(language, Integral):
            raise InvalidArgumentError(
                f"a language is {shown(language)}; "
                "allowed: a code such as 'eng_Latn', or its token id"
            )
        return int(language)  # NumPy's integers too, as token ids

    @property
    def has_default_languages(self) -> bool:
        """Whether the id 0 stands for a language."""
        return self._translator.default_languages is not None

    def set_default_languages(self, source: Language, target: Language) -> None:
        """What the id 0 stands for from now on."""
        core = self._translator
        tags = core.languages(self.language_id(source), self.language_id(target))
        core.default_languages = tags

    def subwords(self, source: Source) -> list[int]:
        """A source's ids without tag and end token."""
        if isinstance(source, str):
            return self.tokenizer.encode(source, add_special=False)
        if isinstance(source, bytes | bytearray):
            raise InvalidArgumentError("a source is bytes; allowed: str or token ids")
        is_sequence = isinstance(source, Sequence | np.ndarray)
        if not is_sequence:
            raise InvalidArgumentError(
                f"a source is a {type(source).__name__}; allowed: str or token ids"
            )
        if not len(source):
            return []  # refused with those texts that have no subwords
        ids: list[int] = self._core.token_array(source, "the source's tokens").tolist()
        return ids

    def search(self, params: Params | None, fields: dict[str, object]) -> Params:
        """Parameters checked and resolved; ``fields`` are those of BeamParams, by keyword."""
        if params is not None and fields:
            raise InvalidArgumentError(
                f"params and {', '.join(fields)} are given; allowed: one or the other"
            )
        if params is None:
            for name in fields:
                _require_beam_field(name)
            return BeamParams(**fields)  # type: ignore[arg-type]
        if isinstance(params, BeamParams):
            return params
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(
                f"params is a {type(params).__name__}; allowed: BeamParams, SamplingParams or None"
            )
        for name in ("prompt_logprobs", "truncate_prompt"):
            value = getattr(params, name)
            if value is not None:
                raise InvalidArgumentError(f"{name} is {value!r}; allowed for a translation: None")
        rows = self._translator.max_sweep_seqs
        if params.n > rows:
            raise InvalidArgumentError(f"n is {params.n}; allowed for a translation: 1 … {rows}")
        return self.params(params)

    def translation(
        self,
        text: Source,
        source: Language,
        target: Language,
        params: Params,
        sink: Sink,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: object = None,
    ) -> TranslationRequest:
        """A request with all its hypotheses or samples, not yet submitted."""
        core = self._translator
        tags = core.languages(self.language_id(source), self.language_id(target))
        ids = core.source_ids(self.subwords(text), tags[0]).tolist()
        first = core.first_tokens(tags[1]).tolist()
        core.require_length(len(first))
        beam = params if isinstance(params, BeamParams) else None
        sampling = params if isinstance(params, SamplingParams) else _of_beams(params)
        room = core.limits.max_seq_len - len(first)
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        sampling = replace(sampling, max_tokens=most, min_tokens=min(most, sampling.min_tokens))
        count = sampling.n if beam is None else beam.num_return
        return TranslationRequest(
            checked_request_id(request_id),
            user,
            sampling,
            ids,
            # Penalties and n-grams see the decoder's own tokens, not the source.
            [self.generation(first, sampling, index) for index in range(count)],
            sink,
            checked_priority(priority),
            source=source,
            target=target,
            first_tokens=tuple(first),
            beam=beam,
        )


def _require_beam_field(name: str) -> None:
    """Raise for a keyword that is no field of BeamParams; sampling parameters are named as such."""
    allowed = [item.name for item in fields_of(BeamParams)]
    if name in allowed:
        return
    if name in {item.name for item in fields_of(SamplingParams)}:
        raise InvalidArgumentError(
            f"{name} has no meaning in a beam search; allowed: {', '.join(allowed)}, "
            f"or params=SamplingParams({name}=…) in their place"
        )
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.0)
    raise InvalidArgumentError(
        f"unknown option {name!r}; did you mean {near[0]!r}? allowed: {', '.join(allowed)}"
    )


def _of_beams(params: BeamParams) -> SamplingParams:
    """What a hypothesis's generation keeps to: its length."""
    return SamplingParams(max_tokens=params.max_tokens)
