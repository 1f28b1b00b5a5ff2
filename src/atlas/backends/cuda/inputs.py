"""A step's integers: written by the host into pinned memory, brought to the device as one piece."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.memory import PinnedMemory
from atlas.layers.step import INPUTS, StepShape
from atlas.layers.translation_step import TRANSLATION_INPUTS

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice

Ints = NDArray[np.int32]
_ALIGNMENT = 64
PADDING_TOKEN = -1
"""The embedding of a padding row is zeros."""
PADDING_SLOT = -1
"""Nothing is stored for a padding row, and a padding sequence has no state."""


_ROWS = {"token_ids": PADDING_TOKEN, "positions": 0, "slots": PADDING_SLOT}
_SEQUENCES = {"block_tables": 0, "state_slots": PADDING_SLOT}


def _move(array: Ints, first: int, end: int, distance: int, value: int) -> None:
    """Move entries ``first`` … ``end - 1`` back by ``distance``, and fill where they were."""
    if distance:
        array[first + distance : end + distance] = array[first:end].copy()
        array[first : first + distance] = value


def fed(source_rows: Ints) -> Ints:
    """Token ids that stand for "what the step before chose for this logits row"."""
    return np.asarray(-2 - source_rows, np.int32)


def is_translation(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the shapes are those of ``TranslationBuffers``."""
    return "source_tables" in shapes


def input_names(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The buffers of integers that the host writes."""
    return TRANSLATION_INPUTS if is_translation(shapes) else INPUTS


class InputLayout:
    """Where each array of integers lies: block tables last, since a step copies its own rows only.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Of ``StepBuffers`` or ``TranslationBuffers``; those that are not inputs are left out.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        inputs = input_names(shapes)
        names = [name for name in inputs if name in shapes and name != "block_tables"]
        self.shapes = {name: shapes[name] for name in (*names, "block_tables")}
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.nbytes
            self.nbytes += -(-4 * prod(shape) // _ALIGNMENT) * _ALIGNMENT

    def used_bytes(self, seqs: int) -> int:
        """Bytes up to the end of the block tables of ``seqs`` sequences."""
        return self.offsets["block_tables"] + 4 * seqs * self.shapes["block_tables"][1]

    def device_views(self, mirror: DeviceArray) -> dict[str, DeviceArray]:
        """The arrays in the device's copy."""
        return {
            name: DeviceArray(mirror.address + self.offsets[name], shape, "int32", owner=mirror)
            for name, shape in self.shapes.items()
        }


class InputRegion:
    """One copy of the integers in pinned memory, as NumPy arrays under the names of the buffers.

    ``event`` stands for a step that has read them, after which the host may write again.
    """

    def __init__(self, device: CudaDevice, layout: InputLayout) -> None:
        self._device = device
        self.pinned = PinnedMemory(device, layout.nbytes)
        self.pinned.array[:] = 0
        self.event = device.create_event()
        self.num_fed = 0  # rows whose token the device knows and the host does not
        self.arrays: Any = SimpleNamespace(
            **{
                name: self.pinned.array[at : at + 4 * prod(shape)].view(np.int32).reshape(shape)
                for (name, shape), at in zip(
                    layout.shapes.items(), layout.offsets.values(), strict=True
                )
            }
        )

    def pad(self, shape: StepShape, padded: StepShape) -> None:
        """Fill what the padded shape has more: rows of nobody, empty sequences, logits of row 0.

        Prompts' rows and sequences move behind the padding of the steps'.
        """
        arrays = self.arrays
        more_rows = padded.step_rows - shape.step_rows
        more_seqs = padded.step_seqs - shape.step_seqs
        end, end_seq = shape.rows, shape.seqs
        if shape.rows > shape.step_rows:
            for name, value in _ROWS.items():
                _move(getattr(arrays, name), shape.step_rows, shape.rows, more_rows, value)
            for name, value in _SEQUENCES.items():
                _move(getattr(arrays, name), shape.step_seqs, shape.seqs, more_seqs, value)
            wanted = arrays.logits_rows[: shape.logits]
            wanted[wanted >= shape.step_rows] += more_rows
            end, end_seq = end + more_rows, end_seq + more_seqs
        for name, value in _ROWS.items():
            getattr(arrays, name)[end : padded.rows] = value
        arrays.kept_rows[shape.step_rows : padded.step_rows] = PADDING_SLOT
        arrays.state_slots[end_seq : padded.seqs] = PADDING_SLOT
        arrays.cu_rows[shape.step_seqs + 1 : padded.seqs + 1] = shape.step_rows
        prompts = shape.seqs - shape.step_seqs
        last = shape.rows - shape.step_rows
        arrays.prompt_cu_rows[prompts + 1 : padded.seqs - padded.step_seqs + 1] = last
        arrays.prompt_first_rows[prompts : padded.seqs - padded.step_seqs] = last
        arrays.logits_rows[shape.logits : padded.logits] = 0

    def close(self) -> None:
        """Free it; idempotent."""
        if self.pinned.address:
            self._device.destroy_event(self.event)
            self.arrays = None
            self.pinned.close()
