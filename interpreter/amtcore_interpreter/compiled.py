"""PTX to functions of the host: parsed, cut, translated, and compiled by LLVM.

LLVM only selects and schedules machine instructions here; nothing in the assembly allows it to
reassociate or to contract floats. It is first told to be quick about it, which takes a sixth of the
time and makes code half as fast; what runs for long is compiled again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from amtcore.numba_internals import compiler_lock
from amtcore_interpreter.parser import parse
from amtcore_interpreter.program import Program, cut
from amtcore_interpreter.translate import Translation, piece_name, translate
from amtcore_interpreter.warp_wide import describe


@dataclass
class Compiled:
    """A kernel ready to run.

    Attributes:
        program: What it was made of.
        translation: The same for the host.
        rows: What each piece is: `warp_wide`.
        firsts: Each piece's first instruction.
        lengths: How many instructions each piece has.
        hits: How often a warp ran each piece, over all launches.
        pieces: Address of each piece's function; 0 for instructions of the whole warp.
        optimised: Whether they are the faster ones.
        engines: Hold the functions.
    """

    program: Program
    translation: Translation
    rows: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    hits: NDArray[np.int64]
    pieces: NDArray[np.int64]
    optimised: bool
    engines: list[Any]

    def optimise(self) -> None:
        """Compile again, for speed. Launches under way may go on with the functions they have."""
        if not self.optimised:
            engine = _host_functions(self.translation.text, 1)
            self.engines.append(engine)
            self.pieces, self.optimised = _addresses(self.program, engine), True


def compile_ptx(ptx: str) -> Compiled:
    """Compile a kernel; `KernelError` names the instruction that is not known."""
    program = cut(parse(ptx))
    rows = describe(program)
    translation = translate(program)
    engine = _host_functions(translation.text, 0)
    firsts = np.array([piece.first for piece in program.pieces], np.int64)
    ends = np.array([piece.end for piece in program.pieces], np.int64)
    return Compiled(
        program, translation, rows, firsts, ends - firsts, np.zeros_like(firsts),
        _addresses(program, engine), False, [engine],
    )  # fmt: skip


def _addresses(program: Program, engine: Any) -> NDArray[np.int64]:
    addresses = [
        0 if piece.warp_wide else engine.get_function_address(piece_name(number))
        for number, piece in enumerate(program.pieces)
    ]
    return np.array(addresses, np.int64)


@compiler_lock
def _host_functions(text: str, effort: int) -> Any:
    """LLVM's own state is one per process, and numba's lock guards it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=effort,
        jit=True,
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
