"""Token level: the C functions do what the Python API does, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.capi import load_functions
from atlas.capi._binding import ffi as binding
from atlas.errors import Cancelled
from tests.capi.interface import (
    CallError,
    call,
    ffi,
    ids,
    info,
    lib,
    make,
    mark,
    read_ids,
    read_text,
    rewind,
    struct,
)  # fmt: skip

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
NUL = 2**64 - 1


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[Any]:
    options = make("load_options", "load_options_create")
    call("load_options_set_integer", options, b"threads", 1)
    params = struct("load_params", options=options)
    handle = make("engine", "engine_load", str(model).encode(), params)
    call("load_options_free", options)
    yield handle
    call("engine_free", handle)


@pytest.fixture
def sequence(loaded: Any) -> Iterator[Any]:
    handle = make("sequence", "sequence_create", loaded, 0)
    yield handle
    call("sequence_free", handle)


def rows_of(logits: Any) -> Any:
    """A copy of the rows, float32."""
    rows, columns = ffi.new("size_t *"), ffi.new("size_t *")
    call("logits_get_shape", logits, rows, columns)
    count = ffi.new("size_t *")
    out = np.empty((rows[0], columns[0]), np.float32)
    call("logits_to_host", logits, ffi.from_buffer("float[]", out), out.size, count)
    assert count[0] == out.size
    return out


def python_rows(engine: Engine, tokens: list[int]) -> Any:
    """Every position's logits by the Python API."""
    lifecycle, forward = engine.model.lifecycle, engine.model.forward
    seq = lifecycle.alloc_sequence()
    rows = forward.prefill(tokens, seq, logits="all").numpy().copy()
    lifecycle.free_sequence(seq)
    return rows


def test_prefill_chunks_and_decode(loaded: Any, sequence: Any, engine: Engine) -> None:
    expected = python_rows(engine, [*PROMPT, 20, 21])
    logits = ffi.new("atlas_logits **")
    n = len(PROMPT)
    call("sequence_prefill_chunk", sequence, ids(PROMPT), n, 0, 4, 1, logits)
    assert np.array_equal(rows_of(logits[0]), expected[:4])
    call("sequence_prefill_chunk", sequence, ids(PROMPT), n, 4, 2, 0, logits)
    with pytest.raises(CallError, match=r"STALE_HANDLE: .* names no rows"):
        call("logits_argmax", logits[0], 0, ffi.new("int32_t *"))
    call("sequence_prefill_chunk", sequence, ids(PROMPT), n, 6, n - 6, 0, logits)
    assert np.array_equal(rows_of(logits[0]), expected[n - 1 : n])
    first = logits[0]
    mark(loaded, sequence)
    call("sequence_decode", sequence, 20, logits)
    call("sequence_decode", sequence, 21, logits)
    assert logits[0] == first  # the handle is reused
    assert np.array_equal(rows_of(logits[0]), expected[n + 1 :])
    token = ffi.new("int32_t *")
    call("logits_argmax", logits[0], 0, token)
    assert token[0] == int(expected[-1].argmax())
    found = info("sequence", sequence)
    assert (found.seq_len, found.prompt_len, found.verify_rows) == (n + 2, n, 0)
    assert read_ids("sequence_get_tokens", sequence) == [*PROMPT, 20, 21]
    rewind(loaded, sequence, n)
    call("sequence_decode", sequence, 20, ffi.NULL)
    with pytest.raises(CallError, match="STALE_HANDLE: logits rows 0 … 0 were overwritten"):
        call("logits_argmax", logits[0], 0, token)
    call("logits_free", logits[0])


