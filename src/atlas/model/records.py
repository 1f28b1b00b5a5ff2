"""Small frozen values that cross the Model interface, and the batch sizes everyone agrees on."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from atlas.errors import InvalidArgumentError, ShapeError, shown
from atlas.whole_number import whole_number

if TYPE_CHECKING:
    from atlas.model.logits_view import LogitsView
    from atlas.model.sequence import SequenceState

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids, each in ``[0, vocab_size)``; one dimension."""

EarlyStopping: TypeAlias = bool | Literal["never"]
"""When a beam search that has ``num_beams`` ended hypotheses stops."""

MAX_BEAMS: Final = 16
"""Beams of a search at most."""

MAX_LENGTH_PENALTY: Final = 5.0
"""Its magnitude at most: the power of the longest length there may be, 2²⁰, and a score over its
reciprocal are finite in float32."""

LogitsMode: TypeAlias = Literal["last", "all", "none"]
"""Which rows of a forward get logits: the last position, every position, or no row."""

Stream = NewType("Stream", int)
"""A queue of ordered work, as its backend's handle; every value is equal on the CPU."""

Event = NewType("Event", int)
"""A point in a stream's work, as its backend's handle."""

NON_FINITE: Final = -1
"""What a batched argmax holds for a row with NaN or infinity; never a token id."""

PADDED_BATCH_SIZES: Final = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The batch rungs for which graphs are captured."""

METADATA_MIN_ROWS: Final = 32
"""Rows of per-step metadata that exist however few sequences may run."""


def padded_batch(n: int) -> int:
    """Return the batch rung of ``n`` sequences: the least one that holds them, else ``n``.

    This is the only definition. A caller with a single sequence does not pad (it has a graph of
    its own), although the least rung is 2. Padding lanes address a dummy slot and a dummy block.

    Raises
    ------
    InvalidArgumentError
        If ``n`` is less than 1.
    """
    _at_least("n", n, 1)
    return next((size for size in PADDED_BATCH_SIZES if size >= n), n)


def metadata_rows(max_running: int) -> int:
    """Return how many rows of per-step metadata serve up to ``max_running`` sequences."""
    return max(METADATA_MIN_ROWS, padded_batch(max_running))


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlice:
    """One window of one prompt, as the batched forwards take it.

    Attributes
    ----------
    prompt_tokens
        The whole prompt, not only the window.
    seq
        The sequence that the window extends.
    chunk_start, chunk_len
        The window, in tokens of the prompt; at least one token.
    is_last_chunk
        Whether the window ends the prompt; must agree with the window.
    """

    prompt_tokens: TokenIds
    seq: SequenceState
    chunk_start: int
    chunk_len: int
    is_last_chunk: bool

    def __post_init__(self) -> None:
        _at_least("chunk_start", self.chunk_start, 0)
        _at_least("chunk_len", self.chunk_len, 1)
        end, prompt_len = self.chunk_start + self.chunk_len, len(self.prompt_tokens)
        if end > prompt_len:
            raise InvalidArgumentError(
                f"chunk [{self.chunk_start}, {end}) ends after the prompt of {prompt_len} tokens"
            )
        if self.is_last_chunk != (end == prompt_len):
            raise InvalidArgumentError(
                f"is_last_chunk is {self.is_last_chunk}, but the chunk ends at {end} of "
                f"{prompt_len} prompt tokens"
            )


@dataclass(frozen=True, slots=True, eq=False)
class MixedForwardResult:
    """Logits of one decode batch plus one chunk.

    ``decode_logits`` is ``[num_decode, V]``, or None when there was no decode token;
    ``prefill_logits`` is None unless the chunk was the last one or its rows were asked for.
    """

    decode_logits: LogitsView | None
    prefill_logits: LogitsView | None


@dataclass(frozen=True, slots=True, eq=False)
class MixedBatchResult:
    """Logits of one decode batch plus several chunks.

    ``prefill_logits`` is parallel to the slices; an entry is None where its slice did not end
    its prompt and asked for no rows. ``decode_logits`` is None without decode tokens.
    """

    decode_logits: LogitsView | None
    prefill_logits: list[LogitsView | None]


@dataclass(frozen=True, slots=True)
class FeedSource:
    """Where one row of a fed decode step finds its input id: exactly one of two places.

    Attributes
    ----------
    token
        An id that the host knows.
    cell
        The row of the previous step whose argmax, still on the device, is this row's input.
    """

    token: int | None = None
    cell: int | None = None

    def __post_init__(self) -> None:
        if (self.token is None) == (self.cell is None):
            raise InvalidArgumentError(
                f"give exactly one of token and cell; got token={self.token}, cell={self.cell}"
            )
        if self.token is not None:
            _at_least("token", self.token, 0)
        if self.cell is not None:
            _at_least("cell", self.cell, 0)


@dataclass(frozen=True, slots=True)
class RowExclusion:
    """The ids that one row's device argmax must not choose: none, one or two."""

    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) > 2:
            raise InvalidArgumentError(
                f"{len(self.token_ids)} ids to exclude from a row; at most 2 are allowed"
            )
        for token in self.token_ids:
            _at_least("an excluded token id", token, 0)


