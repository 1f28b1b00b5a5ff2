"""Typed, bounds-checked reading of a model file's options (config.json, GGUF metadata).

Nothing in such a file is trusted: a string where a number belongs, a NaN or an absurd size is
refused with the file, the key, the value and what is allowed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from atlas.errors import ModelFileError, UnsupportedModelError

_MAX_SIZE = 2**31 - 1


class Options:
    """One mapping of a model file, which remembers the keys that were read.

    Parameters
    ----------
    values : mapping of str to anything
        The parsed options. A key whose value is None counts as absent.
    origin : str
        Names the file in error messages.
    prefix : str
        Put before every key that is asked for (``llama.`` in GGUF metadata, or the path of a
        section in config.json, for the messages only).
    """

    def __init__(self, values: Mapping[str, Any], origin: str, prefix: str = "") -> None:
        self.origin = origin
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether `key` is there with a value other than None."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether `key` is there and None: switched off rather than left to its default."""
        self._read.add(key)
        return key in self._values and self._values[key] is None

    def raw(self, key: str) -> Any:
        """The value as it is in the file; None if absent."""
        self._read.add(key)
        return self._values.get(key)

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = _MAX_SIZE
    ) -> int:
        """An integer in [`low`, `high`]; without a `default` the key is required."""
        value = self._required(key, default)
        if not _is_integer(value) or not low <= value <= high:
            raise self.error(key, value, f"an integer from {low} to {high}")
        return int(value)

    def optional_integer(self, key: str, *, low: int = 1, high: int = _MAX_SIZE) -> int | None:
        """An integer in [`low`, `high`], or None if the key is absent."""
        return self.integer(key, low=low, high=high) if self.has(key) else self.raw(key)

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30
    ) -> float:
        """A finite number in [`low`, `high`]; without a `default` the key is required."""
        value = self._required(key, default)
        is_number = _is_integer(value) or isinstance(value, float | np.floating)
        if not is_number or not low <= value <= high:  # a NaN fails every comparison
            raise self.error(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, *, low: float = 0.0, high: float = 1e30) -> float | None:
        """A finite number in [`low`, `high`], or None if the key is absent."""
        return self.number(key, low=low, high=high) if self.has(key) else self.raw(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._required(key, default)
        if not isinstance(value, bool | np.bool_):
            raise self.error(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without a `default` the key is required."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """One of the strings in `allowed`; another string is an UnsupportedModelError."""
        value = self.text(key, default)
        if value not in allowed:
            raise self.unsupported(key, value, ", ".join(sorted(allowed)))
        return value

    def integers(self, key: str, *, low: int = 0, high: int = _MAX_SIZE) -> tuple[int, ...]:
        """One integer or a list of them, each in [`low`, `high`]; empty if absent."""
        value = self.raw(key)
        if value is None:
            return ()
        items = value if isinstance(value, list | tuple | np.ndarray) else [value]
        if len(items) > 2**16 or not all(_is_integer(i) and low <= i <= high for i in items):
            raise self.error(key, value, f"integers from {low} to {high}")
        return tuple(int(i) for i in items)

    def per_layer(self, key: str, num_layers: int) -> list[Any] | None:
        """A list with one entry per layer, or None if absent; entries are not checked."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple | np.ndarray) or len(value) != num_layers:
            raise self.error(key, value, f"a list of {num_layers} entries, one per layer")
        return list(value)

    def section(self, key: str) -> Options | None:
        """A nested mapping as Options of its own, or None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, value, "a mapping")
        return Options(value, self.origin, f"{self._prefix}{key}.")

    def require_neutral(self, neutral: Mapping[str, Collection[Any]]) -> None:
        """Refuse options that would change results: each key must be absent or hold one of the
        values that mean "off"."""
        for key, allowed in neutral.items():
            value = self.raw(key)
            is_known = isinstance(value, str | int | float | np.number | np.bool_)
            if value is not None and not (is_known and value in allowed):
                names = ", ".join(repr(item) for item in allowed)
                raise self.unsupported(key, value, names or "absent")

    def unread(self) -> tuple[str, ...]:
        """Keys in the mapping that nobody asked for, sorted."""
        return tuple(sorted(str(key) for key in self._values if key not in self._read))

    def error(self, key: str, value: Any, allowed: str) -> ModelFileError:
        """The error for a value that is malformed."""
        return ModelFileError(self._message(key, value, allowed))

    def unsupported(self, key: str, value: Any, allowed: str) -> UnsupportedModelError:
        """The error for a well-formed value that Atlas does not support."""
        return UnsupportedModelError(self._message(key, value, allowed))

    def _message(self, key: str, value: Any, allowed: str) -> str:
        return f"{self.origin}: {self._prefix}{key} is {reprlib.repr(value)}; allowed: {allowed}"

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self.origin}: {self._prefix}{key} is missing")
        return default


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
