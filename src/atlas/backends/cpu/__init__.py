"""The CPU backend: Numba bodies on a worker pool. Importing it imports no Numba."""
