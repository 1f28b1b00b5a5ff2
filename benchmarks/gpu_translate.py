"""Beam search on a GPU: tokens a second, milliseconds a step, and where a step's time goes.

    python benchmarks/gpu_translate.py [--batches 32] [--beams 4] [--tokens 64] [--json FILE]

NLLB-200-600M's shape (12 + 12 layers of 1,024, vocabulary 256,206) with random bf16 weights, loaded
and run by the engine itself (``Engine.translate``): a step is one sweep of all beams, the search's
candidates and the host's part of the search. Beside that, the device's own time of the same sweep
(its graph, replayed) and of the candidates, the bytes that they read, and their share of the read
ceiling, which is measured in the same run with torch. ``--parts`` replays the sweep without one
kind of kernel at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas import Engine  # noqa: E402
from atlas.layers.translation_step import DecodeShape  # noqa: E402
from atlas.translation import BeamParams  # noqa: E402
from benchmarks.gpu_models import ceilings, open_engine  # noqa: E402
from benchmarks.random_checkpoint import SHAPES, RandomCheckpoint  # noqa: E402

SHAPE = "nllb-200-600m"
TRANSLATORS = sorted(name for name, config in SHAPES.items() if config.encoder is not None)
_FIRST_IDS = 16  # below lie special tokens and, here, the two languages
_LANGUAGES = {"source": 10, "target": 11}


def sources(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random subwords."""
    rng = np.random.default_rng(count)
    return [rng.integers(_FIRST_IDS, vocab_size, length).tolist() for _ in range(count)]


def seconds(engine: Engine, batch: int, args: argparse.Namespace, tokens: int) -> float:
    """For ``batch`` sources, each to the limit of ``tokens`` tokens."""
    params = BeamParams(num_beams=args.beams, max_tokens=tokens, early_stopping="never")
    given = sources(batch, args.length, engine.model.config.vocab_size)
    start = time.perf_counter()
    found = engine.translate(given, params=params, **_LANGUAGES)
    taken = time.perf_counter() - start
    short = [len(one.token_ids) for one in found if len(one.token_ids) != tokens]
    assert len(short) <= batch // 8, f"translations of {short} tokens"
    return taken


