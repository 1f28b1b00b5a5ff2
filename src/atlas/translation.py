"""Translation requests and what they give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atlas.errors import AtlasError, InvalidArgumentError
from atlas.model.records import (
    MAX_BEAMS,
    EarlyStopping,
    require_early_stopping,
    require_length_penalty,
)
from atlas.request import FinishReason, Timings, Usage
from atlas.whole_number import whole_number

Language = str | int
"""A code of the model's table such as ``eng_Latn``, or its token id."""

Source = str | Sequence[int]
"""A text, or the ids of its subwords without language tag and end token."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search for a translation.

    Attributes
    ----------
    num_beams : int
        Hypotheses kept at each step, 1 … 16; 1 is greedy.
    max_tokens : int, optional
        Tokens after the target's language tag, end token included; None: all that the decoder's
        positions leave.
    length_penalty : float
        A hypothesis of n tokens (the language tag counts) has the score
        Σ log p / n ** length_penalty; −5 … 5.
    early_stopping : bool or "never"
        When a search ends that has ``num_beams`` finished hypotheses. True: at once; False: when
        the best running one, ended now, would not beat the worst finished one; ``never``: when it
        could not at any length.
    no_repeat_ngram : int
        No n-gram of this length may occur twice in a hypothesis; 0: any may.
    num_return : int
        Best hypotheses to give back, 1 … ``num_beams``.

    Source
    ------
    Graves, "Sequence Transduction with Recurrent Neural Networks" (2012), arXiv 1211.3711; the
    stopping rules are those of Hugging Face transformers' ``generate``.
    """

    num_beams: int = 4
    max_tokens: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    no_repeat_ngram: int = 0
    num_return: int = 1

    def __post_init__(self) -> None:
        least = {"num_beams": 1, "max_tokens": 1, "no_repeat_ngram": 0, "num_return": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None or name != "max_tokens":
                # NumPy's integers would overflow where they are multiplied.
                object.__setattr__(self, name, whole_number(name, value, low))
        require_length_penalty(self.length_penalty)
        require_early_stopping(self.early_stopping)
        if self.num_beams > MAX_BEAMS:
            raise InvalidArgumentError(f"num_beams is {self.num_beams}; allowed: 1 … {MAX_BEAMS}")
        if self.num_return > self.num_beams:
            raise InvalidArgumentError(
                f"num_return is {self.num_return}; allowed: 1 … num_beams ({self.num_beams})"
            )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One translation of a source.

    Attributes
    ----------
    text : str
        Empty where the model came without a tokenizer.
    token_ids : tuple of int
        Without language tag and end token.
    score : float, optional
        Σ log p / n ** length_penalty; None for a sampled translation.
    finish_reason : {"stop", "length", "error", "cancelled"}
    """

    text: str
    token_ids: tuple[int, ...]
    score: float | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Translation:
    """The result of a translation request.

    Attributes
    ----------
    text, token_ids, score, finish_reason
        Those of the best hypothesis.
    hypotheses : tuple of Hypothesis
        ``num_return`` of them, best first; with sampling, the ``n`` samples.
    source_token_ids : tuple of int
        What the encoder read: language tag, subwords, end token.
    source, target : str or int
        Languages as they were given.
    """

    hypotheses: tuple[Hypothesis, ...]
    source_token_ids: tuple[int, ...]
    source: Language
    target: Language
    usage: Usage
    timings: Timings
    error: AtlasError | None = None

    @property
    def text(self) -> str:
        return self.hypotheses[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.hypotheses[0].token_ids

    @property
    def score(self) -> float | None:
        return self.hypotheses[0].score

    @property
    def finish_reason(self) -> FinishReason:
        return self.hypotheses[0].finish_reason

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 80 else self.text[:77] + "…"
        score = "" if self.score is None else f", score {self.score:.4f}"
        return f"Translation({text!r}, {self.source} → {self.target}{score})"
