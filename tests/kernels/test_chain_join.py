"""Joining a step's launches into chains: what is joined, and with which bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.chain import Chains
from atlas.backends.cuda.launch import KernelLaunch, Queue, Recording
from atlas.backends.cuda.linear import linear, linear_add
from atlas.backends.cuda.norm import rmsnorm
from atlas.backends.cuda.norm_linear import rmsnorm_linear, rmsnorm_linear_gated
from tests.kernels.launches import Bench, decode, encode, machine_bench
from tests.kernels.op_launches import BenchQueue, put_matrix
from tests.ops.cases import random_matrix

HIDDEN, INNER, HEADS, LAST = 64, 128, 192, 88
Array = np.ndarray[Any, Any]


class Device:
    """What ``Chains`` asks of a device, over a bench."""

    arch, num_sms = "sm_90a", 3

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        queue = BenchQueue(bench, self.arch)

        def address(array: DeviceArray, box: Any, shape: Any, strides: Any) -> int:
            return bench.early(queue.tensor_map(array, box, shape=shape, strides=strides))

        self.tensor_maps = SimpleNamespace(address=address)

    def allocate(self, nbytes: int, what: str) -> int:
        return self.bench.early(self.bench.memory.put(np.zeros(nbytes, np.uint8)))

    def fill(self, address: int, nbytes: int) -> None:
        pass  # as allocated

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        raw = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(source), np.uint8)
        memory: Any = self.bench.memory
        memory.data[memory.indices(np.array([target], np.uint64), 1)[0, 0] :][:nbytes] = raw

    def synchronize(self) -> None:
        pass


class Step:
    """A layer's products behind its attention, recorded."""

    def __init__(self, bench: Bench, rows: int) -> None:
        self.bench, self.rows = bench, rows
        self.device = Device(bench)
        rng = np.random.default_rng(rows)

        def rows_of(columns: int) -> DeviceArray:
            values = encode(rng.standard_normal((rows, columns)).astype(np.float32), "bf16")
            return DeviceArray(bench.memory.put(values), values.shape, "bfloat16")

        def vector(size: int, spread: float) -> DeviceArray:
            values = (rng.standard_normal(size) * spread + 1).astype(np.float32)
            address = bench.early(bench.memory.put(values))
            return DeviceArray(address, values.shape, "float32")

        def matrix(n: int, k: int) -> Any:
            return put_matrix(bench, [random_matrix(rng, "bf16", n, k)])

        self.stream, self.attended = rows_of(HIDDEN), rows_of(HEADS)
        self.normed, self.inner = rows_of(HIDDEN), rows_of(INNER)
        self.gate_up, self.last = rows_of(2 * INNER), rows_of(LAST)
        self.norms = [vector(HIDDEN, 0.2) for _ in range(2)]
        self.bias = vector(LAST, 1.0)
        self.out, self.gated = matrix(HIDDEN, HEADS), matrix(2 * INNER, HIDDEN)
        self.down, self.next = matrix(HIDDEN, INNER), matrix(LAST, HIDDEN)
        self.recording = Recording()
        self.queue = Queue(self.device, None, self.recording)  # type: ignore[arg-type]

    def record(self) -> Recording:
        queue, eps = self.queue, 1e-6
        linear_add(queue, self.attended, self.out, out=self.stream)
        rmsnorm_linear_gated(
            queue, self.stream, self.norms[0], eps, self.gated, None, "silu",
            normed=self.normed, gate_up=self.gate_up, out=self.inner,
        )  # fmt: skip
        linear_add(queue, self.inner, self.down, out=self.stream)
        rmsnorm_linear(
            queue, self.stream, self.norms[1], eps, self.next, self.bias,
            normed=self.normed, out=self.last,
        )  # fmt: skip
        return self.recording

    def run(self, recording: Recording) -> list[Array]:
        """What the launches leave, from the same start each time."""
        kept = [self._read(array) for array in (self.stream, self.attended)]
        queue = BenchQueue(self.bench, self.device.arch)
        for item in recording.launches:
            assert isinstance(item, KernelLaunch)
            queue.launch(item.kernel, item.grid, item.args)
        got = [self._read(array) for array in (self.stream, self.inner, self.last)]
        memory: Any = self.bench.memory
        for array, bits in zip((self.stream, self.attended), kept, strict=True):
            start = memory.indices(np.array([array.address], np.uint64), 1)[0, 0]
            memory.data[start : start + bits.nbytes] = bits.reshape(-1).view(np.uint8)
        return [decode(bits, "bf16") for bits in got]

    def _read(self, array: DeviceArray) -> Array:
        return self.bench.memory.get(array.address, np.empty(array.shape, np.uint16))


