"""Atlas and llama.cpp side by side on one GGUF file: decode and prefill on the CPU.

    pip install llama-cpp-python   # built natively, on the same machine
    python benchmarks/compare_llama_cpp.py [--threads 2] [--repeats 5] [--json FILE]

The engines take turns within each repeat, so that a noisy neighbour meets both; medians are
printed, with the share of the memory bandwidth read in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from atlas import Engine

SHORT_PROMPT, LONG_PROMPT, DECODE = 16, 512, 64


def prompt_ids(length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(length).integers(100, vocab_size - 100, length).tolist()


class AtlasRunner:
    def __init__(self, path: str, threads: int) -> None:
        self.engine = Engine(path, threads=threads, max_seq_len=2048, quiet=True)
        self.vocab_size = self.engine.model.logits.vocab_size
        self.weight_bytes = self.engine._loaded.plan.weights

    def prefill(self, ids: list[int]) -> float:
        model = self.engine.model
        seq = model.lifecycle.alloc_sequence()
        started = time.perf_counter()
        model.forward.prefill(ids, seq)
        taken = time.perf_counter() - started
        model.lifecycle.free_sequence(seq)
        return len(ids) / taken

    def decode(self, ids: list[int], count: int) -> float:
        model = self.engine.model
        seq = model.lifecycle.alloc_sequence()
        view = model.forward.prefill(ids, seq)
        started = time.perf_counter()
        for _ in range(count):
            view = model.forward.decode(model.logits.argmax(view), seq)
        taken = time.perf_counter() - started
        model.lifecycle.free_sequence(seq)
        return count / taken


class LlamaRunner:
    def __init__(self, path: str, threads: int) -> None:
        from llama_cpp import Llama

        self.llama = Llama(
            path,
            n_ctx=2048,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=512,
            verbose=False,
            logits_all=False,
        )

    def prefill(self, ids: list[int]) -> float:
        self.llama.reset()
        started = time.perf_counter()
        self.llama.eval(ids)
        return len(ids) / (time.perf_counter() - started)

    def decode(self, ids: list[int], count: int) -> float:
        self.llama.reset()
        self.llama.eval(ids)
        token = self.llama.sample(temp=0.0)
        started = time.perf_counter()
        for _ in range(count):
            self.llama.eval([token])
            token = self.llama.sample(temp=0.0)
        return count / (time.perf_counter() - started)


def read_bandwidth(threads: int) -> float:
    """GB/s of all threads reading weights in DRAM: float32 rows against one, nothing else to do."""
    from atlas.backends.cpu.device import CpuDevice, Queue
    from atlas.backends.cpu.linear import linear
    from atlas.backends.cpu.pack import pack
    from atlas.ops.blocks import HostMatrix

    queue = Queue(CpuDevice(threads))
    weight = pack([HostMatrix("f32", 32768, 4096, np.ones((32768, 4096), np.float32))])
    x, out = np.ones((1, 4096), np.float32), np.empty((1, 32768), np.float32)
    best = 0.0
    for _ in range(7):
        started = time.perf_counter()
        linear(queue, x, weight, out=out)
        best = max(best, weight.nbytes / (time.perf_counter() - started) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="a GGUF file (default: SmolLM2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    path = options.model
    if path is None:
        from atlas.weights.locate import locate

        path = str(locate("smollm2").path)
    atlas, llama = AtlasRunner(path, options.threads), LlamaRunner(path, options.threads)
    short = prompt_ids(SHORT_PROMPT, atlas.vocab_size)
    long = prompt_ids(LONG_PROMPT, atlas.vocab_size)
    tests: dict[str, Callable[[AtlasRunner | LlamaRunner], float]] = {
        f"decode after {SHORT_PROMPT}": lambda runner: runner.decode(short, DECODE),
        f"decode after {LONG_PROMPT}": lambda runner: runner.decode(long, DECODE),
        f"prefill {LONG_PROMPT}": lambda runner: runner.prefill(long),
    }
    results = {name: {"atlas": [], "llama.cpp": []} for name in tests}
    for repeat in range(options.repeats + 1):
        for name, run in tests.items():
            for engine, runner in (("atlas", atlas), ("llama.cpp", llama)):
                rate = run(runner)
                if repeat:  # the first round warms up
                    results[name][engine].append(rate)
    bandwidth = read_bandwidth(options.threads)
    report = {"threads": options.threads, "read_gb_s": bandwidth, "tests": {}}
    print(f"{'tokens/s (median)':<20} {'atlas':>9} {'llama.cpp':>10} {'ratio':>7}")
    for name, by_engine in results.items():
        ours = statistics.median(by_engine["atlas"])
        theirs = statistics.median(by_engine["llama.cpp"])
        report["tests"][name] = {"atlas": ours, "llama.cpp": theirs, "ratio": ours / theirs}
        print(f"{name:<20} {ours:>9.1f} {theirs:>10.1f} {ours / theirs:>6.2f}x")
    rate = report["tests"][f"decode after {SHORT_PROMPT}"]["atlas"]
    share = rate * atlas.weight_bytes / 1e9 / bandwidth
    report["bandwidth_share"] = share
    print(f"read bandwidth {bandwidth:.1f} GB/s; short decode reads weights at {share:.0%} of it")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
