"""A vector of LANES numbers as a numba value: load, store, arithmetic, exp, log.

Recurrences cannot be vectorised over time, so a kernel works on LANES channels at once and keeps
its state in vector registers. LLVM maps `<LANES x float>` onto whatever the machine has.
Numbers are the same for every lane position, so neighbours never change a channel's result.
What is not a number stays so through every function here, as it does in the plain loops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic, models, overload, register_model

#: Channels per vector: two AVX-512 registers of float32, which hides the latency of a recurrence.
LANES = 32


class VecType(types.Type):
    """The numba type of LANES numbers of one scalar type."""

    def __init__(self, scalar: types.Type) -> None:
        self.scalar = scalar
        super().__init__(name=f"Vec({scalar}x{LANES})")


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vec: VecType) -> None:
        element = manager.lookup(vec.scalar).get_value_type()
        super().__init__(manager, vec, ir.VectorType(element, LANES))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Address of `array[index]` as a pointer to a whole vector."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    vector = ir.VectorType(context.get_value_type(array_type.dtype), LANES)
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

    return signature(VecType(array.dtype), array, index), codegen


@intrinsic
def vstore(typing: Any, array: Any, index: Any, vec: Any) -> Any:
    """Write a vector into the flat, contiguous `array` from `index` on. Bounds are not checked."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        store = builder.store(args[2], _pointer(context, builder, sig.args[0], args[0], at))
        store.align = _align(sig.args[0])
        return context.get_dummy_value()

    return signature(types.void, array, index, vec), codegen


