"""Work that goes on while a thread does something else.

``cp.async`` (sm_80), mbarriers and TMA (sm_90), thread-block clusters (sm_90) and programmatic
dependent launch (sm_90; elsewhere its two instructions are left out, see ``ptx.BEFORE_SM90``).
Shared addresses and mbarriers are int32, global ones int64.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels.ptx import WAIT_PREREQUISITES, instruction

# -- programmatic dependent launch -------------------------------------------------------------

launch_dependents = instruction("", "", "griddepcontrol.launch_dependents;")
"""Let the next kernel of the stream start, up to its ``wait_prerequisites``."""
wait_prerequisites = instruction("", "", WAIT_PREREQUISITES, collective=True)
"""Wait until the kernels before this one have ended and their writes are visible.

Every kernel calls both. With triggers at the top, a kernel's beginning may overlap with any kernel
before it in the same list or graph, not just with the last one; but a list begins after the copies
and graphs before it on the stream have ended, and a graph after everything. So before the wait

- constants (weights, tables) may be read, what the host copied for the step (positions, slots,
  block tables, ranges of rows; a kernel may bring them to a graph alone), and keys, values and
  recurrent states that earlier steps stored;
- nothing that a kernel of the same step writes may be read, and nothing written; but for words past
  L1 that say themselves whether they are there (``moe_down``, behind a kernel with a late trigger).

A thread block that has nothing to do may leave without waiting, as long as one of its grid waits:
the kernel after trusts that, when this one has ended, so have all before it."""

# -- cp.async ----------------------------------------------------------------------------------

copy16 = instruction("", "r l", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;")
"""Start copying 16 bytes to shared memory past L1: (shared address, global address)."""
copy16_or_zero = instruction("", "r l r", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;")
"""The same with the number of bytes to read, 16 or 0; the rest is filled with zeros."""
copy16_if = instruction(
    "",
    "r l r",
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.cg.shared.global.L2::128B [$0], [$1], 16; }",
)
"""``copy16`` if the third argument is not 0, without a branch."""
copy16_or_zero_if = instruction(
    "",
    "r l r r",
    "{ .reg .pred p; setp.ne.b32 p, $3, 0;"
    " @p cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2; }",
)
"""``copy16_or_zero`` if the fourth argument is not 0, without a branch."""
copy8 = instruction("", "r l", "cp.async.ca.shared.global.L2::128B [$0], [$1], 8;")
copy4 = instruction("", "r l", "cp.async.ca.shared.global.L2::128B [$0], [$1], 4;")
"""8 and 4 bytes, through L1."""
copy4_or_zero = instruction("", "r l r", "cp.async.ca.shared.global.L2::128B [$0], [$1], 4, $2;")
"""The same for 4 bytes, through L1: what is not aligned to 16."""
copy_commit = instruction("", "", "cp.async.commit_group;")
"""Close a group of copies."""


@cache
def copy_wait(pending: int) -> Any:
    """(): wait until at most ``pending`` groups of this thread's copies are in flight."""
    return instruction("", "", f"cp.async.wait_group {pending};")


# -- mbarriers ---------------------------------------------------------------------------------

