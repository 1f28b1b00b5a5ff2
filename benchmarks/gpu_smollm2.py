"""SmolLM2's quantised weights on a GPU beside the CPU with the same weights in float32.

    python benchmarks/gpu_smollm2.py reference FILE.json [--model smollm2]    # on the CPU
    python benchmarks/gpu_smollm2.py compare FILE.json [--model smollm2]      # on the GPU

``reference`` writes the greedy tokens of five prompts, and the greatest logits of each step;
``compare`` says for each prompt whether the GPU's tokens are equal, and of the first that is not
how far the two tokens' logits lie apart on the CPU: a near-tie is what rounding may turn.
Exits with 1 if tokens part where there is no near-tie.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas import Engine, SamplingParams  # noqa: E402

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "The three primary colours are",
)
NUM_TOKENS, KEPT = 48, 64
NEAR_TIE = 0.01
"""Share of a row's range of logits. Quantised weights times bfloat16 activations have 8 bits."""


def reference(model: str) -> list[dict[str, Any]]:
    """Tokens, and of each step the range of logits and the greatest ``KEPT``, on the CPU."""
    found = []
    with Engine(model, device="cpu", dtype="float32", max_seq_len=256, quiet=True) as engine:
        encoded = [list(engine.tokenizer.encode(prompt)) for prompt in PROMPTS]
        with engine.paused() as own:
            for prompt in encoded:
                seq, tokens, steps = own.lifecycle.alloc_sequence(), [], []
                view = own.forward.prefill(prompt, seq)
                for _ in range(NUM_TOKENS):
                    row = view.numpy()[0].astype(np.float64)
                    best = np.argsort(-row, kind="stable")[:KEPT]
                    tokens.append(int(best[0]))
                    logits = {int(i): float(row[i]) for i in best}
                    steps.append({"range": float(np.ptp(row)), "logits": logits})
                    own.logits.argmax(view)
                    view = own.forward.decode(tokens[-1], seq)
                own.lifecycle.free_sequence(seq)
                found.append({"prompt": prompt, "tokens": tokens, "steps": steps})
    return found


def compare(model: str, wanted: list[dict[str, Any]]) -> bool:
    """Print a line a prompt; whether all are equal or part at a near-tie."""
    params, good = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True), True
    with Engine(model, device="cuda", max_seq_len=256, quiet=True) as engine:
        outputs = engine.generate([want["prompt"] for want in wanted], params)
    for text, want, output in zip(PROMPTS, wanted, outputs, strict=True):
        got = list(output.samples[0].token_ids)
        pairs = zip(got, want["tokens"], strict=True)
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            print(f"{text!r}: {NUM_TOKENS} tokens equal")
            continue
        step, best = want["steps"][at], want["tokens"][at]
        logits = {int(token): value for token, value in step["logits"].items()}
        apart = logits[best] - logits.get(got[at], -np.inf)
        is_tie = apart <= NEAR_TIE * step["range"]
        good &= bool(is_tie)
        print(
            f"{text!r}: token {at} is {got[at]}, not {best}; their logits lie {apart:.3f} apart of "
            f"a range of {step['range']:.1f}: {'a near-tie' if is_tie else 'no near-tie'}"
        )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("reference", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2", help="a GGUF file (default: SmolLM2)")
    args = parser.parse_args()
    if args.what == "reference":
        args.file.write_text(json.dumps(reference(args.model)))
    elif not compare(args.model, json.loads(args.file.read_text())):
        sys.exit(1)


if __name__ == "__main__":
    main()
