"""Mixture of experts on a GPU: bits of rows checked, decode and prefill timed.

    python benchmarks/gpu_moe.py [--rows 1 2 8 128] [--prefill 2048 8192] [--tune] [--json F]

Random bf16 weights. Shape A: 256 experts, top 8 and a shared one, hidden 2048, expert width 512;
shape B (Qwen3-30B-A3B): 128 experts, top 8, width 768, and its whole weight sweep at batch 1.
Bit for bit: each row alone, among others, shuffled, by the decode and by every grouped kernel.
Decode is timed as a layer and by kernel; --tune adds the decode kernels that would do as well.
A whole block, norm and router included, is timed with the choice in the router's kernel and in the
experts' own, whose bits must be the same. Prefill is timed with each grouped form; w160 is that of
Hopper, with ``wgmma``. What comes before the experts, in one kernel and in three: see
``gpu_router``.
Exits with 1 if a check failed. Needs torch, for data and for the ceilings.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas_kernels import build  # noqa: E402
from atlas_kernels.gemm_step_plan import TILES, variant  # noqa: E402
from atlas_kernels.moe_plan import (  # noqa: E402
    DOWN_TILES,
    GATE_UP_TILES,
    GROUPED_TILES,
    HALF_ROWS,
    ROUTE_VARIANTS,
    ROUTED_VARIANTS,
    ROW_BOX,
    UNIT,
    WGMMA_TILES,
    decode_kernels,
    decode_variant,
    down_view,
    fits,
    gate_up_view,
    grouped_variant,
    route_variant,
    routed_kernel,
)

from benchmarks import gpu_router  # noqa: E402
from benchmarks.gpu_gemm import StepGemm, read_ceiling  # noqa: E402
from tests.kernels.gpu import Gpu  # noqa: E402

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """A model's experts."""

    name: str
    experts: int
    top_k: int
    dim: int
    inner: int
    shared: bool

    @property
    def slots(self) -> int:
        return self.top_k + self.shared

    @property
    def expert_bytes(self) -> int:
        return 6 * self.dim * self.inner


A = Shape("A", 256, 8, 2048, 512, shared=True)
B = Shape("B", 128, 8, 2048, 768, shared=False)
FORMS: dict[str, Any] = GROUPED_TILES | WGMMA_TILES
"""The grouped kernels: those of every GPU, and Hopper's."""


def forms(gpu: Gpu) -> list[str]:
    """Those that a GPU has."""
    return [name for name in FORMS if name in GROUPED_TILES or gpu.arch == "sm_90a"]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Layer:
    """One layer's weights."""

    def __init__(self, shape: Shape) -> None:
        experts, dim, inner = shape.experts, shape.dim, shape.inner
        self.gate_up = _normal(experts, 2 * inner, dim) * dim**-0.5
        self.down = _normal(experts, dim, inner) * inner**-0.5
        self.shared_gate_up = _normal(2 * inner, dim) * dim**-0.5 if shape.shared else None
        self.shared_down = _normal(dim, inner) * inner**-0.5 if shape.shared else None

    def address(self, name: str) -> int:
        tensor = getattr(self, name)
        return 0 if tensor is None else tensor.data_ptr()


