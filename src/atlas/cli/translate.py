"""``atlas translate``: texts, files or standard input, line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from atlas.cli.lines import (
    AHEAD,
    STANDARD,
    LineTranslator,
    count_lines,
    input_is_ready,
    lines_of,
    opened,
)
from atlas.cli.options import (
    LOADING_NAMES,
    debug_option,
    given,
    load_engine,
    loading_options,
    quiet_option,
    stack,
)
from atlas.cli.sampling_options import NAMES as SAMPLING_NAMES
from atlas.cli.sampling_options import sampling_options, sampling_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from atlas.sampling import SamplingParams
    from atlas.translation import BeamParams

_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
_BEAM_NAMES = ("num_beams", "length_penalty", "early_stopping", "no_repeat_ngram", "num_return")
_beam_options = stack(
    (
        click.option("--num-beams", type=int, help="Hypotheses kept at each step, 1 … 16 (4)."),
        click.option("--length-penalty", type=float, help="Power of the length in a score (1)."),
        click.option(
            "--early-stopping",
            type=click.Choice(list(_EARLY_STOPPING)),
            help="Whether a search ends at once when it has enough hypotheses (false).",
        ),
        click.option("--no-repeat-ngram", type=int, help="No n-gram so long twice; 0 is off."),
        click.option("--n-best", "num_return", type=int, help="Translations of a line (1)."),
    )
)


@click.command()
@click.option("--model", required=True, help="Folder or id of a translation model.")
@click.option("--source", required=True, metavar="CODE", help="Language of the text: eng_Latn.")
@click.option("--target", required=True, metavar="CODE", help="Language to translate into.")
@click.option(
    "-i", "--input", "inputs", multiple=True, metavar="FILE", help="Its lines; repeatable."
)
@click.option("-o", "--output", default=STANDARD, metavar="FILE", help="Where to write.")
@click.option("--scores", is_flag=True, help="Write a score and a tab before each translation.")
@_beam_options
@sampling_options
@loading_options
@quiet_option
@debug_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.pass_context
def translate(
    context: click.Context,
    /,
    model: str,
    source: str,
    target: str,
    inputs: tuple[str, ...],
    output: str,
    scores: bool,
    texts: tuple[str, ...],
    quiet: bool,
    **_: Any,
) -> None:
    """Translate each TEXT, or else each line of the input files or of standard input.

    A line of output for a line of input, in order; blank lines stay blank. With --n-best N there
    are N for each, best first. Beam search is the default; sampling options such as --temperature
    draw instead.
    """
    if texts and inputs:
        raise click.UsageError("TEXT and --input are both given; allowed: one of them")
    if source == target:
        raise click.UsageError(f"--source and --target are both {source}; allowed: two languages")
    params, count = _params(context, scores)
    paths = inputs or (STANDARD,)
    _require_apart(paths, output)
    with ExitStack() as stack:
        files = [] if texts else [stack.enter_context(_kept_open(path)) for path in paths]
        engine = stack.enter_context(load_engine(model, given(context, LOADING_NAMES), quiet=quiet))
        translator = LineTranslator(engine, source, target, params, count)
        out = stack.enter_context(_kept_open(output, "w"))
        if texts:
            total: int | None = len(texts)
            names = [f"text {i}" if len(texts) > 1 else "" for i in range(1, len(texts) + 1)]
            found = translator.translate(zip(names, texts, strict=True), keep_blank=False)
        else:
            lines = (
                (f"line {number}" if path == STANDARD else f"{path}, line {number}", line)
                for path, file in zip(paths, files, strict=True)
                for number, line in enumerate(lines_of(path, file), 1)
            )
            total = None
            # Whoever types, or writes to a pipe, may want an answer before the next line.
            ready = partial(input_is_ready, paths)
            found = translator.translate(lines, ahead=AHEAD, is_ready=ready)
        watched = not quiet and not out.isatty()
        if watched and not texts:
            total = count_lines(paths)
        with _progress(total, shown=watched) as advance:
            for translations in found:
                for one in translations:
                    score = "" if not scores or one.score is None else f"{one.score:.6f}\t"
                    click.echo(score + " ".join(one.text.splitlines()), file=out)
                advance()


def _params(context: click.Context, scores: bool) -> tuple[BeamParams | SamplingParams, int]:
    """A beam search or samples, as the options ask, and how many translations of a line."""
    beam = given(context, _BEAM_NAMES)
    sampled = [name for name in given(context, SAMPLING_NAMES) if name != "max_tokens"]
    if sampled:
        if beam or scores:
            names = [*beam, *(["scores"] if scores else [])]
            raise click.UsageError(
                f"{_options(sampled)} has no meaning in a beam search, which {_options(names)} "
                "asks for; allowed: one or the other"
            )
        return sampling_params(context, max_tokens=context.params["max_tokens"]), 1
    from atlas.translation import BeamParams

    if "early_stopping" in beam:
        beam["early_stopping"] = _EARLY_STOPPING[beam["early_stopping"]]
    params = BeamParams(**beam, **given(context, ("max_tokens",)))
    return params, params.num_return


def _options(names: list[str]) -> str:
    spelled = {"num_return": "n-best"}
    return ", ".join(f"--{spelled.get(name, name).replace('_', '-')}" for name in names)


def _require_apart(paths: tuple[str, ...], output: str) -> None:
    """Refuse to write over a file that is read."""
    for path in paths:
        files = STANDARD not in (path, output) and os.path.exists(path) and os.path.exists(output)
        if files and os.path.samefile(path, output):
            raise click.UsageError(f"{path} is --input and --output; allowed: two files")


@contextmanager
def _kept_open(path: str, mode: Literal["r", "w"] = "r") -> Iterator[Any]:
    """A file that is closed at the end; the standard streams stay open."""
    file = opened(path, mode)
    try:
        yield file
    finally:
        if path != STANDARD:
            file.close()


@contextmanager
def _progress(total: int | None, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over the lines, on standard error and only where somebody watches."""
    from atlas.display import is_interactive

    if not shown or not is_interactive():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("translating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("translating", total=total)
        yield lambda: bar.advance(task)
