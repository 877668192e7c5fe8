"""LLVM IR of vector operations for a GPU, where a vector is one number in each thread of a warp.

This code runs only if the context has `lanes_are_threads`; `simd` holds the IR for a processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

#: Threads of a warp.
WARP = 32
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


def any_thread(builder: Any, condition: Any) -> Any:
    """Return True if the condition holds in any thread of the warp."""
    name = "llvm.nvvm.vote.any.sync"
    return call_intrinsic(builder, name, ir.IntType(1), [_EVERY_THREAD, condition])


def shuffle(builder: Any, kind: str, word: Any, lane: int) -> Any:
    """Return a 32-bit word of thread `own ^ lane` ("bfly") or of thread `lane` ("idx")."""
    args = [_EVERY_THREAD, word, ir.Constant(_WORD, lane), ir.Constant(_WORD, WARP - 1)]
    return call_intrinsic(builder, f"llvm.nvvm.shfl.sync.{kind}.i32", _WORD, args)


def exchange(builder: Any, kind: str, value: Any, lane: int) -> Any:
    """Shuffle a number of 32 or 64 bits."""
    single = isinstance(value.type, ir.FloatType) or value.type == _WORD
    if single:
        word = shuffle(builder, kind, builder.bitcast(value, _WORD), lane)
        return builder.bitcast(word, value.type)
    pair = ir.VectorType(_WORD, 2)
    halves = builder.bitcast(value, pair)
    for i in range(2):
        at = ir.Constant(_WORD, i)
        moved = shuffle(builder, kind, builder.extract_element(halves, at), lane)
        halves = builder.insert_element(halves, moved, at)
    return builder.bitcast(halves, value.type)


def warp_sum(builder: Any, value: Any) -> Any:
    """Return the sum over the warp in every thread.

    Additions have the order of a processor's `vsum`: lanes i and i + 16, then i + 8, and so on.
    """
    distance = WARP // 2
    while distance:
        value = builder.fadd(value, exchange(builder, "bfly", value, distance))
        distance //= 2
    return value


class PrivateRows(types.Type):
    """The numba type of rows of vectors, of which every thread holds its lane.

    Rows with constant indices are kept in registers.
    """

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
