"""Sampling on a GPU: tokens checked against the definition, then timed.

    python benchmarks/gpu_sampling.py [--rows 1 8 32 128] [--vocabulary 32000 151936 262144] [--json F]

Peaked logits (a few hundred ids well above normal ones) have a nucleus as a language model's;
flat ones (normal, as random weights give) one of a large part of the vocabulary. Every token must
be the one of ``atlas.sampling_table.choose_tokens`` (scores: ``score_tokens``), and the logits come
out as they went in.
Times are of a graph of 20 draws, all rows with the same parameters. Exits with 1 if a check failed.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas_kernels import build  # noqa: E402

from atlas.backends.cuda.array import DeviceArray  # noqa: E402
from atlas.backends.cuda.sampling import KERNELS, sample, score  # noqa: E402
from atlas.sampler import TokenCounts  # noqa: E402
from atlas.sampling import SamplingParams  # noqa: E402
from atlas.sampling_table import (  # noqa: E402
    MAX_EDITS,
    SCORE_WORDS,
    Draw,
    RowEdits,
    SamplingTable,
    choose_tokens,
    penalizes,
    score_tokens,
)
from tests.kernels.gpu import Gpu  # noqa: E402

Array = np.ndarray[Any, Any]
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.99": {"top_p": 0.99},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 40, top-p 0.95, min-p": {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "top-p, penalties, bias": {
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "logit_bias": {7: 1.5, 11: -3.0},
    },
    "greedy, penalties": {"temperature": 0.0, "frequency_penalty": 0.5},
    "top-k 50, 5 log-probabilities": {"top_k": 50, "logprobs": 5},
    "min tokens, top-p": {"min_tokens": 10_000, "max_tokens": None, "top_p": 0.9},
}
EOS = (2, 151, 9000)


class Steps:
    """A queue that keeps launches, and gives out one scratch area."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.launches, self._scratch = gpu, [], {}
        self.device = SimpleNamespace(arch=gpu.arch)

    def launch(self, kernel: str, grid: Any, args: Any, keep: object = None) -> None:
        values = [a.address if isinstance(a, DeviceArray) else a for a in args]
        self.launches.append((kernel, grid, values))

    def scratch(self, num_bytes: int, *, zeroed: bool = False) -> int:
        if num_bytes not in self._scratch:
            self._scratch[num_bytes] = self.gpu.put(np.zeros(num_bytes, np.uint8))
        return self._scratch[num_bytes]

    def run(self, only: str = "") -> None:
        for kernel, grid, values in self.launches:
            if only in ("", kernel):
                self.gpu.run(kernel, grid, values)


