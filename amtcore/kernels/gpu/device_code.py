"""Device functions of GPU kernels, and the kernel of a row operation.

A warp takes items from a queue; arguments are addresses of flat arrays, and sizes. The kernel of a
row operation is this loop around the operation's own function:

    while there are items:  body(item, *arguments)
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from amtcore.kernels.gpu.launcher import FEW_WARPS, MANY_WARPS, Kernel
from amtcore.kernels.gpu.ptx import compiled
from amtcore.kernels.vector.kernel_cache import sources_digest
from amtcore.kernels.vector.simd import call_intrinsic, exchange, lane_number
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


def row_kernel(body: Any, arguments: Sequence[Tensor | int], double: bool, room: bool) -> Kernel:
    """Return the compiled kernel around `body(item, *arguments[, room])`.

    `arguments` gives the kinds: floating-point tensors (float64 if `double`), int64 tensors, and
    integers. With `room`, each warp has scratch memory.
    """
    kinds = "".join(map(_kind, arguments))
    function = body.py_func
    constants = [cell.cell_contents for cell in function.__closure__ or ()]
    sources = sources_digest(Path(function.__code__.co_filename).parent)
    key = (function.__module__, function.__qualname__, constants, sources, kinds, double, room)
    return compiled(
        function.__name__, key, lambda: _text(body, kinds, double, room),
        FEW_WARPS if double else MANY_WARPS,
    )  # fmt: skip


def _kind(argument: Tensor | int) -> str:
    """One letter: numbers, integers in memory, or a size."""
    if not isinstance(argument, Tensor):
        return "s"
    return "i" if argument.dtype == torch.int64 else "n"


def _text(body: Any, kinds: str, double: bool, room: bool) -> Callable[..., Any]:
    names = [f"a{k}" for k in range(len(kinds))]
    arrays = {"n": "numbers({})", "i": "integers({})", "s": "{}"}
    given = [arrays[kind].format(name) for kind, name in zip(kinds, names, strict=True)]
    parameters, lines = ["queue", "items", *names], []
    if room:
        parameters += ["work", "size"]
        lines = ["room = numbers(work)[warp_id() * size :]"]
        given.append("room")
    lines += [
        "while True:",
        "    item = take(queue)",
        "    if item >= items:",
        "        return",
        f"    body(item, {', '.join(given)})",
    ]
    scope = {"body": body, "numbers": numbers_of(double), "integers": integers_at, "take": take,
             "warp_id": warp_id}  # fmt: skip
    return compile_text(", ".join(parameters), lines, scope).py_func  # type: ignore[attr-defined]
