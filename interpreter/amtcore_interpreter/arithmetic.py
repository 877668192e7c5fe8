"""Arithmetic, logic and moves: each PTX instruction by the LLVM instruction that means the same.

Floats are rounded to nearest at every instruction and never contracted; an addition or a
multiplication without `.rn` is refused, because a GPU's assembler may contract it. With `.ftz`
arithmetic relies on the host's processor, which is told to flush (`launcher`); what is done with
bits or comparisons here flushes by itself. What is not a number has the bits that the host gives.
"""

from __future__ import annotations

from amtcore_interpreter.body import Body, Translations, llvm_type
from amtcore_interpreter.ptx import Instruction, Number, Operand, width_of

#: How the instructions of this file are translated, by the first part of their names.
ARITHMETIC = Translations()


def kind_of(body: Body, i: Instruction, *allowed: str, kinds: str = "usbf") -> tuple[str, set[str]]:
    """The type an instruction ends with and its modifiers, none of which may be unknown; `kinds`
    are the first letters of the types it is defined for."""
    kind, modifiers = i.code[-1], set(i.code[1:-1])
    if kind[0] not in kinds:
        body.refuse(f"not for .{kind}")
    unknown = modifiers - set(allowed)
    if unknown:
        body.refuse(f"the modifier .{min(unknown)} is not known")
    return kind, modifiers


def arithmetic_flushes(body: Body, kind: str, modifiers: set[str]) -> None:
    """Note whether float32 arithmetic flushes: the host can do it one way at a time."""
    if kind == "f32":
        body.flushing.add("ftz" in modifiers)


def flushed(body: Body, value: str, kind: str, modifiers: set[str]) -> str:
    """A float32 whose subnormals are zeros of the same sign, where `.ftz` asks for that."""
    if kind != "f32" or "ftz" not in modifiers:
        return value
    bits = body.make(f"bitcast float {value} to i32")
    exponent = body.make(f"and i32 {bits}, {0x7F800000}")
    small = body.make(f"icmp eq i32 {exponent}, 0")
    sign = body.make(f"and i32 {bits}, {0x80000000}")
    bits = body.make(f"select i1 {small}, i32 {sign}, i32 {bits}")
    return body.make(f"bitcast i32 {bits} to float")


def is_float(kind: str) -> bool:
    return kind[0] == "f"


def suffix(kind: str) -> str:
    """What an LLVM intrinsic's name ends with: f32, f64, i32, .."""
    return kind if is_float(kind) else f"i{width_of(kind)}"


def intrinsic(body: Body, name: str, kind: str, *values: str, more: str = "") -> str:
    """Call an LLVM intrinsic on numbers of one type."""
    typed = ", ".join(f"{llvm_type(kind)} {value}" for value in values)
    return body.call(llvm_type(kind), f"llvm.{name}.{suffix(kind)}", typed + more)


# -------------------------------------------------------------------- floats and sums


@ARITHMETIC.of("add", "sub", "mul", "mad", "fma", "div", "rem")
def _arithmetic(body: Body, i: Instruction) -> None:
    if is_float(i.code[-1]):
        _float_arithmetic(body, i)
    elif i.code[0] in ("div", "rem"):
        _integer_division(body, i)
    elif i.code[0] in ("mul", "mad"):
        _integer_product(body, i)
    elif i.code[0] in ("add", "sub"):
        kind, _ = kind_of(body, i)
        left, right = (body.read(each, kind) for each in i.operands[1:])
        body.write(i.operands[0], body.make(f"{i.code[0]} {llvm_type(kind)} {left}, {right}"), kind)
    else:
        body.refuse(f"not for .{i.code[-1]}")


def _float_arithmetic(body: Body, i: Instruction) -> None:
    kind, modifiers = kind_of(body, i, "rn", "ftz")
    if i.code[0] in ("mad", "rem"):
        body.refuse(f"not for .{kind}")
    if "rn" not in modifiers:
        body.refuse("how it is rounded is left open: expected .rn")
    arithmetic_flushes(body, kind, modifiers)
    values = [body.read(each, kind) for each in i.operands[1:]]
    if i.code[0] == "fma":
        result = intrinsic(body, "fma", kind, *values)
    else:
        result = body.make(f"f{i.code[0]} {llvm_type(kind)} {values[0]}, {values[1]}")
    body.write(i.operands[0], result, kind)


