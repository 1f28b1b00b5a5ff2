"""Which instruction set bodies are compiled for."""

from __future__ import annotations

from typing import Any

import pytest
from llvmlite import binding as llvm

from atlas.backends.cpu import target
from atlas.errors import InvalidArgumentError


class _Features(dict[str, bool]):
    def flatten(self) -> str:
        return ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(self.items()))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``host(*features)``: a machine that has these."""

    def make(*features: str) -> None:
        found = _Features(dict.fromkeys(features, True))
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: found)

    return make


def chosen(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> target.CpuTarget:
    if asked is None:
        monkeypatch.delenv("ATLAS_CPU_TARGET", raising=False)
    else:
        monkeypatch.setenv("ATLAS_CPU_TARGET", asked)
    return target.cpu_target.__wrapped__()


_V3 = ("avx2", "fma", "f16c")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ((), "plain"),
        (("avx2",), "plain"),
        (_V3, "avx2"),
        (_V4[:-1], "avx2"),  # AVX-512 without VNNI
        (_V4, "avx512"),
    ],
)
def test_the_host_decides(
    monkeypatch: pytest.MonkeyPatch, host: Any, features: tuple[str, ...], level: str
) -> None:
    host(*features)
    for asked in (None, "native"):
        found = chosen(monkeypatch, asked)
        assert found.level == level
        assert found.cpu == llvm.get_host_cpu_name()
        assert all(f"+{name}" in found.features for name in features)


def test_less_may_be_asked_for(monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    host(*_V4)
    assert chosen(monkeypatch, "avx2").level == "avx2"
    plain = chosen(monkeypatch, "plain")
    assert (plain.level, plain.features) == ("plain", "")
    assert len({chosen(monkeypatch, asked) for asked in ("native", "avx2", "plain")}) == 3


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    host("avx2")
    with pytest.raises(InvalidArgumentError, match="avx2, fma, f16c"):
        chosen(monkeypatch, "avx2")


@pytest.mark.parametrize("asked", ["", "AVX2", "avx512", "sse"])
def test_other_targets_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"{asked!r}; allowed: 'native', 'avx2', 'plain'"
    ):
        chosen(monkeypatch, asked)
