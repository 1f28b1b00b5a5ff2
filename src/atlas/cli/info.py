"""``atlas info``: what a model file holds and what loading it takes; reads no weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import click

from atlas.cli.options import LOADING_NAMES, debug_option, given, loading_options
from atlas.errors import AtlasError, CapabilityError

if TYPE_CHECKING:
    from atlas.config import ModelConfig
    from atlas.model.load import LoadOptions, LoadPlan
    from atlas.weights.checkpoint import Checkpoint

_WIDENED = "internal 8-bit form: the same integers, float32 scale and minimum per {} weights"
_BLOCK_LEN = {"b8_32": 32, "b8_16": 16}


@click.command()
@click.argument("model", required=False)
@loading_options
@debug_option
@click.pass_context
def info(context: click.Context, /, model: str | None, **_: Any) -> None:
    """Describe MODEL: architecture, shapes, weight formats, and the memory a load takes.

    Without one: atlas-tiny, which is in the package.
    """
    from atlas.backends.backend import choose_device
    from atlas.cli.table import print_rows
    from atlas.model.load import LoadOptions, plan_load
    from atlas.weights.checkpoint import open_checkpoint
    from atlas.weights.locate import locate

    loading = {"threads": len(os.sched_getaffinity(0))} | given(context, LOADING_NAMES)
    named = {name: loading[name] for name in ("dtype", "kv_dtype") if name in loading}
    device = loading.get("device", "auto")
    loading["device"], reason = choose_device(device, **named)
    options = LoadOptions(**loading)
    location = locate(model)
    with open_checkpoint(location) as checkpoint:
        try:
            plan = plan_load(checkpoint, options)
        except CapabilityError as error:
            if device != "auto":
                raise
            options, reason = replace(options, device="cpu"), f"the GPU cannot run it: {error}"
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
    yield "layers", f"{config.num_layers} × hidden size {config.hidden_size}{_kinds(config)}"
    if config.attention_layers:
        gated = ", gated" if config.attention_gate else ""
        yield (
            "attention",
            f"{config.num_heads} query and {config.num_kv_heads} KV heads × "
            f"{config.head_dim}{gated}",
        )
    yield from _recurrent_rows(config)
    windows = Counter(config.windows)
    if set(windows) != {None}:
        yield (
            "windows",
            ", ".join(
                f"{count} layers {'full' if window is None else f'of {window} tokens'}"
                for window, count in windows.items()
            ),
        )
    blocks = {block for i in range(config.num_layers) for block in config.layer_blocks(i)}
    if config.moe is not None:
        moe = config.moe
        shared = f", one shared × {moe.shared_size}" if moe.shared_size else ""
        latent = f", in a space of {moe.latent_size}" if moe.latent_size else ""
        yield (
            "experts",
            f"{moe.num_experts}, {moe.top_k} a token, × {moe.intermediate_size}{shared}{latent}, "
            f"in {sum(moe.sparse_layers)} layers",
        )
    if "mlp" in blocks:
        yield "mlp", f"{config.intermediate_size}, {config.activation}"
    if config.mtp_kinds:
        yield "multi-token head", f"{', '.join(config.mtp_kinds)}; kept for drafting"
    head = "head tied to the embedding" if config.tie_embeddings else "head of its own"
    yield "vocabulary", f"{config.vocab_size:,}, {head}"
    yield "context", f"{config.max_seq_len:,} positions{_rope(config)}"


def _kinds(config: ModelConfig) -> str:
    """How many layers are of which kind, where they differ or do not attend."""
    counts = Counter(config.layer_kinds)
    if set(counts) == {"attention"}:
        return ""
    return ": " + ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in counts.items())


def _recurrent_rows(config: ModelConfig) -> Iterator[tuple[str, str]]:
    if (delta := config.gated_delta) is not None:
        yield (
            "gated delta",
            f"{delta.num_key_heads} key heads × {delta.key_dim}, {delta.num_value_heads} value "
            f"heads × {delta.value_dim}, convolution over {delta.conv_width} tokens",
        )
    if (mamba := config.mamba2) is not None:
        yield (
            "mamba-2",
            f"{mamba.num_heads} heads × {mamba.head_dim}, state {mamba.state_size}, in groups of "
            f"{mamba.num_heads // mamba.num_groups}, convolution over {mamba.conv_width} tokens",
        )


def _rope(config: ModelConfig) -> str:
    rope = config.rope
    if config.encoder is not None:
        return ", sinusoidal"
    if not config.attention_layers or not config.rotary:
        return "; attention does not rotate" if config.attention_layers else ""
    part = (
        f" of {rope.rotary_dim} dimensions"
        if rope.rotary_dim not in (None, config.head_dim)
        else ""
    )
    scaling = "" if rope.scaling == "none" else f", {rope.scaling} scaling"
    return f", RoPE base {rope.theta:,g}{part}{scaling}"


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
    if memory.kv_pool:
        yield "kv cache", f"{_mib(memory.kv_pool)} for {tokens:,} tokens in {plan.kv_dtype}"
    if memory.recurrent:
        slots = plan.slots
        yield (
            "recurrent state",
            f"{_mib(memory.recurrent)} for {slots.running} sequences, {slots.snapshots} snapshots "
            f"and {slots.checkpoints} checkpoints",
        )
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
