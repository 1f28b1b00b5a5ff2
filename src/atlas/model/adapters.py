"""Adapters: low-rank deltas that live in slots and are chosen per sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atlas.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The numbers of an adapter that its peer's manifest does not carry."""

    rank: int
    alpha: float
    scaling: float

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidArgumentError(f"rank is {self.rank}; must be at least 1")
        if not (math.isfinite(self.alpha) and math.isfinite(self.scaling)):
            raise InvalidArgumentError(
                f"alpha is {self.alpha} and scaling {self.scaling}; both must be finite"
            )


class ModelAdapters(Protocol):
    """Load low-rank adapters into a pool of slots and hold them while sequences use them.

    A requested ``slot`` ≥ 0 names a resident adapter, −1 the active one (but in a ``BeamRequest``
    −1 is the base model). Members that load or switch adapters run only while nothing is in
    flight and raise ``SequenceStateError`` otherwise. A loaded adapter goes to the slot that was
    used least recently and is not referenced; without such a slot the load raises.
    """

    def set_active(self, name: str) -> None:
        """Make the resident adapter ``name`` the active one.

        Raises
        ------
        InvalidArgumentError
            If no such adapter is resident; the message lists those that are.
        """
        ...

    def adapter_id_for(self, slot: int) -> int:
        """Return the identity of the adapter in ``slot``, resolving −1; 0 is the base model.

        It covers the adapter's content and load generation and is part of every prefix key, so
        that a reloaded slot never meets its predecessor's KV.
        """
        ...

    def acquire_slot(self, slot: int) -> int:
        """Take a reference on the adapter that a sequence will use, at its prefill.

        −1 is resolved now, so a later switch of the active adapter does not reach the sequence.

        Returns
        -------
        int
            The slot that was referenced, or −1 = nothing taken. Give exactly this to
            :meth:`release_slot`.
        """
        ...

    def release_slot(self, slot: int) -> None:
        """Drop the reference that :meth:`acquire_slot` returned as ``slot``; −1 does nothing."""
        ...

    def swap_from_disk(self, directory: Path, name: str, slot: int) -> None:
        """Load the adapter in ``directory`` as ``name`` into exactly pool ``slot``.

        Raises
        ------
        ModelFileError
            If the folder is damaged or its shapes do not fit the model; the slot is unchanged.
        """
        ...

    def promote_from_disk(self, directory: Path, name: str) -> tuple[int, str | None]:
        """Load the adapter in ``directory`` as ``name`` and make it active.

        Rank, alpha and scaling come from the folder's configuration.

        Returns
        -------
        (int, str or None)
            Its slot, and the name of the adapter it evicted.
        """
        ...

    def promote_from_peer(
        self, addr: str, adapter_id: str, name: str, peft: PeftConfig
    ) -> tuple[int, str | None]:
        """Fetch an adapter from another process and make it active.

        Parameters
        ----------
        addr
            Where the peer listens.
        adapter_id
            What the peer calls the staged adapter.
        name
            What it is called here.
        peft
            Its rank, alpha and scaling, which are not read from the peer.

        Returns
        -------
        (int, str or None)
            As :meth:`promote_from_disk`.
        """
        ...
