"""NVIDIA GPUs: the op vocabulary as launches of ``atlas_kernels``, and the runtime beneath.

Nothing here is imported before an engine asks for the device; ``import atlas`` touches no CUDA
library. Files named like those of ``atlas.ops`` compute launches; the others are the runtime:

- ``driver``: the driver API, checked; ``device``: one GPU, its context, streams and kernels
- ``array``: views of device memory; ``memory``: arenas and pinned host memory
- ``launch``: the queue that ops write to; ``graph``: its lists, captured
- ``module``: compiled kernels on the device; ``loading``: weights through pinned buffers
- ``inputs``, ``fetch``: a step's integers; ``small_copies``, ``readback``: what it chose
- ``pools``: the paged KV pools; ``runtime``: what a model calls; ``backend``: what a load calls
- ``translation``: the runtime of encoder-decoders; ``candidates``: what beam search asks of logits
"""

from __future__ import annotations

NOT_OFFERED: frozenset[str] = frozenset()
"""Ops without a kernel here; a model that needs one is refused by name when it is loaded."""
