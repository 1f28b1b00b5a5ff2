"""What a step launches: recorded by the CUDA ops themselves, run by nobody."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atlas_kernels import attention_plan, gemm_norm_plan
from atlas_kernels.attention_plan import DOWN_TO_OUTPUT, LOOP
from atlas_kernels.registry import argument_names, load_table
from hypothesis import example, given
from hypothesis import strategies as st

from atlas.backends.cuda.buckets import bucket
from atlas.backends.cuda.device import TensorMaps
from atlas.backends.cuda.launch import Queue, Recording, carveout
from atlas.layers.step import StepShape
from atlas.ops.select import implementations
from tests.backends.cuda.folders import write_cuda_hybrid
from tests.backends.cuda.host_gpu import HostGpu
from tests.backends.cuda.test_engine import open_engine
from tests.kernels.conftest import NO_COMPILER


@pytest.mark.parametrize(
    ("batch", "in_products", "apart"),
    [
        (1, {"gemm_step_norm_bf16_c16": 3, "gemm_step_norm_bf16_pair": 2}, 0),
        (2, {}, 5),
        (3, {}, 5),
    ],
)
def test_norms_of_one_row_are_in_products(
    gpu: HostGpu,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    in_products: dict[str, int],
    apart: int,
) -> None:
    """Those that a product alone reads: two of each of two layers, and the head's."""
    found = Counter(launched(folder, monkeypatch, StepShape.decode(batch)))
    fused = {name: count for name, count in found.items() if "norm" in name and "gemm" in name}
    assert fused == in_products
    assert found["rmsnorm_bf16"] == apart


ONE_EACH = np.ones(3, np.int32)


@pytest.mark.parametrize(
    ("shape", "gathers"),
    [
        (StepShape.decode(1), 0),
        (StepShape.decode(3), 0),
        (StepShape.of(3, 3, 3, 5, ONE_EACH), 0),  # elsewhere in the arena, where none is padded
        (StepShape.of(4, 1, 4, 0, np.array([4], np.int32)), 0),  # a verify
        (StepShape.of(6, 3, 6, 0, np.array([3, 1, 2], np.int32)), 0),
        (StepShape.of(3, 3, 2, 0, ONE_EACH), 1),  # padded to four rows, all with logits
        (StepShape.of(4, 1, 1, 0, np.array([4], np.int32)), 1),
        # With prompts, also what the rows attended to in the last layer.
        (StepShape.of(23, 4, 4, 0, ONE_EACH), 2),
        (StepShape.of(4, 4, 4, 0, ONE_EACH), 2),  # a prompt of one token, behind padding
        (StepShape.prompt(8, 8), 2),
        (StepShape.prompt(20, 0), 0),
    ],
)
def test_rows_that_all_have_logits_are_not_gathered(
    gpu: HostGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: StepShape, gathers: int
) -> None:
    names = launched(folder, monkeypatch, shape)
    assert sum(name.startswith("gather_rows") for name in names) == gathers


@given(rows=st.lists(st.integers(1, 5), min_size=1, max_size=40), first=st.sampled_from([0, 7]))
def test_padded_logits_are_rows_of_a_step_that_is_not_gathered(rows: list[int], first: int) -> None:
    steps = np.array(rows, np.int32)
    total = int(steps.sum())
    shape = StepShape.of(total, len(rows), total, first, steps)
    padded = bucket(shape, 256, 64, 256)
    assert shape.all_logits
    assert padded.all_logits
    assert total <= padded.logits <= padded.rows


@given(
    steps=st.lists(st.integers(1, 5), max_size=40),
    prompts=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    share=st.floats(0, 1),
    first=st.sampled_from([0, 7]),
)
@example(steps=[1], prompts=[128], share=1.0, first=0)
def test_no_more_rows_with_logits_than_rows(
    steps: list[int], prompts: list[int], share: float, first: int
) -> None:
    """Feed-forwards behind the last mixer have room for those only."""
    rows = sum(steps) + sum(prompts)
    logits = round(share * rows)
    shape = StepShape.of(rows, len(steps) + len(prompts), logits, first, np.array(steps, np.int32))
    padded = bucket(shape, 4096, 128, 4096)
    assert logits <= padded.logits <= padded.rows


