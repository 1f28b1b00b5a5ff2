"""Tokenizers and detokenizers."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from atlas.capi._binding import ffi, lib
from atlas.capi.calls import exported
from atlas.capi.engine import engine_of
from atlas.capi.handles import HANDLES, handled
from atlas.capi.memory import (
    NUL_TERMINATED,
    number,
    read_flags,
    read_ids,
    read_name,
    read_text,
    require,
    require_buffer,
    write_array,
    write_text,
)
from atlas.chat import ChatTemplate
from atlas.detokenizer import Detokenizer
from atlas.errors import ChatTemplateError, InvalidArgumentError, TokenizerError
from atlas.tokenizer import Tokenizer, load_tokenizer
from atlas.weights.checkpoint import open_checkpoint
from atlas.weights.locate import locate

_MAX_IDS = 1 << 26
_MAX_MESSAGES = 1 << 16


@handled("tokenizer")
class TextCodec:
    """A tokenizer with its chat template, which is compiled when it is first used."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._chat: ChatTemplate | None = None

    def encode_chat(self, conversation: dict[str, Any], flags: int) -> list[int]:
        """The ids of a conversation: messages, tools and variables."""
        with self._lock:
            if self._chat is None:
                self._chat = ChatTemplate.from_tokenizer(self.tokenizer)
        if "add_generation_prompt" in conversation:
            raise ChatTemplateError(
                "the conversation has add_generation_prompt; allowed: the flag NO_GENERATION_PROMPT"
            )
        prompt = not flags & lib.ATLAS_NO_GENERATION_PROMPT
        return self._chat.encode(self.tokenizer, add_generation_prompt=prompt, **conversation)


@handled("detokenizer")
class TextFeed:
    """A detokenizer whose steps can be taken back until their text has been handed over."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.lock = threading.Lock()


def _codec(handle: Any) -> TextCodec:
    return HANDLES.get(number(handle), TextCodec)


def _put_codec(out: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    token = HANDLES.add(TextCodec(tokenizer, vocab_size))
    out[0] = ffi.cast("atlas_tokenizer *", token)


@exported
def tokenizer_load(model: Any, out: Any) -> None:
    """The tokenizer of a model's files."""
    require(out, "tokenizer")
    location = locate(None if model == ffi.NULL else read_name(model, "model"))
    if location.kind == "gguf":
        with open_checkpoint(location) as checkpoint:
            tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    else:
        found = load_tokenizer(location.path)
        if found is None:
            raise TokenizerError(f"{location.path} has no tokenizer files")
        tokenizer = found
    _put_codec(out, tokenizer, tokenizer.vocab_size)


@exported
def engine_get_tokenizer(engine: Any, out: Any) -> None:
    """The tokenizer of an engine."""
    found = engine_of(engine)
    require(out, "tokenizer")
    _put_codec(out, found.tokenizer, found._loaded.model.config.vocab_size)


@exported
def tokenizer_free(tokenizer: Any) -> None:
    """Free a tokenizer."""
    HANDLES.remove(number(tokenizer), TextCodec)


@exported
def tokenizer_encode(
    tokenizer: Any, text: Any, text_len: int, flags: int, ids: Any, capacity: int, num_ids: Any
) -> None:
    """Text to ids."""
    codec = _codec(tokenizer)
    require_buffer(ids, capacity, num_ids)
    read_flags(flags, lib.ATLAS_ADD_SPECIAL | lib.ATLAS_PARSE_SPECIAL)
    found = codec.tokenizer.encode(
        read_text(text, text_len, "text"),
        add_special=bool(flags & lib.ATLAS_ADD_SPECIAL),
        parse_special=bool(flags & lib.ATLAS_PARSE_SPECIAL),
    )
    write_array(np.array(found, np.int32), ids, capacity, num_ids, "ids")


@exported
def tokenizer_decode(
    tokenizer: Any, ids: Any, num_ids: int, flags: int, buffer: Any, capacity: int, length: Any
) -> None:
    """Ids to text."""
    codec = _codec(tokenizer)
    require_buffer(buffer, capacity, length)
    read_flags(flags, lib.ATLAS_SKIP_SPECIAL | lib.ATLAS_CONTINUES)
    text = codec.tokenizer.decode(
        read_ids(ids, num_ids, _MAX_IDS, "ids").tolist(),
        skip_special=bool(flags & lib.ATLAS_SKIP_SPECIAL),
        continues=bool(flags & lib.ATLAS_CONTINUES),
    )
    write_text(text, buffer, capacity, length)