def test_verify_accept_rewind(loaded: Any, sequence: Any, engine: Engine) -> None:
    drafts = [20, 21, 22]
    expected = python_rows(engine, [*PROMPT, *drafts])[len(PROMPT) :]
    call("sequence_prefill", sequence, ids(PROMPT), len(PROMPT), 2, ffi.NULL)
    best, logits = ffi.new("int32_t[3]"), ffi.new("atlas_logits **")
    call("sequence_verify", sequence, ids(drafts), 3, best, logits)
    assert np.array_equal(rows_of(logits[0]), expected)
    assert list(best) == expected.argmax(1).tolist()
    assert read_ids("logits_argmax_batch", logits[0]) == list(best)
    with pytest.raises(CallError, match="SEQUENCE_STATE"):
        call("sequence_decode", sequence, 1, ffi.NULL)
    with pytest.raises(CallError, match="INVALID_ARGUMENT"):
        call("sequence_accept", sequence, 4)
    assert info("sequence", sequence).verify_rows == 3
    call("sequence_accept", sequence, 2)
    assert read_ids("sequence_get_tokens", sequence) == [*PROMPT, *drafts[:2]]
    call("sequence_decode", sequence, drafts[2], logits)
    assert np.array_equal(rows_of(logits[0]), expected[2:])
    call("logits_free", logits[0])


def test_batch_and_mixed_steps(loaded: Any, engine: Engine) -> None:
    a, b, c = (make("sequence", "sequence_create", loaded, 0) for _ in range(3))
    prompts = {a: PROMPT, b: [9, 8, 7], c: [3, 30, 31, 32, 33]}
    for seq in (a, b):
        call("sequence_prefill", seq, ids(prompts[seq]), len(prompts[seq]), 2, ffi.NULL)
    logits, both = ffi.new("atlas_logits **"), ffi.new("atlas_sequence *[]", [a, b])
    call("engine_decode_batch", loaded, ids([40, 41]), both, 2, logits)
    rows = rows_of(logits[0])
    for row, (seq, token) in zip(rows, ((a, 40), (b, 41)), strict=True):
        assert np.array_equal(row, python_rows(engine, [*prompts[seq], token])[-1])
    kept = ids(prompts[c])
    piece = ffi.new("atlas_prefill_slice[1]", [(c, kept, len(kept), 0, len(kept))])
    window = ffi.new("atlas_logits *[1]")
    call("engine_forward_mixed", loaded, ids([50, 51]), both, 2, piece, 1, 1, logits, window)
    for row, (seq, tokens) in zip(rows_of(logits[0]), ((a, [40, 50]), (b, [41, 51])), strict=True):
        assert np.array_equal(row, python_rows(engine, [*prompts[seq], *tokens])[-1])
    assert np.array_equal(rows_of(window[0]), python_rows(engine, prompts[c]))
    for handle in (logits[0], window[0]):
        call("logits_free", handle)
    for seq in (a, b, c):
        call("sequence_free", seq)


def test_the_tokenizer(loaded: Any, engine: Engine, model: Path) -> None:
    text = "Hello 🙂 wörld <|im_end|>\n"
    data = text.encode()
    for tokenizer in (
        make("tokenizer", "engine_get_tokenizer", loaded),
        make("tokenizer", "tokenizer_load", str(model).encode()),
    ):
        for flags, options in (
            (0, {"add_special": False}),
            (1, {}),
            (3, {"parse_special": True}),
        ):
            found = read_ids("tokenizer_encode", tokenizer, data, NUL, flags)
            assert found == engine.tokenizer.encode(text, **options)
        assert read_ids("tokenizer_encode", tokenizer, data, 5, 0) == engine.tokenizer.encode(
            "Hello", add_special=False
        )
        plain = engine.tokenizer.encode(text)
        assert read_text("tokenizer_decode", tokenizer, ids(plain), len(plain), 4) == text
        token = ffi.new("int32_t *")
        call("tokenizer_find_token", tokenizer, b"</s>", token)
        assert token[0] == engine.tokenizer.token_to_id("</s>")
        call("tokenizer_find_token", tokenizer, b"no such token", token)
        assert token[0] == -1

        roles = [("user", "Hi <|im_end|>"), ("assistant", "Hello"), ("user", "naïve")]
        kept = [ffi.new("char[]", part.encode()) for pair in roles for part in pair]
        messages = ffi.new("atlas_message[]", list(zip(kept[::2], kept[1::2], strict=True)))
        conversation = [{"role": r, "content": c} for r, c in roles]
        expected = engine.chat_token_ids(conversation)
        assert read_ids("tokenizer_encode_chat", tokenizer, messages, 3, 0) == expected
        as_json = json.dumps({"messages": conversation}).encode()
        assert read_ids("tokenizer_encode_chat_json", tokenizer, as_json, NUL, 0) == expected
        closed = read_ids("tokenizer_encode_chat_json", tokenizer, as_json, NUL, 16)
        assert closed == engine.chat_token_ids(conversation, add_generation_prompt=False)
        assert closed != expected
        call("tokenizer_free", tokenizer)


