"""What ``reuse_generated`` changes: logits behind cached blocks that generated tokens made.

    python benchmarks/reuse_generated.py [--device cuda] [--shapes tiny qwen3-8b qwen3-30b-a3b]

A prompt is answered, then sent again with its answer and a question, once to an engine that reuses
the answer's blocks, once to one that reuses those of prompt tokens alone, once to one without a
prefix cache. For each of the first two: tokens that came from the cache, the greatest difference of
a log-probability of the first new token's ``KEPT`` most likely ones from the last engine's, and
whether all tokens are equal. Without ``reuse_generated`` the difference must be 0, on a GPU as on
the CPU; with it a GPU has another, as decode steps and prompts sum attention in other orders.
Exits with 1 where it must be 0 and is not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas import SamplingParams  # noqa: E402
from benchmarks.gpu_models import open_engine  # noqa: E402
from benchmarks.random_checkpoint import SHAPES, RandomCheckpoint  # noqa: E402

PROMPT_LEN, ANSWER_LEN, QUESTION_LEN, KEPT = 200, 120, 30, 50
ENGINES: dict[str, dict[str, Any]] = {
    "no cache": {"prefix_cache": False},
    "reuse_generated=False": {"prefix_cache": True, "reuse_generated": False},
    "reuse_generated=True": {"prefix_cache": True, "reuse_generated": True},
}


def second_turn(checkpoint: RandomCheckpoint, device: str, options: dict[str, Any]) -> Any:
    """Tokens that came from the cache, the first new token's log-probabilities, all new tokens."""
    rng, vocab = np.random.default_rng(5), checkpoint.config.vocab_size
    prompt = rng.integers(10, vocab, PROMPT_LEN).tolist()
    question = rng.integers(10, vocab, QUESTION_LEN).tolist()
    params = SamplingParams(max_tokens=ANSWER_LEN, ignore_eos=True)
    with open_engine(checkpoint, device, kv_tokens=2048, max_seq_len=1024, **options) as engine:
        answer = engine.generate(prompt, params)
        turn = [*prompt, *answer.token_ids, *question]
        output = engine.generate(turn, params.replace(logprobs=KEPT))
    first = output.logprobs[0]
    likely = dict(first.top)
    return output.usage.cached_tokens, likely, output.token_ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["tiny"])
    args, failed = parser.parse_args(), False
    for shape in args.shapes:
        checkpoint = RandomCheckpoint(shape)
        found = {
            name: second_turn(checkpoint, args.device, options) for name, options in ENGINES.items()
        }
        _, wanted, tokens = found.pop("no cache")
        for name, (cached, likely, own) in found.items():
            common = wanted.keys() & likely.keys()
            difference = max(abs(wanted[token] - likely[token]) for token in common)
            equal = list(own) == list(tokens)
            failed |= (difference > 0 or not equal) and "False" in name
            print(
                f"{shape}, {name}: {cached} tokens cached, greatest difference {difference:.3g} "
                f"among {len(common)} log-probabilities, {len(own)} tokens "
                f"{'equal' if equal else 'not all equal'}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
