"""Rows of the logits arena, guarded against being read after they were overwritten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ClosedError, InvalidArgumentError, ShapeError, StaleHandleError

if TYPE_CHECKING:
    from collections.abc import Callable

Floats = NDArray[np.float32]


class LogitsArena:
    """The rows that forwards write, and which call wrote each of them.

    Parameters
    ----------
    rows : float32 [R, C]
    guard : callable
        Raises when the model was closed or belongs to a parent process.
    read : callable, optional
        Gives rows as a NumPy array: a copy where they lie in a device's memory. Default: the rows
        themselves.
    """

    def __init__(
        self, rows: Any, guard: Callable[[], None], read: Callable[[Any], Floats] | None = None
    ) -> None:
        self.rows = rows
        self._read = read
        self.generations = np.zeros(len(rows), np.int64)
        self.generation = 0
        self.num_unread_decode = 0  # rows 0 … n − 1 hold decode logits that nobody has read
        self._guard = guard

    def overwrite(self, first: int, count: int) -> None:
        """Make every view of rows that are about to be written stale."""
        self.generation += 1
        self.generations[first : first + count] = self.generation
        if count and first < self.num_unread_decode:
            self.num_unread_decode = 0

    def claim(self, first: int, count: int) -> LogitsView:
        """A view of rows that were written; older views of these rows are stale."""
        self.overwrite(first, count)
        return LogitsView(self, first, count)

    def read(self, view: LogitsView) -> Floats:
        """The view's rows in host memory."""
        rows = self.rows[view.first_row : view.first_row + view.num_rows]
        values: Floats = rows if self._read is None else self._read(rows)
        return values

    def drop(self) -> None:
        """Let go of the memory: the model was closed."""
        self.rows = np.empty((0, self.rows.shape[1]), np.float32)

    def check(self, view: LogitsView) -> None:
        """Raise unless the view's rows are those it was made for."""
        self._guard()
        now = self.generations[view.first_row : view.first_row + view.num_rows]
        if not np.array_equal(now, view.generations):
            raise StaleHandleError(
                f"logits rows {view.first_row} … {view.first_row + view.num_rows - 1} were "
                "overwritten by a later call"
            )

    def mark_read(self, view: LogitsView) -> None:
        """The view's rows may be overwritten from now on."""
        if view.first_row < self.num_unread_decode:
            self.num_unread_decode = 0


class LogitsView:
    """float32 logits [rows, vocabulary] in the arena, valid until a later call writes the rows.

    ``np.asarray(view)`` is a copy; :meth:`numpy` is read-only, on the CPU without a copy.
    """

    __slots__ = ("_arena", "first_row", "generations", "num_rows")

    def __init__(self, arena: LogitsArena, first_row: int, num_rows: int) -> None:
        self._arena = arena
        self.first_row = first_row
        self.num_rows = num_rows
        self.generations = arena.generations[first_row : first_row + num_rows].copy()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, vocabulary)."""
        return self.num_rows, self._arena.rows.shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32."""
        dtype: np.dtype[Any] = np.dtype(self._arena.rows.dtype)
        return dtype

    @property
    def row_numbers(self) -> range:
        """Arena rows of this view."""
        return range(self.first_row, self.first_row + self.num_rows)

    def belongs_to(self, arena: LogitsArena) -> bool:
        """Whether the view is of that arena."""
        return self._arena is arena

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> LogitsView:
        """A view of one row; negative counts from the end."""
        if not -self.num_rows <= row < self.num_rows:
            raise IndexError(f"row is {row}; allowed: {-self.num_rows} … {self.num_rows - 1}")
        self._arena.check(self)
        return LogitsView(self._arena, self.first_row + row % self.num_rows, 1)

    def numpy(self) -> Floats:
        """A read-only array of the rows: on the CPU no copy, and later calls overwrite it unseen.

        From a GPU they are copied once the step has run.
        """
        self._arena.check(self)
        self._arena.mark_read(self)
        rows = self._arena.read(self).view()
        rows.flags.writeable = False
        return rows

    @property
    def device_rows(self) -> Any:
        """The rows where the step left them, without a copy and without waiting for it.

        On a GPU a ``DeviceArray``, which other libraries view by DLPack or by
        ``__cuda_array_interface__``; order their stream behind the model's, or synchronise first.
        """
        self._arena.check(self)
        self._arena.mark_read(self)
        return self._arena.rows[self.first_row : self.first_row + self.num_rows]

    def __dlpack__(self, **options: Any) -> Any:
        """The rows for another library (``torch.from_dlpack(view)``), without a copy."""
        return self.device_rows.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        self._arena.check(self)
        return self._arena.rows.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Of rows on a GPU; an AttributeError otherwise."""
        interface: dict[str, Any] = self.device_rows.__cuda_array_interface__
        return interface

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ShapeError("a LogitsView is copied by asarray; use view.numpy() for no copy")
        return self.numpy().astype(dtype or np.float32, copy=True)

    def topk(self, k: int = 10) -> list[list[tuple[int, float]]]:
        """For each row its k greatest (id, logit), greatest first, lower id first on ties."""
        rows = self.numpy()
        if not 1 <= k <= rows.shape[1]:
            raise InvalidArgumentError(f"k is {k}; allowed: 1 … {rows.shape[1]}")
        order = np.argsort(-rows, axis=-1, kind="stable")[:, :k]
        return [
            [(int(i), float(row[i])) for i in ids] for row, ids in zip(rows, order, strict=True)
        ]

    def _state(self) -> str:
        try:
            self._arena.check(self)
        except StaleHandleError:
            return "stale"
        except ClosedError:
            return "closed"
        return "valid"

    def __repr__(self) -> str:
        return f"LogitsView(rows={self.num_rows}, vocabulary={self.shape[1]}, {self._state()})"

    def _repr_html_(self) -> str:
        if self._state() != "valid":
            return f"<i>{self!r}</i>"
        cells = "".join(
            "<tr><th>row {}</th>{}</tr>".format(
                row, "".join(f"<td>{i}: {value:.3f}</td>" for i, value in best)
            )
            for row, best in enumerate(self.topk(min(5, self.shape[1])))
        )
        return f"<table><caption>{self!r}, five greatest</caption>{cells}</table>"
