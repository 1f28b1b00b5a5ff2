"""Cases of the parity table on a device: arrays moved there, launches checked or run, results read.

Activations go as bf16, what kernels keep in float32 (norm weights, biases, tables, scores) as it
is; a key pool, which the CPU has with tokens innermost, the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from atlas.backends.cuda.array import ITEM_BYTES, DeviceArray, contiguous_strides
from atlas.backends.cuda.launch import packed_arguments
from atlas.backends.cuda.pack import DeviceMatrix, host_rows, host_units, layout, row_runs
from atlas.ops.blocks import HostMatrix
from tests.kernels.launches import Bench, decode, encode
from tests.ops.cases import Case

_STEP_FLOAT32 = {"q_norm", "k_norm", "rope_table"}
_STEP_OLDER = {"slots", "block_tables", "cu_rows", "positions", "k_pool", "v_pool"} | _STEP_FLOAT32
_FLOAT32 = {
    "rmsnorm": {"weight"},
    "layernorm": {"weight", "bias"},
    "add_positions": {"table"},
    "top_candidates": {"logits", "values", "totals"},
    "rope": {"table"},
    "softcap": {"x", "out"},
    "argmax": {"logits"},
    "linear": {"bias"},
    "linear_add": {"bias"},
    "linear_relu": {"bias"},
    "linear_gated": {"bias"},
    "rmsnorm_linear": {"norm", "bias"},
    "rmsnorm_linear_gated": {"norm", "bias"},
    "prepare_heads": {"q_norm", "k_norm", "rope_table"},
    "attention_step": _STEP_FLOAT32,
    "attention_step_gated": _STEP_FLOAT32,
    "moe_route": {"scores", "weights", "bias"},
    "moe_router": {"norm", "scores", "weights", "bias"},
    "gated_rmsnorm": {"x", "weight"},
    "causal_conv_step": {"weight", "bias", "tails", "out"},
    "causal_conv_prefill": {"weight", "bias", "tails", "out"},
    "gated_delta_step": {"qkv", "decay_log", "dt_bias", "states", "out"},
    "gated_delta_prefill": {"qkv", "decay_log", "dt_bias", "states", "out"},
    "gated_delta_mixer_step": {
        "conv_weight", "norm_weight", "decay_log", "dt_bias", "states", "tails", "convolved",
        "recurred",
    },
    "mamba2_step": {"x", "b", "c", "decay_log", "d", "dt_bias", "states", "out"},
    "mamba2_prefill": {"x", "b", "c", "decay_log", "d", "dt_bias", "states", "out"},
    "moe_experts": {"weights"},
    "moe_block": {"norm", "scores", "weights", "bias"},
}  # fmt: skip
_WITHOUT_GAPS = {"weights", "weight", "conv_weight", "table", "values"}
_OLDER = {
    "attention_step": _STEP_OLDER,
    "attention_step_gated": _STEP_OLDER,
    "cross_attention": {"source_tables", "cu_rows", "source_lens", "k_pool", "v_pool"},
    "rmsnorm": {"weight"},
    "layernorm": {"weight", "bias"},
    "moe_router": {"norm", "slots"},
    "moe_block": {"norm", "slots", "bias"},
    "gated_delta_mixer_step": {"states", "tails", "decay_log", "dt_bias"},
    "rmsnorm_linear": {"norm"},
    "rmsnorm_linear_gated": {"norm"},
}  # fmt: skip
"""Arguments that are older than the kernels right before an op's."""


class BenchQueue:
    """The queue that ops write to, over a bench: every launch is checked and run at once."""

    def __init__(self, bench: Bench, arch: str, tensor_map: Any = None) -> None:
        self.bench, self.launched, self.reading = bench, [], 0
        self.device = SimpleNamespace(
            arch=arch,
            capability=(8, 0) if arch == "sm_80" else (9, 0),
            has_dependent_launch=arch != "sm_80",
            num_sms=4,
            products=None,
        )
        self._tensor_map = tensor_map

    def launch(
        self, kernel: str, grid: tuple[int, ...], args: tuple[Any, ...], keep: object = None
    ) -> None:
        from atlas_kernels.registry import argument_names, load_table

        declared = load_table()[kernel]
        names = argument_names(declared.make(), declared)
        packed_arguments(kernel, tuple(zip(names, declared.kinds, strict=True)), args)
        values = [a.address if isinstance(a, DeviceArray) else a for a in args]
        values = [
            np.float32(value) if kind == "f32" else value
            for value, kind in zip(values, declared.kinds, strict=True)
        ]
        self.launched.append(kernel)
        self.bench.run(kernel, (grid[0], grid[1]), values)
        if kernel.startswith("moe_gate_up"):
            # It lets the next kernel start after its own wait: that one may read these.
            self.bench.early(values[names.index("ids")])

    def scratch(self, nbytes: int, *, zeroed: bool = False) -> int:
        return self.bench.memory.put(np.full(nbytes, 0 if zeroed else 255, np.uint8))

    def tensor_map(
        self, array: DeviceArray, box: Any, shape: Any = None, strides: Any = None
    ) -> int:
        if shape is None:
            shape, strides = array.shape, array.strides[:-1]
        elif strides is None:
            strides = contiguous_strides(shape, array.itemsize)[:-1]
        encoded = self.bench.memory.tensor_map(array.address, shape, box, strides)
        return self.bench.memory.put(np.frombuffer(encoded, np.uint8))


