"""The step GEMM's sweep with RMS norms: in kernels of their own, and in the products' kernels.

    python benchmarks/gpu_gemm_norm.py [--json FILE]

Random bf16 weights of Qwen3-8B's shapes, as in ``gpu_gemm``; norms before q k v and before gate and
up. For one row: both ways bit for bit the same; then the sweep both ways in turn, and each shape.
Exits with 1 if bits differ. Needs torch.
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
from atlas_kernels.gemm_norm_plan import NORM_TILES, norm_variant  # noqa: E402
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
    """The sweep of one row with norms before q k v and before gate and up."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.gpu, self.gemm = sweep, sweep.gpu, sweep.gemm
        self.x, self.normed = _normal(1, DIM) * 3, _normal(1, DIM)
        self.norm = torch.rand(DIM, device="cuda") + 0.5

    def step(self, weight: Tensor, out: Tensor, *, fused: bool) -> None:
        """Norm and product: in one kernel, or one after the other."""
        (n, k), gated, width = weight.shape, tuple(weight.shape) == GATED, 2 * DIM
        x, norm = self.x.data_ptr(), self.norm.data_ptr()
        if not fused:
            args = [x, norm, self.normed.data_ptr(), k, width, width, EPS]
            self.gpu.run("rmsnorm_bf16", (1, 1), args)
            self.gemm(weight, self.normed, out, gated=gated)
            return
        name = norm_variant(n, k, 1, gated=gated)
        tile = NORM_TILES[name]
        args = [self.gemm.map(weight, tile.weight_view(n, k)), x, norm, 0, out.data_ptr(), n, k]
        self.gpu.run(f"gemm_step_norm_bf16_{name}", (tile.grid(n), 1), [*args, 0, 0, EPS])

    def check(self, checks: Checks) -> None:
        """One kernel against two, bit for bit."""
        for shape in NORMED:
            weight = self.sweep.layers[0][LAYER_SHAPES.index(shape)]
            want, got = (_poisoned(2, _width(shape), dtype=torch.bfloat16) for _ in range(2))
            self.step(weight, want[:1], fused=False)
            self.step(weight, got[:1], fused=True)
            self.gpu.stream.sync()
            same = torch.equal(got[0], want[0]) and bool(got[1].isnan().all())
            checks.that(same, f"{shape}: not the bits of norm and product")

    def us(self, *, fused: bool) -> float:
        """All weights once."""

        def chain() -> None:
            for weight in self.sweep.weights():
                shape = (weight.shape[0], weight.shape[1])
                if shape in NORMED:
                    self.step(weight, self._out(shape), fused=fused)
                else:
                    self.sweep.step(weight, 1)

        return self.gpu.microseconds(chain, 1, 9)

    def shape_us(self, shape: tuple[int, int], *, fused: bool) -> float:
        """Mean time of norm and product of one shape, in a chain over all layers."""
        chosen = [layer[LAYER_SHAPES.index(shape)] for layer in self.sweep.layers]
        out = self._out(shape)

        def chain() -> None:
            for weight in chosen:
                self.step(weight, out, fused=fused)

        return self.gpu.microseconds(chain, 1, 7) / len(chosen)

    def _out(self, shape: tuple[int, int]) -> Tensor:
        return self.sweep.out[: _width(shape)].view(1, -1)

    def report(self, checks: Checks) -> dict[str, Any]:
        """Print and return the figures."""
        self.check(checks)
        pairs = [(self.us(fused=False), self.us(fused=True)) for _ in range(3)]
        apart, inside = np.median(np.array(pairs), axis=0) / 1e3
        shapes = {
            f"{n}x{k} {way}": round(self.shape_us((n, k), fused=way == "fused"), 2)
            for n, k in NORMED
            for way in ("apart", "fused")
        }
        print(f"norms apart {apart:.3f} ms, in products {inside:.3f}  {shapes}", flush=True)
        return {"apart_ms": apart, "ms": inside, "us": shapes}


def _width(shape: tuple[int, int]) -> int:
    """Columns of the output."""
    return shape[0] // 2 if shape == GATED else shape[0]


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
        Path(options.json).write_text(json.dumps(record | {"sweep": figures}, indent=1))
    return int(bool(checks.failed))


if __name__ == "__main__":
    sys.exit(main())
