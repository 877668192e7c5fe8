"""Streaming stores, prefetch, and scratch memory of kernels.

The processor's prefetcher stops at every 4 kB page, so kernels prefetch the next row of arrays with
long rows. Large output is stored past the caches.

Scratch arrays are cut from one allocation. Separate allocations made the fused kernel 10 to 25 %
slower in about one process of three on Zen 4, for the life of the process. A probable cause is the
hashed way predictor of the first-level cache (Lipp et al., 2020, Take A Way).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import _pointer
from amtcore.kernels.vector.transpose import copy_row
from amtcore.kernels.vector.warp_lowering import is_warp

#: Bytes of a cache line. A kernel's arrays begin at one, and `vstream` writes whole lines only.
CACHE_LINE = 64


@intrinsic
def vstream(typing: Any, array: Any, index: Any, vec: Any) -> Any:
    """Store a vector past the caches, for output too large to stay in them.

    The address must be a multiple of CACHE_LINE bytes, else the processor faults.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        store = builder.store(args[2], _pointer(context, builder, sig.args[0], args[0], at))
        if is_warp(context):
            return context.get_dummy_value()
        store.align = CACHE_LINE
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(array, index, vec), codegen


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Prefetch the LANES numbers of the flat `array` from `index` on, also outside the array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_warp(context):  # other warps compute while this one waits
            return context.get_dummy_value()
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        vector = _pointer(context, builder, sig.args[0], args[0], at)
        byte, word = ir.IntType(8), ir.IntType(32)
        first = builder.bitcast(vector, byte.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch.p0i8", fnty=kind)
        size = vector.type.pointee.count * sig.args[0].dtype.bitwidth // 8
        for line in range(0, size, CACHE_LINE):
            address = builder.gep(first, [ir.Constant(word, line)])
            builder.call(call, [address, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


@part
def aligned(count: int, like: Any) -> Any:
    """Allocate `count` numbers with the dtype of `like`, aligned to cache lines.

    Loading a vector that crosses two cache lines takes twice as long.
    """
    size = like.itemsize
    room = np.empty(count + CACHE_LINE // size, like.dtype)
    skip = -room.ctypes.data % CACHE_LINE // size
    return room[skip : skip + count]


@part
def cut(room: Any, count: int) -> Any:
    """Split `room` after `count` numbers, a multiple of LANES."""
    return room[:count], room[count:]


@part
def cut_copy(room: Any, values: Any) -> Any:
    """Copy flat `values` to the begin of `room`, and split `room` after the copy."""
    copy_row(values, 0, room, 0, values.shape[0])
    return cut(room, values.shape[0])
