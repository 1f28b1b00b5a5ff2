"""Which of cuBLASLt's algorithms serves a product of many rows."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import Queue, Recording
from atlas.backends.cuda.products import Kind, Launches, Plan

SLOW, FAST = np.array([1]), np.array([2])
ALGORITHM = 12  # among the arguments of a call


class Library:
    """What stands for cuBLASLt: notes who is called, and ``SLOW`` takes its time."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        words = [ctypes.c_void_p] * 16

        def matmul(*args: int) -> int:
            self.calls.append(args[ALGORITHM])
            time.sleep(0.02 if args[ALGORITHM] == SLOW[0] else 0)
            return 0

        self._matmul = ctypes.CFUNCTYPE(ctypes.c_int, *words)(matmul)
        self.function = ctypes.cast(self._matmul, ctypes.c_void_p).value

    def arguments(self, product: Any, algorithm: Any, *addresses: int) -> tuple[int, ...]:
        return tuple(int(algorithm[0]) if i == ALGORITHM else 1 for i in range(15))


def _queue(recording: Recording | None) -> Queue:
    driver, kernels = SimpleNamespace(launch_address=1), SimpleNamespace(load=lambda names: None)
    device: Any = SimpleNamespace(driver=driver, kernels=kernels, synchronize=lambda: None)
    device.num_sms, device.capability = 132, (9, 0)
    device.ran = []

    def run(launches: Any) -> None:
        device.ran.append(len(launches))
        launches.run(1)

    device.run = run
    workspace: Any = SimpleNamespace(address=lambda nbytes, **options: 4096)
    return Queue(device, workspace, recording)


def test_the_fastest_of_equal_algorithms_serves() -> None:
    library, recording = Library(), Recording()
    plan = Plan(False, {192: (SLOW, FAST), 1024: (SLOW,)})
    queue = _queue(recording)
    products: Any = SimpleNamespace(library=library)
    weight: Any = SimpleNamespace(
        is_quantized=False, values=DeviceArray(4096, (64, 128), "bfloat16")
    )

    def put(rows: int) -> int:
        x = DeviceArray(4096, (rows, 128), "bfloat16")
        out = DeviceArray(4096, (rows, 64), "bfloat16")
        kind = Kind("bf16", 64, 128, "bfloat16", False)
        Launches(products, queue, kind, plan).put(x, weight, None, out)
        launch: Any = recording.launches[-1]
        return int(launch.args[ALGORITHM])

    assert put(200) == FAST[0]
    timed = len(library.calls)
    assert {SLOW[0], FAST[0]} == set(library.calls)
    lists: Any = queue.device
    assert set(lists.ran) == {2}, "calls follow each other without Python in between"
    assert put(1000) == FAST[0]
    assert len(library.calls) == timed, "algorithms for 192 to 1,023 rows are timed once"
    assert put(5000) == SLOW[0]
    assert put(100) == FAST[0], "fewer rows than all take the least"
    assert len(recording.launches) == 4, "what is timed is not recorded"