def test_detokenizer_pieces_join(loaded: Any, engine: Engine) -> None:
    tokenizer = make("tokenizer", "engine_get_tokenizer", loaded)
    feed = make("detokenizer", "detokenizer_create", tokenizer, 0)
    call("tokenizer_free", tokenizer)  # the child keeps what it needs
    text = "emoji 🙂👩‍👩‍👧 CJK 日本"
    buffer, length = ffi.new("char[64]"), ffi.new("size_t *")
    pieces = []
    for token in engine.tokenizer.encode(text, add_special=False):
        call("detokenizer_push", feed, token, ffi.NULL, 0, length)  # asks, takes nothing
        if length[0]:
            with pytest.raises(CallError, match="BUFFER_TOO_SMALL"):
                call("detokenizer_push", feed, token, buffer, length[0], length)
        call("detokenizer_push", feed, token, buffer, 64, length)
        pieces.append(ffi.string(buffer).decode())
    call("detokenizer_push", feed, engine.tokenizer.encode("🙂", add_special=False)[0], buffer, 64,
         length)  # fmt: skip
    call("detokenizer_flush", feed, buffer, 64, length)
    assert "".join(pieces) == text
    assert ffi.string(buffer).decode() in ("�", "")
    call("detokenizer_free", feed)


def test_samplers(loaded: Any, sequence: Any, engine: Engine) -> None:
    """By hand, token for token what a request with these parameters gives."""
    params = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=2**64 - 5, logprobs=2,
        max_tokens=12, ignore_eos=True, stop=["never", "🙂"], logit_bias={3: -2.5},
    )  # fmt: skip
    expected = engine.generate(PROMPT, params)
    sampling = make("sampling", "sampling_create")
    call("sampling_set_number", sampling, b"temperature", 0.8)
    call("sampling_set_integer", sampling, b"top_k", 40)
    call("sampling_set", sampling, b"top_p", b"0.9")
    call("sampling_set", sampling, b"repetition_penalty", b"1.1")
    call("sampling_set", sampling, b"seed", str(2**64 - 5).encode())
    call("sampling_set_integer", sampling, b"logprobs", 2)
    call("sampling_set", sampling, b"max_tokens", b"12")
    call("sampling_set", sampling, b"ignore_eos", b"true")
    call("sampling_set", sampling, b"stop", '["never", "🙂"]'.encode())
    call("sampling_set", sampling, b"logit_bias", b'{"3": -2.5}')
    sampler = make("sampler", "sampler_create", loaded, sampling, ids(PROMPT), len(PROMPT))
    seed = ffi.new("uint64_t *")
    call("sampler_get_seed", sampler, seed)
    assert seed[0] == 2**64 - 5

    logits, token, logprob = ffi.new("atlas_logits **"), ffi.new("int32_t *"), ffi.new("float *")
    call("sequence_prefill", sequence, ids(PROMPT), len(PROMPT), 0, logits)
    found = []
    for scored in expected.logprobs or ():
        call("sampler_sample", sampler, logits[0], 0, ffi.NULL, token, logprob)
        found.append(token[0])
        assert logprob[0] == pytest.approx(scored.logprob, abs=0)
        top, count = ffi.new("atlas_token_logprob[2]"), ffi.new("size_t *")
        call("sampler_get_top", sampler, top, 2, count)
        assert [(item.token, item.logprob) for item in top] == [
            (i, pytest.approx(value, abs=0)) for i, value in scored.top
        ]
        call("sampler_observe", sampler, token[0])
        call("sequence_decode", sequence, token[0], logits)
    assert found == list(expected.token_ids)

    only = np.zeros((engine.model.config.vocab_size + 31) // 32, np.uint32)
    only[1] = 1 << 7
    mask = ffi.from_buffer("uint32_t[]", only)
    call("sampler_sample", sampler, logits[0], 0, mask, token, ffi.NULL)
    assert token[0] == 39
    call("sampler_rewind", sampler, 0)
    for handle, kind in ((sampler, "sampler"), (sampling, "sampling"), (logits[0], "logits")):
        call(f"{kind}_free", handle)

    request = struct("request_params", tokens=(prompt := ids(PROMPT)), num_tokens=len(PROMPT))
    assert prompt is not None
    event = make("event", "engine_generate", loaded, request, ffi.NULL)
    greedy = engine.generate(PROMPT)
    told = info("event", event)
    assert list(told.tokens[0 : told.num_tokens]) == list(greedy.token_ids)
    assert ffi.string(told.text).decode() == greedy.text
    assert told.completion_tokens == greedy.usage.completion_tokens
    assert told.prompt_tokens == len(PROMPT)
    call("event_free", event)


def test_generate_streams_and_cancels(loaded: Any, engine: Engine) -> None:
    sampling = make("sampling", "sampling_create")
    call("sampling_set", sampling, b"max_tokens", b"20")
    call("sampling_set", sampling, b"ignore_eos", b"true")
    call("sampling_set", sampling, b"logprobs", b"1")
    prompt = ffi.new("char[]", b"def f(x):")
    user = ffi.cast("void *", 0x1234)
    request = struct("request_params", text=prompt, sampling=sampling, user=user)
    seen: list[Any] = []
    limit = [100]

    @ffi.callback("int32_t(void *, atlas_event *)")
    def watch(given: Any, event: Any) -> int:
        told = info("event", event)
        assert given == user == told.user
        assert told.num_top == (1 if told.num_tokens else 0)
        seen.append((ffi.string(told.text).decode(), list(told.tokens[0 : told.num_tokens])))
        return int(len(seen) >= limit[0])

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    whole = engine.generate("def f(x):", params)
    event = ffi.new("atlas_event **")
    call("engine_generate", loaded, request, watch, event)
    assert "".join(text for text, _ in seen) == whole.text
    assert [token for _, tokens in seen for token in tokens] == list(whole.token_ids)
    assert info("event", event[0]).finish_reason == 2

    seen.clear()
    limit[0] = 3
    call("engine_generate", loaded, request, watch, event)
    told = info("event", event[0])
    assert (told.finish_reason, len(seen)) == (3, 3)
    assert list(told.tokens[0 : told.num_tokens]) == list(whole.token_ids[: told.num_tokens])
    call("event_free", event[0])
    call("sampling_free", sampling)


def test_progress_reports_and_cancels(model: Path) -> None:
    calls: list[tuple[int, int]] = []
    stop = [False]

    @ffi.callback("int32_t(void *, uint64_t, uint64_t)")
    def progress(user: Any, done: int, total: int) -> int:
        calls.append((done, total))
        return int(stop[0])

    params = struct("load_params", progress=progress)
    handle = make("engine", "engine_load", str(model).encode(), params)
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] > 0
    calls.clear()
    stop[0] = True
    out = ffi.new("atlas_engine **", ffi.cast("atlas_engine *", 77))
    with pytest.raises(CallError, match="CANCELLED"):
        call("engine_load", str(model).encode(), params, out)
    assert len(calls) == 1
    assert out[0] == ffi.cast("atlas_engine *", 77)
    call("engine_free", handle)


