"""Every kernel compiles; what the assembler says of it; the manifest; the cache in use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.compiling import ROTATED
from tests.kernels.conftest import HAS_COMPILER, NO_COMPILER

if not HAS_COMPILER:
    pytest.skip(NO_COMPILER, allow_module_level=True)

from atlas_kernels import build, cache
from atlas_kernels.build import KernelBuildError
from atlas_kernels.manifest import KernelInfo
from atlas_kernels.moe_plan import GATE_UP_TILES, ROUTED_VARIANTS, decode_kernels
from atlas_kernels.ptx_memory import load_f32, store_f32
from atlas_kernels.registry import KERNELS, load_table, register

TYPES = ("bf16", "f32")
_OLD = "the assembler for sm_80 takes far more registers than for sm_90; cause not found"
_FULL = "72 bytes, beside 192 accumulators in 255 registers"
_FEW = "up to 56 bytes, none on sm_90a; other forms of the code moved them elsewhere"
SPILLS: dict[str, dict[str, str]] = {
    "sm_80": {
        **{f"attention_decode_d{dim}_r32": _OLD for dim in (64, 80, 96, 128)},
        **{f"attention_decode_d{dim}_r16": _OLD for dim in (80, 96, 128, 256)},
        **{f"attention_step_d{dim}_r32": _OLD for dim in (64, 80, 96, 128)},
        **{f"attention_step_d{dim}_r16": _OLD for dim in (64, 80, 96, 128, 256)},
        **{f"cross_attention_d{dim}_r32": _OLD for dim in (64, 80, 96, 128)},
        **{f"cross_attention_d{dim}_r16": _OLD for dim in (64, 80, 96, 128, 256)},
        "attention_prefill_d128_k32": _FULL,
        **{f"gated_delta_{op}step_d128_{type}": _OLD for op in ("", "mixer_") for type in TYPES},
        **{f"gated_delta_chunk_d128_{type}": _OLD for type in TYPES},
        **{f"mamba2_step_n{size}_{type}": _OLD for size in (64, 128, 256) for type in TYPES},
    },
    "sm_120": {
        "attention_prefill_d128_k32": _FULL,
        **{f"attention_step_{variant}": _FEW for variant in ("d64_r32", "d128_r16", "d128_r32")},
    },
}
"""Kernels that may spill on an architecture, each with the reason."""


PREDICATED_HINT = re.compile(r"@\S+\s+cp\.async[^;]*cache_hint")
LATE_TRIGGERS = tuple(
    f"{decode_kernels(name)[0]}{choice}"
    for name in GATE_UP_TILES
    for choice in ("", *(f"_{experts}" for experts in ROUTED_VARIANTS))
)
"""Kernels that let the next one start after their own wait: it reads what came before both."""


@pytest.fixture(autouse=True)
def _in_cache(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(kernel_cache))


@pytest.mark.usefixtures("every_kernel")
@pytest.mark.parametrize("arch", ["sm_90a", ROTATED])
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    table = {info.name: info for info in build.kernel_table(arch)}
    assert sorted(table) == build.names_for(arch)
    assert len(table) > 60
    spilling = [info.name for info in table.values() if info.spill_bytes or info.stack_bytes]
    allowed = SPILLS.get(arch, {})
    assert [name for name in spilling if name not in allowed] == []
    assert [name for name in allowed if name not in spilling] == [], "no longer an exception"
    for info in table.values():
        assert info.warnings == (), info.name
        # All that launch bounds promise: min_blocks thread blocks fit an SM's registers.
        assert info.registers * info.threads * info.min_blocks <= 65536
        assert info.static_shared_bytes <= 48 * 1024


@pytest.mark.usefixtures("every_kernel")
def test_ptx_is_clean(ptx_of: Callable[[str], str]) -> None:
    letters = {"ptr": "u64", "i64": "u64", "i32": "u32", "f32": "f32"}
    for name in build.names_for("sm_90a"):
        ptx, declared = ptx_of(name), load_table()[name]
        assert re.findall(r"\.visible \.entry (\w+)\(", ptx) == [f"atlas_{name}"]
        assert re.findall(r"\.param \.(\w+) ", ptx) == [letters[kind] for kind in declared.kinds]
        assert f".maxntid {declared.threads}," in ptx
        # No mangled names, no accidental float64, no calls, no local memory, no printing.
        for unwanted in ("_ZN", ".f64", "call", ".local", "vprintf", ".global .align"):
            assert unwanted not in ptx, f"{unwanted} in {name}"
        # The assembler of CUDA 13.0 gives it other registers for the hint than those that hold it.
        assert not PREDICATED_HINT.search(ptx), f"a predicated copy with a cache hint in {name}"
        trigger, wait = (
            ptx.index("griddepcontrol.launch_dependents"),
            ptx.index("griddepcontrol.wait"),
        )
        assert (trigger > wait) == (name in LATE_TRIGGERS), name


def test_older_architectures_have_no_dependent_launch() -> None:
    from atlas_kernels.registry import Architecture

    declared = build.find("add_bf16")
    ptx = build.compile_body(declared.make(), declared, Architecture.parse("sm_80")).decode()
    assert "griddepcontrol" not in ptx
    assert ".target sm_80" in ptx


def test_a_manifest_is_complete(tmp_path: Path) -> None:
    names = ["rmsnorm_bf16", "argmax_final"]
    infos = build.build_all("sm_90a", tmp_path / "out", names=names)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    norm = manifest["kernels"][0]
    assert norm["entry"] == "atlas_rmsnorm_bf16"
    assert norm["arguments"][-1] == ["eps", "f32"]
    assert norm["threads"] == 512
    assert norm["static_shared_bytes"] == 128 + 512 * 32  # warps' sums, threads' weights
    assert 16 < norm["registers"] <= 64
    assert norm["source_hash"] == cache.source_hash()
    read = build.read_folder(tmp_path / "out")
    assert [read[name].info for name in names] == infos
    assert all(b".text.atlas_" + name.encode() in read[name].cubin for name in names)
    assert KernelInfo.from_json(infos[0].to_json()) == infos[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "add_f32.cubin").write_bytes(b"?"), "damaged"),
        (lambda folder: (folder / "add_f32.cubin").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 0}'), "format 0"),
    ],
)
def test_a_wrong_folder_is_refused(tmp_path: Path, change: Callable[..., None], words: str) -> None:
    build.build_all("sm_90a", tmp_path, names=["add_f32"])
    change(tmp_path)
    with pytest.raises(KernelBuildError, match=words):
        build.read_folder(tmp_path)


def test_a_folder_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build_all("sm_90a", tmp_path, names=["add_f32"])
    monkeypatch.setattr(build, "source_hash", lambda: "changed")
    with pytest.raises(KernelBuildError, match="add_f32 was built from other sources"):
        build.read_folder(tmp_path)


def test_a_damaged_entry_is_compiled_again() -> None:
    first = build.load("add_f32", "sm_90a")
    cache.entry_path("add_f32", "sm_90a").write_bytes(b"damage")
    compiled: list[str] = []
    again = build.load("add_f32", "sm_90a", on_compile=compiled.append)
    assert compiled == ["add_f32"]
    assert again == first, "compiling is deterministic"
    assert cache.read_entry("add_f32", "sm_90a") == first
    build.load("add_f32", "sm_90a", on_compile=compiled.append)
    assert compiled == ["add_f32"]


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(KernelBuildError, match="no kernel is called nonsense; there are add_bf16"):
        build.load("nonsense", "sm_90a")
    with pytest.raises(ValueError, match="architecture sm_75"):
        build.load("add_f32", "sm_75")
    with pytest.raises(KernelBuildError, match="kernel add_f32 for sm_81"):
        build.load("add_f32", "sm_81")


def test_a_kernel_of_ones_own() -> None:
    def double(x, out, count):
        for i in range(count):
            store_f32(out + i * 4, load_f32(x + i * 4) * missing)  # noqa: F821

    declared = register(double, "double", args="ptr ptr i32", threads=32)
    try:
        with pytest.raises(KernelBuildError, match=r"(?s)kernel double for sm_90a:.*missing"):
            build.load("double", "sm_90a")

        def twice(x, out, count):
            for i in range(count):
                store_f32(out + i * 4, load_f32(x + i * 4) + load_f32(x + i * 4))

        declared = register(twice, "double", args="ptr ptr i32", threads=32, arch="sm_90a")
        kernel = build.load("double", "sm_90a")
        assert b".text.atlas_double" in kernel.cubin
        assert kernel.info.source_hash != cache.source_hash()
        assert not cache.entry_path("double", "sm_90a").exists()
        with pytest.raises(KernelBuildError, match="needs sm_90a, not sm_80"):
            build.compile_kernel(declared, "sm_80")
    finally:
        KERNELS.pop("double")


def _python(code: str, **env: str) -> str:
    """Standard output of a process of its own."""
    run = [sys.executable, "-c", code]
    return subprocess.run(
        run, env=os.environ | env, check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_a_warm_start_imports_no_compiler(kernel_cache: Path) -> None:
    build.load("add_f32", "sm_90a")
    code = """
import sys
from atlas_kernels import build
kernel = build.load("add_f32", "sm_90a", on_compile=lambda name: sys.exit("compiled"))
packages = {module.split(".")[0] for module in sys.modules}
print(len(kernel.cubin), sorted(packages & {"numba", "cuda", "llvmlite"}))
"""
    size, modules = _python(code, ATLAS_CACHE_DIR=str(kernel_cache)).split(" ", 1)
    assert int(size) > 1000
    assert modules.strip() == "[]"


def test_processes_may_compile_the_same_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(tmp_path))
    names = ["cast_f16_f32", "cast_f32_f16"]
    code = f"from atlas_kernels import build; build.load_all({names}, 'sm_90a')"
    workers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == [f"{name}.cubin" for name in names]
    found = build.load_all(names, "sm_90a", on_compile=lambda name: pytest.fail(f"{name} again"))
    assert list(found) == names


def test_several_processes_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(tmp_path))
    seen: list[str] = []
    names = ["cast_f16_f32", "cast_f32_f16"]
    built = build.load_all(names, "sm_90a", jobs=2, on_compile=seen.append)
    assert sorted(seen) == names
    assert [kernel.info.name for kernel in built.values()] == names
