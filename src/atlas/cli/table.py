"""Plain tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable

_WIDE = 200  # columns for pipes and files, where nothing should wrap


def print_rows(rows: Iterable[tuple[object, ...]]) -> None:
    """Print rows as aligned columns, the first one bold.

    Values may come from a model file: characters that could steer a terminal are shown escaped.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for first, *rest in rows:
        cells = [Text(printable(str(cell))) for cell in rest]
        table.add_row(Text(printable(str(first)), style="bold"), *cells)
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def printable(text: str) -> str:
    """The text with unprintable characters as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
