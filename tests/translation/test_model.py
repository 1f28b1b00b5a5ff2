"""An encoder-decoder driven by hand: the capability groups' contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from atlas import Engine
from atlas.errors import (
    CapabilityError,
    InvalidArgumentError,
    KvExhausted,
    PromptTooLongError,
    SequenceStateError,
    WrongThreadError,
)
from atlas.model import Model
from atlas.model.records import BeamRequest, PrefillSlice
from atlas.model.sequence import SequenceState
from tests.helpers.translation_model import SOURCE, START, TARGET, ReferenceTranslator


@pytest.fixture
def model(engine: Engine) -> Iterator[Model]:
    with engine.paused() as model:
        free = model.lifecycle.num_free_blocks
        yield model
        assert model.lifecycle.num_free_blocks == free


def new(model: Model, source: int = SOURCE, target: int = TARGET) -> SequenceState:
    seq = model.lifecycle.alloc_sequence()
    seq.source_language, seq.target_language = source, target
    return seq


def ask(source: list[int], **changes: Any) -> BeamRequest:
    fields: dict[str, Any] = {
        "prompt_tokens": source,
        "src_lang_id": SOURCE,
        "tgt_lang_id": TARGET,
        "adapter_slot": -1,
        "num_beams": 4,
        "max_new": 10,
        "length_penalty": 1.0,
        "early_stopping": False,
    }
    return BeamRequest(**fields | changes)


@pytest.mark.contract("forward.supports_beam")
def test_supports_beam(model: Model) -> None:
    assert model.forward.supports_beam is True
    assert model.forward.requires_single_chunk is True
    assert model.forward.kv_block_size == 16
    assert model.ssm is None
    assert model.draft is None


@pytest.mark.contract("forward.generate_beam_batch")
def test_generate_beam_batch(model: Model, reference: ReferenceTranslator) -> None:
    """Parallel to the requests, best first, end tokens included; alone or together."""
    requests = [
        ask(reference.text(9), num_return=4),
        ask(reference.text(3), num_beams=1),
        ask(reference.text(30), num_beams=16, num_return=2, early_stopping="never"),
    ]
    together = model.forward.generate_beam_batch(requests)
    assert [len(found) for found in together] == [4, 1, 2]
    for request, found in zip(requests, together, strict=True):
        assert model.forward.generate_beam_batch([request]) == [found]
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for hypothesis in found:
            ends = hypothesis.token_ids[-1] == START
            assert ends or len(hypothesis.token_ids) == request.max_new
            assert START not in hypothesis.token_ids[:-1]
    assert model.forward.generate_beam_batch([]) == []


def test_a_sequence_begins_behind_start_token_and_tag(
    model: Model, reference: ReferenceTranslator
) -> None:
    seq = new(model)
    view = model.forward.prefill(reference.text(5), seq)
    assert view is not None
    assert view.shape == (1, reference.vocab_size)
    assert seq.tokens.tolist() == [START, TARGET]
    assert seq.seq_len == seq.prompt_len == 2
    last = model.forward.decode(40, seq).numpy().copy()
    assert seq.tokens.tolist() == [START, TARGET, 40]
    hidden = model.logits.hidden_after_norm()
    assert hidden.shape == (1, 64)
    want = reference.logits(reference.text(5), [START, TARGET, 40])[-1]
    np.testing.assert_allclose(last[0], want, rtol=0, atol=1e-4 * np.abs(want).max())
    model.lifecycle.free_sequence(seq)
    model.lifecycle.free_sequence(seq)  # idempotent


def test_batches_are_rows_of_single_runs(model: Model, reference: ReferenceTranslator) -> None:
    """Decode rows and new sources in one sweep: bitwise what each gives alone."""
    texts = [reference.text(length, seed=4) for length in (1, 16, 33)]
    alone = []
    for text in texts:
        seq = new(model)
        first = np.asarray(model.forward.prefill(text, seq))
        alone.append([first, np.asarray(model.forward.decode(50, seq))])
        model.lifecycle.free_sequence(seq)
    seqs = [new(model) for _ in texts]
    assert model.forward.prefill(texts[0], seqs[0], logits="none") is None
    mixed = model.forward.mixed_forward_batch(
        [50],
        seqs[:1],
        [
            PrefillSlice(text, seq, 0, len(text), True)
            for text, seq in zip(texts[1:], seqs[1:], strict=True)
        ],
    )
    assert mixed.decode_logits is not None
    assert np.asarray(mixed.decode_logits).tobytes() == alone[0][1].tobytes()
    for view, (want, _) in zip(mixed.prefill_logits, alone[1:], strict=True):
        assert view is not None
        assert np.asarray(view).tobytes() == want.tobytes()
    batch = np.asarray(model.forward.decode_batch([50, 50], seqs[1:]))
    assert batch.tobytes() == b"".join(row[1].tobytes() for row in alone[1:])
    for seq in seqs:
        model.lifecycle.free_sequence(seq)


def test_a_fork_shares_source_and_blocks(model: Model, reference: ReferenceTranslator) -> None:
    seq = new(model)
    model.forward.prefill(reference.text(20), seq)
    free = model.lifecycle.num_free_blocks
    twin = model.lifecycle.fork(seq)
    assert model.lifecycle.num_free_blocks == free
    ours = np.asarray(model.forward.decode(60, twin))
    model.lifecycle.free_sequence(twin)
    assert np.asarray(model.forward.decode(60, seq)).tobytes() == ours.tobytes()
    model.lifecycle.free_sequence(seq)


def test_verify_rows_are_those_of_serial_decode(
    model: Model, reference: ReferenceTranslator
) -> None:
    tokens = [30, 31, 32, 33]
    seq, twin = new(model), new(model)
    for each in (seq, twin):
        model.forward.prefill(reference.text(7), each)
    serial = np.concatenate([np.asarray(model.forward.decode(token, seq)) for token in tokens])
    verified = model.verify.decode_verify(tokens, twin)
    assert verified.logits is not None
    assert np.asarray(verified.logits).tobytes() == serial.tobytes()
    model.verify.accept(twin, 2)
    assert twin.tokens.tolist() == [START, TARGET, 30, 31]
    model.lifecycle.rewind(seq, 4)
    one, other = (np.asarray(model.forward.decode(35, each)) for each in (seq, twin))
    assert one.tobytes() == other.tobytes()
    for each in (seq, twin):
        model.lifecycle.free_sequence(each)


def test_a_rewind_to_nothing_gives_the_source_back(
    model: Model, reference: ReferenceTranslator
) -> None:
    seq = new(model)
    model.forward.prefill(reference.text(40), seq)
    model.lifecycle.rewind(seq, 0)
    model.forward.prefill(reference.text(3), seq)
    model.lifecycle.free_sequence(seq)


class Recorder:
    """An op namespace that counts the calls on each weight matrix."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.reads: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._ops, name)
        if not name.startswith("linear"):
            return call

        def counted(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            self.reads[id(weight)] = self.reads.get(id(weight), 0) + 1
            return call(x, weight, *args, **kwargs)

        return counted


def test_every_weight_is_read_once(engine: Engine, reference: ReferenceTranslator) -> None:
    """One product per matrix in a sweep, whatever requests and beam widths share it."""
    core: Any = engine._loaded.core
    recorder = Recorder(core.runtime.ops)
    sweeps: list[dict[int, int]] = []
    original = core.runtime.run

    def run(network: Any, buffers: Any, shape: Any) -> None:
        recorder.reads = {}
        network.forward(recorder, buffers.view(shape))
        sweeps.append(recorder.reads)

    core.runtime.run = run
    try:
        for num_beams in (1, 2, 5, 16):
            engine.submit_translation(
                reference.text(num_beams), source=SOURCE, target=TARGET, num_beams=num_beams,
                max_tokens=4,
            )  # fmt: skip
        while engine.has_unfinished():
            before = len(sweeps)
            engine.step()
            assert len(sweeps) - before <= 2  # sources, then everyone's rows
    finally:
        core.runtime.run = original
    assert {count for reads in sweeps for count in reads.values()} == {1}
    encoder, decoder = sweeps[0], sweeps[1]
    assert len(encoder) == 2 * 4 + 3  # four products a layer; K and V of three decoder layers
    assert len(decoder) == 3 * 6 + 1


def test_default_languages(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, quiet=True) as engine:
        text = reference.text(5)
        want = engine.translate(text, source=SOURCE, target=TARGET, max_tokens=5)
        with pytest.raises(InvalidArgumentError, match="this model has no default"):
            engine.translate(text)
        engine.set_default_languages(SOURCE, TARGET)
        assert engine.translate(text, max_tokens=5).hypotheses == want.hypotheses
        request = ask(text, src_lang_id=0, tgt_lang_id=0, max_new=5)
        (found,) = engine.model.forward.generate_beam_batch([request])
        assert found[0].score == want.score


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt_tokens": [1]}, InvalidArgumentError, "holds the padding token 1"),
        ({"prompt_tokens": [20] * 127}, PromptTooLongError, "allowed: up to 126"),
        ({"num_beams": 17}, InvalidArgumentError, "num_beams is 17; allowed: 1 … 16"),
        ({"adapter_slot": 0}, InvalidArgumentError, "adapter_slot is 0; allowed: -1"),
        ({"tgt_lang_id": SOURCE}, InvalidArgumentError, "are both 10"),
        ({"max_new": 128}, PromptTooLongError, "129 positions; allowed: up to max_seq_len 128"),
    ],
)
def test_bad_requests(
    model: Model, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model.forward.generate_beam_batch([ask([20, 21]), ask([20, 21], **changes)])


def test_a_pool_too_small_for_a_search(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, kv_tokens=64, quiet=True) as engine:
        forward = engine.model.forward
        with pytest.raises(KvExhausted, match="a search of 4 beams may need 5 KV blocks"):
            forward.generate_beam_batch([ask([20, 21])])
        three = [ask([20 + i], num_beams=3) for i in range(5)]  # one at a time
        assert len(forward.generate_beam_batch(three)) == 5
        assert engine.model.lifecycle.num_free_blocks == 4


def test_misuse(model: Model, reference: ReferenceTranslator) -> None:
    forward, text = model.forward, reference.text(4)
    seq = new(model)
    with pytest.raises(InvalidArgumentError, match="allowed: all of it in one chunk"):
        forward.prefill_chunk(text, seq, 0, 2, False)
    with pytest.raises(SequenceStateError, match="at least one position"):
        forward.decode(5, seq)
    forward.prefill(text, seq)
    with pytest.raises(SequenceStateError, match="translates a source already"):
        forward.prefill(text, seq)
    with pytest.raises(InvalidArgumentError, match="no sequences"):
        forward.decode_batch([], [])
    with pytest.raises(InvalidArgumentError, match="2 tokens for 1 sequences"):
        forward.decode_batch([5, 6], [seq])
    for call in (model.lifecycle.save_sequence_state, model.lifecycle.restore_sequence_state):
        with pytest.raises(CapabilityError, match="lifecycle"):
            call(seq, None)  # type: ignore[arg-type, call-arg]
    model.lifecycle.free_sequence(seq)


def test_a_failed_prefill_leaves_nothing(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, kv_tokens=48, quiet=True) as engine:
        model = engine.model
        seq = new(model)
        with pytest.raises(KvExhausted):
            model.forward.prefill(reference.text(40), seq)  # three blocks, and one for itself
        assert model.lifecycle.num_free_blocks == 3
        assert (seq.seq_len, seq.encoder) == (0, None)
        model.forward.prefill(reference.text(4), seq)
        model.lifecycle.free_sequence(seq)


def test_another_thread_is_refused(engine: Engine) -> None:
    import threading

    errors: list[BaseException] = []

    def call() -> None:
        try:
            engine.model.forward.generate_beam_batch([ask([20])])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(errors[0], WrongThreadError)
