"""Engines: load, free, and what they tell about themselves."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas.bundle import use_bundled_kernels
from atlas.capi._binding import ffi
from atlas.capi.calls import exported
from atlas.capi.event_queue import EventQueue
from atlas.capi.handles import HANDLES, handled
from atlas.capi.memory import (
    number,
    read_name,
    read_struct,
    require,
    require_buffer,
    struct_size,
    write_array,
    write_struct,
    write_text,
)
from atlas.capi.options import LoadOptionSet
from atlas.engine import Engine
from atlas.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from atlas.model import Model


@handled("engine")
class LoadedEngine:
    """An engine and the events of its submitted requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events = EventQueue()


def loaded_of(handle: Any) -> LoadedEngine:
    """What a handle stands for."""
    return HANDLES.get(number(handle), LoadedEngine)


def engine_of(handle: Any) -> Engine:
    """The engine of a handle."""
    return loaded_of(handle).engine


def driving(engine: Engine) -> AbstractContextManager[Model]:
    """This thread's turn on the engine's model; waits for it, raises once the engine is closed."""
    return engine.paused()


@exported
def engine_load(model: Any, params: Any, out: Any) -> None:
    """Load a model."""
    require(out, "engine")
    name = None if model == ffi.NULL else read_name(model, "model")
    options: dict[str, Any] = {}
    if params != ffi.NULL:
        given = read_struct(params, "atlas_load_params", "params", "progress_user")
        if given.options != ffi.NULL:
            options.update(HANDLES.get(number(given.options), LoadOptionSet).values)
        if given.progress != ffi.NULL:
            options["on_progress"] = _progress(given.progress, given.progress_user)
    use_bundled_kernels()
    engine = Engine(name, quiet=True, **options)
    out[0] = ffi.cast("atlas_engine *", HANDLES.add(LoadedEngine(engine)))


def _progress(callback: Any, user: Any) -> Callable[[int, int], None]:
    def advance(done_bytes: int, total_bytes: int) -> None:
        if callback(user, done_bytes, total_bytes):
            raise Cancelled("the progress callback cancelled the load")

    return advance


@exported
def engine_free(handle: Any) -> None:
    """Close an engine and free its handle."""
    loaded = loaded_of(handle)
    loaded.engine.close()
    HANDLES.remove(number(handle), LoadedEngine)
    loaded.events.close()


@exported
def engine_get_info(handle: Any, info: Any) -> None:
    """Fill the caller's struct."""
    engine = engine_of(handle)
    size = struct_size(info, "atlas_engine_info", "info", "vocab_size")
    with driving(engine) as model:
        core, plan = engine._loaded.core, engine._loaded.plan
        values = ffi.new("atlas_engine_info *")
        values.vocab_size = model.config.vocab_size
        values.max_seq_len = engine.max_seq_len
        values.num_layers = model.config.num_layers
        values.hidden_size = model.config.hidden_size
        values.block_size = model.forward.kv_block_size or 0
        values.num_blocks = model.lifecycle.num_total_blocks
        values.num_free_blocks = model.lifecycle.num_free_blocks
        values.max_step_tokens = core.limits.max_rows
        values.max_step_seqs = core.limits.max_seqs
        values.max_logits_rows = core.limits.logits_rows
        values.weights_bytes = plan.weights
        values.kv_bytes = plan.kv_pool
        values.state_bytes = plan.recurrent
        if core.states is not None:
            running, snapshots = core.states.running, core.states.snapshots
            values.num_state_slots = running.num_total
            values.num_free_state_slots = running.num_free
            values.num_snapshots = snapshots.num_total
            values.num_free_snapshots = snapshots.num_total - snapshots.num_used
    write_struct(values, info, size)


@exported
def engine_describe(handle: Any, buffer: Any, capacity: int, length: Any) -> None:
    """What was loaded, as JSON."""
    engine = engine_of(handle)
    require_buffer(buffer, capacity, length)
    engine._require_open()
    write_text(json.dumps(engine.describe(), ensure_ascii=False), buffer, capacity, length)


@exported
def engine_get_end_tokens(handle: Any, ids: Any, capacity: int, num_ids: Any) -> None:
    """Ids that end a completion."""
    engine = engine_of(handle)
    require_buffer(ids, capacity, num_ids)
    engine._require_open()
    write_array(np.array(engine.eos_token_ids, np.int32), ids, capacity, num_ids, "ids")
