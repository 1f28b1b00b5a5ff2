"""What the host does for a decode step: microseconds a step and a sequence, by part.

    python benchmarks/host_step.py [--batches 1 8 32 128] [--kinds greedy text ...]
    python benchmarks/host_step.py --device cuda --shape qwen3-8b

Needs no GPU: the engine runs as on one, over the tests' stand-in for the driver, whose launches do
nothing, so that every chosen id is 0. On the ``cpu`` a tiny model runs, whose own time is the part
"model". The time is the thread's own CPU time, for a loaded machine, and each figure the median of
many steps; a driver call costs what the stand-in's Python costs.

On ``cuda`` it is wall time. What the host waits there for a step's tokens is the part "wait": where
it is 0 the GPU waits for the host. Steps with prompts are reported too, and for how much of a
greedy step the GPU idles: what it takes beyond its graph, replayed back to back.

``--recordings`` counts instead what 128 prompts of 128 tokens make the engine record.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import atlas.engine  # noqa: E402
from atlas import Engine, SamplingParams  # noqa: E402
from atlas.backends.cuda import backend, device, probe, readback, runtime, sampling  # noqa: E402
from atlas.backends.cuda.small_copies import SmallCopies  # noqa: E402
from atlas.layers.step import StepShape  # noqa: E402
from atlas.model import core  # noqa: E402
from atlas.step_loop import StepLoop  # noqa: E402
from atlas.tokenizer import load_tokenizer  # noqa: E402
from benchmarks.gpu_step_parts import decoding, microseconds  # noqa: E402
from benchmarks.random_checkpoint import SHAPES, RandomCheckpoint  # noqa: E402
from tests.backends.cuda.host_gpu import KERNELS, HostGpu, HostKernels, host_ops  # noqa: E402

PROMPT_LEN, CHUNK_TOKENS = 128, 1024
SKIPPED = 4  # decode steps until everything is recorded
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "penalty": SamplingParams(temperature=0.8, seed=1, presence_penalty=0.5),
    "logprobs": SamplingParams(logprobs=1),
    "text": SamplingParams(),
    "stops": SamplingParams(stop=["never this", "nor that"]),
    "events": SamplingParams(),
}
"""How tokens are chosen and given out; "events" are polled, the others completed."""
_WITH_TEXT = ("text", "stops", "events")
PARTS: tuple[tuple[Any, str, str], ...] = (
    (StepLoop, "_launch_next", "plan"),
    (StepLoop, "_launch", "rows"),
    (core.ModelCore, "launch_plan", "inputs"),
    (runtime.CudaRuntime, "run", "launch"),
    (StepLoop, "_settle_oldest", "settle"),
    (StepLoop, "_choose_all", "choose"),
    (StepLoop, "_keep_all", "keep"),
    (StepLoop, "_deliver", "deliver"),
)
"""Functions of the step, and the part that each one's own time counts for."""


class IdleGpu(HostGpu):
    """A device on which nothing runs: copies move bytes, launches do nothing."""

    def do(self, work: Callable[[], None]) -> None:
        """Forget a piece of work."""

    def _cuGraphLaunch(self, executable: int, stream: int) -> None:
        pass

    def _cuEventRecord(self, event: int, stream: int) -> None:
        pass

    def _cuEventSynchronize(self, event: int) -> None:
        pass

    def _launch(self, config: Any, function: int, pointers: Any, extra: Any) -> int:
        if KERNELS[function] == SmallCopies.kernel:
            return super()._launch(config, function, pointers, extra)
        return 0


