"""Tensors and streams shared with torch on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch() -> Any:
    library = pytest.importorskip("torch")
    if not library.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return library


def test_torch_views_logits_and_keys_without_a_copy(folder: Path, torch: Any) -> None:
    with Engine(folder, device="cuda", quiet=True, kv_tokens=256, max_seq_len=256) as engine:
        model = engine.model
        seq = model.lifecycle.alloc_sequence()
        view = model.forward.prefill([3, 4, 5, 6, 7], seq)
        assert view is not None
        model.streams.synchronize(model.streams.default)
        rows = torch.from_dlpack(view)
        assert rows.data_ptr() == view.device_rows.address
        assert rows.is_cuda
        np.testing.assert_array_equal(rows.cpu().numpy(), model.logits.to_host(view))
        same = torch.as_tensor(view.device_rows, device="cuda")
        assert same.data_ptr() == rows.data_ptr()
        keys = torch.from_dlpack(engine._loaded.core.pools.keys[0])
        assert keys.dtype == torch.bfloat16
        block = int(seq.block_table[0])
        assert bool(keys[block, :, :5].abs().sum() > 0)
        assert not bool(keys[block, :, 5:].any())
        model.lifecycle.free_sequence(seq)


def test_an_engine_runs_on_a_stream_of_torch(folder: Path, torch: Any) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with Engine(folder, device="cuda", quiet=True, kv_tokens=256, max_seq_len=256) as engine:
        expected = engine.generate([3, 4, 5], params).token_ids
    stream = torch.cuda.Stream()
    with Engine(
        folder, device="cuda", stream=stream, quiet=True, kv_tokens=256, max_seq_len=256
    ) as engine:
        model = engine.model
        assert model.streams.handle(model.streams.default) == stream.cuda_stream
        assert engine.generate([3, 4, 5], params).token_ids == expected
    stream.synchronize()  # it is still there


def test_a_kernel_of_one_s_own_takes_an_op_s_place_at_run_time(folder: Path) -> None:
    """Registered like a notebook's cell would, switched in, and switched out again."""
    pytest.importorskip("numba_cuda")
    from atlas_kernels._cuda import i64
    from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
    from atlas_kernels.ptx_memory import load_b16, store_b16
    from atlas_kernels.ptx_warp import block_x, thread_x
    from atlas_kernels.registry import register

    from atlas.model.circuit import ForwardSelection

    def copy_rows(x, out, columns, x_stride, out_stride):  # type: ignore[no-untyped-def]
        launch_dependents()
        wait_prerequisites()
        for i in range(thread_x(), columns, 128):
            value = load_b16(x + block_x() * x_stride + i64(i) * 2)
            store_b16(out + block_x() * out_stride + i64(i) * 2, value)

    register(copy_rows, "my_norm", args="ptr ptr i32 i64 i64", threads=128)

    def rmsnorm(queue: Any, x: Any, weight: Any, eps: float, *, out: Any) -> None:
        args = (x, out, x.shape[1], x.strides[0], out.strides[0])
        queue.launch("my_norm", (len(x), 1), args)

    with Engine(folder, device="cuda", quiet=True, kv_tokens=256, max_seq_len=256) as engine:
        model = engine.model
        assert model.circuit is not None

        def logits() -> Any:
            seq = model.lifecycle.alloc_sequence()
            row = model.logits.to_host(model.forward.prefill([3, 4, 5], seq))
            model.lifecycle.free_sequence(seq)
            return row

        before = logits()
        model.circuit.set_forward(ForwardSelection("graphed", {"rmsnorm": rmsnorm}))
        assert not np.array_equal(logits(), before)
        assert model.circuit.disclosure().replaced_ops == ("rmsnorm",)
        model.circuit.set_forward(ForwardSelection("graphed"))
        np.testing.assert_array_equal(logits(), before)
