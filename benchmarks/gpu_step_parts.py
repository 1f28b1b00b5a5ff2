"""Where a decode step's time goes: the step's graph, and the same graph without some kernels.

    python benchmarks/gpu_step_parts.py qwen3-8b [--batches 1 8] [--context 256]

The launches of one decode step are recorded as the engine records them; graphs of subsets of them
are replayed back to back. What a kind of kernel costs in the step is the difference to the whole,
which is less than its time alone where the next kernel's weights are on their way meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas import Engine, SamplingParams  # noqa: E402
from atlas.backends.cuda.graph import CapturedGraph  # noqa: E402
from atlas.backends.cuda.launch import KernelLaunch, Recording  # noqa: E402
from atlas.layers.step import StepShape  # noqa: E402
from benchmarks.gpu_models import ceilings, open_engine  # noqa: E402
from benchmarks.random_checkpoint import SHAPES, RandomCheckpoint  # noqa: E402


def kind_of(launch: Any) -> str:
    """``norm``, ``attention``, ``gemm``, … of a launch."""
    if not isinstance(launch, KernelLaunch):
        return "cublas"
    for word in ("attention", "rmsnorm", "gemm", "moe", "argmax", "embedding"):
        if word in launch.kernel:
            return word
    return launch.kernel


def microseconds(runtime: Any, recording: Recording, count: int = 30) -> float:
    """Median time of a graph of these launches."""
    device = runtime.device
    graph = CapturedGraph(device, recording.compile(device), runtime._capture_stream)
    api, driver = device.driver.api, device.driver
    start, end = (driver(api.cuEventCreate(0), "an event") for _ in range(2))
    times = []
    for _ in range(6):
        driver(api.cuEventRecord(start, device.stream), "an event")
        for _ in range(count):
            graph.launch()
        driver(api.cuEventRecord(end, device.stream), "an event")
        device.synchronize()
        times.append(driver(api.cuEventElapsedTime(start, end), "a time") * 1e3 / count)
    graph.close()
    return statistics.median(times[1:])


def take_apart(engine: Engine, batch: int, context: int = 256) -> None:
    """Run a batch, so that tables and lengths are real; then time graphs of its step's parts."""
    prompt = list(range(20, 20 + context - 8))
    engine.generate([prompt] * batch, SamplingParams(max_tokens=8, ignore_eos=True))
    core: Any = engine._loaded.core
    runtime = core.runtime
    shape = runtime.padded(StepShape.decode(batch))
    whole = runtime._record(core.network, core.buffers, shape)
    kinds = [kind_of(launch) for launch in whole.launches]
    print(f"batch {batch}: {dict(Counter(kinds))}")

    def kept(keep: Callable[[str], bool]) -> float:
        launches = [item for item, kind in zip(whole.launches, kinds, strict=True) if keep(kind)]
        return microseconds(runtime, Recording(launches, whole.keep))

    total = kept(lambda kind: True)
    print(f"  whole step            {total:9.1f} us")
    for name in sorted(set(kinds)):
        rest = kept(lambda kind, name=name: kind != name)  # type: ignore[misc]
        alone = kept(lambda kind, name=name: kind == name)  # type: ignore[misc]
        count = kinds.count(name)
        print(
            f"  {name:12s} {count:4d}  costs {total - rest:8.1f} us ({(total - rest) / count:6.2f} "
            f"each), alone {alone:8.1f} ({alone / count:6.2f} each)"
        )
    for others in ((), ("norm",), ("attention",), ("norm", "attention")):
        time = kept(lambda kind, others=others: kind in ("gemm", "moe", *others))  # type: ignore[misc]
        print(f"  {' + '.join(('products', *others)):30s} {time:9.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    args = parser.parse_args()
    print(ceilings())
    for name in args.shapes:
        checkpoint = RandomCheckpoint(name)
        print(f"{name}: {checkpoint.nbytes / 1e9:.2f} GB of weights")
        with open_engine(
            checkpoint, "cuda", max_running=max(args.batches), kv_tokens=65536, max_seq_len=1024
        ) as engine:
            for batch in args.batches:
                take_apart(engine, batch, args.context)


if __name__ == "__main__":
    main()
