"""Samplers driven by hand."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.capi._binding import ffi
from atlas.capi.calls import exported
from atlas.capi.engine import driving, engine_of
from atlas.capi.handles import HANDLES, handled
from atlas.capi.logits import one_row, rows_of
from atlas.capi.memory import fits, number, read_ids, require, require_buffer
from atlas.capi.options import SamplingSet
from atlas.errors import InvalidArgumentError, PromptTooLongError
from atlas.sampler import Sampled, Sampler
from atlas.sampling import SamplingParams

if TYPE_CHECKING:
    from atlas.engine import Engine


@handled("sampler")
class OwnedSampler:
    """A sampler with its engine and its last choice."""

    def __init__(self, engine: Engine, params: SamplingParams, prompt: NDArray[np.int32]) -> None:
        self.engine = engine
        self.params = params
        self.num_prompt_tokens = len(prompt)
        self.last: Sampled | None = None
        self.lock = threading.Lock()
        self.sampler = Sampler(
            params,
            vocab_size=engine._loaded.model.config.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            prompt_ids=prompt.tolist(),
            weights=engine._intake._weights,
        )


_DEFAULTS = SamplingParams()


def _sampler_of(handle: Any) -> OwnedSampler:
    return HANDLES.get(number(handle), OwnedSampler)


def sampling_of(handle: Any) -> SamplingParams:
    """The parameters of a sampling handle, or of NULL."""
    return _DEFAULTS if not handle else HANDLES.get(number(handle), SamplingSet).params()


@exported
def sampler_create(engine: Any, sampling: Any, prompt: Any, count: int, out: Any) -> None:
    """A sampler for one sample."""
    found = engine_of(engine)
    require(out, "sampler")
    found._require_open()
    params = sampling_of(sampling)
    if count > found.max_seq_len:
        raise PromptTooLongError(f"{count} tokens; allowed: up to {found.max_seq_len}")
    ids = read_ids(prompt, count, found.max_seq_len, "prompt")
    made = OwnedSampler(found, found._intake.params(params), ids)
    out[0] = ffi.cast("atlas_sampler *", HANDLES.add(made))


@exported
def sampler_sample(handle: Any, logits: Any, row: int, mask: Any, token: Any, logprob: Any) -> None:
    """Choose the token after a row."""
    found = _sampler_of(handle)
    rows = rows_of(logits)
    require(token, "token")
    if rows.engine is not found.engine:
        raise InvalidArgumentError("sampler and logits belong to different engines")
    sampler = found.sampler
    with driving(found.engine), found.lock:
        words = None
        if mask:
            size = 4 * ((sampler.vocab_size + 31) // 32)
            words = np.frombuffer(ffi.buffer(mask, size), np.int32).copy()
        array = one_row(rows.rows(), row).numpy()[0]
        position = found.num_prompt_tokens + sampler.num_output_tokens
        found.last = chosen = sampler.sample(array, position, words)
    token[0] = chosen.token_id
    if logprob:
        logprob[0] = math.nan if chosen.logprob is None else chosen.logprob


@exported
def sampler_get_top(handle: Any, top: Any, capacity: int, num_top: Any) -> None:
    """The most probable tokens of the last choice."""
    found = _sampler_of(handle)
    require_buffer(top, capacity, num_top)
    best = [] if found.last is None else list(found.last.top)
    if fits(len(best), top, capacity, num_top, "tokens"):
        for i, (token_id, logprob) in enumerate(best):
            top[i].token, top[i].logprob = token_id, logprob


@exported
def sampler_observe(handle: Any, token: int) -> None:
    """Remember a token."""
    found = _sampler_of(handle)
    with found.lock:
        found.sampler.observe(token)


@exported
def sampler_rewind(handle: Any, num_tokens: int) -> None:
    """Forget all but the first tokens."""
    found = _sampler_of(handle)
    with found.lock:
        found.sampler.rewind(num_tokens)


@exported
def sampler_get_seed(handle: Any, seed: Any) -> None:
    """The seed that is used; 0 for a greedy sampler, which has none."""
    found = _sampler_of(handle)
    require(seed, "seed")
    seed[0] = found.params.seed or 0


@exported
def sampler_free(handle: Any) -> None:
    """Free a sampler."""
    HANDLES.remove(number(handle), OwnedSampler)
