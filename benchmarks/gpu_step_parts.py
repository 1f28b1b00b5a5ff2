"""Where a decode step's time goes: the step's graph, and the same graph without some kernels.

    python benchmarks/gpu_step_parts.py qwen3-8b [--batches 1 8] [--context 256] [--prompts 8064]

The launches of one decode step, or of a chunk of one prompt, are recorded as the engine records
them; graphs of subsets of them are replayed back to back. What a kind of kernel costs in the step
is the difference to the whole, which is less than its time alone where the weights of the next
kernel are on their way meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas import Engine, SamplingParams  # noqa: E402
from atlas.backends.cuda.graph import CapturedGraph  # noqa: E402
from atlas.backends.cuda.launch import KernelLaunch, Recording  # noqa: E402
from atlas.layers.step import StepShape  # noqa: E402
from atlas.ops.select import in_parts  # noqa: E402
from benchmarks.gpu_models import ceilings, open_engine, prompts  # noqa: E402
from benchmarks.random_checkpoint import SHAPES, RandomCheckpoint  # noqa: E402

KINDS = (
    "attention",
    "rmsnorm",
    "gemm_finish",
    "gemm_step_norm",  # products that normalise their rows
    "gemm",
    "moe",
    "argmax",
    "embedding",
)
"""Words in kernels' names, the longer before those that they hold."""
PRODUCTS = ("gemm", "gemm_step_norm", "cublas", "gemm_finish", "moe")


def kind_of(launch: Any) -> str:
    """``norm``, ``attention``, ``gemm``, … of a launch."""
    if not isinstance(launch, KernelLaunch):
        return "cublas"
    for word in KINDS:
        if word in launch.kernel:
            return word
    return launch.kernel


def microseconds(runtime: Any, recording: Recording, count: int) -> float:
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


@contextmanager
def decoding(engine: Engine, batch: int, context: int) -> Iterator[None]:
    """Within it the step that was launched last decodes a sequence of each of ``batch`` prompts."""
    params, waiting = SamplingParams(max_tokens=64, ignore_eos=True), set()
    for prompt in prompts(batch, context - 8, engine.model.config.vocab_size):
        waiting.add(engine.submit(prompt, params))
    running = set(waiting)
    while waiting:
        waiting -= {event.request_id for event in engine.step()}
    for _ in range(3):  # prompts and steps under way are over: what was launched last decodes
        engine.step()
    yield
    for request in running:
        engine.cancel(request)
    while engine.has_unfinished():
        engine.step()


def take_decode_apart(engine: Engine, batch: int, context: int) -> None:
    """Graphs of parts of a step in which all sequences of a batch decode, over its real tables."""
    with decoding(engine, batch, context):
        take_apart(engine, StepShape.decode(batch), f"batch {batch}", 10)


def take_prompt_apart(engine: Engine, length: int) -> None:
    """The same of a prompt that runs as one chunk."""
    given = prompts(1, length, engine.model.config.vocab_size)
    engine.generate(given, SamplingParams(max_tokens=1, ignore_eos=True))
    take_apart(engine, StepShape.prompt(length), f"prompt of {length}", 1)


def take_apart(engine: Engine, shape: StepShape, title: str, count: int) -> None:
    """Graphs of a step's launches and of parts of them, each replayed ``count`` times."""
    core: Any = engine._loaded.core
    runtime = core.runtime
    whole = runtime._record(core.network, core.buffers, runtime.padded(shape))
    kinds = [kind_of(launch) for launch in whole.launches]
    print(f"{title}: {dict(Counter(kinds))}")

    def kept(keep: Callable[[str], bool]) -> float:
        launches = [item for item, kind in zip(whole.launches, kinds, strict=True) if keep(kind)]
        return microseconds(runtime, Recording(launches, whole.keep), count)

    total = kept(lambda kind: True)
    print(f"  whole step            {total:9.1f} us")
    if "gemm_step_norm" in kinds:
        apart = microseconds(runtime, with_norms_apart(core, runtime.padded(shape)), count)
        print(f"  with norms apart      {apart:9.1f} us")
    for name in sorted(set(kinds)):
        rest = kept(lambda kind, name=name: kind != name)  # type: ignore[misc]
        alone = kept(lambda kind, name=name: kind == name)  # type: ignore[misc]
        number, costs = kinds.count(name), total - rest
        print(
            f"  {name:14s} {number:4d}  costs {costs:8.1f} us ({costs / number:6.2f} each), "
            f"alone {alone:8.1f} ({alone / number:6.2f} each)"
        )
    for others in ((), ("rmsnorm",), ("attention",), ("rmsnorm", "attention")):
        kept_kinds = (*PRODUCTS, *others)
        time = kept(lambda kind, wanted=kept_kinds: kind in wanted)  # type: ignore[misc]
        print(f"  {' + '.join(('products', *others)):30s} {time:9.1f} us", flush=True)


def with_norms_apart(core: Any, shape: StepShape) -> Recording:
    """The same step with a kernel for every norm, as steps of more rows have."""
    functions = core.runtime.functions
    whole = dict(functions)
    functions |= in_parts(whole, ("rmsnorm",))
    try:
        recording: Recording = core.runtime._record(core.network, core.buffers, shape)
    finally:
        functions |= whole
    return recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="tokens of a chunk")
    args = parser.parse_args()
    print(ceilings())
    for name in args.shapes:
        checkpoint = RandomCheckpoint(name)
        print(f"{name}: {checkpoint.nbytes / 1e9:.2f} GB of weights")
        with open_engine(
            checkpoint, "cuda", max_running=max(args.batches), kv_tokens=65536, max_seq_len=16384,
            chunk_tokens=max([2048, *args.prompts]),
        ) as engine:  # fmt: skip
            for batch in args.batches:
                take_decode_apart(engine, batch, args.context)
            for length in args.prompts:
                take_prompt_apart(engine, length)


if __name__ == "__main__":
    main()
