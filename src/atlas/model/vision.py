"""Vision: encode images so that a prefill finds their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from atlas.model.records import TokenIds, VisionItem


class VisionSlice(NamedTuple):
    """Where one request's images lie in the output of a batched encode."""

    row_offset: int
    grid_offset: int
    num_images: int
    num_rows: int


class ModelVision(Protocol):
    """Run the vision encoder ahead of the prompt that shows its images.

    Pad tokens of a prompt are replaced by encoder rows in the order of the images. What the
    pixels show is part of the prompt's prefix key. A sequence with image spans cannot be rebuilt
    from its tokens, so it is spilled when preempted and never requeued.
    """

    def prepare(self, images: Sequence[VisionItem]) -> None:
        """Encode ``images`` and keep their rows for the next prefill.

        Before ``prefill_chunk``; the rows replace those of an earlier call.
        """
        ...

    def prepare_batched(self, per_request: Sequence[Sequence[VisionItem]]) -> list[VisionSlice]:
        """Encode the images of several requests in one pass that reads the weights once.

        Parameters
        ----------
        per_request
            The images of each request.

        Returns
        -------
        list of VisionSlice
            Parallel to ``per_request``; give each to :meth:`set_slice_base` before its prefill.
        """
        ...

    def set_slice_base(self, row: int, grid: int, images: int) -> None:
        """Let the next ``prefill_chunk`` read its rows from ``row`` and its grids from ``grid`` on.

        ``images`` is how many belong to it. (0, 0, 0) resets to a single request's layout.
        """
        ...

    def contains_pad(self, tokens: TokenIds) -> bool:
        """Whether ``tokens`` hold an image or video pad token of this model."""
        ...

    def sync_embeds(self, tokens: TokenIds) -> None:
        """Give every rank the same encoder rows for the prompt ``tokens``.

        A collective: the head calls it after it has broadcast the prompt, each worker at the same
        point. Nothing on one rank.
        """
        ...
