"""``atlas bundle``. What is in a bundle is tested with the C library."""

from __future__ import annotations

from pathlib import Path

import pytest

import atlas.bundle
from atlas.cli import run


def test_a_bundle_is_written_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[tuple[Path, bool]] = []

    def write(folder: Path, *, with_model: bool) -> Path:
        written.append((folder, with_model))
        return folder

    monkeypatch.setattr(atlas.bundle, "bundle", write)
    assert run(["bundle", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert run(["bundle", "--with-model", "--out", str(tmp_path / "out")]) == 0
    assert written == [(tmp_path / "out", False), (tmp_path / "out", True)]


def test_a_folder_with_something_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(["bundle", "--out", str(tmp_path)]) == 2
    assert "no empty folder" in capsys.readouterr().err


def test_a_place_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bundle"]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_bundle_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(out: Path, *_: object) -> None:
        (out / "lib").mkdir(parents=True)
        (out / "lib" / "half").touch()
        raise OSError("the disk is full")

    monkeypatch.setattr(atlas.bundle, "python_library", lambda: tmp_path / "libpython.so")
    monkeypatch.setattr(atlas.bundle, "_write", fail)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "empty"):
        with pytest.raises(OSError, match="the disk is full"):
            atlas.bundle.bundle(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_kernels_must_be_there_to_be_bundled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(atlas.bundle, "python_library", lambda: tmp_path / "libpython.so")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["bundle", "--out", str(tmp_path / "out")]) != 0
    assert "no atlas_kernels" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
