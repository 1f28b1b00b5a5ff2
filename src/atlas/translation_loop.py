"""The loop behind an engine with an encoder-decoder: sources, sweeps of the decoder, events.

    submit -> admit (encode) -> one sweep for every beam and sample -> advance -> events

Every step is one sweep over the decoder's weights for all requests, whatever their beam widths;
sources that are admitted are encoded before it, together. Not thread-safe: the driver holds its
lock around every call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from atlas._native.beam_search import BeamSearch
from atlas.errors import AtlasError, InvalidArgumentError, KvExhausted, NonFiniteLogitsError
from atlas.generation import Generation
from atlas.interrupts import interrupts_deferred
from atlas.live_request import LiveRequest
from atlas.loop import Gauges
from atlas.metrics import Recorder
from atlas.model.beam_decode import BeamDecode, advance, candidates, most_blocks
from atlas.model.core import Ints
from atlas.model.source_decode import blocks_needed, commit, reserve, sweep
from atlas.model.translator_core import TranslatorCore
from atlas.request import Delta
from atlas.sample_decode import SampleDecode
from atlas.sampler import Sampled
from atlas.sampling_table import Draw
from atlas.scheduling import SchedulingOptions
from atlas.translation_request import TranslationRequest, joined
from atlas.translation_sweep import Choice, Decode, Running, Sweep


class TranslationLoop:
    """Translation requests on one encoder-decoder, a step at a time.

    Parameters
    ----------
    core : TranslatorCore
    options : SchedulingOptions
        ``max_running``, ``chunk_tokens``, ``max_prefills`` and ``aging_s`` apply; a preempted
        request is computed again.
    """

    def __init__(self, core: TranslatorCore, options: SchedulingOptions) -> None:
        self.core = core
        self.num_steps = 0
        self.last_step_s = 0.0
        self.last_step_end_s = 0.0  # of the process's clock
        self.recorder = Recorder()
        self._max_rows = core.max_sweep_seqs
        self._max_requests = min(options.max_running, core.limits.max_seqs)
        self._encode_tokens = options.chunk_tokens * options.max_prefills
        self._aging_s = options.aging_s
        self._waiting: list[tuple[int, int, TranslationRequest]] = []
        self._running: list[Running] = []
        self._num_added = 0
        self._num_preemptions = 0
        self._is_short = False  # a preempted request waits for another to end

    # -- requests -----------------------------------------------------------------------------

    def require_pool(self, request: LiveRequest) -> None:
        """Raise KvExhausted for a request that the pool could not hold even alone."""
        assert isinstance(request, TranslationRequest)
        most = most_blocks(self.core, len(request.prompt_ids), request.num_rows, request.max_new)
        if most > self.core.blocks.num_total:
            raise KvExhausted(
                f"{request.num_rows} hypotheses of up to {request.max_new} tokens over a source of "
                f"{len(request.prompt_ids)} may need {most} KV blocks; the pool has "
                f"{self.core.blocks.num_total} (raise kv_tokens)"
            )

    def add(self, request: LiveRequest) -> None:
        """Queue a request."""
        assert isinstance(request, TranslationRequest)
        self._waiting.append((request.priority, self._num_added, request))
        self._num_added += 1

    def cancel(self, request: LiveRequest, error: AtlasError | None = None) -> None:
        """End a request wherever it is; its blocks go back."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not request]
        for running in [entry for entry in self._running if entry.request is request]:
            self._drop(running)
        request.end_all(error)

    def _drop(self, running: Running) -> None:
        self._running.remove(running)
        running.decode.release()
        self._is_short = False

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    def settle(self) -> None:
        """Nothing to do: a step has ended when :meth:`step` returns."""

    def gauges(self) -> Gauges:
        """Requests that wait, and sequences that run."""
        return Gauges(
            waiting=len(self._waiting),
            running=sum(entry.decode.num_rows for entry in self._running),
            preemptions=self._num_preemptions,
        )

    def close(self, error: AtlasError) -> None:
        """End every request with ``error``."""
        for request in [e[2] for e in self._waiting] + [e.request for e in self._running]:
            self.cancel(request, error)

    # -- the step -----------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit what fits and take one sweep; False when there was nothing to do."""
        started = time.perf_counter()
        if not self.has_unfinished:
            return False
        with interrupts_deferred():  # blocks that nobody knows of would never come back
            self._admit()
            self._make_room()
            self._reserve()
        if self._running:
            self._sweep()
        self.num_steps += 1
        self.last_step_end_s = time.perf_counter()
        self.last_step_s = self.last_step_end_s - started
        return True

    # -- admission ----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Encode waiting sources, best rank first, while rows and blocks last.

        A source that would not fit holds those behind it back: a wide search is not overtaken for
        ever by narrow ones. While others run, only so many tokens are encoded in a step, and none
        after a preemption, until a request has ended.
        """
        if not self._waiting or (self._is_short and self._running):
            return
        rows = self._max_rows - sum(entry.request.num_rows for entry in self._running)
        blocks = self.core.blocks.num_free - self._blocks_needed()
        tokens = self._encode_tokens if self._running else self.core.limits.max_rows
        chosen: list[tuple[int, int, TranslationRequest]] = []
        for entry in sorted(self._waiting, key=self._rank):
            request = entry[2]
            length = len(request.prompt_ids)
            needed = -(-length // self.core.pools.block_size) + request.num_rows
            full = len(self._running) + len(chosen) >= self._max_requests
            late = bool(chosen) and length > tokens
            if full or late or request.num_rows > rows or needed > blocks:
                break
            rows, blocks, tokens = rows - request.num_rows, blocks - needed, tokens - length
            chosen.append(entry)
        if chosen:
            self._encode(chosen)
        elif not self._running:
            self._refuse(min(self._waiting, key=self._rank)[2])

    def _rank(self, entry: tuple[int, int, TranslationRequest]) -> tuple[bool, int, int]:
        priority, order, request = entry
        waited = time.perf_counter() - request.submitted_s
        aged = 0 < self._aging_s < waited
        return not aged, 0 if aged else priority, order

    def _refuse(self, request: TranslationRequest) -> None:
        """End a request that does not fit although nothing else runs here."""
        self.cancel(
            request,
            KvExhausted(
                f"the KV pool has {self.core.blocks.num_free} free blocks, too few for this "
                "request beside the sequences driven by hand"
            ),
        )

    def _encode(self, chosen: Sequence[tuple[int, int, TranslationRequest]]) -> None:
        ids = [np.array(request.prompt_ids, np.int32) for _, _, request in chosen]
        try:
            sources = self.core.encode(ids)
        except AtlasError as error:
            for _, _, request in chosen:
                self.cancel(request, error)
            return
        for (priority, order, request), source in zip(chosen, sources, strict=True):
            if request.beam is not None:
                search = _search(self.core, request)
                decode: Decode = BeamDecode(self.core, source, request.first_tokens, search)
            else:
                going = [g for g in request.generations if not g.finished]
                decode = SampleDecode(self.core, source, request.first_tokens, going)
            self._running.append(Running(request, decode, (priority, order)))
        taken = {id(request) for _, _, request in chosen}
        self._waiting = [entry for entry in self._waiting if id(entry[2]) not in taken]

    def _make_room(self) -> None:
        """Preempt requests, worst rank first, until the blocks of the next sweep are free."""
        while self._running and self._missing():
            if len(self._running) == 1:
                self._refuse(self._running[0].request)
            else:
                self._preempt(max(self._running, key=lambda entry: entry.rank))

    def _missing(self) -> bool:
        return self._blocks_needed() > self.core.blocks.num_free

    def _blocks_needed(self) -> int:
        return blocks_needed([entry.decode for entry in self._running])

    def _preempt(self, running: Running) -> None:
        """Let a request wait again; it is computed anew, with the same result."""
        self._drop(running)
        self._is_short = True
        self._waiting.append((*running.rank, running.request))
        self._num_preemptions += 1

    def _reserve(self) -> None:
        """Take the blocks of the next sweep; a step that is not taken finds them taken."""
        if self._running:
            try:
                reserve(self.core, [entry.decode for entry in self._running])
            except AtlasError as error:
                self._cancel_running(error)

    def _cancel_running(self, error: AtlasError) -> None:
        for entry in list(self._running):
            self.cancel(entry.request, error)

    # -- rows ---------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Run everyone's rows, then let each request choose, then keep what was chosen.

        Until the last part nothing has moved: a user's code that raises, or an interrupt, leaves
        the step as if it had not been taken.
        """
        now = Sweep.of(self._running)
        decodes = now.decodes
        try:
            draws = self._draws(now) if now.samplers and self.core.runtime.samples else []
            now.drawn = frozenset(draw.logits_row for draw in draws)
            sweep(self.core, decodes, draws)
            if now.beams:
                now.found = candidates(self.core, now.searches)
            if now.samplers:
                now.choices = self._choices(now)
        except AtlasError as error:
            self._cancel_running(error)
            return
        with interrupts_deferred():
            commit(decodes)
            self._settle(now)

    def _choosers(self, now: Sweep) -> list[list[tuple[Generation, int]]]:
        """Each sampler's samples that choose a token in this sweep, with their arena rows."""
        row = sum(decode.num_rows for _, decode in now.beams)
        found = []
        for _, decode in now.samplers:
            found.append([(generation, row + i) for generation, i in decode.choosers()])
            row += decode.num_rows
        return found

    def _draws(self, now: Sweep) -> list[Draw]:
        """Tokens that the device chooses; where several samples share a row, the host does that."""
        due = [pair for choosers in self._choosers(now) for pair in choosers]
        takers = Counter(row for _, row in due)
        return [
            generation.draw(row, generation.next_position)
            for generation, row in due
            if generation.draws_on_device
            and takers[row] == 1
            and generation.params.logprobs is None
        ]

    def _choices(self, now: Sweep) -> list[list[Choice]]:
        """The token of each sample that chooses one, or the error that ends it."""
        first = sum(decode.num_rows for _, decode in now.beams)
        greedy = self._greedy(first, sum(decode.num_rows for _, decode in now.samplers))
        return [
            [
                (generation, self._choose(generation, row, int(greedy[row]), row in now.drawn))
                for generation, row in choosers
            ]
            for choosers in self._choosers(now)
        ]

    def _choose(
        self, generation: Generation, row: int, token: int, drawn: bool
    ) -> Sampled | AtlasError:
        if generation.needs_logits or (generation.draws_on_device and not drawn):
            return generation.choose_safely(self.core.logits_row(row))
        if token < 0:
            what = " after bias and penalties" if drawn else ""
            return NonFiniteLogitsError(f"the model's logits hold NaN or infinity{what}")
        return Sampled(token)

    def _greedy(self, first: int, count: int) -> Ints:
        """Greedy or drawn token by arena row, of rows ``first`` on."""
        out = np.full(first + count, -1, np.int32)
        out[first:] = self.core.runtime.greedy(self.core.buffers, first, count)
        return out

    def _settle(self, now: Sweep) -> None:
        """Keep candidates and tokens, then tell the clients."""
        clock = time.perf_counter()
        if now.found is not None:
            failed = dict(advance(now.searches, *now.found))
            for i, (entry, decode) in enumerate(now.beams):
                if i in failed:
                    self.cancel(entry.request, failed[i])
                elif decode.search.done or decode.search.num_beams == 1:
                    self._settle_beams(entry, decode, clock)
        for (entry, samples), choices in zip(now.samplers, now.choices, strict=True):
            self._settle_samples(entry, samples, choices, clock)

    def _settle_beams(self, entry: Running, decode: BeamDecode, clock: float) -> None:
        """Tell of a search that has ended, or streams."""
        request, search = entry.request, decode.search
        if search.num_beams == 1:
            self._stream(request, decode, clock)
        if not search.done:
            return
        self._drop(entry)
        if search.num_beams > 1:
            hypotheses = decode.best(len(request.generations))
            deltas = [request.take(i, found) for i, found in enumerate(hypotheses)]
            for generation in request.generations[len(hypotheses) :]:
                error = InvalidArgumentError(
                    f"num_return is {len(request.generations)}; allowed for this search: "
                    f"1 … {len(hypotheses)}, all the hypotheses it could find"
                )
                deltas.append(generation.fail(error))
            self.recorder.result(request, request.num_tokens, clock)
            self._report(request, list(enumerate(deltas)), clock)

    def _stream(self, request: TranslationRequest, decode: BeamDecode, clock: float) -> None:
        """Give out what a search of one beam has chosen and its generation lacks."""
        generation, search = request.generations[0], decode.search
        chosen = search.chosen()
        new = chosen[generation.num_tokens :]  # empty while a preempted one catches up
        if search.done:
            generation.score = decode.best(1)[0].score
        deltas = []
        for token in new:
            deltas.append(generation.push(Sampled(token)))
            self.recorder.token(request, generation, clock)
            generation.last_token_s = clock
        if search.done and not generation.finished:
            deltas.append(generation.cut())
        if deltas:
            self._report(request, [(0, joined(deltas))], clock)

    def _settle_samples(
        self, entry: Running, decode: SampleDecode, choices: list[Choice], clock: float
    ) -> None:
        request = entry.request
        deltas: list[tuple[int, Delta]] = []
        for generation, sampled in choices:
            if isinstance(sampled, AtlasError):
                deltas.append((generation.index, generation.fail(sampled)))
                continue
            deltas.append((generation.index, generation.push(sampled)))
            self.recorder.token(request, generation, clock)
            generation.last_token_s = clock
        decode.advance()
        if not decode.num_rows:
            self._drop(entry)
        self._report(request, deltas, clock)

    def _report(
        self, request: TranslationRequest, deltas: list[tuple[int, Delta]], clock: float
    ) -> None:
        request.first_token_s = request.first_token_s or clock - request.submitted_s
        for index, delta in deltas:
            request.report(index, delta)


def _search(core: TranslatorCore, request: TranslationRequest) -> BeamSearch:
    beam = request.beam
    assert beam is not None
    return BeamSearch(
        request.first_tokens,
        core.config.eos_token_ids,
        num_beams=beam.num_beams,
        max_new=request.max_new,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        no_repeat_ngram=beam.no_repeat_ngram,
    )
