"""Engines on the same file share one copy of its weights, and the last one lets go of it."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.backends.cpu.pack import pack
from atlas.errors import OutOfMemoryError
from atlas.model import memory
from atlas.weights.packed_weights import PackedWeights
from tests.engine.folders import VOCAB_SIZE, weights, write_model

pytestmark = pytest.mark.cpu

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A model that no other test loads."""
    return write_model(tmp_path / "model", seed=1)


def load_engine(path: Path, **options: Any) -> Engine:
    return Engine(path, threads=1, quiet=True, **options)


def weights_of(engine: Engine) -> PackedWeights:
    held = engine._loaded.core.network.weights
    assert isinstance(held, PackedWeights)
    return held


def test_two_engines_hold_one_copy(own_folder: Path) -> None:
    with load_engine(own_folder) as first, load_engine(own_folder, max_seq_len=64) as second:
        assert weights_of(first) is weights_of(second)
        networks = first._loaded.core.network, second._loaded.core.network
        assert networks[0].embedding is networks[1].embedding
        assert np.shares_memory(networks[0].final_norm.weight, networks[1].final_norm.weight)
        # But each has its own sequences.
        assert first.generate([5, 6], PARAMS).token_ids == second.generate([5, 6], PARAMS).token_ids
        assert first._loaded.plan.weights == second._loaded.plan.weights > 0
        assert first.describe()["weights"] == second.describe()["weights"]


def test_one_may_close_while_the_other_goes_on(own_folder: Path) -> None:
    first = load_engine(own_folder)
    expected = first.generate([5, 6], PARAMS).token_ids
    with load_engine(own_folder) as second:
        first.close()
        del first
        gc.collect()
        assert second.generate([5, 6], PARAMS).token_ids == expected
        with load_engine(own_folder) as third:
            assert weights_of(third) is weights_of(second)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_the_last_engine_lets_go(own_folder: Path, how: str) -> None:
    engine, other = load_engine(own_folder), load_engine(own_folder)
    held = weakref.ref(weights_of(engine))
    matrix = weakref.ref(engine._loaded.core.network.embedding.data.base)
    other.close()
    assert held() is not None
    if how == "close":
        engine.close()
    else:
        del engine
    assert held() is None
    assert matrix() is None


def test_running_a_cell_again_holds_one_model(own_folder: Path) -> None:
    engine = load_engine(own_folder)
    held = weights_of(engine)
    engine = load_engine(own_folder)
    assert weights_of(engine) is held


@pytest.mark.parametrize(
    "options", [{"dtype": "float32", "kv_dtype": "float32"}, {"quantize": "q8_0"}]
)
def test_other_weight_options_have_their_own_copy(
    own_folder: Path, options: dict[str, Any]
) -> None:
    with load_engine(own_folder) as first, load_engine(own_folder, **options) as second:
        assert weights_of(first) is not weights_of(second)
        with load_engine(own_folder, **options) as third:
            assert weights_of(second) is weights_of(third)


def test_a_changed_file_is_loaded_anew(own_folder: Path) -> None:
    file = own_folder / "model.safetensors"
    with load_engine(own_folder) as first:
        before = first.generate([5, 6], PARAMS).token_ids
        changed = write_model(own_folder.parent / "changed", seed=2) / "model.safetensors"
        os.replace(changed, file)
        with load_engine(own_folder) as second:
            assert weights_of(first) is not weights_of(second)
            assert second.generate([5, 6], PARAMS).token_ids != before
        assert first.generate([5, 6], PARAMS).token_ids == before
        # The same bytes with another time of change are taken for another file.
        with load_engine(own_folder) as third:
            status = file.stat()
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
            with load_engine(own_folder) as fourth:
                assert weights_of(third) is not weights_of(fourth)


def test_a_changed_configuration_is_not_mixed_up(own_folder: Path) -> None:
    config = own_folder / "config.json"
    with load_engine(own_folder) as first:
        text = config.read_text()
        config.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
        with load_engine(own_folder) as second:
            assert weights_of(first) is not weights_of(second)
            assert (
                first.generate([5, 6], PARAMS).token_ids
                != second.generate([5, 6], PARAMS).token_ids
            )


def test_one_file_by_two_names_is_one_file(own_folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(own_folder, target_is_directory=True)
    copy = shutil.copytree(own_folder, tmp_path / "copy")
    with load_engine(own_folder) as first, load_engine(link) as second, load_engine(copy) as third:
        assert weights_of(first) is weights_of(second)
        assert weights_of(first) is not weights_of(third)


def test_threads_that_load_at_once_share(own_folder: Path) -> None:
    with ThreadPoolExecutor(4) as executor:
        engines = list(executor.map(lambda _: load_engine(own_folder), range(8)))
    assert len({id(weights_of(engine)) for engine in engines}) == 1
    texts = {engine.generate([5, 6], PARAMS).token_ids for engine in engines}
    assert len(texts) == 1
    for engine in engines:
        engine.close()


def test_a_load_that_fails_leaves_nothing_behind(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = 0

    def failing(matrices: Any, groups: int = 1) -> Any:
        nonlocal packed
        packed += 1
        if packed == 3:
            raise KeyboardInterrupt
        return pack(matrices, groups)

    monkeypatch.setattr("atlas.backends.cpu.runtime.pack", failing)
    with pytest.raises(KeyboardInterrupt):
        load_engine(own_folder)
    gc.collect()
    with load_engine(own_folder) as engine:
        assert len(engine.generate([5, 6], PARAMS).token_ids) == 12
        assert packed > 6


def test_shared_weights_count_once_in_the_memory_check(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_engine(own_folder) as engine:
        plan = engine._loaded.plan
        monkeypatch.setattr(memory, "available_memory", lambda: plan.total - plan.weights)
        load_engine(own_folder).close()
    with pytest.raises(OutOfMemoryError):
        load_engine(own_folder)


def test_shared_weights_are_the_files(own_folder: Path) -> None:
    """The check of the checks: a second engine's logits are those of a first one's."""
    replaced = {"lm_head.weight": weights(VOCAB_SIZE, 3)["lm_head.weight"]}
    other = write_model(own_folder.parent / "other", seed=1, replaced=replaced)
    with load_engine(own_folder) as first, load_engine(own_folder) as second:
        with load_engine(other) as third:
            rows = []
            for engine in (first, second, third):
                seq = engine.model.lifecycle.alloc_sequence()
                rows.append(np.asarray(engine.model.forward.prefill([5, 6, 7], seq)))
        np.testing.assert_array_equal(rows[0], rows[1])
        assert not np.array_equal(rows[0], rows[2])
