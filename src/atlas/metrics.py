"""What an engine has done and holds: counters, latency histograms, and their OpenMetrics text."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atlas._native.slot_pool import SlotPool
from atlas.cache.state_slots import SnapshotSlots

if TYPE_CHECKING:
    from atlas.driver import Driver
    from atlas.generation import Generation
    from atlas.live_request import LiveRequest
    from atlas.loop import Loop
    from atlas.model.core import ModelCore
    from atlas.request import FinishReason

LATENCY_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""Upper bounds of every histogram's buckets, in seconds; one more bucket has none."""

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "error", "cancelled")


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many observations fell into each bucket.

    Attributes
    ----------
    counts : tuple of int
        One a bound of ``LATENCY_BOUNDS_S``, and one for what is longer; not cumulative.
    total_s : float
        Sum of all observations.
    """

    counts: tuple[int, ...]
    total_s: float

    @property
    def num_observed(self) -> int:
        """Observations in all."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Metrics:
    """An engine at one moment. Counts are since it was made.

    Attributes
    ----------
    waiting, running : int
        Requests that wait for KV blocks (preempted ones too), and sequences that hold some.
    kv_blocks_free, kv_blocks_cached, kv_blocks_used : int
        Free; in the prefix cache (a sequence may use them too); held by sequences alone. They add
        up to the pool.
    state_slots_used, state_slots_total : int
        Of recurrent states of sequences; 0 of 0 without recurrent layers.
    snapshots_used, snapshots_total : int
        Of recurrent states that are kept for later, by the prefix cache and for rewinds.
    spilled_bytes : int
        KV and recurrent state of preempted sequences in host memory.
    prefix_hits, prefix_misses : int, mapping of str to int
        Prompts that found a prefix; and why a lookup did not find more, by reason.
    steps, preemptions : int
    prompt_tokens, cached_tokens, generated_tokens : int
        Of prompts that are done, those of them that a prefix cache gave, and sampled ones.
    finished : mapping of str to int
        Samples by finish reason.
    host_sampled : mapping of str to int
        Samples whose tokens the host chooses although the device chooses others', by the
        parameters that ask for it. They keep steps from being launched ahead.
    time_to_first_token_s, inter_token_s, request_s : Histogram
        From submit to the first token; between two tokens of a sample; from submit to a
        request's end.
    """

    waiting: int
    running: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_blocks_used: int
    state_slots_used: int
    state_slots_total: int
    snapshots_used: int
    snapshots_total: int
    spilled_bytes: int
    prefix_hits: int
    prefix_misses: Mapping[str, int]
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished: Mapping[str, int]
    host_sampled: Mapping[str, int]
    time_to_first_token_s: Histogram
    inter_token_s: Histogram
    request_s: Histogram


class LatencyCounts:
    """A histogram that grows."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one latency; a bound belongs to its own bucket."""
        self._counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def observe_all(self, seconds: NDArray[np.float64]) -> None:
        """Count several."""
        places = np.searchsorted(LATENCY_BOUNDS_S, seconds)
        for place, count in Counter(places.tolist()).items():
            self._counts[place] += count
        self._total_s += float(seconds.sum())

    def read(self) -> Histogram:
        """As it stands."""
        return Histogram(tuple(self._counts), self._total_s)


