"""tools/train_tiny.py from text to a model folder, in small."""

from __future__ import annotations

import ast
import csv
import json
import lzma
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
import train_tiny
from tiny import card, corpus, evaluation, folder, tokens, training
from tiny.network import CONFIG, Network
from tiny.plain import plain_text
from transformers import AutoModelForCausalLM, AutoTokenizer

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TOPICS = ["abc", "bisect", "bz2", "heapq", "keyword", "queue", "sched", "shelve", "shlex", "token"]
STEPS = 30
SMALL = CONFIG | {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": CONFIG["layer_types"][2:4],
}


def documents() -> list[corpus.Document]:
    """Modules as code, their docstrings as documentation; each topic twice, like the real one."""
    found = []
    for name in TOPICS:
        text = (LIBRARY / f"{name}.py").read_text(encoding="utf-8")
        found.append(corpus.Document("code", f"Lib/{name}.py", text))
        strings = [
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found.append(corpus.Document("docs", f"Doc/library/{name}.rst", "\n".join(strings) + "\n"))
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl.xz"
    about = {"sources": ["ten modules of the standard library"], "licence": "The PSF licence.\n"}
    corpus.write(corpus.Corpus(about, documents()), path)
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after ``train`` and ``report``."""
    path = tmp_path_factory.mktemp("model")
    size = ["--rows", "2", "--length", "96", "--steps", str(STEPS), "--device", "cpu"]
    patch = pytest.MonkeyPatch()
    patch.setattr(train_tiny, "CONFIG", SMALL)
    for line in (
        ["train", str(text), str(path), *size, "--learning-rate", "1e-3"],
        [
            "report",
            str(text),
            str(path),
            "--sample-tokens",
            "3",
            "--picture",
            str(path / "loss.png"),
        ],
    ):
        args = train_tiny.parser().parse_args(line)
        args.run(args)
    patch.undo()
    return path


def test_the_split_keeps_a_topic_together_and_holds_some_out(text: Path) -> None:
    read = corpus.read(text)
    assert read.documents == documents()
    for kind in ("docs", "code"):
        assert 0 < len(read.of(kind, held_out=True)) < len(TOPICS) / 2
    for code, docs in zip(documents()[::2], documents()[1::2], strict=True):
        assert code.topic == docs.topic
        assert code.held_out == docs.held_out
    test = corpus.Document("tests", "Lib/test/test_heapq.py", "")
    package = corpus.Document("code", "Lib/json/decoder.py", "")
    assert (test.topic, package.topic) == ("heapq", "json")


def test_the_folder_is_a_model(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    prompt = "def heappush(heap, item):\n    "
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == tokens.load_tokenizer(trained / "tokenizer.json").encode(prompt).ids
    got = model.generate(ids, max_new_tokens=8)[0, ids.shape[1] :]
    network = folder.read_network(trained)
    own = card.continuation(network, tokens.load_tokenizer(trained / "tokenizer.json"), prompt, 8)
    assert tokenizer.decode(got, skip_special_tokens=True) == own
    assert (trained / "LICENSE-PSF").read_text() == "The PSF licence.\n"
    assert (trained / "loss.png").stat().st_size > 10_000


def test_training_learns(trained: Path) -> None:
    with (trained / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    about = json.loads((trained / "training.json").read_text())
    assert (int(rows[-1]["step"]), about["steps"], about["seed"]) == (STEPS, STEPS, 0)
    vocab_size = json.loads((trained / "config.json").read_text())["vocab_size"]
    assert 0 < float(rows[-1]["held_out"]) < math.log(vocab_size)


def test_the_card_holds_the_measured_figures(trained: Path, text: Path) -> None:
    read = corpus.read(text)
    tokenizer = tokens.load_tokenizer(trained / "tokenizer.json")
    held_out = read.of("docs", "code", held_out=True)
    measured = evaluation.score(folder.read_network(trained), tokens.stream(tokenizer, held_out))
    text_bytes = "".join(d.text for d in held_out).encode()
    page = (trained / "README.md").read_text()
    assert f"**{measured.bits / len(text_bytes):.3f}**" in page
    assert f"**{measured.agreement:.1%}**" in page
    assert "The quick start " in page


def test_the_schedule_ends_when_the_time_does(tmp_path: Path) -> None:
    network = Network(SMALL)
    ids = np.arange(4000, dtype=np.int32) % 600
    plan = training.Plan("cpu", None, 0.03, 2, 64, 1e-3, 0.1, 0.0, False, 0, save_every_s=0.3)
    saved: list[Network] = []
    steps = training.train(network, {"docs": ids}, ids, plan, saved.append, tmp_path / "loss.csv")
    assert steps >= 10
    assert saved
    with (tmp_path / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["seconds"]) >= 1.8
    assert float(rows[-1]["learning_rate"]) < 0.8e-3  # it falls with the time spent


def test_score_counts_every_token_once() -> None:
    torch.manual_seed(0)
    network = Network(SMALL)
    ids = np.random.default_rng(0).integers(0, 600, 301).astype(np.int32)
    with torch.no_grad():
        whole = torch.from_numpy(ids).long()[None]
        rows, ahead = network(whole[:, :-1], whole[:, 1:])
        logits = network.logits(rows)[0]
        nats = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(ids[1:]).long(), reduction="sum"
        )
        same = network.logits(ahead)[0, :-1].argmax(-1) == logits[1:].argmax(-1)
    bits, agreed, counted = evaluation.score(network, ids, length=512)
    assert bits == pytest.approx(nats.item() / math.log(2), rel=1e-5)
    assert (agreed, counted) == (int(same.sum()), 299)
    near = evaluation.score(network, ids, length=64, rows=3).bits  # less context, as many tokens
    assert near == pytest.approx(bits, rel=0.05)


def test_kneser_ney_is_a_distribution_and_learns() -> None:
    draw = np.random.default_rng(0)
    learnt = np.cumsum(draw.integers(0, 2, 3000)) % 7  # each token stays or moves on: 1 bit
    model = evaluation.KneserNey(learnt, 3, 7)
    for context in ([0, 0], [0, 1], [0, 5]):  # seen often, seen, never seen
        before = model.bits(np.array(context))
        each = [2.0 ** (before - model.bits(np.array([*context, word]))) for word in range(7)]
        assert sum(each) == pytest.approx(1.0)
    fresh = np.cumsum(draw.integers(0, 2, 3000)) % 7
    assert model.bits(fresh) / 2999 == pytest.approx(1.0, abs=0.05)


def test_xz_counts_only_the_text() -> None:
    text = "".join(d.text for d in documents()).encode()
    assert evaluation.xz_bits(text) == 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    assert evaluation.xz_bits(text, text) < 0.05 * evaluation.xz_bits(text)


SOURCE = """\
.. _shelf:

==================
:mod:`shelf` title
==================

.. index:: pair: shelf; persistent

.. function:: open(name, *, flag='c')
   :noindex:

   Open a shelf; see :func:`~dbm.open` and :ref:`the guide <shelf-guide>`.
   It returns ``None`` on :exc:`KeyError`, as :pep:`8` says::

      >>> open('x')

   .. versionadded:: 3.2

   .. note::

      A `page <https://example.org/>`_ tells more.
"""
PLAIN = """\
shelf title
==================

open(name, *, flag='c')

   Open a shelf; see open() and the guide.
   It returns `None` on KeyError, as PEP 8 says:

      >>> open('x')

   New in version 3.2.

   Note:

      A page tells more.
"""


def test_plain_text() -> None:
    assert plain_text(SOURCE) == PLAIN


def test_gather_wants_documentation(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="files below"):
        corpus.gather(tmp_path, "nothing")
