"""What makes an engine's first request as fast as later ones."""

from __future__ import annotations

import numpy as np

from atlas.generation import Weights
from atlas.layers.step import StepShape
from atlas.model import Model
from atlas.model.batch import Window, build
from atlas.model.core import ModelCore
from atlas.sampler import Sampler
from atlas.sampling import SamplingParams

_MAX_DECODE = 32  # larger batches are recorded when they first run
_EVERY_STAGE = SamplingParams(
    temperature=1.0, seed=0, top_k=40, top_p=0.9, min_p=0.01, logprobs=1, repetition_penalty=1.1
)


def warm_up(
    core: ModelCore, model: Model, weights: Weights, *, chunk_tokens: int, max_running: int
) -> None:
    """Record the launches of decode steps and of a full prompt chunk, run a prompt, and sample.

    Reads every weight once and touches the buffers' pages. Takes KV blocks for a moment, as many
    as a chunk needs or are free; logits views become stale.
    """
    rows = min(chunk_tokens, core.limits.piece_rows, core.limits.max_seq_len - 1)
    decode = [*range(1, min(max_running, _MAX_DECODE) + 1)]
    decode += [size for size in core.runtime.batch_sizes if _MAX_DECODE < size <= max_running]
    shapes = [StepShape.decode(count) for count in decode]
    prompts = [*(size for size in core.runtime.prompt_sizes if size < rows), rows]
    shapes += [StepShape.prompt(count, logits) for count in prompts for logits in (0, 1)]
    core.runtime.prepare(core.network, core.buffers, shapes)
    rows = min(rows, core.blocks.num_free * core.pools.block_size - 1)
    if rows < 1:
        return  # running requests hold every block, and have warmed the rest
    seq = model.lifecycle.alloc_sequence()
    ids = np.zeros(rows, np.int32)
    try:
        # Below the capability groups, which would look for the prompt in the prefix cache.
        core.reserve(seq, rows + 1)
        for window in (Window(seq, ids, "prompt", 1), Window(seq, ids[:1], "step", 1)):
            core.run(build([window]))
            core.commit(seq, window.token_ids, window.kind)
        core.argmax_rows(1)
        sampler = Sampler(
            _EVERY_STAGE, vocab_size=core.config.vocab_size, prompt_ids=[0], weights=weights
        )
        sampler.sample(core.runtime.to_host(core.buffers.logits[:1])[0], 1)
    finally:
        model.lifecycle.free_sequence(seq)