class Recorder:
    """Counts tokens and ends as they happen; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._host_sampled: Counter[str] = Counter()
        self._first = LatencyCounts()
        self._between = LatencyCounts()
        self._whole = LatencyCounts()

    def begin(self, request: LiveRequest) -> None:
        """A request was queued."""
        reasons = [g.host_reason for g in request.generations if g.host_reason is not None]
        with self._lock:
            self._host_sampled.update(reasons)

    def token(self, request: LiveRequest, generation: Generation, now: float) -> None:
        """A sample has a new token at ``now`` (``perf_counter``)."""
        with self._lock:
            self._generated_tokens += 1
            if generation.last_token_s:
                self._between.observe(now - generation.last_token_s)
            elif not (request.first_token_s or request.resumed):
                self._first.observe(now - request.submitted_s)
                self._prompt_tokens += len(request.prompt_ids)
                self._cached_tokens += request.cached_tokens

    def tokens(self, waited_s: NDArray[np.float64]) -> None:
        """Samples that had tokens have one more each, so many seconds after their last."""
        if len(waited_s):
            with self._lock:
                self._generated_tokens += len(waited_s)
                self._between.observe_all(waited_s)

    def result(self, request: LiveRequest, num_tokens: int, now: float) -> None:
        """A request got ``num_tokens`` at once, its first (a beam search's hypotheses)."""
        with self._lock:
            self._generated_tokens += num_tokens
            self._first.observe(now - request.submitted_s)
            self._prompt_tokens += len(request.prompt_ids)

    def end(self, reason: FinishReason, request_s: float | None) -> None:
        """A sample ended; with its request's seconds if it was the last one."""
        with self._lock:
            self._finished[reason] += 1
            if request_s is not None:
                self._whole.observe(request_s)

    def read(self, core: ModelCore, driver: Driver, loop: Loop) -> Metrics:
        """All of an engine's metrics now."""
        gauges, free, states = loop.gauges(), core.blocks.num_free, core.states
        running = SlotPool(0) if states is None else states.running
        snapshots = SnapshotSlots(0, 0) if states is None else states.snapshots
        with self._lock:
            return Metrics(
                waiting=gauges.waiting + driver.num_in_inbox,
                running=gauges.running,
                kv_blocks_free=free,
                kv_blocks_cached=gauges.cached_blocks,
                kv_blocks_used=core.blocks.num_total - free - gauges.cached_blocks,
                state_slots_used=running.num_total - running.num_free,
                state_slots_total=running.num_total,
                snapshots_used=snapshots.num_used,
                snapshots_total=snapshots.num_total,
                spilled_bytes=gauges.spilled_bytes,
                prefix_hits=gauges.prefix_hits,
                prefix_misses=MappingProxyType(dict(gauges.prefix_misses)),
                steps=loop.num_steps,
                preemptions=gauges.preemptions,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                generated_tokens=self._generated_tokens,
                finished=MappingProxyType(dict(self._finished)),
                host_sampled=MappingProxyType(dict(self._host_sampled)),
                time_to_first_token_s=self._first.read(),
                inter_token_s=self._between.read(),
                request_s=self._whole.read(),
            )


# -- OpenMetrics ------------------------------------------------------------------------------

OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def openmetrics(metrics: Metrics) -> str:
    """Metrics in the OpenMetrics text format, version 1.0.

    Source
    ------
    "OpenMetrics, a cloud-native, highly scalable metrics protocol", version 1.0.
    """
    blocks = {
        "free": metrics.kv_blocks_free,
        "cached": metrics.kv_blocks_cached,
        "used": metrics.kv_blocks_used,
    }
    slots = _occupancy(metrics.state_slots_used, metrics.state_slots_total)
    snapshots = _occupancy(metrics.snapshots_used, metrics.snapshots_total)
    families = [
        _gauge("requests_waiting", "Requests that wait for KV blocks.", metrics.waiting),
        _gauge("requests_running", "Sequences that hold KV blocks.", metrics.running),
        _family("kv_blocks", "gauge", "Blocks of the KV cache by state.", _by("state", blocks)),
        _family("state_slots", "gauge", "Slots of recurrent state.", _by("state", slots)),
        _family("state_snapshots", "gauge", "Recurrent states kept.", _by("state", snapshots)),
        _gauge("kv_spilled_bytes", "State of preempted sequences.", metrics.spilled_bytes, "bytes"),
        _counter("prefix_hits", "Prompts that found a cached prefix.", metrics.prefix_hits),
        _family(
            "prefix_misses",
            "counter",
            "Prefix lookups that did not find more, by reason.",
            _by("reason", metrics.prefix_misses, "_total"),
        ),
        _counter("steps", "Steps of the engine.", metrics.steps),
        _counter("preemptions", "Sequences that gave up their blocks.", metrics.preemptions),
        _counter("prompt_tokens", "Tokens of prompts that are done.", metrics.prompt_tokens),
        _counter("cached_tokens", "Prompt tokens from the prefix cache.", metrics.cached_tokens),
        _counter("generated_tokens", "Tokens that were sampled.", metrics.generated_tokens),
        _family(
            "samples_finished",
            "counter",
            "Samples that ended, by reason.",
            _by("reason", metrics.finished, "_total"),
        ),
        _family(
            "samples_on_host",
            "counter",
            "Samples whose tokens the host chooses and not the device, by parameters.",
            _by("parameters", metrics.host_sampled, "_total"),
        ),
        _latency("time_to_first_token", "From submit to it.", metrics.time_to_first_token_s),
        _latency("inter_token", "Between two tokens of a sample.", metrics.inter_token_s),
        _latency("request", "From submit to a request's end.", metrics.request_s),
    ]
    return "".join(families) + "# EOF\n"


def _family(name: str, kind: str, about: str, samples: Mapping[str, float], unit: str = "") -> str:
    """A metric family; ``samples`` by what follows its name."""
    lines = [f"# TYPE atlas_{name} {kind}"]
    if unit:
        lines.append(f"# UNIT atlas_{name} {unit}")
    lines.append(f"# HELP atlas_{name} {about}")
    lines += [f"atlas_{name}{suffix} {value}" for suffix, value in samples.items()]
    return "\n".join(lines) + "\n"


def _gauge(name: str, about: str, value: int, unit: str = "") -> str:
    return _family(name, "gauge", about, {"": value}, unit)


def _counter(name: str, about: str, value: int) -> str:
    return _family(name, "counter", about, {"_total": value})


def _occupancy(used: int, total: int) -> dict[str, int]:
    return {"free": total - used, "used": used}


def _by(label: str, values: Mapping[str, int], suffix: str = "") -> dict[str, int]:
    return {f'{suffix}{{{label}="{key}"}}': value for key, value in values.items()}


def _latency(name: str, about: str, histogram: Histogram) -> str:
    bounds = [*(repr(bound) for bound in LATENCY_BOUNDS_S), "+Inf"]
    samples: dict[str, float] = {
        f'_bucket{{le="{bound}"}}': count
        for bound, count in zip(bounds, accumulate(histogram.counts), strict=True)
    }
    samples |= {"_count": histogram.num_observed, "_sum": histogram.total_s}
    return _family(f"{name}_seconds", "histogram", about, samples, "seconds")
