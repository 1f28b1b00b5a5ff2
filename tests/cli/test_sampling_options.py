"""Every sampling parameter has an option, or a reason why not."""

from __future__ import annotations

import dataclasses

import click
import pytest

from atlas import SamplingParams
from atlas.cli.sampling_options import NAMES, NOT_OFFERED, sampling_options, sampling_params


def parsed(*arguments: str, **defaults: object) -> SamplingParams:
    """The parameters that these options give."""
    found: list[SamplingParams] = []

    @click.command()
    @sampling_options
    @click.pass_context
    def command(context: click.Context, /, **_: object) -> None:
        found.append(sampling_params(context, **defaults))

    command.main(list(arguments), standalone_mode=False)
    return found[0]


def test_every_field_has_an_option_or_a_reason() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(NAMES) | set(NOT_OFFERED) == fields
    assert not set(NAMES) & set(NOT_OFFERED)


def test_without_options_the_library_decides() -> None:
    assert parsed() == SamplingParams()


def test_defaults_of_a_command_give_way_to_options() -> None:
    assert parsed(max_tokens=None) == SamplingParams(max_tokens=None)
    assert parsed("-n", "3", max_tokens=None) == SamplingParams(max_tokens=3)


ARGUMENTS = {
    "max_tokens": (["-n", "none"], None),
    "min_tokens": (["--min-tokens", "3"], 3),
    "temperature": (["--temperature", "0.7"], 0.7),
    "top_k": (["--top-k", "40"], 40),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.05"], 0.05),
    "typical_p": (["--typical-p", "0.8", "--temperature", "1"], 0.8),
    "top_n_sigma": (["--top-n-sigma", "1.5"], 1.5),
    "xtc_probability": (["--xtc-probability", "0.5", "--temperature", "1"], 0.5),
    "xtc_threshold": (["--xtc-threshold", "0.2"], 0.2),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-0.5"], -0.5),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "dry_multiplier": (["--dry-multiplier", "0.8"], 0.8),
    "dry_base": (["--dry-base", "2"], 2.0),
    "dry_allowed_length": (["--dry-allowed-length", "4"], 4),
    "dry_range": (["--dry-range", "64"], 64),
    "dry_sequence_breakers": (
        ["--dry-sequence-breaker", "\n", "--dry-sequence-breaker", "."],
        ("\n", "."),
    ),
    "logit_bias": (["--logit-bias", "5=-1.5", "--logit-bias", "7=2"], {5: -1.5, 7: 2.0}),
    "bad_words": (["--bad-word", "foo", "--bad-word", "bar"], ("foo", "bar")),
    "stop": (["--stop", "END", "--stop", "\n\n"], ("END", "\n\n")),
    "stop_token_ids": (["--stop-token-id", "5", "--stop-token-id", "6"], (5, 6)),
    "ignore_eos": (["--ignore-eos"], True),
    "include_stop": (["--include-stop"], True),
    "skip_special": (["--keep-special"], False),
    "seed": (["--seed", "18446744073709551615"], 2**64 - 1),
    "truncate_prompt": (["--truncate-prompt", "left"], "left"),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_option_sets_its_field(name: str) -> None:
    arguments, value = ARGUMENTS[name]
    params = parsed(*arguments)
    assert getattr(params, name) == value
    assert getattr(params, name) != getattr(SamplingParams(), name)


def test_numbers_where_a_word_is_allowed() -> None:
    assert parsed("-n", "12", "--truncate-prompt", "9").to_mapping() == {
        "max_tokens": 12,
        "truncate_prompt": 9,
    }
