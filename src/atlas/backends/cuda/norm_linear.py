"""A norm and a product: in one kernel for one row and a bfloat16 matrix on sm_90a, else in two.

Which matrices: ``offers.normed_product``. The bits are those of the two.
"""

from __future__ import annotations

from atlas_kernels.gemm_norm_plan import NORM_TILES, pace

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args, match, row_suffix
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.linear import Epilogue, check_product, linear, linear_gated, store_option
from atlas.backends.cuda.norm import WIDTH, rmsnorm
from atlas.backends.cuda.offers import normed_product
from atlas.backends.cuda.pack import DeviceMatrix


def rmsnorm_linear(
    queue: Queue,
    x: DeviceArray,
    norm: DeviceArray,
    eps: float,
    weight: DeviceMatrix,
    bias: DeviceArray | None = None,
    *,
    normed: DeviceArray,
    out: DeviceArray,
) -> None:
    if not _in_one(queue, x, norm, eps, weight, Epilogue(bias), normed, out):
        rmsnorm(queue, x, norm, eps, out=normed)
        linear(queue, normed, weight, bias, out=out)


def rmsnorm_linear_gated(
    queue: Queue,
    x: DeviceArray,
    norm: DeviceArray,
    eps: float,
    weight: DeviceMatrix,
    bias: DeviceArray | None,
    activation: str,
    *,
    normed: DeviceArray,
    gate_up: DeviceArray,
    out: DeviceArray,
) -> None:
    epilogue = Epilogue(bias, gate=activation)
    if not _in_one(queue, x, norm, eps, weight, epilogue, normed, out):
        rmsnorm(queue, x, norm, eps, out=normed)
        linear_gated(queue, normed, weight, bias, activation, gate_up=gate_up, out=out)


def _in_one(
    queue: Queue,
    x: DeviceArray,
    norm: DeviceArray,
    eps: float,
    weight: DeviceMatrix,
    epilogue: Epilogue,
    normed: DeviceArray,
    out: DeviceArray,
) -> bool:
    """Launch the kernel that does both; False where none does."""
    gated, (m, k), n = epilogue.gate is not None, x.shape, weight.rows
    name = normed_product(queue.device.arch, weight.format, n, k, m, gated=gated)
    if name is None or row_suffix(k, WIDTH, x, normed, norm):
        return False
    check_product(x, weight, epilogue.bias, out, n // 2 if gated else n)
    match("float32", f"{k}", norm)
    tile, bias = NORM_TILES[name], 0 if epilogue.bias is None else epilogue.bias
    args: Args = (queue.tensor_map(weight.values, *tile.weight_view(n, k)), x, norm, bias)
    args += (out, n, k, store_option(epilogue, out), pace(tile, weight.data.nbytes), eps)
    queue.launch(f"gemm_step_norm_bf16_{name}", (tile.grid(n), 1), args, weight)
    queue.reading = weight.data.nbytes
    return True
