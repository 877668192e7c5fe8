"""A vector of LANES numbers as a numba value: load, store, arithmetic.

Recurrences cannot be vectorised over time, so a kernel works on LANES channels at once and keeps
its state in vector registers. LLVM maps `<LANES x float>` onto whatever the machine has.
Numbers are the same for every lane position, so neighbours never change a channel's result.
What is not a number stays so through every function here, as it does in the plain loops.

Every function has two lowerings. For a processor a vector is LANES numbers; for a GPU it is one
number in each thread of a warp, and what crosses lanes is a vote or a shuffle (`warp_lowering`).
Both round alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.warp_lowering import (
    PrivateRows,
    any_thread,
    is_warp,
    lane_id,
    lane_number,
    warp_sum,
)
from amtcore.numba_internals import array_data, set_thread_model

#: Channels per vector: two AVX-512 registers of float32, which hides the latency of a recurrence.
LANES = 32
#: Channels per narrow vector, for kernels with many sums side by side. Measured: with 16 registers
#: of AVX2 two for each sum are better than one, and than four; AVX-512 has room for a whole vector.
NARROW = LANES if get_host_cpu_features().get("avx512f") else 16


class VecType(types.Type):
    """The numba type of LANES numbers of one scalar type, or of fewer."""

    def __init__(self, scalar: types.Type, lanes: int = LANES) -> None:
        self.scalar, self.lanes = scalar, lanes
        super().__init__(name=f"Vec({scalar}x{lanes})")


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vec: VecType) -> None:
        element = manager.lookup(vec.scalar).get_value_type()
        super().__init__(manager, vec, ir.VectorType(element, vec.lanes))


class _OneNumber(models.PrimitiveModel):
    """A vector as one thread of a GPU holds it."""

    def __init__(self, manager: Any, vec: VecType) -> None:
        super().__init__(manager, vec, manager.lookup(vec.scalar).get_value_type())


set_thread_model(VecType, _OneNumber)


def _pointer(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, lanes: int = LANES
) -> Any:
    """Address of `array[index]` as a pointer to a whole vector, or to this thread's part of it."""
    if isinstance(array_type, PrivateRows):
        row = builder.sdiv(index, ir.Constant(index.type, LANES))
        return builder.gep(array, [row])
    data = array_data(context, builder, array_type, array)
    if is_warp(context):
        index = builder.add(index, builder.zext(lane_number(builder), index.type))
    vector = context.get_value_type(VecType(array_type.dtype, lanes))
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _align(array_type: Any) -> int:
    return array_type.dtype.bitwidth // 8


@intrinsic
def vload(typing: Any, array: Any, index: Any) -> Any:
    """LANES numbers of the flat, contiguous `array` from `index` on. Bounds are not checked."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        value = builder.load(_pointer(context, builder, sig.args[0], args[0], at))
        value.align = _align(sig.args[0])
        return value

    return VecType(array.dtype)(array, index), codegen


@intrinsic
def narrow_lanes(typing: Any) -> Any:
    """Numbers of a narrow vector: LANES are loaded and stored by this step."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant(types.intp, LANES if is_warp(context) else NARROW)

    return types.intp(), codegen


@intrinsic
def vload_narrow(typing: Any, array: Any, index: Any) -> Any:
    """`narrow_lanes` numbers of the flat, contiguous `array` from `index` on, as `vload` does."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        value = builder.load(_pointer(context, builder, sig.args[0], args[0], at, NARROW))
        value.align = _align(sig.args[0])
        return value

    return VecType(array.dtype, NARROW)(array, index), codegen


@intrinsic
def vstore(typing: Any, array: Any, index: Any, vec: Any) -> Any:
    """Write a vector, narrow or not, into the flat, contiguous `array` from `index` on. Bounds are
    not checked."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        store = builder.store(
            args[2], _pointer(context, builder, sig.args[0], args[0], at, sig.args[2].lanes)
        )
        store.align = _align(sig.args[0])
        return context.get_dummy_value()

    return types.void(array, index, vec), codegen


@intrinsic
def vsplat(typing: Any, like: Any, number: Any) -> Any:
    """`number` in every lane, with the scalar type of `like` (an array or a vector)."""
    scalar = like.scalar if isinstance(like, VecType) else like.dtype
    lanes = like.lanes if isinstance(like, VecType) else LANES

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = context.get_value_type(sig.return_type)
        first = context.cast(builder, args[1], sig.args[1], scalar)
        if is_warp(context):
            return first
        undefined = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(undefined, first, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        return builder.shuffle_vector(one, undefined, zeros)

    return VecType(scalar, lanes)(like, number), codegen


def _define_operator(python_operator: Callable[..., Any], instruction: str) -> None:
    """Define a Python operator for two vectors of one type.

    It is one instruction. `overload` would compile a function for every type instead.
    """

    @type_callable(python_operator)
    def _typed(context: Any) -> Callable[[Any, Any], Any]:
        def result(left: Any, right: Any) -> Any:
            return left if isinstance(left, VecType) and left == right else None

        return result

    @lower_builtin(python_operator, VecType, VecType)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_operator, _instruction)


def llvm_intrinsic(builder: Any, name: str, value: Any, arguments: int) -> Any:
    """The LLVM intrinsic `name` for this type (llvmlite cannot name vector variants)."""
    count, element = "", value
    if isinstance(value, ir.VectorType):
        count, element = f"v{value.count}", value.element
    suffix = "f32" if isinstance(element, ir.FloatType) else "f64"
    kind = ir.FunctionType(value, [value] * arguments)
    return builder.module.declare_intrinsic(f"llvm.{name}.{count}{suffix}", fnty=kind)


