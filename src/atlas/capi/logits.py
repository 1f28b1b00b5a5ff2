"""Logits handles: which rows they name, and reading those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from atlas.capi._binding import ffi
from atlas.capi.calls import exported
from atlas.capi.engine import driving
from atlas.capi.handles import HANDLES, handled
from atlas.capi.memory import number, require, require_buffer, struct_size, write_array
from atlas.errors import (
    CapabilityError,
    InvalidArgumentError,
    NonFiniteLogitsError,
    StaleHandleError,
)

if TYPE_CHECKING:
    from atlas.engine import Engine
    from atlas.model.logits_view import LogitsView

_POINTER = ffi.typeof("atlas_logits *")


@handled("logits")
class LogitsRows:
    """Rows of an engine's arena; None while the handle names none."""

    __slots__ = ("engine", "view")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.view: LogitsView | None = None

    def rows(self) -> LogitsView:
        """The view; raises when there is none."""
        if self.view is None:
            raise StaleHandleError("this logits handle names no rows; the last forward made none")
        return self.view


class LogitsTarget:
    """Where a forward puts its rows: checked before the forward, filled after it.

    Parameters
    ----------
    engine : Engine
    out : cdata ``atlas_logits **``
        NULL; or pointing to NULL or to a handle of the engine.
    """

    __slots__ = ("_engine", "_existing", "_out")

    def __init__(self, engine: Engine, out: Any) -> None:
        self._engine, self._out = engine, out
        self._existing: LogitsRows | None = None
        if out and out[0]:
            self._existing = HANDLES.get(number(out[0]), LogitsRows)
            if self._existing.engine is not engine:
                raise InvalidArgumentError("the logits handle belongs to another engine")

    def put(self, view: LogitsView | None) -> None:
        """Let the caller's handle name the rows."""
        if self._existing is not None:
            self._existing.view = view
        elif self._out and view is not None:
            rows = LogitsRows(self._engine)
            rows.view = view
            self._out[0] = ffi.cast(_POINTER, HANDLES.add(rows))


def rows_of(handle: Any) -> LogitsRows:
    """The rows of a handle."""
    return HANDLES.get(number(handle), LogitsRows)


@exported
def logits_get_shape(handle: Any, num_rows: Any, vocab_size: Any) -> None:
    """Rows and vocabulary."""
    found = rows_of(handle)
    require(num_rows, "num_rows")
    require(vocab_size, "vocab_size")
    with driving(found.engine) as model:
        size = model.config.vocab_size
    num_rows[0] = 0 if found.view is None else found.view.num_rows
    vocab_size[0] = size


@exported
def logits_to_host(handle: Any, buffer: Any, capacity: int, count: Any) -> None:
    """Copy the rows."""
    found = rows_of(handle)
    require_buffer(buffer, capacity, count)
    with driving(found.engine):
        write_array(found.rows().numpy().reshape(-1), buffer, capacity, count, "floats")


@exported
def logits_argmax(handle: Any, row: int, token: Any) -> None:
    """The greatest logit of one row."""
    found = rows_of(handle)
    require(token, "token")
    with driving(found.engine) as model:
        view = one_row(found.rows(), row)
        best = int(model.logits.argmax_batch(view, 1)[0])
    if best < 0:
        raise NonFiniteLogitsError(f"logits row {row} holds NaN or infinity")
    token[0] = best


@exported
def logits_argmax_batch(handle: Any, tokens: Any, capacity: int, num_tokens: Any) -> None:
    """The greatest logit of each row, −1 where there is none."""
    found = rows_of(handle)
    require_buffer(tokens, capacity, num_tokens)
    with driving(found.engine) as model:
        view = found.rows()
        best = model.logits.argmax_batch(view, view.num_rows)
    write_array(np.asarray(best, np.int32), tokens, capacity, num_tokens, "ids")


@exported
def logits_get_device_rows(handle: Any, rows: Any) -> None:
    """Where the rows lie on a GPU."""
    found = rows_of(handle)
    struct_size(rows, "atlas_device_rows", "rows", "device")
    with driving(found.engine) as model:
        array = found.rows().device_rows
        if isinstance(array, np.ndarray):
            raise CapabilityError("this engine runs on the CPU; its logits have no device pointer")
        _, device = array.__dlpack_device__()
        rows.pointer = ffi.cast("void *", array.address)
        rows.stream = ffi.cast("void *", model.streams.handle(model.streams.default))
        rows.row_stride = array.strides[0] // array.itemsize
        rows.element_bytes = array.itemsize
        rows.device = device


@exported
def logits_free(handle: Any) -> None:
    """Free the handle; the rows are the engine's."""
    HANDLES.remove(number(handle), LogitsRows)


def one_row(view: LogitsView, row: int) -> LogitsView:
    """A view of one row."""
    if row >= view.num_rows:
        raise InvalidArgumentError(f"row is {row}; allowed: 0 … {view.num_rows - 1}")
    return view if view.num_rows == 1 else view[row]
