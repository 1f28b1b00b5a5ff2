"""Loads and stores of global and shared memory.

A global address is an int64, a shared one an int32 in the shared window. Vectors of 16 bytes want
an address that is a multiple of 16. Numba never joins neighbouring scalar accesses, so width is
stated here.

Which load: *plain* for anything that another kernel of the graph writes; *constant* (``.nc``) for
what no running kernel writes, such as tables, small weights and ids of the step; *stream* for
weights that are read once: past L1, and two sectors at a time into L2.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import types
from atlas_kernels.ptx import instruction, typed_intrinsic
from llvmlite import ir

_CONSTANT = "ld.global.nc"
_STREAM = "ld.global.nc.L1::no_allocate.L2::128B"

load_b16 = instruction("h", "l", "ld.global.b16 $0, [$1];")
load_b32 = instruction("r", "l", "ld.global.b32 $0, [$1];")
load_b32x2 = instruction("r2", "l", "ld.global.v2.b32 {$0, $1}, [$2];")
load_b32x4 = instruction("r4", "l", "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
load_b64 = instruction("l", "l", "ld.global.b64 $0, [$1];")
load_f32 = instruction("f", "l", "ld.global.f32 $0, [$1];")
load_f32x2 = instruction("f2", "l", "ld.global.v2.f32 {$0, $1}, [$2];")
load_f32x4 = instruction("f4", "l", "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];")
"""Plain loads of one address: 2, 4, 8, 16, 8, 4, 8 and 16 bytes."""

load_constant_b16 = instruction("h", "l", f"{_CONSTANT}.b16 $0, [$1];")
load_constant_b32 = instruction("r", "l", f"{_CONSTANT}.b32 $0, [$1];")
load_constant_b32x2 = instruction("r2", "l", f"{_CONSTANT}.v2.b32 {{$0, $1}}, [$2];")
load_constant_b32x4 = instruction("r4", "l", f"{_CONSTANT}.v4.b32 {{$0, $1, $2, $3}}, [$4];")
load_constant_f32 = instruction("f", "l", f"{_CONSTANT}.f32 $0, [$1];")
load_constant_f32x2 = instruction("f2", "l", f"{_CONSTANT}.v2.f32 {{$0, $1}}, [$2];")
load_constant_f32x4 = instruction("f4", "l", f"{_CONSTANT}.v4.f32 {{$0, $1, $2, $3}}, [$4];")
"""Constant loads: 2, 4, 8, 16, 4, 8 and 16 bytes."""

load_host_b32 = instruction("r", "l", "ld.relaxed.sys.global.b32 $0, [$1];")
"""A load of what the host has written, past L1."""

load_device_b32 = instruction("r", "l", "ld.relaxed.gpu.global.b32 $0, [$1];")
store_device_b32 = instruction("", "l r", "st.relaxed.gpu.global.b32 [$0], $1;")
"""A load of what another thread block may be writing, past L1, and such a store."""

load_stream_b32x4 = instruction("r4", "l", f"{_STREAM}.v4.b32 {{$0, $1, $2, $3}}, [$4];")
"""A stream load of 16 bytes."""

store_b16 = instruction("", "l h", "st.global.b16 [$0], $1;")
store_b32 = instruction("", "l r", "st.global.b32 [$0], $1;")
store_b32x2 = instruction("", "l r2", "st.global.v2.b32 [$0], {$1, $2};")
store_b32x4 = instruction("", "l r4", "st.global.v4.b32 [$0], {$1, $2, $3, $4};")
store_b64 = instruction("", "l l", "st.global.b64 [$0], $1;")
store_f32 = instruction("", "l f", "st.global.f32 [$0], $1;")
store_f32x2 = instruction("", "l f2", "st.global.v2.f32 [$0], {$1, $2};")
store_f32x4 = instruction("", "l f4", "st.global.v4.f32 [$0], {$1, $2, $3, $4};")
"""Stores to one address: (address, value or tuple)."""

_IF = "{{ .reg .pred p; setp.ne.b32 p, ${}, 0; @p {} }}"
store_b32x2_if = instruction("", "l r2 r", _IF.format(3, "st.global.v2.b32 [$0], {$1, $2};"))
store_b32x4_if = instruction(
    "", "l r4 r", _IF.format(5, "st.global.v4.b32 [$0], {$1, $2, $3, $4};")
)
store_f32x2_if = instruction("", "l f2 r", _IF.format(3, "st.global.v2.f32 [$0], {$1, $2};"))
store_f32x4_if = instruction(
    "", "l f4 r", _IF.format(5, "st.global.v4.f32 [$0], {$1, $2, $3, $4};")
)
"""The same if the third argument is not 0, without a branch."""

load_l2_f32 = instruction("f", "l", "ld.global.cg.f32 $0, [$1];")
load_l2_b32_or_zero = instruction(
    "r",
    "l r",
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.cg.b32 $0, [$1]; }",
)
load_l2_f32x2 = instruction("f2", "l", "ld.global.cg.v2.f32 {$0, $1}, [$2];")
load_l2_f32x4 = instruction("f4", "l", "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];")
load_l2_b32x4_or_zero = instruction(
    "r4",
    "l r",
    "{ .reg .pred p; .reg .b64 a; mov.b64 a, $4; setp.ne.b32 p, $5, 0;"
    " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.cg.v4.b32 {$0, $1, $2, $3}, [a]; }",
)
"""Past L1, which may hold a line from before another thread block wrote to it; the last if its
second argument is not 0, else zeros, without a branch. Zeros come first: as a choice behind the
load they would wait for it."""
fence_device = instruction("", "", "fence.acq_rel.gpu;")
"""Orders this thread's accesses before and after it for all threads of the device."""
atomic_add_b32 = instruction("r", "l r", "atom.global.add.u32 $0, [$1], $2;")
"""(address, value) → what was there before."""

