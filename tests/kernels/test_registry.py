"""Declarations: architectures and what ``@kernel`` refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from atlas_kernels import registry
from atlas_kernels.registry import KERNELS, Architecture, KernelDeclarationError, kernel, register

from tests.kernels.conftest import HAS_COMPILER, NO_COMPILER


@pytest.mark.parametrize(
    ("text", "capability", "number"),
    [("sm_80", 80, "80"), ("sm_90a", 90, "90a"), ("sm_100", 100, "100"), ("sm_120a", 120, "120a")],
)
def test_architectures(text: str, capability: int, number: str) -> None:
    found = Architecture.parse(text)
    assert (found.capability, found.number, str(found)) == (capability, number, text)


@pytest.mark.parametrize("text", ["sm_75", "sm_7", "90", "sm_90b", "compute_90", ""])
def test_other_architectures_are_refused(text: str) -> None:
    with pytest.raises(KernelDeclarationError, match="allowed: sm_80"):
        Architecture.parse(text)


def test_what_runs_where() -> None:
    parse = Architecture.parse
    assert parse("sm_120").runs(parse("sm_80"))
    assert parse("sm_90a").runs(parse("sm_90a"))
    assert not parse("sm_80").runs(parse("sm_90"))
    assert not parse("sm_100").runs(parse("sm_90a"))
    assert not parse("sm_90").runs(parse("sm_90a"))
    assert str(Architecture.of_device(9, 0)) == "sm_90a"
    assert str(Architecture.of_device(8, 9)) == "sm_89"


def _nothing(x: int) -> None:
    """A kernel's function that is never compiled."""


@pytest.fixture
def table() -> Iterator[dict[str, registry.Kernel]]:
    """The table, put back afterwards."""
    if not HAS_COMPILER:
        pytest.skip(NO_COMPILER)
    before = dict(registry.load_table())
    yield KERNELS
    KERNELS.clear()
    KERNELS.update(before)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"args": "ptr u8"}, "argument kind 'u8'"),
        ({"threads": 33}, "33 threads; allowed: 32"),
        ({"threads": 2048}, "2048 threads"),
        ({"op": "My-Op"}, "kernel name 'My-Op'"),
        ({"op": "rmsnorm_bf16"}, "kernel rmsnorm_bf16 exists"),
        ({"arch": "sm_70"}, "architecture sm_70"),
    ],
)
def test_refused_declarations(changes: dict[str, Any], words: str) -> None:
    options = {"op": "probe", "args": "ptr", "threads": 32} | changes
    with pytest.raises(KernelDeclarationError, match=words):
        kernel(options.pop("op"), **options)(_nothing)
    assert "probe" not in KERNELS


def test_kinds_are_the_parameters_one_to_one() -> None:
    if not HAS_COMPILER:
        pytest.skip(NO_COMPILER)
    declared = register(_nothing, "probe", args="ptr i32", threads=32)
    KERNELS.pop("probe")
    with pytest.raises(KernelDeclarationError, match=r"1 parameters \(x\) but 2 kinds"):
        registry.argument_names(_nothing, declared)


def test_variants_and_their_settings(table: dict[str, registry.Kernel]) -> None:
    @kernel(
        "probe",
        args="ptr",
        threads=lambda size: 32 * size,
        shared=lambda size: 1024 * size,
        variants={"small": (1,), "large": (4,)},
    )
    def make(size: int) -> Any:
        def probe(x: int) -> None:
            """Differs between the variants."""

        probe.__name__ = f"probe{size}"
        return probe

    small, large = table["probe_small"], table["probe_large"]
    assert (small.entry, large.entry) == ("atlas_probe_small", "atlas_probe_large")
    assert (small.threads, large.threads, large.shared_bytes) == (32, 128, 4096)
    assert (small.make().__name__, large.make().__name__) == ("probe1", "probe4")
    assert not small.is_builtin
    assert table["rmsnorm_bf16"].is_builtin


def test_a_kernel_of_ones_own_may_be_declared_again_or_replace_ours(
    table: dict[str, registry.Kernel],
) -> None:
    register(_nothing, "probe", args="ptr", threads=32)
    assert register(_nothing, "probe", args="ptr", threads=64).threads == 64
    with pytest.raises(KernelDeclarationError, match="rmsnorm_bf16 takes ptr ptr ptr i32"):
        register(_nothing, "rmsnorm_bf16", args="ptr", threads=32, replace=True)
    args = "ptr ptr ptr i32 i64 i64 f32"
    register(_nothing, "rmsnorm_bf16", args=args, threads=32, replace=True)
    assert not registry.load_table()["rmsnorm_bf16"].is_builtin
    assert not table["rmsnorm_bf16"].is_builtin
