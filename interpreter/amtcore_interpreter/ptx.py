"""A PTX module, taken apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from amtcore.errors import KernelError

#: The types there are, and their bits. Half-precision floats are not among them.
_BITS = {f"{letter}{bits}": bits for letter in "usb" for bits in (8, 16, 32, 64)}
_BITS |= {"pred": 1, "f32": 32, "f64": 64}


@dataclass(frozen=True)
class Name:
    """A register, a special register, a variable or a label."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Number:
    """A literal: an integer, or the bits of a float32 or float64."""

    value: int
    kind: str = "integer"  # "integer", "f32" or "f64"


@dataclass(frozen=True)
class Address:
    """[base + offset]; a base that is a number is an absolute address."""

    base: Name | Number
    offset: int


@dataclass(frozen=True)
class Group:
    """{a, b, ..}: the registers of a vector."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """d|p: the two results of a shuffle or a comparison."""

    first: Name
    second: Name


Operand = Name | Number | Address | Group | Pair


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        text: As it stands in the module, for messages.
        predicate: The register that guards it, if any.
        code: The parts of its name: ("ld", "global", "v4", "f32").
        operands: In order.
    """

    text: str
    predicate: Name | None
    code: tuple[str, ...]
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Variable:
    """Memory that the module declares.

    Attributes:
        space: "global", "const", "shared" or "local".
        data: Its first bytes; zeros follow up to `size`.
    """

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""


@dataclass
class Module:
    """An entry with all that it needs.

    Attributes:
        parameters: Names, in order; each is 8 bytes.
        registers: Width in bits of each register; 1 for predicates.
        labels: The instruction that each label stands before.
        tables: Labels of each branch table.
    """

    entry: str = ""
    parameters: list[str] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)


def width_of(kind: str) -> int:
    """Bits of a type by its name, 1 for `pred`; `KernelError` where it is not known."""
    if kind not in _BITS:
        raise KernelError(f"the interpreter has no type .{kind}: expected one of 8 to 64 bits")
    return _BITS[kind]
