"""Numba CUDA kernels of Atlas: what runs on the GPU, and how it becomes machine code.

The package imports nothing of ``atlas``, and itself imports neither Numba nor a CUDA library:
``build.load`` reads compiled kernels from the disk cache and reaches for the compiler only when one
is missing. Compiling needs numba-cuda and nvJitLink (the extra ``cuda``) and no GPU.

- ``registry``: ``@kernel`` declarations and the table of them; ``register`` for one's own
- ``build``, ``cache``, ``manifest``: Python → LLVM IR → PTX → cubin, kept on disk, with its record
- ``ptx`` and ``ptx_*``: the intrinsic vocabulary; ``vector``: activations of several types;
  ``tuples``: several things side by side
- ``norm``, ``rope``, ``activation``, …: the kernels, in files named like those of ``atlas.ops``

Every kernel takes addresses, sizes and strides in bytes; its docstring states the grid. It starts
with ``launch_dependents``, and before ``wait_prerequisites`` reads only what that one's docstring
allows.
"""
