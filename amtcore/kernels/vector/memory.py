"""Arrays too large for the caches: how kernels read and write them.

The processor's own prefetcher stops at every 4 kB page; arrays of many rows of that size want the
next row asked for by hand. Output that is not read again soon goes past the caches.

And arrays that are small enough: put here and there by `malloc`, those of the fused kernel made it
a tenth to a quarter slower in one process of three or so on Zen 4, for as long as the process
lived; cut from one room they do not. Probably pages far apart, of which that processor's first
cache knows but a hash of the address, throw each other's lines out (Lipp et al., 2020, Take A Way),
which pages side by side do not.
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
    """As `vstore`, past the caches, for output too large to be found there later.

    The address must be a multiple of CACHE_LINE bytes; the processor faults when it is not.
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
    """Ask for the LANES numbers of the flat `array` from `index` on, to be read soon. An address
    outside the array does no harm."""

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
    """A flat array of `count` numbers with the dtype of `like`, aligned to cache lines: a vector
    that crosses two lines costs twice."""
    size = like.itemsize
    room = np.empty(count + CACHE_LINE // size, like.dtype)
    skip = -room.ctypes.data % CACHE_LINE // size
    return room[skip : skip + count]


@part
def cut(room: Any, count: int) -> Any:
    """The first `count` numbers of a room, whole rows of LANES, and what is left of it."""
    return room[:count], room[count:]


@part
def cut_copy(room: Any, values: Any) -> Any:
    """As `cut`, a copy of flat `values`."""
    copy_row(values, 0, room, 0, values.shape[0])
    return cut(room, values.shape[0])
