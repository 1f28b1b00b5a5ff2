"""Attention of an encoder: launch."""

from __future__ import annotations

from atlas_kernels.attention_plan import STEP_DIMS, prefill_rows, prefill_variant

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args, is_aligned, match, require, require_contiguous_rows
from atlas.backends.cuda.launch import Queue
from atlas.errors import ShapeError

_VECTOR_BYTES = 16


def encoder_attention(
    queue: Queue,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    cu_rows: DeviceArray,
    scale: float,
    *,
    out: DeviceArray,
) -> None:
    spec = "T H K"
    rows, heads, dim = match("bfloat16", spec, q, spec, k, spec, v, spec, out).values()
    sequences = match("int32", "N", cu_rows)["N"] - 1
    require(dim in STEP_DIMS, "head_dim", dim, ", ".join(map(str, STEP_DIMS)))
    require_contiguous_rows(q=q, k=k, v=v, out=out)
    if not is_aligned(_VECTOR_BYTES, q, k, v, out):
        raise ShapeError(f"rows of q {q}, k {k}, v {v} and out {out} are not allowed: not at "
                         f"multiples of {_VECTOR_BYTES} bytes")  # fmt: skip
    args: Args = (q, k, v, out, cu_rows, heads)
    args += (q.strides[0], k.strides[0], v.strides[0], out.strides[0], scale)
    grid = (sequences * heads, -(-rows // prefill_rows(dim)))
    queue.launch(f"encoder_attention_{prefill_variant(dim)}", grid, args)
