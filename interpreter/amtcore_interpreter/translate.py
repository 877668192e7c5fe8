"""A program as LLVM assembly for the host: one function per piece."""

from __future__ import annotations

from dataclasses import dataclass

from amtcore.errors import KernelError
from amtcore_interpreter.arithmetic import ARITHMETIC
from amtcore_interpreter.body import (
    BAD_BRANCH,
    COUNTERS,
    THREADS_AT,
    TRAP,
    Body,
)
from amtcore_interpreter.checks import checks
from amtcore_interpreter.conversion import CONVERSIONS
from amtcore_interpreter.memory import ACCESSES
from amtcore_interpreter.program import JUMPS, Piece, Program, effects
from amtcore_interpreter.ptx import Instruction

#: How each instruction is translated, by the first part of its name.
TRANSLATIONS = {**ARITHMETIC, **CONVERSIONS, **ACCESSES}
#: How many operands, where that is not three.
_OPERANDS = {
    **dict.fromkeys(("membar", "fence"), 0),
    **dict.fromkeys(("ld", "st", "mov", "cvt", "cvta", "sqrt", "rcp", "neg", "abs", "not"), 2),
    **dict.fromkeys(("testp", "popc", "clz", "brev", "red"), 2),
    **dict.fromkeys(("fma", "mad", "selp", "shf", "prmt", "bfe"), 4),
    "bfi": 5,
}


def _operands(instruction: Instruction) -> int:
    """How many operands an instruction has."""
    name, *modifiers = instruction.code
    joins = name == "setp" and not {"and", "or", "xor"}.isdisjoint(modifiers)
    swaps = name in ("atom", "red") and "cas" in modifiers
    return _OPERANDS.get(name, 3) + (joins or swaps)


@dataclass(frozen=True)
class Translation:
    """What is to be compiled.

    Attributes:
        text: LLVM assembly.
        flushes: Whether float32 arithmetic flushes subnormals.
    """

    text: str
    flushes: bool


def piece_name(number: int) -> str:
    """What the function of a piece is called."""
    return f"piece{number}"


def translate(program: Program) -> Translation:
    """Translate every piece that is not an instruction of the whole warp."""
    parts = [checks(program)]
    flushing = set[bool]()
    for number, piece in enumerate(program.pieces):
        if not piece.warp_wide:
            body = _Piece(program, piece, number)
            parts.append(body.text())
            flushing |= body.body.flushing
    if flushing == {True, False}:
        raise KernelError(
            f"kernel {program.module.entry} has float32 arithmetic with and without .ftz: a host "
            "does either"
        )
    flushes = True in flushing
    mode = "preserve-sign,preserve-sign" if flushes else "ieee,ieee"
    parts.append(f'attributes #0 = {{ nounwind "denormal-fp-math-f32"="{mode}" }}')
    return Translation("\n".join(parts) + "\n", flushes)


