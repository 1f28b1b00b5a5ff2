"""Plain tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 200  # columns for pipes and files, where nothing should wrap


def print_rows(rows: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns.

    Values may come from a model file: characters that could steer a terminal are shown escaped.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(printable(name), style="bold"), Text(printable(str(value))))
    _print(table)


def print_columns(header: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]) -> None:
    """Print a table of named rows of numbers, with one decimal; the header names all columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(header):
        table.add_column(title, justify="right" if i else "left")
    for name, values in rows:
        table.add_row(name, *(f"{value:,.1f}" for value in values))
    _print(table)


def _print(table: Table) -> None:
    from rich.console import Console

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