class Clock:
    """Own time of parts, nested ones taken off, by step."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.steps: list[dict[str, float]] = []
        self._own: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, with its own time counted for ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                whole = self._now() - start
                self._own[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        return call

    def end_step(self) -> None:
        """What was counted since the last call was one step."""
        self.steps.append(dict(self._own))
        self._own.clear()


@contextmanager
def idle_gpu() -> Iterator[IdleGpu]:
    """``device="cuda"`` means one that does nothing."""
    gpu = IdleGpu()

    def nothing(queue: Any, *args: Any, out: Any) -> None:
        """In place of the sampling kernels."""

    with ExitStack() as stack:
        for owner, name, value in (
            (device, "Driver", lambda: gpu),
            (device, "KernelTable", HostKernels),
            (runtime, "implementations", lambda name: host_ops(gpu)),
            (sampling, "sample", nothing),
            (sampling, "score", nothing),
            (runtime, "open_products", lambda device: None),
            (runtime, "SCRATCH_BYTES", 1 << 16),
            (backend, "SCRATCH_BYTES", 1 << 16),
            (backend, "RESERVE_BYTES", 0),
            (runtime.CudaRuntime, "fingerprint", "idle"),
            (probe, "find_gpu", lambda: probe.FoundGpu(True, "idle")),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield gpu


def small_tokenizer() -> Any:
    """A byte-level tokenizer of some 900 ids."""
    from tests.text.vocabularies import byte_level_library, write_folder

    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(str(write_folder(Path(folder), byte_level_library())))


def open_engine(device: str, shape: str, tokenizer: Any, max_running: int) -> Engine:
    """A model of random weights."""
    checkpoint = RandomCheckpoint(shape)
    place = SimpleNamespace(kind="folder", path="random")
    with (
        mock.patch.object(atlas.engine, "locate", return_value=place),
        mock.patch.object(atlas.engine, "open_checkpoint", return_value=checkpoint),
        mock.patch.object(atlas.engine, "load_tokenizer", return_value=tokenizer),
    ):
        return Engine(
            "random", device=device, quiet=True, prefix_cache=False, max_running=max_running,
            kv_tokens=max_running * 512, max_seq_len=512, chunk_tokens=CHUNK_TOKENS, threads=1,
        )  # fmt: skip


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(10, 1000, PROMPT_LEN).tolist() for _ in range(count)]


def run(engine: Engine, clock: Clock, kind: str, batch: int, tokens: int) -> list[int]:
    """Generate with ``batch`` prompts; how many sequences decode in each step, −1 with prompts."""
    params = KINDS[kind].replace(max_tokens=tokens, ignore_eos=True)
    loop, given = engine._loop, prompts(batch)
    assert isinstance(loop, StepLoop)
    clock.steps.clear()
    found: list[int] = []
    step, launch = clock.timed(loop.step, "other"), engine._loaded.core.launch_plan

    def counted() -> bool:
        went = step()
        clock.end_step()
        if len(found) < len(clock.steps):
            found.append(0)  # a last step was settled
        return bool(went)

    def seen(plan: Any, **more: Any) -> Any:
        found.append(plan.num_seqs if plan.num_decode == plan.num_seqs else -1)
        return launch(plan, **more)

    with (
        mock.patch.object(loop, "step", counted),
        mock.patch.object(engine._loaded.core, "launch_plan", seen),
        mock.patch.object(engine._driver, "advance", clock.timed(engine._driver.advance, "drive")),
    ):
        if kind == "events":
            for prompt in given:
                engine.submit(prompt, params)
            while engine.has_unfinished():
                engine.step()
        else:
            engine.generate(given, params)
    return found


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """µs of each part in the median step."""
    names = sorted({name for step in steps for name in step})
    return {name: 1e6 * statistics.median(s.get(name, 0.0) for s in steps) for name in names}


def in_words(found: dict[str, float], batch: int) -> str:
    """The host's own sum, and every part."""
    whole = sum(us for name, us in found.items() if name not in ("model", "wait"))
    parts = "  ".join(f"{name} {us:.0f}" for name, us in found.items())
    return f"{whole:6.0f} µs a step, {whole / batch:5.1f} a sequence:  {parts}"


