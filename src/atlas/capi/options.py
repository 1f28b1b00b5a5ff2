"""Options by name: how to load a model, sampling parameters, and how to search with beams."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

from atlas.capi._binding import ffi
from atlas.capi.calls import exported
from atlas.capi.handles import HANDLES, handled
from atlas.capi.memory import number, read_name, require
from atlas.errors import InvalidArgumentError
from atlas.model.records import MAX_BEAMS
from atlas.sampling import SamplingParams
from atlas.scheduling import SchedulingOptions
from atlas.translation import BeamParams

# Of atlas.Engine, but not options by name: given in another way, or meaningless in C.
_NOT_OPTIONS = {"model", "quiet", "on_progress", "scheduling"}
_JSON_FIELDS = {"stop", "stop_token_ids", "bad_words", "logit_bias", "dry_sequence_breakers"}
_NOT_PARAMETERS = {"logits_processor"}  # a Python function


Kinds = dict[str, tuple[Any, ...]]


class OptionSet(ABC):
    """Values by name, each checked against what the name allows."""

    what = "option"

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    @abstractmethod
    def kinds(self) -> Kinds:
        """The names and what each may be."""

    def set(self, key: str, value: Any) -> None:
        """Set from text, or from a number as it is."""
        kinds = self.kinds()
        require_key(key, kinds, self.what)
        if isinstance(value, str):
            value = parsed(key, value, kinds[key])
        elif bool in kinds[key] and value in (0, 1):
            value = bool(value)
        self.check(key, value)
        self.values[key] = value

    @abstractmethod
    def check(self, key: str, value: Any) -> None:
        """Raise when a value is out of its range."""


@handled("load options")
class LoadOptionSet(OptionSet):
    """Keyword arguments of ``atlas.Engine``."""

    what = "load option"

    def kinds(self) -> Kinds:
        return load_options()

    def check(self, key: str, value: Any) -> None:
        """Nothing here: the engine checks ranges when the options are used."""


@handled("sampling")
class SamplingSet(OptionSet):
    """Fields of ``SamplingParams``; each is checked when it is set, all together when used."""

    what = "sampling parameter"

    def __init__(self) -> None:
        super().__init__()
        self._made: SamplingParams | None = None  # checking all fields takes longer than a submit

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        self._made = None

    def kinds(self) -> Kinds:
        return sampling_fields()

    def check(self, key: str, value: Any) -> None:
        # On its own, beside values that go with everything.
        SamplingParams(**{"max_tokens": None, "temperature": 1.0, key: value})

    def params(self) -> SamplingParams:
        """The parameters; raises for combinations that cannot be honoured."""
        if self._made is None:
            self._made = SamplingParams(**self.values)
        return self._made


@handled("beam search")
class BeamSearchSet(OptionSet):
    """Fields of ``BeamParams``; each is checked when it is set, all together when used."""

    what = "beam search parameter"

    def kinds(self) -> Kinds:
        return beam_fields()

    def check(self, key: str, value: Any) -> None:
        # On its own, beside as many beams as there may be.
        BeamParams(**{"num_beams": MAX_BEAMS, key: value})

    def params(self) -> BeamParams:
        """The parameters; raises for more hypotheses than beams."""
        return BeamParams(**self.values)


@cache
def load_options() -> Kinds:
    """The options of ``atlas.Engine`` and what each may be."""
    from atlas.engine import Engine

    hints = typing.get_type_hints(Engine.__init__)
    parameters = inspect.signature(Engine).parameters
    names = [name for name in parameters if name not in _NOT_OPTIONS]
    scheduling = typing.get_type_hints(SchedulingOptions)
    return {name: alternatives(hints[name]) for name in names} | {
        item.name: alternatives(scheduling[item.name])
        for item in dataclasses.fields(SchedulingOptions)
    }


@cache
def sampling_fields() -> Kinds:
    """The fields of ``SamplingParams`` and what each may be."""
    hints = typing.get_type_hints(SamplingParams)
    names = [item.name for item in dataclasses.fields(SamplingParams)]
    return {name: alternatives(hints[name]) for name in names if name not in _NOT_PARAMETERS}


@cache
def beam_fields() -> Kinds:
    """The fields of ``BeamParams`` and what each may be."""
    hints = typing.get_type_hints(BeamParams)
    return {item.name: alternatives(hints[item.name]) for item in dataclasses.fields(BeamParams)}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types and literal words of an annotation."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in alternatives(part))
    if typing.get_origin(hint) is Literal:
        return tuple(typing.get_args(hint))
    return (hint,)


def require_key(key: str, allowed: Iterable[str], what: str) -> None:
    """Raise for an unknown key, naming the nearest."""
    names = list(allowed)
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
        raise InvalidArgumentError(
            f"unknown {what} {key!r}; did you mean {near[0]!r}? allowed: {', '.join(names)}"
        )


def parsed(key: str, text: str, kinds: tuple[Any, ...]) -> Any:
    """Text as the first of the kinds that it spells, or as JSON where that is the form."""
    if key in _JSON_FIELDS:
        value = parsed_json(key, text)
        return _with_integer_keys(value) if isinstance(value, dict) else value
    if text == "null" and type(None) in kinds:
        return None
    if text in kinds:
        return text
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                value = kind(text)
            except ValueError:
                continue
            if math.isfinite(value):
                return value
    if str in kinds:
        return text
    raise InvalidArgumentError(f"{key} is {text!r}; allowed: {', '.join(map(_spelled, kinds))}")


def _spelled(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true, false", type(None): "null"}
    return repr(kind) if isinstance(kind, str) else names.get(kind, str(kind))


def parsed_json(key: str, text: str) -> Any:
    """Text as JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{key} is not JSON: {error}") from None


