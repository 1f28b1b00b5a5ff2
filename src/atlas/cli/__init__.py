"""The ``atlas`` command. Each subcommand is a file of this package.

Nothing heavier than click is imported before a command runs: ``atlas --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from atlas import __version__
from atlas.cli.bench import bench
from atlas.cli.bundle import bundle
from atlas.cli.chat import chat
from atlas.cli.doctor import doctor
from atlas.cli.generate import generate
from atlas.cli.info import info
from atlas.cli.kernels import kernels
from atlas.cli.options import DEBUG, debug_option
from atlas.cli.table import printable
from atlas.cli.translate import translate
from atlas.errors import AtlasError

_INTERRUPTED = 130  # what shells report for a process that SIGINT ended


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, prog_name="atlas")
@debug_option
@click.pass_context
def atlas(context: click.Context, /) -> None:
    """Run language models on this machine."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (generate, chat, translate, info, bench, doctor, bundle, kernels):
    atlas.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 2 for a usage error, or the error's ``AtlasError.code``.

    Errors are one line on standard error; ``--debug`` adds the traceback.
    """
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    # Python leaves out the standard streams that are closed when it starts.
    if sys.stdout is None:
        return _report("standard output is closed; allowed: a file, a pipe or a terminal", 1)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the whole process
    context = None
    try:
        with atlas.make_context("atlas", list(arguments)) as context:
            atlas.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.UsageError as error:
        where = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
        return _report(f"{error.format_message().rstrip('.')}{where}", error.exit_code)
    except click.ClickException as error:
        return _report(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; leave nothing for the interpreter to flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # The last frame before the process ends: any error becomes its one line here.
        if context is not None and context.meta.get(DEBUG):
            traceback.print_exc()
        if isinstance(error, AtlasError):
            return _report(str(error), error.code)
        return _report(f"{type(error).__name__}: {error}", AtlasError.code)
    return 0


def _report(message: str, code: int) -> int:
    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    return code
