"""Whole models on a GPU: decode, verify, prefill, first token; shares of the card's own ceilings.

    python benchmarks/gpu_models.py qwen3-8b [llama-3.2-1b qwen3-30b-a3b] [--json FILE]

Random bf16 weights of published shapes, loaded and run by the engine itself (``Engine.generate``
with its scheduler, feed and graphs), so that a figure holds all that a user would wait for. The
read ceiling (a reduction over 8 GB) and the GEMM ceiling are measured in the same run, with torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import atlas.engine  # noqa: E402
from atlas import Engine, SamplingParams  # noqa: E402
from benchmarks.random_checkpoint import SHAPES, RandomCheckpoint  # noqa: E402

PROMPT_LEN, GENERATED = 128, 256
_RNG = np.random.default_rng(7)


def ceilings() -> dict[str, Any]:
    """Card, driver, read ceiling (TB/s) and bf16 GEMM ceilings (TFLOP/s).

    ``gemm_tflop_s`` is that of 14 ms, as fast as the card's clock is when cool;
    ``gemm_steady_tflop_s`` what it keeps up for a second, at its power limit.
    """
    import torch

    def seconds(work: Any, count: int = 10) -> list[float]:
        work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(5):
            start.record()
            for _ in range(count):
                work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / count)
        return times

    ones = torch.ones(2 << 30, dtype=torch.float32, device="cuda")
    read = ones.nbytes / min(seconds(ones.sum))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    operations = 2 * 8192**3
    gemm = operations / min(seconds(lambda: square @ square))
    steady = operations / seconds(lambda: square @ square, 150)[-1]
    ones = square = None
    torch.cuda.empty_cache()
    return {
        "card": torch.cuda.get_device_name(),
        "read_tb_s": read / 1e12,
        "gemm_tflop_s": gemm / 1e12,
        "gemm_steady_tflop_s": steady / 1e12,
    }


def open_engine(checkpoint: RandomCheckpoint, device: str, **options: Any) -> Engine:
    """An engine on weights that are in no file."""
    place = SimpleNamespace(kind="folder", path="random")
    with (
        mock.patch.object(atlas.engine, "locate", return_value=place),
        mock.patch.object(atlas.engine, "open_checkpoint", return_value=checkpoint),
        mock.patch.object(atlas.engine, "load_tokenizer", return_value=None),
    ):
        # Without snapshots a hybrid's prompt is not cut at its last multiple of 64 tokens.
        given = {"prefix_cache": False, "state_snapshots": 0} | options
        return Engine("random", device=device, quiet=True, **given)


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    return [_RNG.integers(10, vocab_size, length).tolist() for _ in range(count)]


def generate_s(engine: Engine, batch: int, length: int, tokens: int) -> float:
    """Seconds for ``batch`` prompts of ``length`` random ids and ``tokens`` tokens each."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    given = prompts(batch, length, engine.model.config.vocab_size)
    start = time.perf_counter()
    outputs = engine.generate(given, params)
    seconds = time.perf_counter() - start
    for sample in (sample for output in outputs for sample in output.samples):
        if sample.finish_reason != "length":
            raise RuntimeError(f"a request ended by {sample.finish_reason}: {sample.error}")
    return seconds


def decode_ms(engine: Engine, batch: int, repeats: int) -> float:
    """Milliseconds of a decode step: what 256 more tokens cost after the first.

    A first run records every shape that the others meet. Of many prompts, all but the first run
    beside sequences that decode already, and that is in the figure; ``host_step.py --device cuda``
    has the time from step to step alone.
    """
    generate_s(engine, batch, PROMPT_LEN, GENERATED + 1)
    times = [
        (
            generate_s(engine, batch, PROMPT_LEN, GENERATED + 1)
            - generate_s(engine, batch, PROMPT_LEN, 1)
        )
        / GENERATED
        for _ in range(repeats)
    ]
    return 1e3 * statistics.median(times)


def first_token_ms(engine: Engine, length: int, repeats: int) -> float:
    """Milliseconds from submit to the first token of a prompt."""
    generate_s(engine, 1, length, 1)
    return 1e3 * statistics.median(generate_s(engine, 1, length, 1) for _ in range(repeats))


def verify_ms(engine: Engine, rows: int, count: int = 40) -> float:
    """Milliseconds of a verify of ``rows`` rows, all rejected again; 1 is a decode step."""
    with engine.paused() as model:
        seq = model.lifecycle.alloc_sequence()
        ids = prompts(1, PROMPT_LEN, model.config.vocab_size)[0]
        model.forward.prefill(ids, seq)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            if rows == 1:
                view = model.forward.decode(11, seq)
                model.logits.argmax(view)
            else:
                model.verify.decode_verify(list(range(11, 11 + rows)), seq)
            times.append(time.perf_counter() - start)
            if rows > 1:
                model.verify.accept(seq, 1)
        model.lifecycle.free_sequence(seq)
    return 1e3 * statistics.median(times[count // 4 :])


def report(name: str, device: str, known: dict[str, Any], args: argparse.Namespace) -> Any:
    """Every figure of one shape."""
    checkpoint = RandomCheckpoint(name)
    start = time.perf_counter()
    engine = open_engine(
        checkpoint, device, max_running=128, kv_tokens=args.kv_tokens, max_seq_len=args.max_seq_len,
        chunk_tokens=args.chunk_tokens,
    )  # fmt: skip
    found: dict[str, Any] = {"shape": name, "load_s": time.perf_counter() - start}
    with engine:
        start = time.perf_counter()
        engine.warmup()
        found["warmup_s"] = time.perf_counter() - start
        config = checkpoint.config
        read = checkpoint.nbytes
        if not config.tie_embeddings:
            read -= checkpoint.bytes_of("embedding")
        if config.moe is not None:
            experts = checkpoint.bytes_of("experts")
            read -= experts - experts * config.moe.top_k // config.moe.num_experts
        for batch in args.batches:
            ms = decode_ms(engine, batch, args.repeats)
            found[f"decode_ms_{batch}"] = ms
            line = f"{name}  decode, batch {batch:3d}  {ms:7.3f} ms  {batch / ms * 1e3:8.0f} tok/s"
            if batch == 1 and known:
                share = read / (ms * 1e-3) / (known["read_tb_s"] * 1e12)
                found["read_share"] = share
                line += f"  {read / 1e9:.2f} GB, {share:.1%} of the read ceiling"
            print(line, flush=True)
        if not args.decode_only:
            one = verify_ms(engine, 1)
            for rows in (4, 8):
                ms = verify_ms(engine, rows)
                found[f"verify_ratio_{rows}"] = ms / one
                print(f"{name}  verify of {rows}  {ms:.3f} ms, a step {one:.3f}: {ms / one:.3f}")
            for length in (PROMPT_LEN, args.long_prompt):
                ms = first_token_ms(engine, length, 3 if length > 1000 else 9)
                found[f"first_token_ms_{length}"] = ms
                print(f"{name}  first token after {length} tokens  {ms:.2f} ms", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=66_000)
    parser.add_argument("--max-seq-len", type=int, default=8_256)
    parser.add_argument("--chunk-tokens", type=int, default=8_192)
    parser.add_argument("--long-prompt", type=int, default=8_192)
    parser.add_argument("--decode-only", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known = ceilings() if args.device == "cuda" else {}
    print(known, flush=True)
    results = [report(name, args.device, known, args) for name in args.shapes]
    if args.json:
        args.json.write_text(json.dumps({"ceilings": known, "models": results}, indent=1))


if __name__ == "__main__":
    main()
