"""Sampling on the device: the tokens of ``atlas.ops.sampling.sample``, and logits left as they were."""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from atlas import sampling_table as table
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.sampling import sample as device_sample
from atlas.backends.cuda.sampling import score as device_score
from atlas.ops.elementary import exp32
from atlas.ops.sampling import sample
from atlas.sampler import TokenCounts, score_token
from atlas.sampling import SamplingParams
from tests.kernels.launches import Bench
from tests.kernels.op_launches import BenchQueue

Array = np.ndarray[Any, Any]
EOS = (3, 7)
_BROKEN = np.full(4300, np.inf)


@dataclass
class Draw:
    """A row's logits, and what its token depends on; ``unseen`` is known to the device alone."""

    logits: Array
    params: SamplingParams
    prompt_ids: list[int] = field(default_factory=lambda: [1])
    output_ids: list[int] = field(default_factory=list)
    unseen: int | None = None
    sample_index: int = 0

    @property
    def history(self) -> list[int]:
        return self.output_ids + ([] if self.unseen is None else [self.unseen])

    @property
    def position(self) -> int:
        return len(self.prompt_ids) + len(self.history)

    def expected(self) -> int:
        return sample(
            self.logits, self.params, prompt_ids=self.prompt_ids, output_ids=self.history,
            eos_token_ids=EOS, position=self.position, sample_index=self.sample_index,
        ).token_id  # fmt: skip


def _table(draws: list[Draw], rows: Array, edits: Array) -> None:
    """Rows in reverse, so that a row's number is not its place; one row of nobody at the end."""
    made = table.SamplingTable(rows, edits, np.zeros_like(rows))
    asked = []
    for i, draw in reversed(list(enumerate(draws))):
        params, fed_row = draw.params, -1 if draw.unseen is None else i
        assert table.host_reason(params, 100, draw.logits.size) is None
        counts = None
        if table.penalizes(params):
            counts = TokenCounts(np.array(draw.prompt_ids, np.int64))
        row_edits = table.RowEdits(params, EOS, counts)
        for token in draw.output_ids if counts is not None else ():
            counts.add(token, 1)
        below = len(draw.history) < params.min_tokens
        place = (i, draw.position, draw.sample_index)
        asked.append(table.Draw(params, *place, row_edits, below, fed_row))
    made.fill(asked)
    made.pad(len(draws) + 1)


def choose(bench: Bench, draws: list[Draw]) -> Array:
    """The device's tokens; logits must come out as they went in."""
    logits = np.stack([draw.logits for draw in draws]).astype(np.float32)
    wide = np.full((len(draws), logits.shape[1] + 5), np.nan, np.float32)
    wide[:, : logits.shape[1]] = logits
    fed = np.array([-1 if d.unseen is None else d.unseen for d in draws], np.int32)
    tokens = np.where(np.isfinite(logits).all(axis=1), 0, -1).astype(np.int32)
    rows = np.zeros((len(draws) + 1, 20), np.int32)
    edits = np.zeros((4096, 4), np.int32)
    _table(draws, rows, edits)
    put = bench.memory.put
    at = put(wide)
    out = put(tokens)
    device_sample(
        BenchQueue(bench, "sm_90a"),  # type: ignore[arg-type]
        DeviceArray(at, logits.shape, "float32", (wide.strides[0], 4)),
        DeviceArray(put(fed), fed.shape, "int32"),
        DeviceArray(put(rows), rows.shape, "int32"),
        DeviceArray(put(edits), edits.shape, "int32"),
        out=DeviceArray(out, tokens.shape, "int32"),
    )
    np.testing.assert_array_equal(bench.memory.get(at, wide), wide)
    return bench.memory.get(out, tokens)


def check(bench: Bench, draws: list[Draw]) -> None:
    np.testing.assert_array_equal(choose(bench, draws), [draw.expected() for draw in draws])


