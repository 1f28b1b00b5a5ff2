"""The state of one sequence: the native counters and blocks, and what Python adds to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atlas._native.sequence import Sequence
from atlas.cache.state_slots import HeldState
from atlas.errors import SequenceStateError

Status = Literal["active", "failed", "freed"]


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """One stream of tokens in a model's pools. Made by ``lifecycle.alloc_sequence``.

    Tokens, ``seq_len``, ``prompt_len`` and the block table live in ``native``, their only owner.

    Attributes
    ----------
    native : Sequence
    model_key : object
        Identity of the model whose pools hold it.
    budget_tokens : int
        The most positions it may reach.
    held : HeldState, optional
        Its slots of the recurrent pools; None without recurrent layers.
    proposer : object
        Handle of a proposer's state.
    matched_tokens, matched_blocks, lookup_done : int, int, bool
        The prefix lookup's recorded decision, replayed when a prefill is retried.
    prefix : Sequence, optional
        Holds what was matched from the lookup until a first window has run.
    exact_len : int, optional
        Where it stands on generated blocks: the positions before them. None: nothing generated
        went into its prompt.
    adapter_requested, adapter_slot, adapter_id : int, int, int
        The slot asked for, the slot held, and its content id (0 = base).
    snapshot_ring_position : int
    skip_next_decode_append : bool
        The next decode's token is in ``tokens`` already.
    vision_spans : list of (start, length)
    encoder, source_language, target_language : object, int, int
        Encoder-decoder models.
    """

    native: Sequence
    model_key: object
    budget_tokens: int
    held: HeldState | None = None
    proposer: Any = None
    matched_tokens: int = 0
    matched_blocks: int = 0
    lookup_done: bool = False
    prefix: Sequence | None = None
    exact_len: int | None = None
    adapter_requested: int = -1
    adapter_slot: int = -1
    adapter_id: int = 0
    snapshot_ring_position: int = 0
    skip_next_decode_append: bool = False
    vision_spans: list[tuple[int, int]] = field(default_factory=list)
    encoder: Any = None
    source_language: int = 0
    target_language: int = 0

    @property
    def slot(self) -> int | None:
        """Recurrent pool slot; None without one, or after detach."""
        return None if self.held is None else self.held.slot

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Committed token ids, int32 [seq_len] (a copy)."""
        return self.native.tokens

    @property
    def block_table(self) -> NDArray[np.uint32]:
        """KV block numbers, uint32 [blocks] (a copy)."""
        return self.native.block_table

    @property
    def seq_len(self) -> int:
        """Positions whose K/V is committed."""
        return self.native.seq_len

    @property
    def prompt_len(self) -> int:
        """Prompt tokens; positions from here on are step tokens."""
        return self.native.prompt_len

    @property
    def kv_valid_tokens(self) -> int:
        """Cap on the tokens whose blocks may be cached."""
        return self.native.kv_valid_tokens

    @property
    def verify_rows(self) -> int:
        """Rows of a verify that awaits ``accept``; else 0."""
        return self.native.verify_rows

    @property
    def status(self) -> Status:
        """``active``, ``failed`` (only free is allowed) or ``freed``."""
        if self.native.freed:
            return "freed"
        return "failed" if self.native.failed else "active"

    @property
    def num_exact(self) -> int:
        """Positions whose KV only prompt tokens went into."""
        return self.prompt_len if self.exact_len is None else min(self.prompt_len, self.exact_len)

    def forget_lookup(self) -> None:
        """Drop the lookup's decision and what it holds; the next first window decides anew."""
        if self.prefix is not None:
            self.prefix.release()
            if self.held is not None:  # the state that belongs to the prefix
                self.held.zero()
        self.prefix = self.exact_len = None
        self.matched_tokens = self.matched_blocks = 0
        self.lookup_done = False

    def read_state(self) -> list[NDArray[Any]]:
        """A copy of the recurrent state, layer by layer, state then tail; empty without one."""
        return [] if self.held is None else self.held.read()

    def write_state(self, parts: list[NDArray[Any]]) -> None:
        """What :meth:`read_state` gave of a sequence of the same model and length."""
        if self.held is not None:
            self.held.write(parts, self.seq_len)

    def __copy__(self) -> SequenceState:
        raise SequenceStateError("a sequence owns its blocks; use lifecycle.fork(seq)")

    def __deepcopy__(self, memo: object) -> SequenceState:
        return self.__copy__()

    def __repr__(self) -> str:
        pending = f", verify of {self.verify_rows} rows pending" if self.verify_rows else ""
        return (
            f"SequenceState({self.status}, seq_len={self.seq_len}, prompt_len={self.prompt_len}, "
            f"blocks={self.native.num_blocks}{pending})"
        )

    def _repr_html_(self) -> str:
        rows = {
            "status": self.status,
            "positions": f"{self.seq_len} of {self.budget_tokens} ({self.prompt_len} prompt)",
            "KV blocks": self.native.num_blocks,
        }
        cells = "".join(f"<tr><th>{key}</th><td>{value}</td></tr>" for key, value in rows.items())
        return f"<table><caption>SequenceState</caption>{cells}</table>"
