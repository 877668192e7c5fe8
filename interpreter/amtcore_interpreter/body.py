"""The host's function of one piece, written as LLVM assembly: its threads one after the other.

    i64 piece(frame, registers, count): 0, or 1 where a thread did what a GPU stops at

`frame` is a warp's row of 64-bit words as named below; `registers` its register memory. Registers
are integers of their width; arithmetic sees them as floats where the instruction says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from amtcore.errors import KernelError
from amtcore.kernels.gpu.launcher import THREADS
from amtcore_interpreter.program import Piece, Program
from amtcore_interpreter.ptx import (
    Instruction,
    Name,
    Number,
    Operand,
    width_of,
)

#: Words of a frame: where a warp's memory lies, which warp it is, why it stopped, whether all
#: wait, whether the last thread goes first; then one word per thread: the threads that a piece is
#: for, program counters, and who waits.
SHARED, LOCAL, PARAMETERS, WINDOWS, WINDOW_COUNT, SITES, WARP, WARPS = range(8)
REASON, INSTRUCTION, ADDRESS, THREAD, WOKEN, BACKWARDS = range(8, 14)
THREADS_AT = 16
COUNTERS = THREADS_AT + THREADS
WAITING = COUNTERS + THREADS
FRAME_WORDS = WAITING + THREADS

#: Why a warp stopped.
OUTSIDE, MISALIGNED, TRAP, BAD_BRANCH, STUCK, NOT_IN_MASK, NO_SOURCE = range(1, 8)

_FLOATS = {"f32": "float", "f64": "double"}
#: Special registers of a grid of one-warp blocks whose numbers are known beforehand.
_FIXED = {
    "%tid.y": 0,
    "%tid.z": 0,
    "%ntid.x": THREADS,
    "%ntid.y": 1,
    "%ntid.z": 1,
    "%ctaid.y": 0,
    "%ctaid.z": 0,
    "%nctaid.y": 1,
    "%nctaid.z": 1,
    "%warpid": 0,
    "%nwarpid": 1,
}


def llvm_type(kind: str) -> str:
    """The LLVM type of a PTX type."""
    return _FLOATS.get(kind) or f"i{width_of(kind)}"


class Body:
    """What is being written: lines, and the numbers that registers have so far.

    Attributes:
        instruction: The one being translated, for messages.
        number: Its place in the module.
        flushing: Whether float32 arithmetic flushes subnormals, as seen so far.
    """

    def __init__(self, program: Program, piece: Piece) -> None:
        self.program = program
        self.lines: list[str] = []
        self.ahead: dict[str, str] = {}
        self.block = "loop"
        self.numbers: dict[str, str] = {}
        self.instruction = program.module.instructions[piece.first]
        self.number = piece.first
        self.flushing: set[bool] = set()
        self._views: dict[tuple[str, str], str] = {}
        self._made = 0

    # ---------------------------------------------------------------- lines

    def add(self, line: str) -> None:
        self.lines.append(line)

    def make(self, expression: str) -> str:
        """A new name for the result of an LLVM instruction."""
        self._made += 1
        self.lines.append(f"%v{self._made} = {expression}")
        return f"%v{self._made}"

    def once(self, expression: str) -> str:
        """The same for what depends on the arguments only: it is made ahead of the threads."""
        return self.ahead.setdefault(expression, f"%a{len(self.ahead)}")

    def call(self, result: str, function: str, *arguments: str) -> str:
        return self.make(f"call {result} @{function}({', '.join(arguments)})")

    def labels(self, count: int) -> list[str]:
        self._made += 1
        return [f"b{self._made}.{k}" for k in range(count)]

    def begin(self, label: str) -> None:
        self.add(f"{label}:")
        self.block = label

    def refuse(self, why: str) -> NoReturn:
        raise KernelError(
            f"kernel {self.program.module.entry}: {self.instruction.text!r} is not interpreted: "
            f"{why}"
        )

    # ---------------------------------------------------------------- registers

    def width(self, name: str) -> int:
        width = self.program.module.registers.get(name)
        return width or self.refuse(f"{name} is not declared")

    def raw(self, operand: Operand) -> tuple[str, int]:
        """A register's number as it is, with its width in bits."""
        if not isinstance(operand, Name) or operand.name not in self.program.module.registers:
            self.refuse("a register was expected")
        value = self.numbers[operand.name]
        if operand.negated:
            value = self.make(f"xor i1 {value}, true")
        return value, self.width(operand.name)

    def read(self, operand: Operand, kind: str) -> str:
        """An operand as a number of a PTX type, in its LLVM type."""
        if isinstance(operand, Number):
            return self._literal(operand, kind)
        if not isinstance(operand, Name):
            self.refuse("a register, a number or a variable was expected")
        if operand.name not in self.program.module.registers:
            return self._special(operand.name, kind)
        value, width = self.raw(operand)
        if width != width_of(kind):
            self.refuse(f"{operand.name} has {width} bits: expected those of .{kind}")
        return self.view(value, kind)

    def view(self, value: str, kind: str) -> str:
        """The bits `value` as a float where `kind` is one."""
        if kind not in _FLOATS:
            return value
        key = (value, kind)
        if key not in self._views:
            self._views[key] = self.make(f"bitcast i{width_of(kind)} {value} to {_FLOATS[kind]}")
        return self._views[key]

    def write(self, operand: Operand, value: str, kind: str) -> None:
        """Set a register of the width of `kind`; if guarded, only where the guard holds."""
        if not isinstance(operand, Name):
            self.refuse("a register was expected as the result")
        if operand.name == "_":
            return
        width = self.width(operand.name)
        if width != width_of(kind):
            self.refuse(f"{operand.name} has {width} bits: expected those of .{kind}")
        bits = value
        if kind in _FLOATS:
            bits = self.make(f"bitcast {_FLOATS[kind]} {value} to i{width}")
            self._views[(bits, kind)] = value
        if self.instruction.predicate is not None:
            guard, _ = self.raw(self.instruction.predicate)
            old = self.numbers[operand.name]
            bits = self.make(f"select i1 {guard}, i{width} {bits}, i{width} {old}")
        self.numbers[operand.name] = bits

    def write_wide(self, operand: Operand, value: str, kind: str) -> None:
        """Set a register that may be wider than `kind`, whose sign then fills it."""
        if not isinstance(operand, Name):
            self.refuse("a register was expected as the result")
        if operand.name == "_":
            return
        width, own = self.width(operand.name), width_of(kind)
        if width < own:
            self.refuse(f"{operand.name} has {width} bits: too few for .{kind}")
        if width > own:
            bits = self.bits(value, kind)
            extend = "sext" if kind[0] == "s" else "zext"
            value = self.make(f"{extend} i{own} {bits} to i{width}")
            kind = f"b{width}"
        self.write(operand, value, kind)

    def bits(self, value: str, kind: str) -> str:
        """A number in its LLVM type, as an integer."""
        if kind in _FLOATS:
            return self.make(f"bitcast {_FLOATS[kind]} {value} to i{width_of(kind)}")
        return value

    def read_narrow(self, operand: Operand, kind: str) -> str:
        """An operand of a conversion or a store: the low bits of a wider register."""
        if isinstance(operand, Name) and operand.name in self.program.module.registers:
            value, width = self.raw(operand)
            if width > width_of(kind) and kind not in _FLOATS:
                return self.make(f"trunc i{width} {value} to i{width_of(kind)}")
            if kind in _FLOATS and width > width_of(kind):
                return self.view(self.make(f"trunc i{width} {value} to i32"), kind)
        return self.read(operand, kind)

    # ---------------------------------------------------------------- what is no register

    def _literal(self, number: Number, kind: str) -> str:
        width = width_of(kind)
        if kind == "pred":
            return "true" if number.value else "false"
        if number.kind in _FLOATS and width_of(number.kind) != width:
            self.refuse(f"a literal of .{number.kind} where .{kind} was expected")
        if kind in _FLOATS and number.kind not in _FLOATS:
            self.refuse("an integer literal where a fraction was expected")
        value = number.value % (1 << width)
        if kind in _FLOATS:
            return f"bitcast (i{width} {value} to {_FLOATS[kind]})"
        return str(value)

    def _special(self, name: str, kind: str) -> str:
        """A special register or the address of a variable."""
        width = width_of(kind)
        variable = self.program.module.variables.get(name)
        if variable is not None and kind not in _FLOATS:
            if width == 64 or (width == 32 and variable.space in ("shared", "local")):
                return str(self.program.windows[name])
        if width != 32 or kind in _FLOATS:
            self.refuse(f"{name} is no register, special register or variable of .{kind}")
        if name in ("%tid.x", "%laneid"):
            return self.make("trunc i64 %lane to i32")
        if name in ("%ctaid.x", "%nctaid.x"):
            word = self.word(WARP if name == "%ctaid.x" else WARPS)
            return self.make(f"trunc i64 {word} to i32")
        if name in _FIXED:
            return str(_FIXED[name])
        self.refuse(f"{name} is not known")

    def word(self, index: int) -> str:
        """A word of the frame."""
        return self.once(
            f"load i64, ptr {self.once(f'getelementptr i64, ptr %frame, i64 {index}')}"
        )

    def pointer(self, index: int) -> str:
        """A word of the frame that is an address."""
        return self.once(f"inttoptr i64 {self.word(index)} to ptr")

    def stop_unless(self, fine: str, reason: int, about: str) -> None:
        """Where `fine` is false, say why the thread cannot go on, and leave; `about` is an i64."""
        go, stop = self.labels(2)
        self.add(f"br i1 {fine}, label %{go}, label %{stop}")
        self.begin(stop)
        self.add(f"call void @stop({self.where(about)}, i64 {reason})")
        self.add("br label %stopped")
        self.begin(go)

    def where(self, about: str) -> str:
        """The arguments that say which thread does what with which address."""
        return f"ptr %frame, i64 {about}, i64 %lane, i64 {self.number}"


_Function = TypeVar("_Function", bound=Callable[[Body, Instruction], None])


class Translations(dict[str, Callable[[Body, Instruction], None]]):
    """What writes each instruction, by the first part of its name."""

    def of(self, *names: str) -> Callable[[_Function], _Function]:
        """Say what a function translates."""

        def add(function: _Function) -> _Function:
            self.update(dict.fromkeys(names, function))
            return function

        return add
