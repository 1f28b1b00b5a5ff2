"""Bad input to every kind of parameter: an error with a message, and everything as before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas.capi import calls
from tests.capi.interface import (
    DECLARED,
    CallError,
    call,
    ffi,
    ids,
    info,
    lib,
    make,
    name_of,
    struct,
)

HUGE = 2**60
NUL = 2**64 - 1


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[tuple[Any, Any]]:
    """Two engines."""
    engines = [make("engine", "engine_load", str(model).encode(), ffi.NULL) for _ in range(2)]
    yield engines[0], engines[1]
    for handle in engines:
        call("engine_free", handle)


@pytest.fixture
def sequence(two: tuple[Any, Any]) -> Iterator[Any]:
    """Two positions long; must have stayed so."""
    handle = make("sequence", "sequence_create", two[0], 0)
    call("sequence_prefill", handle, ids([3, 4]), 2, 2, ffi.NULL)
    yield handle
    assert info("sequence", handle).seq_len == 2
    call("sequence_free", handle)


def refused(status: str, match: str, name: str, *arguments: Any) -> None:
    """The call fails with this status and message."""
    with pytest.raises(CallError, match=match) as caught:
        call(name, *arguments)
    assert name_of(caught.value.status) == f"ERROR_{status}"


def pointer(kind: str, value: int) -> Any:
    return ffi.cast(f"atlas_{kind} *", value)


KINDS = {
    "load_options": ("load_options_set_integer", (b"threads", 1)),
    "sampling": ("sampling_set_integer", (b"top_k", 1)),
    "beam_search": ("beam_search_set_integer", (b"num_beams", 1)),
    "tokenizer": ("tokenizer_find_token", (b"x", ffi.new("int32_t *"))),
    "detokenizer": ("detokenizer_flush", (ffi.new("char[8]"), 8, ffi.new("size_t *"))),
    "engine": ("engine_get_info", (struct("engine_info"),)),
    "sequence": ("sequence_decode", (5, ffi.NULL)),
    "logits": ("logits_argmax", (0, ffi.new("int32_t *"))),
    "sampler": ("sampler_observe", (1,)),
    "event": ("event_get_info", (struct("event_info"),)),
    "request": ("request_cancel", ()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_handles_that_are_none(kind: str, two: tuple[Any, Any]) -> None:
    """NULL, addresses, small and large numbers, other kinds; in uses and in frees."""
    name, rest = KINDS[kind]
    here = int(ffi.cast("uintptr_t", ffi.new("char[64]")))
    other = two[0] if kind != "engine" else make("sampling", "sampling_create")
    wrong = int(ffi.cast("uintptr_t", other))
    own_kind = wrong & ~(0xFF << 56)
    values = [0, 1, here, HUGE, NUL, wrong, own_kind | 200 << 56, 1 << 56, wrong ^ 1 << 23]
    for value in values:
        handle = pointer(kind, value)
        for function, arguments in ((name, rest), (f"{kind}_free", ())):
            with pytest.raises(CallError) as caught:
                call(function, handle, *arguments)
            assert name_of(caught.value.status) in ("ERROR_INVALID_ARGUMENT", "ERROR_STALE_HANDLE")
            assert caught.value.message
    if kind == "engine":
        call("sampling_free", other)


def test_freed_handles(two: tuple[Any, Any], sequence: Any) -> None:
    engine = two[0]
    tokenizer = make("tokenizer", "engine_get_tokenizer", engine)
    made = {
        "load_options": make("load_options", "load_options_create"),
        "sampling": make("sampling", "sampling_create"),
        "beam_search": make("beam_search", "beam_search_create"),
        "tokenizer": tokenizer,
        "detokenizer": make("detokenizer", "detokenizer_create", tokenizer, 0),
        "sequence": make("sequence", "sequence_create", engine, 0),
        "sampler": make("sampler", "sampler_create", engine, ffi.NULL, ffi.NULL, 0),
    }
    call("sequence_prefill", made["sequence"], ids([3]), 1, 2, ffi.NULL)
    made["logits"] = make("logits", "sequence_decode", made["sequence"], 5)
    for kind, handle in made.items():
        name, rest = KINDS[kind]
        call(f"{kind}_free", handle)
        refused("STALE_HANDLE", "freed", name, handle, *rest)
        refused("STALE_HANDLE", "freed", f"{kind}_free", handle)
    # The index serves again, and the old token still does not.
    again = make("sampling", "sampling_create")
    refused("STALE_HANDLE", "freed", "sampling_free", made["sampling"])
    call("sampling_free", again)


def test_handles_of_another_engine(two: tuple[Any, Any], sequence: Any) -> None:
    _, other = two
    foreign = make("sequence", "sequence_create", other, 0)
    call("sequence_prefill", foreign, ids([3]), 1, 2, ffi.NULL)
    logits = make("logits", "sequence_decode", foreign, 5)
    held = ffi.new("atlas_logits **", logits)
    sampler = make("sampler", "sampler_create", two[0], ffi.NULL, ffi.NULL, 0)
    match = "another engine|different engines"
    refused("INVALID_ARGUMENT", match, "sequence_decode", sequence, 5, held)
    both = ffi.new("atlas_sequence *[]", [sequence, foreign])
    refused(
        "INVALID_ARGUMENT", match, "engine_decode_batch", two[0], ids([5, 5]), both, 2, ffi.NULL
    )
    refused(
        "INVALID_ARGUMENT",
        match,
        "sampler_sample",
        sampler,
        logits,
        0,
        ffi.NULL,
        ffi.new("int32_t *"),
        ffi.NULL,
    )
    twice = ffi.new("atlas_sequence *[]", [sequence, sequence])
    refused(
        "INVALID_ARGUMENT", "twice", "engine_decode_batch", two[0], ids([5, 5]), twice, 2, ffi.NULL
    )
    for kind, handle in (("sampler", sampler), ("logits", logits), ("sequence", foreign)):
        call(f"{kind}_free", handle)


def test_counts(two: tuple[Any, Any], sequence: Any) -> None:
    """Zero and huge, before any memory is touched."""
    engine = two[0]
    empty = make("sequence", "sequence_create", engine, 0)
    out, some = ffi.new("atlas_logits **"), ids([5])
    for n in (HUGE, NUL, 2**32):
        refused("PROMPT_TOO_LONG", "allowed", "sequence_prefill", empty, some, n, 0, out)
        refused(
            "PROMPT_TOO_LONG", "allowed", "sequence_prefill_chunk", empty, some, n, 0, 1, 0, out
        )
        refused("PROMPT_TOO_LONG", "allowed", "sequence_verify", sequence, some, n, ffi.NULL, out)
        seqs = ffi.new("atlas_sequence *[1]", [sequence])
        refused("INVALID_ARGUMENT", "allowed", "engine_decode_batch", engine, some, seqs, n, out)
        refused(
            "INVALID_ARGUMENT",
            "allowed",
            "engine_forward_mixed",
            engine,
            some,
            seqs,
            n,
            ffi.NULL,
            0,
            0,
            out,
            ffi.NULL,
        )
        refused(
            "INVALID_ARGUMENT",
            "allowed",
            "engine_forward_mixed",
            engine,
            some,
            seqs,
            1,
            ffi.NULL,
            n,
            0,
            out,
            ffi.NULL,
        )
        refused(
            "PROMPT_TOO_LONG",
            "allowed",
            "sampler_create",
            engine,
            ffi.NULL,
            some,
            n,
            ffi.new("atlas_sampler **"),
        )
        refused("PROMPT_TOO_LONG", "allowed", "sequence_reserve", sequence, min(n, 2**40))
        refused(
            "INVALID_ARGUMENT",
            "allowed",
            "sequence_create",
            engine,
            n,
            ffi.new("atlas_sequence **"),
        )
        request = struct("request_params", tokens=some, num_tokens=n)
        refused(
            "PROMPT_TOO_LONG", "allowed", "engine_generate", engine, request, ffi.NULL, ffi.NULL
        )
    refused("INVALID_ARGUMENT", "0", "sequence_prefill", empty, some, 0, 0, out)
    refused("INVALID_ARGUMENT", "0", "sequence_verify", sequence, some, 0, ffi.NULL, out)
    refused("INVALID_ARGUMENT", "0", "engine_decode_batch", engine, some, ffi.NULL, 0, out)
    refused(
        "INVALID_ARGUMENT",
        "no sequences",
        "engine_forward_mixed",
        engine,
        ffi.NULL,
        ffi.NULL,
        0,
        ffi.NULL,
        0,
        0,
        out,
        ffi.NULL,
    )
    refused("INVALID_ARGUMENT", "NULL", "sequence_prefill", empty, ffi.NULL, 3, 0, out)
    refused("INVALID_ARGUMENT", "window", "sequence_prefill_chunk", empty, some, 1, 0, HUGE, 0, out)
    refused("INVALID_ARGUMENT", "0, 1, 2", "sequence_prefill", empty, some, 1, 3, out)
    refused("INVALID_ARGUMENT", "allowed", "sequence_rewind", sequence, min(HUGE, 2**40))
    assert out[0] == ffi.NULL
    call("sequence_free", empty)


@pytest.mark.parametrize("token", [-1, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary(two: tuple[Any, Any], sequence: Any, token: int) -> None:
    refused("INVALID_ARGUMENT", "allowed: 0 …", "sequence_decode", sequence, token, ffi.NULL)
    refused(
        "INVALID_ARGUMENT",
        "allowed: 0 …",
        "sequence_verify",
        sequence,
        ids([5, token]),
        2,
        ffi.NULL,
        ffi.NULL,
    )
    sampler = make("sampler", "sampler_create", two[0], ffi.NULL, ffi.NULL, 0)
    refused("INVALID_ARGUMENT", "allowed: 0 …", "sampler_observe", sampler, token)
    call("sampler_free", sampler)


def test_text(two: tuple[Any, Any]) -> None:
    tokenizer = make("tokenizer", "engine_get_tokenizer", two[0])
    out, count = ffi.new("int32_t[8]"), ffi.new("size_t *")
    for data, at in ((b"ab\xff", "at 2"), (b"\xc3", "at 0"), (b"\xed\xa0\x80", "at 0")):
        refused(
            "INVALID_ARGUMENT",
            f"not UTF-8.*{at}",
            "tokenizer_encode",
            tokenizer,
            data,
            NUL,
            0,
            out,
            8,
            count,
        )
    refused(
        "INVALID_ARGUMENT",
        "allowed: up to",
        "tokenizer_encode",
        tokenizer,
        b"x",
        HUGE,
        0,
        out,
        8,
        count,
    )
    refused(
        "INVALID_ARGUMENT", "NULL", "tokenizer_encode", tokenizer, ffi.NULL, 3, 0, out, 8, count
    )
    refused(
        "INVALID_ARGUMENT", "bits of 0x3", "tokenizer_encode", tokenizer, b"x", 1, 64, out, 8, count
    )
    refused(
        "BUFFER_TOO_SMALL",
        "room for 2 ids",
        "tokenizer_encode",
        tokenizer,
        b"one two three",
        NUL,
        0,
        out,
        2,
        count,
    )
    assert count[0] > 2
    refused(
        "INVALID_ARGUMENT",
        "buffer is NULL",
        "tokenizer_encode",
        tokenizer,
        b"x",
        1,
        0,
        ffi.NULL,
        8,
        count,
    )
    refused(
        "TOKENIZER",
        "not in the vocabulary",
        "tokenizer_decode",
        tokenizer,
        ids([9999999]),
        1,
        0,
        ffi.new("char[8]"),
        8,
        count,
    )
    refused(
        "SHAPE",
        "allowed: up to",
        "tokenizer_decode",
        tokenizer,
        ids([1]),
        HUGE,
        0,
        ffi.new("char[8]"),
        8,
        count,
    )
    for text in (
        b"{",
        b"[]",
        b'{"messages": 3}',
        b'{"messages": [], "tokenizer": 1}',
        b"[" * 99999,
    ):
        with pytest.raises(CallError):
            call("tokenizer_encode_chat_json", tokenizer, text, NUL, 0, out, 8, count)
    message = ffi.new("atlas_message[1]")
    refused(
        "INVALID_ARGUMENT",
        "role is NULL",
        "tokenizer_encode_chat",
        tokenizer,
        message,
        1,
        0,
        out,
        8,
        count,
    )
    for n in (0, HUGE):
        refused(
            "INVALID_ARGUMENT",
            "num_messages",
            "tokenizer_encode_chat",
            tokenizer,
            message,
            n,
            0,
            out,
            8,
            count,
        )
    call("tokenizer_free", tokenizer)


def test_named_options() -> None:
    options, sampling = (
        make("load_options", "load_options_create"),
        make("sampling", "sampling_create"),
    )
    near = "did you mean 'threads'"
    refused("INVALID_ARGUMENT", near, "load_options_set", options, b"thread", b"1")
    refused("INVALID_ARGUMENT", near, "load_options_set_integer", options, b"treads", 1)
    refused("INVALID_ARGUMENT", "an integer", "load_options_set", options, b"threads", b"many")
    refused("INVALID_ARGUMENT", "did you mean", "load_options_set", options, b"quiet", b"true")
    near = "did you mean 'temperature'"
    for set_it, value in (("set", b"1"), ("set_number", 1.0), ("set_integer", 1)):
        refused("INVALID_ARGUMENT", near, f"sampling_{set_it}", sampling, b"temperatur", value)
    for key, value in (
        (b"temperature", b"-1"), (b"temperature", b"nan"), (b"temperature", b"hot"),
        (b"top_k", b"2.5"), (b"ignore_eos", b"yes"), (b"stop", b"a"), (b"stop", b"[1]"),
        (b"logit_bias", b"[]"), (b"logit_bias", b'{"x": 1}'), (b"logprobs_mode", b"rare"),
        (b"logits_processor", b"null"), (b"seed", b"18446744073709551616"), (b"top_p", b"null"),
    ):  # fmt: skip
        with pytest.raises(CallError, match="INVALID_ARGUMENT"):
            call("sampling_set", sampling, key, value)
    for number in (float("nan"), float("inf"), -0.5):
        refused("INVALID_ARGUMENT", "top_p is", "sampling_set_number", sampling, b"top_p", number)
    refused("INVALID_ARGUMENT", "not UTF-8", "sampling_set", sampling, b"\xff", b"1")
    refused("INVALID_ARGUMENT", "value is NULL", "sampling_set", sampling, b"top_k", ffi.NULL)
    call("sampling_set", sampling, b"max_tokens", b"null")
    call("sampling_set", sampling, b"logprobs_mode", b"processed")
    call("sampling_set_integer", sampling, b"ignore_eos", 1)
    call("sampling_free", sampling)
    call("load_options_free", options)


def test_struct_sizes(two: tuple[Any, Any], model: Path) -> None:
    name = str(model).encode()
    out = ffi.new("atlas_engine **")
    for size in (0, 8, 31, HUGE, NUL):
        params = struct("load_params", struct_size=size)
        refused("INVALID_ARGUMENT", "struct_size", "engine_load", name, params, out)
        told = struct("engine_info", struct_size=size if size != 31 else 15)
        refused("INVALID_ARGUMENT", "struct_size", "engine_get_info", two[0], told)
    large = ffi.new("char[192]")
    newer = ffi.cast("atlas_load_params *", large)
    newer.struct_size = 192
    large[100] = b"\x01"
    refused("INVALID_ARGUMENT", "newer atlas.h", "engine_load", name, newer, out)
    large[100] = b"\0"  # a newer caller that uses nothing new
    call("engine_load", name, newer, out)
    told = ffi.cast("atlas_engine_info *", large)
    ffi.memmove(large, b"\xff" * 192, 192)
    told.struct_size = 192
    call("engine_get_info", out[0], told)
    assert told.vocab_size > 0
    assert bytes(ffi.buffer(large))[ffi.sizeof("atlas_engine_info") :] == bytes(
        192 - ffi.sizeof("atlas_engine_info")
    )
    ffi.memmove(large, b"\xff" * 192, 192)
    told.struct_size = 24  # an older caller
    call("engine_get_info", out[0], told)
    assert told.max_seq_len > 0
    assert bytes(ffi.buffer(large))[24:] == b"\xff" * 168
    call("engine_free", out[0])


def test_requests(two: tuple[Any, Any]) -> None:
    engine = two[0]
    text, tokens = ffi.new("char[]", b"x"), ids([3])
    for request in (
        struct("request_params"),
        struct("request_params", text=text, tokens=tokens, num_tokens=1),
    ):
        refused(
            "INVALID_ARGUMENT",
            "text and tokens",
            "engine_generate",
            engine,
            request,
            ffi.NULL,
            ffi.NULL,
        )
    request = struct("request_params", tokens=tokens, num_tokens=0)
    refused(
        "INVALID_ARGUMENT", "one or more", "engine_generate", engine, request, ffi.NULL, ffi.NULL
    )
    sampling = make("sampling", "sampling_create")
    call("sampling_set_integer", sampling, b"n", 2)
    request = struct("request_params", text=text, sampling=sampling)
    refused(
        "INVALID_ARGUMENT",
        "n or prompt_logprobs",
        "engine_generate",
        engine,
        request,
        ffi.NULL,
        ffi.NULL,
    )
    call("sampling_set_integer", sampling, b"n", 1)
    call("sampling_set_integer", sampling, b"min_tokens", 500)
    refused(
        "INVALID_ARGUMENT", "min_tokens", "engine_generate", engine, request, ffi.NULL, ffi.NULL
    )
    call("sampling_free", sampling)
    wrong = ffi.new("atlas_event **", pointer("event", 99))
    request = struct("request_params", text=text)
    refused(
        "INVALID_ARGUMENT",
        "not an Atlas handle",
        "engine_generate",
        engine,
        request,
        ffi.NULL,
        wrong,
    )


def test_any_order_of_destruction(model: Path) -> None:
    engine = make("engine", "engine_load", str(model).encode(), ffi.NULL)
    sequence = make("sequence", "sequence_create", engine, 0)
    call("sequence_prefill", sequence, ids([3]), 1, 2, ffi.NULL)
    logits = make("logits", "sequence_decode", sequence, 5)
    sampler = make("sampler", "sampler_create", engine, ffi.NULL, ffi.NULL, 0)
    tokenizer = make("tokenizer", "engine_get_tokenizer", engine)
    call("engine_free", engine)
    refused("CLOSED", "closed", "sequence_decode", sequence, 5, ffi.NULL)
    refused("CLOSED", "closed", "sequence_get_info", sequence, struct("sequence_info"))
    refused("CLOSED", "closed", "logits_argmax", logits, 0, ffi.new("int32_t *"))
    refused(
        "CLOSED",
        "closed",
        "sampler_sample",
        sampler,
        logits,
        0,
        ffi.NULL,
        ffi.new("int32_t *"),
        ffi.NULL,
    )
    call("tokenizer_find_token", tokenizer, b"</s>", ffi.new("int32_t *"))
    for kind, handle in (
        ("sequence", sequence), ("tokenizer", tokenizer), ("sampler", sampler), ("logits", logits),
    ):  # fmt: skip
        call(f"{kind}_free", handle)
    refused("STALE_HANDLE", "freed", "sequence_free", sequence)


def test_freeing_an_engine_while_it_works(model: Path) -> None:
    """The thread that generates, and those that wait for a turn, hear of it."""
    engine = make("engine", "engine_load", str(model).encode(), ffi.NULL)
    text = ffi.new("char[]", b"x")
    sampling = make("sampling", "sampling_create")
    call("sampling_set", sampling, b"max_tokens", b"null")
    call("sampling_set", sampling, b"ignore_eos", b"true")
    started = threading.Event()
    ends: list[str] = []

    @ffi.callback("int32_t(void *, atlas_event *)")
    def watch(user: Any, event: Any) -> int:
        started.set()
        return 0

    def work() -> None:
        request = struct("request_params", text=text, sampling=sampling)
        try:
            while True:
                call("engine_generate", engine, request, watch, ffi.NULL)
        except CallError as error:
            ends.append(name_of(error.status))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    call("engine_free", engine)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert set(ends) <= {"ERROR_CLOSED", "ERROR_STALE_HANDLE"}
    assert len(ends) == 3
    call("sampling_free", sampling)


def test_calls_from_a_callback(two: tuple[Any, Any], sequence: Any) -> None:
    """Also of the engine that runs the callback, and a free of what it is using."""
    text = ffi.new("char[]", b"x")
    results: list[Any] = []

    @ffi.callback("int32_t(void *, atlas_event *)")
    def watch(user: Any, event: Any) -> int:
        other = make("sequence", "sequence_create", two[0], 0)
        call("sequence_prefill", other, ids([3, 4]), 2, 2, ffi.NULL)
        call("sequence_free", other)
        inner = make(
            "event", "engine_generate", two[0], struct("request_params", text=text), ffi.NULL
        )
        results.append(info("event", inner).num_tokens)
        call("event_free", inner)
        call("event_free", event)
        return 1

    outer = ffi.new("atlas_event **")
    call("engine_generate", two[0], struct("request_params", text=text), watch, outer)
    assert results[0] > 0
    assert info("event", outer[0]).finish_reason in (1, 2, 3)
    call("event_free", outer[0])


def test_an_engine_freed_in_its_own_callback(model: Path) -> None:
    engine = make("engine", "engine_load", str(model).encode(), ffi.NULL)
    text = ffi.new("char[]", b"x")

    @ffi.callback("int32_t(void *, atlas_event *)")
    def watch(user: Any, event: Any) -> int:
        return int(lib.atlas_engine_free(engine))

    refused(
        "CLOSED",
        "closed",
        "engine_generate",
        engine,
        struct("request_params", text=text),
        watch,
        ffi.NULL,
    )
    refused("STALE_HANDLE", "freed", "engine_free", engine)


ALL = [function for function in DECLARED.dispatched if function.name != "atlas_find_capability"]


@pytest.mark.parametrize("function", ALL, ids=lambda function: function.field)
def test_an_exception_in_any_function_is_an_error(
    function: Any, monkeypatch: pytest.MonkeyPatch, two: tuple[Any, Any]
) -> None:
    """Whatever is raised inside becomes a status; the message names it; the process lives."""
    kind = ffi.typeof(getattr(lib, function.name))
    zeros = [ffi.NULL if arg.kind in ("pointer", "function") else 0 for arg in kind.args]
    for error, status in (
        (RuntimeError("injected fault"), "ERROR_INTERNAL"),
        (MemoryError("injected fault"), "ERROR_OUT_OF_MEMORY"),
        (ImportError("injected fault"), "ERROR_RUNTIME"),
        (KeyboardInterrupt(), "ERROR_CANCELLED"),
        (SystemExit(0), "ERROR_INTERNAL"),
        (RuntimeError("\udc80" + "🙂" * 5000), "ERROR_INTERNAL"),
    ):

        def fail(*arguments: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setitem(calls.FUNCTIONS, function.field, fail)
        with pytest.raises(CallError) as caught:
            call(function.field, *zeros)
        assert name_of(caught.value.status) == status
        expected = {"ERROR_CANCELLED": "interrupted"}.get(status, type(error).__name__)
        assert expected in caught.value.message


def test_a_function_that_cannot_even_report(monkeypatch: pytest.MonkeyPatch, two: Any) -> None:
    """Python fails while it handles the failure: the preset status stands."""

    def broken(call: Any, error: BaseException) -> None:
        raise MemoryError

    def fail(*arguments: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(calls, "_report", broken)
    monkeypatch.setitem(calls.FUNCTIONS, "sampling_create", fail)
    refused("RUNTIME", "Python did not finish the call", "sampling_create", ffi.NULL)
