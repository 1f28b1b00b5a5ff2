"""What the host does for a step of beam search: microseconds a step, by part.

    python benchmarks/host_translate.py [--batch 32] [--beams 4] [--tokens 64] [--ngram 0]

Needs no GPU: the engine runs as on one, over the tests' stand-in for the driver, whose launches do
nothing. Candidates are drawn at random instead, in time that counts for the part "device". Times
are the thread's own CPU time in the steps in which all requests run: the median, and the lower
decile for a machine that others use too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas import Engine  # noqa: E402
from atlas.backends.cuda import candidates, runtime  # noqa: E402
from atlas.model.translator_core import TranslatorCore  # noqa: E402
from atlas.translation import BeamParams  # noqa: E402
from atlas.translation_loop import TranslationLoop  # noqa: E402
from benchmarks.gpu_models import open_engine  # noqa: E402
from benchmarks.host_step import Clock, idle_gpu, medians  # noqa: E402
from benchmarks.random_checkpoint import RandomCheckpoint  # noqa: E402

PARTS: tuple[tuple[Any, str, str], ...] = (
    (TranslationLoop, "_make_room", "room"),
    (TranslationLoop, "_sweep", "sweep"),
    (TranslationLoop, "_settle", "settle"),
    (TranslatorCore, "run_rows", "inputs"),
    (TranslationLoop, "_reserve", "reserve"),
    (runtime.CudaRuntime, "run", "launch"),
    (TranslatorCore, "top_candidates", "candidates"),
)
"""Functions of the step, and the part that each one's own time counts for."""
_LANGUAGES = {"source": 10, "target": 11}


def fill(found: Any, rows: int, k: int, seed: int, vocab_size: int) -> None:
    """Candidates as the device would leave them: random ids, none of them an end token."""
    from tests.backends.cuda.host_gpu import on_host

    rng = np.random.default_rng(seed)
    memory = on_host(found)
    memory[: rows * k] = rng.integers(16, vocab_size, rows * k)
    values = -np.sort(rng.random((rows, k), np.float32), axis=1)
    memory[rows * k : 2 * rows * k] = values.view(np.int32).ravel()
    memory[2 * rows * k : 2 * rows * k + rows] = np.full(rows, 8, np.float32).view(np.int32)


@contextmanager
def measured(clock: Clock, vocab_size: int) -> Iterator[None]:
    """Parts are timed, and candidates are there to be found."""
    find = candidates.Candidates.find
    drawn = clock.timed(fill, "device")
    turn = 0

    def found(self: Any, rows: int, k: int, *bans: Any) -> Any:
        nonlocal turn
        turn += 1
        drawn(self._found, rows, k, turn, vocab_size)
        return find(self, rows, k, *bans)

    step = clock.timed(TranslationLoop.step, "other")

    def whole(loop: Any) -> Any:
        rows = loop.gauges().running
        went = step(loop)
        clock.end_step()
        clock.steps[-1]["rows"] = rows
        return went

    with ExitStack() as stack:
        for owner, name, part in PARTS:
            timed = clock.timed(getattr(owner, name), part)
            stack.enter_context(mock.patch.object(owner, name, timed))
        timed = clock.timed(found, "read-back")
        stack.enter_context(mock.patch.object(candidates.Candidates, "find", timed))
        stack.enter_context(mock.patch.object(TranslationLoop, "step", whole))
        yield


def least(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Microseconds of each part in a step that nothing disturbed: the lower decile."""
    names = sorted({name for step in steps for name in step})
    return {name: 1e6 * np.quantile([s.get(name, 0.0) for s in steps], 0.1) for name in names}


def report(engine: Engine, clock: Clock, args: argparse.Namespace) -> None:
    """Medians of the parts in steps of every beam, and of whole steps."""
    rng = np.random.default_rng(0)
    given = [rng.integers(16, 1000, args.length).tolist() for _ in range(args.batch)]
    params = BeamParams(
        num_beams=args.beams, max_tokens=args.tokens, early_stopping="never",
        no_repeat_ngram=args.ngram,
    )  # fmt: skip
    for _ in range(args.repeats):
        engine.translate(given, params=params, **_LANGUAGES)
    steps = [s for s in clock.steps if s.pop("rows") == args.batch * args.beams]
    for step in steps:
        step["a step"] = sum(us for name, us in step.items() if name != "device")
    found = {"median": medians(steps), "least": least(steps)}
    print(f"{args.batch} requests of {args.beams} beams, {len(steps)} steps")
    for name, us in sorted(found["median"].items(), key=lambda item: -item[1]):
        print(f"  {name:12}{us:8.0f} us, least {found['least'][name]:6.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--length", type=int, default=24, help="subwords of a source")
    parser.add_argument("--tokens", type=int, default=64, help="of each translation")
    parser.add_argument("--ngram", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="functions, by their own time")
    args = parser.parse_args()
    checkpoint = RandomCheckpoint("tiny-nllb")
    clock = Clock(time.thread_time)
    per_request = args.beams * (args.tokens + 18) + args.length + 18
    with idle_gpu(), open_engine(
        checkpoint, "cuda", max_running=args.batch * args.beams,
        kv_tokens=args.batch * per_request, max_seq_len=256, threads=1,
    ) as engine, measured(clock, checkpoint.config.vocab_size):  # fmt: skip
        if args.profile:
            import cProfile
            import pstats

            with cProfile.Profile() as profile:
                report(engine, clock, args)
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        else:
            report(engine, clock, args)


if __name__ == "__main__":
    main()
