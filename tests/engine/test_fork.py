"""Forks: a child may make engines of its own; what it inherited is dead and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.folders import script_environment

pytestmark = pytest.mark.cpu

_PRELUDE = """
import faulthandler, os, signal, sys, threading, time
from atlas import Engine, SamplingParams
from atlas.errors import StaleHandleError

folder = sys.argv[1]
params = SamplingParams(max_tokens=8, ignore_eos=True)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        status = 1
        faulthandler.register(signal.SIGALRM, chain=True)  # says where it hangs
        signal.alarm(20)
        try:
            work()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

def refused(call):
    try:
        call()
    except StaleHandleError as error:
        assert "parent process" in str(error), error
    else:
        raise AssertionError("not refused")

engine = Engine(folder, threads=2, quiet=True)
expected = engine.generate([5, 6, 7], params).token_ids
model = engine.model
"""

_CHILD_MAKES_ENGINE = """
seq = model.lifecycle.alloc_sequence()
view = model.forward.prefill([5, 6, 7], seq)
stream = engine.stream([5, 6, 7], params)
unstarted = engine.stream([5, 6, 7], params)
next(stream)

def child():
    for call in (
        lambda: engine.generate([5, 6, 7], params),
        lambda: engine.stream([5, 6, 7], params),
        lambda: engine.model,
        lambda: engine.tokenizer,
        lambda: next(stream),
        lambda: next(unstarted),
        lambda: model.forward.decode(3, seq),
        lambda: model.lifecycle.alloc_sequence(),
        lambda: model.lifecycle.free_sequence(seq),
        lambda: model.lifecycle.num_free_blocks,
        lambda: model.lifecycle.bind_to_thread(),
        lambda: model.logits.argmax(view),
        lambda: view.numpy(),
        lambda: view.topk(1),
        lambda: engine.__enter__(),
    ):
        refused(call)
    assert "parent process" in repr(engine)
    repr(view), repr(seq), engine._repr_html_(), view._repr_html_(), seq._repr_html_()
    engine.close()
    with Engine(folder, threads=2, quiet=True) as own:
        assert own.generate([5, 6, 7], params).token_ids == expected
        # A grandchild may as well.
        def grandchild():
            refused(lambda: own.generate([5, 6, 7], params))
            with Engine(folder, threads=1, quiet=True) as third:
                assert third.generate([5, 6, 7], params).token_ids == expected
        assert in_child(grandchild) == 0

assert in_child(child) == 0
# The parent goes on where it was.
rest = tuple(i for delta in stream for i in delta.token_ids)
assert rest == expected[1:], rest
try:
    model.logits.argmax(view)
except StaleHandleError as error:
    assert "overwritten" in str(error)  # by the parent's own stream
model.lifecycle.free_sequence(seq)
assert engine.generate([5, 6, 7], params).token_ids == expected
engine.close()
"""

_FORK_WHILE_BUSY = """
# Other threads hold the engine's lock, run steps, load and compile while this one forks.
stop = threading.Event()
failures = []

def generating():
    while not stop.is_set():
        if engine.generate([5, 6, 7], params).token_ids != expected:
            failures.append("differs")

def loading():
    while not stop.is_set():
        Engine(folder, threads=2, quiet=True, max_seq_len=64).close()

threads = [threading.Thread(target=target) for target in (generating, loading)]
for thread in threads:
    thread.start()

def child():
    refused(lambda: engine.generate([5, 6, 7], params))
    engine.close()
    with Engine(folder, threads=2, quiet=True) as own:
        assert own.generate([5, 6, 7], params).token_ids == expected

results = [in_child(child) for _ in range(8)]
stop.set()
for thread in threads:
    thread.join(30)
assert not failures
assert results == [0] * 8, results
engine.close()
"""

_INHERITED_EXIT = """
# A child that leaves by the usual way runs destructors and exit handlers.
pid = os.fork()
if pid == 0:
    del model
    del engine
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert engine.generate([5, 6, 7], params).token_ids == expected
"""


@pytest.mark.parametrize(
    "script",
    [_CHILD_MAKES_ENGINE, _FORK_WHILE_BUSY, _INHERITED_EXIT],
    ids=["own-engine", "busy-parent", "usual-exit"],
)
def test_fork(folder: Path, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PRELUDE + script, str(folder)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
