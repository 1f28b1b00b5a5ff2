"""Hours of random traffic in minutes: does memory stay flat, does every request end, and rightly?

    python benchmarks/soak.py --minutes 10

Requests of random length, priority, sampling and number of samples arrive in bursts, are cancelled
at random, or raise in a callback, in a KV pool that is far too small for them, so that they are
preempted all the time: half of the time to host memory, half of the time by requeueing. The owner
thread takes the steps. Once an interval the traffic ebbs; then every request must have ended and
every block be free or cached, and every token must be what the same request writes alone.

Exits with 1 after a stuck request, a lost block, a wrong token, or memory that grows.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import atlas.step_loop
from atlas import Engine, SamplingParams
from atlas._native.scheduler import Scheduler
from atlas.event import Event

_MAX_TOKENS = 300
_PATIENCE_S = 120.0
_ALLOWED_MIB = 8.0  # growth of anonymous memory after the first interval


@dataclass(slots=True)
class Text:
    """A prompt and what it gives alone, for each way of sampling and each sample."""

    ids: list[int]
    alone: list[list[tuple[int, ...]]]


@dataclass(slots=True)
class Traffic:
    """Random requests on one engine, each checked against its text."""

    engine: Engine
    texts: list[Text]
    ways: list[SamplingParams]
    rng: random.Random
    live: dict[str, tuple[int, int]] = field(default_factory=dict)
    written: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_wrong: int = 0

    def submit(self) -> None:
        """One more request."""
        rng = self.rng
        which, way = rng.randrange(len(self.texts)), rng.randrange(len(self.ways))
        params = self.ways[way].replace(
            max_tokens=rng.choice([1, 5, 20, 60, _MAX_TOKENS]),
            n=rng.choice([1, 1, 1, 2, self.ways[way].n]),
        )
        if rng.random() < 0.05:
            params = params.replace(logits_processor=_raise_later)
        name = self.engine.submit(self.texts[which].ids, params, priority=rng.randrange(3))
        self.live[name] = (which, way)

    def cancel(self) -> None:
        """One request fewer."""
        if self.live:
            self.engine.cancel(self.rng.choice(list(self.live)))

    def take(self, events: Sequence[Event]) -> None:
        """Check what has come."""
        for event in events:
            key = (event.request_id, event.index)
            self.written.setdefault(key, []).extend(event.token_ids)
            self.num_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                which, way = self.live[event.request_id]
                ids = tuple(self.written.pop(key))
                expected = self.texts[which].alone[way][event.index]
                self.num_wrong += ids != expected[: len(ids)]
                self.ends[event.finish_reason] += 1
            if event.is_last:
                del self.live[event.request_id]

    def flow(self, seconds: float) -> None:
        """Traffic for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if len(self.live) < 40 and self.rng.random() < 0.5:
                for _ in range(self.rng.randrange(1, 12)):
                    self.submit()
            if self.rng.random() < 0.05:
                self.cancel()
            self.take(self.engine.poll(0.01))

    def ebb(self) -> int:
        """Let everything end; how many requests do not."""
        end = time.monotonic() + _PATIENCE_S
        while self.live and time.monotonic() < end:
            self.take(self.engine.poll(0.05))
        return len(self.live)


def _raise_later(prompt: Any, output: Any, row: Any) -> None:
    if len(output) == 7:
        raise ValueError("a callback that raises")


def anonymous_mib() -> float:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def lost_blocks(engine: Engine) -> int:
    """Blocks that are neither free nor cached in an idle engine."""
    loop = engine._loop
    assert loop.cache is not None
    loop.cache.check()
    return loop.core.blocks.num_total - loop.core.blocks.num_free - loop.cache.num_blocks


def make_texts(engine: Engine, ways: list[SamplingParams], rng: random.Random) -> list[Text]:
    """Prompts, some with a common beginning, each run alone first."""
    common = [rng.randrange(3, 190) for _ in range(100)]
    texts = []
    for _ in range(8):
        own = [rng.randrange(3, 190) for _ in range(rng.randrange(1, 120))]
        ids = common[: rng.choice([0, 40, 100])] + own
        alone = []
        for way in ways:
            completion = engine.generate(ids, way.replace(max_tokens=_MAX_TOKENS))
            alone.append([sample.token_ids for sample in completion.samples])
        texts.append(Text(ids, alone))
    return texts


def soak(engine: Engine, minutes: float, interval_s: float, seed: int) -> bool:
    """Traffic with a line of figures an interval; whether all was well."""
    rng = random.Random(seed)
    greedy = SamplingParams(ignore_eos=True, n=3)
    ways = [greedy, greedy.replace(temperature=0.9, top_p=0.95, seed=7)]
    traffic = Traffic(engine, make_texts(engine, ways, rng), ways, rng)
    engine.start()
    well = True
    first = 0.0
    started = time.monotonic()
    print(f"{'s':>6}{'ended':>9}{'tokens':>10}{'preempted':>11}{'RssAnon MiB':>13}"
          f"{'spilled KiB':>13}{'lost':>6}{'stuck':>7}{'wrong':>7}")  # fmt: skip
    while time.monotonic() - started < 60 * minutes:
        traffic.flow(interval_s)
        stuck = traffic.ebb()
        with engine.paused():
            lost, spilled = lost_blocks(engine), engine._loop.store.nbytes
        memory = anonymous_mib()
        first = first or memory
        well &= not (stuck or lost or spilled or traffic.num_wrong)
        print(f"{time.monotonic() - started:6.0f}{traffic.ends.total():9d}"
              f"{traffic.num_tokens:10d}{engine._loop.scheduler.num_preemptions:11d}"
              f"{memory:13.1f}{spilled / 1024:13.0f}{lost:6d}{stuck:7d}{traffic.num_wrong:7d}",
              flush=True)  # fmt: skip
        if stuck:
            print(f"stuck: {sorted(traffic.live)}; scheduler: "
                  f"{engine._loop.scheduler.num_running} running, "
                  f"{engine._loop.scheduler.num_waiting} waiting")  # fmt: skip
            return False
    growth = anonymous_mib() - first
    print(f"ends: {dict(traffic.ends)}; memory grew by {growth:+.1f} MiB after the first interval")
    return well and growth < _ALLOWED_MIB


def tiny_model() -> str:
    """A folder with two layers of random weights, of the tests."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.engine.folders import write_model  # not a part of the installed package

    return str(write_model(Path(tempfile.mkdtemp(prefix="atlas-soak-"))))


def main() -> int:
    """Soak both modes of preemption; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between checks")
    parser.add_argument("--model", help="default: a tiny one with random weights")
    parser.add_argument("--kv-tokens", type=int, default=768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = options.model or tiny_model()
    # Admit what soon cannot go on, so that preemption is the rule.
    eager: Any = functools.partial(Scheduler, watermark=0, immune_tokens=4)
    atlas.step_loop.Scheduler = eager  # type: ignore[attr-defined]
    well = True
    for number, mode in enumerate(("spill", "requeue")):
        print(f"preemption={mode}")
        with Engine(
            model,
            threads=options.threads,
            quiet=True,
            kv_tokens=options.kv_tokens,
            max_seq_len=min(options.kv_tokens, 512),
            chunk_tokens=48,
            preemption=mode,
        ) as engine:
            well &= soak(engine, options.minutes / 2, options.interval, options.seed + number)
    print("all is well" if well else "NOT WELL")
    return not well


if __name__ == "__main__":
    sys.exit(main())
