"""Compiled from atlas.h by tools/build_library.py."""

from typing import Any

ffi: Any
lib: Any