atomic_add_shared_b32 = instruction("r", "r r", "atom.shared.add.u32 $0, [$1], $2;")
"""The same in shared memory."""

prefetch_l2 = instruction("", "l", "prefetch.global.L2 [$0];")
"""Ask for the cache line of an address; allowed before ``wait_prerequisites`` for constants."""

load_shared_b16 = instruction("h", "r", "ld.shared.b16 $0, [$1];")
load_shared_b32 = instruction("r", "r", "ld.shared.b32 $0, [$1];")
load_shared_b32x2 = instruction("r2", "r", "ld.shared.v2.b32 {$0, $1}, [$2];")
load_shared_b32x4 = instruction("r4", "r", "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
load_shared_b64 = instruction("l", "r", "ld.shared.b64 $0, [$1];")
load_shared_f32 = instruction("f", "r", "ld.shared.f32 $0, [$1];")
load_shared_f32x2 = instruction("f2", "r", "ld.shared.v2.f32 {$0, $1}, [$2];")
load_shared_f32x4 = instruction("f4", "r", "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];")
store_shared_b32 = instruction("", "r r", "st.shared.b32 [$0], $1;")
store_shared_b32x2 = instruction("", "r r2", "st.shared.v2.b32 [$0], {$1, $2};")
store_shared_b32x4 = instruction("", "r r4", "st.shared.v4.b32 [$0], {$1, $2, $3, $4};")
store_shared_b64 = instruction("", "r l", "st.shared.b64 [$0], $1;")
store_shared_f32 = instruction("", "r f", "st.shared.f32 [$0], $1;")
store_shared_f32x2 = instruction("", "r f2", "st.shared.v2.f32 [$0], {$1, $2};")
store_shared_f32x4 = instruction("", "r f4", "st.shared.v4.f32 [$0], {$1, $2, $3, $4};")
"""Shared memory, in the same forms."""


def shared_buffer(name: str, num_bytes: int, align: int = 16) -> Any:
    """An intrinsic without arguments: the int32 address of a static buffer of the thread block.

    Buffers with one name are one buffer within a function; the size is fixed when the kernel is
    compiled. Static buffers of a kernel may take 48 KB together.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = ir.ArrayType(ir.IntType(8), num_bytes)
        variable = _shared_variable(builder.module, name, array, align)
        variable.linkage = "internal"
        variable.initializer = ir.Constant(array, ir.Undefined)
        return builder.ptrtoint(variable, ir.IntType(32))

    return typed_intrinsic(types.int32(), codegen)


def _dynamic_shared(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = ir.ArrayType(ir.IntType(8), 0)
    variable = _shared_variable(builder.module, "atlas_dynamic_shared", array, 1024)
    variable.linkage = "external"
    return builder.ptrtoint(variable, ir.IntType(32))


def _shared_variable(module: Any, name: str, array: Any, align: int) -> Any:
    variable = module.globals.get(name)
    if variable is None:
        variable = ir.GlobalVariable(module, array, name, addrspace=3)
        variable.align = align
    return variable


dynamic_shared = typed_intrinsic(types.int32(), _dynamic_shared)
"""int32 address of the dynamic shared memory, a multiple of 1,024: TMA's 128-byte swizzle and the
descriptors of ``wgmma`` take bits 7 to 9 of the address for the row."""
