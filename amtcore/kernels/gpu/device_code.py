"""Device functions for GPU kernels: warp numbers, arrays by address, the queue, generated code."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from amtcore.kernels.vector.warp_lowering import call_intrinsic, exchange, lane_number
from amtcore.numba_internals import flat_array

_WORD, _LONG = ir.IntType(32), ir.IntType(64)
#: More numbers than any array has: kernels do not check bounds.
_ENDLESS = 2**48


@intrinsic
def warp_id(typing: Any) -> Any:
    """Return the number of this warp in the launch, which is its block's number."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        block = call_intrinsic(builder, "llvm.nvvm.read.ptx.sreg.ctaid.x", _WORD, [])
        return builder.zext(block, _LONG)

    return types.int64(), codegen


@intrinsic
def take(typing: Any, queue: Any) -> Any:
    """Take the next number of the queue at this address, for all threads of the warp."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], _LONG.as_pointer(addrspace=1))
        first = builder.icmp_unsigned("==", lane_number(builder), ir.Constant(_WORD, 0))
        with builder.goto_entry_block():
            place = builder.alloca(_LONG)
            builder.store(ir.Constant(_LONG, 0), place)  # in threads that take nothing
        with builder.if_then(first):
            taken = builder.atomic_rmw("add", counter, ir.Constant(_LONG, 1), "monotonic")
            builder.store(taken, place)
        return exchange(builder, "idx", builder.load(place), 0)

    return types.int64(queue), codegen


def numbers_at(dtype: types.Type) -> Any:
    """Return an intrinsic that makes a flat array of this type from an address, without bounds."""
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def numbers(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            element = context.get_data_type(dtype)
            # Through the global address space: generic loads and stores would test the space.
            place = builder.inttoptr(args[0], element.as_pointer(addrspace=1))
            data = builder.addrspacecast(place, element.as_pointer())
            return flat_array(context, builder, kind, data, _ENDLESS)

        return kind(types.int64), codegen

    return numbers


#: Arrays of sizes and places by address.
integers_at = numbers_at(types.int64)


def numbers_of(double: bool) -> Any:
    """Return the intrinsic for arrays of the working type."""
    return numbers_at(types.float64 if double else types.float32)


@intrinsic(prefer_literal=True)
def shared_rows(typing: Any, like: Any, count: Any) -> Any:
    """Return a flat array of a literal count of numbers in shared memory."""
    kind, size = types.Array(like.dtype, 1, "C"), count.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        element = context.get_data_type(like.dtype)
        name = builder.module.get_unique_name("_shared")
        room = ir.GlobalVariable(builder.module, ir.ArrayType(element, size), name, addrspace=3)
        room.linkage, room.align = "internal", 16
        room.initializer = ir.Constant(room.type.pointee, ir.Undefined)
        first = builder.bitcast(room, ir.PointerType(element, 3))
        data = builder.addrspacecast(first, element.as_pointer())
        return flat_array(context, builder, kind, data, size)

    return kind(like, count), codegen


_texts = itertools.count()


def compile_text(
    parameters: str, lines: Sequence[str], scope: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a function from the text of its parameters and body lines.

    Generated text makes the functions in `scope` and the table rows constants of the code.
    """
    text = f"def written({parameters}):\n" + "".join(f"    {line}\n" for line in lines or ["pass"])
    # numba takes the source lines of its error messages from the line cache.
    name = f"<written {next(_texts)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace = dict(scope)
    exec(compile(text, name, "exec"), namespace)
    function: Callable[..., Any] = njit(namespace["written"])
    return function
