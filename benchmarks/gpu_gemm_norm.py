"""The step GEMM's sweep with RMS norms: in kernels of their own, and in the products' kernels.

    python benchmarks/gpu_gemm_norm.py [--json FILE]

Random bf16 weights of Qwen3-8B's shapes, as in ``gpu_gemm``; norms before q k v and before gate and
up. For 1 to 4 rows: both ways bit for bit the same, every tile that takes the product; then the
sweep both ways in turn, and each shape. Exits with 1 if bits differ. Needs torch.
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
from atlas_kernels.gemm_norm_plan import NORM_ROWS, NORM_TILES, norm_variant  # noqa: E402
from atlas_kernels.gemm_step_plan import TILES  # noqa: E402

from benchmarks.gpu_gemm import (  # noqa: E402
    DIM,
    GATED,
    LAYER_SHAPES,
    Checks,
    StepGemm,
    Sweep,
    Tensor,
    _normal,
    _poisoned,
    read_ceiling,
)
from tests.kernels.gpu import Gpu  # noqa: E402

NORMED = (LAYER_SHAPES[0], GATED)
EPS = np.float32(1e-6)


class NormedSweep:
    """The sweep with norms before q k v and before gate and up."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.gpu, self.gemm = sweep, sweep.gpu, sweep.gemm
        self.x, self.normed = _normal(NORM_ROWS, DIM) * 3, _normal(NORM_ROWS, DIM)
        self.norm = torch.rand(DIM, device="cuda") + 0.5

    def step(self, weight: Tensor, m: int, out: Tensor, name: str | None) -> None:
        """Norm and product: by the tile of ``NORM_TILES``, or one after the other."""
        (n, k), gated, width = weight.shape, tuple(weight.shape) == GATED, 2 * DIM
        x, norm = self.x.data_ptr(), self.norm.data_ptr()
        stride = out.stride(0) * out.element_size()
        if name is None:
            args = [x, norm, self.normed.data_ptr(), k, width, width, EPS]
            self.gpu.run("rmsnorm_bf16", (m, 1), args)
            self.gemm(weight, self.normed[:m], out, gated=gated)
            return
        tile = NORM_TILES[name]
        args = [self.gemm.map(weight, tile.weight_view(n, k)), x, norm, 0, out.data_ptr(), n, k, m]
        args += [width, stride, 0, EPS]
        self.gpu.run(f"gemm_step_norm_bf16_{name}", (tile.grid(n), 1), args)

    def names(self, shape: tuple[int, int], m: int) -> list[str]:
        """Tiles that take this product: the plan's first."""
        n, k = shape
        first = norm_variant(n, k, m, gated=shape == GATED)
        wider = f"{str(first).rpartition('_')[0]}_{NORM_ROWS}"
        return [name for name in dict.fromkeys((first, wider)) if name in NORM_TILES]

    def check(self, checks: Checks, m: int) -> None:
        """Every tile against the two kernels, bit for bit."""
        for index, shape in ((0, NORMED[0]), (2, GATED)):
            weight = self.sweep.layers[0][index]
            width = shape[0] // 2 if shape == GATED else shape[0]
            want = _poisoned(m, width, dtype=torch.bfloat16)
            self.step(weight, m, want, None)
            for name in self.names(shape, m):
                got = _poisoned(m + 1, width, dtype=torch.bfloat16)
                self.step(weight, m, got[:m], name)
                self.gpu.stream.sync()
                same = torch.equal(got[:m], want) and bool(got[m].isnan().all())
                checks.that(same, f"{name}, {m} rows: not the bits of norm and product")

    def us(self, m: int, *, fused: bool) -> float:
        """All weights once."""

        def chain() -> None:
            for weight in self.sweep.weights():
                shape = (weight.shape[0], weight.shape[1])
                if shape in NORMED:
                    name = self.names(shape, m)[0] if fused else None
                    self.step(weight, m, self._out(shape, m), name)
                else:
                    self.sweep.step(weight, m)

        return self.gpu.microseconds(chain, 1, 9)

    def shape_us(self, shape: tuple[int, int], m: int, name: str | None) -> float:
        """Mean time of norm and product of one shape, in a chain over all layers."""
        chosen = [layer[LAYER_SHAPES.index(shape)] for layer in self.sweep.layers]
        out = self._out(shape, m)

        def chain() -> None:
            for weight in chosen:
                self.step(weight, m, out, name)

        return self.gpu.microseconds(chain, 1, 7) / len(chosen)

    def _out(self, shape: tuple[int, int], m: int) -> Tensor:
        width = shape[0] // 2 if shape == GATED else shape[0]
        return self.sweep.out[: m * width].view(m, width)

    def report(self, checks: Checks) -> list[dict[str, Any]]:
        """Print and return the figures of 1 to ``NORM_ROWS`` rows."""
        figures = []
        for m in range(1, NORM_ROWS + 1):
            self.check(checks, m)
            pairs = [(self.us(m, fused=False), self.us(m, fused=True)) for _ in range(3)]
            apart, fused = np.median(np.array(pairs), axis=0) / 1e3
            shapes = {
                f"{shape[0]}x{shape[1]} {name or 'apart'}": round(self.shape_us(shape, m, name), 2)
                for shape in NORMED
                for name in (None, *self.names(shape, m))
            }
            print(
                f"norms {m:4}  apart {apart:.3f} ms, in products {fused:.3f}  {shapes}", flush=True
            )
            figures.append({"rows": m, "apart_ms": apart, "ms": fused, "us": shapes})
        return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    gpu = Gpu()
    names = [f"gemm_step_norm_bf16_{name}" for name in NORM_TILES]
    names += [f"gemm_step_bf16_{name}" for name in TILES if name.endswith("_8")]
    for compiled in build.load_all([*names, "rmsnorm_bf16"], gpu.arch, jobs=16).values():
        gpu.add(compiled)
    gemm = StepGemm(gpu)
    checks, ceiling = Checks(gemm), read_ceiling(gpu, gemm.stream)
    print(f"{gpu.device.name}, read ceiling {ceiling:.2f} TB/s", flush=True)
    figures = NormedSweep(Sweep(gpu, gemm)).report(checks)
    print("bits:", f"{len(checks.failed)} failed" if checks.failed else "all equal")
    if options.json:
        record = {"device": gpu.device.name, "read_tb_per_s": ceiling, "failed": checks.failed}
        Path(options.json).write_text(json.dumps(record | {"sweeps": figures}, indent=1))
    return int(bool(checks.failed))


if __name__ == "__main__":
    sys.exit(main())
