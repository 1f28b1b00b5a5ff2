"""What a request asks of the sampler: every field is checked when the object is made."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from atlas.errors import InvalidArgumentError, shown

LogitsProcessor = Callable[
    [Sequence[int], Sequence[int], NDArray[np.float32]], NDArray[np.float32] | None
]
"""``(prompt ids, output ids, logits float32 [C]) -> logits or None``; None: changed in place."""

MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**64 - 1

_Words = Sequence[str | Sequence[int]]
_Breakers = Sequence[str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends. Frozen and hashable.

    The stages run in the order in which the fields are listed from ``logits_processor`` to
    ``xtc_threshold``; `atlas.ops.penalties` and `atlas.ops.sampling` hold their formulas. The
    default is greedy: the same prompt gives the same text. A value outside its range raises
    `InvalidArgumentError`, and so does a combination that cannot be honoured.

    Parameters
    ----------
    max_tokens : int or None
        ≥ 1, output tokens at most (128). None: until a stop or until the sequence is full.
    min_tokens : int
        0 … max_tokens. Until then the ids that would end the request cannot be drawn, and stop
        strings do not end it.
    stop : str or sequence of str
        Texts that end the request.
    stop_token_ids : sequence of int
        Ids that end the request, besides the model's own end tokens.
    ignore_eos : bool
        The model's end tokens do not end the request.
    include_stop : bool
        Keep the stop string or token in text and ids.
    skip_special : bool
        Leave special tokens out of the text (True).
    seed : int or None
        0 … 2**64 − 1. None: one is made and recorded when the request starts (`with_seed`).
    n : int
        1 … 1024 samples of the same prompt; sample i draws from its own random stream.
    logprobs : int or None
        None: no log-probabilities. k ≥ 0: the sampled token's and the k highest of the row.
    prompt_logprobs : int or None
        The same for the prompt's tokens, always from the model's own logits.
    logprobs_mode : "raw" or "processed"
        raw: log-softmax of the model's logits. processed: of the distribution that the draw is made
        from; with temperature 0, the softmax of the logits whose maximum is taken.
    truncate_prompt : None, int or "left"
        None: a prompt that is too long is an error. k ≥ 1: keep its last k tokens. "left": drop as
        many tokens from its start as needed.
    logits_processor : callable or None
        Sees the model's logits first; may forbid tokens with -inf.
    logit_bias : mapping of id to float
        Added to the logits, −1e4 … 1e4.
    bad_words : sequence of (str or id sequence)
        Sequences that are never completed, counting from within the prompt.
    repetition_penalty : float
        0.01 … 100; 1 = off. Divides positive and multiplies negative logits of ids that occur in
        prompt or output.
    presence_penalty, frequency_penalty : float
        −2 … 2; 0 = off. Subtracted for ids in the output, once or once an occurrence.
    dry_multiplier, dry_base, dry_allowed_length, dry_range, dry_sequence_breakers
        Repeated-sequence penalty: ≥ 0 (0 = off); ≥ 1 (1.75); ≥ 1 (2); ≥ 1 tokens of history or
        None = all; ids or texts that no repetition crosses.
    temperature : float
        0 = greedy (the default), else 1e-6 … 1e6.
    top_n_sigma : float
        0 … 1e3 standard deviations below the maximum; 0 = off.
    top_k : int
        ≥ 0 most probable tokens; 0 = off.
    typical_p, top_p : float
        (0, 1]; 1 = off.
    min_p : float
        0 … 1 times the highest probability; 0 = off.
    xtc_probability, xtc_threshold : float
        0 … 1 (0 = off) and (0, 0.5] (0.1).
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    truncate_prompt: int | Literal["left"] | None = None
    logits_processor: LogitsProcessor | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: _Words = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int | None = None
    dry_sequence_breakers: _Breakers = ("\n", ":", '"', "*")
    temperature: float = 0.0
    top_n_sigma: float = 0.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    def __post_init__(self) -> None:
        for name, span in _INTEGERS.items():
            self._set(name, _integer(name, getattr(self, name), span))
        for name, span in _FLOATS.items():
            self._set(name, _real(name, getattr(self, name), span))
        for name in ("ignore_eos", "include_stop", "skip_special"):
            self._set(name, _boolean(name, getattr(self, name)))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("bad_words", _bad_words(self.bad_words))
        self._set("dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        if self.truncate_prompt != "left":
            span = _Span(1, MAX_TOKEN_ID, optional=True, also='"left"')
            self._set("truncate_prompt", _integer("truncate_prompt", self.truncate_prompt, span))
        if self.logprobs_mode not in ("raw", "processed"):
            raise _refusal("logprobs_mode", self.logprobs_mode, '"raw" or "processed"')
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise _refusal("logits_processor", self.logits_processor, "a callable or None")
        self._check_combinations()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"0 … max_tokens ({self.max_tokens})")
        if self.temperature == 0.0:
            # Both can remove the most probable token, which greedy would then return all the same.
            if self.typical_p < 1.0:
                raise _refusal("typical_p", self.typical_p, "1 with temperature 0")
            if self.xtc_probability > 0.0:
                raise _refusal("xtc_probability", self.xtc_probability, "0 with temperature 0")

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax of the adjusted logits instead of a random draw."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return cast(tuple[str, ...], self.stop)

    @property
    def has_unresolved_text(self) -> bool:
        """Whether `with_token_ids` has to run before sampling."""
        dry_text = self.dry_multiplier > 0.0 and any(
            isinstance(item, str) for item in self.dry_sequence_breakers
        )
        return dry_text or any(isinstance(word, str) for word in self.bad_words)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping such as parsed JSON.

        Raises
        ------
        InvalidArgumentError
            A key is no field (the nearest name is given), or a value is refused.
        """
        names = [item.name for item in dataclasses.fields(cls)]
        for key in mapping:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)
                raise InvalidArgumentError(
                    f"unknown sampling parameter {key!r}; did you mean {near[0]!r}? "
                    f"allowed: {', '.join(names)}"
                )
        return cls(**mapping)

    def to_mapping(self) -> dict[str, Any]:
        """The fields that differ from the defaults; `from_mapping` gives an equal object back."""
        default = SamplingParams()
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        changed = {name: value for name, value in values.items() if value != getattr(default, name)}
        if "logit_bias" in changed:
            changed["logit_bias"] = dict(self.logit_bias)
        return changed

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], SamplingParams], tuple[Any]]:
        # The read-only view of logit_bias cannot be pickled.
        return SamplingParams.from_mapping, (self.to_mapping(),)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def with_seed(self, entropy: int | None = None) -> SamplingParams:
        """These parameters with a seed: their own, else ``entropy``, else 64 bits from the system.

        Parameters
        ----------
        entropy : int or None
            0 … 2**64 − 1.
        """
        if self.seed is not None:
            return self
        if entropy is None:
            entropy = int.from_bytes(os.urandom(8), "little")
        return self.replace(seed=entropy)

    def with_token_ids(self, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
        """These parameters with texts in ``bad_words`` and ``dry_sequence_breakers`` as ids.

        Parameters
        ----------
        encode : callable
            Text to ids, without special tokens.

        Notes
        -----
        A word is forbidden in the two forms in which tokenizers write it, at the start of a text
        and after a space. A breaker is the last token of its text alone and of its text after a
        letter.
        """
        if not self.has_unresolved_text:
            return self
        words: dict[tuple[int, ...], None] = {}
        for word in self.bad_words:
            forms = (word, " " + word.lstrip()) if isinstance(word, str) else (word,)
            for form in forms:
                ids = encode(form) if isinstance(form, str) else form
                words[tuple(int(token_id) for token_id in ids)] = None
        breakers: dict[int, None] = {}
        for item in self.dry_sequence_breakers:
            ends = (item,) if isinstance(item, int) else (encode(item)[-1], encode("a" + item)[-1])
            breakers.update(dict.fromkeys(ends))
        return self.replace(bad_words=tuple(words), dry_sequence_breakers=tuple(breakers))


@dataclass(frozen=True, slots=True)
class _Span:
    """An allowed interval and its wording."""

    low: float
    high: float
    low_open: bool = False
    optional: bool = False
    also: str = ""  # a value allowed outside the interval, checked by the caller or equal to 0

    def __contains__(self, value: Any) -> bool:
        if self.also == "0" and value == 0:
            return True
        above = self.low < value if self.low_open else self.low <= value
        return bool(above and value <= self.high)

    def __str__(self) -> str:
        high = {MAX_TOKEN_ID: "2**31 - 1", MAX_SEED: "2**64 - 1"}.get(
            int(self.high), f"{self.high:g}"
        )
        text = f"{f'above {self.low:g}, at most' if self.low_open else f'{self.low:g} …'} {high}"
        extra = [self.also] if self.also else []
        return " or ".join([*extra, text, *(["None"] if self.optional else [])])


_COUNT = _Span(0, MAX_TOKEN_ID)
_INTEGERS = {
    "max_tokens": _Span(1, MAX_TOKEN_ID, optional=True),
    "min_tokens": _COUNT,
    "seed": _Span(0, MAX_SEED, optional=True),
    "n": _Span(1, 1024),
    "logprobs": _Span(0, MAX_TOKEN_ID, optional=True),
    "prompt_logprobs": _Span(0, MAX_TOKEN_ID, optional=True),
    "dry_allowed_length": _Span(1, MAX_TOKEN_ID),
    "dry_range": _Span(1, MAX_TOKEN_ID, optional=True),
    "top_k": _COUNT,
}
_FLOATS = {
    "repetition_penalty": _Span(0.01, 100),
    "presence_penalty": _Span(-2, 2),
    "frequency_penalty": _Span(-2, 2),
    "dry_multiplier": _Span(0, 1e6),
    "dry_base": _Span(1, 1e6),
    "temperature": _Span(1e-6, 1e6, also="0"),
    "top_n_sigma": _Span(0, 1e3),
    "typical_p": _Span(0, 1, low_open=True),
    "top_p": _Span(0, 1, low_open=True),
    "min_p": _Span(0, 1),
    "xtc_probability": _Span(0, 1),
    "xtc_threshold": _Span(0, 0.5, low_open=True),
}
_BIAS = _Span(-1e4, 1e4)


def _refusal(name: str, value: object, allowed: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} is {shown(value)}; allowed: {allowed}")


def _integer(name: str, value: object, span: _Span) -> int | None:
    if value is None and span.optional:
        return None
    # bool is an int to Python, but `top_k=True` is a slip.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refusal(name, value, f"an integer, {span}")
    number = operator.index(value)
    if number not in span:
        raise _refusal(name, value, span)
    return number


def _real(name: str, value: object, span: _Span) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refusal(name, value, f"a number, {span}")
    # NaN is in no span; an integer too large for a float is compared before it is converted.
    if value not in span:
        raise _refusal(name, value, span)
    return float(value)


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _refusal(name, value, "True or False")
    return bool(value)


def _items(name: str, value: object, allowed: str) -> list[object]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _refusal(name, value, allowed)
    return list(value)


def _token_id(name: str, value: object) -> int:
    return cast(int, _integer(name, value, _COUNT))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_token_id(name, item) for item in _items(name, value, "a sequence of token ids"))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(name, value, "texts of at least one character")
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_text("stop", value),)
    return tuple(
        _text("stop", item) for item in _items("stop", value, "a text or a sequence of texts")
    )


def _bias(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", value, "a mapping of token ids to numbers")
    return MappingProxyType(
        {
            _token_id("logit_bias key", key): _real(f"logit_bias[{key!r}]", bias, _BIAS)
            for key, bias in value.items()
        }
    )


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    words: list[str | tuple[int, ...]] = []
    for item in _items("bad_words", value, "a sequence of texts or of token id sequences"):
        word = _text("bad_words", item) if isinstance(item, str) else _token_ids("bad_words", item)
        if not word:
            raise _refusal("bad_words", item, "sequences of at least one token id")
        words.append(word)
    return tuple(words)


def _breakers(value: object) -> tuple[str | int, ...]:
    name = "dry_sequence_breakers"
    return tuple(
        _text(name, item) if isinstance(item, str) else _token_id(name, item)
        for item in _items(name, value, "a sequence of texts or token ids")
    )