def step_bytes(checkpoint: RandomCheckpoint, batch: int, args: argparse.Namespace) -> Counter[str]:
    """Bytes that the device reads in a sweep in the middle of a translation, by what they are."""
    config, rows = checkpoint.config, batch * args.beams
    per_key = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return Counter(
        weights=checkpoint.bytes_of("embedding")
        + sum(
            checkpoint.stored_bytes(name)
            for name in checkpoint.weight_formats()
            if name.startswith("layers.") and not name.endswith(("cross_k_proj", "cross_v_proj"))
        ),
        own_keys=rows * (2 + args.tokens // 2) * per_key,
        source_keys=batch * (args.length + 2) * per_key,
        logits=2 * 4 * rows * config.vocab_size,  # the greatest, then the total
    )


def device_us(runtime: Any, work: Any, count: int = 20) -> float:
    """Median time of work that is put on the stream again and again."""
    device = runtime.device
    device.enter()
    api, driver = device.driver.api, device.driver
    start, end = (driver(api.cuEventCreate(0), "an event") for _ in range(2))
    times = []
    for _ in range(6):
        driver(api.cuEventRecord(start, device.stream), "an event")
        for _ in range(count):
            work()
        driver(api.cuEventRecord(end, device.stream), "an event")
        device.synchronize()
        times.append(driver(api.cuEventElapsedTime(start, end), "a time") * 1e3 / count)
    return statistics.median(times[1:])


def kind_of(launch: Any) -> str:
    """``layernorm``, ``gemm``, ``cross_attention``, … of a launch."""
    name = getattr(launch, "kernel", "cublas")
    words = ("layernorm", "gemm", "cross_attention", "attention_step", "relu", "embedding")
    return next((word for word in words if word in name), name)


def sweep_us(core: Any, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """The device's time of the sweep and the candidates of the requests that ran last."""
    runtime, rows = core.runtime, batch * args.beams
    shape = runtime.padded(DecodeShape(rows, rows, batch, rows, max_source_rows=args.beams))
    step = runtime._step(core.network.decoder, core.buffers, shape)
    k = 2 * args.beams if args.beams > 1 else 1
    launches = runtime._candidates._launches(rows, k)
    found = {
        "sweep": device_us(runtime, step.graph.launch),
        "candidates": device_us(runtime, lambda: runtime.device.run(launches)),
    }
    if args.parts:
        from atlas.backends.cuda.graph import CapturedGraph
        from atlas.backends.cuda.launch import Recording

        whole = runtime._record(core.network.decoder, core.buffers, shape)
        kinds = [kind_of(launch) for launch in whole.launches]
        for kind, count in Counter(kinds).items():
            kept = [i for i, other in enumerate(kinds) if other != kind]
            part = Recording([whole.launches[i] for i in kept], [whole.keep[i] for i in kept])
            graph = CapturedGraph(
                runtime.device, part.compile(runtime.device), runtime._capture_stream
            )
            found[f"{count} {kind}"] = found["sweep"] - device_us(runtime, graph.launch)
            graph.close()
    return found


def report(
    engine: Engine, checkpoint: RandomCheckpoint, batch: int, ceiling: float, args: Any
) -> Any:
    """Every figure of one batch."""
    seconds(engine, batch, args, args.tokens)
    whole = statistics.median(
        seconds(engine, batch, args, args.tokens) for _ in range(args.repeats)
    )
    first = statistics.median(seconds(engine, batch, args, 1) for _ in range(args.repeats))
    step_ms = 1e3 * (whole - first) / (args.tokens - 1)
    found: dict[str, Any] = {
        "batch": batch,
        "beams": args.beams,
        "tokens_per_s": batch * args.tokens / whole,
        "first_step_ms": 1e3 * first,
        "step_ms": step_ms,
    }
    parts = step_bytes(checkpoint, batch, args)
    found["bytes"] = dict(parts)
    print(f"\nbatch {batch}, {args.beams} beams, sources of {args.length}, {args.tokens} tokens")
    rows = [
        ("tokens a second", f"{found['tokens_per_s']:.0f}"),
        ("encoding and first sweep", f"{found['first_step_ms']:.2f} ms"),
        ("a step", f"{step_ms:.3f} ms"),
        *((f"read: {name}", f"{count / 1e6:.1f} MB") for name, count in parts.items()),
        ("read in all", f"{parts.total() / 1e6:.1f} MB"),
    ]
    if args.device == "cuda":
        times = sweep_us(engine._loaded.core, batch, args)  # type: ignore[attr-defined]
        found["device_us"] = times
        of_sweep = parts.total() - parts["logits"]
        found["sweep_share"] = of_sweep / times["sweep"] / 1e6 / ceiling
        found["step_share"] = parts.total() / step_ms / 1e9 / ceiling
        rows += [(f"device: {name}", f"{us:.1f} us") for name, us in times.items()]
        rows += [
            ("sweep, share of the read ceiling", f"{found['sweep_share']:.1%}"),
            ("step, share of the read ceiling", f"{found['step_share']:.1%}"),
        ]
    for name, value in rows:
        print(f"  {name:34}{value:>14}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default=SHAPE, choices=TRANSLATORS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[32])
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--length", type=int, default=24, help="subwords of a source")
    parser.add_argument("--tokens", type=int, default=64, help="of each translation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", action="store_true", help="what each kind of kernel costs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known = ceilings() if args.device == "cuda" else {}
    print(known, flush=True)
    checkpoint = RandomCheckpoint(args.shape)
    most = max(args.batches)
    per_request = args.beams * (args.tokens + 18) + args.length + 18  # blocks of 16 are not full
    with open_engine(
        checkpoint, args.device, max_running=max(32, most * args.beams),
        kv_tokens=most * per_request, max_seq_len=256,
    ) as engine:  # fmt: skip
        engine.warmup()
        ceiling = known.get("read_tb_s", 1.0)
        results = [report(engine, checkpoint, batch, ceiling, args) for batch in args.batches]
    if args.json:
        args.json.write_text(json.dumps({"ceilings": known, "translations": results}, indent=1))


if __name__ == "__main__":
    main()
