"""Plain tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

_WIDE = 200  # columns for pipes and files, where nothing should wrap


def print_rows(rows: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns.

    Values may come from a model file: characters that could steer a terminal are shown escaped.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(printable(name), style="bold"), Text(printable(str(value))))
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def printable(text: str) -> str:
    """The text with unprintable characters as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
