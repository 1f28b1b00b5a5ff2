"""Norm, router product and choice of experts on a GPU: one kernel against the three, bits and time.

    python benchmarks/gpu_router.py [--rows 1 2 4 8] [--json F]

Shapes are those of models: A (Qwen3.5-35B-A3B): 256 experts, top 8 and a shared one, hidden 2,048;
B (Qwen3-30B-A3B): 128, top 8; N (Qwen3-Next-80B-A3B): 512, top 10 and a shared one; L
(Qwen3-235B-A22B): 128, top 8, hidden 4,096; S: 128 chosen by sigmoid and bias, hidden 2,688. Timed
over as many layers' routers as L2 does not hold. Exits with 1 if a bit differs. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas_kernels import build  # noqa: E402
from atlas_kernels.gemm_step_plan import TILES, chain_length  # noqa: E402
from atlas_kernels.moe_plan import ROUTE_VARIANTS, route_variant  # noqa: E402
from atlas_kernels.moe_router_plan import (  # noqa: E402
    ROUTER_COLUMNS,
    ROUTER_ROWS,
    ROUTER_TILES,
    SCORES_TILES,
    router_variant,
)

from benchmarks.gpu_gemm import StepGemm  # noqa: E402
from tests.kernels.gpu import Gpu  # noqa: E402

Tensor = torch.Tensor
_ROOM = 227 * 1024
_L2_BYTES = 80 << 20  # more than an H200's
_EPS, EPSILON = 1e-6, 1e-20
_RESULTS = ("normed", "scores", "ids", "weights")


@dataclass(frozen=True)
class Shape:
    """A model's router."""

    name: str
    experts: int
    top_k: int
    dim: int
    shared: bool = False
    sigmoid: bool = False

    @property
    def slots(self) -> int:
        return self.top_k + self.shared

    @property
    def columns(self) -> int:
        return self.experts + 8 * self.shared


SHAPES = (
    Shape("A", 256, 8, 2048, shared=True),
    Shape("B", 128, 8, 2048),
    Shape("N", 512, 10, 2048, shared=True),
    Shape("L", 128, 8, 4096),
    Shape("S", 128, 6, 2688, sigmoid=True),
)


class Rows:
    """Rows of a residual stream, and what both forms write for them."""

    def __init__(self, shape: Shape, x: Tensor, active: Tensor) -> None:
        count = len(x)
        self.x, self.active = x.contiguous(), active.int().contiguous()
        self.normed = torch.full_like(self.x, float("nan"))
        self.scores = torch.full((count, shape.columns), float("nan"), device="cuda")
        self.ids = torch.full((count, shape.slots), -7, device="cuda", dtype=torch.int32)
        self.weights = torch.full((count, shape.slots), float("nan"), device="cuda")

    @property
    def results(self) -> tuple[Tensor, ...]:
        return self.normed, self.scores, self.ids, self.weights


