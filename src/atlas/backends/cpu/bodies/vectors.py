"""Vectors as Numba values, and how an operation on them is made of LLVM instructions."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16


class Vector(types.Type):
    """Numba type of a vector: ``element`` is f32, i32, i8 (bytes) or i1 (a mask)."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"{element}x{lanes}")


_ELEMENTS = {
    "f32": ir.FloatType(),
    "i32": ir.IntType(32),
    "i8": ir.IntType(8),
    "i1": ir.IntType(1),
}


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(_ELEMENTS[fe_type.element], fe_type.lanes))


f32x16 = Vector("f32", 16)
i32x16 = Vector("i32", 16)
u8x64 = Vector("i8", 64)
mask16 = Vector("i1", 16)

F32, I32, I16, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
F32V = ir.VectorType(F32, 16)
I32V = ir.VectorType(I32, 16)
I8V = ir.VectorType(I8, 64)

device = numba.njit(error_model="numpy", no_cpython_wrapper=True, inline="never")
"""Decorator of functions that bodies call; LLVM inlines them."""

Builder = Callable[[ir.IRBuilder, Any], Any]


def operation(result: types.Type, *arguments: types.Type) -> Callable[[Builder], Any]:
    """An intrinsic with the given signature whose code is what the decorated builder emits."""

    def decorate(build: Builder) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            out = build(builder, values)
            return context.get_dummy_value() if result == types.void else out

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope = {"codegen": codegen, "result": result, "arguments": arguments}
        source = f"def {build.__name__}(typing_context{', ' if names else ''}{names}):\n"
        source += "    return result(*arguments), codegen\n"
        exec(source, scope)  # Numba wants one named parameter for each argument
        function = scope[build.__name__]
        function.__module__ = __name__
        return intrinsic(function)

    return decorate


def pointer_to(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def repeat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def constant_vector(element: ir.Type, lanes: int, value: float | int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    signature = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, values)


def fold(builder: ir.IRBuilder, vector: ir.Value, combine: Any) -> ir.Value:
    """Lanes i and i + 8, then + 4, + 2, + 1: the one order of every horizontal reduction."""
    width = vector.type.count
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        vector = combine(
            builder.shuffle_vector(vector, vector, low),
            builder.shuffle_vector(vector, vector, high),
        )
    return builder.extract_element(vector, I32(0))
