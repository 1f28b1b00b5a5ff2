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
    from collections.abc import Iterator

    from atlas.engine import Engine
    from atlas.request import Delta
    from atlas.sampling import SamplingParams


@click.command()
@click.argument("model", required=False)
@click.option("--system", metavar="TEXT", help="A system message that stands before all others.")
@sampling_options
@loading_options
@quiet_option
@debug_option
@click.pass_context
def chat(
    context: click.Context, /, model: str | None, system: str | None, quiet: bool, **_: Any
) -> None:
    """Talk to MODEL. Each line of input is a message.

    A model without a chat template, such as the default, atlas-tiny in the package, continues each
    line as text of its own, by 128 tokens unless you say otherwise.
    """
    params = sampling_params(context, max_tokens=None)
    with load_engine(model, given(context, LOADING_NAMES), quiet=quiet) as engine:
        if "default" in engine.tokenizer.chat_templates:
            Conversation(engine, params, system).run()
            return
        if system is not None:
            raise click.UsageError(f"--system: {engine.path} has no chat template", context)
        if not quiet:
            click.echo("the model has no chat template: it continues each line as text", err=True)
        Continuation(engine, sampling_params(context)).run()


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

    help = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        self._engine = engine
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._system)
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Read and answer until the input ends or asks to."""
        if self._interactive:
            import readline  # noqa: F401 - gives input() line editing and history

            click.echo(self.help, err=True)
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self._system)
            elif text.startswith("/"):
                self._fail(click.UsageError(f"{text.split()[0]} is no command; {self.help}"))
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
            for delta in self._reply():
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

    def _reply(self) -> Iterator[Delta]:
        """What the engine says to the messages so far."""
        return self._engine.stream_chat(self.messages, self._params)

    def _fail(self, error: AtlasError | click.UsageError) -> None:
        """With somebody there, say what is wrong and go on; over a pipe, end."""
        if not self._interactive:
            raise error
        click.echo(f"error: {error}", err=True)


class Continuation(Conversation):
    """The same loop over a model without a chat template: it continues the last line alone."""

    help = "each line is continued; /exit or Ctrl-D ends, Ctrl-C stops an answer"

    def _reply(self) -> Iterator[Delta]:
        return self._engine.stream(self.messages[-1]["content"], self._params)