@intrinsic
def vsplat(typing: Any, like: Any, number: Any) -> Any:
    """`number` in every lane, with the scalar type of `like` (an array or a vector)."""
    scalar = like.dtype if isinstance(like, types.Array) else like.scalar

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = context.get_value_type(sig.return_type)
        undefined = ir.Constant(vector, ir.Undefined)
        first = context.cast(builder, args[1], sig.args[1], scalar)
        one = builder.insert_element(undefined, first, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(one, undefined, zeros)

    return signature(VecType(scalar), like, number), codegen


def _binary(instruction: str) -> Any:
    @intrinsic
    def function(typing: Any, left: Any, right: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return getattr(builder, instruction)(args[0], args[1])

        return signature(left, left, right), codegen

    return function


def _overload_operator(python_operator: Callable[..., Any], instruction: str) -> None:
    function = _binary(instruction)

    @overload(python_operator)
    def _choose(left, right):  # type: ignore[no-untyped-def]  # numba compares signatures
        if isinstance(left, VecType) and isinstance(right, VecType):
            return lambda left, right: function(left, right)
        return None


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _overload_operator(_operator, _instruction)


def _llvm(builder: Any, name: str, vector: Any, arguments: int) -> Any:
    """The LLVM intrinsic `name` for this vector type (llvmlite cannot name vector variants)."""
    suffix = "f32" if isinstance(vector.element, ir.FloatType) else "f64"
    kind = ir.FunctionType(vector, [vector] * arguments)
    return cgutils.get_or_insert_function(
        builder.module, kind, f"llvm.{name}.v{vector.count}{suffix}"
    )


@intrinsic
def fma(typing: Any, factor: Any, other: Any, addend: Any) -> Any:
    """`factor * other + addend`, rounded once: results do not depend on the compiler's mood."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.call(_llvm(builder, "fma", args[0].type, 3), args)

    return signature(factor, factor, other, addend), codegen


def _unary(name: str) -> Any:
    @intrinsic
    def function(typing: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.call(_llvm(builder, name, args[0].type, 1), args)

        return signature(value, value), codegen

    return function


vsqrt = _unary("sqrt")
vabs = _unary("fabs")
_round = _unary("rint")


@intrinsic
def copysign(typing: Any, size: Any, sign: Any) -> Any:
    """The size of one vector with the sign of another, per lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.call(_llvm(builder, "copysign", args[0].type, 2), args)

    return signature(size, size, sign), codegen


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
        value, width = args[0], LANES
        while width > 1:
            value, width = _halved(builder, [value], width), width // 2
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return signature(vector.scalar, vector), codegen


@intrinsic
def store_four_sums(typing: Any, array: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """array[0:4] = the sums of all lanes of four vectors, each in the order of `vsum`.

    After the first halving two vectors fit into one, then four, and share the later steps.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        sums, width = list(args[1:]), LANES
        sums = [_halved(builder, [value], width) for value in sums]
        while width > 2:
            width //= 2
            sums = [_halved(builder, sums[i : i + 2], width) for i in range(0, len(sums), 2)]
        data = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).data
        target = builder.bitcast(data, sums[0].type.as_pointer())
        builder.store(sums[0], target).align = _align(sig.args[0])
        return context.get_dummy_value()

    return signature(types.void, array, a, b, c, d), codegen


def _where_greater(compare: str) -> Any:
    @intrinsic
    def function(typing: Any, left: Any, right: Any, yes: Any, no: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(getattr(builder, compare)(">", *args[:2]), *args[2:])

        return signature(yes, left, right, yes, no), codegen

    return function


#: Per lane: the third where the first is above the second, else the fourth; the second function
#: also takes the third where one of the two is NaN.
where_greater, where_greater_or_nan = map(_where_greater, ("fcmp_ordered", "fcmp_unordered"))


def _any(comparison: str, compare: str = "fcmp_ordered") -> Any:
    @intrinsic
    def function(typing: Any, left: Any, right: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            mask = ir.IntType(LANES)
            bits = builder.bitcast(getattr(builder, compare)(comparison, *args), mask)
            return builder.icmp_unsigned("!=", bits, ir.Constant(mask, 0))

        return signature(types.boolean, left, right), codegen

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

        return signature(left, left, right), codegen

    return function


#: The larger and the smaller of two vectors, per lane; NaN where one of them is NaN.
vmax, vmin = _extreme(">"), _extreme("<")


@intrinsic
def _power_of_two(typing: Any, exponent: Any) -> Any:
    """2 ** exponent for integral exponents inside the normal range, and infinity for the one above
    it, by building the bits.

    Added to 1.5 times the first number without a fraction, an integer shows in the lowest bits:
    a conversion to integers would leave NaN undefined.
    """
    single = exponent.scalar == types.float32
    width, bias, shift = (32, 127, 23) if single else (64, 1023, 52)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integers = ir.VectorType(ir.IntType(width), LANES)
        whole = ir.Constant(args[0].type, [1.5 * 2.0**shift] * LANES)
        bits = builder.bitcast(builder.fadd(args[0], whole), integers)
        bits = builder.add(bits, ir.Constant(integers, [bias] * LANES))
        bits = builder.shl(bits, ir.Constant(integers, [shift] * LANES))
        return builder.bitcast(bits, args[0].type)

    return signature(exponent, exponent), codegen


_LARGEST_32, _LARGEST_64 = (float(np.finfo(kind).max) for kind in (np.float32, np.float64))
_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has trailing zero bits, so that n * part is exact.
_LN2_HIGH_32, _LN2_LOW_32 = 0.693145751953125, 1.42860682030941723212e-6
_LN2_HIGH_64, _LN2_LOW_64 = 6.93147180369123816490e-1, 1.90821492927058770002e-10


@njit
def _within(value: Any, low: float, high: float) -> Any:
    """`value` in the bounds; the comparisons are the ones that NaN passes at no cost."""
    least, most = vsplat(value, low), vsplat(value, high)
    value = where_greater(least, value, least, value)
    return where_greater(value, most, most, value)


def _exp_body(value):  # type: ignore[no-untyped-def]
    raise TypeError("compiled code only")


@overload(_exp_body)
def _choose_exp(value):  # type: ignore[no-untyped-def]
    """exp(x) = 2**n * exp(r), |r| <= ln2/2, the latter by its Taylor polynomial.

    The first left-out term is below 2e-9 (degree 7, float32) and 5e-18 (degree 13, float64).
    """
    lowest = -_LARGEST_32 if value.scalar == types.float32 else -_LARGEST_64
    if value.scalar == types.float32:

        def single(value):  # type: ignore[no-untyped-def]
            x = _within(value, -80.0, 89.0)
            n = _round(x * vsplat(x, _LOG2_E))
            r = fma(n, vsplat(x, -_LN2_LOW_32), fma(n, vsplat(x, -_LN2_HIGH_32), x))
            p = vsplat(x, 1.0 / 5040.0)
            p = fma(p, r, vsplat(x, 1.0 / 720.0))
            p = fma(p, r, vsplat(x, 1.0 / 120.0))
            p = fma(p, r, vsplat(x, 1.0 / 24.0))
            p = fma(p, r, vsplat(x, 1.0 / 6.0))
            p = fma(p, r, vsplat(x, 0.5))
            p = fma(p, r, vsplat(x, 1.0))
            p = fma(p, r, vsplat(x, 1.0)) * _power_of_two(n)
            return where_greater_or_nan(value, vsplat(x, lowest), p, vsplat(x, 0.0))

        return single

    def double(value):  # type: ignore[no-untyped-def]
        x = _within(value, -700.0, 710.0)
        n = _round(x * vsplat(x, _LOG2_E))
        r = fma(n, vsplat(x, -_LN2_LOW_64), fma(n, vsplat(x, -_LN2_HIGH_64), x))
        p = vsplat(x, 1.0 / 6227020800.0)
        inverse = 1.0 / 6227020800.0
        for k in range(13, 0, -1):
            inverse = inverse * k
            p = fma(p, r, vsplat(x, inverse))
        p = p * _power_of_two(n)
        return where_greater_or_nan(value, vsplat(x, lowest), p, vsplat(x, 0.0))

    return double


@njit
def vexp(value: Any) -> Any:
    """exp per lane, for values from -80 (float32) or -700 (float64), where it is clamped, to 88 or
    709, above which it is infinite; 0 of minus infinity."""
    return _exp_body(value)


# Bits of sqrt(1/2): measured from there, a number's exponent leaves a mantissa around 1.
_HALF_ROOT_32, _HALF_ROOT_64 = 0x3F3504F3, 0x3FE6A09E667F3BCD


def _split_bits(single: bool) -> tuple[Any, Any, Any, Any]:
    """Integer vector type, and the constants of `_exponent` and `_mantissa` in it."""
    width, shift, root = (32, 23, _HALF_ROOT_32) if single else (64, 52, _HALF_ROOT_64)
    integers = ir.VectorType(ir.IntType(width), LANES)
    constants = (ir.Constant(integers, [n] * LANES) for n in (root, shift, (1 << shift) - 1))
    return (integers, *constants)


@intrinsic
def _exponent(typing: Any, value: Any) -> Any:
    """k of value = 2**k * m with m in [sqrt(1/2), sqrt(2)), for normal numbers above 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integers, root, shift, _ = _split_bits(value.scalar == types.float32)
        bits = builder.sub(builder.bitcast(args[0], integers), root)
        return builder.sitofp(builder.ashr(bits, shift), args[0].type)

    return signature(value, value), codegen


@intrinsic
def _mantissa(typing: Any, value: Any) -> Any:
    """m of `_exponent`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integers, root, _, mask = _split_bits(value.scalar == types.float32)
        bits = builder.and_(builder.sub(builder.bitcast(args[0], integers), root), mask)
        return builder.bitcast(builder.add(bits, root), args[0].type)

    return signature(value, value), codegen


def _log_body(value, k, s):  # type: ignore[no-untyped-def]
    raise TypeError("compiled code only")


@overload(_log_body)
def _choose_log(value, k, s):  # type: ignore[no-untyped-def]
    """k ln 2 + 2 atanh(s) by the series of atanh, z = s^2 <= 0.0295.

    The first left-out term is below 1e-9 (z^5, float32) and 2e-18 (z^11, float64).
    """
    if value.scalar == types.float32:
        terms, high, low, largest = 5, _LN2_HIGH_32, _LN2_LOW_32, _LARGEST_32
    else:
        terms, high, low, largest = 11, _LN2_HIGH_64, _LN2_LOW_64, _LARGEST_64

    def body(value, k, s):  # type: ignore[no-untyped-def]
        z = s * s
        p = vsplat(z, 1.0 / (2 * terms - 1))
        for i in range(terms - 1, 0, -1):
            p = fma(p, z, vsplat(z, 1.0 / (2 * i - 1)))
        log = fma(k, vsplat(z, high), fma(s + s, p, k * vsplat(z, low)))
        return where_greater_or_nan(value, vsplat(z, largest), value, log)

    return body


@njit
def vlog(value: Any) -> Any:
    """Natural logarithm per lane, for normal numbers above 0; infinity and NaN stay."""
    m = _mantissa(value)
    one = vsplat(value, 1.0)
    return _log_body(value, _exponent(value), (m - one) / (m + one))


@njit
def accumulate(rows: Any, row: int, value: Any) -> None:
    """Add a vector to one row of a flat array of rows."""
    vstore(rows, row * LANES, vload(rows, row * LANES) + value)