@ARITHMETIC.of("sqrt", "rcp")
def _root(body: Body, i: Instruction) -> None:
    kind, modifiers = kind_of(body, i, "rn", "ftz", kinds="f")
    if "rn" not in modifiers:
        body.refuse("an approximation has no defined result: expected .rn")
    arithmetic_flushes(body, kind, modifiers)
    value = body.read(i.operands[1], kind)
    if i.code[0] == "sqrt":
        result = intrinsic(body, "sqrt", kind, value)
    else:
        one = body.read(Number(0x3F800000 if kind == "f32" else 0x3FF << 52, kind), kind)
        result = body.make(f"fdiv {llvm_type(kind)} {one}, {value}")
    body.write(i.operands[0], result, kind)


@ARITHMETIC.of("neg", "abs")
def _sign(body: Body, i: Instruction) -> None:
    kind, modifiers = kind_of(body, i, "ftz", kinds="sf")
    value = body.read(i.operands[1], kind)
    if is_float(kind):
        whole = flushed(body, value, kind, modifiers)
        if i.code[0] == "neg":
            result = body.make(f"fneg {llvm_type(kind)} {whole}")
        else:
            result = intrinsic(body, "fabs", kind, whole)
    elif i.code[0] == "neg":
        result = body.make(f"sub {llvm_type(kind)} 0, {value}")
    else:
        result = intrinsic(body, "abs", kind, value, more=", i1 false")
    body.write(i.operands[0], result, kind)


@ARITHMETIC.of("min", "max")
def _extreme(body: Body, i: Instruction) -> None:
    """Of a number and NaN the number, or NaN with `.NaN`; -0 is below +0."""
    kind, modifiers = kind_of(body, i, "ftz", "NaN", kinds="usf")
    values = [body.read(each, kind) for each in i.operands[1:]]
    if is_float(kind):
        arithmetic_flushes(body, kind, modifiers)
        values = [flushed(body, value, kind, modifiers) for value in values]
        result = intrinsic(body, f"{i.code[0]}imum", kind, *values)
        if "NaN" not in modifiers:
            # LLVM 20 compiles `minimumnum` and `maximumnum` wrongly for x86.
            for one, other in (values, values[::-1]):
                is_nan = body.make(f"fcmp uno {llvm_type(kind)} {one}, {one}")
                result = body.make(
                    f"select i1 {is_nan}, {llvm_type(kind)} {other}, {llvm_type(kind)} {result}"
                )
    else:
        result = intrinsic(body, kind[0] + i.code[0], kind, *values)
    body.write(i.operands[0], result, kind)


@ARITHMETIC.of("copysign")
def _copysign(body: Body, i: Instruction) -> None:
    kind, _ = kind_of(body, i, kinds="f")
    sign, size = (body.read(each, kind) for each in i.operands[1:])
    body.write(i.operands[0], intrinsic(body, "copysign", kind, size, sign), kind)


#: The classes of `llvm.is.fpclass`: bits of quiet and signalling NaN, infinities, and so on.
_CLASSES = {
    "notanumber": 0x003,
    "infinite": 0x204,
    "normal": 0x108,
    "subnormal": 0x090,
    "finite": 0x1F8,
    "number": 0x3FC,
}


@ARITHMETIC.of("testp")
def _testp(body: Body, i: Instruction) -> None:
    which, kind = i.code[1], i.code[-1]
    if which not in _CLASSES or len(i.code) != 3:
        body.refuse(f"expected one of {', '.join(_CLASSES)}")
    value = body.read(i.operands[1], kind)
    result = body.call(
        "i1", f"llvm.is.fpclass.{kind}", f"{llvm_type(kind)} {value}, i32 {_CLASSES[which]}"
    )
    body.write(i.operands[0], result, "pred")


# -------------------------------------------------------------------- integers


def _integer_product(body: Body, i: Instruction) -> None:
    kind, modifiers = kind_of(body, i, "lo", "hi", "wide", kinds="us")
    width, result_kind = width_of(kind), kind
    values = [body.read(each, kind) for each in i.operands[1:3]]
    if modifiers == {"lo"}:
        result = body.make(f"mul i{width} {values[0]}, {values[1]}")
    elif modifiers in ({"hi"}, {"wide"}):
        double = 2 * width
        extend = "sext" if kind[0] == "s" else "zext"
        wide = [body.make(f"{extend} i{width} {value} to i{double}") for value in values]
        result = body.make(f"mul i{double} {wide[0]}, {wide[1]}")
        if modifiers == {"hi"}:
            high = body.make(f"lshr i{double} {result}, {width}")
            result = body.make(f"trunc i{double} {high} to i{width}")
        else:
            result_kind = f"{kind[0]}{double}"
    else:
        body.refuse("expected one of .lo, .hi, .wide")
    if i.code[0] == "mad":
        addend = body.read(i.operands[3], result_kind)
        result = body.make(f"add {llvm_type(result_kind)} {result}, {addend}")
    body.write(i.operands[0], result, result_kind)


