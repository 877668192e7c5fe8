"""Reads PTX text as LLVM's back end writes it: one module with one entry.

What is read here is the grammar only (Parallel Thread Execution ISA, sections 4 to 6); whether an
instruction is known is decided where it is translated. Functions that are called, textures and
parameters other than 64-bit integers are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from amtcore.errors import KernelError
from amtcore_interpreter.ptx import (
    Address,
    Group,
    Instruction,
    Module,
    Name,
    Number,
    Operand,
    Pair,
    Variable,
    width_of,
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TOKEN = re.compile(
    r"""(?P<float>0[fF][0-9A-Fa-f]{8}|0[dD][0-9A-Fa-f]{16})
      | (?P<decimal>\d+\.\d+)
      | (?P<number>0[xX][0-9A-Fa-f]+U?|\d+U?(?![\w.]))
      | (?P<name>[.%$A-Za-z_][\w$.%]*(?:::\w[\w$.]*)*)
      | (?P<string>"[^"]*")
      | (?P<mark>[-{}()\[\],;:@!|+=<>])
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.X | re.S,
)

#: What stands outside functions, or between a function's name and its body, and changes nothing.
_IGNORED = {".file", ".loc", ".pragma", ".section", ".version", ".target", ".address_size"}
_TUNING = {".maxntid", ".minnctapersm", ".maxnreg", ".reqntid", ".maxnctapersm"}


