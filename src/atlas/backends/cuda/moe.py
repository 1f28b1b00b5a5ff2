"""Mixture of experts: launches.

Up to eight rows norm and router are one kernel, and each chosen expert's weights are read once,
straight for the rows that chose it, by two kernels of which the first makes the choice; more rows
are sorted by expert first. Both sum in one order.
"""

from __future__ import annotations

from collections.abc import Callable

from atlas_kernels.gemm_step_plan import chain_length
from atlas_kernels.moe_plan import (
    DOWN_TILES,
    GATE_UP_TILES,
    GROUPED_TILES,
    HALF_ROWS,
    ROW_BOX,
    UNIT,
    WGMMA_TILES,
    decode_kernels,
    decode_variant,
    down_view,
    gate_up_view,
    grouped_variant,
    route_variant,
    routed_kernel,
    wgmma_variant,
)
from atlas_kernels.moe_router_plan import ROUTER_COLUMNS, router_variant

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args, is_aligned, match, require
from atlas.backends.cuda.launch import Argument, Queue, has_large_sms
from atlas.backends.cuda.linear import linear
from atlas.backends.cuda.norm import rmsnorm
from atlas.backends.cuda.pack import DeviceMatrix
from atlas.errors import ShapeError
from atlas.ops.moe import Scoring, block_in_parts, router_in_parts

_SHARED_BYTES, _LEAST_SHARED_BYTES = 227 * 1024, 99 * 1024  # of large SMs, and since sm_80
_MOST_EXPERTS, _MOST_CHOICES = 1024, 31
_COMBINE_COLUMNS = 1024
_AT_ONCE_ROWS = 4
"""Rows up to which one kernel routes faster than three: measured, see benchmarks/NOTES.md."""
_EPSILON = 1e-20
_TILE_ENTRY_BYTES = 16


def moe_route(
    queue: Queue,
    scores: DeviceArray,
    normalize: bool,
    scoring: str = "softmax",
    bias: DeviceArray | None = None,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    shared: DeviceArray | None = None,
    slots: DeviceArray | None = None,
    *,
    ids: DeviceArray,
    weights: DeviceArray,
) -> None:
    sizes = match("float32", "T E", scores, "T X", weights)
    rows, experts = sizes["T"], sizes["E"]
    _check_choice(rows, experts, scoring, bias, num_groups, top_groups, slots, ids, weights)
    variant = route_variant(experts)
    top_k = sizes["X"]
    last: Args = (0, 0)
    if shared is not None:
        match("float32", f"{sizes['T']} 1", shared)
        top_k, last = top_k - 1, (shared, shared.strides[0])
    args: Args = (scores, 0 if bias is None else bias, last[0])
    args += (0 if slots is None else slots, ids, weights)
    args += (sizes["E"], top_k, sizes["X"], int(scoring == "sigmoid"), int(normalize))
    args += (_EPSILON, scale, scores.strides[0], last[1])
    queue.launch(f"moe_route_{variant}", (sizes["T"], 1), args)


