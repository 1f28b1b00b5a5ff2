"""Projections: one or several weight matrices whose outputs lie side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas.layers.step import Array


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """y = x · [W₀; W₁; …]ᵀ + bias.

    Matrices of one format are stacked into one when they are loaded; those that differ stay
    apart and write their own columns. ``matrices`` are a backend's packed matrices.
    """

    matrices: tuple[Any, ...]
    bias: Array | None = None

    @property
    def rows(self) -> int:
        """Width of the output."""
        return sum(matrix.rows for matrix in self.matrices)

    def forward(self, ops: Any, x: Array, out: Array) -> None:
        """Write x [T, K] · Wᵀ + bias to ``out`` [T, N]."""
        start = 0
        for matrix in self.matrices:
            stop = start + matrix.rows
            bias = None if self.bias is None else self.bias[start:stop]
            ops.linear(x, matrix, bias, out=out[:, start:stop])
            start = stop

    def forward_normed(
        self, ops: Any, x: Array, norm: Array, eps: float, normed: Array, out: Array
    ) -> None:
        """Write rmsnorm(x [T, K]) · Wᵀ + bias to ``out`` [T, N], where nobody else reads the norm.

        ``normed`` [T, K] is scratch.
        """
        if len(self.matrices) == 1:
            (matrix,), bias = self.matrices, self.bias
            ops.rmsnorm_linear(x, norm, eps, matrix, bias, normed=normed, out=out[:, : matrix.rows])
        else:
            ops.rmsnorm(x, norm, eps, out=normed)
            self.forward(ops, normed, out)

    def forward_relu(self, ops: Any, x: Array, out: Array) -> None:
        """Write max(x · Wᵀ + bias, 0) to ``out`` [T, N]."""
        start = 0
        for matrix in self.matrices:
            stop = start + matrix.rows
            bias = None if self.bias is None else self.bias[start:stop]
            ops.linear_relu(x, matrix, bias, out=out[:, start:stop])
            start = stop

    def add_to(self, ops: Any, x: Array, out: Array) -> None:
        """Add x · Wᵀ + bias to ``out`` [T, N]."""
        start = 0
        for matrix in self.matrices:
            stop = start + matrix.rows
            bias = None if self.bias is None else self.bias[start:stop]
            ops.linear_add(x, matrix, bias, out=out[:, start:stop])
            start = stop
