"""The training text: Python's documentation and standard library, gathered into one file.

A corpus file is xz-compressed JSON lines. The first holds where the text came from and the licence
it is under; each further one is a document: ``{"kind", "path", "text"}``. Kinds are ``docs`` (the
documentation's sources, as plain text), ``code`` (the standard library) and ``tests`` (its tests).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plain import plain_text

# Tables rather than text, and copies of the documentation.
_SKIPPED = ("site-packages/", "encodings/", "pydoc_data/", "lib2to3/tests/data/", "__pycache__/")
_MAX_BYTES = 400_000
_HELD_OUT_ONE_IN = 12


@dataclass(frozen=True, slots=True)
class Document:
    """One file of the corpus."""

    kind: str
    path: str
    text: str

    @property
    def topic(self) -> str:
        """What the split keeps together: a module's code, tests and documentation."""
        parts = self.path.removesuffix(".rst").removesuffix(".py").split("/")
        if parts[0] == "Doc":
            return parts[2] if parts[1] == "library" and len(parts) == 3 else "/".join(parts)
        inside = [part for part in parts[1:] if part not in {"test", "tests"}]
        return inside[0].removeprefix("test_").lstrip("_") if inside else self.path

    @property
    def held_out(self) -> bool:
        """Whether training never sees it, decided by a hash of the topic."""
        digest = hashlib.sha256(b"held out? " + self.topic.encode()).digest()
        return int.from_bytes(digest[:4], "little") % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """All documents, their provenance and their licence."""

    about: dict[str, Any]
    documents: list[Document]

    def of(self, *kinds: str, held_out: bool) -> list[Document]:
        return [d for d in self.documents if d.kind in kinds and d.held_out == held_out]


def _library(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in _SKIPPED) or path.stat().st_size > _MAX_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few tests are about other encodings
            continue
        tested = {"test", "tests", "idle_test"} & set(Path(name).parts[:-1])
        if text.strip():
            yield Document("tests" if tested else "code", f"Lib/{name}", text)


def _documentation(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.rst*")):
        name = path.relative_to(root).as_posix().removesuffix(".txt")
        text = plain_text(path.read_text(encoding="utf-8"))
        if len(text) > 400:
            yield Document("docs", f"Doc/{name}", text)


def gather(docs: Path, docs_version: str) -> Corpus:
    """Read the running interpreter's library and the documentation sources below ``docs``."""
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = [*_documentation(docs), *_library(library)]
    if not any(d.kind == "docs" for d in documents):
        raise FileNotFoundError(f"no .rst or .rst.txt files below {docs}")
    about = {
        "sources": [
            f"the standard library of CPython {platform.python_version()} (Lib/)",
            f"the documentation of CPython, {docs_version} (Doc/)",
        ],
        "licence": (library / "LICENSE.txt").read_text(encoding="utf-8"),
    }
    return Corpus(about, documents)


def write(corpus: Corpus, path: Path) -> None:
    with lzma.open(path, "wt", preset=9, encoding="utf-8") as file:
        file.write(json.dumps(corpus.about) + "\n")
        for d in corpus.documents:
            row = {"kind": d.kind, "path": d.path, "text": d.text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read(path: Path) -> Corpus:
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        about = json.loads(next(file))
        return Corpus(about, [Document(**json.loads(line)) for line in file])
