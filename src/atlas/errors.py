"""Typed errors. Each class carries a stable code, which is also its status in the C ABI."""

from __future__ import annotations

from typing import ClassVar


def shown(value: object) -> str:
    """A value as messages give it: its repr, cut short where it is long.

    Integers of thousands of digits have none: Python refuses to spell them out.
    """
    try:
        text = repr(value)
    except ValueError:
        bits = value.bit_length() if isinstance(value, int) else 0
        return f"an integer of {bits} bits" if bits else f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:199]}…"


class AtlasError(Exception):
    """Any error that Atlas raises on purpose; ``code`` is stable across versions."""

    code: ClassVar[int] = 1


class InvalidArgumentError(AtlasError, ValueError):
    """A value is outside what is allowed; the message names value and allowed set."""

    code = 2


class ShapeError(InvalidArgumentError):
    """An array's shape or dtype disagrees with the named dimensions of a call."""

    code = 3


class PromptTooLongError(InvalidArgumentError):
    """A prompt, or a position about to be written, exceeds ``max_seq_len``."""

    code = 4


class CapabilityError(AtlasError):
    """The model or the backend has no such capability."""

    code = 5


class ModelFileError(AtlasError):
    """A model, weight or tokenizer file is missing, damaged or hostile."""

    code = 6


class UnsupportedModelError(ModelFileError):
    """A well-formed file names an architecture, tensor type or option that is not supported."""

    code = 7


class KvExhausted(AtlasError):
    """The KV pool has too few free blocks; nothing was changed."""

    code = 8


class OutOfMemoryError(AtlasError, MemoryError):
    """The requested weights, cache or workspace do not fit; the message gives the plan."""

    code = 9


class StaleHandleError(AtlasError):
    """A view was overwritten, or its owner was freed, closed or belongs to a parent process."""

    code = 10


class SequenceStateError(AtlasError):
    """The call is not allowed in the sequence's present state (failed, freed, verify pending)."""

    code = 11


class WrongThreadError(AtlasError):
    """A model was driven from a thread it is not bound to."""

    code = 12


class ModelBusyError(AtlasError):
    """The engine's owner thread, or a step that is under way, is driving the model."""

    code = 13


class NonFiniteLogitsError(AtlasError):
    """A row of logits holds NaN or infinity; the request that owns it has ended."""

    code = 14


class ClosedError(AtlasError):
    """The engine, model or tokenizer was closed."""

    code = 15


class TokenizerError(AtlasError):
    """Text could not be encoded or decoded, or the model came without a tokenizer."""

    code = 16


class ChatTemplateError(AtlasError):
    """The chat template is missing, does not compile or refused the messages."""

    code = 17


class KernelError(AtlasError):
    """A kernel could not be compiled, loaded or run."""

    code = 18


class Cancelled(AtlasError):
    """The work was cancelled by its caller."""

    code = 19


class ExpertCommandFailed(AtlasError):
    """A command that a parallel worker received and could not carry out; the worker stays up."""

    code = 20


class QueueFullError(AtlasError):
    """The engine takes no more requests now: ``max_waiting`` wait already, or it drains."""

    code = 21


class CallbackError(AtlasError):
    """A function given by the user raised; its error is the cause."""

    code = 22
