"""Which launches of a graph take turns, and at which counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from atlas_kernels.turn_counters import ARGUMENTS, COUNTER_BYTES

from atlas.backends.cuda import launch
from atlas.backends.cuda.graph import CapturedGraph
from atlas.backends.cuda.launch import HostCall, KernelLaunch, MatmulLaunch, Recording
from atlas.errors import OutOfMemoryError

COUNTERS = 1 << 20


class List:
    """In place of a list of launches: what it was given."""

    def __init__(self, address: int) -> None:
        self.launched: list[tuple[str, tuple[int, ...]]] = []
        self.keep: list[object] = []

    def append_kernel(self, name: str, *rest: Any) -> None:
        self.launched.append((name, rest[-1]))

    def append_matmul(self, function: int, args: tuple[int, ...]) -> None:
        self.launched.append(("matmul", args))

    def append_call(self, function: Any) -> None:
        self.launched.append(("call", ()))


class Device:
    """Kernels whose names begin with "turn" take turns; "turn_own" is the user's."""

    has_dependent_launch, stream = True, 7

    def __init__(self) -> None:
        self.driver = SimpleNamespace(launch_address=1)
        self.kernels = Kernels()
        self.allocated: dict[int, int] = {}

    def allocate(self, nbytes: int, what: str) -> int:
        self.allocated[COUNTERS] = nbytes
        return COUNTERS

    def fill(self, address: int, nbytes: int) -> None:
        assert self.allocated[address] == nbytes

    def free(self, address: int) -> None:
        del self.allocated[address]


class Kernels:
    own = ("turn_own",)

    def load(self, names: list[str]) -> None:
        if "turn_missing" in names:
            raise OutOfMemoryError("no room for a kernel")

    def __getitem__(self, name: str) -> Any:
        arguments = (("x", "ptr"), *(ARGUMENTS if name.startswith("turn") else ()))
        fields = {"threads": 32, "dynamic_shared_bytes": 0, "cluster": 1, "arguments": arguments}
        return SimpleNamespace(info=SimpleNamespace(**fields), function=3)


@pytest.fixture(autouse=True)
def _lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CudaLaunchList", List)


def _compiled(names: list[str], counters: int) -> list[tuple[int, ...]]:
    launches: list[Any] = [KernelLaunch(name, (1, 1), (5,)) for name in names]
    compiled: Any = Recording(launches).compile(Device(), counters)  # type: ignore[arg-type]
    return [args[1:] for _, args in compiled.launched]


def _counter(number: int) -> int:
    return COUNTERS + number * COUNTER_BYTES


def test_each_waits_for_the_one_before() -> None:
    found = _compiled(["turn_a", "turn_b", "turn_a"], COUNTERS)
    assert found == [
        (0, _counter(0)),
        (_counter(0), _counter(1)),
        (_counter(1), _counter(2)),
    ]


def test_lists_take_no_turns() -> None:
    assert _compiled(["turn_a", "turn_b"], 0) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("between", ["plain", "turn_own"])
def test_who_follows_a_kernel_without_turns_waits_as_kernels_do(between: str) -> None:
    first, second, third = _compiled(["turn_a", between, "turn_b"], COUNTERS)
    assert first == (0, _counter(0))
    assert second == (() if between == "plain" else (0, 0)), "a user's kernel counts nothing"
    assert third == (0, _counter(2))


def test_calls_and_products_take_no_turns() -> None:
    launches: list[Any] = [
        KernelLaunch("turn_a", (1, 1), (5,)),
        MatmulLaunch(9, (1,) * 15),
        KernelLaunch("turn_b", (1, 1), (5,)),
        HostCall(lambda stream: None),
        KernelLaunch("turn_b", (1, 1), (5,)),
    ]
    compiled: Any = Recording(launches).compile(Device(), COUNTERS)  # type: ignore[arg-type]
    found = {i: args[1:] for i, (name, args) in enumerate(compiled.launched) if "turn" in name}
    assert found == {i: (0, _counter(i)) for i in (0, 2, 4)}


def test_counters_of_a_graph_that_fails_are_freed() -> None:
    device = Device()
    recording = Recording([KernelLaunch("turn_missing", (1, 1), (5,))])
    with pytest.raises(OutOfMemoryError, match="no room"):
        CapturedGraph(device, recording, 1)  # type: ignore[arg-type]
    assert not device.allocated
