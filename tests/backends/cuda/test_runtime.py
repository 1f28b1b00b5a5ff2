"""The CUDA runtime on the host's memory: the CPU's results, whatever the bucket, eager or graph."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from atlas.backends.cuda import fetch
from atlas.errors import CapabilityError, KernelError, OutOfMemoryError, StaleHandleError
from atlas.model.batch import Window, build
from atlas.model.circuit import ForwardSelection
from atlas.model.load import LoadedModel
from atlas.model.records import PrefillSlice
from tests.backends.cuda.host_gpu import HostGpu
from tests.helpers.random_model import load_random

TOLERANCE = 0.08  # of the greatest logit: activations, weights and KV are rounded to bfloat16
TOKENS = [5, 88, 140, 11]
PROMPT = (np.arange(37) * 7 % 203).astype(np.int32)


@pytest.fixture
def loaded(gpu: HostGpu) -> Iterator[LoadedModel]:
    model = load_random("dense_wide", "bf16", device="cuda", kv_tokens=1024)
    yield model
    model.core.close()


@pytest.fixture(params=["dense_wide", "wide_heads", "moe_wide"])
def on_cuda(cuda: str, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """A model on the host's memory and, under ``-m gpu``, on a GPU."""
    model = load_random(request.param, "bf16", device="cuda", kv_tokens=2048)
    yield model
    model.core.close()


def rows_of(loaded: LoadedModel, steps: int = 3) -> np.ndarray[Any, Any]:
    """Logits of a prompt's end and of some steps."""
    model = loaded.model
    seq = model.lifecycle.alloc_sequence()
    rows = [model.logits.to_host(model.forward.prefill(PROMPT, seq))]
    for token in TOKENS[:steps]:
        rows.append(model.logits.to_host(model.forward.decode(token, seq)))
    model.lifecycle.free_sequence(seq)
    return np.concatenate(rows)


@pytest.mark.parametrize("name", ["dense_wide", "gemma_wide", "wide_heads", "moe_wide"])
@pytest.mark.parametrize("format", ["bf16", "f32", "q8_0"])
def test_the_logits_are_the_cpu_s(cuda: str, name: str, format: str) -> None:
    on_gpu = load_random(name, format, device="cuda", kv_tokens=1024)
    on_cpu = load_random(name, format, kv_tokens=1024)
    got, want = rows_of(on_gpu), rows_of(on_cpu)
    assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()
    on_gpu.core.close()
    on_cpu.core.close()


def test_eager_and_graphed_agree_bitwise(on_cuda: LoadedModel) -> None:
    graphed = rows_of(on_cuda)
    on_cuda.model.circuit.set_forward(ForwardSelection("eager"))
    np.testing.assert_array_equal(rows_of(on_cuda), graphed)


def test_decode_steps_are_graphs_where_asked(gpu: HostGpu, loaded: LoadedModel) -> None:
    rows_of(loaded)
    assert "graph" in gpu.log
    loaded.model.circuit.set_forward(ForwardSelection("eager"))
    gpu.log.clear()
    rows_of(loaded)
    assert "graph" not in gpu.log


def test_a_prompt_in_any_chunks_gives_one_pass_s_bits(on_cuda: LoadedModel) -> None:
    model, prompt = on_cuda.model, (np.arange(333) * 13 % 203).astype(np.int32)
    whole = model.lifecycle.alloc_sequence()
    want = model.logits.to_host(model.forward.prefill(prompt, whole))
    for cuts in ([7, 140], [1, 2, 200, 332], [128, 256]):
        seq = model.lifecycle.alloc_sequence()
        edges = [0, *cuts, len(prompt)]
        for start, end in pairwise(edges):
            view = model.forward.prefill_chunk(prompt, seq, start, end - start, end == len(prompt))
        np.testing.assert_array_equal(model.logits.to_host(view), want)
        model.lifecycle.free_sequence(seq)
    other = model.lifecycle.alloc_sequence()
    mixed = model.forward.mixed_forward([5], [whole], PrefillSlice(prompt, other, 0, 333, True))
    np.testing.assert_array_equal(model.logits.to_host(mixed.prefill_logits), want)


def test_a_sequence_comes_back_bitwise(on_cuda: LoadedModel) -> None:
    model, file = on_cuda.model, io.BytesIO()
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(PROMPT, seq)
    model.lifecycle.save_sequence_state(seq, file)
    twin = model.lifecycle.fork(seq)
    want = model.logits.to_host(model.forward.decode(9, seq))
    np.testing.assert_array_equal(model.logits.to_host(model.forward.decode(9, twin)), want)
    again = model.lifecycle.alloc_sequence()
    file.seek(0)
    model.lifecycle.restore_sequence_state(again, 4, file)
    np.testing.assert_array_equal(model.logits.to_host(model.forward.decode(9, again)), want)