@intrinsic
def fma(typing: Any, factor: Any, other: Any, addend: Any) -> Any:
    """`factor * other + addend`, rounded once: results do not depend on the compiler's mood."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.call(llvm_intrinsic(builder, "fma", args[0].type, 3), args)

    return factor(factor, other, addend), codegen


def _unary(name: str) -> Any:
    @intrinsic
    def function(typing: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.call(llvm_intrinsic(builder, name, args[0].type, 1), args)

        return value(value), codegen

    return function


vsqrt = _unary("sqrt")
vabs = _unary("fabs")
vround = _unary("rint")
vfloor = _unary("floor")


@intrinsic
def copysign(typing: Any, size: Any, sign: Any) -> Any:
    """The size of one vector with the sign of another, per lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.call(llvm_intrinsic(builder, "copysign", args[0].type, 2), args)

    return size(size, sign), codegen


def _halved(builder: Any, pair: list[Any], width: int) -> Any:
    """One vector or two, cut into blocks of `width` numbers: each block's halves added, in a vector
    of blocks half as wide."""
    first, other = pair[0], pair[-1]
    lanes = first.type.count
    low = [i for i in range(lanes * len(pair)) if i % width < width // 2]
    high = [i + width // 2 for i in low]
    kind = ir.VectorType(ir.IntType(32), len(low))
    return builder.fadd(
        builder.shuffle_vector(first, other, ir.Constant(kind, low)),
        builder.shuffle_vector(first, other, ir.Constant(kind, high)),
    )


@intrinsic
def vsum(typing: Any, vector: Any) -> Any:
    """Sum of all lanes, always in the same order: halves added until one number is left."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_warp(context):
            return warp_sum(builder, args[0])
        value, width = args[0], LANES
        while width > 1:
            value, width = _halved(builder, [value], width), width // 2
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.scalar(vector), codegen


@intrinsic
def store_four_sums(typing: Any, array: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """array[0:4] = the sums of all lanes of four vectors, each in the order of `vsum`.

    After the first halving two vectors fit into one, then four, and share the later steps.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = array_data(context, builder, sig.args[0], args[0])
        if is_warp(context):
            for i, vector in enumerate(args[1:]):
                place = builder.gep(data, [ir.Constant(ir.IntType(64), i)])
                builder.store(warp_sum(builder, vector), place)
            return context.get_dummy_value()
        sums, width = list(args[1:]), LANES
        sums = [_halved(builder, [value], width) for value in sums]
        while width > 2:
            width //= 2
            sums = [_halved(builder, sums[i : i + 2], width) for i in range(0, len(sums), 2)]
        target = builder.bitcast(data, sums[0].type.as_pointer())
        builder.store(sums[0], target).align = _align(sig.args[0])
        return context.get_dummy_value()

    return types.void(array, a, b, c, d), codegen


def _where_greater(compare: str) -> Any:
    @intrinsic
    def function(typing: Any, left: Any, right: Any, yes: Any, no: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(getattr(builder, compare)(">", *args[:2]), *args[2:])

        return yes(left, right, yes, no), codegen

    return function


#: Per lane: the third where the first is above the second, else the fourth; the second function
#: also takes the third where one of the two is NaN.
where_greater, where_greater_or_nan = map(_where_greater, ("fcmp_ordered", "fcmp_unordered"))


def _any(comparison: str, compare: str = "fcmp_ordered") -> Any:
    @intrinsic
    def function(typing: Any, left: Any, right: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            lanes = getattr(builder, compare)(comparison, *args)
            mask = ir.IntType(sig.args[0].lanes)
            if is_warp(context):
                return any_thread(builder, lanes)
            bits = builder.bitcast(lanes, mask)
            return builder.icmp_unsigned("!=", bits, ir.Constant(mask, 0))

        return types.boolean(left, right), codegen

    return function


#: True when any lane of the first vector is above its lane of the second; at or above it; above it
#: or one of the two NaN.
any_greater, any_at_least = _any(">"), _any(">=")
any_greater_or_nan = _any(">", "fcmp_unordered")


def _extreme(pick_left: str) -> Any:
    @intrinsic
    def function(typing: Any, left: Any, right: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            # The processor's own maximum gives its second operand where either is NaN: so a NaN on
            # the right comes through by itself, and one on the left is put back.
            picked = builder.select(builder.fcmp_ordered(pick_left, *args), *args)
            return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), args[0], picked)

        return left(left, right), codegen

    return function


#: The larger and the smaller of two vectors, per lane; NaN where one of them is NaN.
vmax, vmin = _extreme(">"), _extreme("<")


@part
def accumulate(rows: Any, row: int, value: Any) -> None:
    """Add a vector to one row of a flat array of rows."""
    vstore(rows, row * LANES, vload(rows, row * LANES) + value)


@intrinsic
def own_number(typing: Any, vector: Any) -> Any:
    """The number of a vector that this thread holds; a processor's first."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_warp(context):
            return args[0]
        return builder.extract_element(args[0], ir.Constant(ir.IntType(32), 0))

    return vector.scalar(vector), codegen


@part
def add_once(array: Any, index: int, number: float) -> None:
    """array[index] += number, which all threads of a warp have, by one of them."""
    if lane_id() == 0:
        array[index] += number