def test_what_an_engine_tells(loaded: Any, engine: Engine) -> None:
    told = info("engine", loaded)
    config = engine.model.config
    assert (told.vocab_size, told.num_layers) == (config.vocab_size, config.num_layers)
    assert (told.max_seq_len, told.block_size) == (engine.max_seq_len, 16)
    assert 0 < told.num_free_blocks <= told.num_blocks
    assert read_ids("engine_get_end_tokens", loaded) == list(engine.eos_token_ids)
    about = json.loads(read_text("engine_describe", loaded))
    assert about["model"] == engine.describe()["model"]
    has = ffi.new("int32_t *")
    on_cuda = int(engine.options.device == "cuda")
    for name, expected in (("speculative.verify", 1), ("device.cuda", on_cuda), ("vision", 0)):
        call("engine_has", loaded, name.encode(), has)
        assert has[0] == expected
    assert lib.atlas_has(b"speculative.verify") == 1
    assert lib.atlas_has(b"speculative.verfy") == 0
    message = ffi.string(lib.atlas_error_message()).decode()
    assert "did you mean 'speculative.verify'?" in message


def test_what_is_missing_is_a_capability_error(loaded: Any, sequence: Any, engine: Engine) -> None:
    """Each says which query tells beforehand; where it has landed, the query is 1."""
    call("sequence_prefill", sequence, ids([3, 4]), 2, 2, ffi.NULL)
    out = ffi.new("atlas_sequence **")
    if not lib.atlas_has(b"sequence.fork"):
        with pytest.raises(CallError, match="CAPABILITY"):
            call("sequence_fork", sequence, out)
        assert out[0] == ffi.NULL
    logits = make("logits", "sequence_decode", sequence, 5)
    rows = struct("device_rows")
    if engine.options.device == "cpu":
        with pytest.raises(CallError, match=r"CAPABILITY: .*CPU"):
            call("logits_get_device_rows", logits, rows)
        call("logits_free", logits)
        return
    call("logits_get_device_rows", logits, rows)
    assert rows.pointer != ffi.NULL
    assert rows.stream != ffi.NULL
    assert rows.row_stride >= engine.model.config.vocab_size
    assert rows.element_bytes in (2, 4)
    call("logits_free", logits)


