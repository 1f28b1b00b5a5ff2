"""Paged attention on the first GPU: speed beside torch's, error, and equality of bits.

    python benchmarks/gpu_attention.py [--json FILE] [--only decode|prefill] [--mma] [--trial]

Needs torch with CUDA, for random inputs, ceilings and the comparison. bf16, KV in shuffled blocks
of 16; decode with 32 query and 8 KV heads of 128 dimensions, prefill with those of ``SHAPES``.
Times are medians over graph replays; TB/s counts the keys and values read, TFLOP/s
2 · L² · H · K for a causal prompt of L tokens.
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
from atlas_kernels.attention_plan import (  # noqa: E402
    SPLIT,
    pool_view,
    prefill_rows,
    prefill_variant,
    wgmma_tiles,
    wgmma_variant,
)

from tests.kernels.gpu import Gpu  # noqa: E402

DIM = 128
SHAPES = {64: (32, 8), 96: (32, 8), 128: (32, 8), 256: (16, 2)}
"""Query and KV heads of a prompt by dimension; 256 as Qwen3.5 has them."""
MMA = {dim: f"attention_prefill_{prefill_variant(dim)}" for dim in SHAPES}
TRIALS = {256: {"attention_prefill_wgmma_d256_k64": (256, 64, False)}}
"""Tiles of other sizes, whose bits differ."""
SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TURNS = 9
DECODE = [(1, 128), (1, 4096), (1, 32768), (16, 8192), (64, 4096), (128, 384)]
PREFILL = [2048, 8192, 16384]
BATCHES = [(8, 1024), (32, 256)]
Figures = dict[str, Any]


def wgmma(dim: int, *, capped: bool = False) -> str:
    """The kernel that Hopper has for a prompt."""
    return f"attention_prefill_wgmma_{wgmma_variant(dim, capped=capped)}"


def declare_trials() -> None:
    """Put the kernels of ``TRIALS`` into the table of kernels."""
    from atlas_kernels.attention_prefill_wgmma import make_attention_prefill_wgmma, shared_bytes
    from atlas_kernels.registry import kernel

    for dim, forms in TRIALS.items():
        like = build.find(wgmma(dim))
        kernel(
            like.op,
            args=" ".join(like.kinds),
            threads=like.threads,
            shared=shared_bytes,
            arch=str(like.needs),
            lto=like.lto,
            variants={name.removeprefix(f"{like.op}_"): form for name, form in forms.items()},
        )(make_attention_prefill_wgmma)


class Layer:
    """Random queries, and keys and values of ``batch`` sequences in shuffled blocks."""

    def __init__(
        self, gpu: Gpu, batch: int, length: int, heads: int, kv_heads: int, dim: int = DIM
    ) -> None:
        self.gpu, self.batch, self.length, self.dim = gpu, batch, length, dim
        self.heads, self.kv_heads, self.group = heads, kv_heads, heads // kv_heads
        torch.manual_seed(length)
        blocks = -(-length // 16)
        shape = (batch * blocks, kv_heads, 16, dim)
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
        return torch.randn(rows, self.heads, self.dim, device="cuda", dtype=torch.bfloat16)

    def rows(self, pool: torch.Tensor, n: int) -> torch.Tensor:
        """Sequence n of a pool as [HK, L, K]."""
        rows = pool[self.tables[n].long()].transpose(0, 1).reshape(self.kv_heads, -1, self.dim)
        return rows[:, : self.length]

    def dense(self, pool: torch.Tensor, n: int) -> torch.Tensor:
        """Sequence n of a pool as [H, L, K], a group's heads repeated."""
        return self.rows(pool, n).repeat_interleave(self.group, 0)

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
        self, q: torch.Tensor, first: int, form: str, *, window: int = 0, softcap: float = 0.0
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Output and launch for equal rows of every sequence from position ``first``."""
        out, rows = torch.full_like(q, math.nan), len(q) // self.batch
        self.kept += [out, q]
        positions = np.tile(np.arange(first, first + rows), self.batch)
        cu_rows = np.arange(self.batch + 1) * rows
        args = [out.data_ptr(), self.tables.data_ptr(), *[self.ints(cu_rows)] * 2]
        args += [self.ints(positions), self.heads, self.kv_heads]
        if "wgmma" in form:
            pools, grid = self.maps(), (self.heads, wgmma_tiles(len(q), self.batch))
            args += [self.batch]
        else:
            pools = [self.k.data_ptr(), self.v.data_ptr()]
            grid = (self.batch * self.heads, -(-rows // prefill_rows(self.dim)))
        args += [window, self.tables.shape[1], q.stride(0) * 2, q.stride(0) * 2]
        args += [np.float32(self.dim**-0.5), np.float32(softcap)]
        args = [q.data_ptr(), *pools, *args]
        return out, lambda: self.gpu.run(form, grid, args)

    def maps(self) -> list[int]:
        """Addresses of the pools' tensor maps."""
        box, strides = pool_view(self.dim)
        for pool in (self.k, self.v):
            shape = (len(pool) * self.kv_heads, *box[1:])
            raw = self.gpu.tensor_map(pool.data_ptr(), shape, box, strides)
            self.kept.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8).cuda())
        return [tensor.data_ptr() for tensor in self.kept[-2:]]

    def check(
        self, q: torch.Tensor, out: torch.Tensor, run: Callable[[], None], form: str
    ) -> tuple[float, bool]:
        """Error of a prompt's last rows, and whether the prompt cut at odd places is equal."""
        run()
        self.gpu.stream.sync()
        length, tail = self.length, slice(self.length - 256, self.length)
        k, v = (self.dense(pool, 0).float() for pool in (self.k, self.v))
        scores = torch.einsum("rhk,hlk->hrl", q[tail].float(), k) * self.dim**-0.5
        hidden = torch.ones(256, length, device="cuda").triu(length - 255).bool()
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        want = torch.einsum("hrl,hlk->rhk", weights, v)
        equal, cuts = True, [0, length // 3 + 5, length // 2 + 1, length]
        for first, end in itertools.pairwise(cuts):
            part, once = self.prefill(q[first:end].contiguous(), first, form)
            once()
            self.gpu.stream.sync()
            equal &= torch.equal(part, out[first:end])
        return difference(out[tail], want), equal


def torch_timer(work: Callable[[], Any], count: int) -> Callable[[], float]:
    """Captures ``work`` ``count`` times; a call replays that and gives microseconds of one."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    return once


def torch_microseconds(work: Callable[[], Any], count: int = 10, repeats: int = 7) -> float:
    """Median time of ``work`` in a graph of torch."""
    timer = torch_timer(work, count)
    return float(np.median([timer() for _ in range(repeats + 1)][1:]))


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


def prefill_figures(gpu: Gpu, dim: int, heads: int, kv_heads: int) -> Iterator[Figures]:
    """Prefill of one prompt, beside torch's kernels on contiguous keys and values.

    All take turns, so that they find the card as hot; figures are medians of the turns.
    """
    for length in PREFILL:
        layer = Layer(gpu, 1, length, heads, kv_heads, dim)
        q, flops = layer.queries(length), 2 * length * length * heads * dim
        count = min(40, max(2, int(4e12 / flops)))
        figures: Figures = {"case": "prefill", "dim": dim, "heads": f"{heads}/{kv_heads}"}
        figures["length"] = length
        timers = {}
        for form in (MMA[dim], wgmma(dim), *TRIALS.get(dim, ())):
            if form in gpu.kernels:
                out, run = layer.prefill(q, 0, form)
                error, equal = layer.check(q, out, run, form)
                figures[f"{form}: error"] = error
                figures["equal"] = equal and figures.get("equal", True)
                timers[form] = gpu.timer(run, count)
        k, v = (layer.rows(pool, 0)[None].contiguous() for pool in (layer.k, layer.v))
        dense_q = q.transpose(0, 1)[None].contiguous()
        for name, backend in SDPA.items():
            if timer := sdpa_timer(backend, dense_q, k, v, count):
                timers[name] = timer
        times: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(TURNS):
            for name, timer in timers.items():
                times[name].append(timer())
        for name, found in times.items():
            figures[f"{name}: TFLOP/s"] = flops / float(np.median(found[2:])) / 1e6
        yield figures
        del layer, k, v, dense_q, timers
        torch.cuda.empty_cache()


def sdpa_timer(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int
) -> Callable[[], float] | None:
    """Timer of torch's attention, unless it has none of this backend for these sizes."""

    def work() -> None:
        with sdpa_kernel(backend):
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    try:
        work()
    except RuntimeError:
        return None
    return torch_timer(work, count)


def batch_figures(gpu: Gpu, dim: int, heads: int, kv_heads: int) -> Iterator[Figures]:
    """Many short prompts at once."""
    for batch, length in BATCHES:
        layer = Layer(gpu, batch, length, heads, kv_heads, dim)
        q, form = layer.queries(batch * length), wgmma(dim)
        if form not in gpu.kernels:
            return
        out, run = layer.prefill(q, 0, form)
        time_us = gpu.microseconds(run)
        alone = Layer(gpu, 1, length, heads, kv_heads, dim)
        alone.k, alone.v, alone.tables = layer.k, layer.v, layer.tables[-1:]
        once, single = alone.prefill(q[-length:], 0, form)
        single()
        gpu.stream.sync()
        figures = {"case": "prefill", "dim": dim, "prompts": batch, "length": length}
        figures |= {"equal alone": torch.equal(once, out[-length:]), "us": time_us}
        rate = 2 * length * length * heads * dim * batch / time_us / 1e6
        yield figures | {f"{form}: TFLOP/s": rate}
        del layer, alone
        torch.cuda.empty_cache()


def limited_figures(gpu: Gpu, dim: int, heads: int, kv_heads: int) -> Iterator[Figures]:
    """One prompt with a window, and with a softcap; TFLOP/s of the keys that rows see."""
    length, window = PREFILL[1], 1024
    for limits in ({"window": window}, {"softcap": 30.0}):
        form = wgmma(dim, capped="softcap" in limits)
        if form not in gpu.kernels:
            continue
        layer = Layer(gpu, 1, length, heads, kv_heads, dim)
        seen = window * (2 * length - window) if "window" in limits else length * length
        q = layer.queries(length)
        _, run = layer.prefill(q, 0, form, **limits)
        rate = 2 * seen * heads * dim / gpu.microseconds(run) / 1e6
        figures = {"case": "prefill", "dim": dim, "length": length}
        yield figures | limits | {f"{form}: TFLOP/s": rate}
        del layer
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
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--dims", default="64,128,256", help="of prompts; 96 is another")
    parser.add_argument("--mma", action="store_true", help="the other GPUs' prefill kernels, too")
    parser.add_argument("--trial", action="store_true", help="kernels with tiles of other sizes")
    options = parser.parse_args()
    dims = [int(dim) for dim in options.dims.split(",")]
    decodes, prefills = options.only != "prefill", options.only != "decode"
    gpu = Gpu()
    names = [f"attention_decode_d128_r{tile}" for tile in (16, 32)] if decodes else []
    if prefills:
        forms = [wgmma(dim, capped=capped) for dim in dims for capped in (False, True)]
        names += forms if gpu.arch == "sm_90a" else []
        if options.trial:
            declare_trials()
            names += [name for dim in dims for name in TRIALS.get(dim, ())]
        names += [MMA[dim] for dim in dims] if options.mma or gpu.arch != "sm_90a" else []
    for name in names:
        gpu.add(build.load(name, gpu.arch))
    everything = []
    sources: list[Iterator[Figures]] = [iter([ceilings()])]
    if decodes:
        sources.append(decode_figures(gpu, 32, 8))
    for dim in dims if prefills else ():
        sources += [prefill_figures(gpu, dim, *SHAPES[dim])]
        sources += [batch_figures(gpu, dim, *SHAPES[dim])]
        sources += [limited_figures(gpu, dim, *SHAPES[dim])]
    for source in sources:
        for figures in source:
            show(figures)
            everything.append(figures)
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
