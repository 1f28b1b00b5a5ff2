"""Train atlas-tiny, the model in the package, from Python's own documentation and library.

    python tools/train_tiny.py gather CORPUS --docs DIR --docs-version TEXT
    python tools/train_tiny.py train CORPUS FOLDER --minutes 7
    python tools/train_tiny.py report CORPUS FOLDER --picture docs/atlas-tiny-loss.png

``gather`` puts the running interpreter's library and the documentation's sources (``_sources`` of
an HTML build, for example in Debian's package python3.11-doc) into one file. ``train`` learns the
tokenizer and the weights (torch, one GPU) and writes the model folder with ``loss.csv`` and, last,
``training.json`` with what it measured on held-out text; what is there after any minute is a whole
model. ``report`` measures the baselines and writes model card, licence notice and loss curve.

``train --steps 20 --device cpu --rows 2 --length 128`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny import card, corpus, evaluation, folder, tokens, training
from tiny.network import CONFIG, Network

MEASURED = ("docs", "code")  # held-out tests are left out of everything


def gather(args: argparse.Namespace) -> None:
    gathered = corpus.gather(args.docs, args.docs_version)
    corpus.write(gathered, args.corpus)
    for kind in training.MIXTURE:
        sizes = [
            sum(len(d.text.encode()) for d in gathered.of(kind, held_out=held_out)) / 1e6
            for held_out in (False, True)
        ]
        print(f"{kind}: {sizes[0]:.2f} MB to train on, {sizes[1]:.2f} MB held out")
    print(f"{args.corpus}: {args.corpus.stat().st_size / 1e6:.2f} MB")


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    text = corpus.read(args.corpus)
    training_text = text.of(*training.MIXTURE, held_out=False)
    if args.tokenizer is None:
        tokenizer = tokens.train_tokenizer(training_text, CONFIG["vocab_size"], args.seed)
    else:
        tokenizer = tokens.load_tokenizer(args.tokenizer)
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    folder.write_tokenizer(tokenizer, args.folder, config["max_position_embeddings"])
    streams = {
        kind: tokens.stream(tokenizer, text.of(kind, held_out=False)) for kind in training.MIXTURE
    }
    held_out = tokens.stream(tokenizer, text.of(*MEASURED, held_out=True))
    print({kind: len(ids) for kind, ids in streams.items()}, "held out:", len(held_out), flush=True)
    names = [field.name for field in dataclasses.fields(training.Plan)]
    plan = training.Plan(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    network = Network(config, plan.dropout)
    started = time.monotonic()
    steps = training.train(
        network,
        streams,
        held_out,
        plan,
        lambda network: folder.write_weights(network, args.folder),
        args.folder / "loss.csv",
    )
    folder.write_weights(network, args.folder)
    seconds = round(time.monotonic() - started, 1)
    measured = evaluation.score(folder.read_network(args.folder).to(plan.device), held_out)
    about = dataclasses.asdict(plan) | {
        "steps": steps,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if plan.device != "cpu" else "the CPU",
        "torch": torch.__version__,
        "bits_per_byte": round(measured.bits / _num_bytes(text, *MEASURED, held_out=True), 4),
        "mtp_agreement": round(measured.agreement, 4),
    }
    (args.folder / "training.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"{steps} steps; {about['bits_per_byte']} bits per byte; {about['mtp_agreement']} agree")


def report(args: argparse.Namespace) -> None:
    text = corpus.read(args.corpus)
    tokenizer = tokens.load_tokenizer(args.folder / "tokenizer.json")
    network = folder.read_network(args.folder)
    about = json.loads((args.folder / "training.json").read_text())
    size = _num_bytes(text, *MEASURED, held_out=True)
    stream = tokens.stream(tokenizer, text.of(*MEASURED, held_out=True))
    learnt = tokens.stream(tokenizer, text.of(*training.MIXTURE, held_out=False))
    ngram = evaluation.KneserNey(learnt, 5, network.config["vocab_size"])
    raw, before = _joined(text, held_out=True), _joined(text, held_out=False)
    bits = {
        "model": about["bits_per_byte"],
        "ngram": ngram.bits(stream) / size,
        "xz": evaluation.xz_bits(raw) / size,
        "xz_after": evaluation.xz_bits(raw, before) / size,
    }
    figures: dict[str, Any] = about | {
        "parameters": sum(p.numel() for p in network.parameters()) / 1e6,
        "layers": network.config["num_hidden_layers"],
        "attention": network.config["layer_types"].count("full_attention"),
        "hidden": network.config["hidden_size"],
        "vocab": network.config["vocab_size"],
        "megabytes": (args.folder / "model.safetensors").stat().st_size / 1e6,
        "batch": about["rows"] * about["length"],
        "mtp_weight": training.MTP_WEIGHT,
        "mixture": ", ".join(f"{share:.0%} {kind}" for kind, share in training.MIXTURE.items()),
        "sources": "\n".join(f"- {source}" for source in text.about["sources"]),
        "training_bytes": _num_bytes(text, *training.MIXTURE, held_out=False) / 1e6,
        "held_bytes": size / 1e3,
        "bits": bits,
        "sample_tokens": args.sample_tokens,
        "samples": card.samples(network, tokenizer, args.sample_tokens),
    }
    card.write_card(args.folder, figures)
    (args.folder / "LICENSE-PSF").write_text(text.about["licence"], encoding="utf-8")
    if args.picture:
        card.plot(args.curve or args.folder / "loss.csv", args.picture)
    print(json.dumps({"bits_per_byte": bits}, indent=2))


def _joined(text: corpus.Corpus, *, held_out: bool) -> bytes:
    return "".join(d.text for d in text.of(*MEASURED, held_out=held_out)).encode()


def _num_bytes(text: corpus.Corpus, *kinds: str, held_out: bool) -> int:
    return sum(len(d.text.encode()) for d in text.of(*kinds, held_out=held_out))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = top.add_subparsers(required=True)

    command = commands.add_parser("gather", help="read library and documentation into one file")
    command.add_argument("corpus", type=Path)
    command.add_argument("--docs", type=Path, required=True)
    command.add_argument("--docs-version", required=True)
    command.set_defaults(run=gather)

    command = commands.add_parser("train", help="tokenizer and weights, into a model folder")
    command.add_argument("corpus", type=Path)
    command.add_argument("folder", type=Path)
    command.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of a new one")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--minutes", type=float, default=7.0)
    command.add_argument("--steps", type=int, help="at most this many; default: what fits")
    command.add_argument("--rows", type=int, default=64)
    command.add_argument("--length", type=int, default=2048)
    command.add_argument("--learning-rate", type=float, default=2e-3)
    command.add_argument("--weight-decay", type=float, default=0.3)
    command.add_argument("--dropout", type=float, default=0.1)
    command.add_argument("--compile", action="store_true", help="torch.compile the layers")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=train)

    command = commands.add_parser("report", help="figures, model card, loss curve")
    command.add_argument("corpus", type=Path)
    command.add_argument("folder", type=Path)
    command.add_argument("--curve", type=Path, help="default: loss.csv in the folder")
    command.add_argument("--picture", type=Path, help="PNG to draw the curve into")
    command.add_argument("--sample-tokens", type=int, default=96)
    command.set_defaults(run=report)
    return top


def main() -> None:
    args = parser().parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
