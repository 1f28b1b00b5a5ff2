"""Numba CUDA kernels of Atlas.

The package imports nothing of ``atlas``, and importing it loads no CUDA library: its modules are
imported to be compiled.
"""
