"""What a decode step takes of a GPU's power: joules a step, beside those of reading its bytes.

    python benchmarks/gpu_energy.py qwen3-8b [--batches 1 8 32 128] [--context 256] [--json FILE]

A card at its power limit lowers its clock. Then a step takes as long as its energy lasts, and what
saves time elsewhere (overlap, more on the way) saves none. So: the energy of reading random bytes
(their bits change, unlike those of zeros or ones), and of one step replayed for most of a second.
The card is the first that NVML shows; the sequences must fit the KV pool all at once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas import Engine  # noqa: E402
from atlas.backends.cuda.graph import CapturedGraph  # noqa: E402
from atlas.layers.step import StepShape  # noqa: E402
from benchmarks.gpu_models import open_engine  # noqa: E402
from benchmarks.gpu_step_parts import decoding  # noqa: E402
from benchmarks.random_checkpoint import SHAPES, RandomCheckpoint  # noqa: E402

SECONDS, ROUNDS = 0.7, 3
KV_TOKENS = 65536
_SM_CLOCK = 1  # NVML_CLOCK_SM


class Meter:
    """The card's own counter of energy, and its clock, through NVML."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._check(self._nvml.nvmlInit_v2())
        self._card = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # NVML has an order of its own
        call = self._nvml.nvmlDeviceGetHandleByUUID
        self._check(call(uuid.encode(), ctypes.byref(self._card)))

    def joules(self) -> float:
        """Since the driver was loaded."""
        value = ctypes.c_ulonglong()
        call = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        self._check(call(self._card, ctypes.byref(value)))
        return value.value / 1e3

    def limit(self) -> float:
        """Watts."""
        value = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._card, ctypes.byref(value)))
        return value.value / 1e3

    def clock(self) -> int:
        """Of the SMs now, MHz."""
        value = ctypes.c_uint()
        call = self._nvml.nvmlDeviceGetClockInfo
        self._check(call(self._card, _SM_CLOCK, ctypes.byref(value)))
        return value.value

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVML: status {status}")


def measure(meter: Meter, work: Callable[[int], None], count: int) -> dict[str, float]:
    """Of ``work(count)``, which waits for the GPU: seconds, joules, and the clock at its end."""
    work(count // 3)  # the clock settles
    joules, start = meter.joules(), time.perf_counter()
    work(count)
    clock = meter.clock()
    seconds = time.perf_counter() - start
    return {"seconds": seconds / count, "joules": (meter.joules() - joules) / count, "MHz": clock}


def read_energy(meter: Meter) -> dict[str, float]:
    """Picojoules a byte of reading 4 GB of random numbers, and the rate."""
    numbers = torch.randn(1 << 30, device="cuda")

    def read(count: int) -> None:
        for _ in range(count):
            numbers.sum()
        torch.cuda.synchronize()

    found = measure(meter, read, 800)
    size = numbers.nbytes
    return {
        "TB/s": size / found["seconds"] / 1e12,
        "pJ a byte": found["joules"] / size * 1e12,
        "W": found["joules"] / found["seconds"],
    }


def step_energy(meter: Meter, engine: Engine, batch: int) -> dict[str, float]:
    """Of one decode step of ``batch`` sequences: milliseconds, joules, watts, MHz; medians."""
    core: Any = engine._loaded.core
    runtime = core.runtime
    shape = runtime.padded(StepShape.decode(batch))
    recording = runtime._record(core.network, core.buffers, shape)
    compiled = recording.compile(runtime.device)
    graph = CapturedGraph(runtime.device, compiled, runtime._capture_stream)

    def steps(count: int) -> None:
        for _ in range(count):
            graph.launch()
        runtime.device.synchronize()

    steps(3)
    start = time.perf_counter()
    steps(10)
    count = round(10 * SECONDS / (time.perf_counter() - start))
    rounds = [measure(meter, steps, count) for _ in range(ROUNDS)]
    graph.close()
    found = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    return {
        "ms": 1e3 * found["seconds"],
        "J": found["joules"],
        "W": found["joules"] / found["seconds"],
        "MHz": found["MHz"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if max(args.batches) * (args.context + 64) > KV_TOKENS:
        parser.error(f"sequences of {args.context} tokens beyond the pool of {KV_TOKENS}")
    meter = Meter()
    results: dict[str, Any] = {"limit, W": meter.limit(), "reading": read_energy(meter)}
    print(results, flush=True)
    with open_engine(
        RandomCheckpoint(args.shape), "cuda", max_running=max(args.batches), kv_tokens=KV_TOKENS,
        max_seq_len=16384, chunk_tokens=2048,
    ) as engine:  # fmt: skip
        for batch in args.batches:
            with decoding(engine, batch, args.context):
                results[f"batch {batch}"] = found = step_energy(meter, engine, batch)
            words = "  ".join(f"{value:8.3f} {key}" for key, value in found.items())
            print(f"{args.shape}  batch {batch:3d}  {words}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
