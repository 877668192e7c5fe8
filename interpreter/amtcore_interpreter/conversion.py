"""Comparisons, choices, moves and conversions, by the LLVM instructions that mean the same.

Saturation, NaN and rounding of conversions follow the text of `cvt` in the PTX ISA: a float out of
an integer's range becomes the nearest integer; NaN becomes 0, or only the highest bit where the
source is float64 or the result has 64 bits.
"""

from __future__ import annotations

from amtcore_interpreter.arithmetic import (
    arithmetic_flushes,
    flushed,
    intrinsic,
    is_float,
    kind_of,
)
from amtcore_interpreter.body import Body, Translations, llvm_type
from amtcore_interpreter.ptx import Group, Instruction, Operand, Pair, width_of

#: How the instructions of this file are translated, by the first part of their names.
CONVERSIONS = Translations()

# -------------------------------------------------------------------- comparison and choice

_INTEGER_ORDER = {"lt", "le", "gt", "ge"}
_UNSIGNED_ORDER = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
_FLOAT_COMPARISONS = {
    **{name: f"o{name}" for name in ("eq", "lt", "le", "gt", "ge")},
    **{f"{name}u": f"u{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "ne": "one",
    "num": "ord",
    "nan": "uno",
}


def _comparison(body: Body, name: str, kind: str) -> str:
    """LLVM's instruction and condition for a comparison of PTX."""
    if is_float(kind):
        if name in _FLOAT_COMPARISONS:
            return f"fcmp {_FLOAT_COMPARISONS[name]}"
    elif name in ("eq", "ne"):
        return f"icmp {name}"
    elif kind[0] in "us" and name in _INTEGER_ORDER:
        return f"icmp {kind[0]}{name}"
    elif kind[0] == "u" and name in _UNSIGNED_ORDER:
        return f"icmp {_UNSIGNED_ORDER[name]}"
    body.refuse(f"the comparison .{name} is not known for .{kind}")


@CONVERSIONS.of("setp")
def _setp(body: Body, i: Instruction) -> None:
    kind, modifiers = i.code[-1], list(i.code[2:-1])
    if "ftz" in modifiers:
        modifiers.remove("ftz")
    if len(modifiers) > 1 or not {*modifiers} <= {"and", "or", "xor"}:
        body.refuse("a modifier is not known")
    arithmetic_flushes(body, kind, set(i.code[2:-1]))
    left, right = (body.read(each, kind) for each in i.operands[1:3])
    result = body.make(f"{_comparison(body, i.code[1], kind)} {llvm_type(kind)} {left}, {right}")
    opposite = body.make(f"xor i1 {result}, true")
    if modifiers:
        other = body.read(i.operands[3], "pred")
        result = body.make(f"{modifiers[0]} i1 {result}, {other}")
        opposite = body.make(f"{modifiers[0]} i1 {opposite}, {other}")
    target = i.operands[0]
    if isinstance(target, Pair):
        body.write(target.second, opposite, "pred")
        target = target.first
    body.write(target, result, "pred")


@CONVERSIONS.of("selp")
def _selp(body: Body, i: Instruction) -> None:
    kind, _ = kind_of(body, i)
    yes, no = (body.read(each, kind) for each in i.operands[1:3])
    which = body.read(i.operands[3], "pred")
    of = llvm_type(kind)
    body.write(i.operands[0], body.make(f"select i1 {which}, {of} {yes}, {of} {no}"), kind)


# -------------------------------------------------------------------- moves


@CONVERSIONS.of("mov")
def _mov(body: Body, i: Instruction) -> None:
    kind, _ = kind_of(body, i, kinds="usbfp")
    target, source = i.operands
    if isinstance(source, Group):
        body.write(target, _packed(body, source.items, kind), kind)
    elif isinstance(target, Group):
        _unpack(body, target.items, body.read(source, kind), kind)
    else:
        body.write(target, body.read(source, kind), kind)


def _packed(body: Body, parts: tuple[Operand, ...], kind: str) -> str:
    """The parts side by side in one number, the first one lowest."""
    whole = width_of(kind)
    part = whole // len(parts)
    result = "0"
    for k, each in enumerate(parts):
        wide = body.make(f"zext i{part} {body.read(each, f'b{part}')} to i{whole}")
        placed = body.make(f"shl i{whole} {wide}, {part * k}")
        result = body.make(f"or i{whole} {result}, {placed}")
    return result


def _unpack(body: Body, parts: tuple[Operand, ...], value: str, kind: str) -> None:
    whole = width_of(kind)
    part = whole // len(parts)
    for k, each in enumerate(parts):
        shifted = body.make(f"lshr i{whole} {value}, {part * k}")
        body.write(each, body.make(f"trunc i{whole} {shifted} to i{part}"), f"b{part}")


# -------------------------------------------------------------------- conversions

_ROUNDINGS = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@CONVERSIONS.of("cvt")
def _cvt(body: Body, i: Instruction) -> None:
    to, source = i.code[-2:]
    modifiers = set(i.code[1:-2])
    unknown = modifiers - {"rn", "ftz", *_ROUNDINGS}
    if unknown:
        body.refuse(f"the modifier .{min(unknown)} is not known")
    value = body.read_narrow(i.operands[1], source)
    if is_float(source) and is_float(to):
        result = _float_to_float(body, value, source, to, modifiers)
    elif is_float(source):
        result = _float_to_integer(body, value, source, to, modifiers)
    elif is_float(to):
        if modifiers - {"ftz"} != {"rn"}:
            body.refuse("expected .rn")
        signed = "s" if source[0] == "s" else "u"
        result = body.make(f"{signed}itofp {llvm_type(source)} {value} to {llvm_type(to)}")
    else:
        result = _integer_to_integer(body, value, source, to)
    body.write_wide(i.operands[0], result, to)


def _rounding(body: Body, modifiers: set[str]) -> str:
    found = [name for mode, name in _ROUNDINGS.items() if mode in modifiers]
    if len(found) != 1 or "rn" in modifiers:
        body.refuse(f"expected one rounding, .{', .'.join(_ROUNDINGS)}")
    return found[0]


def _float_to_float(body: Body, value: str, source: str, to: str, modifiers: set[str]) -> str:
    if source == to:
        value = flushed(body, value, source, modifiers)
        return intrinsic(body, _rounding(body, modifiers), source, value)
    arithmetic_flushes(body, "f32", modifiers)
    if to == "f64":
        if modifiers - {"ftz"}:
            body.refuse("nothing is rounded: expected no modifier but .ftz")
        return body.make(f"fpext float {value} to double")
    if modifiers - {"ftz"} != {"rn"}:
        body.refuse("expected .rn")
    return body.make(f"fptrunc double {value} to float")


def _float_to_integer(body: Body, value: str, source: str, to: str, modifiers: set[str]) -> str:
    value = flushed(body, value, source, modifiers)
    whole = intrinsic(body, _rounding(body, modifiers), source, value)
    of, name = llvm_type(to), "fptosi" if to[0] == "s" else "fptoui"
    result = body.call(of, f"llvm.{name}.sat.{of}.{source}", f"{llvm_type(source)} {whole}")
    if source == "f64" or width_of(to) == 64:
        nan = body.make(f"fcmp uno {llvm_type(source)} {value}, {value}")
        highest = -(1 << width_of(to) - 1)
        result = body.make(f"select i1 {nan}, {of} {highest}, {of} {result}")
    return result


def _integer_to_integer(body: Body, value: str, source: str, to: str) -> str:
    if width_of(to) == width_of(source):
        return value
    if width_of(to) < width_of(source):
        return body.make(f"trunc {llvm_type(source)} {value} to {llvm_type(to)}")
    extend = "sext" if source[0] == "s" else "zext"
    return body.make(f"{extend} {llvm_type(source)} {value} to {llvm_type(to)}")