class _Piece:
    """One piece's function: loads what the registers hold, translates, stores, says who goes
    where."""

    def __init__(self, program: Program, piece: Piece, number: int) -> None:
        self.program, self.piece, self.number = program, piece, number
        self.body = Body(program, piece)

    def text(self) -> str:
        body = self.body
        self._load_registers()
        before = dict(body.numbers)
        for number in range(self.piece.first, self.piece.end):
            body.instruction, body.number = self.program.module.instructions[number], number
            self._instruction(body.instruction)
        counter = self._counter()
        self._store_registers(before)
        pointer = body.make(f"getelementptr i64, ptr %frame, i64 {COUNTERS}")
        pointer = body.make(f"getelementptr i64, ptr {pointer}, i64 %lane")
        body.add(f"store i64 {counter}, ptr {pointer}")
        return self._function()

    def _function(self) -> str:
        """What was written, in a loop over the threads."""
        places = [
            f"%own{width} = getelementptr i{width}, ptr %registers, i64 %lane"
            for width in (8, 16, 32, 64)
        ]
        lines = [
            f"define i64 @{piece_name(self.number)}(ptr %frame, ptr %registers, i64 %count) #0 {{",
            "begin:",
            *(f"{name} = {expression}" for expression, name in self.body.ahead.items()),
            "br label %loop",
            "loop:",
            "%k = phi i64 [ 0, %begin ], [ %k.next, %next ]",
            f"%at = add i64 %k, {THREADS_AT}",
            "%lane.at = getelementptr i64, ptr %frame, i64 %at",
            "%lane = load i64, ptr %lane.at",
            *places,
            *self.body.lines,
            "br label %next",
            "next:",
            "%k.next = add i64 %k, 1",
            "%more = icmp ult i64 %k.next, %count",
            "br i1 %more, label %loop, label %done",
            "done:",
            "ret i64 0",
            "stopped:",
            "ret i64 1",
            "}",
        ]
        return "\n".join(lines)

    def _instruction(self, instruction: Instruction) -> None:
        name = instruction.code[0]
        if name in JUMPS:
            return
        if name not in TRANSLATIONS:
            self.body.refuse("the instruction is not known")
        count = len(instruction.operands)
        if count != _operands(instruction):
            self.body.refuse(f"{count} operands are not as many as it has")
        TRANSLATIONS[name](self.body, instruction)

    # ---------------------------------------------------------------- registers in memory

    def _pointer(self, name: str) -> str:
        own = f"%own{max(self.body.width(name), 8)}"
        return self.body.make(f"getelementptr i8, ptr {own}, i64 {self.program.slots[name]}")

    def _load_registers(self) -> None:
        for name in sorted(self.program.live[self.number] & self._touched()):
            width = self.body.width(name)
            value = self.body.make(f"load i{max(width, 8)}, ptr {self._pointer(name)}")
            if width == 1:
                value = self.body.make(f"trunc i8 {value} to i1")
            self.body.numbers[name] = value

    def _touched(self) -> set[str]:
        touched = set[str]()
        for instruction in self.program.instructions(self.piece):
            for each in effects(instruction, self.program.module.registers):
                touched |= set(each)
        return touched

    def _store_registers(self, before: dict[str, str]) -> None:
        body = self.body
        for name in sorted(self.program.live_after(self.piece) & body.numbers.keys()):
            value = body.numbers[name]
            if before.get(name) != value:
                pointer = self._pointer(name)
                width = body.width(name)
                if width == 1:
                    value, width = body.make(f"zext i1 {value} to i8"), 8
                body.add(f"store i{width} {value}, ptr {pointer}")

    # ---------------------------------------------------------------- where to go

    def _counter(self) -> str:
        """The thread's next piece."""
        last, targets = self.body.instruction, self.piece.targets
        if last.code[0] == "brx":
            counter = self._branch_table(last)
        else:
            counter = str(targets[0])
        if last.code[0] == "trap":
            self._trap(last)
            return str(targets[-1])
        if last.code[0] in JUMPS and last.predicate is not None:
            guard, _ = self.body.raw(last.predicate)
            return self.body.make(f"select i1 {guard}, i64 {counter}, i64 {targets[-1]}")
        return counter

    def _branch_table(self, last: Instruction) -> str:
        body = self.body
        if last.predicate is not None:
            body.refuse("a guarded branch table")
        table = self.piece.targets
        index = body.read(last.operands[0], "u32")
        inside = body.make(f"icmp ult i32 {index}, {len(table)}")
        body.stop_unless(inside, BAD_BRANCH, body.make(f"zext i32 {index} to i64"))
        counter = str(table[-1])
        for k, target in enumerate(table[:-1]):
            here = body.make(f"icmp eq i32 {index}, {k}")
            counter = body.make(f"select i1 {here}, i64 {target}, i64 {counter}")
        return counter

    def _trap(self, last: Instruction) -> None:
        fine = "false"
        if last.predicate is not None:
            fine = self.body.make(f"xor i1 {self.body.raw(last.predicate)[0]}, true")
        self.body.stop_unless(fine, TRAP, "0")
