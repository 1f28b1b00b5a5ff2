"""The step GEMM over all weights of an 8B model: checked, then timed beside cuBLAS.

    python benchmarks/gpu_gemm.py [--rows 1 8 32 64 128] [--json FILE]

Builds random bf16 weights of Qwen3-8B's shapes on the GPU (15 GB; 36 layers and the head). A sweep
is one CUDA graph of 145 products with dependent launch. Checks against float64, and bit for bit:
every row alone and among 2 … 128, shuffled, in every tile. Then the ``mma.sync`` kernel. Exits with
1 if a check failed. Needs torch, for data and for cuBLAS. ``gpu_gemm_quant`` is the same over
quantised weights, ``gpu_gemm_norm`` with norms before the products.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas_kernels import build  # noqa: E402
from atlas_kernels.gemm_step_plan import (  # noqa: E402
    COLUMNS,
    MMA_TILES,
    NUM_SMS,
    RUNGS,
    TILES,
    TensorView,
    chain_length,
    mma_form,
    rung,
    variant,
)

from tests.kernels.gpu import Gpu  # noqa: E402

LAYERS, DIM, FEED_FORWARD = 36, 4096, 12288
HEAD = (151936, DIM)
LAYER_SHAPES = ((6144, DIM), (DIM, DIM), (2 * FEED_FORWARD, DIM), (DIM, FEED_FORWARD))
GATED = LAYER_SHAPES[2]
Tensor = torch.Tensor


class StepGemm:
    """Launches the kernels on torch tensors; keeps their tensor maps on the device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.maps = gpu, {}
        self.encoded = torch.empty((8192, 128), device="cuda", dtype=torch.uint8)
        self.stream = torch.cuda.ExternalStream(int(gpu.stream.handle))

    def map(self, matrix: Tensor, view: TensorView) -> int:
        """Address of a tensor map of a matrix."""
        key = (matrix.data_ptr(), view)
        if key not in self.maps:
            encoded = self.gpu.tensor_map(matrix.data_ptr(), view.shape, view.box, view.strides)
            place = self.encoded[len(self.maps)]
            place.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
            torch.cuda.synchronize()
            self.maps[key] = place.data_ptr()
        return self.maps[key]

    def __call__(
        self, weight: Tensor, x: Tensor, out: Tensor, *, gated: bool = False, name: str = "",
        bias: Tensor | None = None, residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out = x · weightᵀ by the plan's tile, or in one chain by that which ``name`` says."""
        (n, k), m = weight.shape, x.shape[0]
        chain = k if gated or name else chain_length(n, k)
        key = name or variant(n, m, gated=gated, chained=chain < k)
        tile = TILES[key]
        args: list[Any] = [self.map(weight, tile.weight_view(n, k))]
        args += [self.map(x, tile.row_view(m, k, 2 * x.stride(0)))]
        args += [0 if t is None else t.data_ptr() for t in (bias, residual)]
        args += [out.data_ptr(), n, k, chain, m]
        args += [0 if residual is None else residual.stride(0) * 2]
        args += [out.stride(0) * out.element_size(), int(out.dtype == torch.float32)]
        self.gpu.run(f"gemm_step_bf16_{key}", (tile.grid(n), 1), args)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


class Checks:
    """Results of all checks."""

    def __init__(self, gemm: StepGemm) -> None:
        self.gemm, self.failed, self.errors = gemm, [], {}

    def that(self, good: bool, what: str) -> None:
        if not good:
            self.failed.append(what)
            print("WRONG:", what, flush=True)

    def result(self, weight: Tensor, x: Tensor, **options: Any) -> Tensor:
        n = weight.shape[0]
        out = _poisoned(x.shape[0] + 1, n)
        self.gemm(weight, x, out[:-1], **options)
        self.gemm.gpu.stream.sync()
        self.that(bool(out[-1].isnan().all()), f"{n} columns, {len(x)} rows: wrote past the last")
        return out[:-1]

    def rows(self, n: int, k: int, form: str) -> None:
        """Against float64, and every row the same bits at every m, place and tile."""
        weight, x = _normal(n, k), _normal(128, k)
        full = self.result(weight, x, name=f"{form}_128")
        want = x.double() @ weight.double().T
        error = float((full.double() - want).norm() / want.norm())
        self.errors[f"{form} {n}x{k}"] = error
        self.that(error < 2e-5, f"{form} {n}x{k}: error {error:.1e}")
        shuffled = torch.randperm(128, device="cuda")
        mixed = x[shuffled].contiguous()
        for m in range(1, 129):
            name = f"{form}_{rung(m)}"
            same = torch.equal(self.result(weight, x[:m], name=name), full[:m])
            same &= torch.equal(self.result(weight, mixed[:m], name=name), full[shuffled[:m]])
            same &= torch.equal(self.result(weight, x[128 - m :], name=name), full[128 - m :])
            self.that(same, f"{form} {n}x{k}, {m} rows: other bits than among 128")
        for size in RUNGS:
            same = torch.equal(self.result(weight, x[:5], name=f"{form}_{size}"), full[:5])
            self.that(same, f"{form} {n}x{k}: 5 rows in a tile for {size}")

    def epilogues(self, n: int, k: int) -> None:
        """Fused bias, residual and gate against the plain product followed by torch or a kernel."""
        gpu, weight, bias = self.gemm.gpu, _normal(n, k), torch.randn(n, device="cuda")
        for m in (1, 7, 40, 128):
            x, residual = _normal(m, k), _normal(m, n)
            plain = self.result(weight, x)
            kept = residual.clone()
            self.gemm(weight, x, kept, bias=bias, residual=kept)
            gpu.stream.sync()
            want = ((plain + bias).bfloat16().float() + residual.float()).bfloat16()
            self.that(torch.equal(kept, want), f"bias and residual, {m} rows")
            gated = _poisoned(m, n // 2, dtype=torch.bfloat16)
            self.gemm(weight, x, gated, gated=True)
            stored = self.result(weight, x, name=f"wide_{rung(m)}").bfloat16()
            separate = torch.empty_like(gated)
            args = [stored.data_ptr(), separate.data_ptr(), n // 2, n * 2, n]
            gpu.run("silu_and_mul_bf16", (m, -(-n // 4096)), args)
            gpu.stream.sync()
            self.that(torch.equal(gated, separate), f"silu · mul, {m} rows")
            exact = torch.nn.functional.silu(stored[:, : n // 2].double()) * stored[:, n // 2 :]
            error = float((gated.double() - exact).norm() / exact.norm())
            self.that(error < 3e-3, f"silu · mul, {m} rows: error {error:.1e}")

    def run(self) -> None:
        for columns in COLUMNS:
            self.rows(NUM_SMS * columns - 8, DIM // 2, f"c{columns}")
            self.rows(836, 576, f"c{columns}")  # ragged last tiles, K no multiple of a stage
        self.rows(DIM, FEED_FORWARD, "c32")
        self.rows(836, 576, "wide")
        self.epilogues(3104, 1216)


class Sweep:
    """All weights of the model, and graphs that go through them once."""

    def __init__(self, gpu: Gpu, gemm: StepGemm) -> None:
        self.gpu, self.gemm = gpu, gemm
        self.layers = [[_normal(*shape) for shape in LAYER_SHAPES] for _ in range(LAYERS)]
        self.head = _normal(*HEAD)
        self.inputs = {k: _normal(128, k) for k in (DIM, FEED_FORWARD)}
        self.out = torch.empty(128 * HEAD[0], device="cuda", dtype=torch.bfloat16)
        self.num_bytes = 2 * (LAYERS * sum(n * k for n, k in LAYER_SHAPES) + HEAD[0] * HEAD[1])

    def weights(self) -> list[Tensor]:
        return [weight for layer in self.layers for weight in layer] + [self.head]

    def step(self, weight: Tensor, m: int, name: str = "", *, gated: bool | None = None) -> None:
        """One product by our kernel."""
        n, k = weight.shape
        gated = (n, k) == GATED if gated is None else gated
        width = n // 2 if gated else n
        out = self.out[: m * width].view(m, width)
        self.gemm(weight, self.inputs[k][:m], out, gated=gated, name=name)

    def cublas(self, weight: Tensor, m: int) -> None:
        n, k = weight.shape
        torch.matmul(self.inputs[k][:m], weight.T, out=self.out[: m * n].view(m, n))

    def ours_us(self, m: int) -> float:
        def chain() -> None:
            for weight in self.weights():
                self.step(weight, m)

        return self.gpu.microseconds(chain, 1, 9)

    def cublas_us(self, m: int) -> float:
        def chain() -> None:
            with torch.cuda.stream(self.gemm.stream):
                for weight in self.weights():
                    self.cublas(weight, m)

        return self.gpu.microseconds(chain, 1, 9)

    def shape_us(self, index: int, m: int, name: str = "") -> float:
        """Mean time of one shape's product, in a chain over all layers (index 4: the head)."""
        chosen = [layer[index] for layer in self.layers] if index < 4 else [self.head] * 4

        def chain() -> None:
            for weight in chosen:
                self.step(
                    weight, m, name, gated=name.startswith(("gated", "pair")) if name else None
                )

        return self.gpu.microseconds(chain, 1, 7) / len(chosen)


class PlainSweep:
    """The same through ``gemm_step_mma``, which takes addresses."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep

    def step(self, weight: Tensor, m: int) -> None:
        """One product."""
        (n, k), gated = weight.shape, tuple(weight.shape) == GATED
        key = f"{mma_form(n, gated=gated)}_{rung(m)}"
        width, x = n // 2 if gated else n, self.sweep.inputs[k]
        args = [weight.data_ptr(), x.data_ptr(), 0, 0, self.sweep.out.data_ptr(), n, k, k, m]
        args += [2 * k, 2 * k, 0, 2 * width, 0]
        self.sweep.gpu.run(f"gemm_step_mma_bf16_{key}", (MMA_TILES[key].grid(n), 1), args)

    def us(self, m: int) -> float:
        def chain() -> None:
            for weight in self.sweep.weights():
                self.step(weight, m)

        return self.sweep.gpu.microseconds(chain, 1, 9)


def read_ceiling(gpu: Gpu, stream: Any) -> float:
    """TB/s of a large sum of float32."""
    big, out = torch.randn(1 << 30, device="cuda"), torch.empty((), device="cuda")

    def total() -> None:
        with torch.cuda.stream(stream):
            torch.sum(big, dim=0, out=out)

    return big.numel() * 4 / gpu.microseconds(total, 3) / 1e6


def load_kernels(gpu: Gpu, *, jobs: int = 16) -> None:
    """The kernels used here onto the device, compiled if need be."""
    names = [f"gemm_step_bf16_{name}" for name in TILES] + ["silu_and_mul_bf16"]
    names += [f"gemm_step_mma_bf16_{name}" for name in MMA_TILES]
    for compiled in build.load_all(names, gpu.arch, jobs=jobs).values():
        gpu.add(compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    gpu = Gpu()
    load_kernels(gpu)
    gemm = StepGemm(gpu)
    checks = Checks(gemm)
    checks.run()
    for what, error in checks.errors.items():
        print(f"{what}: error against float64 {error:.1e}")
    print(
        "row bits and epilogues:", f"{len(checks.failed)} failed" if checks.failed else "all equal"
    )
    ceiling = read_ceiling(gpu, gemm.stream)
    version = gpu.driver.cuDriverGetVersion()[1]
    print(f"{gpu.device.name}, driver CUDA {version}, read ceiling {ceiling:.2f} TB/s", flush=True)
    sweep, figures = Sweep(gpu, gemm), []
    print(f"{'rows':>4}{'ms':>8}{'ceiling':>9}{'cuBLAS':>8}  us by shape")
    for m in options.rows:
        pairs = [(sweep.ours_us(m), sweep.cublas_us(m)) for _ in range(3)]  # in turn: clocks sag
        ours, theirs = np.median(np.array(pairs), axis=0) / 1e3
        share = sweep.num_bytes / ours / 1e9 / ceiling
        shapes = [round(sweep.shape_us(i, m), 1) for i in range(5)]
        print(f"{m:4}{ours:8.3f}{share:9.1%}{theirs:8.3f}  {shapes}", flush=True)
        figures.append({"rows": m, "ms": ours, "share": share, "cublas_ms": theirs, "us": shapes})
    plain = PlainSweep(sweep)
    for m in options.rows:
        ours = plain.us(m) / 1e3
        print(f"mma.sync {m:4}{ours:8.3f}{sweep.num_bytes / ours / 1e9 / ceiling:9.1%}", flush=True)
        figures.append({"kernel": "mma", "rows": m, "ms": ours})
    if options.json:
        record = {"device": gpu.device.name, "driver": version, "read_tb_per_s": ceiling}
        record |= {"errors": checks.errors, "failed": checks.failed, "sweeps": figures}
        Path(options.json).write_text(json.dumps(record, indent=1))
    return int(bool(checks.failed))


if __name__ == "__main__":
    sys.exit(main())