def moe_router(
    queue: Queue,
    x: DeviceArray,
    norm: DeviceArray,
    norm_eps: float,
    router: DeviceMatrix,
    num_experts: int,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: DeviceArray | None = None,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    slots: DeviceArray | None = None,
    *,
    normed: DeviceArray,
    scores: DeviceArray,
    ids: DeviceArray,
    weights: DeviceArray,
) -> None:
    rows, dim = x.shape
    _check_choice(rows, num_experts, scoring, bias, num_groups, top_groups, slots, ids, weights)
    variant = None
    if rows <= _AT_ONCE_ROWS and _is_routed_at_once(x, norm, router, normed, scores):
        room = _SHARED_BYTES if has_large_sms(queue.device.capability) else _LEAST_SHARED_BYTES
        variant = router_variant(rows, dim=dim, experts=num_experts, shared_bytes=room)
    if variant is None:
        parts: dict[str, Callable[..., None]]
        parts = {"rmsnorm": rmsnorm, "linear": linear, "moe_route": moe_route}
        router_in_parts(
            parts, queue, x, norm, norm_eps, router, num_experts, normalize, scoring, bias, scale,
            num_groups, top_groups, slots, normed=normed, scores=scores, ids=ids, weights=weights,
        )  # fmt: skip
        return
    top_k = ids.shape[1] - (router.rows > num_experts)
    match("float32", f"{dim}", norm, f"{rows} {router.rows}", scores)
    match("bfloat16", f"{rows} {dim}", x, f"{rows} {dim}", normed)
    counter = queue.scratch(4, zeroed=True)
    args: Args = (x, norm, router.data, 0 if slots is None else slots, 0 if bias is None else bias)
    args += (normed, scores, ids, weights, counter, rows, dim, chain_length(router.rows, dim))
    args += (router.rows, num_experts, top_k, ids.shape[1], int(scoring == "sigmoid"))
    args += (int(normalize), norm_eps, _EPSILON, scale)
    args += (x.strides[0], normed.strides[0], scores.strides[0])
    grid = (-(-router.rows // ROUTER_COLUMNS), 1)
    queue.launch(f"moe_router_{variant}", grid, args, router)


def _is_routed_at_once(
    x: DeviceArray, norm: DeviceArray, router: DeviceMatrix, normed: DeviceArray,
    scores: DeviceArray,
) -> bool:  # fmt: skip
    """Whether types and places of arrays are what ``moe_router`` takes."""
    types = (x.dtype, normed.dtype, norm.dtype, scores.dtype, router.format)
    if types != ("bfloat16", "bfloat16", "float32", "float32", "bf16"):
        return False
    return router.cols == x.shape[1] and is_aligned(16, x, normed, norm)


def moe_experts(
    queue: Queue,
    x: DeviceArray,
    gate_up: DeviceMatrix,
    down: DeviceMatrix,
    ids: DeviceArray,
    weights: DeviceArray,
    activation: str,
    shared_gate_up: DeviceMatrix | None = None,
    shared_down: DeviceMatrix | None = None,
    *,
    expert_gate_up: DeviceArray,
    expert_activated: DeviceArray,
    expert_out: DeviceArray,
    out: DeviceArray,
) -> None:
    sizes = _check_experts(
        x, gate_up, down, ids, weights, activation, shared_gate_up, shared_down, expert_activated,
        expert_out, out,
    )  # fmt: skip
    rows, slots, dim, inner, experts = sizes
    act, weight, second = expert_activated, gate_up.data, down.data
    last_up: Argument = 0 if shared_gate_up is None else shared_gate_up.data
    last_down: Argument = 0 if shared_down is None else shared_down.data
    variant = None
    if has_large_sms(queue.device.capability):
        variant = decode_variant(rows, dim=dim, inner=inner, slots=slots)
    if variant is not None:
        matrices = (gate_up, down, shared_gate_up, shared_down)
        first_maps, second_maps = _decode_maps(queue, variant, *matrices)
        args: Args = (*first_maps, x, ids, act, rows, slots, experts, dim, inner, x.strides[0])
        kernels, (wide, narrow) = decode_kernels(variant), _decode_grids(queue, variant, dim)
        queue.launch(kernels[0], wide, args, matrices)
        args = (*second_maps, ids, weights, act, out, out, rows, slots, experts, dim, inner, 0)
        queue.launch(kernels[1], narrow, (*args, *out.strides[:1] * 2), matrices)
        return
    groups = experts + (shared_down is not None)
    hopper = wgmma_variant(rows, experts=groups, slots=slots)
    if hopper is None or queue.device.arch != "sm_90a":
        variant = grouped_variant(rows, experts=experts, slots=slots)
        tile = GROUPED_TILES[variant]
        order, tiles, count = _sort(queue, ids, groups, tile.rows)
        args = (weight, last_up, x, order, tiles, act, experts, slots, dim, inner, x.strides[0])
        queue.launch(f"moe_grouped_gate_up_bf16_{variant}", (inner // 64, count), args)
        args = (second, last_down, act, order, tiles, expert_out, experts, dim, inner)
        queue.launch(f"moe_grouped_down_bf16_{variant}", (dim // 128, count), args)
    else:
        wgmma = WGMMA_TILES[hopper]
        order, tiles, count = _sort(queue, ids, groups, wgmma.rows)
        grid = (queue.device.num_sms, 1)
        maps = (_map(queue, gate_up), _map(queue, shared_gate_up))
        args = (*maps, x, order, tiles, act, count, experts, slots, dim, inner, x.strides[0])
        matrices = (gate_up, down, shared_gate_up, shared_down)
        queue.launch(f"moe_grouped_wgmma_gate_up_bf16_{hopper}", grid, args, matrices)
        maps = (_map(queue, down), _map(queue, shared_down))
        act_map = queue.tensor_map(act, (ROW_BOX, 64), shape=(rows * slots, inner))
        args = (*maps, act_map, order, tiles, expert_out, count, experts, dim, inner)
        queue.launch(f"moe_grouped_wgmma_down_bf16_{hopper}", grid, args, (act, *matrices))
    args = (expert_out, ids, weights, out, out, slots, dim, out.strides[0], out.strides[0])
    queue.launch("moe_combine", (rows, -(-dim // _COMBINE_COLUMNS)), args)


def moe_block(
    queue: Queue,
    x: DeviceArray,
    norm: DeviceArray,
    norm_eps: float,
    router: DeviceMatrix,
    num_experts: int,
    normalize: bool,
    scoring: Scoring,
    bias: DeviceArray | None,
    scale: float,
    num_groups: int,
    top_groups: int,
    slots: DeviceArray | None,
    gate_up: DeviceMatrix,
    down: DeviceMatrix,
    activation: str,
    shared_gate_up: DeviceMatrix | None = None,
    shared_down: DeviceMatrix | None = None,
    *,
    normed: DeviceArray,
    scores: DeviceArray,
    ids: DeviceArray,
    weights: DeviceArray,
    expert_gate_up: DeviceArray,
    expert_activated: DeviceArray,
    expert_out: DeviceArray,
    out: DeviceArray,
) -> None:
    (rows, dim), (_, choices, inner) = x.shape, expert_activated.shape
    router_kernel, variant, kernel = None, None, None
    has_room = has_large_sms(queue.device.capability)
    if has_room and _is_routed_at_once(x, norm, router, normed, scores):
        router_kernel = router_variant(rows, dim=dim, experts=0, shared_bytes=_SHARED_BYTES)
        variant = decode_variant(rows, dim=dim, inner=inner, slots=choices)
    joins = router.rows > num_experts
    if router_kernel and variant and joins == (shared_gate_up is not None):
        kernel = routed_kernel(variant, num_experts)
    if variant is None or kernel is None:
        parts: dict[str, Callable[..., None]]
        parts = {"moe_router": moe_router, "moe_experts": moe_experts}
        block_in_parts(
            parts, queue, x, norm, norm_eps, router, num_experts, normalize, scoring, bias, scale,
            num_groups, top_groups, slots, gate_up, down, activation, shared_gate_up, shared_down,
            normed=normed, scores=scores, ids=ids, weights=weights, expert_gate_up=expert_gate_up,
            expert_activated=expert_activated, expert_out=expert_out, out=out,
        )  # fmt: skip
        return
    match("float32", f"{dim}", norm, f"{rows} {router.rows}", scores)
    match("bfloat16", f"{rows} {dim}", x)
    _check_choice(rows, num_experts, scoring, bias, num_groups, top_groups, slots, ids, weights)
    *_, experts = _check_experts(
        normed, gate_up, down, ids, weights, activation, shared_gate_up, shared_down,
        expert_activated, expert_out, out,
    )  # fmt: skip
    require(experts == num_experts, "experts", experts, f"the router's {num_experts}")
    args: Args = (x, norm, router.data, normed, scores, ids, rows, rows * choices, dim)
    args += (chain_length(router.rows, dim), router.rows, norm_eps)
    args += (x.strides[0], normed.strides[0], scores.strides[0])
    grid = (-(-router.rows // ROUTER_COLUMNS), 1)
    queue.launch(f"moe_scores_{router_kernel}", grid, args, router)
    act, (wide, narrow) = expert_activated, _decode_grids(queue, variant, dim)
    matrices = (gate_up, down, shared_gate_up, shared_down)
    first_maps, second_maps = _decode_maps(queue, variant, *matrices)
    args = (*first_maps, gate_up.data, normed, scores)
    args += (0 if bias is None else bias, 0 if slots is None else slots, ids, weights, act, rows)
    args += (choices, experts, dim, inner, router.rows, choices - joins)
    args += (int(scoring == "sigmoid"), int(normalize), _EPSILON, scale)
    queue.launch(kernel, wide, (*args, normed.strides[0], scores.strides[0]), matrices)
    args = (*second_maps, ids, weights, act, out, out)
    args += (rows, choices, experts, dim, inner, 1)
    queue.launch(decode_kernels(variant)[1], narrow, (*args, *out.strides[:1] * 2), matrices)


def _decode_maps(
    queue: Queue,
    variant: str,
    gate_up: DeviceMatrix,
    down: DeviceMatrix,
    shared_gate_up: DeviceMatrix | None,
    shared_down: DeviceMatrix | None,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tensor maps of the experts and of the shared one (or 0), of either kernel."""
    dim, inner = gate_up.cols, down.cols

    def first(matrix: DeviceMatrix | None, experts: int) -> int:
        if matrix is None:
            return 0
        view = gate_up_view(experts, dim, inner)
        return queue.tensor_map(matrix.values, GATE_UP_TILES[variant].gate_up_box, *view)

    def second(matrix: DeviceMatrix | None) -> int:
        if matrix is None:
            return 0
        view = down_view(matrix.rows, inner)
        return queue.tensor_map(matrix.values, DOWN_TILES[variant].down_box, *view)

    experts = gate_up.groups
    return (
        (first(gate_up, experts), first(shared_gate_up, 1)),
        (second(down), second(shared_down)),
    )


def _decode_grids(queue: Queue, variant: str, dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of ``moe_gate_up`` and of ``moe_down``."""
    sms = queue.device.num_sms
    wide, narrow = (tiles[variant].blocks_per_sm * sms for tiles in (GATE_UP_TILES, DOWN_TILES))
    return (wide, 1), (min(narrow, dim // UNIT), 1)


def _check_experts(
    x: DeviceArray,
    gate_up: DeviceMatrix,
    down: DeviceMatrix,
    ids: DeviceArray,
    weights: DeviceArray,
    activation: str,
    shared_gate_up: DeviceMatrix | None,
    shared_down: DeviceMatrix | None,
    expert_activated: DeviceArray,
    expert_out: DeviceArray,
    out: DeviceArray,
) -> tuple[int, int, int, int, int]:
    """What the experts' kernels ask of their arguments; T, X, D, F, E."""
    sizes = match(
        "bfloat16", "T D", x, "T X F", expert_activated, "T X D", expert_out, "T D", out,
    )  # fmt: skip
    rows, slots = match("int32", "T X", ids).values()
    match("float32", f"{sizes['T']} {sizes['X']}", weights)
    dim, inner, experts = sizes["D"], sizes["F"], gate_up.groups
    _require_contiguous(ids=ids, weights=weights, activated=expert_activated, out=expert_out)
    require(activation == "silu", "the experts' activation", activation, "silu")
    require(dim % 128 == 0, "hidden size", dim, "multiples of 128")
    require(inner % 64 == 0, "an expert's inner size", inner, "multiples of 64")
    shapes = (gate_up.rows, gate_up.cols, down.rows, down.cols)
    if shapes != (experts * 2 * inner, dim, experts * dim, inner) or down.groups != experts:
        raise ShapeError(f"experts {gate_up.layout} and {down.layout} for {dim} and {inner}")
    if not is_aligned(16, x, out):
        raise ShapeError(f"rows of x {x} and out {out} must lie at multiples of 16 bytes")
    if shared_gate_up is not None and shared_down is not None:
        shapes = (shared_gate_up.rows, shared_gate_up.cols, shared_down.rows, shared_down.cols)
        formats = {matrix.format for matrix in (shared_gate_up, shared_down)}
        if shapes != (2 * inner, dim, dim, inner) or formats != {"bf16"}:
            raise ShapeError(f"a shared expert {shared_gate_up.layout}; allowed: one as the others")
    return rows, slots, dim, inner, experts


def _check_choice(
    rows: int,
    experts: int,
    scoring: str,
    bias: DeviceArray | None,
    num_groups: int,
    top_groups: int,
    slots: DeviceArray | None,
    ids: DeviceArray,
    weights: DeviceArray,
) -> None:
    """What the choice of experts asks of its arguments."""
    require(experts <= _MOST_EXPERTS, "experts", experts, f"up to {_MOST_EXPERTS}")
    choices = match("float32", f"{rows} X", weights)["X"]
    match("int32", f"{rows} {choices}", ids)
    _require_contiguous(ids=ids, weights=weights)
    require(choices <= _MOST_CHOICES, "experts a row", choices, f"up to {_MOST_CHOICES}")
    if bias is not None:
        match("float32", f"{experts}", bias)
        require(scoring == "sigmoid", "the scoring beside a selection bias", scoring, "sigmoid")
    require(top_groups == num_groups, "groups of experts", f"{top_groups} of {num_groups}", "all")
    if slots is not None:
        match("int32", f"{rows}", slots)
        _require_contiguous(slots=slots)


def _sort(queue: Queue, ids: DeviceArray, groups: int, rows: int) -> tuple[int, int, int]:
    """Pairs by expert: addresses of their order and of the table of tiles, entries of the table."""
    if ids.address % 16:  # moe_sort loads four at once
        raise ShapeError(f"ids {ids} must lie at multiples of 16 bytes")
    pairs = ids.shape[0] * ids.shape[1]
    count = pairs // rows + groups  # as ``tiles`` of the kernels' tile
    tiles = queue.scratch(count * _TILE_ENTRY_BYTES + 4 * pairs)
    order = tiles + count * _TILE_ENTRY_BYTES
    queue.launch("moe_sort", (groups, 1), (ids, order, tiles, pairs, groups, rows, count))
    return order, tiles, count


def _map(queue: Queue, matrix: DeviceMatrix | None) -> int:
    """The tensor map of a matrix, or 0 of none."""
    return 0 if matrix is None else queue.tensor_map(matrix.values, (HALF_ROWS, 64))


def _require_contiguous(**arrays: DeviceArray) -> None:
    for name, array in arrays.items():
        if not array.is_contiguous:
            raise ShapeError(f"{name} must be contiguous")
