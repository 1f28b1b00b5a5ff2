"""A step reads every weight matrix once and allocates nothing, whatever shares it."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from atlas.layers.attention import Attention
from atlas.layers.mlp import Mlp
from atlas.layers.moe import Moe
from atlas.layers.network import Network
from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.sequence import SequenceState
from tests.exactness.serial import Case, sequences, text, window
from tests.helpers.random_model import random_model

# Where an op takes its weight matrices, behind the queue.
WEIGHT_ARGUMENTS = {
    "linear": (2,),
    "linear_add": (2,),
    "linear_gated": (2,),
    "moe_router": (4,),
    "rmsnorm_linear": (4,),
    "rmsnorm_linear_gated": (4,),
    "moe_experts": (2, 3),
    "moe_block": (4, 13, 14),
    "embedding": (2,),
}
Call = tuple[str, int]


class OpRecorder:
    """Counts the calls of ops on each weight matrix, and the sweeps they belong to."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.calls: Counter[Call] = Counter()
        self.sweeps = 0
        runtime: Any = loaded.core.runtime
        for op, positions in WEIGHT_ARGUMENTS.items():
            runtime.functions[op] = self._counted(op, positions, runtime.functions[op])
        runtime.run = self._fresh(runtime, runtime.run)

    def _counted(
        self, op: str, positions: tuple[int, ...], call: Callable[..., None]
    ) -> Callable[..., None]:
        def counted(*args: Any, **kwargs: Any) -> None:
            for position in positions:
                self.calls["embedding" if op == "embedding" else "product", id(args[position])] += 1
            call(*args, **kwargs)

        return counted

    def _fresh(self, runtime: Any, run: Callable[..., None]) -> Callable[..., None]:
        def fresh(*args: Any) -> None:
            self.sweeps += 1
            runtime.forget_recorded()  # a list that is replayed calls no ops
            run(*args)

        return fresh


def matrices(network: Network) -> Iterator[Call]:
    """Every weight matrix and how it is read: one lookup, or one product."""
    yield "embedding", id(network.embedding)
    found: list[Any] = [*network.head.matrices]
    for block in network.blocks:
        if isinstance(block, Attention):
            found += [*block.qkv.matrices, *block.output.matrices]
        elif isinstance(block, Mlp):
            found += [*block.gate_up.matrices, *block.down.matrices]
        else:
            assert isinstance(block, Moe)
            found += [*block.router.matrices, block.gate_up, block.down]
    yield from (("product", id(matrix)) for matrix in found)


Step = Callable[[Model, list[SequenceState]], object]

STEPS: dict[str, Step] = {
    "prefill": lambda m, s: m.forward.prefill(text(0)[:40], s[5]),
    "prefill_chunk": lambda m, s: m.forward.prefill_chunk(text(0)[:40], s[5], 0, 40, True),
    "decode": lambda m, s: m.forward.decode(3, s[0]),
    "decode_batch": lambda m, s: m.forward.decode_batch([1, 2, 3, 4, 5], s[:5]),
    "prefill_batch_chunk": lambda m, s: m.forward.prefill_batch_chunk(
        [window(i, s[i], 30 + i, finishes=i != 6) for i in (5, 6, 7)]
    ),
    "mixed_forward": lambda m, s: m.forward.mixed_forward(
        [1, 2, 3], s[:3], window(5, s[5], 20, finishes=True)
    ),
    "mixed_forward_batch": lambda m, s: m.forward.mixed_forward_batch(
        [1, 2, 3], s[:3], [window(i, s[i], 20 + i, finishes=True) for i in (5, 6)]
    ),
    "decode_verify": lambda m, s: m.verify.decode_verify([1, 2, 3, 4], s[0]),
}


@contextmanager
def running(case: Case, **options: Any) -> Iterator[tuple[LoadedModel, list[SequenceState]]]:
    """A model with five sequences in decode and three that have not begun."""
    with random_model(case.config, case.format, threads=2, **options) as loaded:
        texts = [(i, 3 + 10 * i if i < 5 else 0) for i in range(8)]
        with sequences(loaded.model, texts) as seqs:
            yield loaded, seqs


@pytest.mark.parametrize(
    "case", [Case("dense"), Case("gemma"), Case("moe"), Case("moe_wide", "q4_k")], ids=str
)
@pytest.mark.parametrize("step", STEPS)
def test_every_weight_is_read_once(case: Case, step: str) -> None:
    with running(case) as (loaded, seqs):
        recorder = OpRecorder(loaded)
        STEPS[step](loaded.model, seqs)
        assert recorder.sweeps == 1
        assert recorder.calls == Counter(matrices(loaded.core.network))
        assert max(recorder.calls.values()) == 1