def parse(text: str) -> Module:
    """Read a module; `KernelError` says what was not understood."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda match: " " * len(match[0]), text)
        self.tokens = list(self._tokens())
        self.at = 0
        self.found = Module()
        self.scopes: list[dict[str, str]] = []

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        for match in _TOKEN.finditer(self.text):
            kind = str(match.lastgroup)
            if kind == "other":
                where = self._line(match.start())
                raise KernelError(f"PTX: {match[0]!r} was not understood, in {where!r}")
            if kind != "space":
                yield kind, match[0], match.start()
        yield "end", "", len(self.text)

    def _line(self, at: int) -> str:
        """The line around a place in the text."""
        return self.text[self.text.rfind("\n", 0, at) + 1 :].split("\n", 1)[0].strip()

    # ---------------------------------------------------------------- tokens

    @property
    def next(self) -> str:
        return self.tokens[self.at][1]

    def take(self, wanted: str = "") -> str:
        """The next token, which must be `wanted` if that is given."""
        kind, token, begin = self.tokens[self.at]
        if kind == "end" or (wanted and token != wanted):
            raise KernelError(
                f"PTX: expected {wanted or 'more'!r}, got {token!r}, in {self._line(begin)!r}"
            )
        self.at += 1
        return token

    def taken(self, token: str) -> bool:
        if self.next != token:
            return False
        self.at += 1
        return True

    def integer(self) -> int:
        negative = self.taken("-")
        value = int(self.take().rstrip("U"), 0)
        return -value if negative else value

    # ---------------------------------------------------------------- the module

    def module(self) -> Module:
        while self.tokens[self.at][0] != "end":
            self._top()
        if not self.found.entry:
            raise KernelError("PTX: the module has no .entry")
        return self.found

    def _top(self) -> None:
        token = self.take()
        if token in (".visible", ".extern", ".weak", ".common"):
            return
        if token == ".entry":
            self._entry()
        elif token in (".global", ".const", ".shared"):
            self._variable(token[1:])
        elif token in _IGNORED:
            line_end = self.text.find("\n", self.tokens[self.at - 1][2])
            while self.tokens[self.at][0] != "end" and self.tokens[self.at][2] < line_end:
                self.at += 1
        else:
            raise KernelError(
                f"PTX: {token!r} is not interpreted: expected variables and one entry"
            )

    def _entry(self) -> None:
        if self.found.entry:
            raise KernelError(f"PTX: a second entry beside {self.found.entry!r}: expected one")
        self.found.entry = self.take()
        if self.taken("("):
            while not self.taken(")"):
                self._parameter()
                self.taken(",")
        while self.next in _TUNING:
            self.take()
            self.integer()
            while self.taken(","):
                self.integer()
        self.take("{")
        self.scopes.append({})
        while self.scopes:
            self._statement()

    def _parameter(self) -> None:
        self.take(".param")
        kind = self.take()[1:]
        while self.next.startswith("."):
            if self.take() == ".align":
                self.integer()
        name = self.take()
        if kind not in ("u64", "s64", "b64") or self.next == "[":
            raise KernelError(
                f"parameter {name} of kernel {self.found.entry} is a .{kind}: expected a 64-bit "
                "integer"
            )
        self.found.parameters.append(name)

    def _variable(self, space: str) -> None:
        """After the space: `.align 4 .b8 name[16] = {..};`."""
        align, kind = 1, ""
        while self.next.startswith("."):
            word = self.take()
            if word == ".align":
                align = self.integer()
            else:
                kind = word[1:]
        name, count = self.take(), 1
        width = width_of(kind) // 8
        while self.taken("["):
            if self.next == "]":
                raise KernelError(f"PTX: {name} has no size: shared memory must be static")
            count *= self.integer()
            self.take("]")
        data = self._initialiser(name, kind, width) if self.taken("=") else b""
        self.take(";")
        self.found.variables[name] = Variable(name, space, max(align, width), width * count, data)

    def _initialiser(self, name: str, kind: str, width: int) -> bytes:
        data, braces = b"", 0
        while self.next != ";":
            if self.taken("{"):
                braces += 1
            elif self.taken("}"):
                braces -= 1
            elif not self.taken(","):
                operand = self._operand()
                if not isinstance(operand, Number):
                    raise KernelError(f"PTX: {name} holds addresses: expected numbers only")
                data += (operand.value % (1 << 8 * width)).to_bytes(width, "little")
        return data

    # ---------------------------------------------------------------- statements

    def _statement(self) -> None:
        token = self.next
        if token == "{":
            self.take()
            self.scopes.append({})
        elif token == "}":
            self.take()
            self.scopes.pop()
        elif token == ".reg":
            self._registers()
        elif token in (".shared", ".local"):
            self._variable(self.take()[1:])
        elif token == ".pragma":
            while not self.taken(";"):
                self.take()
        elif token == ".loc":
            self._top()
        elif self.tokens[self.at + 1][1] == ":":
            self._label()
        elif token.startswith("."):
            raise KernelError(f"PTX: {token!r} is not interpreted inside a kernel")
        else:
            self._instruction()

    def _label(self) -> None:
        label = self.take()
        self.take(":")
        if self.taken(".branchtargets"):
            targets = [self.take()]
            while self.taken(","):
                targets.append(self.take())
            self.take(";")
            self.found.tables[label] = targets
        else:
            self.found.labels[label] = len(self.found.instructions)

    def _registers(self) -> None:
        self.take(".reg")
        width = width_of(self.take()[1:])
        while True:
            name = self.take()
            names = [name]
            if self.taken("<"):
                names = [f"{name}{i}" for i in range(self.integer())]
                self.take(">")
            for each in names:
                # An inner scope may declare a name again: it is another register.
                own = each if each not in self.found.registers else f"{each}#{self.at}"
                self.scopes[-1][each] = own
                self.found.registers[own] = width
            if not self.taken(","):
                break
        self.take(";")

    def _instruction(self) -> None:
        begin = self.tokens[self.at][2]
        predicate = None
        if self.taken("@"):
            negated = self.taken("!")
            predicate = Name(self._resolved(self.take()), negated)
        code = tuple(self.take().split("."))
        operands: list[Operand] = []
        while self.next != ";":
            operands.append(self._operand())
            if not self.taken(","):
                break
        end = self.tokens[self.at][2]
        self.take(";")
        text = " ".join(self.text[begin:end].split())
        self.found.instructions.append(Instruction(text, predicate, code, tuple(operands)))

    # ---------------------------------------------------------------- operands

    def _resolved(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _operand(self) -> Operand:
        kind, token, _ = self.tokens[self.at]
        if token == "{":
            return self._group()
        if token == "[":
            return self._address()
        if kind == "float":
            self.take()
            return Number(int(token[2:], 16), "f32" if token[1] in "fF" else "f64")
        if kind == "number" or token == "-":
            return Number(self.integer())
        if kind in ("decimal", "string"):
            raise KernelError(f"PTX: {token} is no operand: expected 0f.. or 0d.. for a fraction")
        negated = self.taken("!")
        name = Name(self._resolved(self.take()), negated)
        if self.taken("|"):
            return Pair(name, Name(self._resolved(self.take())))
        return name

    def _group(self) -> Group:
        self.take("{")
        items: list[Operand] = []
        while not self.taken("}"):
            items.append(self._operand())
            self.taken(",")
        return Group(tuple(items))

    def _address(self) -> Address:
        self.take("[")
        base = self._operand()
        self.taken("+")
        offset = 0 if self.next == "]" else self.integer()
        self.take("]")
        if isinstance(base, Number):
            return Address(Number(base.value + offset), 0)
        if not isinstance(base, Name):
            raise KernelError("PTX: an address must be a register, a variable or a number")
        return Address(base, offset)
