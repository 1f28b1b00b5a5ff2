"""Load every CUDA kernel on the first GPU, check it against its op's NumPy definition, time it.

    python tools/gpu_smoke.py [--kernels DIR] [--json FILE]

``DIR`` is a folder that ``atlas_kernels.build.build_all`` wrote, on any machine; without it the
kernels are compiled here, which needs numba-cuda. Prints a table; exits with 1 if a check failed.
Times are medians over graph replays, with dependent launch; GB/s counts bytes read and written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas.ops import OPS  # noqa: E402
from tests.kernels.gpu import Gpu  # noqa: E402
from tests.kernels.launches import Bench, Buffer, rounded  # noqa: E402

Array = np.ndarray[Any, Any]
EPS = np.float32(1e-6)
DECODE, PREFILL = 1, 8192  # rows
DIM, FEED_FORWARD, VOCABULARY = 4096, 12288, 151936  # the shape of Qwen3-8B
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass
class Case:
    """One launch (or two), its expected result, and how far off it may be."""

    kernel: str
    rows: int
    run: Callable[[], None]
    num_bytes: int
    got: Callable[[], Array]
    want: Array
    tolerance: float  # of the greatest element; 0 asks for equal bits

    def error(self) -> float:
        """Greatest difference over the greatest element; infinite where NaN is in the way."""
        got = self.got()
        difference = np.abs(got.astype(np.float64) - self.want).max()
        scale = np.abs(self.want).max() or 1.0
        return float(difference / scale) if np.isfinite(difference) else float("inf")


def _normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def _columns(size: int, threads: int, width: int = 8) -> int:
    return -(-size // (threads * width))


def _case(
    bench: Bench, kernel: str, rows: int, grid: tuple[int, int], args: list[Any],
    inputs: list[Buffer], out: Buffer, want: Array, tolerance: float,
) -> Case:  # fmt: skip
    num_bytes = sum(buffer.stored.nbytes for buffer in [*inputs, out])

    def run() -> None:
        bench.run(kernel, grid, args)

    return Case(kernel, rows, run, num_bytes, lambda: bench.get(out), want, tolerance)


def rows_cases(bench: Bench, rows: int) -> Iterator[Case]:
    """Norms, activations, addition on bf16 rows."""
    bf16 = 0.004  # half a unit in the last place is up to 2**-8
    x, y = bench.put(_normal(rows, DIM), "bf16"), bench.put(_normal(rows, DIM + 8)[:, 8:], "bf16")
    weight, out = bench.put(_normal(1, DIM), "f32"), bench.empty((rows, DIM), "bf16")
    xs, ys, ws = bench.get(x), bench.get(y), bench.get(weight)[0]
    want = np.empty_like(xs)
    OPS["rmsnorm"](xs, ws, EPS, out=want)
    args = [x.address, weight.address, out.address, DIM, x.stride, out.stride, EPS]
    yield _case(bench, "rmsnorm_bf16", rows, (rows, 1), args, [x], out, want, bf16)

    want = rounded(xs + ys, "bf16")
    args = [x.address, y.address, out.address, DIM, x.stride, y.stride, out.stride]
    grid = (rows, _columns(DIM, 256))
    yield _case(bench, "add_bf16", rows, grid, args, [x, y], out, want, 0.0)

    # The residual grows with every launch: what is checked is one launch on a copy.
    kept, normed = bench.put(ys, "bf16"), np.empty_like(xs)
    OPS["rmsnorm"](want, ws, EPS, out=normed)
    args = [x.address, kept.address, weight.address, out.address, DIM]
    args += [x.stride, kept.stride, out.stride, EPS]
    traffic = [x, kept, kept]
    case = _case(bench, "add_rmsnorm_bf16", rows, (rows, 1), args, traffic, out, normed, bf16)
    yield case

    rows = min(rows, 2048)
    gate_up = bench.put(_normal(rows, 2 * FEED_FORWARD), "bf16")
    out = bench.empty((rows, FEED_FORWARD), "bf16")
    args = [gate_up.address, out.address, FEED_FORWARD, gate_up.stride, out.stride]
    grid, values = (rows, _columns(FEED_FORWARD, 256)), bench.get(gate_up)
    want = np.empty((rows, FEED_FORWARD), np.float32)
    for op in ("silu_and_mul", "gelu_tanh_and_mul"):
        OPS[op](values, out=want)
        yield _case(bench, f"{op}_bf16", rows, grid, args, [gate_up], out, want.copy(), bf16)


def head_cases(bench: Bench, rows: int) -> Iterator[Case]:
    """RoPE and the KV store, alone and with head norms, on bf16 rows."""
    total, half = HEADS + 2 * KV_HEADS, HEAD_DIM // 2
    qkv = bench.put(_normal(rows, total, HEAD_DIM), "bf16")
    positions = np.arange(rows, dtype=np.int32) + 5
    table = _normal(rows + 5, 2, half)
    blocks = -(-rows // 16) + 1
    slots = np.random.default_rng(0).permutation(16 * blocks)[:rows].astype(np.int32)
    pools = [bench.empty((blocks, KV_HEADS, 16, HEAD_DIM), "bf16") for _ in range(2)]
    weights = [bench.put(_normal(1, HEAD_DIM), "f32") for _ in range(2)]
    angles = bench.put(table, "f32")
    tokens, places = bench.put_ints(positions), bench.put_ints(slots)
    head_bytes = 2 * HEAD_DIM
    q, k, v = (qkv.address + at * head_bytes for at in (0, HEADS, HEADS + KV_HEADS))
    sizes = [HEADS, KV_HEADS, HEAD_DIM, half, qkv.stride, qkv.stride, qkv.stride]
    warps = -(-HEADS // 4) + 2 * -(-KV_HEADS // 4)  # four heads each
    grid, last = (rows, -(-warps // 4)), [tokens, places, angles.address]
    last += [pools[0].address, pools[1].address, *sizes]
    keys = bench.get(qkv)[:, HEADS : HEADS + KV_HEADS]
    stored = [Buffer(0, np.empty((rows, 2 * KV_HEADS * HEAD_DIM), np.uint16), (), "bf16")]

    def pool_rows(pool: Buffer) -> Array:
        return bench.get(pool)[slots // 16, :, slots % 16]

    for name, before in (
        ("rope_kv_store_bf16", []),
        ("norm_rope_kv_store_bf16", [weights[0].address, weights[1].address]),
    ):
        want = keys.copy()
        if before:
            OPS["rmsnorm"](want, bench.get(weights[1])[0], EPS, out=want)
        OPS["rope"](want, positions, table)
        args = [q, k, v, *before, *last, *([EPS] if before else [])]
        case = _case(bench, name, rows, grid, args, [qkv, *stored], qkv, want, 0.004)
        case.num_bytes -= stored[0].stored.nbytes  # k and v are read and stored, q in place
        case.got = lambda: pool_rows(pools[0])
        yield case
    args = [k, v, places, pools[0].address, pools[1].address]
    args += [KV_HEADS, HEAD_DIM, qkv.stride, qkv.stride]
    case = _case(bench, "kv_store_bf16", rows, (rows, 2), args, stored, stored[0], keys, 0.0)
    case.got = lambda: pool_rows(pools[0])
    yield case


def vocabulary_cases(bench: Bench, rows: int) -> Iterator[Case]:
    """Embedding, argmax and softcap at the ends of the model."""
    table, out = bench.put(_normal(4096, DIM), "bf16"), bench.empty((rows, DIM), "bf16")
    chosen = np.random.default_rng(1).integers(0, 4096, rows)
    args = [bench.put_ints(chosen), table.address, out.address, DIM]
    args += [table.stride, out.stride, np.float32(1)]
    grid, name = (rows, _columns(DIM, 128)), "embedding_bf16_bf16"
    yield _case(bench, name, rows, grid, args, [out], out, bench.get(table)[chosen], 0.0)

    rows = min(rows, 128)
    logits, ids = bench.put(_normal(rows, VOCABULARY), "f32"), np.empty(rows, np.int32)
    OPS["argmax"](bench.get(logits), out=ids)
    parts = max(1, min(148, 2048 // rows))
    part_len = -(-VOCABULARY // parts)
    keys, result = bench.memory.put(np.zeros((rows, parts), np.int64)), bench.put_ints(ids * 0)

    def argmax() -> None:
        args = [logits.address, keys, VOCABULARY, part_len, logits.stride]
        bench.run("argmax_partial", (parts, rows), args)
        bench.run("argmax_final", (rows, 1), [keys, result, parts])

    def found() -> Array:
        return bench.memory.get(result, ids)

    yield Case("argmax", rows, argmax, logits.stored.nbytes, found, ids, 0.0)

    want = np.empty((rows, VOCABULARY), np.float32)
    OPS["softcap"](bench.get(logits), 30.0, out=want)
    capped = bench.empty((rows, VOCABULARY), "f32")
    args = [logits.address, capped.address, VOCABULARY]
    args += [logits.stride, capped.stride, np.float32(30)]
    grid = (rows, _columns(VOCABULARY, 256, 1))
    yield _case(bench, "softcap_f32", rows, grid, args, [logits], capped, want, 1e-6)


def load_kernels(gpu: Gpu, folder: str | None) -> None:
    """Every kernel onto the device, from a folder or compiled here."""
    from atlas_kernels import build

    if folder is not None:
        kernels = build.read_folder(folder)
    else:
        kernels = build.load_all(build.names_for(gpu.arch), gpu.arch)
    for kernel in kernels.values():
        gpu.add(kernel)
    print(f"{gpu.device.name}: {len(kernels)} kernels loaded for {gpu.arch}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", help="folder of compiled kernels")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    gpu = Gpu()
    load_kernels(gpu, options.kernels)
    figures, failed = [], False
    print(f"{'kernel':26}{'rows':>6}{'error':>10}{'us':>9}{'GB/s':>8}")
    for rows in (DECODE, PREFILL):
        for cases in (rows_cases, head_cases, vocabulary_cases):
            for case in cases(Bench(gpu, gpu.run), rows):
                case.run()
                error = case.error()
                time_us = gpu.microseconds(case.run)
                rate = case.num_bytes / time_us / 1e3
                verdict = "" if error <= case.tolerance else "  WRONG"
                failed |= bool(verdict)
                line = f"{case.kernel:26}{case.rows:6}{error:10.1e}{time_us:9.2f}{rate:8.0f}"
                print(line + verdict, flush=True)
                figures.append(
                    {"kernel": case.kernel, "rows": case.rows, "error": error}
                    | {"us": time_us, "gb_per_s": rate}
                )
            gpu.free()
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
