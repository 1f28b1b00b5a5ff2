"""Paged attention and the store that fills its pools.

Step tokens (generated or drafted) and prompt tokens run forms of their own: a backend may sum them
in different orders, each of which depends on nothing but the row's position. The definition is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import sigmoid_gate
from atlas.ops.norm import rmsnorm
from atlas.ops.rope import rope
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]

SEGMENT = 256
"""Keys summed on their own before segments are merged, at absolute multiples of this position."""


@op
def kv_store(
    k: Float, v: Float, slots: Int, *, k_pool: NDArray[np.floating], v_pool: NDArray[np.floating]
) -> None:
    """Write new keys and values into their blocks.

    Parameters
    ----------
    k, v : float32 [T, HK, K]
        Rows may be strided.
    slots : int32 [T]
        block · S + offset of each row's position.
    k_pool : float32 or float16 [B, HK, K, S]
        Written; tokens innermost, so that 16 keys of one dimension are one vector.
    v_pool : same dtype [B, HK, S, K]
        Written.
    """
    block_size = k_pool.shape[3]
    block, offset = slots // block_size, slots % block_size
    k_pool[block, :, :, offset] = k
    v_pool[block, :, offset, :] = v


@op
def prepare_heads(
    q: Float,
    k: Float,
    v: Float,
    q_norm: Float | None,
    k_norm: Float | None,
    norm_eps: float,
    positions: Int,
    rope_table: Float,
    slots: Int,
    *,
    k_pool: NDArray[np.floating],
    v_pool: NDArray[np.floating],
) -> None:
    """Normalise and rotate the heads of q and k, and write k and v into their blocks.

    Parameters
    ----------
    q : float32 [T, H, K]
        Updated in place; rows may be strided.
    k, v : float32 [T, HK, K]
        Rows may be strided. What is left in ``k`` is not defined.
    q_norm, k_norm : float32 [K], optional
        Weights of an RMSNorm of each head, before the rotation (Qwen3, Gemma 3).
    norm_eps : float
    positions : int32 [T]
    rope_table : float32 [P, 2, R/2]
        As in :func:`atlas.ops.rope.rope`.
    slots, k_pool, v_pool
        As in :func:`kv_store`.
    """
    if q_norm is not None and k_norm is not None:
        rmsnorm(q, q_norm, norm_eps, out=q)
        rmsnorm(k, k_norm, norm_eps, out=k)
    rope(q, positions, rope_table)
    rope(k, positions, rope_table)
    kv_store(k, v, slots, k_pool=k_pool, v_pool=v_pool)


@op
def attention_step(
    q: Float,
    k: Float,
    v: Float,
    q_norm: Float | None,
    k_norm: Float | None,
    norm_eps: float,
    rope_table: Float,
    slots: Int,
    block_tables: Int,
    cu_rows: Int,
    max_rows: int,
    positions: Int,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    k_pool: NDArray[np.floating],
    v_pool: NDArray[np.floating],
    out: Float,
) -> None:
    """All that lies between the QKV product and the output product, for step rows.

    :func:`prepare_heads`, then causal attention as :func:`attention_prefill` describes it. A
    sequence has one row, or up to K rows of a verify; ``max_rows`` is what none of them exceeds,
    and no result depends on it. What is left in ``q`` is not defined.
    """
    prepare_heads(
        q, k, v, q_norm, k_norm, norm_eps, positions, rope_table, slots,
        k_pool=k_pool, v_pool=v_pool,
    )  # fmt: skip
    attention_prefill(
        q, k_pool, v_pool, block_tables, cu_rows, positions, scale, window, softcap, out=out
    )


@op
def attention_step_gated(
    q: Float,
    k: Float,
    v: Float,
    gate: Float,
    q_norm: Float | None,
    k_norm: Float | None,
    norm_eps: float,
    rope_table: Float,
    slots: Int,
    block_tables: Int,
    cu_rows: Int,
    max_rows: int,
    positions: Int,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    k_pool: NDArray[np.floating],
    v_pool: NDArray[np.floating],
    out: Float,
) -> None:
    """:func:`attention_step`, then :func:`~atlas.ops.activation.sigmoid_gate`: the bits of these.

    Parameters
    ----------
    gate : float32 [T, H·K]
        Rows may be strided.

    The others are those of :func:`attention_step`.
    """
    attention_step(
        q, k, v, q_norm, k_norm, norm_eps, rope_table, slots, block_tables, cu_rows, max_rows,
        positions, scale, window, softcap, k_pool=k_pool, v_pool=v_pool, out=out,
    )  # fmt: skip
    flat = out.reshape(gate.shape, copy=False)
    sigmoid_gate(flat, gate, out=flat)


def step_then_gate(
    functions: Mapping[str, Callable[..., None]],
    queue: Any,
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    q_norm: Any,
    k_norm: Any,
    norm_eps: float,
    rope_table: Any,
    slots: Any,
    block_tables: Any,
    cu_rows: Any,
    max_rows: int,
    positions: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    k_pool: Any,
    v_pool: Any,
    out: Any,
) -> None:
    """A backend's :func:`attention_step_gated` as calls of the ops that it stands for."""
    functions["attention_step"](
        queue, q, k, v, q_norm, k_norm, norm_eps, rope_table, slots, block_tables, cu_rows,
        max_rows, positions, scale, window, softcap, k_pool=k_pool, v_pool=v_pool, out=out,
    )  # fmt: skip
    flat = out.reshape(gate.shape, copy=False)
    functions["sigmoid_gate"](queue, flat, gate, out=flat)


