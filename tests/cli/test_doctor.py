"""``atlas doctor`` reports without touching a CUDA library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atlas.backends.cpu.code_cache import cache_key
from atlas.backends.cpu.target import cpu_target
from atlas.cli.doctor import gpu_rows, is_writable
from tests.cli.outcome import Command


def test_what_it_reports(
    atlas_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(tmp_path / "cache"))
    done = atlas_command("doctor")
    assert (done.status, done.err) == (0, "")
    for expected in (
        f"simd level    {cpu_target().level}, compiled for {cpu_target().cpu}",
        f"kernel cache  {tmp_path / 'cache'} (writable)",
        f"cache key     {cache_key()}, 0 kernels compiled",
        f"would use     cpu-{cpu_target().level} with {len(os.sched_getaffinity(0))} threads",
        "numba ",
        "numpy ",
    ):
        assert expected in done.out
    assert not (tmp_path / "cache").exists()  # a look leaves nothing behind


def test_no_gpu(tmp_path: Path) -> None:
    assert list(gpu_rows(tmp_path)) == [("gpu", "none found")]


def test_gpus_are_named_by_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert list(gpu_rows(tmp_path)) == [("gpu", "2 NVIDIA devices")]
    driver = tmp_path / "proc/driver/nvidia"
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (driver / "gpus" / bus).mkdir(parents=True)
        (driver / "gpus" / bus / "information").write_text("Model: \t NVIDIA X1\nIRQ: 5\n")
    (driver / "version").write_text("NVRM version: 999.1\nGCC version: 12\n")
    assert list(gpu_rows(tmp_path)) == [
        ("gpu", "NVIDIA X1, NVIDIA X1"),
        ("gpu driver", "NVRM version: 999.1"),
    ]


def test_is_writable(tmp_path: Path) -> None:
    assert is_writable(tmp_path)
    assert is_writable(tmp_path / "not" / "there" / "yet")
    (tmp_path / "file").touch()
    assert not is_writable(tmp_path / "file")