def test_log_callback(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are compiled are told at level INFO."""
    import logging

    lines: list[tuple[int, str]] = []

    @ffi.callback("void(void *, int32_t, const char *)")
    def log(user: Any, level: int, message: Any) -> None:
        lines.append((level, ffi.string(message).decode()))

    call("log_set_callback", log, ffi.NULL, 20)
    logging.getLogger("atlas").info("seen 🙂\0")
    logging.getLogger("atlas").debug("too low")
    call("log_set_callback", ffi.NULL, ffi.NULL, 0)
    assert lines == [(20, "seen 🙂�")]


def test_files_that_are_c_functions() -> None:
    """Everything arrives once and in order; the reader never takes more than it was asked for."""
    load_functions()
    from atlas.capi.sequences import CallbackReader, CallbackWriter

    stored = bytearray()

    @binding.callback("int32_t(void *, const void *, size_t)")
    def write(user: Any, data: Any, size: int) -> int:
        stored.extend(binding.buffer(data, size))
        return int(len(stored) > 20)

    @binding.callback("int64_t(void *, void *, size_t)")
    def read(user: Any, data: Any, size: int) -> int:
        part = bytes(stored[: min(size, 3)])
        del stored[: len(part)]
        binding.memmove(data, part, len(part))
        return len(part)

    writer = CallbackWriter(write, binding.NULL, b"head")
    assert writer.write(b"first") == 5
    writer.write(np.arange(2, dtype=np.int16))
    assert bytes(stored) == b"headfirst\0\0\1\0"
    reader = CallbackReader(read, binding.NULL)
    assert reader.read(6) == b"headfi"
    assert len(stored) == 7
    assert reader.read(100) == b"rst\0\0\1\0"
    assert reader.read(1) == b""
    with pytest.raises(Cancelled):
        writer.write(b"x" * 21)


def test_no_model_is_the_one_in_the_package() -> None:
    engine = make("engine", "engine_load", ffi.NULL, ffi.NULL)
    tokenizers = [
        make("tokenizer", "tokenizer_load", ffi.NULL),
        make("tokenizer", "engine_get_tokenizer", engine),
    ]
    assert '"qwen3_5, 8 layers' in read_text("engine_describe", engine)
    text = b"This module provides"
    encoded = [read_ids("tokenizer_encode", t, text, len(text), 0) for t in tokenizers]
    assert encoded[0] == encoded[1] != []
    for tokenizer in tokenizers:
        call("tokenizer_free", tokenizer)
    call("engine_free", engine)
    for function, kind in (("engine_load", "engine"), ("tokenizer_load", "tokenizer")):
        more = (ffi.NULL,) if kind == "engine" else ()
        with pytest.raises(CallError, match=r"MODEL_FILE.*allowed: a GGUF file"):
            make(kind, function, b"", *more)
