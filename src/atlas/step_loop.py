"""The loop behind the engine: scheduler, model, samplers, events.

    submit -> Scheduler.plan -> launch -> logits -> Generation -> Scheduler.commit -> events

Up to ``depth`` steps are launched before the oldest is settled: with two, the device runs step t
while the host gives out the tokens of step t − 1 and plans step t + 1. A row of that step may take
its token from step t where the host has not seen it.

Not thread-safe: the engine holds its lock around every call. Long because whatever can break a step
off (an interrupt, a kernel, a callback) is dealt with beside the line that it breaks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas._native.plan import EntryFlag, FinishReason, Plan
from atlas._native.prefix_cache import MissReason, PrefixCache
from atlas._native.scheduler import Scheduler
from atlas._native.token_log import TokenLog
from atlas.cache.host_store import HostStore
from atlas.errors import (
    AtlasError,
    KvExhausted,
    NonFiniteLogitsError,
)
from atlas.generation import Generation
from atlas.interrupts import interrupts_deferred
from atlas.live_request import LiveRequest
from atlas.loop import Gauges
from atlas.metrics import Recorder
from atlas.model.core import ModelCore
from atlas.model.records import PADDED_BATCH_SIZES
from atlas.model.recurrence import tail_unit
from atlas.model.step_result import StepResult
from atlas.request import Delta, TokenLogprob
from atlas.sampler import Sampled, score_token
from atlas.scheduling import SchedulingOptions
from atlas.snapshots import Snapshots
from atlas.wishes import wishes_of

Choice = tuple[Generation, Sampled | AtlasError]
Ints = NDArray[np.int32]
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Flight:
    """A step between its plan and its commit.

    Attributes
    ----------
    lost : dict, optional
        Handles of requests whose blocks could not be kept, and why; None until they moved.
    result : StepResult, optional
        None until it is launched, and for a plan that only moves blocks.
    error : BaseException, optional
        What broke the launch off.
    drawn : frozenset of int
        Logits rows whose token the device chooses with a request's parameters.
    wants_tokens : bool
        Whether the device chooses a token of some row.
    chosen : int32 [L]
        Its choice for each logits row, once it was read for the log.
    """

    plan: Plan
    lost: dict[int, AtlasError] | None = None
    result: StepResult | None = None
    error: BaseException | None = None
    drawn: frozenset[int] = frozenset()
    wants_tokens: bool = False
    chosen: Ints = field(default_factory=lambda: _NO_TOKENS)


class StepLoop:
    """Requests on one model, a step at a time.

    Parameters
    ----------
    core : ModelCore
    options : SchedulingOptions
    weights : object
        Compiled sampling functions.

    Attributes
    ----------
    depth : int
        Steps that may be under way at a time: 2 with feed, else 1.
    """

    def __init__(self, core: ModelCore, options: SchedulingOptions, weights: Any) -> None:
        self.core = core
        states, block_size = core.states, core.pools.block_size
        feed = core.runtime.gains_by_feed if options.feed is None else options.feed
        self.depth = depth = 2 if feed else 1
        self._flights: deque[Flight] = deque()
        self.cache = (
            PrefixCache(core.blocks, block_size, recurrent=states is not None)
            if options.prefix_cache
            else None
        )
        core.prefix_cache = self.cache
        core.reuse_generated = options.reuse_generated
        self.scheduler = Scheduler(
            core.blocks,
            block_size,
            cache=self.cache,
            depth=depth,
            slots=None if states is None else states.running,
            chunk_unit=core.chunk_unit,
            tail_unit=tail_unit(core) if states and states.snapshots.num_total else 0,
            tail_least=core.runtime.tail_least,
            compact_slots=False,  # kernels look slots up; a move would copy a state for nothing
            max_running=options.max_running,
            max_step_tokens=core.limits.max_rows,
            max_logits_rows=core.limits.logits_rows,
            chunk_tokens=min(max(options.chunk_tokens, core.chunk_unit), core.limits.max_rows),
            max_prefills=options.max_prefills,
            spill=options.preemption == "spill",
            reuse_generated=options.reuse_generated,
            token_deadline_us=int(options.token_deadline_s * 1e6),
            aging_us=int(options.aging_s * 1e6),
            rungs=PADDED_BATCH_SIZES,
        )
        self.store = HostStore(core.pools, None if states is None else states.pools)
        self.snapshots: Snapshots | None = None
        if states is not None:
            states.snapshots.cache = self.cache
            self.snapshots = Snapshots(
                states,
                self.scheduler,
                self.cache,
                block_size,
                reuse_generated=options.reuse_generated,
            )
        self.num_steps = 0
        self.last_step_s = 0.0
        self.last_step_end_s = 0.0  # of the process's clock
        self.recorder = Recorder()
        self._max_running = options.max_running
        self._weights = weights
        self._by_handle: dict[int, tuple[LiveRequest, int]] = {}
        self._attended: set[int] = set()  # handles whose rows want more than a greedy choice
        self._log = TokenLog()  # tokens that the samples in it have not been told of

    # -- requests -----------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queue a request's first sample; the others fork from it after the prompt.

        Raises
        ------
        KvExhausted
            The pool cannot hold the request even alone.
        """
        ids = np.array(request.prompt_ids, np.int32)
        handle = self.scheduler.add(
            ids,
            request.generations[0].max_tokens,
            priority=request.priority,
            run_ahead=False,
            all_logits=request.params.prompt_logprobs is not None,
            now_us=_now_us(),
        )
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs.append(TokenLogprob(request.prompt_ids[0], None))
        self.recorder.begin(request)
        self.track(request, 0, handle)

    def cancel(self, request: LiveRequest, error: AtlasError | None = None) -> None:
        """End a request's samples wherever they are; their blocks go back."""
        for handle in list(request.handles.values()):
            self._drop(handle, FinishReason.CANCELLED if error is None else FinishReason.ERROR)
        request.end_all(error)

    def track(self, request: LiveRequest, index: int, handle: int) -> None:
        """Tie a sample to the sequence that the scheduler knows by ``handle``."""
        request.handles[index] = handle
        self._by_handle[handle] = (request, index)
        generation = request.generations[index]
        if (
            generation.needs_logits
            or generation.draws_on_device
            or request.params.prompt_logprobs is not None
        ):
            self._attended.add(handle)
        if self.depth > 1:
            self._let_run_ahead(request)

    def _untrack(self, handle: int) -> tuple[LiveRequest, Generation]:
        """A sample has no sequence any more; it has been told of all its tokens."""
        request, index = self._by_handle.pop(handle)
        del request.handles[index]
        self._attended.discard(handle)
        generation = request.generations[index]
        self._catch_up(handle, generation)
        return request, generation

    def _catch_up(self, handle: int, generation: Generation) -> None:
        """Tell a sample of its tokens in the log, which takes no more of them."""
        kept = self._log.close(handle)
        if kept is not None:
            tokens, generation.last_token_s = kept
            generation.take(tokens)

    def _let_run_ahead(self, request: LiveRequest) -> None:
        """Allow steps to be planned before the host has seen a sample's last token.

        Not while samples wait to fork from the prompt, nor where the host chooses the tokens.
        """
        alone = len(request.handles) == sum(not g.finished for g in request.generations)
        for index, handle in request.handles.items():
            ahead = alone and not request.generations[index].needs_logits
            self.scheduler.set_run_ahead(handle, ahead)

    def _drop(self, handle: int, reason: int) -> None:
        self._untrack(handle)
        self.scheduler.finish(handle, reason)
        self._forget_retired()
        self.store.forget(handle)  # what waits in host memory goes now, not at the next step

    def require_pool(self, request: LiveRequest) -> None:
        """Raise KvExhausted for a request that the pool could not hold even alone."""
        most = len(request.prompt_ids) + request.generations[0].max_tokens - 1
        blocks = -(-most // self.core.pools.block_size)
        if blocks > self.core.blocks.num_total:
            raise KvExhausted(
                f"{len(request.prompt_ids)} prompt tokens and "
                f"{request.generations[0].max_tokens} new ones need {blocks} KV blocks; "
                f"the pool has {self.core.blocks.num_total} (raise kv_tokens)"
            )

    def gauges(self) -> Gauges:
        """What the scheduler, the prefix cache and the host store hold now."""
        cache = self.cache
        misses = dict.fromkeys(MissReason, 0) if cache is None else cache.misses
        return Gauges(
            waiting=self.scheduler.num_waiting,
            running=self.scheduler.num_running,
            cached_blocks=0 if cache is None else cache.num_blocks,
            spilled_bytes=self.store.nbytes,
            prefix_hits=0 if cache is None else cache.hits,
            prefix_misses={reason.name.lower(): misses[reason] for reason in MissReason if reason},
            preemptions=self.scheduler.num_preemptions,
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or a step is under way."""
        return bool(self._by_handle or self._flights)

    # -- the step -----------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch the next step, and settle the oldest when enough are under way.

        Returns False when there was nothing to do.
        """
        started = time.perf_counter()
        try:
            # As many as may be are under way already where an interrupt kept one from settling.
            launched = len(self._flights) < self.depth and self._launch_next()
            if self._flights and (not launched or len(self._flights) >= self.depth):
                self._settle_oldest()
            elif not launched:
                return False
        finally:
            self._forget_retired()
        self.num_steps += launched
        self.last_step_end_s = time.perf_counter()
        self.last_step_s = self.last_step_end_s - started
        return True

    def settle(self) -> None:
        """Settle every step under way: requests stand still afterwards, with all tokens known."""
        while self._flights:
            self._settle_oldest()
            self._forget_retired()
        with interrupts_deferred():  # what has left the log is nowhere else yet
            for handle in self._log.handles:
                request, index = self._by_handle[handle]
                self._catch_up(handle, request.generations[index])

    def _launch_next(self) -> bool:
        """Plan and launch a step; False when nothing can run yet."""
        before = self._flights[-1].result if self._flights else None
        flight: Flight | None = None
        try:
            with interrupts_deferred():  # a plan that nobody knows of could not be committed
                plan = self.scheduler.plan(_now_us())
                if plan is None:
                    return False
                flight = Flight(plan)
                self._flights.append(flight)
            self._launch(flight, before)
        except BaseException as error:  # also an interrupt that waited for the plan
            if flight is None:
                raise
            flight.error = error
            if not isinstance(error, AtlasError):
                self.settle()
                raise
        return True

    def _launch(self, flight: Flight, before: StepResult | None) -> None:
        plan = flight.plan
        flight.lost = self.store.perform(plan)
        if self.snapshots is not None:
            self.snapshots.begin(plan)
        if plan.num_seqs:
            wishes = wishes_of(plan, self._attended, self._by_handle)
            flight.drawn = frozenset(draw.logits_row for draw in wishes.draws)
            flight.wants_tokens = wishes.tokens
            flight.result = self.core.launch_plan(
                plan,
                wants_tokens=wishes.tokens,
                host_rows=wishes.host_rows if self.depth > 1 else (),
                draws=wishes.draws,
                before=before,
            )
        if self.snapshots is not None:
            self.snapshots.keep(plan)

    def _settle_oldest(self) -> None:
        """Choose, keep and give out the tokens of the oldest step under way."""
        flight = self._flights[0]
        try:
            self._carry_out(flight)
        finally:
            if self.scheduler.num_outstanding == len(self._flights):
                self._give_up_step(flight, moved=flight.lost is not None)
            self._flights.popleft()

    def _carry_out(self, flight: Flight) -> None:
        plan, lost = flight.plan, flight.lost
        try:
            if flight.error is not None:
                raise flight.error
            choices = self._choose_all(flight)
        except BaseException as error:
            if lost is None:  # blocks were left half moved
                why = AtlasError(f"interrupted while its blocks moved: {error!r}")
                lost = dict.fromkeys(plan.actions["handle"].tolist(), why)
            self._abandon(plan, error)
            if not isinstance(error, AtlasError):
                self._go_back(error)
                if error is not flight.error:
                    raise
        else:
            with interrupts_deferred():
                self._keep_all(flight, choices)
        finally:
            for handle, reason in (lost or {}).items():
                self._lose(handle, reason)

    def _abandon(self, plan: Plan, error: BaseException) -> None:
        """Commit nothing of a step that failed. A kernel's fault ends the requests in it."""
        nothing = np.zeros(plan.num_seqs, np.int32)
        ends = nothing
        if isinstance(error, AtlasError):
            ends = np.full(plan.num_seqs, FinishReason.ERROR, np.int32)
        self.scheduler.commit(plan.step_id, nothing, nothing, ends, now_us=_now_us())
        if self.snapshots is not None:
            self.snapshots.follow(plan)
        self._report_refused(plan)
        if isinstance(error, AtlasError):
            for handle in plan.entries["handle"].tolist():
                self._end(handle, error)

    def _go_back(self, error: BaseException) -> None:
        """The oldest step counts for nothing, and so do those that were launched behind it.

        Recurrent states may have absorbed their rows: each goes back to a snapshot, or is lost.
        """
        undone = self._flights[0].plan.entries["handle"].tolist()
        for later in list(self._flights)[1:]:
            undone += later.plan.entries["handle"].tolist()
            self._abandon(later.plan, error)
        while len(self._flights) > 1:
            self._flights.pop()
        for handle in dict.fromkeys(undone):
            if self.snapshots is None or handle not in self._by_handle:
                continue
            if not self.snapshots.rebuild(handle):
                self._lose(handle, AtlasError(f"its state cannot be rebuilt after {error!r}"))

    def _give_up_step(self, flight: Flight, *, moved: bool) -> None:
        """Commit nothing of a step that broke off where no token may be taken back.

        Its requests end, and so do those whose blocks were to move and did not.
        """
        nothing = np.zeros(self._max_running, np.int32)
        ends = np.full(self._max_running, FinishReason.ERROR, np.int32)
        plan = self.scheduler.commit(flight.plan.step_id, nothing, nothing, ends, now_us=_now_us())
        if self.snapshots is not None:
            self.snapshots.follow(plan)
        self._report_refused(plan)
        for handle in plan.entries["handle"].tolist():
            self._end(handle, AtlasError("the step broke off while its tokens were kept"))
        if not moved:
            for handle in plan.actions["handle"].tolist():
                self._lose(handle, AtlasError("the step broke off before its blocks moved"))

    def _choose_all(self, flight: Flight) -> list[tuple[int, list[Choice]]]:
        """Tokens of entries that the log does not take, or the errors that end their requests.

        Nothing is kept yet. This is the only place where a user's code runs, so whatever it does
        (an interrupt, say) leaves the step as if it had not been planned.
        """
        plan, result = flight.plan, flight.result
        if result is None:
            return []
        if flight.wants_tokens and plan.num_logits:
            flight.chosen = result.tokens()
        tokens = flight.chosen.tolist()
        choices: list[tuple[int, list[Choice]]] = []
        numbers = self._log.others(plan, flight.chosen)
        columns = ("handle", "kind", "first_logits", "num_logits")
        entries = plan.entries[numbers]
        rows = zip(numbers, *(entries[name].tolist() for name in columns), strict=True)
        for i, handle, kind, first, num_logits in rows:
            if handle not in self._by_handle:
                continue  # it was cancelled meanwhile
            request, index = self._by_handle[handle]
            row, due = first + num_logits - 1, request.due(index, kind)
            drawn = row in flight.drawn
            chosen: list[Choice] = []
            for generation in due:
                if generation.needs_logits or (generation.draws_on_device and not drawn):
                    chosen.append((generation, generation.choose_safely(result.logits(row))))
                else:
                    chosen.append((generation, _chosen(generation, row, tokens[row], result)))
            choices.append((i, chosen))
        return choices

    def _keep_all(self, flight: Flight, choices: Sequence[tuple[int, list[Choice]]]) -> None:
        """Keep the tokens, tell the scheduler, then tell the clients."""
        plan = flight.plan
        self._report_refused(plan)
        now = time.perf_counter()
        tokens = np.zeros(plan.num_seqs, np.int32)
        ends = np.zeros(plan.num_seqs, np.int32)
        waited_s = self._log.keep(plan, flight.chosen, now, out=tokens)
        deltas: list[tuple[LiveRequest, int, Delta]] = []
        forks: list[tuple[int, LiveRequest, Generation]] = []
        ended: list[int] = []
        faults = self._note_prompts(flight)
        handles = plan.entries["handle"]
        for i, chosen in self._with_faults(plan, choices, faults):
            handle = int(handles[i])
            if handle not in self._by_handle:
                continue  # refused meanwhile
            request, index = self._by_handle[handle]
            self._catch_up(handle, request.generations[index])
            going = self._keep(request, chosen, deltas)
            if not going:
                failed = isinstance(chosen[0][1], AtlasError)
                ends[i] = FinishReason.ERROR if failed else FinishReason.STOP
                ended.append(handle)
                continue
            tokens[i] = going[0].last_token
            if going[0].index != index:  # the sample that held the sequence ended at once
                del request.handles[index]
                self.track(request, going[0].index, handle)
            forks += [(handle, request, generation) for generation in going[1:]]
        self.scheduler.commit(plan.step_id, tokens, None, ends, now_us=_now_us())
        if self.snapshots is not None:
            self.snapshots.follow(plan)
        for handle, request, generation in forks:
            self._fork(handle, request, generation)
        for handle in ended:
            self._untrack(handle)
        self.recorder.tokens(waited_s)
        self._deliver(deltas, now)

    def _with_faults(
        self,
        plan: Plan,
        choices: Sequence[tuple[int, list[Choice]]],
        faults: dict[int, AtlasError],
    ) -> Sequence[tuple[int, list[Choice]]]:
        """The choices, with the errors of prompts' rows in place of those requests' own."""
        if not faults:
            return choices
        failed: list[tuple[int, list[Choice]]] = []
        for i, handle in enumerate(plan.entries["handle"].tolist()):
            if handle in faults:
                generations = self._by_handle[handle][0].generations
                failed.append((i, [(generation, faults[handle]) for generation in generations]))
        others = {i for i, _ in failed}
        return [*failed, *(choice for choice in choices if choice[0] not in others)]

    def _keep(
        self,
        request: LiveRequest,
        chosen: list[Choice],
        deltas: list[tuple[LiveRequest, int, Delta]],
    ) -> list[Generation]:
        """Push each sample's token, or fail it; the samples that go on."""
        for generation, sampled in chosen:
            if isinstance(sampled, AtlasError):
                delta = generation.fail(sampled)
            else:
                delta = generation.push(sampled)
            deltas.append((request, generation.index, delta))
        return [generation for generation, _ in chosen if not generation.finished]

    def _deliver(self, deltas: list[tuple[LiveRequest, int, Delta]], now: float) -> None:
        waited_s = []
        for request, index, delta in deltas:
            generation = request.generations[index]
            if generation.error is None:
                if generation.last_token_s:
                    waited_s.append(now - generation.last_token_s)
                else:
                    self.recorder.token(request, generation, now)
                generation.last_token_s = now
            request.first_token_s = request.first_token_s or now - request.submitted_s
            request.report(index, delta)
            if not (request.is_followed or generation.finished) and generation.is_predictable:
                handle = request.handles.get(index)
                if handle is not None:  # a fork may have failed
                    self._log.open(handle, generation.last_position, generation.end_ids, now)
        self.recorder.tokens(np.array(waited_s))

    # -- rows ---------------------------------------------------------------------------------

    def _note_prompts(self, flight: Flight) -> dict[int, AtlasError]:
        """Cached tokens of prompts that began, and scores of prompt tokens; faults by handle."""
        plan = flight.plan
        faults: dict[int, AtlasError] = {}
        if plan.num_decode == plan.num_seqs:
            return faults
        entries = plan.entries[plan.num_decode :]
        columns = ("handle", "start", "first_logits", "num_logits", "flags")
        for handle, start, first, num_logits, flags in zip(
            *(entries[name].tolist() for name in columns), strict=True
        ):
            if handle not in self._by_handle:
                continue
            request, _ = self._by_handle[handle]
            if flags & EntryFlag.FIRST_CHUNK and not request.num_tokens:
                request.cached_tokens = self.scheduler.matched(handle)[0]
            if request.params.prompt_logprobs is not None:
                try:
                    self._score_prompt(request, flight.result, start, first, num_logits)
                except NonFiniteLogitsError as error:
                    faults[handle] = error
        return faults

    def _score_prompt(
        self,
        request: LiveRequest,
        result: StepResult | None,
        start: int,
        first: int,
        num_logits: int,
    ) -> None:
        """Log-probabilities of the prompt tokens that a chunk's rows predict."""
        assert result is not None
        num_top = request.params.prompt_logprobs or 0
        for i in range(num_logits):
            position = start + i + 1
            if position >= len(request.prompt_ids) or position != len(request.prompt_logprobs):
                continue  # the prompt's end, or a chunk that runs again after a preemption
            token = request.prompt_ids[position]
            best = score_token(result.logits(first + i), token, num_top, self._weights)
            request.prompt_logprobs.append(TokenLogprob(token, best.logprob, tuple(best.top)))

    def _fork(self, handle: int, request: LiveRequest, generation: Generation) -> None:
        """Give a sample a sequence of its own, which shares the prompt's blocks."""
        try:
            fork = self.fork_sequence(handle, generation.last_token)
        except AtlasError as error:
            request.report(generation.index, generation.fail(error))
        else:
            self.track(request, generation.index, fork)

    def fork_sequence(self, handle: int, token: int) -> int:
        """A second sequence that stands where ``handle`` does, with ``token`` last: its handle."""
        twin = self.scheduler.fork(handle, token, now_us=_now_us())
        if self.snapshots is not None:
            self.snapshots.fork(handle, twin)
        return twin

    def rewind_sequence(self, handle: int, position: int) -> None:
        """Drop a sequence's tokens from ``position`` on; the next one is made anew."""
        if self.snapshots is None:
            self.scheduler.rewind(handle, position)
        else:
            self.snapshots.rewind(handle, position)

    # -- ends ---------------------------------------------------------------------------------

    def _report_refused(self, plan: Plan) -> None:
        for handle, _ in plan.refused:
            self._end(handle, KvExhausted("the pools cannot hold this request beside the others"))

    def _lose(self, handle: int, error: AtlasError) -> None:
        """End a request whose state is gone, wherever the scheduler has it."""
        if handle in self._by_handle:
            self.scheduler.finish(handle, FinishReason.ERROR)
            self._end(handle, error)

    def _forget_retired(self) -> None:
        for handle in self.scheduler.take_retired():
            self.store.forget(handle)
            if self.snapshots is not None:
                self.snapshots.end(handle)

    def _end(self, handle: int, error: AtlasError) -> None:
        """A request whose sequence the scheduler gave up."""
        if handle in self._by_handle:
            request, generation = self._untrack(handle)
            if not generation.finished:
                request.report(generation.index, generation.fail(error))
            self._end_siblings(request, error)

    def _end_siblings(self, request: LiveRequest, error: AtlasError) -> None:
        """Samples without a sequence of their own cannot outlive the one they would fork from."""
        for generation in request.generations:
            if generation.index not in request.handles and not generation.finished:
                request.report(generation.index, generation.fail(error))

    def close(self, error: AtlasError) -> None:
        """End every request with ``error`` and give back blocks."""
        for request in {id(r): r for r, _ in self._by_handle.values()}.values():
            self.cancel(request, error)
        while self._flights:
            self._abandon(self._flights[0].plan, error)
            self._flights.popleft()
        self._forget_retired()
        self.scheduler.close()
        del self.store, self.cache, self.snapshots  # they hold the pools


def _chosen(
    generation: Generation, row: int, token: int, result: StepResult
) -> Sampled | AtlasError:
    """What the device chose, −1 where it could not."""
    if token < 0:
        what = " after bias and penalties" if generation.draws_on_device else ""
        return NonFiniteLogitsError(f"the model's logits hold NaN or infinity{what}")
    if generation.params.logprobs is not None:
        return result.scored(row, token)
    return Sampled(token)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
