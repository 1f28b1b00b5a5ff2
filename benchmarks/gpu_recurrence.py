"""Recurrent layers on the first GPU: error, equality of bits, and time beside the ceilings.

    python benchmarks/gpu_recurrence.py [--kernels DIR] [--json FILE] [--pairs]

``DIR`` is a folder that ``atlas_kernels.build.build_all`` wrote; without it kernels are compiled.
``--pairs`` adds the passes by clusters of two thread blocks, which nothing but a GPU has tested.
Needs torch with CUDA, for random inputs, ceilings and references in float64. Times are medians over
graph replays with dependent launch, the launches of a graph going round enough layers that no state
is found in the second-level cache. TB/s counts a state read and written.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas_kernels import build  # noqa: E402
from atlas_kernels.recurrence_shapes import matrix_bytes  # noqa: E402

from tests.kernels.gpu import Gpu  # noqa: E402

DEVICE = "cuda"
DIM, CHUNK = 128, 64
FORMS = ("c16", "c32", "c16_s2", "c16_s1")
PAIRS = ("c16_x2", "c32_x2")
KERNELS = (
    "causal_conv_bf16",
    "gated_delta_mixer_step_d128_bf16",
    "gated_delta_step_d128_bf16",
    "gated_delta_chunk_d128_bf16",
    *(f"gated_delta_prefill_d128_{form}" for form in FORMS),
    "gated_rmsnorm_heads_bf16_d128",
    "mamba2_step_n128_bf16",
    "mamba2_chunk_n128_bf16",
    *(f"mamba2_prefill_n128_{form}" for form in FORMS),
)
EPS = np.float32(1e-6)
BOUNDS = (np.float32(0.0), np.float32(math.inf))
Figures = dict[str, Any]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def floats(*shape: int) -> torch.Tensor:
    return normal(*shape, dtype=torch.float32)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖; NaN where an element was not written."""
    return float((got.double() - want.double()).norm() / want.double().norm())


class Ranges:
    """Slots, row ranges and chunks of sequences of equal length, in device memory."""

    def __init__(self, batch: int, rows: int) -> None:
        self.batch, self.rows = batch, rows
        ints = {"dtype": torch.int32, "device": DEVICE}
        self.cu_rows = torch.arange(batch + 1, **ints) * rows
        self.slots = torch.arange(batch - 1, -1, -1, **ints)
        self.nowhere = torch.full((batch,), -1, **ints)
        self.counters = torch.zeros(4096, **ints)
        chunks = rows // CHUNK
        firsts = [n * rows + CHUNK * c for n in range(batch) for c in range(chunks)]
        self.chunk_rows = torch.tensor(firsts or [0], **ints)
        self.cu_chunks = torch.arange(batch + 1, **ints) * chunks
        self.num_chunks = len(firsts)
        self.kept: list[torch.Tensor] = []

    def part(self, first: int, count: int) -> list[int]:
        """Addresses of ``begins`` and ``ends`` of some rows of each sequence."""
        begins = self.cu_rows[:-1] + first
        self.kept += [begins, begins + count]
        torch.cuda.synchronize()  # kernels run on a stream of their own
        return [tensor.data_ptr() for tensor in self.kept[-2:]]


