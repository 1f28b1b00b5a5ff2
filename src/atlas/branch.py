"""Forks and rewinds of running requests, between two steps."""

from __future__ import annotations

from atlas.driver import Driver
from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.generation import Generation
from atlas.intake import Intake
from atlas.live_request import LiveRequest
from atlas.request import Delta
from atlas.sampler import Sampled
from atlas.sampling import SamplingParams
from atlas.step_loop import StepLoop


def require_running(
    loop: StepLoop, request: LiveRequest, verb: str, *, caught_up: bool = True
) -> int:
    """Handle of a request with one sample that has tokens and is not preempted.

    Raises
    ------
    InvalidArgumentError
        ``n`` is more than 1.
    SequenceStateError
        It waits, its prompt is not done, or it is preempted; with ``caught_up`` also while tokens
        run again, after a preemption or a rewind.
    """
    if request.params.n != 1:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has n {request.params.n}; allowed to {verb}: n 1"
        )
    handle = request.handles[0]
    state = loop.scheduler.state(handle)
    if request.num_tokens == 0:
        why = "its prompt is not done"
    elif state != "running":
        why = "it is preempted"
    elif caught_up and _standing(loop, handle) < len(request.prompt_ids) + request.num_tokens - 1:
        why = "after a preemption or a rewind it still runs its tokens again"
    else:
        return handle
    raise SequenceStateError(f"request {request.request_id!r} cannot {verb} now: {why}")


def _standing(loop: StepLoop, handle: int) -> int:
    return loop.scheduler.sequence(handle).seq_len


def fork(
    driver: Driver,
    loop: StepLoop,
    intake: Intake,
    request_id: str,
    new_id: str | None,
    params: SamplingParams | None,
) -> LiveRequest:
    """A live copy of a running request; ``Engine.fork`` documents it."""
    with driver.between_steps():
        parent = driver.find(request_id)
        handle = require_running(loop, parent, "fork")
        old = parent.generations[0]
        new = parent.params if params is None else intake.params(params)
        _require_compatible(parent.params, new)
        child = intake.request(
            parent.prompt_ids,
            new,
            lambda event: None,
            request_id=new_id,
            priority=parent.priority,
            user=parent.user,
        )
        generation = child.generations[0]
        generation.replay(_with_logprobs_of(new, old.chosen))
        if generation.max_tokens > old.max_tokens:
            raise InvalidArgumentError(
                f"max_tokens is {new.max_tokens}; allowed in a fork: up to the "
                f"{old.num_tokens + old.max_tokens} of request {request_id!r}"
            )
        if new.prompt_logprobs is not None:
            child.prompt_logprobs = list(parent.prompt_logprobs)
        child.cached_tokens = parent.cached_tokens
        child.resumed = True
        driver.register(child, public=True)
        try:
            twin = loop.fork_sequence(handle, old.last_token)
        except BaseException:
            driver.give_up(child)
            raise
        loop.track(child, 0, twin)
        return child


def rewind(driver: Driver, loop: StepLoop, intake: Intake, request_id: str, position: int) -> Delta:
    """Drop a running request's tokens from ``position`` on; ``Engine.rewind`` documents it."""
    with driver.between_steps():
        request = driver.find(request_id)
        handle = require_running(loop, request, "rewind", caught_up=False)
        old = request.generations[0]
        least = len(request.prompt_ids)
        if isinstance(position, bool) or not isinstance(position, int):
            raise InvalidArgumentError(f"position is {position!r}; allowed: an integer")
        if not least <= position <= least + old.num_tokens:
            raise InvalidArgumentError(
                f"position is {position}; allowed: {least} (the prompt's end) … "
                f"{least + old.num_tokens}"
            )
        generation: Generation = intake.generation(request.prompt_ids, request.params, 0)
        standing = generation.replay(old.chosen[: position - least])
        loop.rewind_sequence(handle, position)
        request.generations[0] = generation
        driver.drop_events(request_id)
        return standing


def _require_compatible(old: SamplingParams, new: SamplingParams) -> None:
    """What a fork cannot change: how many samples, and what is known of tokens so far."""
    if new.n != 1:
        raise InvalidArgumentError(f"n is {new.n}; allowed in a fork: 1")
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(new, name), getattr(old, name)
        if ours not in (None, theirs):
            raise InvalidArgumentError(
                f"{name} is {ours}; allowed in a fork: None or its request's own, {theirs}"
            )
    if new.logprobs is not None and new.logprobs_mode != old.logprobs_mode:
        raise InvalidArgumentError(
            f"logprobs_mode is {new.logprobs_mode!r}; allowed in a fork: {old.logprobs_mode!r}"
        )


def _with_logprobs_of(params: SamplingParams, chosen: list[Sampled]) -> list[Sampled]:
    if params.logprobs is not None:
        return chosen
    return [Sampled(sampled.token_id) for sampled in chosen]