def report(args: argparse.Namespace) -> None:
    """A line for each kind and batch."""
    clock = Clock(time.perf_counter if args.device == "cuda" else time.thread_time)
    parts = list(PARTS)
    if args.device == "cpu":
        from atlas.backends.cpu.runtime import CpuRuntime

        parts.append((CpuRuntime, "run", "model"))
    if args.device == "cuda":
        parts.append((readback.ReadBacks, "wait", "wait"))
    with ExitStack() as stack:
        for owner, name, part in parts:
            timed = clock.timed(getattr(owner, name), part)
            stack.enter_context(mock.patch.object(owner, name, timed))
        if args.device == "idle":
            stack.enter_context(idle_gpu())
        device = "cpu" if args.device == "cpu" else "cuda"
        for kind in args.kinds:
            tokenizer = small_tokenizer() if kind in _WITH_TEXT else None
            with open_engine(device, args.shape, tokenizer, max(args.batches)) as engine:
                engine.warmup()
                for batch in args.batches:
                    if args.device == "cuda":
                        run(engine, clock, kind, batch, args.tokens)  # records what it meets
                    found = run(engine, clock, kind, batch, args.tokens)
                    label = f"{kind:9s} batch {batch:3d}"
                    full = [s for s, n in zip(clock.steps, found, strict=True) if n == batch]
                    print(label, in_words(medians(full[SKIPPED:]), batch), flush=True)
                    mixed = [s for s, n in zip(clock.steps, found, strict=True) if n < 0]
                    if args.device == "cuda":
                        print(
                            f"{label}, {len(mixed)} with prompts", in_words(medians(mixed), batch)
                        )
                        whole = [sum(step.values()) for step in full[SKIPPED:]]
                        ms = 1e3 * statistics.median(whole)
                        print(f"{label}, step to step {ms:.3f} ms", flush=True)
                        if kind == "greedy":  # others choose behind the graph
                            graph = graph_ms(engine, batch, PROMPT_LEN + args.tokens // 2)
                            idle = max(0.0, 1 - graph / ms)
                            print(f"{label}, its graph alone {graph:.3f} ms: {idle:.1%} idle")


def graph_ms(engine: Engine, batch: int, context: int) -> float:
    """Milliseconds of a decode step's graph, replayed back to back over real tables."""
    with decoding(engine, batch, context):
        core: Any = engine._loaded.core
        shape = core.runtime.padded(StepShape.decode(batch))
        recording = core.runtime._record(core.network, core.buffers, shape)
        return microseconds(core.runtime, recording, 20) / 1e3


def report_recordings() -> None:
    """Recordings of a first and a second run of 128 prompts, with one token and with several."""
    recorded: Counter[str] = Counter()
    taken = 0.0
    record = runtime.CudaRuntime._record

    def counted(*args: Any) -> Any:
        nonlocal taken
        start = time.thread_time()
        made = record(*args)
        taken += time.thread_time() - start
        shape = args[-1]
        recorded["decode" if shape.rows == shape.step_rows else "with prompts"] += 1
        return made

    with idle_gpu(), mock.patch.object(runtime.CudaRuntime, "_record", counted):
        for batch in (8, 32, 128):
            with open_engine("cuda", "tiny", None, 128) as engine:
                engine.warmup()
                for tokens in (8, 257, 1, 257, 1):
                    recorded.clear()
                    taken = 0.0
                    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
                    before = engine.metrics().steps
                    engine.generate(prompts(batch), params)
                    steps = engine.metrics().steps - before
                    print(
                        f"batch {batch:3d}, {tokens:3d} tokens: {steps} steps, "
                        f"recorded {dict(recorded)}, {1e3 * taken:.1f} ms",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["greedy", "text"])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device", choices=("idle", "cpu", "cuda"), default="idle")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--recordings", action="store_true")
    args = parser.parse_args()
    if args.recordings:
        report_recordings()
    else:
        report(args)


if __name__ == "__main__":
    main()