def test_a_window_without_logits_ends_with_the_last_keys_and_values() -> None:
    with running(Case("dense")) as (loaded, seqs):
        recorder, network = OpRecorder(loaded), loaded.core.network
        loaded.model.forward.prefill_batch_chunk([window(5, seqs[5], 9, finishes=False)])
        attention, last = network.blocks[-2:]
        assert isinstance(attention, Attention)
        assert isinstance(last, Mlp)
        unread = [*network.head.matrices, *last.gate_up.matrices, *last.down.matrices]
        unread += attention.output.matrices
        keys = {("product", id(matrix)) for matrix in unread}
        assert recorder.calls == Counter(call for call in matrices(network) if call not in keys)


@pytest.mark.parametrize("case", [Case("gemma"), Case("moe")], ids=str)
def test_rows_without_logits_end_with_the_last_mixer(case: Case) -> None:
    """The last feed-forward takes those that have logits alone, dense or a mixture."""
    with running(case) as (loaded, seqs):
        runtime: Any = loaded.core.runtime
        rows: list[int] = []
        for op in ("rmsnorm_linear_gated", "moe_block"):
            call = runtime.functions[op]

            def counted(queue: Any, x: Any, *args: Any, call: Any = call, **kwargs: Any) -> None:
                rows.append(len(x))
                call(queue, x, *args, **kwargs)

            runtime.functions[op] = counted
        runtime.forget_recorded()
        pieces = [window(i, seqs[i], 20 + i, finishes=True) for i in (5, 6)]
        loaded.model.forward.mixed_forward_batch([1, 2, 3], seqs[:3], pieces)
        assert rows == [3 + 25 + 26] * (len(rows) - 1) + [3 + 2]
        assert len(rows) == loaded.model.config.num_layers
        rows.clear()
        loaded.model.forward.decode_batch([1, 2, 3], seqs[:3])
        assert rows == [3] * loaded.model.config.num_layers


@pytest.mark.parametrize("case", [Case("dense"), Case("delta_last")], ids=str)
def test_the_last_attention_serves_rows_with_logits_alone(case: Case) -> None:
    with running(case) as (loaded, seqs):
        runtime: Any = loaded.core.runtime
        call, served = runtime.functions["attention_prefill"], []

        def counted(queue: Any, *args: Any, first_rows: Any = None, **kwargs: Any) -> None:
            left_out = first_rows if first_rows is not None else args[4]
            served.append((args[4][1:] - left_out[: len(args[4]) - 1]).tolist())
            more = {} if first_rows is None else {"first_rows": first_rows}
            call(queue, *args, **more, **kwargs)

        runtime.functions["attention_prefill"] = counted
        runtime.forget_recorded()
        pieces = [window(i, seqs[i], 20 + i, finishes=i != 7) for i in (5, 6, 7)]
        loaded.model.forward.mixed_forward_batch([1, 2, 3], seqs[:3], pieces)
        layers = sum(kind == "attention" for kind in loaded.model.config.layer_kinds) or 3
        assert served == [[25, 26, 27]] * (layers - 1) + [[1, 1, 0]]


@pytest.mark.parametrize("step", [name for name in STEPS if "prefill_chunk" not in name])
def test_a_step_allocates_nothing(step: str) -> None:
    """The second step of a shape: what Python allocates is small and does not grow with rows."""
    with running(Case("moe_wide", "q8_0")) as (loaded, seqs):
        model, device = loaded.model, loaded.core.runtime.device
        lengths = [seq.seq_len for seq in seqs]

        def go() -> None:
            STEPS[step](model, seqs)
            for seq, length in zip(seqs, lengths, strict=True):
                if seq.verify_rows:
                    model.verify.accept(seq, 0)
                model.lifecycle.rewind(seq, length)

        go()
        go()
        scratch, pools = device.scratch(0), [*loaded.core.pools.keys, *loaded.core.pools.values]
        addresses = [pool.ctypes.data for pool in pools]
        tracemalloc.start()
        try:
            go()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        one_activation = 4 * loaded.model.config.hidden_size * 20
        assert peak < one_activation, f"{peak} bytes"
        assert device.scratch(0) is scratch
        assert [pool.ctypes.data for pool in pools] == addresses
