"""A tiny model with a tokenizer, and programs that are compiled once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine
from tests.capi.programs import EXAMPLES, build
from tests.engine.folders import write_hybrid, write_model
from tests.helpers import nllb
from tests.text.vocabularies import byte_level_library


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a byte-level tokenizer and a chat template."""
    return write_model(tmp_path_factory.mktemp("capi_model"), **text_options())


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with recurrent layers."""
    return write_hybrid(tmp_path_factory.mktemp("capi_hybrid"), **text_options())


def text_options() -> dict[str, Any]:
    """A vocabulary and a template, for either."""
    library = byte_level_library()
    return {
        "vocab_size": library.get_vocab_size(),
        "eos": library.token_to_id("</s>"),
        "library": library,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }


@pytest.fixture(scope="session")
def engine(model: Path) -> Iterator[Engine]:
    """The Python API on the same model."""
    with Engine(model, threads=1, quiet=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def nllb_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translation model with NLLB's tokenizer."""
    return nllb.build(tmp_path_factory.mktemp("nllb")).directory


@pytest.fixture(scope="session")
def translator(nllb_model: Path) -> Iterator[Engine]:
    """The Python API on it."""
    with Engine(nllb_model, threads=1, quiet=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``program("simple.c")``: an example, or a file of this folder, compiled."""
    folder = tmp_path_factory.mktemp("programs")
    built: dict[str, Path] = {}

    def get(name: str, *options: str, linked: bool = True) -> Path:
        if name not in built:
            here = Path(__file__).parent / name
            source = here if here.exists() else EXAMPLES / name
            built[name] = build(source, folder / source.stem, *options, linked=linked)
        return built[name]

    return get
