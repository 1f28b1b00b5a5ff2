"""Logits: where the rows of a forward lie and how they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from atlas.errors import (
    InvalidArgumentError,
    NonFiniteLogitsError,
    ShapeError,
    StaleHandleError,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from atlas.model.core import ModelCore
    from atlas.model.logits_view import LogitsView
    from atlas.model.records import Stream


class ModelLogits(Protocol):
    """Read the rows that a forward left in the logits arena.

    V is the vocabulary. A ``view`` names arena rows and the generation that wrote them; every
    method checks it and raises ``StaleHandleError`` when a later call has overwritten a row.
    Host reads wait for the work of ``stream`` (None: the model's default stream) first.

    The greatest logit wins; ties go to the lowest id on every backend. A row that holds NaN or
    infinity has no argmax and is reported, never answered with an id.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of logits in a row and one more than the greatest token id."""
        ...

    def to_host(
        self, view: LogitsView, out: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Copy a view's rows to the host, widened to float32.

        Parameters
        ----------
        view
            Rows of the arena.
        out
            float32 ``[rows, V]``, C-contiguous, written and returned; None allocates.

        Raises
        ------
        ShapeError
            If ``out`` has another shape, dtype or layout; nothing was written.
        """
        ...

    @property
    def buffer(self) -> LogitsView:
        """The whole arena as a view of the present generation; a verify leaves K rows in it.

        It has at least max(padded most running sequences + prefills per step, verify rows) rows.
        """
        ...

    def is_fp32(self, view: LogitsView) -> bool:
        """Whether a ``view``'s rows are stored as float32 (4 bytes a logit), else as bfloat16."""
        ...

    def argmax(self, view: LogitsView, *, stream: Stream | None = None) -> int:
        """Return the id of the greatest logit of a ``view`` of one row.

        Raises
        ------
        ShapeError
            If the view has another number of rows.
        NonFiniteLogitsError
            If the row holds NaN or infinity.
        """
        ...

    def argmax_batch(
        self, view: LogitsView, n: int, *, stream: Stream | None = None
    ) -> npt.NDArray[np.int32]:
        """Return the argmax of each of the first ``n`` rows of a view.

        Parameters
        ----------
        view
            At least ``n`` rows.
        n
            1 … the view's rows; padding rows of a batch are left out this way.

        Returns
        -------
        int32 [n]
            ``records.NON_FINITE`` (−1) marks a row that holds NaN or infinity; the other rows are
            unaffected by it.

        Raises
        ------
        InvalidArgumentError
            If ``n`` is outside 1 … rows.
        """
        ...

    def hidden_after_norm(self) -> npt.NDArray[np.float32]:
        """Copy the final norm's output of the last decode step to the host, float32 [rows, D].

        Row i is the i-th sequence of that step; D is the hidden size.

        Raises
        ------
        StaleHandleError
            If no decode ran yet, or another forward has overwritten the rows.
        """
        ...


class DenseLogits(ModelLogits):
    """Reads the float32 arena of a model in host memory."""

    def __init__(self, core: ModelCore) -> None:
        self._core = core

    @property
    def vocab_size(self) -> int:
        return self._core.config.vocab_size

    def _check(self, view: LogitsView, stream: Stream | None = None) -> None:
        self._core.enter()
        self._core.check_stream(stream)
        if not view.belongs_to(self._core.arena):
            raise StaleHandleError("these logits belong to another model")

    def to_host(
        self, view: LogitsView, out: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        self._check(view)
        rows = view.numpy()
        if out is None:
            return rows.copy()
        if out.shape != rows.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ShapeError(
                f"out is {out.dtype} {list(out.shape)}; "
                f"allowed: C-contiguous float32 {list(rows.shape)}"
            )
        out[...] = rows
        return out

    @property
    def buffer(self) -> LogitsView:
        self._core.enter()
        return self._core.whole_arena()

    def is_fp32(self, view: LogitsView) -> bool:
        self._check(view)
        return view.dtype == np.float32

    def argmax(self, view: LogitsView, *, stream: Stream | None = None) -> int:
        if view.num_rows != 1:
            raise ShapeError(f"argmax of a view of {view.num_rows} rows; allowed: 1")
        best = int(self.argmax_batch(view, 1, stream=stream)[0])
        if best < 0:
            raise NonFiniteLogitsError(f"logits row {view.first_row} holds NaN or infinity")
        return best

    def argmax_batch(
        self, view: LogitsView, n: int, *, stream: Stream | None = None
    ) -> npt.NDArray[np.int32]:
        self._check(view, stream)
        if not 1 <= n <= view.num_rows:
            raise InvalidArgumentError(f"n is {n}; allowed: 1 … {view.num_rows}")
        return self._core.argmax(view)[:n]

    def hidden_after_norm(self) -> npt.NDArray[np.float32]:
        self._core.enter()
        return self._core.decode_hidden()
