"""SamplingParams: every field is checked, nothing unknown passes, copies stay equal."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from atlas.errors import InvalidArgumentError
from atlas.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")
INTEGERS = {  # field: refused values beside the wrong types
    "max_tokens": [0, -1, 2**31],
    "min_tokens": [-1, 129, 2**31, None],
    "seed": [-1, 2**64],
    "n": [0, -1, 1025, None],
    "logprobs": [-1, 2**31],
    "prompt_logprobs": [-1, 2**31],
    "truncate_prompt": [0, -1, 2**31, "right", "LEFT"],
    "dry_allowed_length": [0, -1, None],
    "dry_range": [0, -1],
    "top_k": [-1, 2**31, None],
}
FLOATS = {
    "repetition_penalty": [0.0, -1.0, 0.009, 100.1],
    "presence_penalty": [-2.01, 2.01],
    "frequency_penalty": [-2.01, 2.01],
    "dry_multiplier": [-0.1, 1.1e6],
    "dry_base": [0.99, 0.0, 1.1e6],
    "temperature": [-1.0, 1e-7, 1.1e6],
    "top_n_sigma": [-1.0, 1001.0],
    "typical_p": [0.0, -0.1, 1.1],
    "top_p": [0.0, -0.1, 1.1],
    "min_p": [-0.1, 1.1],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [0.0, -0.1, 0.51],
}
FLAGS = ["ignore_eos", "include_stop", "skip_special"]
OTHERS: dict[str, list[Any]] = {
    "stop": ["", [""], [3], 3, None, b"x", ["a", None]],
    "stop_token_ids": ["12", 5, [True], [-1], [1.0], [2**31], None],
    "logit_bias": [
        [(1, 2.0)],
        None,
        {"1": 1.0},
        {True: 1.0},
        {-1: 1.0},
        {1: NAN},
        {1: INF},
        {1: -INF},
        {1: 1.1e4},
        {1: "2"},
        {1: True},
    ],
    "bad_words": ["word", [""], [[]], [3], [[True]], [[-1]], None, [None]],
    "dry_sequence_breakers": ["\n", [""], [True], [-1], [1.5], None],
    "logprobs_mode": ["RAW", "", None, 1],
    "logits_processor": [3, "f", {}],
}
REFUSED = [
    *((name, value) for name, values in INTEGERS.items() for value in [*values, True, 1.0, NAN]),
    *((name, "1") for name in INTEGERS),
    *(
        (name, value)
        for name, values in FLOATS.items()
        for value in [*values, NAN, INF, -INF, True, "1", None, 1j, [1.0], 10**400]
    ),
    *((name, value) for name in FLAGS for value in [0, 1, None, "true"]),
    *((name, value) for name, values in OTHERS.items() for value in values),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda item: str(item)[:24])
def test_a_refused_value_is_named_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert "allowed: " in message


def test_every_field_has_refused_values() -> None:
    fields = {item.name for item in dataclasses.fields(SamplingParams)}
    assert {name for name, _ in REFUSED} == fields


def test_defaults_are_greedy_and_ask_for_nothing_else() -> None:
    params = SamplingParams()
    assert params.greedy
    assert params.max_tokens == 128
    assert params.seed is None
    assert params.to_mapping() == {}
    assert not params.has_unresolved_text


@pytest.mark.parametrize("field", ["typical_p", "xtc_probability"])
def test_greedy_refuses_filters_that_it_could_not_honour(field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field}.*temperature 0"):
        SamplingParams(**{field: 0.5})
    assert getattr(SamplingParams(temperature=1, **{field: 0.5}), field) == 0.5


def test_values_are_normalised() -> None:
    params = SamplingParams(
        top_k=np.int64(4),
        temperature=Fraction(1, 2),
        stop="end",
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int32(2): np.float32(0.5)},
        bad_words=[np.array([1, 2]), "word"],
    )
    assert type(params.top_k) is int
    assert type(params.temperature) is float
    assert params.temperature == 0.5
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert dict(params.logit_bias) == {2: 0.5}
    assert params.bad_words == ((1, 2), "word")


def test_params_cannot_be_changed() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = NAN
    assert params.logit_bias[1] == 2.0
    with pytest.raises(TypeError):
        params.logit_bias[1] = NAN  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_from_mapping_refuses_unknown_keys_with_the_nearest_name() -> None:
    assert SamplingParams.from_mapping({"top_k": 3}).top_k == 3
    with pytest.raises(InvalidArgumentError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 1.0})
    with pytest.raises(InvalidArgumentError, match="unknown sampling parameter 3"):
        SamplingParams.from_mapping({3: 1.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_copies_are_equal() -> None:
    params = SamplingParams(
        temperature=0.7, logit_bias={3: 1.5}, bad_words=[[1, 2]], stop=["a"], seed=9
    )
    assert SamplingParams.from_mapping(params.to_mapping()) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert hash(copy.deepcopy(params)) == hash(params)
    assert params.replace(top_k=2).replace(top_k=0) == params
    with pytest.raises(InvalidArgumentError, match="top_k"):
        params.replace(top_k=-1)


def test_a_request_without_a_seed_gets_one() -> None:
    assert SamplingParams(seed=3).with_seed(4).seed == 3
    assert SamplingParams().with_seed(4).seed == 4
    seeds = {SamplingParams().with_seed().seed for _ in range(8)}
    assert len(seeds) == 8
    assert None not in seeds
    with pytest.raises(InvalidArgumentError, match="seed"):
        SamplingParams().with_seed(2**64)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_texts_become_ids() -> None:
    params = SamplingParams(
        bad_words=["no", [7, 8]], dry_multiplier=1.0, dry_sequence_breakers=["\n", 5]
    )
    assert params.has_unresolved_text
    resolved = params.with_token_ids(encode)
    assert resolved.bad_words == ((110, 111), (32, 110, 111), (7, 8))
    assert resolved.dry_sequence_breakers == (10, 5)
    assert not resolved.has_unresolved_text
    assert resolved.with_token_ids(encode) is resolved


def test_breaker_texts_matter_only_with_dry() -> None:
    params = SamplingParams(dry_sequence_breakers=["\n"])
    assert params.with_token_ids(encode) is params
