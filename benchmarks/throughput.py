"""What batching gains: the tokens a second of many requests at once, beside one alone.

Run it as ``python benchmarks/throughput.py [--requests 16] [--threads 2]``. Every request has a
prompt of its own (no prefix is shared) and generates the same number of tokens; a run's rate is
all tokens generated over all its time, prompts included.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from atlas import Engine, SamplingParams

BOUND_RATIO = 2.5
BOUND_TOK_S = 450.0


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts, all different."""
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


def tokens_per_s(engine: Engine, batch: list[list[int]], params: SamplingParams) -> float:
    """Tokens generated over the whole time of one batch of requests."""
    start = time.perf_counter()
    done = engine.generate(batch, params)
    total_s = time.perf_counter() - start
    return sum(completion.usage.completion_tokens for completion in done) / total_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--gen-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.gen_tokens, ignore_eos=True)
    with Engine(args.model, threads=args.threads, max_running=args.requests, quiet=True) as engine:
        vocab_size = engine.model.config.vocab_size
        rates: dict[int, list[float]] = {1: [], args.requests: []}
        for repeat in range(args.repeats + 1):  # the first round warms up
            for count, measured in rates.items():
                batch = prompts(count, args.prompt_tokens, vocab_size, seed=repeat)
                rate = tokens_per_s(engine, batch, params)
                if repeat:
                    measured.append(rate)
    one, many = (statistics.median(measured) for measured in rates.values())
    print(f"{args.prompt_tokens} prompt and {args.gen_tokens} generated tokens a request,")
    print(f"{args.threads} threads, medians of {args.repeats}:")
    print(f"  1 request:   {one:.0f} tokens/s")
    print(f"  {args.requests} requests: {many:.0f} tokens/s, {many / one:.2f} ×")
    print(f"bar: {BOUND_RATIO} × or {BOUND_TOK_S:.0f} tokens/s")


if __name__ == "__main__":
    main()
