"""Options that several commands share: the model and how it is loaded, and ``--debug``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from atlas.engine import Engine

DEBUG = "atlas.debug"
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _note_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[DEBUG] = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_note_debug,
    help="Show the traceback of an error.",
)

_LOADING: tuple[Decorator, ...] = (
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        help="auto: an NVIDIA GPU where one can be used, else the CPU.",
    ),
    click.option("--threads", type=int, help="Worker threads (default: the CPUs available)."),
    click.option(
        "--max-seq-len", type=int, help="Positions of a sequence (default: the model's, ≤ 8192)."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32"]),
        help="auto keeps the file's formats; float32 dequantises.",
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
        help="Of the KV cache; auto: bfloat16 on a GPU, float16 beside quantised weights.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(["q8_0", "q4_0"]),
        help="Quantise float weights while loading.",
    ),
)
LOADING_NAMES = ("device", "threads", "max_seq_len", "dtype", "kv_dtype", "quantize")


def stack(options: tuple[Decorator, ...]) -> Decorator:
    """One decorator from several options, listed in help in the order given."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(lambda inner, option: option(inner), reversed(options), function)

    return decorate


loading_options = stack(_LOADING)
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress.")


def given(context: click.Context, names: tuple[str, ...]) -> dict[str, Any]:
    """The parameters among ``names`` that the user gave; the library's defaults hold otherwise."""
    return {
        name: context.params[name]
        for name in names
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def load_engine(model: str, loading: Mapping[str, Any], *, quiet: bool) -> Engine:
    """The engine that the loading options ask for."""
    from atlas.engine import Engine

    return Engine(model, **loading, quiet=True if quiet else None)
