"""Paged attention on the first GPU: speed beside torch's, error, and equality of bits.

    python benchmarks/gpu_attention.py [--json FILE] [--heads 32] [--kv-heads 8]

Needs torch with CUDA, for random inputs, ceilings and the comparison. Heads of 128 dimensions in
bf16, KV in shuffled blocks of 16. Times are medians over graph replays; TB/s counts the keys and
values read, TFLOP/s 2 · L² · H · 128 for a causal prompt of L tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas_kernels import build  # noqa: E402
from atlas_kernels.attention_plan import SPLIT  # noqa: E402

from tests.kernels.gpu import Gpu  # noqa: E402

DIM = 128
MMA, WGMMA = "attention_prefill_d128_k32", "attention_prefill_wgmma_d128"
DECODE = [(1, 128), (1, 4096), (1, 32768), (16, 8192), (64, 4096), (128, 384)]
PREFILL = [2048, 8192, 16384]
Figures = dict[str, Any]


class Layer:
    """Random queries, and keys and values of ``batch`` sequences in shuffled blocks."""

    def __init__(self, gpu: Gpu, batch: int, length: int, heads: int, kv_heads: int) -> None:
        self.gpu, self.batch, self.length = gpu, batch, length
        self.heads, self.kv_heads, self.group = heads, kv_heads, heads // kv_heads
        torch.manual_seed(length)
        blocks = -(-length // 16)
        shape = (batch * blocks, kv_heads, 16, DIM)
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        self.tables = torch.randperm(batch * blocks, device="cuda", dtype=torch.int32)
        self.tables = self.tables.view(batch, blocks)
        self.kept: list[torch.Tensor] = []

    def ints(self, values: Any) -> int:
        """Address of an int32 array that lives as long as the layer."""
        self.kept.append(torch.as_tensor(np.asarray(values, np.int32), device="cuda"))
        return self.kept[-1].data_ptr()

    def queries(self, rows: int) -> torch.Tensor:
        """[rows, H, K]."""
        return torch.randn(rows, self.heads, DIM, device="cuda", dtype=torch.bfloat16)

    def dense(self, pool: torch.Tensor, n: int) -> torch.Tensor:
        """Sequence n of a pool as [H, L, K], a group's heads repeated."""
        rows = pool[self.tables[n].long()].transpose(0, 1).reshape(self.kv_heads, -1, DIM)
        return rows[:, : self.length].repeat_interleave(self.group, 0)

    def decode(
        self, q: torch.Tensor, rows: int, tile: int, workers: int, behind: int = 0
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Output and launch for the rows that end ``behind`` positions before the last."""
        out = torch.full_like(q, math.nan)
        first = self.length - behind - rows
        positions = np.tile(np.arange(first, first + rows), self.batch)
        splits = (self.length - 1) // SPLIT + 1
        groups = -(-rows * self.group // tile)
        columns = self.batch * self.kv_heads * groups
        per_split = self.kv_heads * rows * self.group
        partials = torch.empty(self.batch * max(splits, 2) * per_split, DIM, device="cuda")
        sums = torch.empty(self.batch * max(splits, 2) * per_split, 2, device="cuda")
        self.kept += [partials, sums, out, q]
        args = [q.data_ptr(), self.k.data_ptr(), self.v.data_ptr(), out.data_ptr()]
        args += [self.tables.data_ptr(), self.ints(np.arange(self.batch + 1) * rows)]
        args += [self.ints(positions), partials.data_ptr(), sums.data_ptr()]
        args += [self.ints(np.zeros(columns)), self.heads, self.kv_heads, rows]
        args += [max(splits, 2), 0, self.tables.shape[1]]
        args += [q.stride(0) * 2, q.stride(0) * 2, np.float32(DIM**-0.5), np.float32(0)]
        name, grid = f"attention_decode_d128_r{tile}", (columns, min(workers, splits))
        return out, lambda: self.gpu.run(name, grid, args)

    def prefill(
        self, q: torch.Tensor, first: int, form: str
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Output and launch for rows of one sequence from position ``first``."""
        out, rows = torch.full_like(q, math.nan), len(q)
        self.kept += [out, q]
        last = [out.data_ptr(), self.tables.data_ptr(), self.ints([0, rows])]
        last += [self.ints(np.arange(first, first + rows)), self.heads, self.kv_heads]
        strides = [self.tables.shape[1], q.stride(0) * 2, q.stride(0) * 2, np.float32(DIM**-0.5)]
        if form == WGMMA:
            args = [q.data_ptr(), *self.maps(), *last, *strides]
            grid = (self.heads, -(-rows // 128) + 1)
        else:
            args = [q.data_ptr(), self.k.data_ptr(), self.v.data_ptr(), *last]
            args += [0, *strides, np.float32(0)]
            grid = (self.heads, -(-rows // 128))
        return out, lambda: self.gpu.run(form, grid, args)

    def maps(self) -> list[int]:
        """Addresses of the pools' tensor maps."""
        for pool in (self.k, self.v):
            raw = self.gpu.pool_map(pool.data_ptr(), len(pool), self.kv_heads)
            self.kept.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8).cuda())
        return [tensor.data_ptr() for tensor in self.kept[-2:]]


def torch_microseconds(work: Callable[[], Any], count: int = 10, repeats: int = 7) -> float:
    """Median time of ``work`` in a graph of torch."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return float(np.median(times[1:]))


def ceilings() -> Figures:
    """What a large reduction reads, and what a large product computes."""
    x = torch.randn(1 << 30, device="cuda")
    read = x.numel() * 4 / torch_microseconds(lambda: torch.sum(x), 4) / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    product = 2 * 8192**3 / torch_microseconds(lambda: a @ b) / 1e6
    return {"case": "ceilings", "TB/s": read, "TFLOP/s": product}


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖; NaN where an element was not written."""
    return float((got.float() - want).norm() / want.norm())


def decode_figures(gpu: Gpu, heads: int, kv_heads: int) -> Iterator[Figures]:
    """Decode, one row a sequence and several."""
    for batch, length in DECODE:
        layer = Layer(gpu, batch, length, heads, kv_heads)
        num_bytes = 2 * layer.k.numel() * 2
        for rows in (1, 4, 8) if batch in (1, 16) else (1,):
            tile = 16 if rows * layer.group <= 16 else 32
            q = layer.queries(batch * rows)
            splits = (length - 1) // SPLIT + 1
            columns = batch * kv_heads * -(-rows * layer.group // tile)
            out, run = layer.decode(q, rows, tile, splits)
            run()
            gpu.stream.sync()
            n = batch - 1
            scores = torch.einsum(
                "rhk,hlk->hrl", q[n * rows :].float(), layer.dense(layer.k, n).float()
            )
            hidden = torch.ones(rows, length, device="cuda").triu(length - rows + 1).bool()
            weights = (scores * DIM**-0.5).masked_fill(hidden, -math.inf).softmax(-1)
            want = torch.einsum("hrl,hlk->rhk", weights, layer.dense(layer.v, n).float())
            equal = True
            single = q.view(batch, rows, heads, DIM)
            for row in {0, rows - 1} if rows > 1 else set():
                alone, once = layer.decode(
                    single[:, row].contiguous(), 1, 16, 3, behind=rows - 1 - row
                )
                once()
                gpu.stream.sync()
                equal &= torch.equal(alone, out.view(batch, rows, heads, DIM)[:, row])
            figures = {"case": "decode", "batch": batch, "length": length, "rows": rows}
            figures |= {"error": difference(out[n * rows :], want), "equal": equal}
            best = math.inf
            for workers in sorted({splits, -(-396 // columns), -(-1188 // columns)}):
                if workers <= splits:
                    _, run = layer.decode(q, rows, tile, workers)
                    time_us = gpu.microseconds(run)
                    figures[f"us, {workers} workers"] = round(time_us, 1)
                    best = min(best, time_us)
            yield figures | {"MB": num_bytes / 1e6, "us": best, "TB/s": num_bytes / best / 1e6}
        del layer
        torch.cuda.empty_cache()


def prefill_figures(gpu: Gpu, heads: int, kv_heads: int) -> Iterator[Figures]:
    """Prefill of one prompt, beside torch's kernels on contiguous keys and values."""
    for length in PREFILL:
        layer = Layer(gpu, 1, length, heads, kv_heads)
        q, flops = layer.queries(length), 2 * length * length * heads * DIM
        k, v = (layer.dense(pool, 0)[None].contiguous() for pool in (layer.k, layer.v))
        dense_q = q.transpose(0, 1)[None].contiguous()
        figures: Figures = {"case": "prefill", "length": length}
        for form in (MMA, WGMMA):
            if form not in gpu.kernels:
                continue  # not a Hopper
            out, run = layer.prefill(q, 0, form)
            run()
            gpu.stream.sync()
            tail = slice(length - 256, length)
            scores = torch.einsum("rhk,hlk->hrl", q[tail].float(), k[0].float()) * DIM**-0.5
            hidden = torch.ones(256, length, device="cuda").triu(length - 255).bool()
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            want = torch.einsum("hrl,hlk->rhk", weights, v[0].float())
            equal, cuts = True, [0, length // 3 + 5, length // 2 + 1, length]
            for first, end in itertools.pairwise(cuts):
                part, once = layer.prefill(q[first:end].contiguous(), first, form)
                once()
                gpu.stream.sync()
                equal &= torch.equal(part, out[first:end])
            equal &= figures.get("equal", True)
            figures |= {f"{form}: error": difference(out[tail], want), "equal": equal}
            figures[f"{form}: TFLOP/s"] = flops / gpu.microseconds(run, count=8) / 1e6
        for name, backend in (
            ("cuDNN", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):
            with sdpa_kernel(backend):
                time_us = torch_microseconds(
                    lambda q=dense_q, k=k, v=v: functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True
                    ),
                    8,
                )
            figures[f"{name}: TFLOP/s"] = flops / time_us / 1e6
        yield figures
        del layer, k, v, dense_q
        torch.cuda.empty_cache()


def show(figures: Figures) -> None:
    """One line a case."""
    print(
        *(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()),
        sep=" | ",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    options = parser.parse_args()
    gpu = Gpu()
    for name in build.names_for(gpu.arch):
        if name.startswith("attention") and "d128" in name:
            gpu.add(build.load(name, gpu.arch))
    everything = []
    heads, kv_heads = options.heads, options.kv_heads
    sources: list[Iterator[Figures]] = [
        iter([ceilings()]),
        decode_figures(gpu, heads, kv_heads),
        prefill_figures(gpu, heads, kv_heads),
    ]
    for source in sources:
        for figures in source:
            show(figures)
            everything.append(figures)
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
