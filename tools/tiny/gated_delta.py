"""The gated delta rule over whole sequences, for training: chunks in parallel but for one product.

Plain torch; float32 throughout. The two parts that a compiler would unroll, the scan over chunks
and its reverse, are operators of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ for strictly lower triangular A [..., C, C], C a power of two.

    By diagonal blocks of doubling size: [[P, 0], [B, Q]]⁻¹ = [[P⁻¹, 0], [−Q⁻¹BP⁻¹, Q⁻¹]].
    No power of A is formed, so equal keys in a row (whitespace) do not blow it up.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        size = a.shape[-1]
        inverse = torch.ones(*a.shape[:-2], size, 1, 1, dtype=a.dtype, device=a.device)
        half = 1
        while half < size:
            blocks = size // (2 * half)
            tiles = a.unflatten(-1, (blocks, 2 * half)).unflatten(-3, (blocks, 2 * half))
            tiles = tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            below = tiles[..., half:, :half]
            upper, lower = inverse.unflatten(-3, (blocks, 2)).unbind(-3)
            corner = -(lower @ below @ upper)
            top = torch.cat([upper, torch.zeros_like(corner)], -1)
            inverse = torch.cat([top, torch.cat([corner, lower], -1)], -2)
            half *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        transposed = inverse.mT
        return -(transposed @ grad @ transposed).tril(-1)


@torch.library.custom_op("atlas_tiny::chunk_scan", mutates_args=())
def chunk_scan(maps: Tensor, adds: Tensor) -> Tensor:
    """States [B, N, K, V] before each of N chunks, from zero: S ← M S + A.

    Parameters
    ----------
    maps
        M, [B, N, K, K] float32.
    adds
        A, [B, N, K, V] float32.
    """
    states = torch.zeros_like(adds)
    for chunk in range(adds.shape[1] - 1):
        torch.baddbmm(adds[:, chunk], maps[:, chunk], states[:, chunk], out=states[:, chunk + 1])
    return states


@torch.library.custom_op("atlas_tiny::chunk_scan_reverse", mutates_args=())
def chunk_scan_reverse(maps: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the state *after* each chunk, given that of the one before each chunk."""
    after = torch.zeros_like(grad)
    for chunk in range(grad.shape[1] - 1, 0, -1):
        torch.baddbmm(grad[:, chunk], maps[:, chunk].mT, after[:, chunk], out=after[:, chunk - 1])
    return after


@chunk_scan.register_fake
def _(maps: Tensor, adds: Tensor) -> Tensor:
    return torch.empty_like(adds)


@chunk_scan_reverse.register_fake
def _(maps: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    maps, states = ctx.saved_tensors
    after = chunk_scan_reverse(maps, grad.contiguous())
    return after @ states.mT, after


chunk_scan.register_autograd(_scan_gradient, setup_context=_keep)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over whole sequences, from a zero state.

    S ← e^g S + k (β (v − (e^g S)ᵀ k))ᵀ;  o = Sᵀ q / √K, in chunks of 64 in the WY form (Yang et
    al., Gated Delta Networks, 2024): within a chunk the updates solve a triangular system, so a
    chunk maps the state by S ← M S + N. Only that product is sequential.

    Parameters
    ----------
    q, k
        [B, H, T, K] float32, L2-normalised here.
    v
        [B, H, T, V] float32.
    log_decay, beta
        [B, H, T] float32; log_decay ≤ 0.

    Returns
    -------
    Tensor
        [B, H, T, V] float32.
    """
    length, width = q.shape[-2:]
    pad = -length % CHUNK
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        log_decay, beta = (F.pad(x, (0, pad)) for x in (log_decay, beta))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * width**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    q, k, v = (x.unflatten(-2, (-1, CHUNK)) for x in (q, k, v))  # [B, H, N, C, ·]
    beta = beta.unflatten(-1, (-1, CHUNK))[..., None]
    total = log_decay.unflatten(-1, (-1, CHUNK)).cumsum(-1)  # log of the decay since the chunk
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal it would overflow, and its gradient be NaN.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    since = total.exp()[..., None]
    until = (total[..., -1:] - total).exp()[..., None]

    kk = (beta * k) @ k.mT * between
    inverse = UnitLowerInverse.apply(kk.tril(-1))
    written = inverse @ (beta * v)  # what the chunk writes on a zero state
    erased = inverse @ (beta * since * k)  # and what it reads of the state before it
    k_end = (until * k).mT
    decay = total[..., -1].exp()[..., None, None] * torch.eye(width, device=q.device)
    maps, adds = decay - k_end @ erased, k_end @ written

    states = chunk_scan(maps.flatten(0, 1), adds.flatten(0, 1)).unflatten(0, q.shape[:2])
    updates = written - erased @ states
    out = (since * q) @ states + (q @ k.mT * between) @ updates
    return out.flatten(2, 3)[:, :, :length]
