"""``atlas generate``: complete a prompt, writing the text as it comes."""

from __future__ import annotations

import sys
from typing import Any

import click

from atlas.cli.options import (
    LOADING_NAMES,
    debug_option,
    given,
    load_engine,
    loading_options,
    quiet_option,
)
from atlas.cli.sampling_options import sampling_options, sampling_params


@click.command()
@click.option(
    "--model", help="File, folder, id or name (default: atlas-tiny, the small one in the package)."
)
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message, in chat format.")
@sampling_options
@loading_options
@quiet_option
@debug_option
@click.argument("prompt")
@click.pass_context
def generate(
    context: click.Context, /, model: str | None, prompt: str, chat: bool, quiet: bool, **_: Any
) -> None:
    """Write a completion of PROMPT to standard output. A PROMPT of - means standard input."""
    text = sys.stdin.read() if prompt == "-" else prompt
    params = sampling_params(context)
    with load_engine(model, given(context, LOADING_NAMES), quiet=quiet) as engine:
        if chat:
            deltas = engine.stream_chat([{"role": "user", "content": text}], params)
        else:
            deltas = engine.stream(text, params)
        for delta in deltas:
            click.echo(delta.text, nl=False)
        click.echo()
