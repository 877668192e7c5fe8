"""A vector of LANES numbers as a numba value: load, store, arithmetic.

Recurrences cannot be vectorised over time, so a kernel works on LANES channels at once and keeps
its state in vector registers. LLVM maps `<LANES x float>` onto the machine's registers. All lanes
compute alike, so neighbours never change a channel's result. NaN stays NaN through every function
here, as it does in the plain loops.

Every function has two lowerings, which round alike. For a processor a vector is LANES numbers. For
a GPU it is one number in each thread of a warp. There a vote or a shuffle exchanges numbers between
lanes. The context of a GPU has `lanes_are_threads`.
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
from amtcore.numba_internals import array_data, set_thread_model

#: Channels per vector, and threads of a warp: two AVX-512 registers of float32, which hides
#: the latency of a recurrence.
LANES = 32
#: Channels per narrow vector, for kernels with many sums side by side. Measured: with 16 registers
#: of AVX2 two for each sum are better than one, and than four; AVX-512 has room for a whole vector.
NARROW = LANES if get_host_cpu_features().get("avx512f") else 16
#: Bytes of a cache line. A kernel's arrays begin at one, and `vstream` writes whole lines only.
CACHE_LINE = 64
_WORD = ir.IntType(32)
_EVERY_THREAD = ir.Constant(_WORD, -1)


def is_warp(context: Any) -> bool:
    """Return True if a vector is one number in each thread of a warp."""
    return getattr(context, "lanes_are_threads", False)


def call_intrinsic(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call the LLVM intrinsic `name`."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), args)


def lane_number(builder: Any) -> Any:
    """Return this thread's index in its warp, 32 bits."""
    return call_intrinsic(builder, "llvm.nvvm.read.ptx.sreg.laneid", _WORD, [])


def exchange(builder: Any, kind: str, value: Any, lane: int) -> Any:
    """Return the number, of 32 or 64 bits, of thread `own ^ lane` ("bfly") or `lane` ("idx")."""

    def shuffle(word: Any) -> Any:
        args = [_EVERY_THREAD, word, ir.Constant(_WORD, lane), ir.Constant(_WORD, LANES - 1)]
        return call_intrinsic(builder, f"llvm.nvvm.shfl.sync.{kind}.i32", _WORD, args)

    if isinstance(value.type, ir.FloatType) or value.type == _WORD:
        return builder.bitcast(shuffle(builder.bitcast(value, _WORD)), value.type)
    pair = ir.VectorType(_WORD, 2)
    halves = builder.bitcast(value, pair)
    for i in range(2):
        at = ir.Constant(_WORD, i)
        halves = builder.insert_element(halves, shuffle(builder.extract_element(halves, at)), at)
    return builder.bitcast(halves, value.type)


def warp_sum(builder: Any, value: Any) -> Any:
    """Return the sum over the warp in every thread, added in the order of a processor's `vsum`."""
    distance = LANES // 2
    while distance:
        value = builder.fadd(value, exchange(builder, "bfly", value, distance))
        distance //= 2
    return value


class PrivateRows(types.Type):
    """Rows of vectors of which a thread holds its lane, in registers if indices are constant."""

    def __init__(self, dtype: types.Type) -> None:
        self.dtype = dtype
        super().__init__(name=f"PrivateRows({dtype})")


@register_model(PrivateRows)
class _PrivateRowsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, rows: PrivateRows) -> None:
        element = manager.lookup(rows.dtype).get_value_type()
        super().__init__(manager, rows, element.as_pointer())


@intrinsic(prefer_literal=True)
def private_rows(typing: Any, like: Any, rows: Any) -> Any:
    """Allocate a literal number of uninitialised rows with the dtype of `like`; on a GPU only."""
    count = max(rows.literal_value, 1)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = context.get_value_type(sig.return_type)
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(pointer.pointee, count))
        return builder.bitcast(room, pointer)

    return PrivateRows(like.dtype)(like, rows), codegen


@intrinsic
def lanes_are_threads(typing: Any) -> Any:
    """Return True in code for a GPU, as a constant, so that the compiler drops the other branch."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(is_warp(context)))

    return types.boolean(), codegen


@intrinsic
def lane_id(typing: Any) -> Any:
    """Return this thread's index in its warp; 0 for a processor, which has all lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not is_warp(context):
            return context.get_constant(types.int64, 0)
        return builder.zext(lane_number(builder), ir.IntType(64))

    return types.int64(), codegen


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


def _align_frame(context: Any, builder: Any) -> None:
    """Align the stack frame of the function being compiled to cache lines, on a CPU.

    A function with more vectors than registers keeps vectors on its stack, which LLVM aligns to 16
    bytes only. Vectors across two cache lines made the adaptation loops 18 % slower on Zen 3.
    """
    if not is_warp(context):
        builder.function.attributes.alignstack = CACHE_LINE
        builder.function.attributes.add("nounwind")  # llvmlite writes no alignstack alone


