"""Finds the architecture that a model file names."""

from __future__ import annotations

from atlas.architectures.dense import DENSE
from atlas.architectures.family import Family
from atlas.architectures.hybrid import HYBRID
from atlas.errors import UnsupportedModelError

FAMILIES: tuple[Family, ...] = (*DENSE, *HYBRID)

_BY_MODEL_TYPE = {family.model_type or family.name: family for family in FAMILIES}
# The first of a GGUF name: Mistral files say llama.
_BY_GGUF_NAME = {family.gguf_name: family for family in reversed(FAMILIES)}
_BY_GGUF_NAME["nemotron_h_moe"] = _BY_GGUF_NAME["nemotron_h"]  # with experts
_BY_NAME = {family.name: family for family in FAMILIES}
_BY_WRAPPER_TYPE = {family.wrapper_type: family for family in FAMILIES if family.wrapper_type}


def supported() -> tuple[str, ...]:
    """Names of the supported architectures."""
    return tuple(_BY_NAME)


def family_named(name: str) -> Family:
    """The row of a ModelConfig's ``architecture``."""
    return _BY_NAME[name]


def family_of_huggingface(model_type: str, classes: list[str], origin: str) -> Family:
    """The row for config.json's ``model_type`` and ``architectures``.

    Raises
    ------
    UnsupportedModelError
        Neither is known, or the class is not the one that generates text (a classifier, a
        multimodal model).
    """
    family = _BY_MODEL_TYPE.get(model_type)
    if family is None or (classes and family.huggingface_class not in classes):
        kinds = ", ".join(f"{row.huggingface_class} ({key})" for key, row in _BY_MODEL_TYPE.items())
        raise UnsupportedModelError(
            f"{origin}: architecture {', '.join(classes) or 'unnamed'} (model_type "
            f"{model_type[:64]!r}) is not supported; supported: {kinds}"
        )
    return family


def family_in_wrapper(model_type: str, classes: list[str]) -> Family | None:
    """The row of the text model inside a multimodal model, if this is one of those known."""
    family = _BY_WRAPPER_TYPE.get(model_type)
    if family is None or (classes and family.wrapper_class not in classes):
        return None
    return family


def family_of_gguf(name: str, origin: str) -> Family:
    """The row for ``general.architecture``; UnsupportedModelError if there is none."""
    family = _BY_GGUF_NAME.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"{origin}: general.architecture {name[:64]!r} is not supported; "
            f"supported: {', '.join(sorted(_BY_GGUF_NAME))}"
        )
    return family
