"""``atlas chat``: history, commands, interrupts, pipes and terminals."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from atlas import Delta, Engine, SamplingParams
from atlas.cli.chat import Conversation
from atlas.errors import PromptTooLongError
from tests.cli.outcome import Command


class Parrot:
    """An engine that answers with its last message, word by word, and remembers all of them."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, str]]] = []

    def stream_chat(
        self, messages: list[dict[str, str]], params: SamplingParams
    ) -> Iterator[Delta]:
        self.seen.append([(message["role"], message["content"]) for message in messages])
        text = messages[-1]["content"]
        if text == "too long":
            raise PromptTooLongError("that is too long")
        for word in text.split():
            yield Delta(f"{word} ", (1,))
            if word == "interrupt":
                raise KeyboardInterrupt


def talk(monkeypatch: pytest.MonkeyPatch, text: str, system: str | None = None) -> Parrot:
    """A conversation over a pipe."""
    parrot = Parrot()
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    Conversation(cast("Any", parrot), SamplingParams(), system).run()
    return parrot


def test_history_grows_by_messages_and_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = talk(monkeypatch, "one two\n\n  three\nfour")
    assert parrot.seen == [
        [("user", "one two")],
        [("user", "one two"), ("assistant", "one two "), ("user", "three")],
        [
            ("user", "one two"),
            ("assistant", "one two "),
            ("user", "three"),
            ("assistant", "three "),
            ("user", "four"),
        ],
    ]
    assert capsys.readouterr() == ("one two \nthree \nfour \n", "")


def test_reset_keeps_the_system_message_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = talk(monkeypatch, "one\n/reset\ntwo\n", system="be kind")
    assert parrot.seen == [
        [("system", "be kind"), ("user", "one")],
        [("system", "be kind"), ("user", "two")],
    ]


def test_exit_leaves_the_rest_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "one\n/exit\ntwo\n").seen == [[("user", "one")]]


def test_an_interrupt_ends_the_answer_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = talk(monkeypatch, "please interrupt this\nnext\n")
    assert parrot.seen[1] == [
        ("user", "please interrupt this"),
        ("assistant", "please interrupt "),
        ("user", "next"),
    ]
    assert capsys.readouterr() == ("please interrupt \nnext \n", " [stopped]")


def test_over_a_pipe_an_error_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptTooLongError):
        talk(monkeypatch, "too long\nnext\n")


def test_an_unknown_command_is_a_usage_error(
    atlas_command: Command, smollm2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/rest\n"))
    done = atlas_command("chat", smollm2, "--max-seq-len", "128", "--threads", "1")
    assert (done.status, done.out) == (2, "")
    assert "/rest is no command; /reset" in done.err


def test_a_piped_conversation_with_a_model(
    atlas_command: Command, smollm2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hello.\nAgain.\n"))
    done = atlas_command("chat", smollm2, "-n", "6", "--max-seq-len", "256", "--threads", "1")
    assert (done.status, done.err) == (0, "")
    with Engine(smollm2, threads=1, max_seq_len=256) as engine:
        messages = [{"role": "user", "content": "Say hello."}]
        first = engine.chat(messages, SamplingParams(max_tokens=6)).text
        messages += [
            {"role": "assistant", "content": first},
            {"role": "user", "content": "Again."},
        ]
        second = engine.chat(messages, SamplingParams(max_tokens=6)).text
    assert done.out == f"{first}\n{second}\n"


def test_without_a_chat_template_each_line_is_continued(
    atlas_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("This module provides\nTo open a file,\n"))
    done = atlas_command("chat", "--max-seq-len", "256", "--threads", "1")
    assert (done.status, done.err.splitlines()) == (
        0,
        [
            "no model given: atlas-tiny, the small one in the package",
            "the model has no chat template: it continues each line as text",
        ],
    )
    with Engine(threads=1, max_seq_len=256, quiet=True) as engine:
        texts = [engine.generate(t).text for t in ("This module provides", "To open a file,")]
    assert done.out == "".join(f"{text}\n" for text in texts)


def test_a_system_message_needs_a_chat_template(atlas_command: Command) -> None:
    done = atlas_command("chat", "--quiet", "--system", "be kind")
    assert (done.status, done.out) == (2, "")
    assert "--system: " in done.err
    assert "atlas-tiny has no chat template" in done.err


class Terminal:
    """A child on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-c", "from atlas.cli import main; main()", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.screen = ""

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Read until ``text`` has appeared after what was waited for before."""
        assert self._appears(text, seconds), f"no {text!r} in {self.screen!r}"

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C until ``text`` appears: readline misses one that comes as it starts to wait."""
        for _ in range(30):
            self.child.send_signal(signal.SIGINT)
            if self._appears(text, 2.0):
                return
        pytest.fail(f"no {text!r} in {self.screen!r}")

    def _appears(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            if time.monotonic() > deadline:
                return False
            if select.select([self._master], [], [], 0.1)[0]:
                self.screen += os.read(self._master, 4096).decode(errors="replace")
        self.screen = self.screen.partition(text)[2]
        return True

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._master)


@pytest.fixture
def terminal(smollm2: str) -> Iterator[Terminal]:
    terminal = Terminal("chat", smollm2, "--threads", "1", "--quiet", "--ignore-eos")
    yield terminal
    terminal.close()


def test_interrupts_and_end_of_input_on_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for("/reset forgets")
    terminal.wait_for("> ")
    terminal.interrupt_until("> ")  # at the prompt: another prompt
    terminal.type("Count to one million.\n")
    terminal.wait_for("million.")
    terminal.wait_for("\n")
    terminal.wait_for(" ")  # a word of the answer, which has no end
    terminal.interrupt_until("[stopped]")
    terminal.wait_for("> ")
    terminal.type("/nonsense\n")
    terminal.wait_for("error: /nonsense is no command")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.child.wait(20) == 0