@pytest.mark.parametrize("rows", [1, 2, 6, 9])
def test_a_layer_is_one_launch_with_the_same_bits(ptx_of: Callable[[str], str], rows: int) -> None:
    step = Step(machine_bench(ptx_of), rows)
    apart = step.record()
    joined = Chains(step.device).join(apart)  # type: ignore[arg-type]
    assert len(apart.launches) == (4 if rows <= 4 else 6)
    assert len(joined.launches) == 1
    want = step.run(apart)
    for _ in range(2):  # again: counters go on
        for one, other in zip(want, step.run(joined), strict=True):
            assert not np.isnan(one).any()
            np.testing.assert_array_equal(one, other)


def _joined(record: Callable[[Step], None], rows: int = 2, *, used: bool = True) -> list[str]:
    step = Step(Bench(_Memory(), lambda *args: None), rows)
    record(step)
    chains = Chains(step.device)  # type: ignore[arg-type]
    chains.is_used = used
    return [item.kernel for item in chains.join(step.recording).launches]  # type: ignore[union-attr]


class _Memory:
    """Addresses alone."""

    def __init__(self) -> None:
        self.end = 256

    def put(self, values: Array) -> int:
        address = self.end
        self.end += -(-values.nbytes // 256) * 256
        return address

    def tensor_map(self, *args: Any) -> bytes:
        return bytes(128)


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "ptx_of" not in request.fixturenames:
        monkeypatch.setattr(Device, "copy_in", lambda *args: None)


def test_a_product_alone_stays() -> None:
    def record(step: Step) -> None:
        rmsnorm(step.queue, step.stream, step.norms[0], 1e-6, out=step.normed)
        linear(step.queue, step.normed, step.next, out=step.last)

    assert _joined(record) == ["rmsnorm_bf16", "gemm_step_bf16_c16_8"]


def test_another_launch_parts_chains() -> None:
    def record(step: Step) -> None:
        for _ in range(2):
            linear_add(step.queue, step.attended, step.out, out=step.stream)
            linear(step.queue, step.stream, step.next, out=step.last)
            step.queue.launch("argmax_f32", (1, 1), ())

    chain = "gemm_chain_bf16_8"
    assert _joined(record) == [chain, "argmax_f32", chain, "argmax_f32"]
    assert "gemm_chain_bf16_8" not in _joined(record, used=False)


def test_more_rows_are_left_alone() -> None:
    def record(step: Step) -> None:
        linear_add(step.queue, step.attended, step.out, out=step.stream)
        linear(step.queue, step.stream, step.next, out=step.last)

    assert _joined(record, rows=32) == ["gemm_chain_bf16_32"]
    assert len(_joined(record, rows=33)) == 2


def test_other_rows_and_long_runs_begin_another_chain() -> None:
    def record(step: Step) -> None:
        for _ in range(11):
            linear_add(step.queue, step.attended, step.out, out=step.stream)
        for _ in range(2):
            linear(step.queue, step.stream[:1], step.next, out=step.last[:1])

    assert _joined(record) == ["gemm_chain_bf16_8"] * 3
