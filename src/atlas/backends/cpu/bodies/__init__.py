"""Numba bodies, imported only to compile them (a warm start never does).

A body is a function ``(thread, num_threads, args)`` over a pointer to 64-bit integers: addresses,
sizes, and float32 bits. It does its share of the work, the same whatever the number of threads,
and allocates nothing. Addresses are integers; ``simd`` has the loads, stores and arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

BODIES: dict[str, Callable[..., None]] = {}
"""Every body by its name ``file.function``."""


def body(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as the body called ``name``."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        BODIES[name] = function
        return function

    return register
