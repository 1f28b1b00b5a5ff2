"""The C interface on a model with recurrent layers: the same tests again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine
from tests.capi import test_requests, test_saved, test_token_level
from tests.capi.interface import CallError, call, ffi, ids, info, is_recurrent, lib, make
from tests.engine.folders import write_model

for _module in (test_requests, test_saved, test_token_level):
    globals().update(
        (name, value) for name, value in vars(_module).items() if name.startswith("test_")
    )


@pytest.fixture(scope="module")
def model(hybrid_model: Path) -> Path:
    return hybrid_model


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, threads=1, quiet=True) as engine:
        yield engine


loaded, sequence = test_requests.loaded, test_token_level.sequence


def test_a_ring_of_snapshots(loaded: Any, sequence: Any) -> None:
    assert lib.atlas_has(b"recurrent") == 1
    assert is_recurrent(loaded)
    call("sequence_prefill", sequence, ids([3, 4, 5]), 3, 2, ffi.NULL)
    for restore in (b"save", b"restore"):
        name = f"sequence_{restore.decode()}_snapshot"
        with pytest.raises(CallError, match=r"INVALID_ARGUMENT: ring_slot is 4; allowed"):
            call(name, sequence, 4)
    with pytest.raises(CallError, match=r"SEQUENCE_STATE: .* no snapshot in ring slot 3"):
        call("sequence_restore_snapshot", sequence, 3)


def test_a_dense_model_has_no_ring(tmp_path: Path) -> None:
    engine = make("engine", "engine_load", str(write_model(tmp_path)).encode(), ffi.NULL)
    sequence = make("sequence", "sequence_create", engine, 0)
    assert not is_recurrent(engine)
    for name in ("sequence_save_snapshot", "sequence_restore_snapshot"):
        with pytest.raises(CallError, match="CAPABILITY: this model on this backend has no 'ssm'"):
            call(name, sequence, 0)
    call("sequence_free", sequence)
    call("engine_free", engine)


def test_counters(loaded: Any, sequence: Any) -> None:
    told = info("engine", loaded)
    assert told.num_state_slots - told.num_free_state_slots == 1
    assert (told.num_snapshots, told.num_free_snapshots) == (16, 16)
    assert told.state_bytes > 0
    call("sequence_prefill", sequence, ids([3, 4, 5]), 3, 2, ffi.NULL)
    call("sequence_save_snapshot", sequence, 0)
    assert info("engine", loaded).num_free_snapshots == 15
