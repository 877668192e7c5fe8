"""Conversion between float16 and float32 in vectors; numpy's `astype` goes number by number.

    float16  s eeeee mmmmmmmmmm              value = 1.m * 2^(e - 15), or 0.m * 2^-14 where e is 0
    float32  s 000eeeee mmmmmmmmmm 0...0     the same bits read as float32 are value * 2^-112

Widening shifts the bits into place and multiplies by 2^112, which also covers subnormal numbers. A
scale that is a power of two is part of this product. Infinity and NaN, e = 31, get the exponent of
float32.

Narrowing rounds to nearest, halves to even, by one float32 sum. The second term has a last bit
worth 2^13 last bits of the number, so the sum rounds the bits away that float16 lacks. Numbers
below float16's smallest normal number take the term of that number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from amtcore.kernels.vector.jit import kernel, part

# Numbers that are converted at a time, to stay in the first-level cache from loop to loop.
BLOCK = 4096
SIGN_AND_NUMBER = -0x70002000  # 0x8FFFE000 as int32
HALF_INFINITY, INFINITY = 0x7C00, 0x7F800000
FROM_FLOAT16 = 2.0**112
# Bits of float32: all but the sign, the exponent, the exponent of float16's smallest normal number.
_SIZE, _EXPONENT = np.int32(0x7FFFFFFF), np.int32(INFINITY)
_SMALLEST_NORMAL = np.int32(0x38800000)
# Difference of the exponents of two numbers with the ratio 2^15.
_FIFTEEN = np.int32(0x07800000)
_TO_INFINITY, _BACK_TO_QUARTER = np.float32(2.0**112), np.float32(2.0**-110)
_TINY = np.finfo(np.float32).tiny


def widen(values: NDArray[np.float16], into: NDArray[np.float32], scale: float = 1.0) -> None:
    """Fill `into` with the values times `scale`, exactly.

    `into` has as many numbers, in C order; `scale` is a power of two from 2^-100 to 1.
    """
    if not into.flags.c_contiguous or values.size != into.size:
        raise ValueError(f"expected {values.size} numbers in C order to fill, got {into.shape}")
    bits = np.ascontiguousarray(values).reshape(-1).view(np.int16)
    _widen(bits, into.reshape(-1), np.float32(FROM_FLOAT16 * scale))


@kernel
def _widen(values, into, factor):  # type: ignore[no-untyped-def]
    for start in range(0, len(values), BLOCK):
        some, found = values[start : start + BLOCK], into[start : start + BLOCK]
        bits = found.view(np.int32)
        for k in range(len(some)):
            half = np.int32(some[k])
            # Widening to 32 bits copies the sign bit upwards; the mask removes the copies.
            whole = (half << 13) & SIGN_AND_NUMBER
            bits[k] = whole | INFINITY if half & HALF_INFINITY == HALF_INFINITY else whole
        for k in range(len(some)):
            found[k] *= factor


def narrow(
    values: NDArray[np.float32], into: NDArray[np.float16], factor: float = 1.0
) -> tuple[float, float, int, int, int]:
    """Fill `into`, as many numbers in C order, with finite values times a power of two. Return the
    fields of `CastError`."""
    if not into.flags.c_contiguous or values.size != into.size:
        raise ValueError(f"expected {values.size} numbers in C order to fill, got {into.shape}")
    found, room = np.zeros(5, np.int64), np.empty((2, BLOCK), np.float32)
    numbers = np.ascontiguousarray(values).reshape(-1)
    _narrow(numbers, np.float32(factor), into.reshape(-1).view(np.int16), room, found)
    worst, worst_normal = found[:2].astype(np.int32).view(np.float32).tolist()
    nonzero, normal, kept = found[2:].tolist()
    return worst, worst_normal, nonzero, nonzero - normal, nonzero - kept


@kernel
def _narrow(values, factor, into, room, found):  # type: ignore[no-untyped-def]
    for start in range(0, len(values), BLOCK):
        some = values[start : start + BLOCK]
        wanted, held = room[0, : len(some)], room[1, : len(some)]
        for k in range(len(some)):
            wanted[k] = some[k] * factor
        _round(wanted, held, into[start : start + BLOCK])
        _count(wanted, held, found)


@part
def _round(wanted, held, into):  # type: ignore[no-untyped-def]
    """Write the float16 bits of `wanted`, and to `held` the magnitudes that they represent."""
    bits, sums = wanted.view(np.int32), held.view(np.int32)
    for k in range(len(wanted)):
        sums[k] = max(bits[k] & _EXPONENT, _SMALLEST_NORMAL) + _FIFTEEN
    for k in range(len(wanted)):
        # The first product makes a number beyond float16 infinite.
        held[k] += (abs(wanted[k]) * _TO_INFINITY) * _BACK_TO_QUARTER
    for k in range(len(wanted)):
        exponent = (sums[k] >> np.int32(13)) & np.int32(HALF_INFINITY)
        half = exponent + (sums[k] & np.int32(0x0FFF))
        into[k] = half | ((bits[k] >> np.int32(16)) & np.int32(0x8000))
        sums[k] = half << np.int32(13)
    for k in range(len(wanted)):
        held[k] *= _TO_INFINITY


@part
def _count(wanted, held, found):  # type: ignore[no-untyped-def]
    """Update both errors of `CastError` and the counts of nonzero and normal numbers and of nonzero
    results. Errors are compared as bits of positive float32."""
    bits, errors = wanted.view(np.int32), held.view(np.int32)
    kept = 0
    for k in range(len(wanted)):
        kept += 1 if errors[k] != 0 else 0
    for k in range(len(wanted)):
        size = abs(wanted[k])
        # A number that became zero does not count as a rounding error.
        error = abs(held[k] - size) / max(size, _TINY)
        held[k] = error if held[k] != 0 else np.float32(0)
    worst, worst_normal, nonzero, normal = np.int32(0), np.int32(0), 0, 0
    for k in range(len(wanted)):
        worst = max(worst, errors[k])
        of_normal = errors[k] if bits[k] & _SIZE >= _SMALLEST_NORMAL else np.int32(0)
        worst_normal = max(worst_normal, of_normal)
    for k in range(len(wanted)):
        size = bits[k] & _SIZE
        nonzero += 1 if size != 0 else 0
        normal += 1 if size >= _SMALLEST_NORMAL else 0
    found[0], found[1] = max(found[0], worst), max(found[1], worst_normal)
    found[2] += nonzero
    found[3] += normal
    found[4] += kept
