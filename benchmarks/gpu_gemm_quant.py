"""The step GEMM over all quantised weights of an 8B model: checked, then timed.

    python benchmarks/gpu_gemm_quant.py [--types q4_0 …] [--rows 1 8 32 128] [--json FILE]

Builds random units of Qwen3-8B's shapes on the GPU for one format after another. Checks, bit for
bit, against the bf16 step GEMM with one range of K on the dequantised matrix, at several numbers of
rows. A sweep is one CUDA graph of 145 products with dependent launch; its share of the read ceiling
counts the bytes that the units have. Exits with 1 if a check failed. Needs torch, for data.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas_kernels import build  # noqa: E402
from atlas_kernels.gemm_step_plan import TensorView, rung  # noqa: E402
from atlas_kernels.quant_plan import (  # noqa: E402
    CELL_K,
    CELLS,
    QUANT_TILES,
    num_units,
    quant_form,
    quant_rung,
    unit_bytes,
)

from benchmarks.gpu_gemm import (  # noqa: E402
    DIM,
    FEED_FORWARD,
    GATED,
    HEAD,
    LAYER_SHAPES,
    LAYERS,
    StepGemm,
    read_ceiling,
)
from tests.kernels.gpu import Gpu  # noqa: E402

Tensor = torch.Tensor
Shape = tuple[int, int]


def random_units(type: str, shape: Shape) -> Tensor:
    """Units of a random matrix, uint8 [units, bytes]."""
    n, k = shape
    cell = CELLS[type]
    units = torch.randint(
        0, 256, (num_units(n), k // CELL_K, cell.nbytes), device="cuda", dtype=torch.uint8
    )
    scales = units[..., cell.code_bytes :]
    start, stop, dtype = 0, 32 * cell.scale_bytes, torch.float16
    if type == "q4_k":  # behind (d, −dmin) come bytes below 64
        stop = 128
        scales[..., 128:] &= 63
    elif type == "q6_k":
        start = 256
    elif type.startswith("b8"):
        dtype = torch.float32
    count = (stop - start) // dtype.itemsize
    floats = torch.randn(*scales.shape[:2], count, device="cuda") / 64
    scales[..., start:stop] = floats.to(dtype).view(torch.uint8)
    return units.view(len(units), unit_bytes(type, k))


class QuantGemm:
    """Launches the kernels of one format."""

    def __init__(self, gpu: Gpu, gemm: StepGemm, type: str) -> None:
        self.gpu, self.gemm, self.type = gpu, gemm, type

    def __call__(
        self, units: Tensor, shape: Shape, x: Tensor, out: Tensor, *, form: str = ""
    ) -> None:
        """out = x · Wᵀ, or gated, by the tile of the plan or that of a form."""
        (n, k), m = shape, len(x)
        form = form or quant_form(n, gated=shape == GATED)
        key = f"{self.type}_{form}_{quant_rung(m)}"
        tile = QUANT_TILES[key]
        view = TensorView((tile.rows, 64), (m, k), (2 * x.stride(0),))
        args: list[Any] = [units.data_ptr(), self.gemm.map(x, view), 0, 0, out.data_ptr()]
        args += [n, k, m, 0, out.stride(0) * out.element_size()]
        args += [int(out.dtype == torch.float32)]
        self.gpu.run(f"gemm_step_{key}", (tile.grid(n), 1), args)

    def dequantised(self, units: Tensor, shape: Shape) -> Tensor:
        """The matrix in bf16."""
        n, k = shape
        matrix = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        args = [0, units.data_ptr(), matrix.data_ptr(), k, units.stride(0), 2 * k, 1.0]
        self.gpu.run(f"embedding_{self.type}_bf16", (n, -(-k // 2048)), args)
        self.gpu.stream.sync()
        return matrix


def failures(quant: QuantGemm, gemm: StepGemm) -> list[str]:
    """What differs from the bf16 step GEMM, in words."""
    failed = []
    for shape in ((DIM, DIM), (2 * 1056, DIM), (DIM, FEED_FORWARD)):
        units, (n, k) = random_units(quant.type, shape), shape
        matrix = quant.dequantised(units, shape)
        x = torch.randn(128, k, device="cuda", dtype=torch.bfloat16)
        want = torch.empty(128, n, device="cuda")
        torch.cuda.synchronize()
        gemm(matrix, x, want, name=f"wide_{rung(128)}")
        for m in (1, 3, 8, 9, 32, 33, 128):
            for form in ("narrow", "wide"):
                out = torch.full((m + 1, n), float("nan"), device="cuda")
                torch.cuda.synchronize()
                quant(units, shape, x[128 - m :], out[:-1], form=form)
                quant.gpu.stream.sync()
                same = torch.equal(out[:-1], want[128 - m :]) and bool(out[-1].isnan().all())
                if not same:
                    failed.append(f"{quant.type} {form} {n}x{k}, {m} rows: other bits than bf16")
    return failed


class QuantSweep:
    """All weights of the model in one format."""

    def __init__(self, quant: QuantGemm) -> None:
        self.quant = quant
        shapes = [*LAYER_SHAPES * LAYERS, HEAD]
        self.weights = [(random_units(quant.type, shape), shape) for shape in shapes]
        self.num_bytes = sum(units.nbytes for units, _ in self.weights)
        self.inputs = {
            k: torch.randn(128, k, device="cuda", dtype=torch.bfloat16) for k in (DIM, FEED_FORWARD)
        }
        self.out = torch.empty(128 * HEAD[0], device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()

    def us(self, m: int, shape: Shape | None = None) -> float:
        """Time of a sweep, or mean time of the products of one shape."""
        chosen = [item for item in self.weights if shape in (None, item[1])]
        chosen *= 4 if len(chosen) == 1 else 1

        def chain() -> None:
            for units, (n, k) in chosen:
                width = n // 2 if (n, k) == GATED else n
                out = self.out[: m * width].view(m, width)
                self.quant(units, (n, k), self.inputs[k][:m], out)

        return self.quant.gpu.microseconds(chain, 1, 9) / (1 if shape is None else len(chosen))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--types", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    gpu = Gpu()
    names = [
        f"gemm_step_{name}" for name, tile in QUANT_TILES.items() if tile.type in options.types
    ]
    names += [f"embedding_{type}_bf16" for type in options.types] + ["gemm_step_bf16_wide_128"]
    for compiled in build.load_all(names, gpu.arch, jobs=16).values():
        gpu.add(compiled)
    gemm = StepGemm(gpu)
    ceiling = read_ceiling(gpu, gemm.stream)
    version = gpu.driver.cuDriverGetVersion()[1]
    print(f"{gpu.device.name}, driver CUDA {version}, read ceiling {ceiling:.2f} TB/s", flush=True)
    failed, figures = [], []
    print(f"{'weights':>8}{'GB':>6}{'rows':>5}{'ms':>8}{'ceiling':>9}  us by shape")
    for type in options.types:
        quant = QuantGemm(gpu, gemm, type)
        failed += failures(quant, gemm)
        sweep = QuantSweep(quant)
        gigabytes = sweep.num_bytes / 1e9
        for m in options.rows:
            ms = sweep.us(m) / 1e3
            share = gigabytes / ms / ceiling
            shapes = [round(sweep.us(m, shape), 1) for shape in (*LAYER_SHAPES, HEAD)]
            print(f"{type:>8}{gigabytes:6.2f}{m:5}{ms:8.3f}{share:9.1%}  {shapes}", flush=True)
            figures.append({"type": type, "rows": m, "ms": ms, "share": share, "us": shapes})
        del sweep
    print("bits:", *(failed or ["all equal"]), sep="\n  ")
    if options.json:
        record = {"device": gpu.device.name, "driver": version, "read_tb_per_s": ceiling}
        record |= {"failed": failed, "sweeps": figures}
        Path(options.json).write_text(json.dumps(record, indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
