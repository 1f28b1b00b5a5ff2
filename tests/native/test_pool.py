"""The worker pool: lists of bodies on all threads, errors, forks and misuse."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from atlas._native.pool import LaunchList, WorkerPool
from atlas.errors import InvalidArgumentError, KernelError, StaleHandleError

# int body(void **ret, void **exc, int64 thread, int64 num_threads, int64 *args), called from any
# thread without the GIL; ctypes takes it.
BODY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
)
Body = Callable[[int, int, list[int]], int]


def append(launches: LaunchList, name: str, body: Body, args: tuple[int, ...] = ()) -> None:
    """Add a Python function as a body."""

    def call(ret: object, exc: object, thread: int, num_threads: int, packed: object) -> int:
        return body(thread, num_threads, [packed[i] for i in range(len(args))])  # type: ignore[index]

    function = BODY(call)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    launches.append(name, address, args, function)


@contextmanager
def running(num_threads: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(num_threads)
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_launch_runs_on_every_thread_in_order(num_threads: int) -> None:
    seen: list[tuple[int, int, int]] = []
    launches = LaunchList()
    for step in range(4):
        append(launches, f"step{step}", lambda t, n, a: seen.append((a[0], t, n)) or 0, (step,))
    assert (len(launches), launches.names) == (4, ["step0", "step1", "step2", "step3"])
    with running(num_threads) as pool:
        assert pool.num_threads == num_threads
        for _ in range(3):
            seen.clear()
            pool.run(launches)
            # No thread begins a launch before all have ended the one before.
            assert [step for step, _, _ in seen] == sorted(list(range(4)) * num_threads)
            for step in range(4):
                threads = {thread for s, thread, _ in seen if s == step}
                assert threads == set(range(num_threads))
            assert {n for _, _, n in seen} == {num_threads}


def test_the_caller_is_thread_0() -> None:
    where: dict[int, int] = {}
    launches = LaunchList()
    append(launches, "who", lambda t, n, a: where.update({t: threading.get_native_id()}) or 0)
    with running(3) as pool:
        pool.run(launches)
    assert where[0] == threading.get_native_id()
    assert len(set(where.values())) == 3


def test_arguments_arrive_as_64_bits() -> None:
    values = (0, -1, 2**63 - 1, -(2**63), 12345)
    got: list[list[int]] = []
    launches = LaunchList()
    append(launches, "args", lambda t, n, a: got.append(a) or 0, values)
    with running(1) as pool:
        pool.run(launches)
    assert got == [list(values)]
    with pytest.raises(OverflowError):
        launches.append("wide", 0, (2**63,))
    with pytest.raises(TypeError):
        launches.append("text", 0, ("1",))  # type: ignore[arg-type]
    assert (len(launches), launches.names) == (1, ["args"])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_first_error_is_named_and_the_pool_goes_on(num_threads: int) -> None:
    ran: list[int] = []
    launches = LaunchList()
    append(launches, "good", lambda t, n, a: ran.append(0) or 0)
    append(launches, "bad", lambda t, n, a: int(t == n - 1))
    append(launches, "worse", lambda t, n, a: 7)
    with running(num_threads) as pool:
        for _ in range(3):
            with pytest.raises(KernelError, match="kernel bad reported an error"):
                pool.run(launches)
        fine = LaunchList()
        append(fine, "fine", lambda t, n, a: ran.append(1) or 0)
        ran.clear()
        pool.run(fine)
        assert ran == [1] * num_threads


def test_many_lists_follow_each_other() -> None:
    """Spinning, sleeping and waking: no list is lost or run twice."""
    counts = np.zeros(3, np.int64)
    launches, empty = LaunchList(), LaunchList()

    def count(thread: int, num_threads: int, args: list[int]) -> int:
        counts[thread] += 1
        return 0

    append(launches, "count", count)
    with running(3) as pool:
        for i in range(300):
            pool.run(launches)
            pool.run(empty)
            if i % 100 == 0:
                threading.Event().wait(0.02)  # long enough for the workers to sleep
    assert counts.tolist() == [300] * 3


def test_pools_do_not_disturb_each_other() -> None:
    counts = [np.zeros(4, np.int64) for _ in range(3)]
    with running(2) as a, running(4) as b, running(1) as c:
        for pool, mine in zip((a, b, c) * 20, counts * 20, strict=True):
            launches = LaunchList()

            def add(thread: int, n: int, args: list[int], mine: np.ndarray = mine) -> int:
                mine[thread] += 1
                return 0

            append(launches, "add", add)
            pool.run(launches)
    assert [count.tolist() for count in counts] == [
        [20, 20, 0, 0],
        [20, 20, 20, 20],
        [20, 0, 0, 0],
    ]


def test_a_second_thread_is_refused_while_a_list_runs() -> None:
    begun, go_on = threading.Event(), threading.Event()
    launches, other = LaunchList(), LaunchList()

    def wait(thread: int, num_threads: int, args: list[int]) -> int:
        begun.set()
        return int(not go_on.wait(20))

    append(launches, "wait", wait)
    with running(2) as pool:
        driver = threading.Thread(target=pool.run, args=(launches,))
        driver.start()
        try:
            assert begun.wait(20)
            with pytest.raises(StaleHandleError, match="already running"):
                pool.run(other)
            with pytest.raises(StaleHandleError, match="running a list"):
                pool.close()
        finally:
            go_on.set()
            driver.join()
        pool.run(other)  # any thread may drive, one at a time


def test_a_body_may_not_drive_its_own_pool() -> None:
    errors: list[BaseException] = []
    with running(1) as pool:
        launches = LaunchList()

        def recurse(thread: int, num_threads: int, args: list[int]) -> int:
            with pytest.raises(StaleHandleError) as caught:
                pool.run(launches)
            errors.append(caught.value)
            return 0

        append(launches, "recurse", recurse)
        pool.run(launches)
    assert len(errors) == 1


def threads_of_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_close_ends_the_threads(num_threads: int) -> None:
    before = threads_of_process()
    pool = WorkerPool(num_threads)
    started = threads_of_process() - before
    assert len(started) == num_threads - 1
    pool.close()
    assert not started & threads_of_process()
    pool.close()
    with pytest.raises(StaleHandleError, match="closed"):
        pool.run(LaunchList())


def test_a_dropped_pool_ends_its_threads() -> None:
    before = threads_of_process()
    pool = WorkerPool(4)
    started = threads_of_process() - before
    del pool
    assert len(started) == 3
    assert not started & threads_of_process()


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_thread_counts_out_of_range(num_threads: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"threads is {num_threads}"):
        WorkerPool(num_threads)


def test_a_pool_wants_a_list() -> None:
    with running(1) as pool, pytest.raises(TypeError):
        pool.run(None)  # type: ignore[arg-type]


def test_a_forked_child_is_refused_and_may_make_its_own() -> None:
    launches = LaunchList()
    append(launches, "nothing", lambda t, n, a: 0)
    with running(3) as pool:
        pool.run(launches)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pool.run(launches)
            except StaleHandleError as error:
                own = WorkerPool(2)
                own.run(launches)
                own.close()
                pool.close()  # the parent's threads are not here: nothing to join
                status = 0 if "parent process" in str(error) else 2
            finally:
                os._exit(status)
        _, raw = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(raw) == 0
        pool.run(launches)  # the parent goes on


def test_a_process_that_leaves_a_pool_open_ends() -> None:
    code = "from atlas._native.pool import WorkerPool; pool = WorkerPool(3)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0