def test_rows_do_not_depend_on_the_batch_or_the_bucket(on_cuda: LoadedModel) -> None:
    loaded = on_cuda
    model = loaded.model
    alone = rows_of(loaded, steps=1)
    seqs = [model.lifecycle.alloc_sequence() for _ in range(5)]
    for i, seq in enumerate(seqs):
        model.forward.prefill((PROMPT + i) % 203, seq, logits="none")
    first = model.lifecycle.alloc_sequence()
    ends = model.forward.prefill(PROMPT, first)
    np.testing.assert_array_equal(model.logits.to_host(ends)[0], alone[0])
    view = model.forward.decode_batch([1, 2, TOKENS[0], 3, 4, 5], [*seqs[:2], first, *seqs[2:]])
    np.testing.assert_array_equal(model.logits.to_host(view)[2], alone[1])
    np.testing.assert_array_equal(
        model.logits.argmax_batch(view, 6), model.logits.to_host(view).argmax(-1)
    )


def test_mixed_steps_run_under_few_shapes(on_cuda: LoadedModel) -> None:
    """However many sequences decode beside a prompt; their rows have the bits of decoding alone."""
    loaded, model = on_cuda, on_cuda.model
    alone = rows_of(loaded, steps=1)
    shapes = set()
    for others in (4, 5):
        seqs = [model.lifecycle.alloc_sequence() for _ in range(others)]
        for i, seq in enumerate(seqs):
            model.forward.prefill((PROMPT + i) % 203, seq, logits="none")
        first, prompt = model.lifecycle.alloc_sequence(), model.lifecycle.alloc_sequence()
        model.forward.prefill(PROMPT, first)
        before = set(loaded.core.runtime._recorded)
        result = model.forward.mixed_forward(
            [*range(1, others + 1), TOKENS[0]],
            [*seqs, first],
            PrefillSlice(PROMPT, prompt, 0, len(PROMPT), True),
        )
        shapes |= set(loaded.core.runtime._recorded) - before
        rows = model.logits.to_host(result.decode_logits)
        np.testing.assert_array_equal(rows[others], alone[1])
        np.testing.assert_array_equal(model.logits.to_host(result.prefill_logits)[0], alone[0])
        for seq in (*seqs, first, prompt):
            model.lifecycle.free_sequence(seq)
    assert len(shapes) == 1, shapes


def test_logits_of_some_rows_are_theirs_however_the_step_is_padded(on_cuda: LoadedModel) -> None:
    """Of three rows, that are padded to four, two have logits, and four are computed."""
    loaded, model = on_cuda, on_cuda.model
    alone, core = rows_of(loaded, steps=1), loaded.core
    seqs = [model.lifecycle.alloc_sequence() for _ in range(3)]
    for seq in seqs:
        model.forward.prefill(PROMPT, seq, logits="none")
    ids = np.array([9, TOKENS[0], TOKENS[0]], np.int32)
    with core.room(seqs, [1, 1, 1]):
        windows = [Window(seq, ids[i : i + 1], "step", int(i > 0)) for i, seq in enumerate(seqs)]
        core.run(build(windows))
        for window in windows:
            core.commit(window.seq, window.token_ids, "step")
    for row in model.logits.to_host(core.arena.claim(0, 2)):
        np.testing.assert_array_equal(row, alone[1])


def test_the_final_norm_of_a_decode_step(on_cuda: LoadedModel) -> None:
    """That of one row, which no kernel writes, is that of the row among others."""
    loaded, model = on_cuda, on_cuda.model
    seqs = [model.lifecycle.alloc_sequence() for _ in range(3)]
    for i, seq in enumerate(seqs):
        model.forward.prefill((PROMPT + i) % 203, seq, logits="none")
    twins = [model.lifecycle.fork(seq) for seq in seqs]
    prompt = model.lifecycle.alloc_sequence()

    def normed(count: int) -> np.ndarray[Any, Any]:
        rows = model.logits.hidden_after_norm()
        np.testing.assert_array_equal(model.logits.hidden_after_norm(), rows)
        if count > 1:
            kept = loaded.core.runtime.to_host(loaded.core.buffers.normed[:count])
            np.testing.assert_array_equal(kept, rows)
        return rows

    view = model.forward.decode_batch([5, 6, 7], seqs)
    want = normed(3)
    best = model.logits.argmax_batch(view, 3)
    np.testing.assert_array_equal(best, model.logits.to_host(view).argmax(-1))
    result = model.forward.mixed_forward(
        [5, 6], twins[:2], PrefillSlice(PROMPT, prompt, 0, len(PROMPT), True)
    )
    assert result.prefill_logits is not None
    np.testing.assert_array_equal(normed(2), want[:2])
    model.forward.decode(7, twins[2])
    np.testing.assert_array_equal(normed(1), want[2:])
    model.verify.decode_verify(np.array(TOKENS, np.int32), seqs[0])
    with pytest.raises(StaleHandleError):
        model.logits.hidden_after_norm()


