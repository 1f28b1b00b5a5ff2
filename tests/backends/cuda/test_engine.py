"""The engine on a GPU that is the host's memory: requests end as they do alone, fed or not."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.backends.cuda import device, driver, probe
from atlas.errors import CapabilityError, KernelError
from atlas.event import Event
from tests.backends.cuda.host_gpu import HostGpu

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=5, top_k=20)
PROMPTS = [[3 + i, 17, 29 * i % 200, 5, 101][: 2 + i % 4] * (1 + i) for i in range(5)]


def ids_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def note(events: dict[str, list[Event]], new: list[Event]) -> None:
    for event in new:
        events.setdefault(event.request_id, []).append(event)


def open_engine(folder: Path, **options: Any) -> Engine:
    given = {"kv_tokens": 1024, "max_seq_len": 256, "quiet": True} | options
    return Engine(folder, device="cuda", **given)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_many_requests_end_as_alone_with_and_without_feed(
    cuda: str, folder: Path, params: SamplingParams
) -> None:
    with open_engine(folder, feed=False, prefix_cache=False) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in PROMPTS]
        together = [done.token_ids for done in engine.generate(PROMPTS, params)]
    with open_engine(folder, feed=True, chunk_tokens=3, prefix_cache=False) as engine:
        fed = [done.token_ids for done in engine.generate(PROMPTS, params)]
    assert together == alone
    assert fed == alone


def test_text_and_description(gpu: HostGpu, folder: Path) -> None:
    with open_engine(folder) as engine:
        assert len(engine.generate(PROMPTS[0], GREEDY).token_ids) == 12
        about = engine.describe()
        assert about["device"] == "Host GPU, cuda-host (asked for)"
        assert "bfloat16" in about["memory"]
        engine.warmup()


def test_auto_takes_a_gpu_that_is_there_unless_it_lacks_what_is_asked(
    gpu: HostGpu, folder: Path
) -> None:
    with Engine(folder, quiet=True) as engine:
        assert engine.options.device == "cuda"
        assert "the host's memory" in engine.describe()["device"]
    with Engine(folder, quiet=True, dtype="float32") as engine:
        assert engine.options.device == "cpu"


def test_auto_is_the_cpu_for_a_model_that_the_gpu_cannot_run(gpu: HostGpu, tmp_path: Path) -> None:
    from tests.engine.folders import write_model  # needs what a GPU machine may lack

    small = write_model(tmp_path / "small")  # heads of 16 dimensions
    with Engine(small, quiet=True) as engine:
        assert engine.options.device == "cpu"
        assert "head_dim is 16" in engine.describe()["device"]
    with pytest.raises(CapabilityError, match="head_dim is 16; the CUDA kernels allow 64, 80"):
        Engine(small, device="cuda", quiet=True)
    assert gpu.live["memory"] == 0


def test_the_next_step_is_launched_before_the_last_one_s_tokens_are_read(
    gpu: HostGpu, folder: Path
) -> None:
    with open_engine(folder, feed=True) as engine:
        engine.submit(PROMPTS[2], GREEDY)
        for _ in range(4):
            engine.step()
        gpu.log.clear()
        for _ in range(3):
            engine.step()
        launches = [i for i, entry in enumerate(gpu.log) if entry == "graph"]
        assert len(launches) == 3
        for this, following in pairwise(launches):
            # Behind a launch come its copy out, and the wait for the step before.
            entries = gpu.log[this:following]
            own = next(entry for entry in entries if entry.startswith("record"))
            later = entries[entries.index(own) :]
            assert own.replace("record", "wait") not in later
            assert "synchronize" not in entries
            assert "feed" in entries


def test_spilled_and_requeued_requests_end_as_alone(cuda: str, folder: Path) -> None:
    params = GREEDY.replace(max_tokens=100)
    with open_engine(folder) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in PROMPTS]
    for mode in ("spill", "requeue"):
        with open_engine(folder, kv_tokens=160, preemption=mode) as engine:
            engine._loop.scheduler.set_spill(mode == "spill")
            first = engine.submit(PROMPTS[0], params)
            events: dict[str, list[Event]] = {first: []}
            while len(ids_of(events[first])) < 30:
                note(events, engine.step())
            names = [engine.fork(first) for _ in range(2)]
            while engine.has_unfinished():
                note(events, engine.step())
            assert engine._loop.scheduler.num_preemptions > 0, mode
            for name in (first, *names):
                last = events[name][-1].completion
                assert last is not None
                assert last.token_ids == alone[0], mode


def test_a_saved_request_goes_on_bitwise(cuda: str, folder: Path, tmp_path: Path) -> None:
    with open_engine(folder) as engine:
        alone = engine.generate(PROMPTS[1], SAMPLED).token_ids
        name = engine.submit(PROMPTS[1], SAMPLED)
        for _ in range(6):
            engine.step()
        engine.save(name, tmp_path / "session")
        engine.cancel(name)
        while engine.has_unfinished():
            engine.step()
    with open_engine(folder) as other:
        name = str(other.restore(tmp_path / "session"))
        events: dict[str, list[Event]] = {}
        while other.has_unfinished():
            note(events, other.step())
        assert events[name][-1].completion is not None
        assert events[name][-1].completion.token_ids == alone


def test_a_failed_device_ends_the_engine_with_an_error_and_not_a_hang(
    gpu: HostGpu, folder: Path
) -> None:
    engine = open_engine(folder)
    engine.start()
    ends: list[Event] = []

    async def follow() -> None:
        async for event in engine.agenerate(PROMPTS[0], GREEDY.replace(max_tokens=200)):
            gpu.fails["cuEventSynchronize"] = 700
            ends.append(event)

    asyncio.run(follow())
    assert isinstance(ends[-1].error, KernelError)
    with pytest.raises(KernelError, match="failed earlier"):
        engine.generate(PROMPTS[1], GREEDY)
    assert engine.health().state == "failed"
    engine.close()


def test_logits_are_viewed_without_a_copy(gpu: HostGpu, folder: Path) -> None:
    with open_engine(folder) as engine:
        model = engine.model
        seq = model.lifecycle.alloc_sequence()
        view = model.forward.prefill(np.array(PROMPTS[3]), seq)
        assert view is not None
        interface = view.__cuda_array_interface__
        assert interface["shape"] == (1, 203)
        assert interface["typestr"] == "<f4"
        assert view.__dlpack_device__() == (2, 0)
        model.lifecycle.free_sequence(seq)


# -- machines without a usable GPU ----------------------------------------------------------------


def test_without_a_driver_cuda_is_refused_and_auto_is_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = probe.find_gpu(tmp_path)
    assert not found.usable
    assert found.words == "no NVIDIA driver is loaded"
    monkeypatch.setattr(probe, "find_gpu", lambda: found)
    monkeypatch.delenv("ATLAS_DEVICE", raising=False)
    with Engine(folder, quiet=True) as engine:
        assert engine.options.device == "cpu"
        assert "no NVIDIA driver is loaded" in engine.describe()["device"]

    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver, "ctypes", SimpleNamespace(CDLL=missing))
    with pytest.raises(CapabilityError, match=r"no NVIDIA driver: libcuda\.so\.1"):
        Engine(folder, device="cuda", quiet=True)


def test_a_gpu_that_is_too_old_is_refused_by_name(gpu: HostGpu) -> None:
    class Old(HostGpu):
        def _cuDeviceGetAttribute(self, name: str, device: int) -> Any:
            return ({"MAJOR": 7, "MINOR": 5}.get(name.rpartition("_")[2], 4),)

    with pytest.raises(CapabilityError, match=r"Host GPU has compute capability 7\.5; allowed"):
        device.CudaDevice(Old())  # type: ignore[arg-type]


def test_streams_of_other_libraries() -> None:
    class Torch:
        cuda_stream = 0x7000

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0x8000

    assert device.foreign_stream(0x6000) == 0x6000
    assert device.foreign_stream(Torch()) == 0x7000
    assert device.foreign_stream(Protocol()) == 0x8000
    with pytest.raises(ValueError, match="allowed: a handle"):
        device.foreign_stream("stream")


def test_an_engine_that_is_dropped_gives_its_memory_back(gpu: HostGpu, folder: Path) -> None:
    engine = open_engine(folder)
    engine.generate(PROMPTS[0], GREEDY)
    assert gpu.used > 0
    del engine
    gc.collect()
    assert gpu.used == 0