def _with_integer_keys(mapping: dict[str, Any]) -> dict[Any, Any]:
    return {int(k) if k.isascii() and k.isdecimal() else k: v for k, v in mapping.items()}


@exported
def load_options_create(out: Any) -> None:
    """A handle of load options."""
    require(out, "options")
    out[0] = ffi.cast("atlas_load_options *", HANDLES.add(LoadOptionSet()))


@exported
def load_options_set(options: Any, key: Any, value: Any) -> None:
    """Set an option from text."""
    found = HANDLES.get(number(options), LoadOptionSet)
    found.set(read_name(key, "key"), read_name(value, "value"))


@exported
def load_options_set_integer(options: Any, key: Any, value: int) -> None:
    """Set an option to an integer."""
    HANDLES.get(number(options), LoadOptionSet).set(read_name(key, "key"), int(value))


@exported
def load_options_set_number(options: Any, key: Any, value: float) -> None:
    """Set an option to a number."""
    HANDLES.get(number(options), LoadOptionSet).set(read_name(key, "key"), float(value))


@exported
def load_options_free(options: Any) -> None:
    """Free load options."""
    HANDLES.remove(number(options), LoadOptionSet)


@exported
def sampling_create(out: Any) -> None:
    """A handle of sampling parameters."""
    require(out, "sampling")
    out[0] = ffi.cast("atlas_sampling *", HANDLES.add(SamplingSet()))


@exported
def sampling_set(sampling: Any, key: Any, value: Any) -> None:
    """Set a parameter from text."""
    found = HANDLES.get(number(sampling), SamplingSet)
    found.set(read_name(key, "key"), read_name(value, "value"))


@exported
def sampling_set_integer(sampling: Any, key: Any, value: int) -> None:
    """Set a parameter to an integer."""
    HANDLES.get(number(sampling), SamplingSet).set(read_name(key, "key"), int(value))


@exported
def sampling_set_number(sampling: Any, key: Any, value: float) -> None:
    """Set a parameter to a number."""
    HANDLES.get(number(sampling), SamplingSet).set(read_name(key, "key"), float(value))


@exported
def sampling_free(sampling: Any) -> None:
    """Free sampling parameters."""
    HANDLES.remove(number(sampling), SamplingSet)


@exported
def beam_search_create(out: Any) -> None:
    """A handle of beam search parameters."""
    require(out, "beam_search")
    out[0] = ffi.cast("atlas_beam_search *", HANDLES.add(BeamSearchSet()))


@exported
def beam_search_set(beam_search: Any, key: Any, value: Any) -> None:
    """Set a parameter from text."""
    found = HANDLES.get(number(beam_search), BeamSearchSet)
    found.set(read_name(key, "key"), read_name(value, "value"))


@exported
def beam_search_set_integer(beam_search: Any, key: Any, value: int) -> None:
    """Set a parameter to an integer."""
    HANDLES.get(number(beam_search), BeamSearchSet).set(read_name(key, "key"), int(value))


@exported
def beam_search_set_number(beam_search: Any, key: Any, value: float) -> None:
    """Set a parameter to a number."""
    HANDLES.get(number(beam_search), BeamSearchSet).set(read_name(key, "key"), float(value))


@exported
def beam_search_free(beam_search: Any) -> None:
    """Free beam search parameters."""
    HANDLES.remove(number(beam_search), BeamSearchSet)
