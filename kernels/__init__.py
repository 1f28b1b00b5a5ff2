"""Numba CUDA kernels of Atlas.

The package imports nothing of ``atlas``. It is empty until the CUDA backend lands: every kernel
that exists today runs on the CPU and lives in ``atlas.backends.cpu``.
"""
