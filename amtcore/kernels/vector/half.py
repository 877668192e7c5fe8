"""float16 into float32, at the speed of memory; numpy's `astype` goes number by number.

    float16  s eeeee mmmmmmmmmm              value = 1.m * 2^(e - 15), or 0.m * 2^-14 where e is 0
    float32  s 000eeeee mmmmmmmmmm 0...0     the same bits read as float32 are value * 2^-112

So bits are shifted into place, for subnormal numbers too, and one product with 2^112 gives the
value; a scale that is a power of two rides along. Infinity and NaN, e = 31, get the exponent that
float32 has for them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from amtcore.kernels.vector.jit import kernel

# Numbers at a time: stay in a core's first cache between the two loops.
BLOCK = 4096
SIGN_AND_NUMBER = -0x70002000  # 0x8FFFE000 as int32
HALF_INFINITY, INFINITY = 0x7C00, 0x7F800000
FROM_FLOAT16 = 2.0**112


def widen(values: NDArray[np.float16], into: NDArray[np.float32], scale: float = 1.0) -> None:
    """Fill `into`, as many numbers in C order, with the values times `scale`, a power of two from
    2^-100 to 1, exactly."""
    if not into.flags.c_contiguous or values.size != into.size:
        raise ValueError(f"expected {values.size} numbers in C order to fill, got {into.shape}")
    bits = np.ascontiguousarray(values).reshape(-1).view(np.int16)
    _widen(bits, into.reshape(-1).view(np.int32), np.float32(FROM_FLOAT16 * scale))


@kernel
def _widen(bits, into, factor):  # type: ignore[no-untyped-def]
    for start in range(0, len(bits), BLOCK):
        some, made = bits[start : start + BLOCK], into[start : start + BLOCK]
        for k in range(len(some)):
            half = np.int32(some[k])
            # The sign goes up by itself when 16 bits become 32; its copies are masked out.
            whole = (half << 13) & SIGN_AND_NUMBER
            if half & HALF_INFINITY == HALF_INFINITY:
                whole |= INFINITY
            made[k] = whole
        numbers = made.view(np.float32)
        for k in range(len(numbers)):
            numbers[k] = numbers[k] * factor
