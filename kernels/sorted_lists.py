"""Orders that a thread keeps in registers as lists of four, greatest first.

A list of an int32 each and its place among what it was sorted from. Sorting is by neighbours alone,
which keeps equal orders as they came: a layer has two exchanges that do not wait for each other, in
all four layers of two. Longer lists would take more instructions than their heads, compared again
and again: ``list_heads``.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i32, types
from atlas_kernels.ptx import typed_intrinsic
from llvmlite import ir

_LIST = 4
_EXCHANGES = (0, 2, 1, 0, 2, 1)
"""First neighbours of those exchanged."""
_NONE = ir.Constant(ir.IntType(32), -(1 << 31))


def sort_lists(count: int) -> Any:
    """(orders) → lists and places, of ``count`` orders, a multiple of 4."""
    many = types.UniTuple(i32, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        orders = [builder.extract_value(args[0], i) for i in range(count)]
        places = [ir.Constant(ir.IntType(32), i) for i in range(count)]
        for first in range(0, count, _LIST):
            for i in (first + exchange for exchange in _EXCHANGES):
                is_less = builder.icmp_signed("<", orders[i], orders[i + 1])
                for values in (orders, places):
                    a, b = values[i], values[i + 1]
                    values[i] = builder.select(is_less, b, a)
                    values[i + 1] = builder.select(is_less, a, b)
        return _two_tuples(context, builder, many, orders, places)

    return typed_intrinsic(types.UniTuple(many, 2)(many), codegen, collective=False)


def list_heads(count: int) -> Any:
    """(lists, places) → the greatest order and the lowest place that has it."""
    many = types.UniTuple(i32, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        heads = [
            tuple(builder.extract_value(arg, first) for arg in args)
            for first in range(0, count, _LIST)
        ]
        while len(heads) > 1:
            pairs = zip(heads[::2], heads[1::2], strict=True)
            heads = [_greater(builder, low, high) for low, high in pairs]
        return context.make_tuple(builder, signature.return_type, heads[0])

    return typed_intrinsic(types.UniTuple(i32, 2)(many, many), codegen, collective=False)


def pop_list(count: int) -> Any:
    """(lists, places, place, whether) → both, if so, without the head at ``place``."""
    many = types.UniTuple(i32, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        orders, places = ([builder.extract_value(a, i) for i in range(count)] for a in args[:2])
        for first in range(0, count, _LIST):
            is_popped = builder.icmp_signed("==", places[first], args[2])
            is_popped = builder.and_(is_popped, args[3])
            for i in range(first, first + _LIST):
                is_last = i + 1 == first + _LIST
                after = _NONE if is_last else orders[i + 1]
                orders[i] = builder.select(is_popped, after, orders[i])
                if not is_last:
                    places[i] = builder.select(is_popped, places[i + 1], places[i])
        return _two_tuples(context, builder, many, orders, places)

    signature = types.UniTuple(many, 2)(many, many, i32, types.boolean)
    return typed_intrinsic(signature, codegen, collective=False)


def _greater(builder: Any, low: Any, high: Any) -> Any:
    is_low = builder.icmp_signed(">=", low[0], high[0])
    return tuple(builder.select(is_low, a, b) for a, b in zip(low, high, strict=True))


def _two_tuples(context: Any, builder: Any, many: Any, orders: Any, places: Any) -> Any:
    tuples = [context.make_tuple(builder, many, values) for values in (orders, places)]
    return context.make_tuple(builder, types.UniTuple(many, 2), tuples)