def logits_of(shape: str, rows: int, vocabulary: int, seed: int) -> Array:
    """float32 [rows, vocabulary]."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, vocabulary), np.float32)
    if shape == "peaked":
        values *= np.float32(1.5)
        for row in values:
            at = random.integers(0, vocabulary, 300)
            row[at] += random.exponential(2.5, 300).astype(np.float32) + np.float32(8)
    return values


class Step:
    """One step's rows on the device."""

    def __init__(self, gpu: Gpu, logits: Array, options: dict[str, Any]) -> None:
        rows, self.gpu, self.logits = len(logits), gpu, logits
        random = np.random.default_rng(rows)
        self.ids = random.integers(0, logits.shape[1], rows).astype(np.int32)
        table_rows = np.zeros((rows, 20), np.int32)
        score_rows = np.zeros_like(table_rows)
        table_edits = np.zeros((rows * MAX_EDITS, 4), np.int32)
        draws = []
        for i in range(rows):
            given = {"temperature": 0.8, "seed": 1000 + i} | options
            params = SamplingParams(**given)
            counts = TokenCounts(random.integers(0, logits.shape[1], 300))
            for token in random.integers(0, logits.shape[1], 100):
                counts.add(int(token), 1)
            row_edits = RowEdits(params, EOS, counts if penalizes(params) else None)
            draws.append(Draw(params, i, 400 + i, i % 3, row_edits, params.min_tokens > 0, i))
        table = SamplingTable(table_rows, table_edits, score_rows)
        table.fill(draws)
        self.host = self.ids, table_rows, table_edits[: max(1, table.num_edits)]
        self.at = gpu.put(logits)
        device = [DeviceArray(gpu.put(a), a.shape, "int32") for a in self.host]
        self.zeros = np.zeros(rows, np.int32)
        self.chosen = DeviceArray(gpu.put(self.zeros), (rows,), "int32")
        self.steps = Steps(gpu)
        source = DeviceArray(self.at, logits.shape, "float32")
        sample(self.steps, source, *device, out=self.chosen)  # type: ignore[arg-type]
        self.score_rows = score_rows[: table.num_scores]
        self.no_scores = np.zeros((table.num_scores, SCORE_WORDS), np.int32)
        if table.num_scores:
            scored = DeviceArray(gpu.put(self.score_rows), self.score_rows.shape, "int32")
            self.scores = DeviceArray(gpu.put(self.no_scores), self.no_scores.shape, "int32")
            score(self.steps, source, scored, self.chosen, out=self.scores)  # type: ignore[arg-type]

    def wrong(self) -> int:
        """Rows whose token differs, or all if the logits did not come back."""
        self.steps.run()
        got = self.gpu.get(self.chosen.address, self.zeros)
        want = self.zeros.copy()
        choose_tokens(self.logits, *self.host, chosen=want)
        same = np.array_equal(self.gpu.get(self.at, self.logits), self.logits)
        if len(self.score_rows):
            scores = self.no_scores.copy()
            score_tokens(self.logits, self.score_rows, want, scores=scores)
            same &= np.array_equal(self.gpu.get(self.scores.address, scores), scores)
        return int((got != want).sum()) if same else len(want)


def time_parts(gpu: Gpu, rows: int) -> dict[str, float]:
    """Microseconds of each kernel of a top-p draw."""
    step = Step(gpu, logits_of("peaked", rows, 151936, 1), KINDS["top-p 0.9"])
    step.steps.run()
    parts = {}
    for kernel in KERNELS[:-1]:
        parts[kernel] = gpu.microseconds(lambda only=kernel: step.steps.run(only))  # type: ignore[misc]
    gpu.free()
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--vocabulary", type=int, nargs="*", default=[32000, 151936, 262144])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    gpu = Gpu()
    for compiled in build.load_all(list(KERNELS), gpu.arch, jobs=8).values():
        gpu.add(compiled)
    failed, figures = 0, dict[str, Any]()
    for vocabulary in options.vocabulary:
        for shape in ("peaked", "flat"):
            logits = logits_of(shape, 6, vocabulary, vocabulary)
            for name, kind in KINDS.items():
                if wrong := Step(gpu, logits, kind).wrong():
                    failed += wrong
                    print(f"WRONG: {vocabulary} {shape} {name}: {wrong} of 6 rows", flush=True)
                gpu.free()
    print("tokens:", f"{failed} wrong" if failed else "all as defined", flush=True)
    print(f"{gpu.device.name}, microseconds; rows:", *options.rows)
    for vocabulary in options.vocabulary:
        for shape in ("peaked", "flat"):
            logits = logits_of(shape, max(options.rows), vocabulary, 1)
            for name, kind in KINDS.items():
                times = []
                for rows in options.rows:
                    step = Step(gpu, logits[:rows], kind)
                    times.append(gpu.microseconds(step.steps.run, 20 if shape == "peaked" else 2))
                    gpu.free()
                figures[f"{vocabulary} {shape} {name}"] = times
                text = "".join(f"{us:9.1f}" for us in times)
                print(f"{vocabulary:7} {shape:7} {name:30}{text}", flush=True)
    for rows in (min(options.rows), max(options.rows)):
        figures[f"parts {rows}"] = parts = time_parts(gpu, rows)
        text = "  ".join(f"{k.removeprefix('sampling_')} {us:.1f}" for k, us in parts.items())
        print(f"{rows} rows, 151936, top-p 0.9, by kernel: {text}")
    if options.json:
        record = {"device": gpu.device.name, "failed": failed, "figures": figures}
        Path(options.json).write_text(json.dumps(record, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
