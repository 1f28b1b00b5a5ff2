"""What a step launches: recorded by the CUDA ops themselves, run by nobody."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atlas.backends.cuda.device import TensorMaps
from atlas.layers.step import StepShape
from atlas.ops.select import implementations
from tests.backends.cuda.host_gpu import HostGpu
from tests.backends.cuda.test_engine import open_engine


@pytest.mark.parametrize(
    ("batch", "in_products"),
    [
        (1, {"gemm_step_norm_bf16_c16_1": 2, "gemm_step_norm_bf16_gated_1": 2}),
        (3, {"gemm_step_norm_bf16_c16_4": 2, "gemm_step_norm_bf16_gated_4": 2}),
        (5, {}),
    ],
)
def test_norms_of_few_rows_are_in_products(
    gpu: HostGpu,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    in_products: dict[str, int],
) -> None:
    """Those that a product alone reads: two of each of two layers, but not the last one."""
    monkeypatch.setattr(TensorMaps, "address", lambda *ignored: 0)
    with open_engine(folder) as engine:
        core: Any = engine._loaded.core
        runtime = core.runtime
        runtime.functions.clear()
        runtime.functions |= implementations("cuda")
        shape = runtime.padded(StepShape.decode(batch))
        recording = runtime._record(core.network, core.buffers, shape)
        found = Counter(launch.kernel for launch in recording.launches)
        assert {name: found[name] for name in in_products} == in_products
        assert found["rmsnorm_bf16"] == (1 if in_products else 5)