class OnDevice:
    """A case's arguments in device memory, one array for each object however often it occurs."""

    def __init__(self, bench: Bench, op: str, case: Case) -> None:
        self.bench, self.op, self.case = bench, op, case
        self.arrays: dict[int, tuple[DeviceArray, Any, bool]] = {}

    def put(self, name: str, value: Any) -> Any:
        """An argument on the device; what is no array stays."""
        if isinstance(value, HostMatrix):
            return put_matrix(self.bench, [value], self.case.groups_of(value))
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in self.arrays:
            self.arrays[id(value)] = self._put(name, value)
        return self.arrays[id(value)][0]

    def _put(self, name: str, value: np.ndarray) -> tuple[DeviceArray, Any, bool]:
        turned = name == "k_pool"
        host = np.ascontiguousarray(value.swapaxes(2, 3) if turned else value)
        if host.dtype.kind == "i":
            type, stored = "int32", host
        elif name in _FLOAT32.get(self.op, ()):
            type, stored = "float32", host.astype(np.float32)
        else:
            type, stored = "bfloat16", encode(host.astype(np.float32), "bf16")
        # Rows with room to a multiple of 16 bytes, as a model's buffers have it.
        is_rows = type != "int32" and not name.endswith("pool") and stored.ndim > 1
        item = ITEM_BYTES[type]
        columns = stored[0].size if is_rows else 0
        is_padded = is_rows and stored.ndim == 2 and name not in _WITHOUT_GAPS
        pad = -columns % (16 // item) if is_padded else 0
        if pad:
            wide = np.zeros((len(stored), columns + pad), stored.dtype)
            wide[:, :columns] = stored.reshape(len(stored), -1)
            strides = ((columns + pad) * item, item)
        else:
            wide, strides = stored, tuple(stored.strides)
        if type == "float32" and stored.ndim == 1:
            wide = np.concatenate([stored, np.zeros(-len(stored) % 4, np.float32)])
        address = self.bench.memory.put(wide)
        if name in _OLDER.get(self.op, ()):
            self.bench.early(address)
        return DeviceArray(address, stored.shape, type, strides), wide, turned

    def get(self, value: np.ndarray) -> np.ndarray:
        """What lies on the device now for an array of the case."""
        array, wide, turned = self.arrays[id(value)]
        now = self.bench.memory.get(array.address, wide)
        if now.shape != array.shape:
            now = now[:, : array.shape[1]] if now.ndim == 2 else now[: array.shape[0]]
        if array.dtype == "bfloat16":
            now = decode(now, "bf16")
        return now.swapaxes(2, 3) if turned else now


def put_matrix(bench: Bench, parts: list[HostMatrix], groups: int = 1) -> DeviceMatrix:
    """Stacked matrices in device memory, as a loader places them."""
    found = layout(parts, groups)
    if found.is_quantized:
        data = host_units(parts, 0, found.shape[0], found)
    else:
        data = np.zeros(found.shape, np.uint8)
        for run in row_runs([part.rows for part in parts], groups):
            rows = host_rows(parts[run.part], run.first, run.first + run.count)
            data[run.target : run.target + run.count] = rows
    address = bench.memory.put(data)
    bench.early(address)
    return DeviceMatrix(found, DeviceArray(address, data.shape, "uint8"))


def run_op(
    queue: BenchQueue, op: str, call: Callable[..., None], names: list[str], case: Case
) -> dict[str, np.ndarray]:
    """The written arrays after a call with the case's arguments."""
    place = OnDevice(queue.bench, op, case)
    args = [place.put(name, value) for name, value in zip(names, case.args, strict=False)]
    kwargs = {name: place.put(name, value) for name, value in case.kwargs.items()}
    call(queue, *args, **kwargs)
    return {name: place.get(value) for name, value in case.written.items()}
