"""Beam search over candidates as ``atlas.model.beam_search`` defines it, for many searches at once.

Hypotheses are kept as a tree: of each step the tokens and whose children they are. Ids are read
off it from leaf to root, where n-grams are looked for and when a hypothesis is given out.
"""

import numpy as np

cimport cython
from libc.math cimport isnan, pow
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from atlas._native.source_rows cimport SourceRows
from atlas.errors import (
    AtlasError,
    InvalidArgumentError,
    NonFiniteLogitsError,
    OutOfMemoryError,
)

cdef enum:
    MOST_BEAMS = 16

cdef enum Early:
    HEURISTIC = 0  # early_stopping=False
    AT_ONCE = 1    # True
    NEVER = 2

ctypedef struct node:
    int32_t token
    int32_t parent  # beam of the step before

ctypedef struct ended_t:
    float score
    int64_t step     # of the beam it extends, or is
    int32_t beam
    int32_t token    # −1: nothing could follow the beam


@cython.no_gc  # it refers to nothing
cdef class BeamSearch:
    """One request's search; parameters, methods and results are those of the definition.

    Attributes
    ----------
    num_beams, num_candidates, num_running : int
    done : bool
    """

    cdef readonly int64_t num_beams
    cdef readonly int64_t num_candidates
    cdef readonly int64_t num_running
    cdef readonly bint done
    cdef float _log_probs[MOST_BEAMS]  # Σ log p of each running hypothesis
    cdef ended_t _ended[MOST_BEAMS + 1]  # best first
    cdef int64_t _num_ended
    cdef node *_nodes  # of step s from s · num_beams on; the root is the only one of step 0
    cdef int64_t _num_steps
    cdef int64_t _capacity
    cdef int32_t *_first
    cdef int64_t _num_first
    cdef int32_t *_end_ids
    cdef int64_t _num_end_ids
    cdef int64_t _max_len
    cdef double _length_penalty
    cdef Early _early
    cdef int64_t _ngram

    def __cinit__(
            self, first_tokens, end_ids, *, int64_t num_beams, int64_t max_new,
            double length_penalty, early_stopping, int64_t no_repeat_ngram):
        cdef int64_t i
        if not 1 <= num_beams <= MOST_BEAMS:
            raise InvalidArgumentError(f"num_beams is {num_beams}; allowed: 1 … {MOST_BEAMS}")
        self._num_first, self._num_end_ids = len(first_tokens), len(end_ids)
        self._first = <int32_t *>malloc(max(1, self._num_first) * sizeof(int32_t))
        self._end_ids = <int32_t *>malloc(max(1, self._num_end_ids) * sizeof(int32_t))
        if self._first == NULL or self._end_ids == NULL:
            raise OutOfMemoryError("no memory for a beam search")
        for i in range(self._num_first):
            self._first[i] = first_tokens[i]
        for i in range(self._num_end_ids):
            self._end_ids[i] = end_ids[i]
        self.num_beams = num_beams
        # Enough for num_beams to go on whatever number of them would end.
        self.num_candidates = 1 if num_beams == 1 else max(2, 1 + self._num_end_ids) * num_beams
        self.num_running = 1
        self._log_probs[0] = 0
        self._max_len = max_new + self._num_first - 1  # the start token does not count
        self._length_penalty = length_penalty
        self._early = NEVER if early_stopping == "never" else (
            AT_ONCE if early_stopping else HEURISTIC)
        self._ngram = no_repeat_ngram

    def __dealloc__(self):
        free(self._nodes)
        free(self._first)
        free(self._end_ids)

    # -- hypotheses ---------------------------------------------------------------------------

    cdef int grow_nodes(self) except -1:
        """Room for one step more."""
        cdef int64_t capacity
        cdef node *grown
        if self._num_steps + 1 >= self._capacity:
            capacity = max(32, 2 * self._capacity)
            grown = <node *>realloc(self._nodes, capacity * self.num_beams * sizeof(node))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for {capacity} steps of a beam search")
            self._nodes = grown
            self._capacity = capacity
        return 0

    cdef void read(self, int64_t step, int64_t beam, int32_t *out) noexcept nogil:
        """The ``step`` tokens that a beam of that step has chosen."""
        cdef node *at
        while step > 0:
            at = &self._nodes[step * self.num_beams + beam]
            out[step - 1] = at.token
            beam = at.parent
            step -= 1

    cdef tuple chosen_by(self, int64_t step, int64_t beam):
        cdef int64_t i
        cdef int32_t *tokens = <int32_t *>malloc(max(1, step) * sizeof(int32_t))
        if tokens == NULL:
            raise OutOfMemoryError(f"no memory for {step} token ids")
        try:
            self.read(step, beam, tokens)
            return tuple([tokens[i] for i in range(step)])
        finally:
            free(tokens)

    cdef tuple ended_tokens(self, ended_t *ended):
        cdef tuple tokens = self.chosen_by(ended.step, ended.beam)
        return tokens if ended.token < 0 else (*tokens, ended.token)

    @property
    def running(self):
        """What each running hypothesis has chosen, with its Σ log p: [(token ids, float)]."""
        cdef int64_t i
        return [(self.chosen_by(self._num_steps, i), self._log_probs[i])
                for i in range(self.num_running)]

    def chosen(self):
        """What the best running hypothesis, or with the search done the best of all, has chosen."""
        if self.done:
            return self.ended_tokens(&self._ended[0])
        return self.chosen_by(self._num_steps, 0)

    def best(self, int64_t count):
        """The best of the ended hypotheses: [(token ids, score)]."""
        cdef int64_t i
        return [(self.ended_tokens(&self._ended[i]), self._ended[i].score)
                for i in range(min(count, self._num_ended))]

    # -- the step -----------------------------------------------------------------------------

    cdef float score(self, float log_prob, int64_t length) noexcept nogil:
        return log_prob / <float>pow(<double>length, self._length_penalty)

    cdef void end(self, int64_t beam, int32_t token, float score) noexcept nogil:
        """Keep an ended hypothesis if it is among the best; the earlier of equal ones first."""
        cdef int64_t at = self._num_ended
        while at > 0 and self._ended[at - 1].score < score:
            self._ended[at] = self._ended[at - 1]
            at -= 1
        self._ended[at].score, self._ended[at].step = score, self._num_steps
        self._ended[at].beam, self._ended[at].token = <int32_t>beam, token
        self._num_ended = min(self._num_ended + 1, self.num_beams)

    cdef bint is_end(self, int32_t token) noexcept nogil:
        cdef int64_t i
        for i in range(self._num_end_ids):
            if self._end_ids[i] == token:
                return True
        return False

    cdef bint is_over(self, float best_running, int64_t length) noexcept nogil:
        """Whether nothing that still runs is to change the result."""
        if self._num_ended < self.num_beams:
            return False
        if self.num_beams == 1 or self._early == AT_ONCE:
            return True
        if self._early == NEVER and self._length_penalty > 0:
            length = self._max_len
        return not self.score(best_running, length) > self._ended[self.num_beams - 1].score

    cdef int64_t choose(
            self, const int32_t *ids, const float *log_probs, int64_t stride,
            int32_t *parents, int32_t *tokens) except -1:
        """One step; how many hypotheses go on. Nothing changes where a row is not finite.

        Rows are sorted, so the best candidates over all of them are those of a merge.
        """
        cdef int64_t heads[MOST_BEAMS]
        cdef float totals[MOST_BEAMS]  # of the candidates at the heads
        cdef float after[MOST_BEAMS]
        cdef int64_t b, j, best, rank = 0, going = 0
        cdef int64_t length = self._num_first + self._num_steps
        cdef bint at_limit = length >= self._max_len
        cdef int32_t token
        cdef float total
        cdef node *made
        for b in range(self.num_running):
            for j in range(self.num_candidates):
                if isnan(log_probs[b * stride + j]):
                    raise NonFiniteLogitsError("the model's logits hold NaN or infinity")
            heads[b] = 0
            totals[b] = self._log_probs[b] + log_probs[b * stride]
        self.grow_nodes()
        made = &self._nodes[(self._num_steps + 1) * self.num_beams]
        for _ in range(self.num_candidates):
            best = -1
            for b in range(self.num_running):
                if heads[b] < self.num_candidates and (best < 0 or totals[b] > totals[best]):
                    best = b
            token, total = ids[best * stride + heads[best]], totals[best]
            heads[best] += 1
            if heads[best] < self.num_candidates:
                totals[best] = self._log_probs[best] + log_probs[best * stride + heads[best]]
            if token < 0:
                continue
            if at_limit or self.is_end(token):
                if rank < self.num_beams:
                    self.end(best, token, self.score(total, length))
            elif going < self.num_beams:
                made[going].token, made[going].parent = token, <int32_t>best
                parents[going], tokens[going], after[going] = <int32_t>best, token, total
                going += 1
            rank += 1
        if not rank:  # n-grams forbid every continuation: the search stands as it is
            for b in range(self.num_running):
                self.end(b, -1, self.score(self._log_probs[b], length - 1))
        self.done = at_limit or not going or self.is_over(after[0], length)
        if self.done:
            going = 0
        self._num_steps += 1
        self.num_running = going
        memcpy(self._log_probs, after, going * sizeof(float))
        return going

    # -- n-grams ------------------------------------------------------------------------------

    cdef int add_bans(self, list found, list ends) except -1:
        """Of each running hypothesis the ids that would repeat an n-gram of its own."""
        cdef int64_t i, b, n = self._ngram, count = self._num_first + self._num_steps
        cdef int64_t last = count - n + 1
        cdef int64_t j
        cdef int32_t *tokens
        if not n:
            ends += [len(found)] * self.num_running
            return 0
        tokens = <int32_t *>malloc(max(1, count) * sizeof(int32_t))
        if tokens == NULL:
            raise OutOfMemoryError(f"no memory for {count} token ids")
        memcpy(tokens, self._first, self._num_first * sizeof(int32_t))
        for b in range(self.num_running):
            self.read(self._num_steps, b, tokens + self._num_first)
            for i in range(last):
                for j in range(n - 1):
                    if tokens[i + j] != tokens[last + j]:
                        break
                else:
                    found.append(tokens[i + n - 1])
            ends.append(len(found))
        free(tokens)
        return 0


