"""Hybrid models on a GPU, or on the host's memory in its place: state, chunks, verify, rewinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.errors import CapabilityError
from tests.backends.cuda.folders import write_cuda_hybrid
from tests.backends.cuda.host_gpu import HostGpu

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=5, top_k=20)
LONG = [3 + (11 * i) % 190 for i in range(150)]
BRANCH = [*LONG[:140], 9, 9]
PROMPTS = [LONG[:70], [3, 17, 29], LONG[40:103], LONG[:65], [5, 101]]
TOLERANCE = 0.06
"""Of a row of logits, relative: weights, activations, KV and the factors of a chunk's products in
bfloat16. With the definitions in place of the kernels, which rounds all but the last, it is 0.011
to 0.037; on an H200 0.014 to 0.025.
"""
FAMILIES = ["qwen3_5_moe", "bamba"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cuda_hybrid(tmp_path_factory.mktemp("hybrid"), request.param)


def open_engine(folder: Path, **options: Any) -> Engine:
    given = {"kv_tokens": 1024, "max_seq_len": 256, "quiet": True} | options
    return Engine(folder, device="cuda", **given)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_many_requests_end_as_alone_with_and_without_feed(
    cuda: str, folder: Path, params: SamplingParams
) -> None:
    """Chunks of 64 rows, prompts that end between two of them, and prompts beside step rows."""
    with open_engine(folder, feed=False, prefix_cache=False) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in PROMPTS]
        together = [done.token_ids for done in engine.generate(PROMPTS, params)]
    with open_engine(folder, feed=True, chunk_tokens=64, prefix_cache=False) as engine:
        fed = [done.token_ids for done in engine.generate(PROMPTS, params)]
    assert together == alone
    assert fed == alone


def test_a_prompt_split_at_chunks_has_the_bits_of_one_pass(cuda: str, folder: Path) -> None:
    with open_engine(folder, prefix_cache=False) as engine, engine.paused() as model:
        whole = model.lifecycle.alloc_sequence()
        want = model.forward.prefill(LONG, whole).numpy()[0].copy()
        state = engine._loaded.core.states.pools.read(whole.slot)
        for ends in ([64, 150], [128, 150], [64, 128, 150], [128, 149, 150]):
            seq, start = model.lifecycle.alloc_sequence(), 0
            for end in ends:
                last = end == len(LONG)
                view = model.forward.prefill_chunk(LONG, seq, start, end - start, last)
                start = end
            np.testing.assert_array_equal(view.numpy()[0], want)
            for part, kept in zip(
                engine._loaded.core.states.pools.read(seq.slot), state, strict=True
            ):
                np.testing.assert_array_equal(part, kept)
            model.lifecycle.free_sequence(seq)
        model.lifecycle.free_sequence(whole)


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_a_verify_and_every_accept_have_the_bits_of_single_steps(
    cuda: str, folder: Path, rows: int
) -> None:
    """Rows of a step and steps of a row; an accept leaves state, tail and cache as those steps."""
    drafted = [7, 150, 33, 8, 91, 64, 12, 180][:rows]
    with open_engine(folder, prefix_cache=False) as engine, engine.paused() as model:
        pools = engine._loaded.core.states.pools
        serial = model.lifecycle.alloc_sequence()
        model.forward.prefill(LONG[:70], serial)
        want, states = [], [pools.read(serial.slot)]
        for token in drafted:
            want.append(model.forward.decode(token, serial).numpy()[0].copy())
            states.append(pools.read(serial.slot))
        for count in range(rows + 1):
            seq = model.lifecycle.alloc_sequence()
            model.forward.prefill(LONG[:70], seq)
            result = model.verify.decode_verify(drafted, seq)
            assert result.logits is not None
            np.testing.assert_array_equal(result.logits.numpy(), want)
            model.verify.accept(seq, count)
            for part, kept in zip(pools.read(seq.slot), states[count], strict=True):
                np.testing.assert_array_equal(part, kept)
            if count < rows:
                after = model.forward.decode(drafted[count], seq).numpy()[0]
                np.testing.assert_array_equal(after, want[count])
            model.lifecycle.free_sequence(seq)
        model.lifecycle.free_sequence(serial)


def test_snapshots_serve_prompts_and_rewinds(cuda: str, folder: Path) -> None:
    """A second turn goes on from a kept state, and a rewound request as one run to there."""
    params = GREEDY.replace(max_tokens=40)
    with open_engine(folder, prefix_cache=False) as engine:
        plain, other = engine.generate([LONG, BRANCH], params)
    with open_engine(folder, reuse_generated=False) as engine:
        assert engine.generate(LONG, params).token_ids == plain.token_ids
        second = engine.generate(BRANCH, params)
        assert second.token_ids == other.token_ids
        assert second.usage.cached_tokens == 128
        name = engine.submit(LONG, params)
        produced = 0
        while produced < 30:
            produced += sum(len(event.token_ids) for event in engine.step())
        standing = engine.rewind(name, 160)
        assert standing.token_ids == plain.token_ids[:10]
        last = None
        while engine.has_unfinished():
            for event in engine.step():
                last = event.completion or last
        assert last is not None
        assert last.token_ids == plain.token_ids


def test_spilled_forked_and_saved_requests_end_as_alone(
    cuda: str, folder: Path, tmp_path: Path
) -> None:
    params = GREEDY.replace(max_tokens=60)
    with open_engine(folder, prefix_cache=False) as engine:
        alone = engine.generate(LONG, params).token_ids
        name = engine.submit(LONG, params)
        for _ in range(20):
            engine.step()
        engine.save(name, tmp_path / "session")
    for mode in ("spill", "requeue"):
        with open_engine(folder, kv_tokens=304, preemption=mode, prefix_cache=False) as engine:
            engine._loop.scheduler.set_spill(mode == "spill")
            names = [engine.restore(tmp_path / "session")]
            engine.step()
            names += [engine.fork(names[0]) for _ in range(2)]
            done = {}
            while engine.has_unfinished():
                for event in engine.step():
                    if event.completion is not None:
                        done[event.request_id] = event.completion.token_ids
            assert engine._loop.scheduler.num_preemptions > 0, mode
            assert [done[name] for name in names] == [alone] * 3, mode


def test_a_whole_prompt_in_two_phases_is_a_prefill(cuda: str, folder: Path) -> None:
    with open_engine(folder, prefix_cache=False) as engine, engine.paused() as model:
        seqs = [model.lifecycle.alloc_sequence() for _ in range(2)]
        want = model.forward.prefill(LONG, seqs[0]).numpy()[0].copy()
        got = model.forward.prefill_twophase(LONG, seqs[1], 64).numpy()[0]
        np.testing.assert_array_equal(got, want)
        for seq in seqs:
            model.lifecycle.free_sequence(seq)


def test_logits_are_near_the_cpu_s(cuda: str, folder: Path) -> None:
    """Weights, activations and KV in bfloat16 against float32, prompt and 8 steps.

    Where two experts are as good as each other, rounding may choose the other one: in one row.
    """
    distances = np.sort(distances_from_cpu(folder))
    assert distances[-2] < TOLERANCE
    assert distances[-1] < (0.5 if "moe" in folder_family(folder) else TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe_apart"])
def test_dense_layers_and_wide_shared_experts_are_near_the_cpu_s(
    cuda: str, tmp_path: Path, family: str
) -> None:
    assert distances_from_cpu(write_cuda_hybrid(tmp_path / "model", family)).max() < TOLERANCE


def folder_family(folder: Path) -> str:
    """``model_type`` of a folder's config."""
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def distances_from_cpu(folder: Path) -> np.ndarray[Any, Any]:
    """‖logits on the GPU − on the CPU‖ / ‖…‖ of each row: a prompt's last and 8 steps."""
    found = []
    for device in ("cpu", "cuda"):
        options = {"kv_tokens": 1024, "max_seq_len": 256, "quiet": True, "prefix_cache": False}
        with Engine(folder, device=device, **options) as engine, engine.paused() as model:
            seq = model.lifecycle.alloc_sequence()
            rows = [model.forward.prefill(LONG, seq).numpy()[0].copy()]
            for token in LONG[:8]:
                rows.append(model.forward.decode(token, seq).numpy()[0].copy())
            model.lifecycle.free_sequence(seq)
            found.append(np.array(rows))
    differences = np.linalg.norm(found[1] - found[0], axis=1)
    return np.asarray(differences / np.linalg.norm(found[0], axis=1))


def test_the_head_that_predicts_further_is_kept(gpu: HostGpu, tmp_path: Path) -> None:
    with open_engine(write_cuda_hybrid(tmp_path / "model", "qwen3_5_moe")) as engine:
        head = engine._loaded.core.network.mtp
        assert head is not None
        assert head.inputs.rows == 128


def test_auto_takes_the_cpu_where_no_kernel_takes_the_heads(gpu: HostGpu, tmp_path: Path) -> None:
    small = write_cuda_hybrid(tmp_path / "small", "small_heads")
    with Engine(small, quiet=True) as engine:
        assert engine.options.device == "cpu"
        assert "key_dim is 32" in engine.describe()["device"]
    with pytest.raises(CapabilityError, match="key_dim is 32"):
        Engine(small, quiet=True, device="cuda")
