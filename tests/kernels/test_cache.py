"""The disk cache of compiled kernels; needs no compiler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from atlas_kernels import cache
from atlas_kernels.manifest import CompiledKernel, KernelInfo


def _kernel(
    name: str = "probe", arch: str = "sm_90a", cubin: bytes = b"\x7fELF code"
) -> CompiledKernel:
    info = KernelInfo(
        name=name,
        entry=f"atlas_{name}",
        op=name,
        variant="",
        arch=arch,
        arguments=(("x", "ptr"), ("size", "i32")),
        threads=128,
        min_blocks=1,
        cluster=1,
        static_shared_bytes=128,
        dynamic_shared_bytes=0,
        registers=32,
        spill_bytes=0,
        stack_bytes=0,
        warnings=(),
        source_hash=cache.source_hash(),
    )
    return CompiledKernel(info, cubin)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"


def test_an_entry_comes_back_whole() -> None:
    cache.write_entry(_kernel())
    assert cache.read_entry("probe", "sm_90a") == _kernel()


def test_other_names_and_architectures_are_absent() -> None:
    cache.write_entry(_kernel())
    assert cache.read_entry("other", "sm_90a") is None
    assert cache.read_entry("probe", "sm_80") is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "misplaced"])
def test_a_damaged_entry_counts_as_absent(damage: str) -> None:
    cache.write_entry(_kernel())
    path = cache.entry_path("probe", "sm_90a")
    entry = path.read_bytes()
    if damage == "misplaced":
        path = path.with_name("other.cubin")
    changed = {"flip": entry[:-1] + b"?", "truncate": entry[:40], "empty": b"", "misplaced": entry}
    path.write_bytes(changed[damage])
    assert cache.read_entry(path.stem, "sm_90a") is None


def test_a_new_entry_replaces_an_old_one_and_leaves_no_other_file(folder: Path) -> None:
    cache.write_entry(_kernel())
    cache.write_entry(_kernel(cubin=b"new"))
    found = cache.read_entry("probe", "sm_90a")
    assert found is not None
    assert found.cubin == b"new"
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["probe.cubin"]


def test_a_folder_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="atlas"):
        cache.write_entry(_kernel())
        cache.write_entry(_kernel("another"))
    assert len(caplog.records) == 1
    assert "not cached" in caplog.text
    assert cache.read_entry("probe", "sm_90a") is None


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.cache_folder() == tmp_path / "cuda"
    monkeypatch.delenv("ATLAS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/atlas/cuda")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.cache_folder() == Path("/home/someone/.cache/atlas/cuda")


def test_the_key_covers_compilers_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cache.cache_key.__wrapped__
    before = plain("sm_90a")
    assert before == plain("sm_90a") != plain("sm_90")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_version", lambda name: "0" if name == "nvidia-nvvm" else "1")
        one = plain("sm_90a")
        patch.setattr(cache, "_version", lambda name: "1")
        assert len({before, one, plain("sm_90a")}) == 3
    monkeypatch.setattr(cache, "source_hash", lambda: "other sources")
    assert plain("sm_90a") != before
