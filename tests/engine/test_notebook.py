"""What a notebook shows: readable and HTML forms, and progress for those who watch."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from atlas import Engine, SamplingParams, display
from atlas.errors import InvalidArgumentError, ShapeError, StaleHandleError
from tests.engine.folders import VOCAB_SIZE, script_environment, write_model

pytestmark = pytest.mark.cpu

PROMPT = [5, 6, 7]


class _Tags(HTMLParser):
    """Collects tags and text, and checks that tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> _Tags:
    tags = _Tags()
    tags.feed(html)
    tags.close()
    assert not tags._open
    return tags


def test_an_engine_shows_what_it_holds(engine: Engine, folder: Path) -> None:
    text = repr(engine)
    for fact in ("llama, 2 layers × 64", "1 thread", "cpu-", "MiB weights", "open"):
        assert fact in text
    assert "\n" not in text
    tags = parsed(engine._repr_html_())
    assert set(tags.seen) == {"table", "caption", "tr", "th", "td"}
    for value in engine.describe().values():
        assert value in tags.text
    assert any(str(folder) in cell for cell in tags.text)


def test_html_is_escaped(tmp_path: Path) -> None:
    path = write_model(tmp_path / "<img src=x onerror=alert(1)>&amp;")
    with Engine(path, threads=1, quiet=True) as engine:
        html = engine._repr_html_()
        assert "<img" not in html
        tags = parsed(html)
        assert set(tags.seen) == {"table", "caption", "tr", "th", "td"}
        assert any(str(path) in cell for cell in tags.text)


def test_a_sequence_shows_where_it_stands(engine: Engine) -> None:
    model = engine.model
    seq = model.lifecycle.alloc_sequence(budget_tokens=40)
    model.forward.prefill(PROMPT, seq)
    model.forward.decode(9, seq)
    assert "active, seq_len=4, prompt_len=3, blocks=1" in repr(seq)
    assert "4 of 40 (3 prompt)" in parsed(seq._repr_html_()).text
    model.verify.decode_verify([9, 10], seq)
    assert "verify of 2 rows pending" in repr(seq)
    model.lifecycle.free_sequence(seq)
    assert "freed" in repr(seq)
    assert "freed" in parsed(seq._repr_html_()).text


def test_a_view_shows_its_greatest_logits(engine: Engine) -> None:
    model = engine.model
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(PROMPT, seq, logits="all")
    assert view is not None
    assert repr(view) == f"LogitsView(rows=3, vocabulary={VOCAB_SIZE}, valid)"
    best = view.topk(5)
    rows = np.asarray(view)
    for row, top in zip(rows, best, strict=True):
        assert [i for i, _ in top] == list(np.argsort(-row, kind="stable")[:5])
        assert [value for _, value in top] == sorted((float(v) for v in row), reverse=True)[:5]
    text = " ".join(parsed(view._repr_html_()).text)
    for row_top in best:
        for i, value in row_top:
            assert f"{i}: {value:.3f}" in text
    model.forward.decode(9, seq)
    assert "stale" in repr(view)
    assert "stale" in view._repr_html_()
    with pytest.raises(StaleHandleError):
        view.topk()
    model.lifecycle.free_sequence(seq)


def test_looking_at_a_view_is_not_reading_it(engine: Engine) -> None:
    """An unread decode row is protected; a notebook that displays the view must not unprotect."""
    model = engine.model
    seqs = [model.lifecycle.alloc_sequence() for _ in range(2)]
    for seq in seqs:
        model.forward.prefill(PROMPT, seq)
    view = model.forward.decode_batch([9, 10], seqs)
    repr(view)
    assert engine._loaded.core.arena.num_unread_decode == 2
    view.numpy()
    assert engine._loaded.core.arena.num_unread_decode == 0
    for seq in seqs:
        model.lifecycle.free_sequence(seq)


def test_a_view_as_numpy(engine: Engine) -> None:
    model = engine.model
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(PROMPT, seq, logits="all")
    assert view is not None
    rows = view.numpy()
    assert rows.shape == (3, VOCAB_SIZE)
    assert rows.dtype == np.float32
    assert view.shape == rows.shape
    assert view.dtype == rows.dtype
    assert len(view) == 3
    assert not rows.flags.writeable
    assert np.shares_memory(rows, view.numpy())
    copy = np.asarray(view)
    assert copy.flags.writeable
    assert not np.shares_memory(copy, rows)
    np.testing.assert_array_equal(copy, rows)
    np.testing.assert_array_equal(np.asarray(view[-1])[0], rows[2])
    assert np.asarray(view, np.float64).dtype == np.float64
    with pytest.raises(ShapeError, match=r"view.numpy\(\)"):
        np.array(view, copy=False)
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row is {row}"):
            view[row]
    for k in (0, -1, VOCAB_SIZE + 1):
        with pytest.raises(InvalidArgumentError, match=f"k is {k}; allowed: 1 … {VOCAB_SIZE}"):
            view.topk(k)
    assert len(view.topk(VOCAB_SIZE)[0]) == VOCAB_SIZE
    model.lifecycle.free_sequence(seq)


# -- progress ---------------------------------------------------------------------------------

_LOAD = """
import sys
from atlas import Engine
quiet = {"None": None, "True": True, "False": False}[sys.argv[2]]
engine = Engine(sys.argv[1], threads=1, quiet=quiet)
print(engine.generate([5, 6]).token_ids[0])
"""


def run_on_terminal(folder: Path, quiet: str, cache: Path) -> tuple[str, str]:
    """(stdout, stderr) of a load whose standard error is a terminal."""
    parent, child = pty.openpty()
    environment = script_environment(TERM="xterm", COLUMNS="100", ATLAS_CACHE_DIR=str(cache))
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(folder), quiet],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=child,
    )
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # the terminal's last user is gone
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    return out.decode(), shown.decode()


def test_a_terminal_shows_loading_and_compiling(folder: Path, warm_cache: Path) -> None:
    (entry,) = warm_cache.rglob("rope.rope.o")
    entry.unlink()
    out, shown = run_on_terminal(folder, "None", warm_cache)
    assert out.strip().isdigit()
    assert "loading weights" in shown
    assert shown.count("compiling kernel") == 1
    assert "compiling kernel rope.rope" in shown
    # The second load finds everything compiled, and quiet is quiet.
    again = run_on_terminal(folder, "False", warm_cache)[1]
    assert "loading weights" in again
    assert "compiling" not in again
    assert run_on_terminal(folder, "True", warm_cache) == (out, "")


@pytest.mark.parametrize("quiet", [None, True])
def test_without_a_terminal_nothing_is_shown(
    folder: Path, quiet: bool | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with Engine(folder, threads=1, quiet=quiet) as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=1))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_progress_may_be_asked_for_and_goes_to_stderr(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Engine(folder, threads=1, quiet=False).close()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "loading weights" in captured.err


def test_a_process_without_stderr_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not display.is_interactive()
    monkeypatch.setitem(sys.modules, "ipykernel", display)
    assert display.is_interactive()


def test_the_bar_ends_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_seen: list[int] = []
    original = display.LoadProgress.advance

    def advance(self: display.LoadProgress, nbytes: int) -> None:
        bytes_seen.append(nbytes)
        original(self, nbytes)

    monkeypatch.setattr(display.LoadProgress, "advance", advance)
    engines = [Engine(folder, threads=1, quiet=True) for _ in range(2)]
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    expected = (folder / "model.safetensors").stat().st_size - header
    # Weights that another engine holds count as well: both bars end full.
    assert sum(bytes_seen) == 2 * expected
    for engine in engines:
        engine.close()