@dataclass(frozen=True, slots=True)
class PrefixReclaim:
    """What ``lifecycle.reclaim_prefix_blocks_for`` achieved.

    Attributes
    ----------
    freed
        Cached blocks that became free.
    reusable
        Cached blocks that the prompt will reuse, and that were therefore kept.
    satisfied
        Whether free plus reusable blocks now cover the need.
    """

    freed: int
    reusable: int
    satisfied: bool

    def __post_init__(self) -> None:
        _at_least("freed", self.freed, 0)
        _at_least("reusable", self.reusable, 0)


@dataclass(frozen=True, slots=True, eq=False)
class VisionItem:
    """One preprocessed image, or one video clip.

    Attributes
    ----------
    pixels
        float32 ``[patches, C·T·Hp·Wp]``: one row a patch of C channels, T frames, Hp × Wp pixels.
    grid_h, grid_w
        Patches down and across; ``patches`` is a multiple of their product (one grid per T
        frames).
    """

    pixels: npt.NDArray[np.float32]
    grid_h: int
    grid_w: int

    def __post_init__(self) -> None:
        _at_least("grid_h", self.grid_h, 1)
        _at_least("grid_w", self.grid_w, 1)
        pixels = self.pixels
        if pixels.dtype != np.float32 or pixels.ndim != 2 or pixels.shape[1] == 0:
            raise ShapeError(
                f"pixels are {pixels.dtype} {list(pixels.shape)}; "
                "allowed: float32 [patches, values of a patch]"
            )
        if not pixels.shape[0] or pixels.shape[0] % (self.grid_h * self.grid_w):
            raise ShapeError(
                f"{pixels.shape[0]} patches do not fill grids of {self.grid_h} × {self.grid_w}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class BeamRequest:
    """One run-to-completion beam search over an encoder-decoder model.

    Attributes
    ----------
    prompt_tokens
        Source subwords only; the model adds the language tag and the end token.
    src_lang_id, tgt_lang_id
        Language token ids; 0 is the deployment's default.
    adapter_slot
        A resident adapter slot, or −1 for the base model (not for the active adapter).
    num_beams, max_new
        Beam width and the most tokens a hypothesis may have; at least 1 each.
    length_penalty
        A hypothesis is scored by its log-probability / length ** length_penalty; −5 … 5.
    early_stopping
        A search with ``num_beams`` ended hypotheses stops at once (True), when its best running
        one, ended now, would not beat the worst of them (False), or when it could not at any
        length ("never").
    no_repeat_ngram
        Length of the n-grams that may not occur twice in a hypothesis; 0 switches it off.
    num_return
        How many of the best hypotheses to return, 1 … ``num_beams``.
    """

    prompt_tokens: TokenIds
    src_lang_id: int
    tgt_lang_id: int
    adapter_slot: int
    num_beams: int
    max_new: int
    length_penalty: float
    early_stopping: EarlyStopping
    no_repeat_ngram: int = 0
    num_return: int = 1

    def __post_init__(self) -> None:
        if not len(self.prompt_tokens):
            raise InvalidArgumentError("prompt_tokens is empty; at least one token is needed")
        least = {"src_lang_id": 0, "tgt_lang_id": 0, "adapter_slot": -1, "num_beams": 1}
        least |= {"max_new": 1, "no_repeat_ngram": 0, "num_return": 1}
        for name, low in least.items():
            # NumPy's integers would overflow where they are multiplied.
            object.__setattr__(self, name, whole_number(name, getattr(self, name), low))
        require_length_penalty(self.length_penalty)
        require_early_stopping(self.early_stopping)
        if self.num_return > self.num_beams:
            raise InvalidArgumentError(
                f"num_return is {self.num_return}; allowed: 1 … num_beams ({self.num_beams})"
            )


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """One result of a beam search.

    Its ids, without start token and language tag, the end token included where it did not reach
    ``max_new``; and its penalised score.
    """

    token_ids: tuple[int, ...]
    score: float


def require_length_penalty(value: Any) -> None:
    """Raise for what is no number, or whose powers of a length float32 cannot hold."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not -MAX_LENGTH_PENALTY <= value <= MAX_LENGTH_PENALTY:
        raise InvalidArgumentError(
            f"length_penalty is {shown(value)}; allowed: a number, "
            f"{-MAX_LENGTH_PENALTY:g} … {MAX_LENGTH_PENALTY:g}"
        )


def require_early_stopping(value: Any) -> None:
    """Raise for what is none of the three, though it may equal one: 1, or NumPy's True."""
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise InvalidArgumentError(
            f"early_stopping is {shown(value)}; allowed: True, False, 'never'"
        )


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise InvalidArgumentError(f"{name} is {value}; must be at least {minimum}")
