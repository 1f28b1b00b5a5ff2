"""What a model file says about rotary position embedding, turned into RopeConfig."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from atlas.architectures.options import Options
from atlas.config import RopeConfig

_KINDS: dict[str, Literal["none", "linear", "llama3", "yarn"]] = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}
_MIN_FACTOR, _MAX_FACTOR = 1e-6, 1e6
_MAX_THETA = 1e18
# Keys that some rope section may hold; an unknown one (short_factor …) would change the result,
# so it is refused. "finetuned" is a remark.
_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned",
}  # fmt: skip


def rope_from_huggingface(options: Options, max_seq_len: int) -> RopeConfig:
    """RopeConfig of a model whose layers all rotate alike.

    Reads ``rope_parameters`` (transformers 5) or the older ``rope_scaling`` beside
    ``rope_theta``; the older one wins where both are given, as in transformers.
    """
    old, new = options.section("rope_scaling"), options.section("rope_parameters")
    theta = options.number("rope_theta", 10000.0, low=1.0, high=_MAX_THETA)
    options.require_neutral({"partial_rotary_factor": (1, 1.0)})
    original = options.optional_integer("original_max_position_embeddings")
    section = old or new
    if section is None:
        return RopeConfig(theta=theta)
    return _rope_of_section(section, theta, original, max_seq_len)


def partial_rope_from_huggingface(
    options: Options, max_seq_len: int, head_dim: int, fraction: float
) -> RopeConfig:
    """RopeConfig of a model that rotates the first part of every head.

    `fraction` is the model class's default of ``partial_rotary_factor``. ``mrope_section`` says
    which pairs turn by time, height and width, interleaved; a text moves all three alike.
    """
    old, new = options.section("rope_scaling"), options.section("rope_parameters")
    theta = options.number("rope_theta", 10000.0, low=1.0, high=_MAX_THETA)
    fraction = options.number("partial_rotary_factor", fraction, high=1.0)
    original = options.optional_integer("original_max_position_embeddings")
    section = old or new
    sections = None
    rope = RopeConfig(theta=theta)
    if section is not None:
        fraction = section.number("partial_rotary_factor", fraction, high=1.0)
        sections = _sections(section)
        rope = _rope_of_section(section, theta, original, max_seq_len, neutral_fraction=False)
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise options.unsupported(
            "partial_rotary_factor", fraction, f"an even number of the {head_dim} dimensions"
        )
    return replace(rope, rotary_dim=rotary_dim, sections=sections)


def _sections(section: Options) -> tuple[int, int, int] | None:
    interleaved = section.flag("mrope_interleaved", True)
    counts = section.integers("mrope_section", high=2**16)
    if not counts:
        return None
    if not interleaved:
        raise section.unsupported("mrope_interleaved", interleaved, "true")
    if len(counts) != 3:
        raise section.error("mrope_section", counts, "three counts")
    return counts[0], counts[1], counts[2]


def rope_per_layer_type(
    options: Options, max_seq_len: int, *, theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """RopeConfig of full-attention layers and of windowed layers (Gemma 3).

    ``rope_parameters`` is nested by layer type; the older spelling is ``rope_theta`` and
    ``rope_scaling`` for full attention, ``rope_local_base_freq`` for windowed layers. `theta`
    and `local_theta` are the defaults of the model class.
    """
    theta = options.number("rope_theta", theta, low=1.0, high=_MAX_THETA)
    local_theta = options.number("rope_local_base_freq", local_theta, low=1.0, high=_MAX_THETA)
    options.require_neutral({"partial_rotary_factor": (1, 1.0)})
    old, nested = options.section("rope_scaling"), options.section("rope_parameters")
    full = local = None
    if nested is not None:
        full, local = nested.section("full_attention"), nested.section("sliding_attention")
        if extra := nested.unread():
            raise options.unsupported(
                f"rope_parameters.{extra[0]}",
                nested.raw(extra[0]),
                "only full_attention and sliding_attention in this section",
            )
    if old is not None:
        full = old
    return (
        _rope_of_section(full, theta, None, max_seq_len) if full else RopeConfig(theta=theta),
        _rope_of_section(local, local_theta, None, max_seq_len)
        if local
        else RopeConfig(theta=local_theta),
    )


def _rope_of_section(
    section: Options,
    theta: float,
    original: int | None,
    max_seq_len: int,
    neutral_fraction: bool = True,
) -> RopeConfig:
    kind = _KINDS[section.choice("rope_type", _KINDS, section.choice("type", _KINDS, "default"))]
    theta = section.number("rope_theta", theta, low=1.0, high=_MAX_THETA)
    if neutral_fraction:
        section.require_neutral({"partial_rotary_factor": (1, 1.0)})
    for key in section.unread():
        if key not in _KEYS:
            raise section.unsupported(key, section.raw(key), "absent")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = section.number("factor", low=_MIN_FACTOR, high=_MAX_FACTOR)
        return RopeConfig(theta=theta, scaling=kind, factor=factor)
    # transformers gives precedence to the length outside the section.
    original = original or section.integer("original_max_position_embeddings", max_seq_len)
    if kind == "yarn":
        return _yarn(section, theta, original, max_seq_len)
    rope = RopeConfig(
        theta=theta,
        scaling=kind,
        factor=section.number("factor", low=_MIN_FACTOR, high=_MAX_FACTOR),
        original_max_seq_len=original,
        low_freq_factor=section.number("low_freq_factor", low=_MIN_FACTOR, high=_MAX_FACTOR),
        high_freq_factor=section.number("high_freq_factor", low=_MIN_FACTOR, high=_MAX_FACTOR),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise section.error(
            "high_freq_factor", rope.high_freq_factor, f"more than {rope.low_freq_factor}"
        )
    return rope


def _yarn(section: Options, theta: float, original: int, max_seq_len: int) -> RopeConfig:
    factor = section.number("factor", max_seq_len / original, low=_MIN_FACTOR, high=_MAX_FACTOR)
    mscale = section.optional_number("mscale", high=1e3)
    mscale_all_dim = section.optional_number("mscale_all_dim", high=1e3)
    if mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        attention_factor = yarn_mscale(factor)
    if theta == 1.0:
        raise section.error("rope_theta", theta, "more than 1 with yarn")
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_seq_len=original,
        beta_fast=section.number("beta_fast", 32.0, low=1e-6, high=1e6),
        beta_slow=section.number("beta_slow", 1.0, low=1e-6, high=1e6),
        attention_factor=section.number("attention_factor", attention_factor, high=1e3),
        truncate=section.flag("truncate", True),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN scales cos and sin: ``0.1 * mscale * ln(factor) + 1``, 1 for factor <= 1.

    Source: YaRN (arXiv 2309.00071), equation 22 with ``sqrt(1/t)``; `mscale` is DeepSeek's.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_from_gguf(options: Options, head_dim: int, max_seq_len: int) -> RopeConfig:
    """RopeConfig from the ``rope.*`` keys of GGUF metadata.

    The divisors of llama3 files are a tensor (``rope_freqs.weight``); the caller adds them. A
    factor without a type is linear scaling, and 0 means no scaling, as in llama.cpp.
    """
    options.require_neutral({"rope.dimension_count": (head_dim,), "rope.dimension_sections": ()})
    return _scaled_rope_from_gguf(options, max_seq_len)


def _scaled_rope_from_gguf(options: Options, max_seq_len: int) -> RopeConfig:
    theta = options.number("rope.freq_base", 10000.0, low=1.0, high=_MAX_THETA)
    old_factor = _factor_or_zero(options, "rope.scale_linear", 0.0)
    factor = _factor_or_zero(options, "rope.scaling.factor", old_factor)
    kind = options.choice("rope.scaling.type", ("none", "linear", "yarn"), "linear")
    original = options.integer("rope.scaling.original_context_length", max_seq_len, low=0)
    # llama.cpp multiplies these into cos and sin on top of its own factor, while its converter
    # stores the whole factor there: what such a file means is uncertain.
    options.require_neutral(
        {
            "rope.scaling.attn_factor": (1.0,),
            "rope.scaling.yarn_attn_factor": (1.0,),
            "rope.scaling.yarn_ext_factor": (1.0, -1.0),
            "rope.scaling.yarn_log_multiplier": (0.0,),
            "rope.scaling.alpha": (0.0, 1.0),
        }
    )
    rope = RopeConfig(theta=theta)
    if kind == "yarn":
        if theta == 1.0:
            raise options.error("rope.freq_base", theta, "more than 1 with yarn")
        factor = factor or 1.0
        return replace(
            rope,
            scaling="yarn",
            factor=factor,
            original_max_seq_len=original or max_seq_len,
            beta_fast=options.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-6, high=1e6),
            beta_slow=options.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-6, high=1e6),
            attention_factor=yarn_mscale(factor),
        )
    if kind == "linear" and factor not in (0.0, 1.0):
        return replace(rope, scaling="linear", factor=factor)
    return rope


def partial_rope_from_gguf(options: Options, head_dim: int, max_seq_len: int) -> RopeConfig:
    """As :func:`rope_from_gguf` for a model that rotates the first part of every head."""
    rotary_dim = options.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if rotary_dim % 2:
        raise options.unsupported("rope.dimension_count", rotary_dim, "even numbers")
    counts = options.integers("rope.dimension_sections", high=2**16)
    if counts and (len(counts) not in (3, 4) or any(counts[3:])):
        raise options.unsupported("rope.dimension_sections", counts, "three counts")
    sections = (counts[0], counts[1], counts[2]) if counts else None
    rope = _scaled_rope_from_gguf(options, max_seq_len)
    return replace(rope, rotary_dim=rotary_dim, sections=sections)


def _factor_or_zero(options: Options, key: str, default: float) -> float:
    factor = options.number(key, default, high=_MAX_FACTOR)
    return factor and options.number(key, default, low=_MIN_FACTOR, high=_MAX_FACTOR)
