"""The shipped model folder: its format, its size, and what its card claims."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import corpus, evaluation, folder, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM

from atlas.tokenizer_folder import read_folder

FOLDER = Path(__file__).resolve().parents[2] / "src" / "atlas" / "data" / "atlas-tiny"
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MODULES = ("locale", "shelve", "trace")  # topics that were held out


@pytest.fixture(scope="module")
def held_out() -> list[corpus.Document]:
    documents = [
        corpus.Document(
            "code", f"Lib/{name}.py", (LIBRARY / f"{name}.py").read_text("utf-8")[:4000]
        )
        for name in MODULES
    ]
    assert all(d.held_out for d in documents)
    return documents


def test_format() -> None:
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 12_000_000
    with safe_open(weights, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
        assert sum(name.startswith("mtp.") for name in file.keys()) == 15  # noqa: SIM118
    model, report = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert type(model) is Qwen3_5ForCausalLM
    assert not report["missing_keys"]
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (FOLDER / "LICENSE-PSF").read_text()


def test_trunk_equals_transformers_on_real_text(held_out: list[corpus.Document]) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(FOLDER)(held_out[0].text[:2000], return_tensors="pt")
    network = folder.read_network(FOLDER)
    with torch.no_grad():
        want = model(ids["input_ids"]).logits
        got = network.logits(network(ids["input_ids"])[0])
    assert ((got - want).abs().amax(-1) / want.abs().amax(-1)).max() <= 1e-4


def test_held_out_modules(held_out: list[corpus.Document]) -> None:
    tokenizer = tokens.load_tokenizer(FOLDER / "tokenizer.json")
    measured = evaluation.score(
        folder.read_network(FOLDER), tokens.stream(tokenizer, held_out), length=1024
    )
    text = "".join(d.text for d in held_out).encode()
    assert measured.bits < 0.7 * evaluation.xz_bits(text)
    assert measured.agreement >= 0.6


def test_the_card_reports_what_was_asked() -> None:
    page = (FOLDER / "README.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| \**([\d.]+)\** \|$", page, re.MULTILINE))
    model, ngram = float(rows["**atlas-tiny**"]), next(k for k in rows if "5-gram" in k)
    assert model < min(float(rows[ngram]), float(rows["`xz -9e` of the held-out text"]))
    assert float(re.search(r"\*\*([\d.]+)%\*\* of the\nheld-out rows", page)[1]) >= 60.0
    assert "The quick start " in page


@pytest.mark.parametrize("text", ["The quick start ", "def f(x):\n    return x\n", "naïve → 123"])
def test_the_engine_reads_the_tokenizer(text: str) -> None:
    tokenizer = read_folder(FOLDER)
    ids = AutoTokenizer.from_pretrained(FOLDER)(text)["input_ids"]
    assert list(tokenizer.encode(text)) == ids
    assert tokenizer.eos_token_ids == (0,) or set(tokenizer.eos_token_ids) == {0}