def _integer_division(body: Body, i: Instruction) -> None:
    """By zero PTX leaves the quotient open: all ones, and the dividend remains, as on GPUs."""
    kind, _ = kind_of(body, i, kinds="us")
    of = llvm_type(kind)
    left, right = (body.read(each, kind) for each in i.operands[1:])
    zero = body.make(f"icmp eq {of} {right}, 0")
    avoid = zero
    if kind[0] == "s":
        # The least number by -1 traps on a host; by 1 it gives what wraps around.
        minus = body.make(f"icmp eq {of} {right}, -1")
        least = body.make(f"icmp eq {of} {left}, {-(1 << width_of(kind) - 1)}")
        overflow = body.make(f"and i1 {minus}, {least}")
        avoid = body.make(f"or i1 {zero}, {overflow}")
    safe = body.make(f"select i1 {avoid}, {of} 1, {of} {right}")
    result = body.make(f"{kind[0]}{i.code[0]} {of} {left}, {safe}")
    instead = "-1" if i.code[0] == "div" else left
    body.write(i.operands[0], body.make(f"select i1 {zero}, {of} {instead}, {of} {result}"), kind)


@ARITHMETIC.of("and", "or", "xor", "not")
def _logic(body: Body, i: Instruction) -> None:
    kind, _ = kind_of(body, i, kinds="bp")
    values = [body.read(each, kind) for each in i.operands[1:]]
    name = i.code[0]
    if name == "not":
        name, values = "xor", [*values, "-1"]
    body.write(i.operands[0], body.make(f"{name} {llvm_type(kind)} {values[0]}, {values[1]}"), kind)


@ARITHMETIC.of("shl", "shr")
def _shift(body: Body, i: Instruction) -> None:
    """By the width or more: nothing is left, or the sign."""
    kind, _ = kind_of(body, i)
    width, of = width_of(kind), llvm_type(kind)
    value, amount = body.read(i.operands[1], kind), body.read(i.operands[2], "u32")
    beyond = body.make(f"icmp ugt i32 {amount}, {width - 1}")
    amount = body.make(f"select i1 {beyond}, i32 {width - 1}, i32 {amount}")
    if width != 32:
        amount = body.make(f"{'zext' if width == 64 else 'trunc'} i32 {amount} to {of}")
    signed = i.code[0] == "shr" and kind[0] == "s"
    name = "shl" if i.code[0] == "shl" else "ashr" if signed else "lshr"
    result = body.make(f"{name} {of} {value}, {amount}")
    if not signed:
        result = body.make(f"select i1 {beyond}, {of} 0, {of} {result}")
    body.write(i.operands[0], result, kind)


@ARITHMETIC.of("shf")
def _funnel(body: Body, i: Instruction) -> None:
    """A 64-bit number (low word first) shifted; its high word to the left, low to the right."""
    if i.code[1:] not in {(way, how, "b32") for way in "lr" for how in ("wrap", "clamp")}:
        body.refuse("expected .l or .r, .wrap or .clamp, .b32")
    low, high, amount = (body.read(each, "b32") for each in i.operands[1:])
    left = i.code[1] == "l"
    result = intrinsic(body, "fshl" if left else "fshr", "b32", high, low, amount)
    if i.code[2] == "clamp":
        beyond = body.make(f"icmp ugt i32 {amount}, 31")
        result = body.make(f"select i1 {beyond}, i32 {low if left else high}, i32 {result}")
    body.write(i.operands[0], result, "b32")


@ARITHMETIC.of("popc", "clz", "brev")
def _bits(body: Body, i: Instruction) -> None:
    kind, _ = kind_of(body, i, kinds="b")
    name = {"popc": "ctpop", "clz": "ctlz", "brev": "bitreverse"}[i.code[0]]
    value = body.read(i.operands[1], kind)
    result = intrinsic(body, name, kind, value, more=", i1 false" if name == "ctlz" else "")
    if name != "bitreverse":
        if width_of(kind) == 64:
            result = body.make(f"trunc i64 {result} to i32")
        kind = "u32"
    body.write(i.operands[0], result, kind)


