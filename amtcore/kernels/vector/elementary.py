"""exp and log of a vector by polynomials, as the processor has no instruction for them.

NaN stays NaN, as in the plain loops. Error bounds are beside the series.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    fma,
    llvm_intrinsic,
    vround,
    vsplat,
    where_greater,
    where_greater_or_nan,
)

_COMPILED_ONLY = "vexp, vlog and vdecay run in compiled functions only"


def _like(kind: Any, element: Any) -> Any:
    """`element` as a vector where the LLVM type `kind` is one, else as it is."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _full(kind: Any, number: float) -> Any:
    """A constant in every lane of an LLVM vector type, or of a plain one."""
    many = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [number] * kind.count if many else number)


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
        integers = _like(args[0].type, ir.IntType(width))
        whole = _full(args[0].type, 1.5 * 2.0**shift)
        bits = builder.bitcast(builder.fadd(args[0], whole), integers)
        bits = builder.add(bits, _full(integers, bias))
        bits = builder.shl(bits, _full(integers, shift))
        return builder.bitcast(bits, args[0].type)

    return exponent(exponent), codegen


_LARGEST_32, _LARGEST_64 = (float(np.finfo(kind).max) for kind in (np.float32, np.float64))
LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has trailing zero bits, so that n * part is exact.
_LN2_HIGH_32, _LN2_LOW_32 = 0.693145751953125, 1.42860682030941723212e-6
_LN2_HIGH_64, _LN2_LOW_64 = 6.93147180369123816490e-1, 1.90821492927058770002e-10


@part
def _within(value: Any, low: float, high: float) -> Any:
    """`value` in the bounds; the comparisons are the ones that NaN passes at no cost."""
    least, most = vsplat(value, low), vsplat(value, high)
    value = where_greater(least, value, least, value)
    return where_greater(value, most, most, value)


def vexp(value: Any) -> Any:
    """Return exp per lane, infinite above 88 (float32) or 709 (float64), and 0 of minus infinity.

    Values below -80 (float32) or -700 (float64) count as these bounds.
    """
    raise TypeError(_COMPILED_ONLY)


@overload(vexp)
def _exp(value):  # type: ignore[no-untyped-def]
    """exp(x) = 2**n * exp(r), |r| <= ln2/2, the latter by its Taylor polynomial.

    The first left-out term is below 2e-9 (degree 7, float32) and 5e-18 (degree 13, float64).
    """
    lowest = -_LARGEST_32 if value.scalar == types.float32 else -_LARGEST_64
    if value.scalar == types.float32:

        def single(value):  # type: ignore[no-untyped-def]
            x = _within(value, -80.0, 89.0)
            n = vround(x * vsplat(x, LOG2_E))
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
        n = vround(x * vsplat(x, LOG2_E))
        r = fma(n, vsplat(x, -_LN2_LOW_64), fma(n, vsplat(x, -_LN2_HIGH_64), x))
        p = vsplat(x, 1.0 / 6227020800.0)
        inverse = 1.0 / 6227020800.0
        for k in range(13, 0, -1):
            inverse = inverse * k
            p = fma(p, r, vsplat(x, inverse))
        p = p * _power_of_two(n)
        return where_greater_or_nan(value, vsplat(x, lowest), p, vsplat(x, 0.0))

    return double


# Bits of sqrt(1/2): measured from there, a number's exponent leaves a mantissa around 1.
_HALF_ROOT_32, _HALF_ROOT_64 = 0x3F3504F3, 0x3FE6A09E667F3BCD


def _split_bits(kind: Any, single: bool) -> tuple[Any, Any, Any, Any]:
    """Integers of the shape of `kind`, and the constants of `_exponent` and `_mantissa` in them."""
    width, shift, root = (32, 23, _HALF_ROOT_32) if single else (64, 52, _HALF_ROOT_64)
    integers = _like(kind, ir.IntType(width))
    constants = (_full(integers, n) for n in (root, shift, (1 << shift) - 1))
    return (integers, *constants)


