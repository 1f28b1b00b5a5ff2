"""Progress on a terminal or in a notebook; silence everywhere else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas.weights.checkpoint import Checkpoint

_log = logging.getLogger("atlas")


def is_interactive() -> bool:
    """Whether somebody watches: standard error is a terminal, or this is a notebook kernel."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal or "ipykernel" in sys.modules


class LoadProgress:
    """A bar over the bytes of weights loaded, which also names kernels being compiled.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its size is the bar's length.
    quiet : bool, optional
        Show nothing. Default: only when nobody watches.
    on_progress : callable, optional
        Called with bytes loaded and in all; after success a last time with both equal.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quiet: bool | None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._total = checkpoint.nbytes
        self._done = 0
        self._on_progress = on_progress
        self._quiet = not is_interactive() if quiet is None else quiet
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> LoadProgress:
        if not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            console = Console(stderr=True)
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                console=console,
                transient=console.is_terminal,  # a log keeps the last state
            )
            self._bar.start()
            self._task = self._bar.add_task("loading weights", total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None and self._done < self._total:  # weights that were in memory already
            self.advance(self._total - self._done)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, nbytes: int) -> None:
        """So many bytes of weights were loaded."""
        self._done = min(self._done + nbytes, self._total)
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)
        if self._bar is not None:
            self._bar.advance(self._task, nbytes)

    def compiling(self, name: str) -> None:
        """The kernel called ``name`` is about to be compiled (once; then it is cached)."""
        _log.info("compiling kernel %s", name)
        if self._bar is not None:
            self._bar.print(f"compiling kernel {name}")
