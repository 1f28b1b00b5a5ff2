"""The end of a process, and its forks, while the engine is at work."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.folders import script_environment

_EXIT = """
import asyncio, sys, threading, time
from atlas import Engine, SamplingParams

engine = Engine(sys.argv[1], threads=2, quiet=True, kv_tokens=8192)
long = SamplingParams(max_tokens=400, ignore_eos=True)
how = sys.argv[2]
if how != "unowned":
    engine.start()
for i in range(3 if how == "event loop" else 200):
    engine.submit([3 + i % 190] * 20, long.replace(n=4))
if how == "daemon threads":
    for _ in range(4):
        work = lambda: engine.generate([5, 6], long.replace(n=64))
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)
if how == "event loop":
    async def program():
        stream = engine.agenerate([5, 6], long)
        async for event in stream:
            return
    asyncio.run(program())
if how == "exception":
    raise SystemExit(0)
if how == "paused":
    pause = engine.paused()
    pause.__enter__()
if how == "unowned":
    engine.step()
print("leaving", time.time())
"""


@pytest.mark.parametrize(
    "how", ["owned", "unowned", "daemon threads", "event loop", "exception", "paused"]
)
def test_the_interpreter_may_exit_with_work_in_flight(folder: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXIT, str(folder), how],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if how != "exception":
        word, left_at = done.stdout.split()
        assert word == "leaving"
        assert time.time() - float(left_at) < 10


_FORK_WHILE_OWNED = """
import os, signal, sys, time
from atlas import Engine, SamplingParams
from atlas.errors import StaleHandleError

engine = Engine(sys.argv[1], threads=2, quiet=True, kv_tokens=4096)
params = SamplingParams(max_tokens=40, ignore_eos=True)
expected = engine.generate([5, 6, 7], params).token_ids
engine.start()
for round_number in range(6):
    names = [engine.submit([5, 6, 7], params) for _ in range(8)]
    time.sleep(0.001 * round_number)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # kills the child where it hangs
        status = 1
        try:
            for call in (
                lambda: engine.submit([5], params),
                lambda: engine.generate([5], params),
                engine.step,
                engine.poll,
                lambda: engine.cancel(names[0]),
                engine.has_unfinished,
                engine.start,
                lambda: engine.paused().__enter__(),
            ):
                try:
                    call()
                except StaleHandleError as error:
                    assert "parent process" in str(error)
                else:
                    raise AssertionError("not refused")
            engine.stop()
            engine.close()
            with Engine(sys.argv[1], threads=1, quiet=True) as own:
                own.start()
                assert own.generate([5, 6, 7], params).token_ids == expected
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
    written = {name: [] for name in names}
    while any(len(ids) < 40 for ids in written.values()):
        for event in engine.poll(5):
            written[event.request_id] += event.token_ids
    assert all(tuple(ids) == expected for ids in written.values())
engine.close()
print("done")
"""


@pytest.mark.cpu
def test_fork_while_the_owner_thread_runs(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK_WHILE_OWNED, str(folder)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
