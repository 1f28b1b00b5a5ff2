"""Beam search over candidates: which hypotheses go on, which have ended, and when to stop.

Plain arithmetic on a request's hypotheses; the model's part is in ``beam_decode``. Engines run
``atlas._native.beam_search``, many searches in one call, of which this is the definition.

Source
------
Graves, "Sequence Transduction with Recurrent Neural Networks" (2012), arXiv 1211.3711; length
normalisation as Wu et al., arXiv 1609.08144, with the plain power of Hugging Face transformers,
whose stopping rules these are too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.errors import NonFiniteLogitsError
from atlas.model.records import BeamHypothesis, EarlyStopping

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class Continuation(NamedTuple):
    """A hypothesis of the next step: which one it extends, and with what."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Running:
    """A hypothesis that goes on: start token, language tag and what follows; Σ log p."""

    token_ids: tuple[int, ...]
    log_prob: np.float32


@dataclass(frozen=True, slots=True)
class Ended:
    """A hypothesis that ended, with its penalised score."""

    token_ids: tuple[int, ...]
    score: np.float32


class BeamSearch:
    """One request's search.

    Parameters
    ----------
    first_tokens : sequence of int
        Start token and language tag, which no search chose.
    end_ids : sequence of int
    num_beams, max_new : int
        ``max_new`` counts what follows the tag.
    length_penalty : float
    early_stopping : bool or "never"
    no_repeat_ngram : int

    Notes
    -----
    With one beam this is greedy decoding: it ends with the first end token.
    """

    def __init__(
        self,
        first_tokens: Sequence[int],
        end_ids: Sequence[int],
        *,
        num_beams: int,
        max_new: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        no_repeat_ngram: int,
    ) -> None:
        self.num_beams = num_beams
        # Enough for num_beams to go on whatever number of them would end.
        self.num_candidates = 1 if num_beams == 1 else max(2, 1 + len(end_ids)) * num_beams
        self.running = [Running(tuple(first_tokens), np.float32(0))]
        self.ended: list[Ended] = []
        self.done = False
        self._end_ids = frozenset(end_ids)
        self._num_first = len(first_tokens)
        self._max_len = max_new + len(first_tokens) - 1  # the start token does not count
        self._length_penalty = float(length_penalty)
        self._early_stopping = early_stopping
        self._ngram = no_repeat_ngram

    @property
    def is_full(self) -> bool:
        """Whether as many hypotheses have ended as there are beams."""
        return len(self.ended) == self.num_beams

    def bans(self) -> list[list[int]]:
        """For each running hypothesis the ids that would repeat an n-gram of its own."""
        if not self._ngram:
            return [[]] * len(self.running)
        return [_repeats(beam.token_ids, self._ngram) for beam in self.running]

    def step(self, ids: Ints, log_probs: Floats) -> list[Continuation]:
        """Take each running hypothesis's best candidates; returns those that go on.

        Parameters
        ----------
        ids, log_probs : int32, float32 [running, num_candidates]
            Best first; −1 where there are fewer.

        Raises
        ------
        NonFiniteLogitsError
            A row is not finite.
        """
        if np.isnan(log_probs).any():
            raise NonFiniteLogitsError("the model's logits hold NaN or infinity")
        best = self._best(ids, log_probs)
        length = len(self.running[0].token_ids)  # with the new token, without the start token
        at_limit = length >= self._max_len
        going: list[tuple[Continuation, Running]] = []
        for rank, (parent, token, log_prob) in enumerate(best):
            ends = token in self._end_ids
            if ends or at_limit:
                if rank < self.num_beams:
                    self._end(parent, token, log_prob, length)
            elif len(going) < self.num_beams:
                longer = Running((*self.running[parent].token_ids, token), log_prob)
                going.append((Continuation(parent, token), longer))
        if not best:  # n-grams forbid every continuation: the search stands as it is
            self.ended += [
                Ended(beam.token_ids, self._score(beam.log_prob, length - 1))
                for beam in self.running
            ]
            self._keep_best()
        self.done = at_limit or not going or self._is_over(going[0][1].log_prob, length)
        self.running = [] if self.done else [beam for _, beam in going]
        return [] if self.done else [continuation for continuation, _ in going]

    def _best(self, ids: Ints, log_probs: Floats) -> list[tuple[int, int, np.float32]]:
        """The best candidates over all hypotheses; of equal ones that of the better beam."""
        before = np.array([beam.log_prob for beam in self.running], np.float32)
        totals = before[:, None] + log_probs
        order = np.argsort(-totals, axis=None, kind="stable")[: self.num_candidates]
        parents = (order // ids.shape[1]).tolist()
        found = zip(parents, ids.ravel()[order].tolist(), totals.ravel()[order], strict=True)
        return [candidate for candidate in found if candidate[1] >= 0]

    def _end(self, parent: int, token: int, log_prob: np.float32, length: int) -> None:
        """Keep an ended hypothesis if it is among the best."""
        tokens = (*self.running[parent].token_ids, token)
        self.ended.append(Ended(tokens, self._score(log_prob, length)))
        self._keep_best()

    def _keep_best(self) -> None:
        self.ended.sort(key=lambda ended: -ended.score)  # stable: the earlier of equal ones first
        del self.ended[self.num_beams :]

    def _score(self, log_prob: np.float32, length: int) -> np.float32:
        """Σ log p over a power of the length, in float32."""
        return np.float32(log_prob / np.float32(length**self._length_penalty))

    def _is_over(self, best_running: np.float32, length: int) -> bool:
        """Whether nothing that still runs is to change the result."""
        if not self.is_full:
            return False
        if self.num_beams == 1 or self._early_stopping is True:
            return True
        grows = self._early_stopping == "never" and self._length_penalty > 0
        at = self._max_len if grows else length
        return not self._score(best_running, at) > self.ended[-1].score

    def chosen(self) -> tuple[int, ...]:
        """What the best running hypothesis, or with the search done the best of all, has chosen."""
        best = self.ended[0] if self.done else self.running[0]
        return best.token_ids[self._num_first :]

    def best(self, count: int) -> list[BeamHypothesis]:
        """The best of the ended hypotheses, without start token and language tag."""
        return [
            BeamHypothesis(ended.token_ids[self._num_first :], float(ended.score))
            for ended in self.ended[:count]
        ]


def _repeats(tokens: tuple[int, ...], n: int) -> list[int]:
    """Ids that stood behind an earlier occurrence of the last n − 1 tokens."""
    if len(tokens) + 1 < n:
        return []
    tail = tokens[len(tokens) - n + 1 :]
    return [tokens[i + n - 1] for i in range(len(tokens) - n + 1) if tokens[i : i + n - 1] == tail]