def _field(body: Body, position: Operand, length: Operand) -> tuple[str, str]:
    """Where a bit field begins and how long it is: the low bytes of two numbers."""
    at = body.make(f"and i32 {body.read(position, 'u32')}, 255")
    return at, body.make(f"and i32 {body.read(length, 'u32')}, 255")


def _sized(body: Body, amount: str, width: int) -> str:
    return amount if width == 32 else body.make(f"zext i32 {amount} to i64")


@ARITHMETIC.of("bfe")
def _bit_field_extract(body: Body, i: Instruction) -> None:
    """`length` bits from `position` on; signed, what lies above them repeats their highest."""
    kind, _ = kind_of(body, i, kinds="us")
    width, of = width_of(kind), llvm_type(kind)
    value = body.read(i.operands[1], kind)
    position, length = _field(body, i.operands[2], i.operands[3])
    top = width - 1
    at = _sized(body, intrinsic(body, "umin", "u32", position, str(top)), width)
    # One shift up and one down leave `length` bits; both stay below the width.
    above = intrinsic(body, "usub.sat", "u32", str(width), length)
    above = _sized(body, intrinsic(body, "umin", "u32", above, str(top)), width)
    down = "ashr" if kind[0] == "s" else "lshr"
    shifted = body.make(f"{down} {of} {value}, {at}")
    if kind[0] == "u":
        outside = body.make(f"icmp ugt i32 {position}, {top}")
        shifted = body.make(f"select i1 {outside}, {of} 0, {of} {shifted}")
    raised = body.make(f"shl {of} {shifted}, {above}")
    result = body.make(f"{down} {of} {raised}, {above}")
    none = body.make(f"icmp eq i32 {length}, 0")
    body.write(i.operands[0], body.make(f"select i1 {none}, {of} 0, {of} {result}"), kind)


@ARITHMETIC.of("bfi")
def _bit_field_insert(body: Body, i: Instruction) -> None:
    """The low `length` bits of the first number in place of the second's from `position` on."""
    kind, _ = kind_of(body, i, kinds="b")
    width, of = width_of(kind), llvm_type(kind)
    field, base = (body.read(each, kind) for each in i.operands[1:3])
    position, length = _field(body, i.operands[3], i.operands[4])
    top = width - 1
    at = _sized(body, intrinsic(body, "umin", "u32", position, str(top)), width)
    above = intrinsic(body, "usub.sat", "u32", str(width), length)
    above = _sized(body, intrinsic(body, "umin", "u32", above, str(top)), width)
    ones = body.make(f"lshr {of} -1, {above}")
    mask = body.make(f"shl {of} {ones}, {at}")
    outside = body.make(f"icmp ugt i32 {position}, {top}")
    none = body.make(f"icmp eq i32 {length}, 0")
    nothing = body.make(f"or i1 {outside}, {none}")
    mask = body.make(f"select i1 {nothing}, {of} 0, {of} {mask}")
    moved = body.make(f"shl {of} {field}, {at}")
    inside = body.make(f"and {of} {moved}, {mask}")
    kept = body.make(f"xor {of} {mask}, -1")
    rest = body.make(f"and {of} {base}, {kept}")
    body.write(i.operands[0], body.make(f"or {of} {inside}, {rest}"), kind)


@ARITHMETIC.of("prmt")
def _permute(body: Body, i: Instruction) -> None:
    """Any four of eight bytes; a selector above 7 repeats the byte's sign."""
    kind, _ = kind_of(body, i, kinds="b")
    low, high, selectors = (body.read(each, kind) for each in i.operands[1:])
    low, high = (body.make(f"zext i32 {each} to i64") for each in (low, high))
    both = body.make(f"or i64 {low}, {body.make(f'shl i64 {high}, 32')}")
    result = "0"
    for k in range(4):
        selector = body.make(f"lshr i32 {selectors}, {4 * k}")
        which = body.make(f"shl i32 {body.make(f'and i32 {selector}, 7')}, 3")
        shifted = body.make(f"lshr i64 {both}, {body.make(f'zext i32 {which} to i64')}")
        byte = body.make(f"trunc i64 {shifted} to i8")
        repeat = body.make(f"icmp ne i32 {body.make(f'and i32 {selector}, 8')}, 0")
        sign = body.make(f"ashr i8 {byte}, 7")
        byte = body.make(f"select i1 {repeat}, i8 {sign}, i8 {byte}")
        placed = body.make(f"shl i32 {body.make(f'zext i8 {byte} to i32')}, {8 * k}")
        result = body.make(f"or i32 {result}, {placed}")
    body.write(i.operands[0], result, "b32")