def _normal(seed: int, size: int, scale: float = 3.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def test_filters(bench: Bench) -> None:
    size, params = 700, SamplingParams
    filters = [
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 500},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"top_k": 300, "top_p": 0.8, "min_p": 0.01},
        {"top_p": 0.95, "min_p": 0.02},
        {"top_k": 5000, "top_p": 0.999},
    ]
    draws = [
        Draw(
            _normal(i, size),
            params(temperature=(1.0, 0.7, 1.6)[i % 3], seed=11 * i, **options),
            sample_index=i,
        )
        for i, options in enumerate(filters)
    ]
    check(bench, draws)


def test_temperature_alone_and_extremes(bench: Bench) -> None:
    params, size = SamplingParams, 600
    flat = np.zeros(size, np.float32)
    ties = np.repeat(_normal(3, size // 4), 4)
    spread = np.linspace(-3e38, 3e38, size, dtype=np.float32)
    draws = [
        Draw(flat, params(temperature=1.0, seed=2**64 - 1)),
        Draw(flat, params(temperature=0.5, seed=1, top_p=0.3)),
        Draw(flat, params(temperature=0.5, seed=1, top_k=577)),
        Draw(ties, params(temperature=1.3, seed=5, top_k=301)),
        Draw(ties, params(temperature=2.0, seed=6, top_p=0.6)),
        Draw(spread, params(temperature=1.0, seed=7)),
        Draw(spread, params(temperature=1e6, seed=7, top_p=0.5)),
        Draw(_normal(8, size), params(temperature=1e-6, seed=7, top_k=400)),
        Draw(_normal(9, size), params(temperature=0.05, seed=7, top_p=0.99, top_k=400)),
        Draw(_normal(10, size), params(temperature=1e6, seed=7, min_p=1e-40)),
        Draw(_normal(11, size), params(temperature=1.0, seed=7, min_p=1.0)),
        Draw(_normal(12, size, 1e-3), params(temperature=1.0, seed=7, top_p=0.9)),
    ]
    check(bench, draws)


def test_small_vocabularies(bench: Bench) -> None:
    params = SamplingParams
    for size in (17, 256, 257):
        check(
            bench,
            [
                Draw(_normal(size, size), params(temperature=1.0, seed=1)),
                Draw(_normal(size + 1, size), params(temperature=1.0, seed=2, top_p=0.5)),
                Draw(_normal(size + 2, size), params(temperature=1.0, seed=3, top_k=size + 4)),
            ],
        )


def test_bias_bans_and_penalties(bench: Bench) -> None:
    params, size = SamplingParams, 900
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.7}
    prompt, output = [5, 9, 9, 800, 31], [9, 3, 700, 700, 700, 12]
    bias = {9: -2.5, 31: 4.0, 3: 8.0, 450: 1.0, 899: -1e4}
    one = {"temperature": 0.9, "seed": 3}
    draws = [
        Draw(_normal(0, size), params(**penalties), prompt, output),
        Draw(_normal(1, size), params(**one, **penalties), prompt, output, unseen=700),
        Draw(_normal(2, size), params(**one, **penalties, top_p=0.8), prompt, output, unseen=77),
        Draw(_normal(3, size), params(**one, presence_penalty=1.5), prompt, output, unseen=9),
        Draw(_normal(4, size), params(**one, logit_bias=bias, top_k=30), prompt, output),
        Draw(_normal(5, size), params(logit_bias=bias, min_tokens=20), prompt, output, unseen=1),
        Draw(_normal(6, size), params(**one, min_tokens=20), prompt, output),
        Draw(
            _normal(7, size),
            params(**one, **penalties, logit_bias=bias, min_tokens=20, bad_words=((0,), (898,))),
            prompt, output, unseen=898,
        ),
        Draw(_normal(8, size), params(**one, min_tokens=20, top_p=0.9), prompt, output),
        Draw(_normal(9, size), params(**one, min_tokens=3, min_p=0.2), prompt, output),
    ]  # fmt: skip
    check(bench, draws)


def test_a_row_that_is_not_finite_has_no_token(bench: Bench) -> None:
    params, size = SamplingParams, 300
    broken = _normal(1, size)
    broken[250] = np.nan
    huge = np.full(size, 3e38, np.float32)
    draws = [
        Draw(broken, params(temperature=1.0, seed=1)),
        Draw(_normal(2, size), params(temperature=1.0, seed=1)),
        Draw(huge, params(temperature=1.0, seed=1, frequency_penalty=-2), [1], [4]),
        Draw(-huge, params(repetition_penalty=100.0), [1], [4]),
    ]
    found = choose(bench, draws)
    assert found[0] == -1
    assert found[1] == draws[1].expected()
    assert found[2] == draws[2].expected()  # −2 · 1 adds nothing to 3e38
    assert found[3] == -1, "an adjusted logit that overflows"


def test_more_candidates_than_a_list_holds(bench: Bench) -> None:
    params, size = SamplingParams, 5200
    draws = [
        Draw(_normal(1, size, 0.5), params(temperature=1.0, seed=1, top_p=0.97)),
        Draw(_normal(2, size, 0.5), params(temperature=1.0, seed=2, top_k=5000, top_p=0.9)),
        Draw(_normal(3, size, 0.5), params(temperature=1.0, seed=3, min_p=0.05)),
    ]
    check(bench, draws)


_SEVERAL = 2 * 16384 + 77
_ACROSS = [0, 1, 16383, 16384, 20000, 32768, _SEVERAL - 1]
_TIES = np.append(np.repeat(_normal(8, 20), _SEVERAL // 20), np.zeros(_SEVERAL % 20))


@pytest.mark.parametrize(
    "rows",
    [
        [(_ACROSS, {"top_p": 0.95}), (3.0, {"top_k": 900}), (3.0, {})],
        [(3.0, {"min_p": 0.02}), (0.7, {"top_p": 0.9}), (1.0, {"top_k": 9000, "top_p": 0.8})],
        [(3.0, {"min_tokens": 20, "bad_words": ((9,), (20000,))}), (_TIES, {"top_p": 0.8})],
    ],
    ids=["short lists", "long lists", "bans and ties"],
)
def test_several_parts(bench: Bench, rows: list[tuple[Any, dict[str, Any]]]) -> None:
    """Thread blocks share a row whose address is no multiple of 16."""
    draws = []
    for i, (shape, options) in enumerate(rows):
        logits = _normal(i, _SEVERAL, shape if isinstance(shape, float) else 3.0)
        if shape is _ACROSS:
            logits[_ACROSS] = 15.0
        if shape is _TIES:
            logits = _TIES.astype(np.float32)
        draws.append(Draw(logits, SamplingParams(temperature=0.8, seed=i, **options)))
    check(bench, draws)


def test_a_guess_of_the_nucleus_that_is_too_small(bench: Bench) -> None:
    """All logits but two in one bin: the estimate of their mass is far off."""
    logits = np.full(600, -0.001, np.float32)
    logits[[40, 500]] = 0.0, -31.0
    logits[1::2] -= np.float32(0.028)
    draws = [
        Draw(logits, SamplingParams(temperature=0.01, seed=seed, top_p=p))
        for seed, p in ((1, 0.5), (2, 0.9999), (3, 0.999999))
    ]
    check(bench, draws)


def test_log_probabilities(bench: Bench) -> None:
    """Of the best ids too, also where too many are alike for a list."""
    size, put = 4300, bench.memory.put
    logits = np.stack([_normal(1, size), np.repeat(_normal(2, 43), 100), np.zeros(size), -_BROKEN])
    logits = logits.astype(np.float32)
    tops, chosen = [20, 7, 3, 0], np.array([4000, 5, 4299, -1], np.int32)
    rows, nothing = np.zeros((4, 20), np.int32), table.RowEdits(SamplingParams(), ())
    made = table.SamplingTable(np.zeros_like(rows), np.zeros((9, 4), np.int32), rows)
    made.fill(
        [table.Draw(SamplingParams(logprobs=n), i, 1, 0, nothing) for i, n in enumerate(tops)]
    )
    scores = np.zeros((4, table.SCORE_WORDS), np.int32)
    want, out = scores.copy(), put(scores)
    device_score(
        BenchQueue(bench, "sm_90a"),  # type: ignore[arg-type]
        DeviceArray(put(logits), logits.shape, "float32"),
        DeviceArray(put(rows), rows.shape, "int32"),
        DeviceArray(put(chosen), chosen.shape, "int32"),
        out=DeviceArray(out, scores.shape, "int32"),
    )
    table.score_tokens(logits, rows, chosen, scores=want)
    got = bench.memory.get(out, scores)
    np.testing.assert_array_equal(got, want)
    found = table.Scores(got, made.score_places)
    for i in range(3):
        token = int(chosen[i])
        assert found.sampled(i, token) == score_token(logits[i], token, tops[i])


def test_scaled_is_a_division(bench: Bench) -> None:
    """And ``exp32_falling`` of it ``exp32``; by the inverse, or without it near the extremes."""
    from atlas_kernels import elementary, ptx_async, ptx_memory, ptx_warp, sampling_parts
    from atlas_kernels.registry import KERNELS, register

    scaled, inverse_of, exp = (
        sampling_parts.scaled, sampling_parts.inverse_of, elementary.exp32_falling,
    )  # fmt: skip
    load, store, thread, block = (
        ptx_memory.load_f32, ptx_memory.store_f32, ptx_warp.thread_x, ptx_warp.block_x,
    )  # fmt: skip

    launch_dependents, wait = ptx_async.launch_dependents, ptx_async.wait_prerequisites

    def probe(values, temperatures, out, weights, greatest, low):
        launch_dependents()
        wait()
        at = (block() * 256 + thread()) * 4
        temperature = load(temperatures + at)
        inverse = inverse_of(temperature, greatest, low)
        x = scaled(load(values + at), greatest, temperature, inverse)
        store(out + at, x)
        store(weights + at, exp(x))

    register(probe, "sampling_probe", args="ptr ptr ptr ptr f32 f32", threads=256)
    try:
        random, size = np.random.default_rng(1), 1 << 14
        for greatest in (7.3, -0.4, 3e-20, 0.0, 1e36):
            spread = np.exp(random.uniform(-16, 5, size)) * max(abs(greatest), 1e-3)
            values = (np.float32(greatest) - spread).astype(np.float32)
            values[:9] = greatest
            temperatures = np.exp(random.uniform(-16, 14, size)).astype(np.float32)
            temperatures[::3] = random.choice([1.0, 0.7, 1.3, 0.99999994, 1.0000001], size)[::3]
            out = np.zeros(size, np.float32)
            put = bench.memory.put
            args = [put(values), put(temperatures), put(out), put(out)]
            low = np.float32(values.min())
            bench.run("sampling_probe", (size // 256, 1), [*args, np.float32(greatest), low])
            with np.errstate(over="ignore", under="ignore"):
                want = (values - np.float32(greatest)) / temperatures
            got = bench.memory.get(args[2], out)
            np.testing.assert_array_equal(
                got.view(np.int32)[want != 0], want.view(np.int32)[want != 0]
            )
            assert (got[want == 0] == 0).all()
            np.testing.assert_array_equal(bench.memory.get(args[3], out), exp32(want))
    finally:
        KERNELS.pop("sampling_probe")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32000, 151936, 262144])
def test_real_vocabularies(gpu: Any, size: int) -> None:
    """Many rows at once on a GPU, all kinds of parameters."""
    from tests.kernels.launches import gpu_bench

    params = SamplingParams
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.05},
        {"top_k": 64, "top_p": 0.95, "min_p": 0.01},
        {"top_p": 0.999, "repetition_penalty": 1.1},
        {"top_k": 20000},
        {"min_tokens": 50, "top_p": 0.95, "presence_penalty": 0.5},
    ]
    draws = [
        Draw(
            _normal(i, size, (1.0, 3.0, 6.0)[i % 3]),
            params(temperature=(0.6, 1.0, 1.4)[i // 8 % 3], seed=i, **kinds[i % 8]),
            prompt_ids=[1, 2, 3, 500, 500],
            output_ids=[9, 9, 77],
            unseen=9 if i % 2 else None,
        )
        for i in range(24)
    ]
    check(gpu_bench(gpu), draws)