class Router:
    """Launches both forms over some layers' weights."""

    def __init__(self, gpu: Gpu, gemm: StepGemm, shape: Shape) -> None:
        self.gpu, self.gemm, self.shape = gpu, gemm, shape
        columns, dim = shape.columns, shape.dim
        layers = _L2_BYTES // (2 * columns * dim) + 1
        self.weights = torch.randn(layers, columns, dim, device="cuda").bfloat16() * dim**-0.5
        self.weights[:, shape.experts + 1 :] = 0
        self.norms = 1 + torch.randn(layers, dim, device="cuda") / 4
        self.bias = torch.randn(shape.experts, device="cuda") / 8
        self.counter = torch.zeros(1, device="cuda", dtype=torch.int32)

    @property
    def num_layers(self) -> int:
        return len(self.weights)

    def _choice(self) -> list[Any]:
        """use_sigmoid and normalize."""
        return [int(self.shape.sigmoid), 1]

    def apart(self, rows: Rows, layer: int) -> None:
        """The three kernels."""
        shape, gpu, dim = self.shape, self.gpu, self.shape.dim
        args: list[Any] = [rows.x.data_ptr(), self.norms[layer].data_ptr(), rows.normed.data_ptr()]
        gpu.run("rmsnorm_bf16", (len(rows.x), 1), [*args, dim, 2 * dim, 2 * dim, _EPS])
        self.gemm(self.weights[layer], rows.normed, rows.scores)
        scores, stride = rows.scores.data_ptr(), 4 * shape.columns
        args = [scores, self.bias.data_ptr() if shape.sigmoid else 0]
        args += [scores + 4 * shape.experts if shape.shared else 0, rows.active.data_ptr()]
        args += [rows.ids.data_ptr(), rows.weights.data_ptr(), shape.experts, shape.top_k]
        args += [shape.slots, *self._choice(), EPSILON, 1.0, stride, stride]
        gpu.run(f"moe_route_{route_variant(shape.experts)}", (len(rows.x), 1), args)

    @property
    def _chain(self) -> int:
        """Elements of a chain of the router's sums."""
        return chain_length(self.shape.columns, self.shape.dim)

    def at_once(self, rows: Rows, layer: int) -> None:
        """The kernel that stands for them."""
        shape, dim = self.shape, self.shape.dim
        name = router_variant(len(rows.x), dim=dim, experts=shape.experts, shared_bytes=_ROOM)
        args: list[Any] = [rows.x.data_ptr(), self.norms[layer].data_ptr()]
        args += [self.weights[layer].data_ptr(), rows.active.data_ptr()]
        args += [self.bias.data_ptr() if shape.sigmoid else 0]
        args += [tensor.data_ptr() for tensor in (*rows.results, self.counter)]
        args += [len(rows.x), dim, self._chain, shape.columns, shape.experts, shape.top_k]
        args += [
            shape.slots,
            *self._choice(),
            _EPS,
            EPSILON,
            1.0,
            2 * dim,
            2 * dim,
            4 * shape.columns,
        ]
        self.gpu.run(f"moe_router_{name}", (-(-shape.columns // ROUTER_COLUMNS), 1), args)

    def scores(self, rows: Rows, layer: int) -> None:
        """The same without the choice."""
        shape, dim = self.shape, self.shape.dim
        name = router_variant(len(rows.x), dim=dim, experts=0, shared_bytes=_ROOM)
        args: list[Any] = [rows.x.data_ptr(), self.norms[layer].data_ptr()]
        args += [self.weights[layer].data_ptr(), rows.normed.data_ptr(), rows.scores.data_ptr()]
        args += [rows.ids.data_ptr(), len(rows.x), rows.ids.numel(), dim, self._chain]
        args += [shape.columns, _EPS, 2 * dim, 2 * dim, 4 * shape.columns]
        self.gpu.run(f"moe_scores_{name}", (-(-shape.columns // ROUTER_COLUMNS), 1), args)


def differing(router: Router, draws: int = 40) -> list[str]:
    """What has other bits than the three kernels gave 40 rows together."""
    shape, found = router.shape, []
    for draw in range(draws):
        x = (torch.randn(40, shape.dim, device="cuda") * (1 + draw % 5)).bfloat16()
        active = torch.arange(40, device="cuda") * 7
        active[[3, 11, 12]] = -1
        whole, layer = Rows(shape, x, active), draw % router.num_layers
        torch.cuda.synchronize()
        router.apart(whole, layer)
        router.gpu.stream.sync()
        if int(whole.ids.min()) != -1 or bool(whole.weights.isnan().any()):
            found.append(f"{shape.name}: the three kernels, draw {draw}")
        first = 0
        for count in (1, 2, 3, 4, 5, 7, ROUTER_ROWS, ROUTER_ROWS):
            place = slice(first, first + count)
            rows = Rows(shape, x[place], active[place])
            torch.cuda.synchronize()
            router.at_once(rows, layer)
            router.gpu.stream.sync()
            wrong = zip(_RESULTS, rows.results, whole.results, strict=True)
            found += [
                f"{shape.name}: {name} of {count} rows, draw {draw}"
                for name, got, want in wrong
                if not torch.equal(_bytes(got), _bytes(want[place]))
            ]
            first += count
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def times(router: Router, count: int) -> dict[str, float]:
    """Microseconds of a layer: the three kernels, and the one."""
    shape, gpu = router.shape, router.gpu
    x = torch.randn(count, shape.dim, device="cuda").bfloat16()
    rows = Rows(shape, x, torch.arange(count, device="cuda"))
    torch.cuda.synchronize()

    def sweep(launch: Callable[[Rows, int], None]) -> None:
        for layer in range(router.num_layers):
            launch(rows, layer)

    forms = {"apart": router.apart, "at once": router.at_once}
    return {
        name: gpu.microseconds(lambda launch=launch: sweep(launch), 1) / router.num_layers  # type: ignore[misc]
        for name, launch in forms.items()
    }


def load_kernels(gpu: Gpu) -> None:
    """The kernels used here onto the device, compiled if need be."""
    names = ["rmsnorm_bf16", *(f"moe_router_{name}" for name in ROUTER_TILES)]
    names += [f"moe_scores_{name}" for name in SCORES_TILES]
    names += [f"moe_route_{name}" for name in ROUTE_VARIANTS]
    names += [f"gemm_step_bf16_{name}" for name in TILES if name.endswith(("_8", "_64"))]
    for compiled in build.load_all(names, gpu.arch, jobs=12).values():
        gpu.add(compiled)


def measure(gpu: Gpu, gemm: StepGemm, row_counts: list[int]) -> tuple[list[str], dict[str, Any]]:
    """All shapes: what differs, and the figures."""
    failed: list[str] = []
    figures: dict[str, Any] = {}
    for shape in SHAPES:
        router = Router(gpu, gemm, shape)
        wrong = differing(router)
        failed += wrong
        print(f"{shape.name} router: bits", f"WRONG: {wrong[:4]}" if wrong else "equal", flush=True)
        for count in row_counts:
            found = figures[f"{shape.name} {count}"] = times(router, count)
            words = ", ".join(f"{form} {us:.2f}" for form, us in found.items())
            print(f"{shape.name} router {count} rows, us: {words}", flush=True)
        del router
        gemm.maps.clear()
        torch.cuda.empty_cache()
    return failed, figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.manual_seed(5)
    torch.zeros(1, device="cuda")
    gpu = Gpu()
    load_kernels(gpu)
    failed, figures = measure(gpu, StepGemm(gpu), options.rows)
    if options.json:
        record = {"device": gpu.device.name, "failed": failed, "figures": figures}
        Path(options.json).write_text(json.dumps(record, indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
