"""A kernel cut into pieces, and where its registers and variables lie.

A piece is a straight run of instructions that every thread passes without a look at its
neighbours; an instruction of the whole warp (shuffle, vote, barrier) is a piece of its own. Only
registers that live from one piece to another need memory: the rest stay in the host's registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import KernelError
from amtcore.kernels.gpu.launcher import THREADS
from amtcore_interpreter.ptx import (
    Address,
    Group,
    Instruction,
    Module,
    Name,
    Operand,
    Pair,
    Variable,
)

#: Instructions of the whole warp: threads meet here.
WARP_WIDE = {"shfl", "vote", "bar", "barrier", "activemask"}
#: What ends a piece.
JUMPS = {"bra", "brx", "ret", "exit", "trap"}
#: Instructions whose first operand is not a result.
_NO_RESULT = {"st", "red", "membar", "fence", "bar", "barrier", *JUMPS}
#: The program counter of a thread that has ended.
ENDED = -1
#: Variables begin at multiples of so many bytes. After one comes some room that belongs to none, so
#: that running over it is seen.
STEP_BYTES = 256


@dataclass(frozen=True)
class Piece:
    """Instructions first..end-1 of the module; `targets` are the pieces that may follow."""

    first: int
    end: int
    warp_wide: bool
    targets: tuple[int, ...]


@dataclass
class Program:
    """A module, cut.

    Attributes:
        at: The piece that a label stands before.
        live: Registers that a piece finds set and it or a later one reads, by piece.
        slots: Byte offset in a warp's register memory of each register that needs it; a register's
            numbers lie side by side, one per thread.
        constants: The same for numbers that instructions of the whole warp are given.
        windows: Byte offset of each shared and local variable in its space; address of the others.
        sizes: Bytes of the spaces: a warp's "shared", a thread's "local", a warp's "registers".
        memory: What is in the module's own variables, in the spaces global and const.
    """

    module: Module
    pieces: list[Piece] = field(default_factory=list)
    at: dict[str, int] = field(default_factory=dict)
    live: list[set[str]] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    memory: NDArray[np.uint8] = field(default_factory=lambda: zeros(0))

    def live_after(self, piece: Piece) -> set[str]:
        """Registers that some piece after this one reads."""
        return set().union(*(self.live[k] for k in piece.targets if k != ENDED))

    def variables(self, space: str) -> list[Variable]:
        return [each for each in self.module.variables.values() if each.space == space]

    def instructions(self, piece: Piece) -> list[Instruction]:
        return self.module.instructions[piece.first : piece.end]


def cut(module: Module) -> Program:
    """Cut a module into pieces and place its registers and variables."""
    program = Program(module)
    _cut(program)
    _find_live(program)
    _place_registers(program)
    for space in ("shared", "local"):
        program.sizes[space] = _place(program, program.variables(space))
    _make_variables(program)
    return program


def names(operand: Operand) -> Iterator[str]:
    """Every name in an operand."""
    if isinstance(operand, Name):
        yield operand.name
    elif isinstance(operand, Address):
        yield from names(operand.base)
    elif isinstance(operand, Group):
        for item in operand.items:
            yield from names(item)
    elif isinstance(operand, Pair):
        yield from (operand.first.name, operand.second.name)


def effects(instruction: Instruction, registers: dict[str, int]) -> tuple[list[str], list[str]]:
    """Registers that an instruction reads, and those that it writes."""
    results = 0 if instruction.code[0] in _NO_RESULT else 1
    operands = instruction.operands
    written = [n for each in operands[:results] for n in names(each) if n in registers]
    read = [n for each in operands[results:] for n in names(each) if n in registers]
    if instruction.predicate is not None:
        # What is not written keeps its number.
        read += [instruction.predicate.name, *written]
    return read, written


def _cut(program: Program) -> None:
    module = program.module
    code, cuts = module.instructions, {0, *module.labels.values()}
    for k, instruction in enumerate(code):
        if instruction.code[0] in WARP_WIDE:
            cuts |= {k, k + 1}
        elif instruction.code[0] in JUMPS:
            cuts.add(k + 1)
    firsts = sorted(k for k in cuts if k < len(code))
    number = {first: k for k, first in enumerate(firsts)}
    # A label at the very end stands before nothing: whoever gets there has ended.
    program.at = {name: number.get(first, ENDED) for name, first in module.labels.items()}
    for k, first in enumerate(firsts):
        end = firsts[k + 1] if k + 1 < len(firsts) else len(code)
        following = k + 1 if k + 1 < len(firsts) else ENDED
        wide = code[first].code[0] in WARP_WIDE
        targets = _targets(program, code[end - 1], following)
        program.pieces.append(Piece(first, end, wide, targets))
    if not program.pieces:
        raise KernelError(f"kernel {module.entry} has no instructions")


def _targets(program: Program, last: Instruction, following: int) -> tuple[int, ...]:
    """Where threads may be after a piece that ends with `last`; what follows it comes last."""
    targets: tuple[int, ...] = ()
    if last.code[0] == "bra":
        targets = (program.at[_label(last.operands[0], program.at, last)],)
    elif last.code[0] == "brx":
        table = _label(last.operands[1], program.module.tables, last)
        targets = tuple(program.at[label] for label in program.module.tables[table])
    elif last.code[0] in JUMPS:
        targets = (ENDED,)
    if not targets or last.predicate is not None:
        targets += (following,)
    return targets


def _label(operand: Operand, known: dict[str, int] | dict[str, list[str]], at: Instruction) -> str:
    if not isinstance(operand, Name) or operand.name not in known:
        raise KernelError(f"PTX: {at.text!r} goes to a label that is not there")
    return operand.name


def _find_live(program: Program) -> None:
    """Backwards over the pieces until nothing changes: read before written, or live after."""
    registers = program.module.registers
    first_read: list[set[str]] = []
    written: list[set[str]] = []
    for piece in program.pieces:
        reads, writes = set[str](), set[str]()
        for instruction in program.instructions(piece):
            read, write = effects(instruction, registers)
            reads |= set(read) - writes
            writes |= set(write)
        first_read.append(reads)
        written.append(writes)
    program.live = [set(reads) for reads in first_read]
    changed = True
    while changed:
        changed = False
        for k in reversed(range(len(program.pieces))):
            live = first_read[k] | (program.live_after(program.pieces[k]) - written[k])
            if live != program.live[k]:
                program.live[k], changed = live, True


def _place_registers(program: Program) -> None:
    registers = program.module.registers
    kept = set().union(*program.live)
    for piece in program.pieces:
        if piece.warp_wide:
            for instruction in program.instructions(piece):
                read, written = effects(instruction, registers)
                kept |= {*read, *written}
    at = 0
    for name in sorted(kept, key=lambda name: (-registers[name], name)):
        program.slots[name] = at
        at += THREADS * max(registers[name] // 8, 1)
    program.sizes["registers"] = at


def _place(program: Program, variables: list[Variable]) -> int:
    """Place variables one after the other; the bytes that they need."""
    at = 0
    for variable in variables:
        program.windows[variable.name] = at
        at += -(-(variable.size + 1) // STEP_BYTES) * STEP_BYTES
    return at


def _make_variables(program: Program) -> None:
    """The module's own memory, which lives as long as the program, as on a GPU."""
    variables = [*program.variables("global"), *program.variables("const")]
    program.memory = zeros(_place(program, variables))
    for variable in variables:
        at = program.windows[variable.name]
        program.memory[at : at + len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        program.windows[variable.name] += program.memory.ctypes.data


def zeros(size: int) -> NDArray[np.uint8]:
    """Memory from an address that is a multiple of STEP_BYTES."""
    room = np.zeros(size + STEP_BYTES, np.uint8)
    begin = -room.ctypes.data % STEP_BYTES
    return room[begin : begin + size]