class Runner:
    """Launches the kernels on torch tensors; scratch for the greatest number of rows."""

    def __init__(self, gpu: Gpu, shape: Shape, max_rows: int) -> None:
        self.gpu, self.shape = gpu, shape
        self.maps: dict[tuple[Any, ...], int] = {}
        pairs = max_rows * shape.slots
        self.act = torch.empty(pairs, shape.inner, device="cuda", dtype=torch.bfloat16)
        self.y = torch.empty(pairs, shape.dim, device="cuda", dtype=torch.bfloat16)
        self.order = torch.empty(pairs, device="cuda", dtype=torch.int32)
        self.tiles = torch.empty(pairs // 16 + 512, 4, device="cuda", dtype=torch.int32)

    def route(self, scores: Tensor, shared: Tensor | None, ids: Tensor, weights: Tensor) -> None:
        shape = self.shape
        args: list[Any] = [scores.data_ptr(), 0, 0 if shared is None else shared.data_ptr(), 0]
        args += [ids.data_ptr(), weights.data_ptr(), shape.experts, shape.top_k, shape.slots]
        args += [0, 1, 0.0, 1.0, scores.stride(0) * 4, 4]
        self.gpu.run(f"moe_route_{route_variant(shape.experts)}", (len(scores), 1), args)

    def _blocks(self, blocks_per_sm: int) -> int:
        return blocks_per_sm * int(self.gpu.device.properties.multiprocessor_count)

    def _gate_up_maps(self, layer: Layer, name: str) -> list[int]:
        shape, box = self.shape, GATE_UP_TILES[name].gate_up_box
        return [
            self._view(tensor, gate_up_view(experts, shape.dim, shape.inner), box)
            for tensor, experts in ((layer.gate_up, shape.experts), (layer.shared_gate_up, 1))
        ]

    def _view(self, tensor: Tensor | None, view: tuple[Any, Any], box: tuple[int, ...]) -> int:
        """Address of the tensor map of a view (shape, strides), or 0 of none."""
        if tensor is None:
            return 0
        key = (tensor.data_ptr(), view, box)
        if key not in self.maps:
            raw = self.gpu.tensor_map(tensor.data_ptr(), view[0], box, view[1])
            self.maps[key] = self.gpu.put(np.frombuffer(raw, np.uint8))
        return self.maps[key]

    def gate_up(self, layer: Layer, x: Tensor, ids: Tensor, name: str) -> None:
        shape = self.shape
        args = [*self._gate_up_maps(layer, name), x.data_ptr()]
        args += [ids.data_ptr(), self.act.data_ptr(), len(x), shape.slots, shape.experts]
        args += [shape.dim, shape.inner, x.stride(0) * 2]
        blocks = self._blocks(GATE_UP_TILES[name].blocks_per_sm)
        self.gpu.run(decode_kernels(name)[0], (blocks, 1), args)

    def down(
        self, layer: Layer, ids: Tensor, weights: Tensor, residual: Tensor, out: Tensor, name: str
    ) -> None:
        shape = self.shape
        box, inner, maps = DOWN_TILES[name].down_box, shape.inner, []
        for tensor in (layer.down, layer.shared_down):
            rows = 0 if tensor is None else tensor.numel() // inner
            maps.append(self._view(tensor, down_view(rows, inner), box))
        args = [*maps, ids.data_ptr()]
        args += [weights.data_ptr(), self.act.data_ptr(), residual.data_ptr(), out.data_ptr()]
        args += [len(out), shape.slots, shape.experts, shape.dim, shape.inner, 1]
        args += [residual.stride(0) * 2, out.stride(0) * 2]
        blocks = min(shape.dim // UNIT, self._blocks(DOWN_TILES[name].blocks_per_sm))
        self.gpu.run(decode_kernels(name)[1], (blocks, 1), args)

    def decode(
        self, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, out: Tensor,
        name: str,
    ) -> None:  # fmt: skip
        self.gate_up(layer, x, ids, name)
        self.down(layer, ids, weights, residual, out, name)

    def routed(
        self, layer: Layer, rows: gpu_router.Rows, columns: int, out: Tensor, name: str
    ) -> None:
        """``decode`` that makes the choice, of the scores of ``rows``."""
        shape, kernel = self.shape, routed_kernel(name, self.shape.experts)
        assert kernel is not None
        args: list[Any] = [*self._gate_up_maps(layer, name), layer.address("gate_up")]
        args += [rows.normed.data_ptr(), rows.scores.data_ptr(), 0, rows.active.data_ptr()]
        args += [rows.ids.data_ptr(), rows.weights.data_ptr(), self.act.data_ptr(), len(out)]
        args += [shape.slots, shape.experts, shape.dim, shape.inner, columns, shape.top_k, 0, 1]
        args += [gpu_router.EPSILON, 1.0, 2 * shape.dim, 4 * columns]
        blocks = self._blocks(GATE_UP_TILES[name].blocks_per_sm)
        self.gpu.run(kernel, (blocks, 1), args)
        self.down(layer, rows.ids, rows.weights, out, out, name)

    def grouped(
        self, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, out: Tensor,
        name: str, only: str = "",
    ) -> None:  # fmt: skip
        gpu, shape, tile, pairs = self.gpu, self.shape, FORMS[name], ids.numel()
        groups = shape.experts + shape.shared
        count = tile.tiles(pairs, groups)
        order, tiles = self.order.data_ptr(), self.tiles.data_ptr()
        if only in ("", "sort"):
            args = [ids.data_ptr(), order, tiles, pairs, groups, tile.rows, count]
            gpu.run("moe_sort", (groups, 1), args)
        if name in WGMMA_TILES:
            self._wgmma(layer, x, pairs, name, only)
        elif only in ("", "gate_up"):
            args = [layer.address("gate_up"), layer.address("shared_gate_up"), x.data_ptr(), order]
            args += [tiles, self.act.data_ptr(), shape.experts, shape.slots, shape.dim]
            args += [shape.inner, x.stride(0) * 2]
            grid = (2 * shape.inner // tile.columns, count)
            gpu.run(f"moe_grouped_gate_up_bf16_{name}", grid, args)
        if name in GROUPED_TILES and only in ("", "down"):
            args = [layer.address("down"), layer.address("shared_down"), self.act.data_ptr(), order]
            args += [tiles, self.y.data_ptr(), shape.experts, shape.dim, shape.inner]
            grid = (shape.dim // tile.columns, count)
            gpu.run(f"moe_grouped_down_bf16_{name}", grid, args)
        if only in ("", "combine"):
            args = [self.y.data_ptr(), ids.data_ptr(), weights.data_ptr(), residual.data_ptr()]
            args += [out.data_ptr(), shape.slots, shape.dim, residual.stride(0) * 2]
            args += [out.stride(0) * 2]
            gpu.run("moe_combine", (len(x), -(-shape.dim // 1024)), args)

    def _map(self, tensor: Tensor | None, box_rows: int) -> int:
        """The tensor map of a matrix, or of matrices one under the other; 0 of none."""
        if tensor is None:
            return 0
        key = (tensor.data_ptr(), tensor.shape)
        if key not in self.maps:
            shape = (tensor.numel() // tensor.shape[-1], tensor.shape[-1])
            raw = self.gpu.tensor_map(tensor.data_ptr(), shape, (box_rows, 64))
            self.maps[key] = self.gpu.put(np.frombuffer(raw, np.uint8))
        return self.maps[key]

    def _wgmma(self, layer: Layer, x: Tensor, pairs: int, name: str, only: str) -> None:
        shape, tile = self.shape, WGMMA_TILES[name]
        order, tiles = self.order.data_ptr(), self.tiles.data_ptr()
        count = tile.tiles(pairs, shape.experts + shape.shared)
        grid = (self._blocks(1), 1)
        if only in ("", "gate_up"):
            args = [self._map(m, HALF_ROWS) for m in (layer.gate_up, layer.shared_gate_up)]
            args += [x.data_ptr(), order, tiles, self.act.data_ptr(), count, shape.experts]
            args += [shape.slots, shape.dim, shape.inner, x.stride(0) * 2]
            self.gpu.run(f"moe_grouped_wgmma_gate_up_bf16_{name}", grid, args)
        if only in ("", "down"):
            args = [self._map(m, HALF_ROWS) for m in (layer.down, layer.shared_down)]
            args += [self._map(self.act[:pairs], ROW_BOX), order, tiles, self.y.data_ptr()]
            args += [count, shape.experts, shape.dim, shape.inner]
            self.gpu.run(f"moe_grouped_wgmma_down_bf16_{name}", grid, args)


def choices(shape: Shape, rows: int) -> tuple[Tensor, Tensor]:
    """Random experts and weights of rows."""
    ids = torch.rand(rows, shape.experts, device="cuda").argsort(dim=1)[:, : shape.top_k].int()
    if shape.shared:
        ids = torch.cat([ids, torch.full_like(ids[:, :1], shape.experts)], dim=1)
    return ids.contiguous(), torch.rand(rows, shape.slots, device="cuda")


def exact(shape: Shape, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The block in float64, act rounded to bf16."""
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for row in range(len(x)):
        for slot in range(shape.slots):
            e = int(ids[row, slot])
            is_shared = e == shape.experts
            gate_up = layer.shared_gate_up if is_shared else layer.gate_up[e]
            down = layer.shared_down if is_shared else layer.down[e]
            h = gate_up.double() @ x[row].double()
            act = torch.nn.functional.silu(h[: shape.inner]) * h[shape.inner :]
            out[row] += weights[row, slot].double() * (down.double() @ act.bfloat16().double())
    return out


class Checks:
    """Bits and errors."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.errors: dict[str, float] = {}

    def that(self, good: bool, what: str) -> None:
        if not good:
            self.failed.append(what)
            print("WRONG:", what, flush=True)

    def run(self, gpu: Gpu, shape: Shape) -> None:
        """Every form gives a row the same bits."""
        rows = 700
        runner, layer = Runner(gpu, shape, rows), Layer(shape)
        x, residual = _normal(rows, shape.dim), _normal(rows, shape.dim) * 0.1
        ids, weights = choices(shape, rows)
        ids[1], ids[2, :4] = ids[0], ids[0, :4]
        results = {}
        for name in forms(gpu):
            out = torch.full((rows + 1, shape.dim), float("nan"), device="cuda").bfloat16()
            torch.cuda.synchronize()
            runner.grouped(layer, x, ids, weights, residual, out[:-1], name)
            gpu.stream.sync()
            results[name] = out[:-1]
            self.that(bool(out[-1].isnan().all()), f"{shape.name} {name}: wrote past the last row")
        full = results["r16"]
        for name, other in results.items():
            self.that(torch.equal(full, other), f"{shape.name}: bits of grouped {name}")
        for name in ["r64", *(name for name in WGMMA_TILES if name in results)]:
            for first, count in ((0, 1), (1, 33), (50, 130), (9, 691)):  # experts without a row too
                place = slice(first, first + count)  # cloned: ids lie at multiples of 16 bytes
                out = torch.empty(count, shape.dim, device="cuda", dtype=torch.bfloat16)
                parts = [t[place].clone() for t in (x, ids, weights, residual)]
                torch.cuda.synchronize()
                runner.grouped(layer, *parts, out, name)
                gpu.stream.sync()
                self.that(torch.equal(out, full[place]), f"{shape.name} {name}: {count} rows")
        want = exact(shape, layer, x[:8], ids[:8], weights[:8]) + residual[:8].double()
        error = float((full[:8].double() - want).norm() / want.norm())
        self.errors[shape.name] = error
        self.that(error < 6e-3, f"{shape.name}: error {error:.1e}")
        picks = [[0], [5], [0, 1], [3, 2, 0], list(range(8)), list(range(7, -1, -1)), [2, 699, 40]]
        for pick in picks:
            sizes = {"dim": shape.dim, "inner": shape.inner, "slots": shape.slots}
            for name in [n for n in GATE_UP_TILES if fits(n, len(pick), **sizes)]:
                out = torch.full((len(pick), shape.dim), float("nan"), device="cuda").bfloat16()
                parts = [t[pick] for t in (x, ids, weights, residual)]
                torch.cuda.synchronize()
                runner.decode(layer, *parts, out, name)
                gpu.stream.sync()
                self.that(torch.equal(out, full[pick]), f"{shape.name}: decode {name}, rows {pick}")
        for count in (1, 13, 77, 128):
            name = grouped_variant(count, experts=shape.experts, slots=shape.slots)
            out = torch.empty(count, shape.dim, device="cuda", dtype=torch.bfloat16)
            place = slice(100, 100 + count)
            parts = [t[place].clone() for t in (x, ids, weights, residual)]
            torch.cuda.synchronize()
            runner.grouped(layer, *parts, out, name)
            gpu.stream.sync()
            self.that(torch.equal(out, full[place]), f"{shape.name}: {count} rows by themselves")


def time_decode(
    gpu: Gpu, shape: Shape, layers: list[Layer], rows: int, ceiling: float, names: list[str]
) -> dict[str, Any]:
    """Microseconds of a layer over many layers and choices, and the share of the bytes read."""
    runner, x = Runner(gpu, shape, rows), _normal(rows, shape.dim)
    routes = [choices(shape, rows) for _ in range(32)]
    scores = torch.randn(rows, shape.experts, device="cuda")
    distinct = float(np.mean([len(ids.unique()) for ids, _ in routes]))
    num_bytes = distinct * shape.expert_bytes
    out, figures = torch.zeros_like(x), {"rows": rows, "experts": distinct}
    torch.cuda.synchronize()

    def chain(name: str, part: str) -> None:
        for i, (ids, weights) in enumerate(routes):
            layer = layers[i % len(layers)]
            if part == "route":
                runner.route(scores, None, ids, weights)
            elif name in GROUPED_TILES:
                only = "" if part == "both" else part
                runner.grouped(layer, x, ids, weights, x, out, name, only)
            elif part != "down":
                runner.gate_up(layer, x, ids, name)
            if name not in GROUPED_TILES and part in ("both", "down"):
                runner.down(layer, ids, weights, x, out, name)

    for name in names:
        parts = {}
        for part in ("both", "gate_up", "down"):  # one after the other: the same data and clocks
            parts[part] = gpu.microseconds(lambda p=part, n=name: chain(n, p), 1) / len(routes)
        share = num_bytes / parts["both"] / 1e6 / ceiling
        figures[name] = parts | {"share": share}
        print(
            f"{shape.name} {rows:4} rows {distinct:6.1f} experts {name:12}"
            f"{parts['both']:8.1f} us {share:6.1%}  gate+up {parts['gate_up']:.1f}"
            f"  down {parts['down']:.1f}",
            flush=True,
        )
    if rows == 1:
        saved = [(ids.clone(), weights.clone()) for ids, weights in routes]
        figures["route"] = gpu.microseconds(lambda: chain("", "route"), 1) / len(routes)
        for (ids, weights), (a, b) in zip(routes, saved, strict=True):
            ids.copy_(a), weights.copy_(b)
        print(f"{shape.name} route {figures['route']:.2f} us")
    return figures


def time_block(
    gpu: Gpu, gemm: StepGemm, checks: Checks, shape: Shape, layers: list[Layer], rows: int
) -> dict[str, float]:
    """Microseconds of a block from norm to sum, by where the choice is made; bits compared."""
    router = gpu_router.Router(gpu, gemm, gpu_router.SHAPES[(A, B).index(shape)])
    name = decode_variant(rows, dim=shape.dim, inner=shape.inner, slots=shape.slots)
    assert name is not None
    runner, columns = Runner(gpu, shape, rows), router.shape.columns
    active = torch.arange(rows, device="cuda")
    inputs = [gpu_router.Rows(router.shape, _normal(rows, shape.dim), active) for _ in range(32)]
    residual = _normal(rows, shape.dim) * 0.1
    outs = [residual.clone() for _ in inputs]

    def chain(is_apart: bool) -> None:
        for i, (given, out) in enumerate(zip(inputs, outs, strict=True)):
            layer, number = layers[i % len(layers)], i % router.num_layers
            if is_apart:
                router.at_once(given, number)
                runner.decode(layer, given.normed, given.ids, given.weights, out, out, name)
            else:
                router.scores(given, number)
                runner.routed(layer, given, columns, out, name)

    left = []
    for is_apart in (True, False):
        for given, out in zip(inputs, outs, strict=True):
            given.ids.fill_(-7), given.weights.fill_(-7.0), out.copy_(residual)
        torch.cuda.synchronize()
        chain(is_apart)
        gpu.stream.sync()
        results = [(*given.results, out) for given, out in zip(inputs, outs, strict=True)]
        left.append([tensor.clone() for tensors in results for tensor in tensors])
        torch.cuda.synchronize()
    same = all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    checks.that(same, f"{shape.name}: bits of kernels that choose, {rows} rows")
    figures = {
        key: gpu.microseconds(lambda apart=is_apart: chain(apart), 1) / len(inputs)  # type: ignore[misc]
        for key, is_apart in (("handed over", True), ("chosen there", False))
    }
    words = ", ".join(f"choice {key} {us:.2f}" for key, us in figures.items())
    print(f"{shape.name} block {rows} rows, us: {words}", flush=True)
    return figures


def time_prefill(gpu: Gpu, shape: Shape, layers: list[Layer], rows: int) -> dict[str, Any]:
    """Microseconds and TFLOP/s of a layer."""
    runner, x = Runner(gpu, shape, rows), _normal(rows, shape.dim)
    ids, weights = choices(shape, rows)
    out = torch.zeros_like(x)
    flop = 2 * 3 * rows * shape.slots * shape.dim * shape.inner
    figures: dict[str, Any] = {"rows": rows}
    torch.cuda.synchronize()
    for name in forms(gpu)[1:]:
        parts = {}
        for part in ("", "sort", "gate_up", "down", "combine"):

            def work(part: str = part, name: str = name) -> None:
                for layer in layers[:4]:
                    runner.grouped(layer, x, ids, weights, x, out, name, part)

            parts[part or "all"] = gpu.microseconds(work, 1, 5) / len(layers[:4])
        figures[name] = parts | {"tflops": flop / parts["all"] / 1e6}
        text = "  ".join(f"{part} {us:.0f}" for part, us in parts.items())
        print(f"{shape.name} {rows} rows {name}: {figures[name]['tflops']:.0f} TFLOP/s; us {text}")
    return figures


def product_ceiling(gpu: Gpu, stream: Any) -> float:
    """TFLOP/s of a square product by cuBLAS."""
    a, b = _normal(8192, 8192), _normal(8192, 8192)
    out = torch.empty_like(a)

    def work() -> None:
        with torch.cuda.stream(stream):
            torch.matmul(a, b, out=out)

    return 2 * 8192**3 / gpu.microseconds(work, 3) / 1e6


def sweep_30b(gpu: Gpu, gemm: StepGemm, layers: list[Layer], ceiling: float) -> dict[str, float]:
    """All weights of Qwen3-30B-A3B that one token reads: 48 layers and the head, one graph."""
    dim, heads = B.dim, 4096
    shapes = ((heads + 1024, dim), (dim, heads), (B.experts, dim), (151936, dim))
    dense = [[_normal(*shape) for shape in shapes[:3]] for _ in range(48)]
    head, x, wide = _normal(*shapes[3]), _normal(1, dim), _normal(1, heads)
    hidden, logits = _normal(1, dim), torch.empty(1, 151936, device="cuda")
    qkv = _normal(1, heads + 1024)
    scores = torch.empty(1, B.experts, device="cuda")
    ids, weights = choices(B, 1)
    runner = Runner(gpu, B, 1)

    def step() -> None:
        for i, (qkv_w, out_w, router) in enumerate(dense):
            gemm(qkv_w, x, qkv)
            gemm(out_w, wide, hidden)
            gemm(router, x, scores)
            runner.route(scores, None, ids, weights)
            runner.decode(layers[i % len(layers)], x, ids, weights, hidden, hidden, "r1")
        gemm(head, x, logits)

    sizes = sum(n * k for n, k in shapes[:3]) * 48 + shapes[3][0] * dim
    num_bytes = 2 * sizes + 48 * B.top_k * B.expert_bytes
    us = gpu.microseconds(step, 1, 9)
    share = num_bytes / us / 1e6 / ceiling
    print(f"30B-A3B, 1 row: {us / 1e3:.3f} ms, {num_bytes / 1e9:.2f} GB, {share:.1%}")
    return {"ms": us / 1e3, "gb": num_bytes / 1e9, "share": share}


def trials(shape: Shape, rows: int) -> list[str]:
    """Decode kernels that would do as well as those that are chosen."""
    sizes = {"dim": shape.dim, "inner": shape.inner, "slots": shape.slots}
    chosen = decode_variant(rows, **sizes)
    return [n for n in GATE_UP_TILES if n != chosen and fits(n, rows, **sizes)]


def load_kernels(gpu: Gpu) -> None:
    """The kernels used here onto the device, compiled if need be."""
    names = [kernel for name in GATE_UP_TILES for kernel in decode_kernels(name)]
    names += [f"moe_gate_up_bf16_{n}_{count}" for n in GATE_UP_TILES for count in ROUTED_VARIANTS]
    names += [f"moe_grouped_{part}_bf16_{n}" for part in ("gate_up", "down") for n in GROUPED_TILES]
    if gpu.arch == "sm_90a":
        for part in ("gate_up", "down"):
            names += [f"moe_grouped_wgmma_{part}_bf16_{name}" for name in WGMMA_TILES]
    names += ["moe_sort", "moe_combine", *(f"moe_route_{name}" for name in ROUTE_VARIANTS)]
    names += [f"gemm_step_bf16_{name}" for name in TILES if name.endswith("_8")]
    assert variant(151936, 1) in TILES
    for compiled in build.load_all(names, gpu.arch, jobs=12).values():
        gpu.add(compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--tune", action="store_true", help="other decode kernels too")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.manual_seed(3)
    torch.zeros(1, device="cuda")
    gpu, checks = Gpu(), Checks()
    load_kernels(gpu)
    gpu_router.load_kernels(gpu)
    gemm = StepGemm(gpu)
    for shape in (A, B):
        checks.run(gpu, shape)
    print("errors against float64:", {k: f"{v:.1e}" for k, v in checks.errors.items()})
    print("bits:", f"{len(checks.failed)} checks failed" if checks.failed else "all equal")
    ceiling, roof = read_ceiling(gpu, gemm.stream), product_ceiling(gpu, gemm.stream)
    print(f"{gpu.device.name}: read ceiling {ceiling:.2f} TB/s, products {roof:.0f} TFLOP/s")
    figures: dict[str, Any] = {"read_tb_per_s": ceiling, "tflops": roof}
    for shape, num_layers in ((A, 8), (B, 8)):
        layers = [Layer(shape) for _ in range(num_layers)]
        for rows in options.rows:
            found = decode_variant(rows, dim=shape.dim, inner=shape.inner, slots=shape.slots)
            by_group = grouped_variant(rows, experts=shape.experts, slots=shape.slots)
            names = [found or by_group]
            names += trials(shape, rows) if options.tune else []
            names += ["r16"] if rows == 8 else []
            key = f"{shape.name} decode {rows}"
            figures[key] = time_decode(gpu, shape, layers, rows, ceiling, names)
            if rows <= gpu_router.ROUTER_ROWS:
                figures[f"{shape.name} block {rows}"] = time_block(
                    gpu, gemm, checks, shape, layers, rows
                )
        for rows in options.prefill:
            figures[f"{shape.name} prefill {rows}"] = time_prefill(gpu, shape, layers, rows)
        if shape is B:
            figures["30B-A3B sweep"] = sweep_30b(gpu, gemm, layers, ceiling)
        del layers
        torch.cuda.empty_cache()
    few = [rows for rows in options.rows if rows <= gpu_router.ROUTER_ROWS]
    failed, figures["router"] = gpu_router.measure(gpu, gemm, few)
    checks.failed += failed
    if options.json:
        record = {"device": gpu.device.name, "errors": checks.errors, "failed": checks.failed}
        Path(options.json).write_text(json.dumps(record | {"figures": figures}, indent=1))
    return int(bool(checks.failed))


if __name__ == "__main__":
    sys.exit(main())
