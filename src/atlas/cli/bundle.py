"""``atlas bundle``: a folder with everything that a C program needs."""

from __future__ import annotations

from pathlib import Path

import click

from atlas.cli.options import debug_option


@click.command()
@click.option(
    "--out",
    "folder",
    required=True,
    type=click.Path(path_type=Path),
    help="A new or empty folder.",
)
@click.option("--with-model", is_flag=True, help="Include atlas-tiny, the model in the package.")
@debug_option
def bundle(folder: Path, with_model: bool) -> None:
    """Write a relocatable folder: Python, packages, library, header and compiled kernels.

    For machines without pip or network. A program in it, or with ATLAS_HOME set to it, needs
    nothing else but glibc.
    """
    from atlas.bundle import bundle as write_bundle

    click.echo(write_bundle(folder, with_model=with_model))
