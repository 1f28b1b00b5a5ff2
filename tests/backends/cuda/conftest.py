"""Engines and models on a GPU that is the host's memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atlas.backends.cuda import backend, device, probe, runtime
from atlas.ops import linear
from tests.backends.cuda.host_gpu import HostGpu, HostKernels, exact_product, host_ops


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostGpu]:
    """``device="cuda"`` means this one; nothing of it may be left at the end."""
    made = HostGpu()
    monkeypatch.setattr(device, "Driver", lambda: made)
    monkeypatch.setattr(device, "KernelTable", HostKernels)
    monkeypatch.setattr(runtime, "implementations", lambda name: host_ops(made))
    monkeypatch.setattr(runtime, "open_products", lambda device: None)
    monkeypatch.setattr(runtime, "SCRATCH_BYTES", 1 << 16)
    monkeypatch.setattr(backend, "SCRATCH_BYTES", 1 << 16)
    monkeypatch.setattr(backend, "RESERVE_BYTES", 0)
    monkeypatch.setattr(runtime.CudaRuntime, "fingerprint", "cuda-host")
    monkeypatch.setattr(linear, "product", exact_product)
    monkeypatch.setattr(probe, "find_gpu", lambda: probe.FoundGpu(True, "the host's memory"))
    yield made
    if made.failure is None:
        left = {kind: count for kind, count in made.live.items() if count}
        assert left == {}
