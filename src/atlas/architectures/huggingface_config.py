"""Hugging Face config.json turned into ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.architectures.huggingface_dense import read_dense
from atlas.architectures.huggingface_hybrid import READERS
from atlas.architectures.huggingface_options import require_supported, text_options, unread
from atlas.architectures.options import Options
from atlas.config import ModelConfig


def config_from_huggingface(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    origin: str = "config.json",
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Read config.json, and generation_config.json where there is one.

    A token that either file declares as the end of the text ends it.

    Returns
    -------
    config : ModelConfig
        ``tie_embeddings`` is what the file says; the checkpoint decides.
    ignored : tuple of str
        Options that nothing here reads, for the user to see; those known to be harmless are
        left out.

    Raises
    ------
    ModelFileError
        An option is missing or malformed; the message has the key, the value and what is
        allowed.
    UnsupportedModelError
        An architecture, activation, RoPE type, quantisation or other option without support.
    """
    options, family, outside = text_options(Options(config, origin))
    require_supported(options, family)
    read = READERS.get(family.name, read_dense)
    result = read(options, family, generation_config)
    return result, (*outside, *unread(options, family))
