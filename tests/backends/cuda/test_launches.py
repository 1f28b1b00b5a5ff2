"""What a step launches: recorded by the CUDA ops themselves, run by nobody."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atlas.backends.cuda.device import TensorMaps
from atlas.layers.step import StepShape
from atlas.ops.select import implementations
from tests.backends.cuda.folders import write_cuda_hybrid
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
    found = Counter(launched(folder, monkeypatch, StepShape.decode(batch)))
    assert {name: found[name] for name in in_products} == in_products
    assert found["rmsnorm_bf16"] == (1 if in_products else 5)


@pytest.mark.parametrize(
    ("shape", "attention"),
    [
        (StepShape.decode(3), ["step"]),
        (StepShape.prompt(20), ["prefill", "gate"]),
        (StepShape(21, 2, 2, 0, 1, 1, 1), ["step", "prefill", "gate"]),
    ],
)
def test_step_rows_have_their_output_gate_in_attention(
    gpu: HostGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: StepShape,
    attention: list[str],
) -> None:
    """Of three layers the second attends; in a decode step it has six kernels, as the others."""
    names = launched(write_cuda_hybrid(tmp_path / "model", "qwen3_5_moe"), monkeypatch, shape)
    kinds = {"attention_step": "step", "attention_prefill": "prefill", "sigmoid_gate": "gate"}
    found = [kind for name in names for part, kind in kinds.items() if name.startswith(part)]
    assert found == attention
    if attention == ["step"]:
        ends = [i for i, name in enumerate(names) if name.startswith("moe_down")]
        assert [end - begin for begin, end in pairwise(ends)] == [6, 6]


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, shape: StepShape) -> list[str]:
    """The kernels of a step of this shape, in order."""
    monkeypatch.setattr(TensorMaps, "address", lambda *ignored: 0)
    with open_engine(folder) as engine:
        core: Any = engine._loaded.core
        runtime = core.runtime
        runtime.functions.clear()
        runtime.functions |= implementations("cuda")
        recording = runtime._record(core.network, core.buffers, runtime.padded(shape))
        return [launch.kernel for launch in recording.launches]
