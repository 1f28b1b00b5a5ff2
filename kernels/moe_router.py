"""Norm, router product and choice of experts for up to 8 rows, in one kernel.

It stands for ``rmsnorm``, a step GEMM and ``moe_route``, and gives their bits. Scores are those of
``moe_scores``, whose code it shares; the last thread block to have its scores makes the choice.
While a score's chains of products go on, a warp without one runs through the code of the choice,
of which an SM finds none in its instruction cache.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i32, i64
from atlas_kernels.gemm_step_plan import CHAINS
from atlas_kernels.moe_route import row_route
from atlas_kernels.moe_router_plan import ROUTER_TILES, RouterTile
from atlas_kernels.moe_scores import THREADS, row_scores_of
from atlas_kernels.ptx_async import launch_dependents
from atlas_kernels.ptx_math import opaque
from atlas_kernels.ptx_memory import (
    atomic_add_b32,
    dynamic_shared,
    fence_device,
    load_b32,
    load_l2_f32,
    load_shared_b32,
    store_b32,
    store_shared_b32,
)
from atlas_kernels.ptx_warp import lane_id, num_blocks_x, sync_threads, sync_warp, thread_x
from atlas_kernels.registry import kernel


@kernel(
    "moe_router",
    args=(
        "ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i32 i32 i32 i32 f32 f32 f32"
        " i64 i64 i64"
    ),
    threads=THREADS,
    shared=lambda tile: tile.shared_bytes,
    variants={name: (tile,) for name, tile in ROUTER_TILES.items()},
)
def make_moe_router(tile: RouterTile) -> Any:
    """normed, scores, ids and weights of up to 8 rows x [m, D]; grid (⌈columns / 8⌉).

    - ``norm`` float32 [D] and ``eps``; ``router`` bf16 [columns, D], of which the first ``experts``
      are the experts, and with ``slots`` = top_k + 1 the next one is the shared expert's;
    - ``active``, ``bias`` and all that ``moe_route`` has by these names;
    - ``normed`` bf16 [m, D], ``scores`` float32 [m, columns], written as ids and weights are;
    - ``counter`` int32 [1]: zero, and zero again afterwards.

    D is a multiple of 128 and ``chain`` the router's ``chain_length``; rows of x, ``norm`` and
    ``router`` lie at multiples of 16 bytes, strides in bytes. ``active`` is read before the wait.
    """
    norm_at, choice_at, row_scores = tile.norm_at, tile.choice_at, row_scores_of(tile)
    route = row_route(tile.scores, load_l2_f32)

    def moe_router(
        x, norm, router, active, bias, normed, scores, ids, weights, counter, m, dim, chain,
        columns, experts, top_k, slots, use_sigmoid, normalize, eps, epsilon, scaling, x_stride,
        normed_stride, scores_stride,
    ):  # fmt: skip
        launch_dependents()
        base, lane, row = dynamic_shared(), lane_id(), i32(thread_x() >> 5)  # a warp's row
        is_active = i32(0)
        if active != 0:
            is_active = load_b32(active + min(row, i32(m - 1)) * 4)
        row_scores(
            base, x, norm, router, normed, scores, m, dim, chain, columns, eps, x_stride,
            normed_stride, scores_stride,
        )  # fmt: skip
        blocks = num_blocks_x()
        if row == 0:
            sync_warp()
            if lane == 0:
                fence_device()
                finished = atomic_add_b32(counter, 1)
                fence_device()
                if finished == blocks - 1:
                    store_b32(counter, 0)
                store_shared_b32(base + norm_at, finished)
        # A warp with nothing to multiply runs the choice before, on other numbers, for the
        # instruction cache: it is one and the same code.
        turn = opaque(i32(1 if row == CHAINS else 0))
        while turn >= 0:
            number, own_scores, last = i32(0), i64(norm), i64(0)
            num_scores, num_choices, num_slots = min(experts, dim), i32(1), i32(0)
            runs = True
            if turn == 0:
                sync_threads()
                number, own_scores = is_active, i64(scores + row * scores_stride)
                if columns > experts:
                    last = i64(own_scores + experts * 4)
                num_scores, num_choices, num_slots = experts, top_k, slots
                runs = row < m and load_shared_b32(base + norm_at) == blocks - 1
            if runs:
                route(
                    i32(base + choice_at + row * 128), row, number, own_scores, last, bias, ids,
                    weights, num_scores, num_choices, num_slots, use_sigmoid, normalize, epsilon,
                    scaling,
                )  # fmt: skip
            turn = i32(turn - 1)

    return moe_router
