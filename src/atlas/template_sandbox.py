"""The sandbox that chat templates run in, with bounds on time and on size."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atlas.errors import ChatTemplateError

MAX_RENDERED_CHARS = 1 << 23
MAX_RENDER_S = 5.0


@contextmanager
def template_errors(what: str) -> Iterator[None]:
    """Turn whatever a template's code raises into ChatTemplateError with the reason."""
    try:
        yield
    except ChatTemplateError:
        raise
    except TemplateError as error:
        raise ChatTemplateError(f"{what}: {error.message or type(error).__name__}") from error
    except Exception as error:  # the template is foreign code: any exception is its own
        raise ChatTemplateError(f"{what}: {type(error).__name__}: {error}") from error


class _Generation(Extension):
    """``{% generation %}`` blocks tell trainers what to learn; here they are transparent."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Folding `+` at compile time is bounded by the source; at run time it is not.
FOLDED_BINOPS = frozenset({"*", "**", "%"})
BOUNDED_BINOPS = FOLDED_BINOPS | {"+"}
# They decode text, draw at random or make lists of a given length.
_REMOVED_FILTERS = ("striptags", "urlize", "xmlattr", "center", "batch", "slice", "random")
_REMOVED_METHODS = {"translate", "decode", "unescape", "striptags"}
# A width in a format string that is large, or that comes from an argument.
_WIDTH = re.compile(r"\{[^{}]*(\d{6}|\{)|%[^a-zA-Z%]*(\d{6}|\*)")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on time and on the size of values.

    Jinja bounds ``range``. Here every call, output and loop over a call looks at the clock, and the
    operators and methods that can make much out of little compute the size first.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _Generation],
            finalize=self.check,
        )
        self.deadline = float("inf")
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        for name in ("replace", "join", "indent", "format"):
            self.filters[name] = self._bounded_filter(name)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["_concat"] = self._concat

    def check_size(self, size: int) -> None:
        if size > MAX_RENDERED_CHARS:
            raise ChatTemplateError(
                f"the chat template made {size} items; allowed: {MAX_RENDERED_CHARS}"
            )

    def check(self, value: Any) -> Any:
        """Return the value if it is not too large and there is time left."""
        if time.monotonic() > self.deadline:
            raise ChatTemplateError(f"the chat template took over {MAX_RENDER_S} s")
        if isinstance(value, str | bytes | list | tuple):
            self.check_size(len(value))
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            args = _listed(args)
            self._check_growth(owner, method.__name__, args)
        return self.check(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            self._check_growth(left, "format", ())
        elif isinstance(left, int) and isinstance(right, int):
            if operator in ("*", "**"):
                power = abs(right) if operator == "**" else 1
                self.check_size(left.bit_length() * power + right.bit_length())
        elif operator == "+":
            self.check_size(_length(left) + _length(right))
        elif operator == "*":
            times = next((side for side in (left, right) if isinstance(side, int)), 0)
            self.check_size(times * max(_length(left), _length(right)))
        return self.check(super().call_binop(context, operator, left, right))

    def _check_growth(self, text: str | bytes, method: str, args: Sequence[Any]) -> None:
        """Raise before a method of a string makes more of it than is allowed."""
        if method in ("format", "format_map"):
            if _WIDTH.search(str(text)):
                raise ChatTemplateError(f"the chat template formats with a width: {text!r:.80}")
        elif method == "replace" and len(args) >= 2:
            old, new = args[:2]
            count = text.count(old) if old else len(text) + 1
            self.check_size(len(text) + count * len(new))
        elif method == "join" and args and isinstance(args[0], list):
            self.check_size(sum(map(_length, args[0])) + len(text) * len(args[0]))
        elif method in ("center", "ljust", "rjust", "zfill", "expandtabs", "indent"):
            width = max((abs(arg) for arg in args if isinstance(arg, int)), default=0)
            self.check_size(width * (len(text) + 1 if method in ("expandtabs", "indent") else 1))

    def _bounded_filter(self, name: str) -> Callable[..., Any]:
        inner: Any = self.filters[name]
        takes_context = getattr(inner, "jinja_pass_arg", None)

        def bounded(*args: Any, **kwargs: Any) -> Any:
            args = _listed(args)
            value, *rest = args[1 if takes_context else 0 :]
            rest += kwargs.values()
            if name == "join":
                separator = rest[0] if rest and isinstance(rest[0], str) else ""
                self._check_growth(separator, name, [value])
            elif isinstance(value, str):
                self._check_growth(value, name, rest)
            return self.check(inner(*args, **kwargs))

        if takes_context:
            bounded.jinja_pass_arg = takes_context  # type: ignore[attr-defined]
        return bounded

    def _concat(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _listed(values: Iterable[Any]) -> tuple[Any, ...]:
    """Make lists of generators, so that they can be measured and then still be used."""
    return tuple(list(value) if isinstance(value, Iterator) else value for value in values)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise ChatTemplateError(f"tojson indent {indent}; allowed: 0 to 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
