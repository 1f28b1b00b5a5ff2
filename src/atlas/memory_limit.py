"""A load that keeps within a number of bytes."""

from __future__ import annotations

import dataclasses
from numbers import Integral

from atlas.cache.kv import BLOCK_SIZE
from atlas.errors import InvalidArgumentError, shown
from atlas.model.load import LoadOptions, plan_load
from atlas.weights.checkpoint import Checkpoint


def within_limit(checkpoint: Checkpoint, options: LoadOptions, memory_limit: int) -> LoadOptions:
    """Options whose plan takes at most ``memory_limit`` bytes.

    A KV cache whose size was not given shrinks, down to one block. Weights shared with another
    engine count in full.

    Raises
    ------
    InvalidArgumentError
        ``memory_limit`` is not a positive integer.
    OutOfMemoryError
        The plan does not fit; the message gives its numbers.
    """
    whole = isinstance(memory_limit, Integral) and not isinstance(memory_limit, bool)
    if not whole or memory_limit < 1:
        raise InvalidArgumentError(
            f"memory_limit is {shown(memory_limit)}; allowed: an integer of 1 or more, in bytes"
        )
    plan = plan_load(checkpoint, options)
    if plan.memory.total <= memory_limit:
        return options
    rest = memory_limit - (plan.memory.total - plan.memory.kv_pool)
    num_blocks = rest // max(1, plan.memory.kv_pool // plan.num_blocks)
    if options.kv_tokens is not None or num_blocks < 1:
        raise plan.memory.refusal(
            f"together {plan.memory.total} bytes, and memory_limit is {memory_limit}"
        )
    return dataclasses.replace(options, kv_tokens=num_blocks * BLOCK_SIZE)