def bans(list searches not None):
    """The ids that may not follow each running hypothesis, those of all searches in their order.

    Returns
    -------
    banned, cu_banned : int32 [NB], int32 [hypotheses + 1]
        As the op ``top_candidates`` takes them.
    """
    cdef BeamSearch search
    cdef list found = [], ends = [0]
    cdef int64_t rows = 0
    cdef bint any_ngrams = False
    for search in searches:
        rows += search.num_running
        any_ngrams |= search._ngram != 0
    if not any_ngrams:
        return np.zeros(0, np.int32), np.zeros(rows + 1, np.int32)
    for search in searches:
        search.add_bans(found, ends)
    return np.array(found, np.int32), np.array(ends, np.int32)


def step(list searches not None, list sources not None, const int32_t[:, ::1] ids not None,
         const float[:, ::1] log_probs not None):
    """Give each search its candidates; its sequences go on as its hypotheses do.

    Parameters
    ----------
    searches : list of BeamSearch
    sources : list of SourceRows
        One a search.
    ids, log_probs : int32, float32 [rows, k]
        Of each running hypothesis in turn: best first, −1 where there are fewer.

    Returns
    -------
    list of (int, AtlasError)
        Searches that must end, and why: their rows are not finite.
    """
    cdef int32_t parents[MOST_BEAMS]
    cdef int32_t tokens[MOST_BEAMS]
    cdef int64_t i, row = 0, running, going, k = ids.shape[1], rows = 0, widest = 0
    cdef BeamSearch search
    cdef list failed = []
    for search in searches:
        rows += search.num_running
        widest = max(widest, search.num_candidates)
    if (len(sources) != len(searches) or ids.shape[0] < rows or log_probs.shape[0] < rows
            or log_probs.shape[1] != k or k < widest):
        raise InvalidArgumentError(
            f"candidates [{ids.shape[0]}, {k}] of {len(sources)} sources; "
            f"allowed: [{rows}, {widest}] of {len(searches)}")
    for i in range(len(searches)):  # parents are looked up among these
        if len((<SourceRows?>sources[i]).seqs) != (<BeamSearch>searches[i]).num_running:
            raise InvalidArgumentError(
                f"sources[{i}] has {len(sources[i])} sequences; allowed: one for each of "
                f"{searches[i].num_running} running hypotheses")
    for i in range(len(searches)):
        search = searches[i]
        running = search.num_running
        if not running:
            continue
        try:
            going = search.choose(&ids[row, 0], &log_probs[row, 0], k, parents, tokens)
            (<SourceRows>sources[i]).follow(going, parents, tokens)
        except AtlasError as error:
            failed.append((i, error))
        row += running
    return failed