barrier_init = instruction("", "r r", "mbarrier.init.shared::cta.b64 [$0], $1;")
"""(barrier, arrivals that complete a phase)."""
barrier_init_fence = instruction("", "", "fence.mbarrier_init.release.cluster;")
"""After the inits, before a ``sync_threads`` or ``sync_cluster``."""
barrier_expect = instruction("", "r r", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;")
"""Arrive, and let the phase wait for a number of bytes as well: (barrier, bytes)."""
barrier_arrive = instruction("", "r", "mbarrier.arrive.shared::cta.b64 _, [$0];")
"""Arrive, releasing this thread's shared reads and writes."""
barrier_arrive_if = instruction(
    "",
    "r r",
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
)
"""The same if the second argument is not 0, without a branch."""
barrier_arrive_after = instruction(
    "",
    "r r f",
    "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; setp.neu.and.f32 q, $2, 0fBF800000, p;"
    " @q mbarrier.arrive.shared::cta.b64 _, [$0]; }",
)
"""``barrier_arrive_if`` once a float32, which must not be −1, has been computed: the assembler
moves waits for ``wgmma`` freely among arithmetic, but not above an arrival."""
barrier_arrive_cluster = instruction("", "r", "mbarrier.arrive.shared::cluster.b64 _, [$0];")
"""Arrive at a barrier of another thread block (``map_rank``). The form with ``.release.cluster``
costs a fence of 0.7 µs on an H200."""
barrier_wait = instruction(
    "",
    "r r",
    "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
    " @p bra DONE; bra WAIT; DONE: }",
)
"""Wait for the phase of a parity, 0 for the first, to complete: (barrier, parity)."""

# -- TMA: copies of tiles under a tensor map ---------------------------------------------------

EVICT_FIRST = "0x12F0000000000000"
EVICT_LAST = "0x14F0000000000000"
"""L2 policies: what is read once, and what is read again and again."""


@cache
def tile_load(dims: int, policy: str | None = None) -> Any:
    """(shared, map, barrier, c0, c1, …): start loading a tile, innermost coordinate first.

    ``map`` is the address of a 128-byte tensor map in global memory. Parts outside the tensor come
    as zeros, also before its start; the whole tile's bytes count at ``barrier``.
    """
    coordinates = ", ".join(f"${3 + i}" for i in range(dims))
    copy = f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    operands = f"[$0], [$1, {{{coordinates}}}], [$2]"
    if policy is None:
        text = f"{copy} {operands};"
    else:
        text = f"{{ .reg .b64 h; mov.b64 h, {policy}; {copy}.L2::cache_hint {operands}, h; }}"
    return instruction("", "r l r" + " r" * dims, text)


@cache
def tile_multicast(dims: int, policy: str) -> Any:
    """(shared, map, barrier, mask, c0, c1, …): ``tile_load`` into several blocks of the cluster.

    The tile lands at the same shared address, and its bytes count at the same barrier, in each
    thread block whose rank's bit is set in ``mask``.
    """
    coordinates = ", ".join(f"${4 + i}" for i in range(dims))
    copy = f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    text = (
        f"{{ .reg .b64 h; .reg .b16 m; mov.b64 h, {policy}; cvt.u16.u32 m, $3;"
        f" {copy}.multicast::cluster.L2::cache_hint [$0], [$1, {{{coordinates}}}], [$2], m, h; }}"
    )
    return instruction("", "r l r r" + " r" * dims, text)


@cache
def tile_store(dims: int) -> Any:
    """(shared, map, c0, c1, …): start storing a tile. A coordinate must not be negative."""
    coordinates = ", ".join(f"${2 + i}" for i in range(dims))
    text = (
        f"cp.async.bulk.tensor.{dims}d.global.shared::cta.tile.bulk_group"
        f" [$1, {{{coordinates}}}], [$0];"
    )
    return instruction("", "r l" + " r" * dims, text)


bulk_load = instruction(
    "",
    "r l r r",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $3, [$2];",
)
"""Start loading contiguous bytes: (shared, global, barrier, bytes), all multiples of 16."""
bulk_load_pair = instruction(
    "",
    "r l r r",
    "{ .reg .b16 both; mov.b16 both, 3; cp.async.bulk.shared::cluster.global.mbarrier"
    "::complete_tx::bytes.multicast::cluster [$0], [$1], $3, [$2], both; }",
)
"""The same to both thread blocks of a cluster of two: to the same place, at the same barrier."""


@cache
def bulk_load_with(policy: str) -> Any:
    """``bulk_load`` with an L2 policy."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    return instruction(
        "", "r l r r", f"{{ .reg .b64 h; mov.b64 h, {policy}; {copy} [$0], [$1], $3, [$2], h; }}"
    )


tile_store_commit = instruction("", "", "cp.async.bulk.commit_group;")
tile_store_wait_read = instruction("", "", "cp.async.bulk.wait_group.read 0;")
tile_store_wait = instruction("", "", "cp.async.bulk.wait_group 0;")
"""Close a group of stores; wait until their shared memory may be written; until they are done."""
async_fence = instruction("", "", "fence.proxy.async.shared::cta;")
"""Between a thread's shared writes and a TMA store or ``wgmma`` that reads them."""
map_acquire = instruction("", "l", "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;")
"""Before the first use, in each thread that uses it, of a tensor map in global memory."""
map_prefetch = instruction("", "l", "prefetch.tensormap [$0];")
"""Ask for a tensor map ahead of its use."""

# -- thread-block clusters ---------------------------------------------------------------------

sync_cluster = instruction(
    "", "", "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", collective=True
)
"""Barrier of all threads of the cluster. Also before leaving, while others read one's memory."""
cluster_rank = instruction("r", "", "mov.u32 $0, %cluster_ctarank;", ordered=False)
"""This thread block's rank in its cluster."""
map_rank = instruction("r", "r r", "mapa.shared::cluster.u32 $0, $1, $2;", ordered=False)
"""Address, in the thread block of a rank, of what lies at a shared address: (address, rank)."""
load_cluster_f32x4 = instruction("f4", "r", "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];")
"""Load from another thread block of the cluster, at an address of ``map_rank``."""
