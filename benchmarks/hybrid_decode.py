"""Decode of a hybrid of 0.1 billion weights on the CPU, beside what its memory allows.

    python benchmarks/hybrid_decode.py [--threads 2] [--format bf16 …] [--json FILE]

Random weights in Qwen3.5's arrangement: 12 layers, every fourth with attention. A token reads all
weights and reads and writes the recurrent states; the limit is these bytes at the rate at which the
same number of threads sum a gigabyte of float32 in the same run. Times are the least of many: other
work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas.backends.cpu.pack import PackedMatrix  # noqa: E402
from atlas.config import GatedDeltaConfig, ModelConfig, RopeConfig  # noqa: E402
from atlas.model.load import LoadOptions, load_model  # noqa: E402
from tests.helpers.random_model import RandomCheckpoint  # noqa: E402

BOUND = 0.7
CONFIG = ModelConfig(
    architecture="random",
    vocab_size=32000,
    hidden_size=768,
    num_layers=12,
    layer_kinds=("gated_delta", "gated_delta", "gated_delta", "attention") * 3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=2048,
    norm_eps=1e-6,
    max_seq_len=1024,
    qk_norm=True,
    attention_gate=True,
    gated_delta=GatedDeltaConfig(4, 8, key_dim=128, value_dim=128, conv_width=4),
    rope=RopeConfig(rotary_dim=32),
    tie_embeddings=True,
)


def least_seconds(work: Callable[[], Any], repeats: int) -> float:
    """The shortest of some runs, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_ceiling(threads: int) -> float:
    """Bytes a second that this many threads sum."""
    parts = np.array_split(np.ones(1 << 28, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = least_seconds(lambda: list(pool.map(np.sum, parts)), 10)
    return sum(part.nbytes for part in parts) / seconds


def weight_bytes(item: object, seen: set[int]) -> int:
    """Bytes of the packed matrices that a network's parts hold, each once."""
    if id(item) in seen:
        return 0
    seen.add(id(item))
    if isinstance(item, PackedMatrix):
        return int(item.data.nbytes)
    if isinstance(item, tuple):
        return sum(weight_bytes(part, seen) for part in item)
    names = getattr(type(item), "__dataclass_fields__", ())
    return sum(weight_bytes(getattr(item, name), seen) for name in names)


def measure(format: str, threads: int, repeats: int) -> dict[str, float]:
    """Milliseconds a token and bytes that it moves."""
    checkpoint: Any = RandomCheckpoint(CONFIG, format)
    loaded = load_model(checkpoint, LoadOptions(threads=threads, max_seq_len=1024))
    with closing(loaded.core):
        model, core = loaded.model, loaded.core
        sequence = model.lifecycle.alloc_sequence()
        model.forward.prefill(np.arange(64), sequence)
        seconds = least_seconds(lambda: model.forward.decode(1, sequence), repeats)
        sizes = CONFIG.gated_delta
        assert sizes is not None
        state = sizes.num_value_heads * sizes.key_dim * sizes.value_dim * 4
        states = 2 * state * CONFIG.layer_kinds.count("gated_delta")
        weights = weight_bytes(core.network.blocks, set()) + weight_bytes(core.network.head, set())
        return {"ms": seconds * 1e3, "weights MB": weights / 1e6, "states MB": states / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--format", nargs="+", default=["f32", "bf16", "q8_0", "q4_0"])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    ceiling = read_ceiling(options.threads)
    print(f"{options.threads} threads read {ceiling / 1e9:.1f} GB/s")
    everything = []
    for format in options.format:
        figures = measure(format, options.threads, options.repeats)
        moved = (figures["weights MB"] + figures["states MB"]) * 1e6
        figures |= {"GB/s": moved / figures["ms"] / 1e6}
        figures |= {"share": moved / ceiling / (figures["ms"] / 1e3)}
        print(format, *(f"{name} {value:.4g}" for name, value in figures.items()), sep=" | ")
        everything.append({"format": format, "ceiling GB/s": ceiling / 1e9} | figures)
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1))
    if min(figures["share"] for figures in everything) < BOUND:
        raise SystemExit(f"below {BOUND:.0%} of the byte limit")


if __name__ == "__main__":
    main()
