"""The same decode step in torch, for comparison: static cache, torch.compile, CUDA graphs.

    python benchmarks/gpu_torch.py qwen3-8b [--batches 1 8 32 128] [--json FILE]

A plain decoder of the shape's layers in bf16 with random weights, compiled with
``mode="reduce-overhead"`` (which captures CUDA graphs), over a static cache of 512 positions.
Prints milliseconds of a step, and of the weights' matrix products alone (cuBLAS, one CUDA graph).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas.config import ModelConfig  # noqa: E402
from benchmarks.random_checkpoint import SHAPES  # noqa: E402

CACHE_LEN, POSITION = 512, 200


class Layer(torch.nn.Module):
    def __init__(self, config: ModelConfig, batch: int, device: str) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        kind = {"device": device, "dtype": torch.bfloat16}

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.02 * torch.randn(*shape, **kind), requires_grad=False)

        self.norms = torch.nn.Parameter(
            torch.ones(2, config.hidden_size, **kind), requires_grad=False
        )
        self.head_norms = torch.nn.Parameter(torch.ones(2, dim, **kind), requires_grad=False)
        self.qkv = weight((heads + 2 * kv_heads) * dim, config.hidden_size)
        self.output = weight(config.hidden_size, heads * dim)
        self.gate_up = weight(2 * config.intermediate_size, config.hidden_size)
        self.down = weight(config.hidden_size, config.intermediate_size)
        self.register_buffer("cache", torch.zeros(2, batch, kv_heads, CACHE_LEN, dim, **kind))

    def forward(self, x: Any, cos: Any, sin: Any, position: Any, mask: Any) -> Any:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        normed = functional.rms_norm(x, (config.hidden_size,), self.norms[0], config.norm_eps)
        qkv = functional.linear(normed, self.qkv).view(len(x), heads + 2 * kv_heads, dim)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if config.qk_norm:
            q = functional.rms_norm(q, (dim,), self.head_norms[0], config.norm_eps)
            k = functional.rms_norm(k, (dim,), self.head_norms[1], config.norm_eps)
        q, k = (
            t * cos + torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1) * sin for t in (q, k)
        )
        self.cache[0].index_copy_(2, position, k[:, :, None])
        self.cache[1].index_copy_(2, position, v[:, :, None])
        attended = functional.scaled_dot_product_attention(
            q[:, :, None], self.cache[0], self.cache[1], attn_mask=mask, enable_gqa=True
        )
        x = x + functional.linear(attended.flatten(1), self.output)
        normed = functional.rms_norm(x, (config.hidden_size,), self.norms[1], config.norm_eps)
        gate, up = functional.linear(normed, self.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, self.down)


class Decoder(torch.nn.Module):
    def __init__(self, config: ModelConfig, batch: int, device: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            Layer(config, batch, device) for _ in range(config.num_layers)
        )
        shape = (config.vocab_size, config.hidden_size)
        weights = 0.02 * torch.randn(*shape, device=device, dtype=torch.bfloat16)
        self.embedding = torch.nn.Parameter(weights, requires_grad=False)
        self.final_norm = torch.nn.Parameter(
            torch.ones(config.hidden_size, device=device, dtype=torch.bfloat16),
            requires_grad=False,
        )
        self.eps = config.norm_eps

    def forward(self, ids: Any, cos: Any, sin: Any, position: Any, mask: Any) -> Any:
        x = self.embedding[ids]
        for layer in self.layers:
            x = layer(x, cos, sin, position, mask)
        x = functional.rms_norm(x, x.shape[-1:], self.final_norm, self.eps)
        return functional.linear(x, self.embedding).argmax(-1)

    def products(self, x: Any) -> None:
        """The matrix products alone, each on rows of its own width."""
        for layer in self.layers:
            for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
                functional.linear(x[:, : weight.shape[1]], weight)
        functional.linear(x[:, : self.embedding.shape[1]], self.embedding)


def milliseconds(work: Callable[[], object], count: int = 30) -> float:
    """Mean of ``count`` calls, best of three."""
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            work()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / count)
    return best


def report(config: ModelConfig, batch: int) -> dict[str, float]:
    """Milliseconds of a compiled step and of the products alone."""
    decoder = Decoder(config, batch, "cuda")
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    cos, sin = (torch.randn(1, 1, config.head_dim, **kind) for _ in range(2))
    ids = torch.zeros(batch, dtype=torch.long, device="cuda")
    position = torch.tensor([POSITION], device="cuda")
    mask = (torch.arange(CACHE_LEN, device="cuda") <= POSITION)[None, None, None]
    step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            step(ids, cos, sin, position, mask)
        step_ms = milliseconds(lambda: step(ids, cos, sin, position, mask))
        widest = max(config.hidden_size, config.intermediate_size)
        rows = torch.randn(batch, widest, **kind)
        decoder.products(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.products(rows)
        products_ms = milliseconds(graph.replay)
    return {"batch": batch, "step_ms": step_ms, "cublas_ms": products_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(name for name in SHAPES if not SHAPES[name].moe))
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for batch in args.batches:
        found.append(report(SHAPES[args.shape], batch))
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        print(
            f"torch {torch.__version__}  {args.shape}  batch {batch:3d}  "
            f"step {found[-1]['step_ms']:.3f} ms  products alone {found[-1]['cublas_ms']:.3f} ms",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
