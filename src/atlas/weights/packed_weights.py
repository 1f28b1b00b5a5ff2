"""Weights as a backend packed them, shared by every model of the process on the same file.

Running a notebook cell again makes a second engine while the first one is still bound to its
name; both then use one copy of the weights. The copy goes with the last model that holds it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary


@dataclass(eq=False)
class PackedWeights:
    """A model's weights in memory; whoever reads or fills them while loading holds ``lock``.

    Attributes
    ----------
    matrices : dict
        Names of the stacked weights → the backend's packed matrix.
    vectors : dict of str to float32 [n]
    formats : dict of str to str
        Canonical name → format in memory.
    lock : threading.Lock
    """

    matrices: dict[tuple[str, ...], Any] = field(default_factory=dict)
    vectors: dict[str, Any] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes in memory; waits for a load in another thread."""
        with self.lock:
            held = (*self.matrices.values(), *self.vectors.values())
            return sum(item.nbytes for item in held)


_LOCK = threading.Lock()
_HELD: WeakValueDictionary[Hashable, PackedWeights] = WeakValueDictionary()


def packed_weights(key: Hashable) -> PackedWeights:
    """The weights that a model of this process holds under ``key``, else new and empty ones.

    Parameters
    ----------
    key : hashable
        Everything that the packed bytes depend on: the files' identity, the configuration, the
        options that change weights, and the backend.
    """
    with _LOCK:
        held = _HELD.get(key)
        if held is None:
            held = _HELD[key] = PackedWeights()
        return held


def _forget_parent() -> None:
    """In a forked child: another thread of the parent may have held a lock, or been loading."""
    global _LOCK, _HELD
    _LOCK, _HELD = threading.Lock(), WeakValueDictionary()


os.register_at_fork(after_in_child=_forget_parent)
