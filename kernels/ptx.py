"""Makes the intrinsic vocabulary: a line of PTX becomes a function that kernels call.

The vocabulary itself lies beside this file, by noun: ``ptx_memory`` (loads, stores), ``ptx_math``,
``ptx_warp`` (indices, shuffles, barriers, reductions), ``ptx_mma`` (``mma.sync``, ``ldmatrix``),
``ptx_wgmma``, ``ptx_async`` (``cp.async``, mbarriers, TMA, clusters, dependent launch).

Source: NVIDIA, "Parallel Thread Execution ISA", version 8.8 and later.
"""

from __future__ import annotations

import inspect
from typing import Any

from atlas_kernels._cuda import intrinsic, types
from atlas_kernels.bytecode import mark_collective
from llvmlite import ir

LLVM = {
    "h": ir.IntType(16),
    "r": ir.IntType(32),
    "l": ir.IntType(64),
    "f": ir.FloatType(),
}
NUMBA = {"h": types.int16, "r": types.int32, "l": types.int64, "f": types.float32}

WAIT_PREREQUISITES = (
    "{ .reg .pred p; .reg .b32 n; mov.u32 n, %nctaid.x; setp.ne.u32 p, n, 0;"
    " @!p bra GO; griddepcontrol.wait; GO: }"
)
"""In a block of its own: else the assembler moves loads that stand before the wait behind it."""
BEFORE_SM90 = {WAIT_PREREQUISITES: "", "griddepcontrol.launch_dependents;": ""}
"""Instructions that sm_80 lacks and what stands in their place there: one source for all."""


def instruction(
    outs: str, ins: str, text: str, *, ordered: bool = True, collective: bool = False
) -> Any:
    """An intrinsic from PTX text.

    Parameters
    ----------
    outs : str
        Results, separated by spaces: ``r`` a 32-bit integer, ``l`` 64-bit, ``h`` 16-bit, ``f``
        float32; with a count, as in ``f4``, a tuple. ``+f4`` is a tuple that is read and written:
        it is also the first argument. None: the call has no value.
    ins : str
        Further arguments in the same notation. Numba casts what is passed, narrowing integers.
    text : str
        ``$0``, ``$1``, … are the results' registers, then those of the ``+`` tuples as they come
        in, then those of the arguments. Labels only inside braces: LLVM may copy the statement.
    ordered : bool
        Keep the statement, and keep it in order with every other ordered one and with memory.
    collective : bool
        Threads take part together: never moved into or out of a branch.
    """
    results, operands = outs.split(), ins.split()
    tied = [token[1:] for token in results if token.startswith("+")]
    result_letters = "".join(_letters(token.lstrip("+")) for token in results)
    tied_letters = "".join(_letters(token) for token in tied)
    positions = [str(i) for i in range(len(tied_letters))]  # a "+" tuple comes first in `outs`
    constraints = [f"={letter}" for letter in result_letters]
    constraints += positions + list("".join(_letters(token) for token in operands))
    constraints += ["~{memory}"] if ordered else []
    function_out = _llvm_struct(result_letters)

    parameters = [_numba_type(token) for token in tied + operands]
    signature = _return_type(results)(*parameters)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = flatten(builder, signature.args, args)
        function = ir.FunctionType(function_out, [value.type for value in values])
        assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=ordered)
        result = builder.call(assembly, values, attrs=("convergent",) if collective else ())
        return _regroup(context, builder, signature.return_type, results, result)

    return typed_intrinsic(signature, codegen, collective=collective)


def typed_intrinsic(signature: Any, codegen: Any, *, collective: bool = True) -> Any:
    """An intrinsic with one signature; ``codegen(context, builder, signature, args)`` emits it."""

    def typing(typing_context: Any, *operands: Any) -> Any:
        return signature, codegen

    names = ["typing_context", *(f"operand{i}" for i in range(len(signature.args)))]
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # Numba wants to see a fixed number of parameters.
    typing.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, positional) for name in names]
    )
    made = intrinsic(typing)
    return mark_collective(made) if collective else made


def flatten(builder: Any, argument_types: Any, args: Any) -> list[Any]:
    """LLVM values of arguments, tuples taken apart."""
    values = []
    for argument_type, value in zip(argument_types, args, strict=True):
        if isinstance(argument_type, types.UniTuple):
            values += [builder.extract_value(value, i) for i in range(argument_type.count)]
        else:
            values.append(value)
    return values


def portable(module: str, capability: int) -> str:
    """The LLVM IR of a module with what ``capability`` (80 for sm_80) lacks replaced."""
    if capability < 90:
        for text, replacement in BEFORE_SM90.items():
            module = module.replace(f'"{text}"', f'"{replacement}"')
    return module


def _letters(token: str) -> str:
    return token[0] * int(token[1:] or 1)


def _numba_type(token: str) -> Any:
    letter, count = token[0], token[1:]
    return types.UniTuple(NUMBA[letter], int(count)) if count else NUMBA[letter]


def _return_type(results: list[str]) -> Any:
    kinds = [_numba_type(token.lstrip("+")) for token in results]
    if not kinds:
        return types.void
    return kinds[0] if len(kinds) == 1 else types.Tuple(kinds)


def _llvm_struct(letters: str) -> Any:
    if not letters:
        return ir.VoidType()
    members = [LLVM[letter] for letter in letters]
    return members[0] if len(members) == 1 else ir.LiteralStructType(members)


def _regroup(context: Any, builder: Any, return_type: Any, results: list[str], value: Any) -> Any:
    """The value of a call, as Numba wants it, from the registers that the statement wrote."""
    if not results:
        return context.get_dummy_value()
    counts = [len(_letters(token.lstrip("+"))) for token in results]
    if sum(counts) == 1:
        registers = [value]
    else:
        registers = [builder.extract_value(value, i) for i in range(sum(counts))]
    kinds = [return_type] if len(results) == 1 else list(return_type)
    grouped, start = [], 0
    for kind, count in zip(kinds, counts, strict=True):
        group = registers[start : start + count]
        start += count
        is_tuple = isinstance(kind, types.UniTuple)
        grouped.append(context.make_tuple(builder, kind, group) if is_tuple else group[0])
    return grouped[0] if len(grouped) == 1 else context.make_tuple(builder, return_type, grouped)
