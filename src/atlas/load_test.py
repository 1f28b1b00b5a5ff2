"""Load of synthetic requests on an engine: how fast it serves them, and how long each waits.

A *closed* loop keeps a number of requests in flight, as that many patient clients would; it finds
the throughput. An *open* loop submits at random times whatever the engine does, as the world does;
it finds the waiting times at a given rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atlas.errors import InvalidArgumentError, QueueFullError
from atlas.event import Event
from atlas.sampling import SamplingParams

if TYPE_CHECKING:
    from atlas.engine import Engine

_FORMS = "N, constant:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA:MAX"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    Attributes
    ----------
    kind : {"constant", "uniform", "lognormal"}
    low, high : int
        Every length lies in ``low`` … ``high``, both included; equal for a constant.
    median, sigma : float
        Of the log-normal: e to the mean, and the standard deviation, of the length's logarithm.
        Draws outside the bounds become the bound.
    """

    kind: Literal["constant", "uniform", "lognormal"]
    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise InvalidArgumentError(
                f"lengths of {self.low} … {self.high}; allowed: 1 or more, in order"
            )
        if self.kind == "lognormal" and not (
            0 < self.median < math.inf and 0 <= self.sigma < math.inf
        ):
            raise InvalidArgumentError(
                f"lognormal of median {self.median} and sigma {self.sigma}; "
                "allowed: a median above 0, a sigma of 0 or more"
            )

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Lengths from ``N``, ``constant:N``, ``uniform:LOW:HIGH``, ``lognormal:MEDIAN:SIGMA:MAX``.

        Raises
        ------
        InvalidArgumentError
            For any other text, or numbers out of range.
        """
        kind, *values = text.split(":") if ":" in text else ("constant", text)
        try:
            match kind, values:
                case "constant", [length]:
                    return cls("constant", int(length), int(length))
                case "uniform", [low, high]:
                    return cls("uniform", int(low), int(high))
                case "lognormal", [median, sigma, high]:
                    return cls("lognormal", 1, int(high), float(median), float(sigma))
        except ValueError:
            pass  # a number that is none: refused as any other text
        raise InvalidArgumentError(f"length {text!r}; allowed: {_FORMS}")

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        if self.kind == "lognormal":
            length = rng.lognormal(math.log(self.median), self.sigma)
            return int(min(max(round(min(length, self.high)), self.low), self.high))
        return int(rng.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests come, and when.

    Attributes
    ----------
    prompt, output : Lengths
        Tokens of each prompt, and tokens generated for it: end tokens do not end it.
    concurrency : int, optional
        Closed loop: requests in flight.
    rate : float, optional
        Open loop: requests a second on average, with exponential gaps (a Poisson process).
    num_requests : int, optional
        Requests in all.
    duration_s : float, optional
        No request is submitted later; those under way are finished.
    seed : int
        Of lengths, prompts and gaps.
    """

    prompt: Lengths
    output: Lengths
    concurrency: int | None = None
    rate: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise InvalidArgumentError("give either concurrency (closed loop) or rate (open loop)")
        if self.num_requests is None and self.duration_s is None:
            raise InvalidArgumentError("give num_requests, duration_s or both")
        for name in ("concurrency", "num_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} is {value}; allowed: 1 or more")
        for name in ("rate", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgumentError(f"{name} is {value}; allowed: above 0, finite")
        if self.seed < 0:
            raise InvalidArgumentError(f"seed is {self.seed}; allowed: 0 or more")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load: when it is due, in seconds from the start, and what it asks."""

    due_s: float
    prompt_ids: list[int]
    max_tokens: int


def arrivals(load: Load, vocab_size: int) -> Iterator[Arrival]:
    """The requests of a load, the same ones for the same seed; a closed loop's are due at once."""
    rng = np.random.default_rng(load.seed)
    due_s, count = 0.0, 0
    while load.num_requests is None or count < load.num_requests:
        prompt = rng.integers(0, vocab_size, load.prompt.draw(rng)).tolist()
        yield Arrival(due_s, prompt, load.output.draw(rng))
        count += 1
        if load.rate is not None:
            due_s += rng.exponential(1 / load.rate)


@dataclass(frozen=True, slots=True)
class Spread:
    """How a latency is distributed over its samples, in milliseconds; NaN without samples."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """The spread of some durations in seconds."""
        if not seconds:
            return cls(*[math.nan] * 5)
        ms = np.array(seconds) * 1e3
        p50, p90, p99 = np.percentile(ms, (50, 90, 99)).tolist()
        return cls(p50, p90, p99, float(ms.mean()), float(ms.max()))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load test measured.

    Attributes
    ----------
    num_finished, num_failed, num_refused : int
        Requests that gave all their tokens, that ended with an error, and that found the queue
        full (``max_waiting``).
    elapsed_s : float
        From the first submission to the last event.
    prompt_tokens, cached_tokens, completion_tokens : int
        Of the finished requests; cached ones are those of the prompts that were not recomputed.
    ttft : Spread
        Time to first token: from when a request was due to the first event with tokens. A request
        that could only be submitted late has waited all the same.
    inter_token : Spread
        Between two events with tokens of one request. An event may hold several tokens, when
        their text became complete only together.
    latency : Spread
        From when a request was due to its last event.
    """

    num_finished: int
    num_failed: int
    num_refused: int
    elapsed_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: Spread
    inter_token: Spread
    latency: Spread

    @property
    def requests_per_s(self) -> float:
        """Finished requests a second."""
        return self.num_finished / self.elapsed_s

    @property
    def completion_tok_s(self) -> float:
        """Generated tokens a second."""
        return self.completion_tokens / self.elapsed_s

    @property
    def total_tok_s(self) -> float:
        """Prompt and generated tokens a second."""
        return (self.prompt_tokens + self.completion_tokens) / self.elapsed_s

    def as_dict(self) -> dict[str, Any]:
        """All of it by name; latencies in milliseconds under ``*_ms``, None where not measured."""
        report = asdict(self)
        for name in ("ttft", "inter_token", "latency"):
            spread = report.pop(name)
            report[f"{name}_ms"] = {
                key: None if math.isnan(value) else value for key, value in spread.items()
            }
        for name in ("requests_per_s", "completion_tok_s", "total_tok_s"):
            report[name] = getattr(self, name)
        return report


@dataclass(slots=True)
class _Samples:
    """Times of the requests so far, in seconds from the start."""

    due_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def note(self, event: Event, now_s: float) -> None:
        """Account for an event of one of the load's requests."""
        name = event.request_id
        if event.token_ids:
            if name in self.last_s:
                self.inter_token_s.append(now_s - self.last_s[name])
            else:
                self.ttft_s.append(now_s - self.due_s[name])
            self.last_s[name] = now_s
        if not event.is_last:
            return
        due_s = self.due_s.pop(name)
        self.last_s.pop(name, None)
        if event.finish_reason != "length" or event.usage is None:
            self.num_failed += 1
            return
        self.latency_s.append(now_s - due_s)
        self.prompt_tokens += event.usage.prompt_tokens
        self.cached_tokens += event.usage.cached_tokens
        self.completion_tokens += event.usage.completion_tokens

    def report(self, elapsed_s: float) -> LoadReport:
        return LoadReport(
            len(self.latency_s),
            self.num_failed,
            self.num_refused,
            elapsed_s,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            Spread.of(self.ttft_s),
            Spread.of(self.inter_token_s),
            Spread.of(self.latency_s),
        )


class LoadTest:
    """Runs a load on an engine that nobody else uses meanwhile.

    The calling thread submits, steps (unless the engine's owner thread does) and takes the times.

    Parameters
    ----------
    engine : Engine
    load : Load

    Raises
    ------
    InvalidArgumentError
        The longest prompt and output exceed ``max_seq_len`` together.
    """

    def __init__(self, engine: Engine, load: Load) -> None:
        longest = load.prompt.high + load.output.high
        if longest > engine.max_seq_len:
            raise InvalidArgumentError(
                f"up to {load.prompt.high} prompt and {load.output.high} generated tokens; "
                f"allowed: together up to max_seq_len {engine.max_seq_len}"
            )
        self._engine = engine
        self._load = load
        self._samples = _Samples()

    def run(self) -> LoadReport:
        """Submit every request of the load and wait for the last one.

        Whatever interrupts it cancels the requests under way.

        Raises
        ------
        KvExhausted
            The KV pool cannot hold one of the requests even alone.
        """
        with self._engine.paused() as model:
            coming = arrivals(self._load, model.config.vocab_size)
        samples = self._samples = _Samples()
        started = time.perf_counter()
        try:
            self._serve(coming, started)
        finally:
            for name in samples.due_s:
                self._engine.cancel(name)
        return samples.report(time.perf_counter() - started)

    def _serve(self, coming: Iterator[Arrival], started: float) -> None:
        samples = self._samples
        upcoming = next(coming, None)
        while upcoming is not None or samples.due_s:
            now_s = time.perf_counter() - started
            taken = True  # a closed loop's client that was refused comes back after a step
            while upcoming is not None and taken and self._is_due(upcoming, now_s):
                taken = self._submit(upcoming, now_s) or self._load.concurrency is None
                upcoming = next(coming, None)
            if upcoming is not None and now_s >= (self._load.duration_s or math.inf):
                upcoming = None
            wait_s = None
            if upcoming is not None and self._load.rate is not None:
                wait_s = max(0.0, upcoming.due_s - now_s)
            if samples.due_s:
                for event in self._engine.poll(wait_s):
                    samples.note(event, time.perf_counter() - started)
            elif wait_s is not None:
                time.sleep(wait_s)

    def _is_due(self, arrival: Arrival, now_s: float) -> bool:
        load = self._load
        if now_s >= (load.duration_s or math.inf):
            return False
        if load.concurrency is not None:
            return len(self._samples.due_s) < load.concurrency
        return arrival.due_s <= now_s

    def _submit(self, arrival: Arrival, now_s: float) -> bool:
        """Submit a request; False when it was refused."""
        params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
        try:
            name = self._engine.submit(arrival.prompt_ids, params)
        except QueueFullError:
            self._samples.num_refused += 1
            return False
        closed = self._load.concurrency is not None
        self._samples.due_s[name] = now_s if closed else arrival.due_s
        return True
