"""Circuit: choosing and disclosing the forward that decode runs, with ops of one's own in it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest

from atlas.errors import CapabilityError, InvalidArgumentError
from atlas.model.circuit import ForwardSelection, ModelCircuit
from atlas.model.load import LoadedModel
from atlas.ops import OPS
from atlas.ops.select import implementations
from tests.helpers.random_model import random_model


@pytest.fixture
def loaded() -> Iterator[LoadedModel]:
    with random_model("dense") as model:
        yield model


def circuit_of(loaded: LoadedModel) -> ModelCircuit:
    assert loaded.model.circuit is not None
    return loaded.model.circuit


def logits_of(loaded: LoadedModel) -> Any:
    model = loaded.model
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill([5, 6, 7, 8], seq)
    row = model.logits.to_host(model.forward.decode(9, seq))
    model.lifecycle.free_sequence(seq)
    return row


@pytest.mark.contract("circuit.set_forward")
def test_an_op_of_one_s_own_runs_from_the_next_step_on(loaded: LoadedModel) -> None:
    before, calls = logits_of(loaded), []

    def rmsnorm(x: Any, weight: Any, eps: float, *, out: Any) -> None:
        calls.append(x.shape)
        OPS["rmsnorm"](x, weight, eps, out=out)
        out *= 0.5

    circuit_of(loaded).set_forward(ForwardSelection(ops={"rmsnorm": rmsnorm}))
    changed = logits_of(loaded)
    assert calls
    assert not np.array_equal(changed, before)
    circuit_of(loaded).set_forward(ForwardSelection())
    np.testing.assert_array_equal(logits_of(loaded), before)


@pytest.mark.contract("circuit.set_forward")
def test_an_op_of_one_s_own_runs_outside_of_steps_too() -> None:
    """In the final norm that is asked for behind a step, and in a prompt layer by layer."""
    calls = []

    def rmsnorm(x: Any, weight: Any, eps: float, *, out: Any) -> None:
        calls.append(x.shape)
        OPS["rmsnorm"](x, weight, eps, out=out)
        out *= 0.5

    with random_model("delta") as loaded:
        circuit_of(loaded).set_forward(ForwardSelection(ops={"rmsnorm": rmsnorm}))
        model, prompt = loaded.model, list(range(40))
        one, two = (model.lifecycle.alloc_sequence() for _ in range(2))
        want = model.logits.to_host(model.forward.prefill(prompt, one))
        rows = model.logits.to_host(model.forward.prefill_twophase(prompt, two, 7))
        np.testing.assert_array_equal(rows, want)
        model.forward.decode(9, one)
        read = loaded.core.buffers.normed[:1].copy()  # by the head
        calls.clear()
        np.testing.assert_array_equal(model.logits.hidden_after_norm(), read)
        assert calls == [read.shape]


@pytest.mark.contract("circuit.set_forward")
def test_an_op_may_launch_on_the_queue(loaded: LoadedModel) -> None:
    from atlas.backends.cpu import norm

    before, calls = logits_of(loaded), []

    def rmsnorm(queue: Any, x: Any, weight: Any, eps: float, *, out: Any) -> None:
        calls.append(x.shape)
        norm.rmsnorm(queue, x, weight, eps, out=out)

    circuit_of(loaded).set_forward(ForwardSelection(ops={"rmsnorm": rmsnorm}))
    np.testing.assert_array_equal(logits_of(loaded), before)
    recorded = len(calls)
    assert recorded
    logits_of(loaded)
    assert len(calls) == recorded  # the second time the lists were there


@pytest.mark.contract("circuit.set_forward")
@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("rmsnorm", 7),
        ("linear", 6),
        ("moe_route", 2),
        ("moe_router", 2),
        ("moe_experts", 2),
        ("moe_block", 2),
    ],
)
def test_an_op_of_one_s_own_runs_where_another_stands_for_it(name: str, times: int) -> None:
    """``moe_router`` is the first three, ``moe_block`` it and ``moe_experts``.

    The model has three layers, two of them with experts.
    """
    from atlas.backends.cpu import linear, moe, norm

    module, calls = {"rmsnorm": norm, "linear": linear}.get(name, moe), []

    def counted(queue: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(name)
        getattr(module, name)(queue, *args, **kwargs)

    counted.__signature__ = inspect.signature(getattr(module, name))  # type: ignore[attr-defined]
    with random_model("moe") as loaded:
        before = logits_of(loaded)
        circuit_of(loaded).set_forward(ForwardSelection(ops={name: counted}))
        np.testing.assert_array_equal(logits_of(loaded), before)
    assert len(calls) == 2 * times  # two kinds of step were recorded


@pytest.mark.contract("circuit.set_forward")
@pytest.mark.parametrize("name", ["rmsnorm", "linear", "linear_gated", "rmsnorm_linear"])
def test_a_fused_op_makes_way_for_a_replaced_part(loaded: LoadedModel, name: str) -> None:
    before, own, calls = logits_of(loaded), implementations("cpu")[name], 0

    @wraps(own)
    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        own(*args, **kwargs)

    circuit_of(loaded).set_forward(ForwardSelection(ops={name: counted}))
    np.testing.assert_array_equal(logits_of(loaded), before)
    num_layers = loaded.core.config.num_layers
    assert calls >= 2 * num_layers  # once for each of two shapes
    circuit_of(loaded).set_forward(ForwardSelection())
    np.testing.assert_array_equal(logits_of(loaded), before)


@pytest.mark.contract("circuit.set_forward")
@pytest.mark.parametrize("name", ["attention_step", "sigmoid_gate", "attention_step_gated"])
def test_attention_with_its_gate_makes_way_for_either(name: str) -> None:
    own, rows = implementations("cpu")[name], []

    @wraps(own)
    def counted(queue: Any, *args: Any, **kwargs: Any) -> None:
        rows.append(len(args[0]))
        own(queue, *args, **kwargs)

    counted.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    with random_model("delta") as loaded:
        before = logits_of(loaded)
        circuit_of(loaded).set_forward(ForwardSelection(ops={name: counted}))
        np.testing.assert_array_equal(logits_of(loaded), before)
    assert 1 in rows


@pytest.mark.contract("circuit.set_forward")
def test_what_is_not_offered_is_refused_and_changes_nothing(loaded: LoadedModel) -> None:
    before, circuit = circuit_of(loaded).disclosure(), circuit_of(loaded)

    def wrong(x: Any, *, out: Any) -> None: ...

    with pytest.raises(CapabilityError, match="'graphed' is not offered; this backend has: eager"):
        circuit.set_forward(ForwardSelection("graphed"))
    with pytest.raises(InvalidArgumentError, match="op 'softmax' is unknown; allowed: add"):
        circuit.set_forward(ForwardSelection(ops={"softmax": wrong}))
    with pytest.raises(InvalidArgumentError, match=r"takes \(x, out\); allowed: \(x, weight"):
        circuit.set_forward(ForwardSelection(ops={"rmsnorm": wrong}))

    def strict(x: Any, weight: Any, bias: Any, *, out: Any) -> None: ...

    with pytest.raises(InvalidArgumentError, match="takes bias without a default; allowed: bias=N"):
        circuit.set_forward(ForwardSelection(ops={"linear": strict}))
    assert circuit.disclosure() == before


@pytest.mark.contract("circuit.disclosure")
def test_a_replaced_op_voids_the_promises_and_is_named(loaded: LoadedModel) -> None:
    plain = circuit_of(loaded).disclosure()
    assert (plain.kind, plain.replaced_ops, plain.reason) == ("eager", (), "the default")
    assert any("rows that share its step" in promise for promise in plain.promises)
    assert plain.fingerprint == loaded.core.runtime.fingerprint

    def add(x: Any, y: Any, *, out: Any) -> None:
        out[...] = x + y

    circuit_of(loaded).set_forward(ForwardSelection(ops={"add": add}))
    changed = circuit_of(loaded).disclosure()
    assert changed.replaced_ops == ("add",)
    assert changed.promises == ()
    assert "add" in changed.reason
    assert changed.fingerprint != plain.fingerprint