@exported
def tokenizer_find_token(tokenizer: Any, token: Any, out: Any) -> None:
    """The id of a vocabulary string, or −1."""
    codec = _codec(tokenizer)
    require(out, "id")
    found = codec.tokenizer.token_to_id(read_name(token, "token"))
    out[0] = -1 if found is None else found


@exported
def tokenizer_encode_chat(
    tokenizer: Any, messages: Any, count: int, flags: int, ids: Any, capacity: int, num_ids: Any
) -> None:
    """A conversation of roles and contents to ids."""
    codec = _codec(tokenizer)
    require_buffer(ids, capacity, num_ids)
    read_flags(flags, lib.ATLAS_NO_GENERATION_PROMPT)
    if not 1 <= count <= _MAX_MESSAGES:
        raise InvalidArgumentError(f"num_messages is {count}; allowed: 1 … {_MAX_MESSAGES}")
    require(messages, "messages")
    conversation = [
        {
            "role": read_text(messages[i].role, NUL_TERMINATED, f"messages[{i}].role"),
            "content": read_text(messages[i].content, NUL_TERMINATED, f"messages[{i}].content"),
        }
        for i in range(count)
    ]
    found = codec.encode_chat({"messages": conversation}, flags)
    write_array(np.array(found, np.int32), ids, capacity, num_ids, "ids")


@exported
def tokenizer_encode_chat_json(
    tokenizer: Any, text: Any, text_len: int, flags: int, ids: Any, capacity: int, num_ids: Any
) -> None:
    """A conversation as JSON, with tools and variables, to ids."""
    codec = _codec(tokenizer)
    require_buffer(ids, capacity, num_ids)
    read_flags(flags, lib.ATLAS_NO_GENERATION_PROMPT)
    try:
        conversation = json.loads(read_text(text, text_len, "conversation"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"conversation is not JSON: {error}") from None
    if not isinstance(conversation, dict) or "messages" not in conversation:
        raise InvalidArgumentError("conversation has no messages; allowed: an object with messages")
    if "tokenizer" in conversation:
        raise ChatTemplateError("template variable 'tokenizer' is reserved")
    found = codec.encode_chat(conversation, flags)
    write_array(np.array(found, np.int32), ids, capacity, num_ids, "ids")


@exported
def detokenizer_create(tokenizer: Any, flags: int, out: Any) -> None:
    """An incremental decoder."""
    codec = _codec(tokenizer)
    require(out, "detokenizer")
    read_flags(flags, lib.ATLAS_SKIP_SPECIAL | lib.ATLAS_CONTINUES)
    feed = TextFeed(
        Detokenizer(
            codec.tokenizer,
            skip_special=bool(flags & lib.ATLAS_SKIP_SPECIAL),
            continues=bool(flags & lib.ATLAS_CONTINUES),
            vocab_size=codec.vocab_size,
        )
    )
    out[0] = ffi.cast("atlas_detokenizer *", HANDLES.add(feed))


@exported
def detokenizer_push(handle: Any, token_id: int, buffer: Any, capacity: int, length: Any) -> None:
    """Take one id and give out the text that it completes."""
    feed = HANDLES.get(number(handle), TextFeed)
    require_buffer(buffer, capacity, length)
    with feed.lock:
        after = feed.detokenizer.copy()
        if write_text(after.push(token_id), buffer, capacity, length):
            feed.detokenizer = after


@exported
def detokenizer_flush(handle: Any, buffer: Any, capacity: int, length: Any) -> None:
    """End the text and give out what is held."""
    feed = HANDLES.get(number(handle), TextFeed)
    require_buffer(buffer, capacity, length)
    with feed.lock:
        after = feed.detokenizer.copy()
        if write_text(after.flush(), buffer, capacity, length):
            feed.detokenizer = after


@exported
def detokenizer_free(handle: Any) -> None:
    """Free a detokenizer."""
    HANDLES.remove(number(handle), TextFeed)
