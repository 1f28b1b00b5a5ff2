"""``atlas info``: what a model file holds and what loading it takes; reads no weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import click

from atlas.cli.options import LOADING_NAMES, debug_option, given, loading_options
from atlas.errors import AtlasError

if TYPE_CHECKING:
    from atlas.config import ModelConfig
    from atlas.model.load import LoadOptions, LoadPlan
    from atlas.weights.checkpoint import Checkpoint

_WIDENED = "internal 8-bit form: the same integers, float32 scale and minimum per {} weights"
_BLOCK_LEN = {"b8_32": 32, "b8_16": 16}


@click.command()
@click.argument("model")
@loading_options
@debug_option
@click.pass_context
def info(context: click.Context, /, model: str, **_: Any) -> None:
    """Describe MODEL: architecture, shapes, weight formats, and the memory a load takes."""
    from atlas.backends.backend import choose_device
    from atlas.cli.table import print_rows
    from atlas.model.load import LoadOptions, plan_load
    from atlas.weights.checkpoint import open_checkpoint
    from atlas.weights.locate import locate

    loading = {"threads": len(os.sched_getaffinity(0))} | given(context, LOADING_NAMES)
    named = {name: loading[name] for name in ("dtype", "kv_dtype") if name in loading}
    loading["device"], reason = choose_device(loading.get("device", "auto"), **named)
    options = LoadOptions(**loading)
    location = locate(model)
    with open_checkpoint(location) as checkpoint:
        plan = plan_load(checkpoint, options)
        print_rows(
            [
                ("file", f"{checkpoint.path} ({checkpoint.format_name})"),
                *architecture_rows(checkpoint.config),
                *weight_rows(checkpoint, plan, options),
                ("device", f"{options.device}: {reason}"),
                *memory_rows(plan, options),
                *_ignored_rows(checkpoint),
            ]
        )


def architecture_rows(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """The model's shapes in words."""
    num_weights = _num_weights(config)
    yield "architecture", f"{config.architecture}, {num_weights / 1e6:,.1f} M weights"
    if config.encoder is not None:
        encoder = config.encoder
        yield (
            "encoder",
            f"{encoder.num_layers} layers, {encoder.num_heads} heads, mlp "
            f"{encoder.intermediate_size}, sources of up to {encoder.max_source_len:,} tokens",
        )
    yield "layers", f"{config.num_layers} × hidden size {config.hidden_size}"
    yield (
        "attention",
        f"{config.num_heads} query and {config.num_kv_heads} KV heads × {config.head_dim}",
    )
    windows = Counter(config.windows)
    if set(windows) != {None}:
        yield (
            "windows",
            ", ".join(
                f"{count} layers {'full' if window is None else f'of {window} tokens'}"
                for window, count in windows.items()
            ),
        )
    if config.moe is not None:
        moe = config.moe
        yield (
            "experts",
            f"{moe.num_experts}, {moe.top_k} a token, × {moe.intermediate_size}, "
            f"in {sum(moe.sparse_layers)} layers",
        )
    if config.moe is None or not all(config.moe.sparse_layers):
        yield "mlp", f"{config.intermediate_size}, {config.activation}"
    head = "head tied to the embedding" if config.tie_embeddings else "head of its own"
    yield "vocabulary", f"{config.vocab_size:,}, {head}"
    if config.encoder is not None:
        yield "context", f"{config.max_seq_len:,} sinusoidal positions"
        return
    scaling = "" if config.rope.scaling == "none" else f", {config.rope.scaling} scaling"
    yield "context", f"{config.max_seq_len:,} positions, RoPE base {config.rope.theta:,g}{scaling}"


def weight_rows(
    checkpoint: Checkpoint, plan: LoadPlan, options: LoadOptions
) -> Iterator[tuple[str, str]]:
    """The file's formats, and what each becomes in memory."""
    pairs = Counter(
        (stored, plan.formats[name]) for name, stored in checkpoint.weight_formats().items()
    )
    for (stored, kept), count in sorted(pairs.items()):
        yield f"{count} × {stored}", _fate(stored, kept, options)


def _fate(stored: str, kept: str, options: LoadOptions) -> str:
    if kept in _BLOCK_LEN:
        return f"widened at load to {kept}, the {_WIDENED.format(_BLOCK_LEN[kept])}"
    if kept == stored:
        return "kept as it is"
    return f"quantised at load to {kept}" if kept == options.quantize else f"widened to {kept}"


def memory_rows(plan: LoadPlan, options: LoadOptions) -> Iterator[tuple[str, str]]:
    """The memory plan, part by part: a ceiling of what a load takes of the device's memory."""
    from atlas.cache.kv import BLOCK_SIZE

    memory = plan.memory
    yield "weights", _mib(memory.weights)
    tokens = plan.num_blocks * BLOCK_SIZE
    yield "kv cache", f"{_mib(memory.kv_pool)} for {tokens:,} tokens in {plan.kv_dtype}"
    yield "buffers", f"{_mib(memory.buffers)} for steps of up to {plan.limits.max_rows} rows"
    backend = options.backend()
    try:
        free = _mib(backend.free_memory())
    except AtlasError as error:  # the plan of a device that is not here
        free = f"none ({error})"
    finally:
        backend.close()
    yield "in all", f"{_mib(memory.total)}; {free} are free"


def _ignored_rows(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    if checkpoint.ignored_options:
        yield "not read", ", ".join(checkpoint.ignored_options)


def _num_weights(config: ModelConfig) -> int:
    from atlas.architectures.weight_names import expected_weights

    return sum(prod(shape) for shape in expected_weights(config).values())


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
