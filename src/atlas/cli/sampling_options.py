"""``SamplingParams`` as command-line options.

Values are checked by ``SamplingParams`` itself, so that the command line and the library refuse
the same ones in the same words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from atlas.cli.options import given, stack

if TYPE_CHECKING:
    from atlas.sampling import SamplingParams


def integer_or_none(text: str) -> int | None:
    """``none`` as None, else an integer."""
    return None if text == "none" else _integer(text, "none")


def integer_or_left(text: str) -> int | str:
    """``left`` as it is, else an integer."""
    return text if text == "left" else _integer(text, "left")


def token_bias(text: str) -> tuple[int, float]:
    """``ID=BIAS`` as its two numbers."""
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form ID=BIAS") from None


def _integer(text: str, word: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither an integer nor {word!r}") from None


NOT_OFFERED = {
    "n": "one text is streamed",
    "logprobs": "only text is printed",
    "prompt_logprobs": "only text is printed",
    "logprobs_mode": "only text is printed",
    "logits_processor": "a function",
}
"""Fields of ``SamplingParams`` without an option, and why."""

_OPTIONS = (
    click.option(
        "-n",
        "--max-tokens",
        type=integer_or_none,
        metavar="N|none",
        help="Output tokens at most; none: until the model stops.",
    ),
    click.option("--min-tokens", type=int, help="Output tokens at least."),
    click.option("--temperature", type=float, help="0, the default, is greedy."),
    click.option("--top-k", type=int, help="Draw from the K most probable tokens; 0 is off."),
    click.option("--top-p", type=float, help="Nucleus: the least set of this probability."),
    click.option("--min-p", type=float, help="Least probability, relative to the highest."),
    click.option("--typical-p", type=float, help="Locally typical sampling; 1 is off."),
    click.option("--top-n-sigma", type=float, help="Logits within N deviations of the highest."),
    click.option("--xtc-probability", type=float, help="Chance to exclude the top choices."),
    click.option("--xtc-threshold", type=float, help="Least probability of a top choice."),
    click.option("--repetition-penalty", type=float, help="Over prompt and output; 1 is off."),
    click.option("--presence-penalty", type=float, help="For tokens in the output; 0 is off."),
    click.option("--frequency-penalty", type=float, help="For each occurrence; 0 is off."),
    click.option("--dry-multiplier", type=float, help="Repeated-sequence penalty; 0 is off."),
    click.option("--dry-base", type=float, help="Its growth with the length repeated."),
    click.option("--dry-allowed-length", type=int, help="Repeats of up to this length are free."),
    click.option("--dry-range", type=int, help="Tokens of history it looks at; default all."),
    click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        metavar="TEXT",
        help="Text that no repetition crosses; may be repeated.",
    ),
    click.option(
        "--logit-bias",
        type=token_bias,
        multiple=True,
        metavar="ID=BIAS",
        help="Added to a token's logit; may be repeated.",
    ),
    click.option(
        "--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never written; repeatable."
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."
    ),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="End at this token; may be repeated.",
    ),
    click.option("--ignore-eos", is_flag=True, help="The model's end tokens do not end the text."),
    click.option("--include-stop", is_flag=True, help="Keep the stop in the text."),
    click.option(
        "--skip-special/--keep-special",
        default=True,
        help="Leave special tokens out of the text (default), or keep them.",
    ),
    click.option("--seed", type=int, help="Of the random draws; default: a new one each time."),
    click.option(
        "--truncate-prompt",
        type=integer_or_left,
        metavar="N|left",
        help="Keep the last N prompt tokens, or as many as fit.",
    ),
)
NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_range",
    "dry_sequence_breakers",
    "logit_bias",
    "bad_words",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop",
    "skip_special",
    "seed",
    "truncate_prompt",
)
sampling_options = stack(_OPTIONS)


def sampling_params(context: click.Context, **defaults: Any) -> SamplingParams:
    """The parameters that the command's options give, over ``defaults``."""
    from atlas.sampling import SamplingParams

    values = defaults | given(context, NAMES)
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return SamplingParams(**values)
