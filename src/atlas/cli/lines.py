"""Lines of files and of standard input, translated in order and many at a time."""

from __future__ import annotations

import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from atlas.errors import AtlasError, InvalidArgumentError

if TYPE_CHECKING:
    from atlas.engine import Engine
    from atlas.request import Completion
    from atlas.sampling import SamplingParams
    from atlas.translation import BeamParams

STANDARD = "-"
AHEAD = 256  # lines in flight: enough to fill any sweep, and bounded for files of any size


def opened(path: str, mode: Literal["r", "w"] = "r") -> TextIO:
    """A file of text in UTF-8; ``-`` is standard input or output.

    Raises
    ------
    click.FileError
    """
    if path == STANDARD:
        return sys.stdin if mode == "r" else sys.stdout
    try:
        return open(path, mode, encoding="utf-8", newline="\n")
    except OSError as error:
        raise click.FileError(path, error.strerror or str(error)) from error


def lines_of(path: str, file: TextIO) -> Iterator[str]:
    """Its lines without their ends.

    Raises
    ------
    InvalidArgumentError
        The file is not UTF-8.
    """
    try:
        for line in file:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path} is not UTF-8: {error}") from error


def input_is_ready(paths: Sequence[str]) -> bool:
    """Whether reading standard input would not wait; so for files, always."""
    if STANDARD not in paths:
        return True
    try:
        return bool(select.select([sys.stdin.fileno()], [], [], 0)[0])
    except (OSError, ValueError):  # it is no file of the system's
        return True


def count_lines(paths: Sequence[str]) -> int | None:
    """Lines of all files; None with standard input or a pipe, which can be read only once."""
    if not all(path != STANDARD and os.path.isfile(path) for path in paths):
        return None
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            total += sum(1 for _ in file)
    return total


@dataclass(frozen=True, slots=True)
class Found:
    """A translation of a line; ``score`` is None for samples and blank lines."""

    text: str
    score: float | None = None


class LineTranslator:
    """Submits lines as they come, and gives their translations out in the same order.

    Parameters
    ----------
    engine : Engine
        Of a translation model; nobody else uses it meanwhile.
    source, target : str
        Codes of the languages.
    params : BeamParams or SamplingParams
    num_return : int
        Translations of each line.
    """

    def __init__(
        self,
        engine: Engine,
        source: str,
        target: str,
        params: BeamParams | SamplingParams,
        num_return: int,
    ) -> None:
        for code in (source, target):
            engine.languages.token_id(code)  # refused before a line is read
        self._engine = engine
        self._languages: dict[str, Any] = {"source": source, "target": target}
        self._params = params
        self._blank = (Found(""),) * num_return
        self._waiting: deque[tuple[str, str | None]] = deque()  # where from, request or blank
        self._done: dict[str, Completion] = {}

    def translate(
        self,
        lines: Iterable[tuple[str, str]],
        *,
        ahead: int = AHEAD,
        keep_blank: bool = True,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[Found, ...]]:
        """The translations of each line.

        Parameters
        ----------
        lines : iterable of (str, str)
            Where a line comes from, for messages, and the line.
        ahead : int
            Lines in flight at most.
        keep_blank : bool
            Blank lines stay blank; else they are refused.
        is_ready : callable
            Whether the next line comes without a wait; if not, no translation is held back.

        Raises
        ------
        AtlasError
            A line is refused or fails; all before it were given out.
        """
        refused = None
        for origin, line in lines:
            if keep_blank and not line.strip():
                self._waiting.append((origin, None))
            else:
                try:
                    self._waiting.append((origin, self._submit(line)))
                except AtlasError as error:
                    refused = _placed(error, origin)
                    break
            while self._waiting and (len(self._waiting) >= ahead or not is_ready()):
                yield self._oldest()
        while self._waiting:
            yield self._oldest()
        if refused is not None:
            raise refused

    def _submit(self, line: str) -> str:
        return self._engine.submit_translation(line, params=self._params, **self._languages)

    def _oldest(self) -> tuple[Found, ...]:
        """The translations of the line that waits longest; steps until they are there."""
        origin, request_id = self._waiting.popleft()
        if request_id is None:
            return self._blank
        while request_id not in self._done:
            for event in self._engine.step():
                if event.completion is not None:
                    self._done[event.request_id] = event.completion
        completion = self._done.pop(request_id)
        if completion.error is not None:
            raise _placed(completion.error, origin)
        return tuple(Found(sample.text, sample.score) for sample in completion.samples)


def _placed(error: AtlasError, origin: str) -> AtlasError:
    """The error with where it happened."""
    return type(error)(f"{origin}: {error}" if origin else str(error))