@pytest.mark.parametrize(
    ("shape", "attention", "a_layer"),
    [
        (StepShape.decode(1), ["step"], 6),
        (StepShape.decode(3), ["step"], 7),  # and a norm of several rows
        (StepShape.prompt(20), ["prefill", "gate"], 0),
        (StepShape(21, 2, 2, 0, 1, 1, 1), ["step", "prefill", "gate"], 0),
    ],
)
def test_step_rows_have_their_output_gate_in_attention(
    gpu: HostGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: StepShape,
    attention: list[str],
    a_layer: int,
) -> None:
    """Of three layers the second attends; in a decode step it has as many kernels as the others."""
    names = launched(write_cuda_hybrid(tmp_path / "model", "qwen3_5_moe"), monkeypatch, shape)
    kinds = {"attention_step": "step", "attention_prefill": "prefill", "sigmoid_gate": "gate"}
    found = [kind for name in names for part, kind in kinds.items() if name.startswith(part)]
    assert found == attention
    if a_layer:
        ends = [i for i, name in enumerate(names) if name.startswith("moe_down")]
        assert [end - begin for begin, end in pairwise(ends)] == [a_layer, a_layer]
        blocks = [name for name in names if name.startswith("moe")]
        rows = "r1" if a_layer == 6 else "r8"
        block = ("moe_scores_d2048", f"moe_gate_up_bf16_{rows}_e128")
        assert blocks == [*block, f"moe_down_bf16_{rows}"] * 3, "the experts' first kernel chooses"


@pytest.mark.parametrize(
    ("long_product", "pace", "far"), [(1 << 60, "few", LOOP), (0, "all", DOWN_TO_OUTPUT)]
)
def test_a_product_leaves_attention_time(
    gpu: HostGpu,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    long_product: int,
    pace: str,
    far: int,
) -> None:
    """A short one paces its requests, and attention behind it does not rehearse to the end."""
    pytest.importorskip("numba_cuda", reason=NO_COMPILER)  # declarations name the arguments
    monkeypatch.setattr(attention_plan, "_LONG_PRODUCT", long_product)
    monkeypatch.setattr(gemm_norm_plan, "_SHORT_PRODUCT", long_product)
    launches = recorded(folder, monkeypatch, StepShape.decode(1))
    table, found = load_table(), []
    for before, launch in pairwise(launches):
        if launch.kernel.startswith("attention_step"):
            names = [argument_names(table[at.kernel].make(), table[at.kernel])
                     for at in (before, launch)]  # fmt: skip
            stages = before.args[names[0].index("pace")]
            found.append(("few" if stages else "all", launch.args[names[1].index("rehearsal")]))
    assert found == [(pace, far)] * 2


def test_a_queue_forgets_a_product_behind_another_launch() -> None:
    device: Any = None
    queue = Queue(device, device, Recording())
    for launch in (
        lambda: queue.launch("rmsnorm_bf16", (1, 1), ()),
        lambda: queue.matmul(1, ()),
        lambda: queue.call(lambda stream: None),
    ):
        queue.reading = 1 << 20
        launch()
        assert queue.reading == 0


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, shape: StepShape) -> list[str]:
    """The kernels of a step of this shape, in order."""
    return [launch.kernel for launch in recorded(folder, monkeypatch, shape)]


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, shape: StepShape) -> list[Any]:
    """The launches of a step of this shape, in order."""
    monkeypatch.setattr(TensorMaps, "address", lambda *ignored: 0)
    with open_engine(folder) as engine:
        core: Any = engine._loaded.core
        runtime = core.runtime
        runtime.functions.clear()
        runtime.functions |= implementations("cuda")
        recording = runtime._record(core.network, core.buffers, runtime.padded(shape))
        return list(recording.launches)


def test_kernels_that_take_long_have_l1() -> None:
    """Those without dynamic shared memory, of so many blocks that none starts early anyway."""
    assert carveout(0, 4 * 132 + 1, 132, (9, 0)) == 50
    assert carveout(0, 4 * 132, 132, (9, 0)) == -1
    assert carveout(16, 100_000, 132, (9, 0)) == -1
    assert carveout(0, 100_000, 132, (8, 9)) == -1, "a smaller SM would lose thread blocks"
