"""Events: what happened to a request, laid out for C."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atlas.capi._binding import ffi, lib
from atlas.capi.calls import exported, status_of
from atlas.capi.handles import HANDLES, handled
from atlas.capi.memory import number, struct_size, write_struct
from atlas.errors import AtlasError, StaleHandleError
from atlas.request import FinishReason, TokenLogprob, Usage

if TYPE_CHECKING:
    from atlas.engine import Engine
    from atlas.event import Event
    from atlas.request import Completion

_FINISH: dict[FinishReason | None, int] = {
    None: lib.ATLAS_FINISH_NONE,
    "stop": lib.ATLAS_FINISH_STOP,
    "length": lib.ATLAS_FINISH_LENGTH,
    "cancelled": lib.ATLAS_FINISH_CANCELLED,
    "error": lib.ATLAS_FINISH_ERROR,
}


@handled("request")
class SubmittedRequest:
    """A request of an engine.

    Attributes
    ----------
    token : int
        Of its handle; 0 once the caller has freed it.
    """

    def __init__(self, engine: Engine, user: Any) -> None:
        self.engine, self.user = engine, user
        self.request_id = ""
        self.token = 0


@dataclass(frozen=True)
class News:
    """One event's contents."""

    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprob] | None = None
    sample: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: AtlasError | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    score: float | None = None
    is_last: bool = False
    user: Any = ffi.NULL
    request: SubmittedRequest | None = None
    kept: list[Any] = field(default_factory=list)  # C memory that the struct points to

    @classmethod
    def of(cls, event: Event, user: Any, request: SubmittedRequest | None = None) -> News:
        """What an event of the engine says."""
        usage = event.usage or Usage(0, 0)
        return cls(
            event.token_ids,
            event.text,
            event.logprobs or None,
            event.index,
            event.finish_reason,
            event.stop_reason,
            event.error,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            event.score,
            is_last=event.is_last,
            user=user,
            request=request,
        )

    @classmethod
    def whole(cls, completion: Completion, user: Any, index: int = 0) -> News:
        """One of a request's samples from its beginning to its end."""
        usage, sample = completion.usage, completion.samples[index]
        return cls(
            sample.token_ids,
            sample.text,
            sample.logprobs,
            sample.index,
            sample.finish_reason,
            sample.stop_reason,
            sample.error,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            sample.score,
            is_last=True,
            user=user,
        )

    def struct(self) -> Any:
        """The filled ``atlas_event_info``."""
        self.kept.clear()
        info = ffi.new("atlas_event_info *")
        token = 0 if self.request is None else self.request.token
        info.request = ffi.cast("atlas_request *", token)
        info.user = self.user
        info.tokens = self._keep("int32_t[]", [*self.token_ids, 0])
        info.num_tokens = len(self.token_ids)
        info.text, info.text_len = self._text(self.text)
        if self.logprobs is not None:
            self._add_logprobs(info, self.logprobs)
        info.sample = self.sample
        info.is_last = self.is_last
        info.finish_reason = _FINISH[self.finish_reason]
        info.stop_token = self.stop_reason if isinstance(self.stop_reason, int) else -1
        if isinstance(self.stop_reason, str):
            info.stop_text, _ = self._text(self.stop_reason)
        if self.error is not None:
            info.error, message = status_of(self.error)
            info.error_message, _ = self._text(message)
        info.prompt_tokens = self.prompt_tokens
        info.cached_tokens = self.cached_tokens
        info.completion_tokens = self.completion_tokens
        info.score = math.nan if self.score is None else self.score
        return info

    def _add_logprobs(self, info: Any, logprobs: Sequence[TokenLogprob]) -> None:
        rows = [(item.token_id, item.logprob) for item in logprobs]
        info.num_top = min((len(item.top) for item in logprobs), default=0)
        top = [pair for item in logprobs for pair in item.top[: info.num_top]]
        info.logprobs = self._keep("atlas_token_logprob[]", [*rows, (0, 0.0)])
        info.top = self._keep("atlas_token_logprob[]", [*top, (0, 0.0)])

    def _keep(self, kind: str, values: object) -> Any:
        array = ffi.new(kind, values)
        self.kept.append(array)
        return array

    def _text(self, text: str) -> tuple[Any, int]:
        data = text.encode("utf-8", "replace")
        return self._keep("char[]", data), len(data)


@handled("event")
class EventSlot:
    """What an event handle names: some news, or none."""

    def __init__(self, news: News | None = None) -> None:
        self.news = news


class EventTarget:
    """Where a call puts an event: checked before the work, filled after it."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._existing: EventSlot | None = None
        if out and out[0]:
            self._existing = HANDLES.get(number(out[0]), EventSlot)

    def put(self, news: News | None) -> None:
        """Let the caller's handle name the news."""
        if self._existing is not None:
            self._existing.news = news
        elif self._out and news is not None:
            self._out[0] = event_pointer(HANDLES.add(EventSlot(news)))


def event_pointer(token: int) -> Any:
    """A token as C's type."""
    return ffi.cast("atlas_event *", token)


@exported
def event_get_info(handle: Any, info: Any) -> None:
    """Fill the caller's struct."""
    slot = HANDLES.get(number(handle), EventSlot)
    size = struct_size(info, "atlas_event_info", "info", "user")
    if slot.news is None:
        raise StaleHandleError("this event handle names no event; none came in time")
    write_struct(slot.news.struct(), info, size)


@exported
def event_free(handle: Any) -> None:
    """Free an event."""
    HANDLES.remove(number(handle), EventSlot)