class Delta:
    """Layers of the gated delta rule on one set of inputs."""

    def __init__(self, gpu: Gpu, ranges: Ranges, key_heads: int, value_heads: int, layers: int):
        self.gpu, self.ranges, self.key_heads, self.value_heads = (
            gpu,
            ranges,
            key_heads,
            value_heads,
        )
        total, values = ranges.batch * ranges.rows, value_heads * DIM
        self.total, self.channels = total, (2 * key_heads + value_heads) * DIM
        self.projected = normal(total, self.channels + values + 2 * value_heads)
        self.gate = self.projected[:, self.channels :]
        self.a = self.projected[:, self.channels + values :]
        self.b = self.a[:, value_heads:]
        self.decay_log = torch.rand(value_heads, device=DEVICE) * 2 - 2
        self.dt_bias = floats(value_heads)
        self.conv_weight, self.norm_weight = floats(4, self.channels) / 2, floats(DIM)
        shape = (layers, ranges.batch, value_heads, DIM, DIM)
        self.states = torch.randn(shape, device=DEVICE) / 8
        self.tails = normal(layers, ranges.batch, 3, self.channels).float()
        self.convolved = torch.empty(total, self.channels, device=DEVICE)
        self.out = torch.full((total, value_heads, DIM), math.nan, device=DEVICE)
        self.mixed = torch.full((total, values), math.nan, device=DEVICE, dtype=torch.bfloat16)
        self.turn = itertools.cycle(range(layers))
        self.stride = self.projected.stride(0) * 2

    def gates(self) -> list[int]:
        return [self.a.data_ptr(), self.b.data_ptr()]

    def mix(self, part: list[int], write: bool = True, layer: int | None = None) -> None:
        """The fused step of one layer."""
        layer = next(self.turn) if layer is None else layer
        ranges, targets = self.ranges, self.ranges.slots if write else self.ranges.nowhere
        args = [self.projected.data_ptr(), self.gate.data_ptr(), *self.gates()]
        args += [self.conv_weight.data_ptr(), self.norm_weight.data_ptr()]
        args += [self.decay_log.data_ptr(), self.dt_bias.data_ptr(), ranges.slots.data_ptr()]
        args += [targets.data_ptr(), *part, self.states[layer].data_ptr()]
        args += [self.tails[layer].data_ptr(), ranges.counters.data_ptr(), self.mixed.data_ptr()]
        args += [self.key_heads, self.value_heads, *[self.stride] * 3]
        args += [self.mixed.stride(0) * 2, EPS]
        grid = (ranges.batch * self.value_heads, 1)
        self.gpu.run("gated_delta_mixer_step_d128_bf16", grid, args)

    def convolve(self, part: list[int]) -> None:
        layer, ranges = next(self.turn), self.ranges
        args = [self.projected.data_ptr(), self.conv_weight.data_ptr(), 0, ranges.slots.data_ptr()]
        args += [*part, self.tails[layer].data_ptr(), self.convolved.data_ptr(), self.channels]
        args += [self.stride, self.channels * 4]
        grid = (ranges.batch * -(-self.channels // 512), -(-ranges.rows // 32))
        self.gpu.run("causal_conv_bf16", grid, args)

    def step(self, part: list[int]) -> None:
        """The recurrence alone."""
        layer, slots = next(self.turn), self.ranges.slots.data_ptr()
        args = [self.convolved.data_ptr(), *self.gates(), self.decay_log.data_ptr()]
        args += [self.dt_bias.data_ptr(), slots, slots, *part, self.states[layer].data_ptr()]
        args += [self.out.data_ptr(), self.key_heads, self.value_heads, self.channels * 4]
        args += [self.stride, self.out.stride(0) * 4]
        grid = (self.ranges.batch * self.value_heads, 1)
        self.gpu.run("gated_delta_step_d128_bf16", grid, args)

    def norm(self) -> None:
        args = [self.out.data_ptr(), self.gate.data_ptr(), self.norm_weight.data_ptr()]
        heads = self.total * self.value_heads
        args += [self.mixed.data_ptr(), self.value_heads, heads, self.out.stride(0) * 4]
        args += [self.stride, self.mixed.stride(0) * 2, EPS]
        self.gpu.run("gated_rmsnorm_heads_bf16_d128", (-(-heads // 32), 1), args)

    def prepare(self) -> None:
        """Room for what the chunks leave."""
        count, keys, values = self.ranges.num_chunks, self.key_heads, self.value_heads
        half = {"device": DEVICE, "dtype": torch.bfloat16}
        wide, narrow = matrix_bytes(DIM) // 2, matrix_bytes(CHUNK) // 2
        self.work = [torch.empty(count, heads, wide, **half) for heads in (keys, keys, values)]
        self.work += [torch.empty(count, values, CHUNK, DIM, **half)]
        self.work += [torch.empty(count, values, narrow, **half)]
        self.work += [torch.empty(count, values, CHUNK, device=DEVICE)]
        torch.cuda.synchronize()

    def chunks(self) -> None:
        """What chunks need, each on its own."""
        args = [self.convolved.data_ptr(), *self.gates(), self.decay_log.data_ptr()]
        args += [self.dt_bias.data_ptr(), self.ranges.chunk_rows.data_ptr()]
        args += [self.ranges.cu_chunks[-1:].data_ptr()]
        args += [*(tensor.data_ptr() for tensor in self.work), self.key_heads, self.value_heads]
        args += [self.channels * 4, self.stride]
        grid = (self.ranges.num_chunks, self.value_heads)
        self.gpu.run("gated_delta_chunk_d128_bf16", grid, args)

    def sweep(self, form: str, layer: int = 0, chunks: torch.Tensor | None = None) -> None:
        """From chunk to chunk."""
        ranges = self.ranges
        cu_chunks = ranges.cu_chunks if chunks is None else chunks
        args = [*(tensor.data_ptr() for tensor in self.work), ranges.chunk_rows.data_ptr()]
        args += [cu_chunks.data_ptr(), ranges.slots.data_ptr(), self.states[layer].data_ptr()]
        args += [self.out.data_ptr(), self.key_heads, self.value_heads, self.out.stride(0) * 4]
        grid = (ranges.batch * self.value_heads * (DIM // int(form[1:3])), 1)
        self.gpu.run(f"gated_delta_prefill_d128_{form}", grid, args)

    def reference(self, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In float64: out, gated and normed, and the state, of all rows."""
        batch, rows, keys = self.ranges.batch, self.ranges.rows, self.key_heads * DIM
        order = self.ranges.slots.long()
        x = self.projected[:, : self.channels].double().view(batch, rows, -1)
        x = torch.cat([self.tails[layer][order].double(), x], 1)
        weight = self.conv_weight.double()
        x = torch.nn.functional.silu(sum(x[:, j : j + rows] * weight[j] for j in range(4)))
        q, k, v = x.split([keys, keys, self.value_heads * DIM], 2)
        group = self.value_heads // self.key_heads

        def unit(t: torch.Tensor) -> torch.Tensor:
            t = t.view(batch, rows, self.key_heads, DIM).repeat_interleave(group, 2)
            return t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6)

        q, k, v = unit(q) / math.sqrt(DIM), unit(k), v.view(batch, rows, -1, DIM)
        a, b = (t[:, : self.value_heads].double().view(batch, rows, -1) for t in (self.a, self.b))
        rate = self.decay_log.double().exp()
        decay = (-rate * torch.nn.functional.softplus(a + self.dt_bias.double())).exp()
        state, beta, out = self.states[layer][order].double(), b.sigmoid(), []
        for t in range(rows):
            state = state * decay[:, t, :, None, None]
            held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            delta = beta[:, t, :, None] * (v[:, t] - held)
            state = state + k[:, t, :, :, None] * delta[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        result = torch.stack(out, 1).view(self.total, -1, DIM)
        z = self.gate[:, : self.value_heads * DIM].double().view(self.total, -1, DIM)
        normed = result * torch.rsqrt((result**2).mean(-1, keepdim=True) + 1e-6)
        normed = normed * self.norm_weight.double() * torch.nn.functional.silu(z)
        after = torch.empty_like(state)
        after[order] = state
        return result, normed.view(self.total, -1), after


def ceilings() -> Figures:
    """What a large reduction reads, and what a large copy moves."""
    x, y = (torch.randn(1 << 29, device=DEVICE) for _ in "xy")

    def seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(8):
                work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 8e3)
        return float(np.median(times[1:]))

    num_bytes = x.numel() * 4
    read, copy = seconds(lambda: torch.sum(x)), seconds(lambda: torch.mul(x, 2, out=y))
    return {"case": "ceilings", "read TB/s": num_bytes / read / 1e12} | {
        "copy TB/s": 2 * num_bytes / copy / 1e12
    }


def check_step(gpu: Gpu) -> Figures:
    """The fused step and its parts: error, and bits of K rows against K launches."""
    rows = 9
    layer = Delta(gpu, Ranges(5, rows), 16, 32, 1)
    states, tails = layer.states.clone(), layer.tails.clone()
    _, want, after = layer.reference()
    everything = layer.ranges.part(0, rows)
    layer.mix(everything)
    gpu.stream.sync()
    figures = {"case": "check step", "error": error(layer.mixed, want)}
    figures["state error"] = error(layer.states[0], after)
    together, left = layer.mixed.clone(), [layer.states.clone(), layer.tails.clone()]

    def again() -> None:
        layer.states.copy_(states)
        layer.tails.copy_(tails)
        torch.cuda.synchronize()

    again()
    layer.mixed.fill_(math.nan)
    torch.cuda.synchronize()
    for row in range(rows):
        layer.mix(layer.ranges.part(row, 1))
        gpu.stream.sync()
    equal = torch.equal(layer.mixed, together)
    equal &= torch.equal(layer.states, left[0]) and torch.equal(layer.tails, left[1])
    again()
    layer.mix(everything, write=False)
    gpu.stream.sync()
    equal &= torch.equal(layer.mixed, together) and torch.equal(layer.states, states)
    again()
    layer.convolve(everything)
    layer.step(everything)
    gpu.stream.sync()
    equal &= torch.equal(layer.states, left[0]) and torch.equal(layer.tails, left[1])
    equal &= int(layer.ranges.counters.abs().sum()) == 0
    return figures | {"equal": equal}


def check_prefill(
    gpu: Gpu, key_heads: int, value_heads: int, form: str, rows: int = 2048
) -> Figures:
    """Chunked against float64, and cut at chunk borders against one pass."""
    layer = Delta(gpu, Ranges(2, rows), key_heads, value_heads, 1)
    want, _, after = layer.reference()
    start = layer.states.clone()
    layer.convolve(layer.ranges.part(0, rows))
    layer.prepare()
    layer.chunks()
    layer.sweep(form)
    gpu.stream.sync()
    figures = {"case": f"check prefill {key_heads}/{value_heads} {form}"}
    figures |= {"error": error(layer.out, want), "state error": error(layer.states[0], after)}
    whole, left = layer.out.clone(), layer.states.clone()
    layer.states.copy_(start)
    layer.out.fill_(math.nan)
    torch.cuda.synchronize()
    count = rows // CHUNK
    for first, end in itertools.pairwise([0, 1, count // 2 + 1, count]):
        # Only the first sequence is cut: its chunks come first. The other is done whole at the end.
        last = end + (count if end == count else 0)
        chunks = torch.tensor([first, end, last], dtype=torch.int32, device=DEVICE)
        torch.cuda.synchronize()
        layer.sweep(form, chunks=chunks)
        gpu.stream.sync()
    return figures | {"equal": torch.equal(layer.out, whole) and torch.equal(layer.states, left)}


def step_figures(gpu: Gpu) -> Iterator[Figures]:
    """Decode and verify, 16 / 32 heads."""
    for batch, layers in ((1, 64), (8, 12), (32, 4), (128, 2)):
        for rows in (1, 4, 8):
            layer = Delta(gpu, Ranges(batch, rows), 16, 32, layers)
            moved = 2 * layer.states[0].numel() * 4
            part = layer.ranges.part(0, rows)
            count = max(16, layers)
            time_us = gpu.microseconds(lambda layer=layer, part=part: layer.mix(part), count)
            figures = {"case": f"delta step, batch {batch}, rows {rows}", "us": time_us}
            figures["TB/s"] = moved / time_us / 1e6
            figures["us, no state written"] = gpu.microseconds(
                lambda layer=layer, part=part: layer.mix(part, write=False), count
            )
            if rows == 1:
                figures["us, recurrence alone"] = gpu.microseconds(
                    lambda layer=layer, part=part: layer.step(part), count
                )
                figures["us, convolution alone"] = gpu.microseconds(
                    lambda layer=layer, part=part: layer.convolve(part), count
                )
            yield figures
            del layer
            torch.cuda.empty_cache()


def prefill_figures(gpu: Gpu, forms: tuple[str, ...]) -> Iterator[Figures]:
    """8,192 tokens, and a short prompt."""
    for key_heads, value_heads, batch, rows in (
        (2, 8, 1, 8192), (16, 32, 1, 8192), (16, 32, 1, 128), (16, 32, 8, 1024),
    ):  # fmt: skip
        layer = Delta(gpu, Ranges(batch, rows), key_heads, value_heads, 1)
        part = layer.ranges.part(0, rows)
        layer.prepare()
        name = f"delta prefill {key_heads}/{value_heads}, {batch} x {rows}"
        figures: Figures = {"case": name}
        figures["convolution"] = gpu.microseconds(lambda f=layer, p=part: f.convolve(p), 8)
        figures["chunks"] = gpu.microseconds(lambda f=layer: f.chunks(), 8)
        for form in forms:
            figures[form] = gpu.microseconds(lambda f=layer, form=form: f.sweep(form), 8)
        form = min(forms, key=lambda name: figures[name])
        figures["norm"] = gpu.microseconds(lambda f=layer: f.norm(), 8)

        def both(layer: Delta = layer, form: str = form) -> None:
            layer.chunks()
            layer.sweep(form)

        def everything(layer: Delta = layer, part: list[int] = part, form: str = form) -> None:
            layer.convolve(part)
            layer.chunks()
            layer.sweep(form)
            layer.norm()

        figures["us, chunks and sweep"] = gpu.microseconds(both, 8)
        figures["us, all"] = gpu.microseconds(everything, 8)
        yield figures
        del layer, both, everything
        torch.cuda.empty_cache()


class Mamba:
    """Layers of Mamba-2 with Nemotron-H's shape: 64 heads of 64, 8 groups, a state of 128."""

    HEADS, GROUPS, SIZE = 64, 8, 128

    def __init__(self, gpu: Gpu, ranges: Ranges, layers: int) -> None:
        self.gpu, self.ranges = gpu, ranges
        self.total, heads = ranges.batch * ranges.rows, self.HEADS
        self.x = floats(self.total, 64 * heads + 2 * self.GROUPS * self.SIZE) / 2
        self.dt = normal(self.total, heads)
        self.decay_log, self.d, self.bias = floats(heads) / 2, floats(heads), floats(heads) - 2
        self.states = torch.randn(layers, ranges.batch, heads, 64, self.SIZE, device=DEVICE)
        self.out = torch.full((self.total, heads, 64), math.nan, device=DEVICE)
        self.turn = itertools.cycle(range(layers))
        b = self.x.data_ptr() + 64 * heads * 4
        self.columns = [self.x.data_ptr(), b, b + self.GROUPS * self.SIZE * 4]
        self.stride = self.x.stride(0) * 4

    def step(self, part: list[int], layer: int | None = None) -> None:
        layer, slots = next(self.turn) if layer is None else layer, self.ranges.slots.data_ptr()
        args = [*self.columns, self.dt.data_ptr(), self.decay_log.data_ptr(), self.d.data_ptr()]
        args += [self.bias.data_ptr(), slots, slots, *part, self.states[layer].data_ptr()]
        args += [self.out.data_ptr(), self.HEADS, self.GROUPS, 64, self.stride, self.HEADS * 2]
        args += [self.out.stride(0) * 4, *BOUNDS]
        self.gpu.run("mamba2_step_n128_bf16", (self.ranges.batch * self.HEADS, 1), args)

    def prefill(self, form: str) -> None:
        if not hasattr(self, "work"):
            half, count = {"device": DEVICE, "dtype": torch.bfloat16}, self.ranges.num_chunks
            wide, narrow = matrix_bytes(self.SIZE) // 2, matrix_bytes(CHUNK) // 2
            keys = [torch.empty(count, self.GROUPS, wide, **half) for _ in "qk"]
            heads = [torch.empty(count, self.HEADS, CHUNK, 64, **half)]
            heads += [torch.empty(count, self.HEADS, narrow, **half)]
            logs = torch.empty(count, self.HEADS, CHUNK, device=DEVICE)
            self.work = [*keys, *heads, logs]
            torch.cuda.synchronize()
        work, ranges = [tensor.data_ptr() for tensor in self.work], self.ranges
        args = [*self.columns, self.dt.data_ptr(), self.decay_log.data_ptr(), self.bias.data_ptr()]
        args += [ranges.chunk_rows.data_ptr(), ranges.cu_chunks[-1:].data_ptr()]
        args += [*work, self.HEADS, self.GROUPS, 64, self.stride]
        args += [self.HEADS * 2, *BOUNDS]
        self.gpu.run("mamba2_chunk_n128_bf16", (ranges.num_chunks, self.HEADS), args)
        args = [*work, self.x.data_ptr(), self.d.data_ptr(), ranges.chunk_rows.data_ptr()]
        args += [ranges.cu_chunks.data_ptr(), ranges.slots.data_ptr(), self.states[0].data_ptr()]
        args += [self.out.data_ptr(), self.HEADS, self.GROUPS, self.stride, self.out.stride(0) * 4]
        grid = (ranges.batch * self.HEADS * (64 // int(form[1:3])), 1)
        self.gpu.run(f"mamba2_prefill_n128_{form}", grid, args)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows, heads, groups = self.ranges.batch, self.ranges.rows, self.HEADS, self.GROUPS
        order, split = self.ranges.slots.long(), [64 * heads, *[groups * self.SIZE] * 2]
        x, b, c = (part.double().view(batch, rows, -1) for part in self.x.split(split, 1))
        x = x.view(batch, rows, heads, 64)
        b, c = (
            t.view(batch, rows, groups, -1).repeat_interleave(heads // groups, 2) for t in (b, c)
        )
        step = torch.nn.functional.softplus(self.dt.double() + self.bias.double())
        step = step.view(batch, rows, heads)
        decay, out = (-self.decay_log.double().exp() * step).exp(), []
        state = self.states[0][order].double()
        for t in range(rows):
            pushed = (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
            state = state * decay[:, t, :, None, None] + pushed
            read = torch.einsum("bhpn,bhn->bhp", state, c[:, t])
            out.append(read + self.d.double()[:, None] * x[:, t])
        after = torch.empty_like(state)
        after[order] = state
        return torch.stack(out, 1).view(self.total, heads, 64), after


def mamba_figures(gpu: Gpu) -> Iterator[Figures]:
    """Mamba-2: checks and times."""
    for rows, run in ((7, "step"), (512, "prefill")):
        layer = Mamba(gpu, Ranges(3, rows), 1)
        want, after = layer.reference()
        layer.step(layer.ranges.part(0, rows)) if run == "step" else layer.prefill("c32")
        gpu.stream.sync()
        figures = {"case": f"check mamba2 {run}", "error": error(layer.out, want)}
        yield figures | {"state error": error(layer.states[0], after)}
    for batch, layers in ((1, 64), (128, 2)):
        layer = Mamba(gpu, Ranges(batch, 1), layers)
        part = layer.ranges.part(0, 1)
        time_us = gpu.microseconds(lambda f=layer, p=part: f.step(p), max(16, layers))
        moved = 2 * layer.states[0].numel() * 4
        yield {"case": f"mamba2 step, batch {batch}", "us": time_us, "TB/s": moved / time_us / 1e6}
    layer = Mamba(gpu, Ranges(1, 8192), 1)
    figures = {"case": "mamba2 prefill, 8192"}
    for form in FORMS:
        figures[f"us, {form}"] = gpu.microseconds(lambda form=form: layer.prefill(form), 8)
    yield figures


def show(figures: Figures) -> None:
    """One line a case."""
    print(
        *(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()),
        sep=" | ",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", help="folder of compiled kernels")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--pairs", action="store_true", help="clusters of two thread blocks, too")
    options = parser.parse_args()
    pairs = PAIRS if options.pairs else ()
    gpu = Gpu()
    torch.manual_seed(0)
    if options.kernels:
        built = build.read_folder(options.kernels)
    else:
        names = [*KERNELS, *(f"gated_delta_prefill_d128_{form}" for form in pairs)]
        built = build.load_all(names, gpu.arch, jobs=8)
    for kernel in built.values():
        gpu.add(kernel)
    sources: list[Iterator[Figures]] = [
        (check() for check in (ceilings, lambda: check_step(gpu))),
        (check_prefill(gpu, 2, 8, "c16") for _ in "1"),
        (check_prefill(gpu, 16, 32, "c32") for _ in "1"),
        (check_prefill(gpu, 16, 32, form) for form in pairs),
        step_figures(gpu),
        prefill_figures(gpu, (*FORMS, *pairs)),
        mamba_figures(gpu),
    ]
    everything = []
    for figures in itertools.chain.from_iterable(sources):
        show(figures)
        everything.append(figures)
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
