"""``atlas chat``: a conversation in the terminal, or over a pipe, one message a line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

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
from atlas.errors import AtlasError

if TYPE_CHECKING:
    from atlas.engine import Engine
    from atlas.sampling import SamplingParams

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@click.command()
@click.argument("model", default="smollm2")
@click.option("--system", metavar="TEXT", help="A system message that stands before all others.")
@sampling_options
@loading_options
@quiet_option
@debug_option
@click.pass_context
def chat(context: click.Context, /, model: str, system: str | None, quiet: bool, **_: Any) -> None:
    """Talk to MODEL (default: smollm2). Each line of input is a message."""
    params = sampling_params(context, max_tokens=None)
    with load_engine(model, given(context, LOADING_NAMES), quiet=quiet) as engine:
        Conversation(engine, params, system).run()


class Conversation:
    """Messages so far, and the loop that reads one and streams the answer.

    Parameters
    ----------
    engine : Engine
    params : SamplingParams
        For every answer.
    system : str, optional
        Text of the message that a reset keeps.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._system)
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Read and answer until the input ends or asks to."""
        if self._interactive:
            import readline  # noqa: F401 - gives input() line editing and history

            click.echo(_HELP, err=True)
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self._system)
            elif text.startswith("/"):
                self._fail(click.UsageError(f"{text.split()[0]} is no command; {_HELP}"))
            elif text:
                self._answer(text)

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        if not self._interactive:
            return sys.stdin.readline() or None
        while True:
            try:
                return input("> ")
            except KeyboardInterrupt:
                click.echo()
            except EOFError:
                click.echo()
                return None

    def _answer(self, text: str) -> None:
        """Stream an answer. An interrupted one is kept as far as it came."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for delta in self._engine.stream_chat(self.messages, self._params):
                pieces.append(delta.text)
                click.echo(delta.text, nl=False)
        except KeyboardInterrupt:
            click.echo(" [stopped]", err=True, nl=False)
        except AtlasError as error:
            self.messages.pop()
            self._fail(error)
            return
        click.echo()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _fail(self, error: AtlasError | click.UsageError) -> None:
        """With somebody there, say what is wrong and go on; over a pipe, end."""
        if not self._interactive:
            raise error
        click.echo(f"error: {error}", err=True)
