"""The CUDA ops on a GPU: many rows' products beside cuBLAS, the fused attention of the step.

    python benchmarks/gpu_ops.py [products] [attention] [--json FILE]

Products: for each shape of a model's weights, whether cuBLASLt was found to give the step GEMM's
bits and how, then all rows compared with the step GEMM, and TFLOP/s beside cuBLASLt's own choice.
Attention: ``attention_step`` against the kernels that it stands for, bits and time, with several
numbers of workers. Random data; times are medians over graph replays. Exits with 1 where bits
differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas.backends.cuda import attention, linear  # noqa: E402
from atlas.backends.cuda.array import DeviceArray  # noqa: E402
from atlas.backends.cuda.cublaslt import WORKSPACE_BYTES, Product  # noqa: E402
from atlas.backends.cuda.device import CudaDevice  # noqa: E402
from atlas.backends.cuda.graph import CapturedGraph  # noqa: E402
from atlas.backends.cuda.launch import Queue, Recording  # noqa: E402
from atlas.backends.cuda.memory import Workspace  # noqa: E402
from atlas.backends.cuda.pack import DeviceMatrix, MatrixLayout  # noqa: E402
from atlas.backends.cuda.products import Products, open_products  # noqa: E402

SHAPES = {  # name: (n, k, what follows)
    "8B qkv": (6144, 4096, ""),
    "8B out": (4096, 4096, "add"),
    "8B out, nothing added": (4096, 4096, ""),
    "8B gate up": (24576, 4096, "gated"),
    "8B down": (4096, 12288, "add"),
    "8B down, nothing added": (4096, 12288, ""),
    "1B qkv": (3072, 2048, ""),
    "1B out": (2048, 2048, "add"),
    "1B gate up": (16384, 2048, "gated"),
    "1B down": (2048, 8192, "add"),
    "30B-A3B qkv": (5120, 2048, ""),
    "30B-A3B out": (2048, 4096, "add"),
    "Qwen2 qkv, bias": (4608, 3584, "bias"),
    "Qwen2.5-3B qkv, bias": (2560, 2048, "bias"),
}
ROWS = (192, 512, 1024, 2048, 8192)
STEPS = [  # sequences, context, rows a sequence
    (1, 128, 1), (1, 128, 4), (1, 128, 8), (1, 4096, 1), (1, 4096, 8), (1, 32768, 1),
    (8, 384, 1), (32, 384, 1), (128, 384, 1), (16, 8192, 1), (16, 8192, 4), (64, 4096, 1),
]  # fmt: skip
WORKERS = (1, 2, 3, 4)
Figures = dict[str, Any]


class Bench:
    """A device with random data, and the time of what is put on a queue."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.workspace = Workspace(self.device, 256 << 20, 1 << 20)
        self.eager = Queue(self.device, self.workspace)
        self.stream = self.device.create_stream()
        self.held: list[int] = []
        bits = np.random.default_rng(1).integers(0, 1 << 16, 8 << 20, np.uint16)
        exponent = (bits >> np.uint16(7)) % np.uint16(8) + np.uint16(119)
        self.noise = (bits & np.uint16(0x807F)) | (exponent << np.uint16(7))

    def empty(self, shape: tuple[int, ...], dtype: str = "bfloat16") -> DeviceArray:
        array = DeviceArray(0, shape, dtype)
        array.address = self.device.allocate(max(array.nbytes, 256), "benchmark data")
        self.held.append(array.address)
        return array

    def normal(self, *shape: int) -> DeviceArray:
        """Random bf16 between 2**-8 and 1 in size."""
        array = self.empty(shape)
        for start in range(0, array.nbytes, self.noise.nbytes):
            nbytes = min(self.noise.nbytes, array.nbytes - start)
            self.device.copy_in(array.address + start, self.noise.ctypes.data, nbytes)
        self.device.synchronize()
        return array

    def put(self, values: Any, dtype: str) -> DeviceArray:
        kind = {"int32": np.int32, "float32": np.float32}[dtype]
        values = np.ascontiguousarray(values, kind)
        array = self.empty(values.shape, dtype)
        self.device.copy_in(array.address, values.ctypes.data, values.nbytes)
        self.device.synchronize()
        return array

    def free(self) -> None:
        self.device.synchronize()
        while self.held:
            self.device.free(self.held.pop())
        self.device.tensor_maps.close()

    def microseconds(self, work: Callable[[Queue], None], count: int = 10) -> float:
        """Median over replays of a graph of ``count`` times the work."""
        driver, api = self.device.driver, self.device.driver.api
        recording = Recording()
        for _ in range(count):
            work(Queue(self.device, self.workspace, recording))
        graph = CapturedGraph(self.device, recording.compile(self.device), self.stream)
        start, end = (driver(api.cuEventCreate(0)) for _ in range(2))
        times = []
        for _ in range(8):  # the first is a warm-up
            self.device.record(start)
            graph.launch()
            self.device.record(end)
            self.device.synchronize()
            times.append(float(driver(api.cuEventElapsedTime(start, end))) * 1e3 / count)
        graph.close()
        return float(np.median(times[1:]))

    def differences(self, a: DeviceArray, b: DeviceArray) -> int:
        """32-bit words that differ."""
        place, words = self.put(np.zeros(1), "int32"), a.nbytes // 4
        self.eager.launch("count_differences", (-(-words // 1024), 1), (a, b, place, words))
        count = np.zeros(1, np.int32)
        self.device.copy_out(count.ctypes.data, place.address, 4)
        self.device.synchronize()
        return int(count[0])


class Weights:
    """A matrix, and the op that a layer does with it."""

    def __init__(self, bench: Bench, n: int, k: int, form: str) -> None:
        self.bench, self.n, self.k, self.form = bench, n, k, form
        data = bench.normal(n, k)
        raw = DeviceArray(data.address, (n, 2 * k), "uint8")
        self.matrix = DeviceMatrix(MatrixLayout("bf16", "bf16", n, k), raw)
        self.bias = bench.put(np.linspace(-1, 1, n), "float32") if form == "bias" else None
        self.width = n // 2 if form == "gated" else n
        self.scratch = bench.empty((ROWS[-1], n)) if form == "gated" else None

    def run(self, queue: Queue, x: DeviceArray, out: DeviceArray) -> None:
        if self.form == "gated":
            scratch = self.scratch[: len(x)]
            linear.linear_gated(queue, x, self.matrix, None, "silu", gate_up=scratch, out=out)
        elif self.form == "add":
            linear.linear_add(queue, x, self.matrix, out=out)
        else:
            linear.linear(queue, x, self.matrix, self.bias, out=out)

    def cublas_us(self, products: Products, x: DeviceArray) -> float:
        """cuBLASLt's own first choice, K not split, nothing added."""
        library, m = products.library, len(x)
        product = Product(m, self.n, self.k, self.k, self.k, self.n, "bfloat16")
        algorithm = library.algorithms(product)[0]
        target = self.bench.empty((m, self.n))

        def work(queue: Queue) -> None:
            place = queue.scratch(WORKSPACE_BYTES)
            addresses = (self.matrix.data.address, x.address, target.address, place)
            args = library.arguments(product, algorithm, *addresses)
            queue.matmul(library.function, args, (algorithm, target))

        return self.bench.microseconds(work)


def product_figures(bench: Bench) -> Iterator[Figures]:
    for name in SHAPES:
        yield _product(bench, name)
        bench.free()


def _product(bench: Bench, name: str) -> Figures:
    products, (n, k, form) = bench.device.products, SHAPES[name]
    weights = Weights(bench, n, k, form)
    x, start = bench.normal(ROWS[-1], k), bench.normal(ROWS[-1], weights.width)
    out, want = (bench.empty((ROWS[-1], weights.width)) for _ in range(2))
    figures: Figures = {"case": name, "n": n, "k": k, "then": form}
    before = set(products.plans)
    weights.run(bench.eager, x[:192], out[:192])
    kind = next(iter(set(products.plans) - before), None)
    plan = None if kind is None else products.plans[kind]
    if plan is not None:
        figures["as float32 sums"] = plan.is_finished
        describe = products.library.describe
        figures["chains"] = kind.num_chains
        figures["algorithms"] = {
            m: [describe(a) for a in own] for m, own in plan.algorithms.items()
        }
    for m in ROWS:

        def run(queue: Queue, m: int = m) -> None:
            weights.run(queue, x[:m], out[:m])

        for target in (out, want):
            bench.device.copy(target.address, start.address, start.nbytes)
        run(bench.eager)
        with mock.patch.object(bench.device, "products", None):
            weights.run(bench.eager, x[:m], want[:m])
        figures[f"{m}: differ"] = bench.differences(out[:m], want[:m])
        work = 2 * m * n * k / 1e6
        figures[f"{m}: TFLOP/s"] = work / bench.microseconds(run)
        figures[f"{m}: cuBLAS"] = work / weights.cublas_us(products, x[:m])
        if m == 1024:
            with mock.patch.object(bench.device, "products", None):
                figures["1024: step GEMM"] = work / bench.microseconds(run)
    return figures


class Layer:
    """Queries, keys and values of a step, and the pools of its sequences."""

    HEADS, KV_HEADS, DIM = 32, 8, 128

    def __init__(self, bench: Bench, seqs: int, context: int, rows: int) -> None:
        heads, kv_heads, dim = self.HEADS, self.KV_HEADS, self.DIM
        self.bench, self.seqs, self.rows = bench, seqs, rows
        blocks = -(-context // 16)
        order = np.random.default_rng(2).permutation(seqs * blocks).reshape(seqs, blocks)
        wide = np.zeros((seqs, max(blocks, 516)), np.int32)  # as for a limit of 8,256 tokens
        wide[:, :blocks] = order
        self.tables = bench.put(wide, "int32")
        shape = (seqs * blocks, kv_heads, 16, dim)
        self.pools = [bench.normal(*shape) for _ in range(4)]  # twice keys and values
        for one, other in (self.pools[:2], self.pools[2:]):
            bench.device.copy(other.address, one.address, one.nbytes)
        self.pools = [self.pools[0], self.pools[2], self.pools[1], self.pools[3]]
        at = np.arange(context - rows, context)
        slots = order[:, at // 16] * 16 + at % 16
        self.slots = bench.put(slots.reshape(-1), "int32")
        self.positions = bench.put(np.tile(at, seqs), "int32")
        self.cu_rows = bench.put(np.arange(seqs + 1) * rows, "int32")
        angles = np.arange(context)[:, None] * 1e6 ** -(np.arange(dim // 2) / (dim // 2))
        self.angles = bench.put(np.stack([np.cos(angles), np.sin(angles)], axis=1), "float32")
        self.norm = bench.put(np.linspace(0.5, 1.5, dim), "float32")
        self.qkv = bench.normal(seqs * rows, (heads + 2 * kv_heads) * dim)
        self.kept = bench.empty(self.qkv.shape)
        bench.device.copy(self.kept.address, self.qkv.address, self.qkv.nbytes)
        self.outs = [bench.empty((seqs * rows, heads, dim)) for _ in range(2)]

    def run(self, queue: Queue, which: int = 0) -> None:
        """The op, on the pools and the output of a number."""
        heads, kv_heads, dim, rows = self.HEADS, self.KV_HEADS, self.DIM, self.seqs * self.rows
        split, size = heads * dim, kv_heads * dim
        q = self.qkv[:, :split].reshape(rows, heads, dim)
        k, v = (
            self.qkv[:, split + i * size : split + (i + 1) * size].reshape(rows, kv_heads, dim)
            for i in range(2)
        )
        attention.attention_step(
            queue, q, k, v, self.norm, self.norm, 1e-6, self.angles, self.slots, self.tables,
            self.cu_rows, self.rows, self.positions, dim**-0.5, None, None,
            k_pool=self.pools[2 * which], v_pool=self.pools[2 * which + 1], out=self.outs[which],
        )  # fmt: skip


def attention_figures(bench: Bench) -> Iterator[Figures]:
    apart = mock.patch.object(attention, "fresh_rows", return_value=0)
    for seqs, context, rows in STEPS:
        layer = Layer(bench, seqs, context, rows)
        layer.run(bench.eager)
        with apart:
            layer.run(bench.eager, 1)  # turns q and k in place
        figures: Figures = {"case": "attention", "seqs": seqs, "context": context, "rows": rows}
        pairs = [layer.outs, layer.pools[::2], layer.pools[1::2]]
        figures["differ"] = sum(bench.differences(one, other) for one, other in pairs)
        bench.device.copy(layer.qkv.address, layer.kept.address, layer.qkv.nbytes)
        for workers in WORKERS:
            with mock.patch.object(attention, "WORKERS_PER_SM", workers):
                figures[f"us, {workers} an SM"] = bench.microseconds(layer.run, 20)
        with apart:
            figures["us apart"] = bench.microseconds(layer.run, 20)
        yield figures
        bench.free()


def show(figures: Figures) -> None:
    """One case, its figures with three digits."""
    parts = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    print(" | ".join(parts), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", default=["products", "attention"])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bench = Bench()
    bench.device.products = open_products(bench.device)
    sources: dict[str, Callable[[Bench], Iterator[Figures]]] = {
        "products": product_figures,
        "attention": attention_figures,
    }
    everything, wrong = [], 0
    for name in options.what:
        for figures in sources[name](bench):
            show(figures)
            everything.append(figures)
            wrong += sum(v for k, v in figures.items() if k.endswith("differ"))
    print(bench.device.products.disclosed() if bench.device.products else "no cuBLASLt")
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