def test_the_final_norm_in_another_thread(on_cuda: LoadedModel) -> None:
    """Which the model is handed to: its kernel runs on the model's device there too."""
    model = on_cuda.model
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(PROMPT, seq, logits="none")
    model.forward.decode(5, seq)
    want = model.logits.hidden_after_norm()

    def elsewhere() -> np.ndarray[Any, Any]:
        model.lifecycle.bind_to_thread()
        return model.logits.hidden_after_norm()

    with ThreadPoolExecutor(1) as threads:
        np.testing.assert_array_equal(threads.submit(elsewhere).result(), want)
    model.lifecycle.bind_to_thread()


def test_a_verify_is_serial_decoding(on_cuda: LoadedModel) -> None:
    loaded = on_cuda
    model = loaded.model
    serial = rows_of(loaded, steps=4)
    tokens = np.array(TOKENS, np.int32)
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(PROMPT, seq)
    result = model.verify.decode_verify(tokens, seq)
    assert result.logits is not None
    np.testing.assert_array_equal(model.logits.to_host(result.logits), serial[1:])
    np.testing.assert_array_equal(result.argmax, serial[1:].argmax(-1))
    model.verify.accept(seq, 2)
    view = model.forward.decode(int(tokens[2]), seq)
    np.testing.assert_array_equal(model.logits.to_host(view)[0], serial[3])


def test_one_kernel_brings_a_step_its_integers(gpu: HostGpu, loaded: LoadedModel) -> None:
    rows_of(loaded)
    model = loaded.model
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(PROMPT, seq)
    gpu.log.clear()
    model.forward.decode(3, seq)
    kinds = [entry.partition(" ")[0] for entry in gpu.log]
    # Wait for the region, fetch. The step. Wait for the slot, copy, record it and the region.
    assert kinds == ["wait", "fetch", "graph", "wait", "words", "record", "record"]


@pytest.mark.parametrize(
    ("fetched", "copied", "worth"),
    [
        (64 << 10, 0, True),
        ((64 << 10) + 4, 80 << 10, False),
        (80 << 10, 160 << 10, True),
        (80 << 10, 150 << 10, False),
    ],
)
def test_few_bytes_or_less_than_half_of_a_copy_s_are_fetched(
    fetched: int, copied: int, worth: bool
) -> None:
    assert fetch.worth_a_kernel(fetched, copied) == worth


def test_a_step_whose_tables_are_copied_has_the_same_bits(
    gpu: HostGpu, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = rows_of(loaded)
    assert gpu.log.count("fetch") == 3
    monkeypatch.setattr(fetch, "worth_a_kernel", lambda fetched, copied: False)
    gpu.log.clear()
    np.testing.assert_array_equal(rows_of(loaded), want)
    assert gpu.log.count("fetch") == 0
    assert gpu.log.count("graph") == 3


def test_a_fault_of_the_device_ends_the_model(gpu: HostGpu, loaded: LoadedModel) -> None:
    model = loaded.model
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(PROMPT, seq)
    gpu.fails["cuStreamSynchronize"] = 700
    with pytest.raises(KernelError, match="status 700"):
        model.logits.to_host(view)
    gpu.fails.clear()
    for _ in range(2):
        with pytest.raises(KernelError, match="failed earlier"):
            model.forward.decode(1, seq)
    loaded.core.close()


def test_what_does_not_fit_is_refused_before_anything_is_allocated(gpu: HostGpu) -> None:
    gpu.total = 1 << 20
    with pytest.raises(OutOfMemoryError, match=r"weights need .* KV cache .* MiB are free"):
        load_random("dense_wide", "bf16", device="cuda")
    assert gpu.live["memory"] == 0


def test_an_allocation_that_fails_midway_leaves_nothing(gpu: HostGpu) -> None:
    gpu.fails["cuMemHostAlloc"] = 2
    with pytest.raises(OutOfMemoryError, match="weights need"):
        load_random("dense_wide", "bf16", device="cuda")
    gpu.fails.clear()


def test_the_plan_is_a_ceiling(gpu: HostGpu, loaded: LoadedModel) -> None:
    rows_of(loaded)
    assert gpu.used <= loaded.plan.total


def test_a_model_that_needs_an_op_which_is_not_offered_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import atlas.backends.cuda
    from atlas.ops.select import implementations

    lacking = atlas.backends.cuda.NOT_OFFERED | {"softcap"}
    monkeypatch.setattr(atlas.backends.cuda, "NOT_OFFERED", lacking)
    functions = implementations("cuda")
    with pytest.raises(CapabilityError, match="op softcap is not offered on cuda"):
        functions["softcap"](None, 1, 2)
