"""What a step reports of a request."""

from __future__ import annotations

from typing import NamedTuple

from atlas.errors import AtlasError
from atlas.request import Completion, FinishReason, TokenLogprob, Usage


class Event(NamedTuple):  # one a token: a frozen dataclass takes eight times as long to make
    """New output of one sample, or its end.

    Attributes
    ----------
    request_id : str
    user : object
        The tag given at ``submit``.
    index : int
        Which of the request's ``n`` samples.
    token_ids : tuple of int
        Ids that have become final.
    text : str
        Complete UTF-8 text that has become final.
    logprobs : tuple of TokenLogprob
        Parallel to ``token_ids`` where asked for.
    finish_reason, stop_reason
        Set on a sample's last event.
    usage : Usage, optional
        On the request's last event.
    error : AtlasError, optional
        With ``finish_reason == "error"``.
    completion : Completion, optional
        On the request's last event: all of it.
    score : float, optional
        Of a beam search's hypothesis, with its ``finish_reason``.
    """

    request_id: str
    user: object
    index: int  # type: ignore[assignment]  # not tuple's
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    error: AtlasError | None = None
    completion: Completion | None = None
    score: float | None = None

    @property
    def is_last(self) -> bool:
        """Whether the request has ended with this event."""
        return self.completion is not None

    def __repr__(self) -> str:
        """All but the completion."""
        shown = zip(self._fields, self, strict=True)
        parts = (f"{name}={value!r}" for name, value in shown if name != "completion")
        return f"Event({', '.join(parts)})"
