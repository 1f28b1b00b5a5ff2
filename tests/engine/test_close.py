"""``close`` and ``with``: what ends, what is let go of, and what says so afterwards."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.errors import ClosedError, StaleHandleError
from atlas.layers.attention import Attention
from atlas.model.core import ModelCore

pytestmark = pytest.mark.cpu

PROMPT = [5, 6, 7]


def num_threads() -> int:
    """Of this process, worker threads included."""
    return len(list(Path("/proc/self/task").iterdir()))


def attention_of(core: ModelCore) -> Attention:
    """The first layer's attention, whose table no other engine shares."""
    block = core.network.blocks[0]
    assert isinstance(block, Attention)
    return block


def assert_threads_end(expected: int) -> None:
    """A joined thread may stay listed for a moment."""
    deadline = time.monotonic() + 5
    while num_threads() != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    assert num_threads() == expected


def test_every_call_after_close_raises(text_folder: Path) -> None:
    engine = Engine(text_folder, threads=2, quiet=True)
    model = engine.model
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(PROMPT, seq)
    assert view is not None
    messages = [{"role": "user", "content": "hi"}]
    engine.close()
    engine.close()
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.generate("text"),
        lambda: engine.generate(PROMPT),
        lambda: engine.stream(PROMPT),
        lambda: engine.chat(messages),
        lambda: engine.stream_chat(messages),
        lambda: engine.chat_token_ids(messages),
        lambda: engine.model,
        lambda: engine.tokenizer,
        lambda: model.lifecycle.alloc_sequence(),
        lambda: model.lifecycle.num_free_blocks,
        lambda: model.lifecycle.num_total_blocks,
        lambda: model.lifecycle.kv_block_bytes,
        lambda: model.lifecycle.bind_to_thread(),
        lambda: model.lifecycle.free_sequence(seq),
        lambda: model.forward.kv_block_size,
        lambda: model.forward.prefill(PROMPT, seq),
        lambda: model.forward.decode(3, seq),
        lambda: model.verify.decode_verify([3], seq),
        lambda: model.logits.buffer,
        lambda: model.logits.argmax(view),
        lambda: model.streams.create_stream(),
        lambda: view.numpy(),
        lambda: view.topk(1),
        lambda: view[0],
        lambda: np.asarray(view),
        lambda: engine.__enter__(),
    )
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()
    model.lifecycle.teardown()  # idempotent as well


def test_descriptions_outlive_the_engine(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    view = engine.model.forward.prefill(PROMPT, seq := engine.model.lifecycle.alloc_sequence())
    engine.close()
    assert "closed" in repr(engine)
    assert "closed" in engine._repr_html_()
    assert "closed" in repr(view)
    assert "closed" in view._repr_html_()  # type: ignore[union-attr]
    assert "seq_len=3" in repr(seq)
    assert engine.max_seq_len == 512
    assert engine.eos_token_ids == (2,)


def test_with_closes_even_after_an_error(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), Engine(folder, threads=1, quiet=True) as engine:
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        engine.generate(PROMPT)


def test_close_ends_the_threads_and_lets_go_of_the_memory(folder: Path) -> None:
    gc.collect()
    before = num_threads()
    engine = Engine(folder, threads=3, quiet=True)
    core = engine._loaded.core
    owners = core.pools.keys[0].base, attention_of(core).rope_table
    held = [weakref.ref(owner) for owner in owners]
    assert num_threads() == before + 2
    engine.generate(PROMPT, SamplingParams(max_tokens=2))
    engine.close()
    assert_threads_end(before)
    del core, owners
    assert [ref() for ref in held] == [None, None]


def test_an_engine_that_is_dropped_leaves_nothing(folder: Path) -> None:
    """Running a cell again drops the old engine: no cycle may keep it until a collection."""
    gc.collect()
    before = num_threads()
    gc.disable()
    try:
        engine = Engine(folder, threads=2, quiet=True)
        engine.generate(PROMPT, SamplingParams(max_tokens=2, temperature=1.0))
        list(engine.stream(PROMPT, SamplingParams(max_tokens=2)))
        core = engine._loaded.core
        owners: tuple[object, ...] = core, attention_of(core).rope_table
        held = [weakref.ref(owner) for owner in owners]
        del engine, core, owners
        assert [ref() for ref in held] == [None, None]
        assert_threads_end(before)
    finally:
        gc.enable()


def test_a_views_numbers_survive_while_somebody_holds_them(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    view = engine.model.forward.prefill(PROMPT, engine.model.lifecycle.alloc_sequence())
    assert view is not None
    rows, copy = view.numpy(), np.asarray(view)
    engine.close()
    np.testing.assert_array_equal(rows, copy)


def test_sequences_and_views_of_another_engine_are_refused(engine: Engine, folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True) as other:
        seq = other.model.lifecycle.alloc_sequence()
        view = other.model.forward.prefill(PROMPT, seq)
        assert view is not None
        with pytest.raises(StaleHandleError, match="another model"):
            engine.model.forward.prefill(PROMPT, seq)
        with pytest.raises(StaleHandleError, match="another model"):
            engine.model.logits.argmax(view)


def test_two_threads_may_close_at_once(folder: Path) -> None:
    for _ in range(5):
        engine = Engine(folder, threads=2, quiet=True)
        threads = [threading.Thread(target=engine.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