@intrinsic
def align_frame(typing: Any) -> Any:
    """Align the frame of a caller that has only the vectors of inlined parts."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _align_frame(context, builder)
        return context.get_dummy_value()

    return types.void(), codegen


def pointer_to(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, lanes: int = LANES
) -> Any:
    """Address of `array[index]` as a pointer to a whole vector, or to this thread's part of it."""
    if isinstance(array_type, PrivateRows):
        row = builder.sdiv(index, ir.Constant(index.type, LANES))
        return builder.gep(array, [row])
    _align_frame(context, builder)
    data = array_data(context, builder, array_type, array)
    if is_warp(context):
        index = builder.add(index, builder.zext(lane_number(builder), index.type))
    vector = context.get_value_type(VecType(array_type.dtype, lanes))
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _align(array_type: Any) -> int:
    return array_type.dtype.bitwidth // 8


def _load(lanes: int) -> Any:
    @intrinsic
    def function(typing: Any, array: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            at = context.cast(builder, args[1], sig.args[1], types.intp)
            value = builder.load(pointer_to(context, builder, sig.args[0], args[0], at, lanes))
            value.align = _align(sig.args[0])
            return value

        return VecType(array.dtype, lanes)(array, index), codegen

    return function


#: Load LANES numbers, or `narrow_lanes`, of a flat, contiguous array from an index on. Bounds are
#: not checked.
vload, vload_narrow = _load(LANES), _load(NARROW)
#: Load 16 numbers, for channels whose number is seldom near a multiple of LANES; on a CPU only.
vload_16 = _load(16)


@intrinsic
def narrow_lanes(typing: Any) -> Any:
    """Numbers of a narrow vector: LANES are loaded and stored by this step."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant(types.intp, LANES if is_warp(context) else NARROW)

    return types.intp(), codegen


@intrinsic
def vstore(typing: Any, array: Any, index: Any, vec: Any) -> Any:
    """Store a vector, narrow or not, to a flat, contiguous array; bounds are not checked."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        place = pointer_to(context, builder, sig.args[0], args[0], at, sig.args[2].lanes)
        builder.store(args[2], place).align = _align(sig.args[0])
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
        one = builder.insert_element(undefined, first, ir.Constant(_WORD, 0))
        zeros = ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes)
        return builder.shuffle_vector(one, undefined, zeros)

    return VecType(scalar, lanes)(like, number), codegen


def _define_operator(python_operator: Callable[..., Any], instruction: str) -> None:
    """Define an operator of two vectors; `overload` would compile a function for every type."""

    @type_callable(python_operator)
    def _typed(context: Any) -> Callable[[Any, Any], Any]:
        def result(left: Any, right: Any) -> Any:
            return left if isinstance(left, VecType) and left == right else None

        return result

    @lower_builtin(python_operator, VecType, VecType)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")
_define_operator(operator.truediv, "fdiv")


def llvm_intrinsic(builder: Any, name: str, value: Any, arguments: int) -> Any:
    """The LLVM intrinsic `name` for this type (llvmlite cannot name vector variants)."""
    is_vector = isinstance(value, ir.VectorType)
    count, element = (f"v{value.count}", value.element) if is_vector else ("", value)
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
        sums, width = [_halved(builder, [value], LANES) for value in args[1:]], LANES
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
                name, given = "llvm.nvvm.vote.any.sync", [_EVERY_THREAD, lanes]
                return call_intrinsic(builder, name, ir.IntType(1), given)
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


@part(forceinline=True)
def four_sums(
    x: Any, first: int, pitch: int, count: int, weights: Any, at: int, stride: int, step: int,
    start: float, out: Any, to: int, out_pitch: int,
) -> None:  # fmt: skip
    """Compute four weighted sums of `count` rows of LANES numbers side by side.

    out[to + k out_pitch] = start + sum over i of weights[at + i stride + k step] x[first + i pitch]
    """
    for lane in range(0, LANES, narrow_lanes()):
        place, a = at, vsplat(vload_narrow(x, first + lane), start)
        b, c, d = a, a, a
        for i in range(count):
            value = vload_narrow(x, first + i * pitch + lane)
            a = fma(value, vsplat(value, weights[place]), a)
            b = fma(value, vsplat(value, weights[place + step]), b)
            c = fma(value, vsplat(value, weights[place + 2 * step]), c)
            d = fma(value, vsplat(value, weights[place + 3 * step]), d)
            place += stride
        vstore(out, to + lane, a)
        vstore(out, to + out_pitch + lane, b)
        vstore(out, to + 2 * out_pitch + lane, c)
        vstore(out, to + 3 * out_pitch + lane, d)


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
