"""Paged prefill attention against the op's definition, and bit by bit against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.launches import Bench, close, gpu_bench
from tests.kernels.sequences import Sequences, prefill, put_pools

CASES = [
    (Sequences([140, 20], 4, 2, 64), [(0, 140), (17, 20)], "d64_k64"),
    (Sequences([90], 1, 1, 80, window=40), [(20, 90)], "d80_k64"),
    (Sequences([50], 2, 1, 96, softcap=20.0), [(0, 50)], "d96_k32"),
    (Sequences([100], 2, 1, 128, softcap=5.0, window=70), [(1, 100)], "d128_k32"),
    (Sequences([70], 1, 1, 256), [(0, 70)], "d256_k16"),
]


@pytest.mark.parametrize(("given", "chunks", "form"), CASES, ids=[case[2] for case in CASES])
def test_prefill(bench: Bench, given: Sequences, chunks: list[tuple[int, int]], form: str) -> None:
    got = prefill(bench, given, put_pools(bench, given), chunks, form)
    want = given.definition([(n, at) for n, chunk in enumerate(chunks) for at in range(*chunk)])
    close(got, want, "bf16", 4e-3)


@pytest.mark.gpu
def test_wgmma(gpu: Any, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper: the definition, and any chunks give the same bits."""
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(kernel_cache))
    bench, given = gpu_bench(gpu), Sequences([700, 9, 129], 4, 2, 128)
    pools = put_pools(bench, given)
    chunks = [(0, 700), (0, 9), (0, 129)]
    whole = prefill(bench, given, pools, chunks, "wgmma_d128")
    want = given.definition([(n, at) for n, chunk in enumerate(chunks) for at in range(*chunk)])
    close(whole, want, "bf16", 4e-3)
    for first, end in [(0, 13), (13, 300), (300, 301), (301, 700)]:
        part = prefill(bench, given, pools, [(first, end), (0, 0), (0, 5)], "wgmma_d128")
        np.testing.assert_array_equal(part[: end - first], whole[first:end])
        np.testing.assert_array_equal(part[end - first :], whole[709:714])
    gpu.free()


@pytest.mark.parametrize("window", [0, 50])
def test_any_chunks_give_the_same_bits(bench: Bench, window: int) -> None:
    given = Sequences([150, 9], 2, 1, 64, window=window)
    pools = put_pools(bench, given)
    whole = prefill(bench, given, pools, [(0, 150), (0, 9)], "d64_k64")
    for first, end in [(0, 13), (13, 77), (77, 150)]:
        part = prefill(bench, given, pools, [(first, end), (0, 0)], "d64_k64")
        np.testing.assert_array_equal(part, whole[first:end])
