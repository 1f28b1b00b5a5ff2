"""Beam search beside CTranslate2: the same random weights, threads, sources and lengths.

python benchmarks/translate.py make FOLDER          random NLLB-200-600M, and its conversions
python benchmarks/translate.py compare FOLDER       tokens a second of both, in turns
python benchmarks/translate.py interleave FOLDER    a wide request among others: together, or whole

``make`` needs torch, transformers and ctranslate2; ``compare`` ctranslate2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = {
    "vocab_size": 256206,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
}
SOURCE, TARGET = 256047, 256042  # ids of eng_Latn and deu_Latn in NLLB-200's vocabulary
END = 2
BEAMS = 4


def make(folder: Path, kind: str) -> None:
    """``weights``: the Hugging Face folder; else CTranslate2's conversion to that type."""
    import torch
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    if kind == "weights":
        torch.manual_seed(0)
        M2M100ForConditionalGeneration(M2M100Config(**SHAPE)).save_pretrained(folder / "weights")
        return
    from ctranslate2.converters.transformers import M2M100Loader

    model = M2M100ForConditionalGeneration.from_pretrained(folder / "weights").eval()
    loader = M2M100Loader()
    spec = loader.get_model_spec(model)
    # Without a tokenizer: the ids by name.
    loader.set_vocabulary(spec, ["<s>", "<pad>", "</s>", "<unk>", *map(str, range(4, 256206))])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
    spec.config.decoder_start_token = "</s>"
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    target = folder / kind
    target.mkdir(exist_ok=True)
    spec.save(str(target))


def sources(count: int, length: int) -> list[list[int]]:
    """Random subwords."""
    rng = np.random.default_rng(count)
    return [[int(i) for i in rng.integers(4, 256000, length)] for _ in range(count)]


class Theirs:
    """CTranslate2's translator."""

    def __init__(self, folder: Path, kind: str, threads: int) -> None:
        import ctranslate2

        self._translator = ctranslate2.Translator(
            str(folder / kind), compute_type=kind, intra_threads=threads, inter_threads=1
        )

    def translate(self, texts: list[list[int]], max_tokens: int) -> int:
        """Tokens of the best hypotheses."""
        found = self._translator.translate_batch(
            [[str(SOURCE), *map(str, text), "</s>"] for text in texts],
            target_prefix=[[str(TARGET)]] * len(texts),
            beam_size=BEAMS,
            max_decoding_length=max_tokens + 1,
            min_decoding_length=max_tokens + 1,
        )
        return sum(len(result.hypotheses[0]) - 1 for result in found)


class Ours:
    """An engine."""

    def __init__(self, folder: Path, kind: str, threads: int) -> None:
        from atlas import Engine

        options: dict[str, Any] = {"int8": {"quantize": "q8_0"}, "float32": {}}[kind]
        self.engine = Engine(folder / "weights", threads=threads, quiet=True, **options)

    def translate(self, texts: list[list[int]], max_tokens: int) -> int:
        """Tokens of the best hypotheses."""
        found = self.engine.translate(
            texts, source=SOURCE, target=TARGET, num_beams=BEAMS, max_tokens=max_tokens
        )
        return sum(len(translation.token_ids) for translation in found)


def compare(folder: Path, args: argparse.Namespace) -> None:
    """Both engines in turns, so that whatever slows the machine slows both; the best of each."""
    print(f"{'':10} {'batch':>5} {'theirs tok/s':>14} {'ours tok/s':>12} {'ratio':>7}")
    for kind in args.kinds:
        ours, theirs = (make_one(folder, kind, args.threads) for make_one in (Ours, Theirs))
        for batch in args.batches:
            texts = sources(batch, args.length)
            best = {"ours": 0.0, "theirs": 0.0}
            for which in ("theirs", "ours") * (args.rounds + 1):  # the first round warms up
                run: Callable[[list[list[int]], int], int]
                run = ours.translate if which == "ours" else theirs.translate
                begin = time.perf_counter()
                count = run(texts, args.tokens)
                rate = count / (time.perf_counter() - begin)
                assert count == batch * args.tokens, (which, count)
                best[which] = max(best[which], rate)
            ratio = best["ours"] / best["theirs"]
            print(
                f"{kind:10} {batch:5} {best['theirs']:14.1f} {best['ours']:12.1f} {ratio:7.2f}",
                flush=True,
            )
        ours.engine.close()
        del ours, theirs


def interleave(folder: Path, args: argparse.Namespace) -> None:
    """Eight greedy requests stream while one of 16 beams comes: how long their tokens wait."""
    from atlas import Engine
    from atlas.model.records import BeamRequest

    with Engine(folder / "weights", threads=args.threads, quiet=True, quantize="q8_0") as engine:
        for whole in (False, True):
            for text in sources(8, args.length):
                engine.submit_translation(
                    text, source=SOURCE, target=TARGET, num_beams=1, max_tokens=args.tokens
                )
            gaps, last, count = [], time.perf_counter(), 0
            wide = sources(9, args.length)[8]
            begin = last
            while engine.has_unfinished():
                if count == 4 * 8:
                    if whole:
                        request = BeamRequest(wide, SOURCE, TARGET, -1, 16, args.tokens, 1.0, False)
                        engine.model.forward.generate_beam_batch([request])
                    else:
                        engine.submit_translation(
                            wide, source=SOURCE, target=TARGET, num_beams=16,
                            max_tokens=args.tokens,
                        )  # fmt: skip
                events = engine.step()
                count += len(events)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
            name = "whole at prefill" if whole else "interleaved"
            print(
                f"{name:18} longest gap {1e3 * max(gaps):7.0f} ms, median "
                f"{1e3 * float(np.median(gaps)):6.0f} ms, all done in {last - begin:6.2f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "compare", "interleave"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", help="make this alone: weights, float32 or int8")
    parser.add_argument("--kinds", nargs="*", default=["float32", "int8"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=24, help="subwords of a source")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a translation")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "make" and args.kind is None:
        args.folder.mkdir(parents=True, exist_ok=True)
        for kind in ("weights", "float32", "int8"):  # each in a process that gives its memory back
            subprocess.run(
                [sys.executable, __file__, "make", args.folder, "--kind", kind], check=True
            )
    elif args.what == "make":
        make(args.folder, args.kind)
    elif args.what == "compare":
        compare(args.folder, args)
    else:
        interleave(args.folder, args)


if __name__ == "__main__":
    main()
