"""From what callers give to what runs: prompts to ids, parameters resolved, requests built."""

from __future__ import annotations

import numbers
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from atlas.chat import ChatTemplate
from atlas.errors import (
    ChatTemplateError,
    InvalidArgumentError,
    PromptTooLongError,
    TokenizerError,
    shown,
)
from atlas.generation import Generation, Weights
from atlas.live_request import LiveRequest, Sink
from atlas.model.core import ModelCore
from atlas.sampling import SamplingParams
from atlas.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, object]]


class Intake:
    """Checks and prepares requests for one model.

    Parameters
    ----------
    core : ModelCore
    tokenizer : Tokenizer or None
        None: the model came without one; ids work, texts are refused.
    path : str
        Of the model, for messages.
    weights : callable
        The samplers' exponential.
    """

    continues = True  # outputs go on from their prompts

    def __init__(
        self, core: ModelCore, tokenizer: Tokenizer | None, path: str, weights: Weights
    ) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._path = path
        self._weights = weights
        self._chat: ChatTemplate | None = None
        known = dict.fromkeys(core.config.eos_token_ids)
        if tokenizer is not None:
            known.update(dict.fromkeys(tokenizer.eos_token_ids))
        self.eos_token_ids = tuple(known)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, or TokenizerError without one."""
        if self._tokenizer is None:
            raise TokenizerError(
                f"{self._path} has no tokenizer files; allowed: prompts of token ids"
            )
        return self._tokenizer

    def params(self, params: SamplingParams | None) -> SamplingParams:
        """Parameters with a seed and with texts as ids."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(
                f"params is a {type(params).__name__}; allowed: SamplingParams or None"
            )
        if params.stop_strings or params.has_unresolved_text:
            tokenizer = self.tokenizer
            params = params.with_token_ids(lambda text: tokenizer.encode(text, add_special=False))
        return params if params.greedy else params.with_seed()

    def prompt_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """A prompt as token ids: not empty, in the vocabulary, and within ``max_seq_len``."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | bytearray):
            raise InvalidArgumentError("a prompt is bytes; allowed: str or token ids")
        else:
            ids = [int(i) for i in self._core.token_array(prompt, "the prompt's tokens")]
        if not ids:
            raise InvalidArgumentError("the prompt is empty; allowed: one token or more")
        longest = self._core.limits.max_seq_len
        limit = longest - 1  # room for the first token
        if params.truncate_prompt == "left":
            ids = ids[-limit:]
        elif params.truncate_prompt is not None:
            ids = ids[-params.truncate_prompt :]
        if len(ids) > limit:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens; allowed: up to {limit} (max_seq_len {longest})"
                + (", or truncate_prompt='left'" if limit else "")
            )
        self._core.token_array(ids, "the prompt's tokens")
        return ids

    def chat_ids(
        self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]
    ) -> list[int]:
        """The token ids of a conversation, ready for the assistant's next turn."""
        if self._chat is None:
            if self.tokenizer.chat_template is None:
                raise ChatTemplateError(f"{self._path} has no chat template")
            self._chat = ChatTemplate.from_tokenizer(self.tokenizer)
        return self._chat.encode(self.tokenizer, messages, tools=tools, **variables)

    def request(
        self,
        ids: list[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: object = None,
        is_followed: bool = True,
    ) -> LiveRequest:
        """A request with all its samples, not yet submitted."""
        name, rank = checked_request_id(request_id), checked_priority(priority)
        generations = [self.generation(ids, params, index) for index in range(params.n)]
        return LiveRequest(
            name, user, params, ids, generations, sink, rank, is_followed=is_followed
        )

    def generation(self, ids: list[int], params: SamplingParams, index: int) -> Generation:
        """One sample's sampler and text."""
        return Generation(
            params,
            self._tokenizer,
            ids,
            vocab_size=self._core.config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_seq_len=self._core.limits.max_seq_len,
            sample_index=index,
            weights=self._weights,
            device_samples=self._core.runtime.samples,
            continues=self.continues,
        )


def checked_request_id(request_id: str | None) -> str:
    """The id given, or a new one."""
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise InvalidArgumentError(
            f"request_id is {request_id!r}; allowed: a string of one character or more"
        )
    return request_id or uuid.uuid4().hex


def checked_priority(priority: int) -> int:
    """A 32-bit priority."""
    whole = isinstance(priority, numbers.Integral) and not isinstance(priority, bool)
    if not whole or not -(2**31) < priority < 2**31:
        raise InvalidArgumentError(f"priority is {shown(priority)}; allowed: a 32-bit integer")
    return int(priority)


def is_single(prompts: object) -> bool:
    """Whether the argument of ``generate`` is one prompt: a text, or ids."""
    if isinstance(prompts, str):
        return True
    if not _is_sequence(prompts) or isinstance(prompts, bytes | bytearray):
        raise InvalidArgumentError(
            f"prompts is a {type(prompts).__name__}; allowed: str, token ids, or a list of these"
        )
    items: list[object] = list(prompts)  # type: ignore[call-overload]
    if not items:
        raise InvalidArgumentError("prompts is empty; allowed: a prompt of one token or more")
    nested = [_is_sequence(item) for item in items]
    if any(nested) != all(nested):
        raise InvalidArgumentError("prompts mix token ids with prompts; allowed: one or the other")
    return not nested[0]


def _is_sequence(item: object) -> bool:
    """Lists, tuples, texts, and arrays or tensors with an axis; no sets, mappings or iterators."""
    return isinstance(item, Sequence) or getattr(item, "ndim", 0) > 0
