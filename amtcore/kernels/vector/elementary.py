"""exp and log of a vector, by polynomials: the processor has no instruction for them.

What is not a number stays so, as in the plain loops; bounds of error are beside the series.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature
from numba.extending import intrinsic, overload

from amtcore.kernels.vector.simd import (
    fma,
    vround,
    vsplat,
    where_greater,
    where_greater_or_nan,
)


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
            n = vround(x * vsplat(x, _LOG2_E))
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
        n = vround(x * vsplat(x, _LOG2_E))
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

    return signature(value, value), codegen


@intrinsic
def _mantissa(typing: Any, value: Any) -> Any:
    """m of `_exponent`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integers, root, _, mask = _split_bits(args[0].type, value.scalar == types.float32)
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
