"""Handles: numbers that C holds in place of Python objects, looked up and never dereferenced."""

from __future__ import annotations

import threading
from typing import Any, TypeVar, cast

from atlas.errors import InvalidArgumentError, StaleHandleError

Handled = TypeVar("Handled")

_KIND_SHIFT, _GENERATION_SHIFT = 56, 24
_INDEX_MASK, _GENERATION_MASK = (1 << _GENERATION_SHIFT) - 1, 0xFFFFFFFF


class HandleTable:
    """The objects that C holds, by token: kind, generation and index in one 64-bit number.

    Addresses of user space have no bits where a token has its kind, so a pointer is never taken for
    a handle. An index is used again with the next generation, so a freed handle is told from the
    one that follows it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: list[object | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self._kinds: dict[type, int] = {}
        self._names: list[str] = ["?"]

    def register(self, kind: type, name: str) -> None:
        """Make ``kind`` a class of handles, called ``name`` in messages."""
        self._kinds[kind] = len(self._names)
        self._names.append(name)

    def add(self, item: object) -> int:
        """A new token for an object, whose class was registered."""
        kind = self._kinds[type(item)]
        with self._lock:
            if self._free:
                index = self._free.pop()
                self._generations[index] = (self._generations[index] + 1) & _GENERATION_MASK
                self._objects[index] = item
            else:
                index = len(self._objects)
                if index > _INDEX_MASK:
                    raise InvalidArgumentError(f"{index} handles exist; allowed: as many")
                self._objects.append(item)
                self._generations.append(1)
            return kind << _KIND_SHIFT | self._generations[index] << _GENERATION_SHIFT | index

    def get(self, token: int, kind: type[Handled]) -> Handled:
        """The object of a token.

        Raises
        ------
        InvalidArgumentError
            NULL, no handle at all, or one of another kind.
        StaleHandleError
            It was freed.
        """
        index = token & _INDEX_MASK
        wanted = self._kinds[kind]
        if token >> _KIND_SHIFT != wanted or index >= len(self._objects):
            raise self._refusal(token, wanted)
        if token >> _GENERATION_SHIFT & _GENERATION_MASK != self._generations[index]:
            raise StaleHandleError(f"this {self._names[wanted]} handle was freed")
        item = self._objects[index]
        if item is None:
            raise StaleHandleError(f"this {self._names[wanted]} handle was freed")
        return cast(Handled, item)

    def remove(self, token: int, kind: type[Handled]) -> Handled:
        """Free a token and return its object; raises as :meth:`get`."""
        with self._lock:
            item = self.get(token, kind)
            index = token & _INDEX_MASK
            self._objects[index] = None
            self._free.append(index)
            return item

    def _refusal(self, token: int, wanted: int) -> InvalidArgumentError:
        name = self._names[wanted]
        if token == 0:
            return InvalidArgumentError(f"the {name} handle is NULL")
        kind = token >> _KIND_SHIFT
        if 0 < kind < len(self._names) and token & _INDEX_MASK < len(self._objects):
            return InvalidArgumentError(f"this is a {self._names[kind]} handle; allowed: {name}")
        return InvalidArgumentError(f"0x{token:x} is not an Atlas handle; allowed: {name}")


HANDLES = HandleTable()


def handled(name: str) -> Any:
    """Class decorator: objects of this class are given to C, under this name in messages."""

    def register(kind: type) -> type:
        HANDLES.register(kind, name)
        return kind

    return register