@intrinsic
def _exponent(typing: Any, value: Any) -> Any:
    """k of value = 2**k * m with m in [sqrt(1/2), sqrt(2)), for normal numbers above 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integers, root, shift, _ = _split_bits(args[0].type, value.scalar == types.float32)
        bits = builder.sub(builder.bitcast(args[0], integers), root)
        return builder.sitofp(builder.ashr(bits, shift), args[0].type)

    return value(value), codegen


@intrinsic
def _mantissa(typing: Any, value: Any) -> Any:
    """m of `_exponent`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integers, root, _, mask = _split_bits(args[0].type, value.scalar == types.float32)
        bits = builder.and_(builder.sub(builder.bitcast(args[0], integers), root), mask)
        return builder.bitcast(builder.add(bits, root), args[0].type)

    return value(value), codegen


def vlog(value: Any) -> Any:
    """Natural logarithm per lane, for normal numbers above 0; infinity and NaN stay."""
    raise TypeError(_COMPILED_ONLY)


@overload(vlog)
def _log(value):  # type: ignore[no-untyped-def]
    """With value = 2**k m and s = (m - 1) / (m + 1): k ln 2 + 2 atanh(s), z = s^2 <= 0.0295.

    The first left-out term is below 1e-9 (z^5, float32) and 2e-18 (z^11, float64).
    """
    if value.scalar == types.float32:
        terms, high, low, largest = 5, _LN2_HIGH_32, _LN2_LOW_32, _LARGEST_32
    else:
        terms, high, low, largest = 11, _LN2_HIGH_64, _LN2_LOW_64, _LARGEST_64

    def body(value):  # type: ignore[no-untyped-def]
        k, m, one = _exponent(value), _mantissa(value), vsplat(value, 1.0)
        s = (m - one) / (m + one)
        z = s * s
        p = vsplat(z, 1.0 / (2 * terms - 1))
        for i in range(terms - 1, 0, -1):
            p = fma(p, z, vsplat(z, 1.0 / (2 * i - 1)))
        log = fma(k, vsplat(z, high), fma(s + s, p, k * vsplat(z, low)))
        return where_greater_or_nan(value, vsplat(z, largest), value, log)

    return body


#: 2**f = 1 + f (c[0] + c[1] f + ..) for |f| <= 1/2, through Chebyshev points: relative error 2.1e-7
#: (float32) and 9e-18 (float64).
_POWERS_32 = (
    0.6931471805599453, 0.2402234903802036, 0.05550381013796457, 0.009666368515385448,
    0.0013381302537320797,
)  # fmt: skip
_POWERS_64 = (
    0.6931471805599453, 0.24022650695910097, 0.0555041086648216, 0.009618129107606888,
    0.0013333558146416936, 0.0001540353044173605, 1.525273382983612e-05, 1.321544258792169e-06,
    1.0178062445845774e-07, 7.072585949269223e-09, 4.4549605981865186e-10,
)  # fmt: skip


@intrinsic
def _scaled(typing: Any, number: Any, shifted: Any) -> Any:
    """number * 2**n for the integer n in the lowest bits of `shifted`, by adding to the exponent:
    right where the result is a normal number."""
    width, shift = (32, 23) if number.scalar == types.float32 else (64, 52)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integers = _like(args[0].type, ir.IntType(width))
        bits = builder.shl(builder.bitcast(args[1], integers), _full(integers, shift))
        return builder.bitcast(builder.add(builder.bitcast(args[0], integers), bits), args[0].type)

    return number(number, shifted), codegen


@intrinsic
def _power_series(typing: Any, f: Any) -> Any:
    """2**f for |f| <= 1/2."""
    terms = _POWERS_32 if f.scalar == types.float32 else _POWERS_64

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[0].type
        fma_of, p = llvm_intrinsic(builder, "fma", kind, 3), _full(kind, terms[-1])
        for term in (*terms[-2::-1], 1.0):
            p = builder.call(fma_of, [p, args[0], _full(kind, term)])
        return p

    return f(f), codegen


def vdecay(value: Any) -> Any:
    """Return 2**value per lane for values up to 0, in half the steps of `vexp`.

    The result is 0 below the normal range, and for NaN.
    """
    raise TypeError(_COMPILED_ONLY)


@overload(vdecay)
def _decay(value):  # type: ignore[no-untyped-def]
    shift, lowest = (23, -125.0) if value.scalar == types.float32 else (52, -1021.0)
    whole = 1.5 * 2.0**shift

    def body(value):  # type: ignore[no-untyped-def]
        shifted = value + vsplat(value, whole)
        p = _power_series(value - (shifted - vsplat(value, whole)))
        return where_greater(value, vsplat(value, lowest), _scaled(p, shifted), vsplat(value, 0.0))

    return body
