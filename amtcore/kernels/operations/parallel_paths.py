"""Two parallel paths of a signal in one chain: save it aside, exchange the two, add them."""

from __future__ import annotations

from typing import Any

from amtcore.kernels.operation import ChainOperation
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import LANES, vload, vstore


@part(forceinline=True)
def save_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    for t in range(n):
        vstore(side, t * LANES, vload(a, t * LANES))
    return n


@part(forceinline=True)
def swap_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    for t in range(n):
        value = vload(a, t * LANES)
        vstore(a, t * LANES, vload(side, t * LANES))
        vstore(side, t * LANES, value)
    return n


@part(forceinline=True)
def add_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    for t in range(n):
        vstore(a, t * LANES, vload(a, t * LANES) + vload(side, t * LANES))
    return n


#: Copy the signal aside.
SAVE = ChainOperation(
    name="save",
    block=save_block,
    paths=lambda signal, side: (signal, signal),
)
#: Exchange the signal with the one aside.
SWAP = ChainOperation(
    name="swap",
    block=swap_block,
    paths=lambda signal, side: (side, signal),
)
#: Add the one aside to the signal.
ADD = ChainOperation(
    name="add",
    block=add_block,
    paths=lambda signal, side: (signal + side, side),
)
