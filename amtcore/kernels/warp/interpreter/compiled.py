"""PTX to functions of the host: parsed, cut, translated, and compiled by LLVM.

LLVM only selects and schedules machine instructions here; nothing in the assembly allows it to
reassociate or to contract floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import NDArray

from amtcore.kernels.warp.interpreter.body import llvm_name
from amtcore.kernels.warp.interpreter.program import Program, cut
from amtcore.kernels.warp.interpreter.ptx import parse
from amtcore.kernels.warp.interpreter.translate import piece_name, translate
from amtcore.kernels.warp.interpreter.warp_wide import describe


@dataclass
class Compiled:
    """A kernel ready to run.

    Attributes:
        program: What it was made of.
        flushes: Whether its float32 arithmetic flushes subnormals.
        pieces: Address of each piece's function; 0 for instructions of the whole warp.
        rows: What each piece is: `warp_wide`.
        firsts: Each piece's first instruction.
        hits: How often a warp ran each piece, over all launches.
        windows: Address and bytes of each variable in global memory.
        engine: Holds the functions.
    """

    program: Program
    flushes: bool
    pieces: NDArray[np.int64]
    rows: NDArray[np.int64]
    firsts: NDArray[np.int64]
    hits: NDArray[np.int64]
    windows: list[tuple[int, int]]
    engine: Any


def compile_ptx(ptx: str) -> Compiled:
    """Compile a kernel; `KernelError` names the instruction that is not known."""
    program = cut(parse(ptx))
    rows = describe(program)
    translation = translate(program)
    engine = _host_functions(translation.text)
    numbers = range(len(program.pieces))
    pieces = [
        0 if program.pieces[k].warp_wide else engine.get_function_address(piece_name(k))
        for k in numbers
    ]
    variables = [each for space in ("global", "const") for each in program.variables(space)]
    return Compiled(
        program,
        translation.flushes,
        np.array(pieces, np.int64),
        rows,
        np.array([piece.first for piece in program.pieces], np.int64),
        np.zeros(len(program.pieces), np.int64),
        [(_address(engine, each.name), each.size) for each in variables],
        engine,
    )


def _address(engine: Any, variable: str) -> int:
    return int(engine.get_global_value_address(llvm_name(variable).strip('"')))


@global_compiler_lock
def _host_functions(text: str) -> Any:
    """LLVM's own state is one per process, and numba's lock guards it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=1,
        jit=True,
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
