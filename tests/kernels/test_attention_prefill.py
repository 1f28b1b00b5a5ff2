"""Paged prefill attention against the op's definition, and bit by bit against itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.launches import Bench, close, gpu_bench, machine_bench
from tests.kernels.ptx_machine import Memory, launch
from tests.kernels.sequences import Sequences, prefill, put_pools

Chunks = list[tuple[int, int]]
CASES = [
    (Sequences([140, 20], 4, 2, 64), [(0, 140), (17, 20)], "d64_k64"),
    (Sequences([90], 1, 1, 80, window=40), [(20, 90)], "d80_k64"),
    (Sequences([50], 2, 1, 96, softcap=20.0), [(0, 50)], "d96_k32"),
    (Sequences([100], 2, 1, 128, softcap=5.0, window=70), [(1, 100)], "d128_k32"),
    (Sequences([70], 1, 1, 256), [(0, 70)], "d256_k16"),
    (Sequences([140, 20], 4, 2, 64), [(0, 140), (17, 20)], "wgmma_d64"),
    (Sequences([290, 5], 1, 1, 64, softcap=9.0, window=40), [(90, 290), (0, 5)], "wgmma_d64_cap"),
    (Sequences([150, 33], 3, 1, 96, window=100), [(0, 150), (32, 33)], "wgmma_d96"),
    (Sequences([129], 2, 1, 96, softcap=20.0), [(1, 129)], "wgmma_d96_cap"),
    (Sequences([16, 420], 2, 2, 128), [(0, 16), (250, 420)], "wgmma_d128"),
    (Sequences([300], 2, 1, 128, window=1), [(128, 300)], "wgmma_d128"),
    (Sequences([200], 2, 1, 128, softcap=5.0, window=70), [(1, 200)], "wgmma_d128_cap"),
    (Sequences([163, 7], 8, 1, 256), [(0, 163), (0, 7)], "wgmma_d256"),
    (Sequences([300, 81], 2, 2, 256, window=90), [(130, 300), (80, 81)], "wgmma_d256"),
    (Sequences([240], 2, 1, 256, softcap=5.0), [(64, 240)], "wgmma_d256_cap"),
]


def _rows(chunks: Chunks) -> list[tuple[int, int]]:
    return [(n, at) for n, chunk in enumerate(chunks) for at in range(*chunk)]


def _compare(bench: Bench, given: Sequences, chunks: Chunks, form: str) -> None:
    got = prefill(bench, given, put_pools(bench, given), chunks, form)
    close(got, given.definition(_rows(chunks)), "bf16", 4e-3)


@pytest.mark.parametrize(("given", "chunks", "form"), CASES, ids=[case[2] for case in CASES])
def test_prefill(bench: Bench, given: Sequences, chunks: Chunks, form: str) -> None:
    _compare(bench, given, chunks, form)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (200, 0.0), (333, 30.0)])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads"), [(64, 8, 2), (96, 3, 3), (128, 4, 2), (256, 16, 2)]
)
def test_wgmma_at_length(
    gpu: Any, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch,
    dim: int, heads: int, kv_heads: int, window: int, softcap: float,
) -> None:  # fmt: skip
    """On Hopper: the definition, and any chunks, alone or among others, give the same bits."""
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(kernel_cache))
    lengths = [1700, 9, 129, 640]
    bench = gpu_bench(gpu)
    given = Sequences(lengths, heads, kv_heads, dim, window=window, softcap=softcap)
    pools, form = put_pools(bench, given), f"wgmma_d{dim}{'_cap' if softcap else ''}"
    chunks = [(0, length) for length in lengths]
    whole = prefill(bench, given, pools, chunks, form)
    close(whole[::41], given.definition(_rows(chunks)[::41]), "bf16", 4e-3)
    first_of = np.cumsum([0, *lengths])
    for cut in ([0, 13, 300, 301, 1153, 1700], [0, 64, 128, 1280, 1281, 1700]):
        for first, end in itertools.pairwise(cut):
            others = [(0, 0), (0, 5), (first % 600, 640)]
            got, at = prefill(bench, given, pools, [(first, end), *others], form), 0
            for n, (one, past) in enumerate([(first, end), *others]):
                want = whole[first_of[n] + one : first_of[n] + past]
                np.testing.assert_array_equal(got[at : at + past - one], want)
                at += past - one
    gpu.free()


@pytest.mark.parametrize(
    ("form", "dim", "window", "softcap"),
    [
        ("d64_k64", 64, 0, 0.0),
        ("d64_k64", 64, 50, 0.0),
        ("wgmma_d64", 64, 50, 0.0),
        ("wgmma_d128", 128, 0, 0.0),
        ("wgmma_d256", 256, 0, 0.0),
        ("wgmma_d256_cap", 256, 70, 5.0),
    ],
)
def test_any_chunks_give_the_same_bits(
    bench: Bench, form: str, dim: int, window: int, softcap: float
) -> None:
    given = Sequences([170, 9], 2, 1, dim, window=window, softcap=softcap)
    pools = put_pools(bench, given)
    whole = prefill(bench, given, pools, [(0, 170), (0, 9)], form)
    for first, end in [(0, 13), (13, 77), (77, 170)]:
        part = prefill(bench, given, pools, [(first, end), (0, 0)], form)
        np.testing.assert_array_equal(part.view(np.int32), whole[first:end].view(np.int32))


@pytest.mark.parametrize("form", ["d64_k64", "wgmma_d64", "wgmma_d128"])
def test_first_rows_that_are_left_out(bench: Bench, form: str) -> None:
    """The others have the bits that they have beside these, which are not written."""
    given = Sequences([170, 9, 140], 2, 1, 128 if form.endswith("128") else 64)
    pools, chunks = put_pools(bench, given), [(0, 170), (0, 9), (3, 140)]
    whole = prefill(bench, given, pools, chunks, form)
    for left_out in ([169, 8, 136], [0, 9, 1], [170, 0, 137], [41, 4, 125]):
        part, at = prefill(bench, given, pools, chunks, form, left_out), 0
        for (first, end), left in zip(chunks, left_out, strict=True):
            rows = slice(at + left, at + end - first)
            np.testing.assert_array_equal(part[rows].view(np.int32), whole[rows].view(np.int32))
            assert np.isnan(part[at : at + left]).all()
            at += end - first


def test_every_tile_has_one_thread_block(kernel_cache: Path) -> None:
    from atlas_kernels import attention_tiles, build
    from atlas_kernels.attention_plan import wgmma_tiles
    from atlas_kernels.ptx_async import wait_prerequisites
    from atlas_kernels.ptx_memory import store_b32
    from atlas_kernels.ptx_warp import block_y
    from atlas_kernels.registry import KERNELS, Architecture, register

    find_tile = attention_tiles.find_tile

    def probe(out, first_rows, cu_rows, positions, sequences):
        wait_prerequisites()
        sequence, tile = find_tile(block_y(), sequences, first_rows, cu_rows, positions)
        store_b32(out + block_y() * 8, sequence)
        store_b32(out + block_y() * 8 + 4, tile)

    declared = register(probe, "probe", args="ptr ptr ptr ptr i32", threads=32)
    ptx = build.compile_body(probe, declared, Architecture.parse("sm_90a")).decode()
    KERNELS.pop("probe")
    rng = np.random.default_rng(3)
    for lengths in ([1], [128], [0, 2], [257, 0, 1], rng.integers(0, 600, 77).tolist()):
        starts = rng.integers(0, 5000, len(lengths))
        left_out = [int(rng.integers(0, length + 1)) for length in lengths]
        tiles = [
            [*range((start + length - 1) // 128 - (start + left) // 128 + 1)]
            if length > left
            else []
            for start, length, left in zip(starts.tolist(), lengths, left_out, strict=True)
        ]
        last = [(n, 0) for n in range(len(lengths))]  # also of a chunk without rows
        others = [(n, tile) for n, own in enumerate(tiles) for tile in own[1:]]
        memory, blocks = Memory(), wgmma_tiles(sum(lengths), len(lengths))
        assert blocks >= len(last + others)
        cu_rows = np.cumsum([0, *lengths]).astype(np.int32)
        positions = [
            at + n for at, count in zip(starts, lengths, strict=True) for n in range(count)
        ]
        first_rows = (cu_rows[:-1] + left_out).astype(np.int32)
        args = [memory.put(np.zeros((blocks, 2), np.int32))]
        args += [memory.put(first_rows), memory.put(cu_rows)]
        args += [memory.put(np.array(positions, np.int32)), len(lengths)]
        launch(ptx, (1, blocks), 32, args, memory)
        found = memory.get(args[0], np.zeros((blocks, 2), np.int32)).tolist()
        want = [*last, *others] + [(-1, 0)] * (blocks - len(last + others))
        assert [tuple(pair) for pair in found] == want


_WAIT = "wgmma.wait_group.sync.aligned"
FAULTS = {
    "scores read before they are there": (f"{_WAIT} 1;", ""),
    "values read before they are there": (f"{_WAIT} 0;", f"{_WAIT} 1;"),
    "keys not released": ("@q mbarrier.arrive.shared::cta.b64 _, ", "@q prefetch.global.L2 "),
    "a group that lets the other wait": ("bar.arrive ", "prefetch.global.L2 "),
    "values behind the last key": ("st.shared.v4.b32 ", "prefetch.global.L2 "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_sees_what_wgmma_kernels_get_wrong(
    ptx_of: Callable[[str], str], fault: str
) -> None:
    """Otherwise the tests above would prove little."""
    given, (right, wrong) = Sequences([660], 1, 1, 64), FAULTS[fault]
    assert right in ptx_of("attention_prefill_wgmma_d64")
    _compare(machine_bench(ptx_of), given, [(640, 660)], "wgmma_d64")
    bench = machine_bench(lambda name: ptx_of(name).replace(right, wrong))
    with pytest.raises(AssertionError):
        _compare(bench, given, [(640, 660)], "wgmma_d64")
