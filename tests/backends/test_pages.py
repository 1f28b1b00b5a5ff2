"""Arrays on pages of their own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from atlas import Engine, pages
from tests.engine.folders import write_model

MIB = 1 << 20


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("shape", [0, 3, (2, 5), (64, 300, 7), 1 << 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8])
def test_zeros(shape: int | tuple[int, ...], dtype: type[np.generic]) -> None:
    array = pages.zeros(shape, dtype)
    np.testing.assert_array_equal(array, np.zeros(shape, dtype))
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.flags.writeable
    if array.nbytes >= 64 << 10:
        assert array.ctypes.data % 64 == 0


def test_untouched_pages_cost_nothing_and_freed_ones_go_back() -> None:
    # What NumPy's allocator freed before, it would clear and use again.
    np.ones(24 * MIB, np.uint8).sum()
    before = anonymous_bytes()
    array = pages.zeros(256 * MIB, np.uint8)
    assert anonymous_bytes() - before < MIB
    array[: 16 * MIB] = 1
    assert anonymous_bytes() - before > 15 * MIB
    del array
    assert anonymous_bytes() - before < MIB


def test_a_childs_writes_stay_its_own() -> None:
    array = pages.zeros(MIB, np.uint8)
    pid = os.fork()
    if pid == 0:
        array[:] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert not array.any()


def test_no_room_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes"):
        pages.zeros(1 << 60, np.uint8)


def test_an_engines_cache_takes_memory_as_it_fills(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    before = anonymous_bytes()
    with Engine(folder, threads=1, kv_tokens=1 << 20, quiet=True) as engine:  # 512 MiB
        engine.generate([5, 6, 7])
        assert engine.model.lifecycle.num_total_blocks == 1 << 16
        assert anonymous_bytes() - before < 64 * MIB