@op
def attention_prefill(
    q: Float,
    k_pool: NDArray[np.floating],
    v_pool: NDArray[np.floating],
    block_tables: Int,
    cu_rows: Int,
    positions: Int,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    out: Float,
    first_rows: Int | None = None,
) -> None:
    """Causal attention of prompt rows over their sequences' blocks, after :func:`prepare_heads`.

    Parameters
    ----------
    q : float32 [T, H, K]
        Rows may be strided. Query head h reads key head ⌊h · HK / H⌋.
    k_pool, v_pool : float32 or float16 [B, HK, K, S], [B, HK, S, K]
    block_tables : int32 [N, M]
    cu_rows : int32 [N + 1]
        Rows cu_rows[n] … cu_rows[n + 1] − 1 belong to sequence n.
    positions : int32 [T]
        A row sees keys at positions 0 … its own; ascending within a sequence.
    scale : float
        Multiplies q · k.
    window : int, optional
        A row sees only the last ``window`` positions, its own included.
    softcap : float, optional
        Scores become cap · tanh(score / cap).
    out : float32 [T, H, K]
        Written; contiguous.
    first_rows : int32 [N], optional
        Rows of sequence n before first_rows[n] are left out, and what ``out`` holds for them is not
        defined. cu_rows[n] … cu_rows[n + 1]; none is left out without it.

    Notes
    -----
    Order: score over k ascending; softmax and Σ p·v over keys ascending within each segment of
    256 absolute positions; segments merged ascending. It depends on position alone, so any
    chunking of the prompt and any batch give a row the same bits.

    Source
    ------
    Kwon et al., "PagedAttention" (2023), arXiv 2309.06180; Milakov and Gimelshein, "Online
    normalizer calculation for softmax" (2018), arXiv 1805.02867.
    """
    num_heads, num_kv_heads = q.shape[1], k_pool.shape[1]
    for n in range(len(cu_rows) - 1):
        first = cu_rows[n] if first_rows is None else first_rows[n]
        for t in range(first, cu_rows[n + 1]):
            end = positions[t] + 1
            start = 0 if window is None else max(0, end - window)
            table = block_tables[n, : -(-end // k_pool.shape[3])]
            keys = np.concatenate(list(k_pool[table]), axis=-1)[..., start:end]
            values = np.concatenate(list(v_pool[table]), axis=1)[:, start:end]
            for h in range(num_heads):
                kv = h * num_kv_heads // num_heads
                scores = (q[t, h] @ keys[kv].astype(np.float32)) * np.float32(scale)
                if softcap is not None:
                    scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
                weights = np.exp(scores - scores.max())
                out[t, h] = weights @ values[kv].astype(np.float32) / weights.sum()
