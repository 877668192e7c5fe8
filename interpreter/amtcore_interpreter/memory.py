"""Loads, stores and atomics. Every access is checked before it is made.

Addresses of global memory are those of the host. Shared and local addresses count from the start of
a warp's and a thread's own memory; `cvta` makes host addresses of them. An access must lie within
one tensor of the launch or one variable, and at a multiple of its size, as on a GPU. Each global
access remembers the window that it found last, so that the next check is one comparison.
"""

from __future__ import annotations

from amtcore_interpreter.arithmetic import is_float
from amtcore_interpreter.body import (
    LOCAL,
    PARAMETERS,
    SHARED,
    SITES,
    Body,
    Translations,
    llvm_type,
)
from amtcore_interpreter.ptx import (
    Address,
    Group,
    Instruction,
    Name,
    Number,
    Operand,
    width_of,
)

#: How the instructions of this file are translated, by the first part of their names.
ACCESSES = Translations()

_SPACES = {"global", "shared", "local", "param", "const"}
#: Order and caching: of no consequence where one thread runs after the other.
_ORDER = {"volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "cta", "gpu", "sys"}
_CACHING = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"}
_VECTORS = {"v2": 2, "v4": 4}


def _space(body: Body, i: Instruction, allowed: set[str]) -> str:
    """The state space of an access, "" for a generic address; other modifiers must be allowed."""
    modifiers = list(i.code[1:-1])
    unknown = set(modifiers) - _SPACES - allowed
    if unknown:
        body.refuse(f"the modifier .{min(unknown)} is not known")
    return next((each for each in modifiers if each in _SPACES), "")


# -------------------------------------------------------------------- addresses


def _address(body: Body, operand: Operand) -> str:
    """Base and offset, as an i64."""
    if not isinstance(operand, Address):
        body.refuse("an address was expected")
    base = operand.base
    if isinstance(base, Number):
        return body.make(f"add i64 {base.value}, 0")
    if base.name in body.program.module.registers:
        value, width = body.raw(base)
        if width == 32:
            value = body.make(f"zext i32 {value} to i64")
    else:
        value = body.read(base, "b64")
    return body.make(f"add i64 {value}, {operand.offset}")


def _checked(body: Body, operand: Operand, space: str, size: int) -> str:
    """A pointer to `size` bytes that the thread may use; otherwise the thread stops there."""
    address = _address(body, operand)
    go, miss = body.labels(2)
    if space in ("shared", "local"):
        inside = _inside_own(body, space, address, size)
        host = body.make(f"add i64 {own_memory(body, space)}, {address}")
        body.add(f"br i1 {inside}, label %{go}, label %{miss}")
        body.begin(miss)
        body.add(f"call void @miss({body.where(address)}, i64 {size})")
        body.add("br label %stopped")
    else:
        host = address
        site = body.once(f"getelementptr i8, ptr {body.pointer(SITES)}, i64 {16 * body.number}")
        begin = body.make(f"load i64, ptr {site}")
        count = body.make(f"load i64, ptr {body.once(f'getelementptr i8, ptr {site}, i64 8')}")
        inside = _steps_below(body, address, begin, count, size)
        body.add(f"br i1 {inside}, label %{go}, label %{miss}")
        body.begin(miss)
        found = body.call(
            "i1", "find", body.where(address), f"i64 {size}", f"ptr {site}",
            f"i1 {'true' if space == '' else 'false'}",
        )  # fmt: skip
        body.add(f"br i1 {found}, label %{go}, label %stopped")
    body.begin(go)
    return body.make(f"inttoptr i64 {host} to ptr")


def _steps_below(body: Body, address: str, begin: str, count: str, size: int) -> str:
    """Whether an address is one of the first `count` multiples of `size` from `begin` on. The
    offset is turned right, so that one that is no multiple becomes a huge number."""
    offset = address if begin == "0" else body.make(f"sub i64 {address}, {begin}")
    if size > 1:
        step = size.bit_length() - 1
        offset = body.call("i64", "llvm.fshr.i64", *[f"i64 {offset}"] * 2, f"i64 {step}")
    return body.make(f"icmp ult i64 {offset}, {count}")


def _inside_own(body: Body, space: str, address: str, size: int) -> str:
    """Whether an access lies within one of the kernel's own shared or local variables."""
    inside = "false"
    for variable in body.program.variables(space):
        begin, count = body.program.windows[variable.name], str(variable.size // size)
        within = _steps_below(body, address, str(begin), count, size)
        inside = within if inside == "false" else body.make(f"or i1 {inside}, {within}")
    return inside


def own_memory(body: Body, space: str) -> str:
    """Host address of a warp's shared memory or a thread's local memory."""
    if space == "shared":
        return body.word(SHARED)
    offset = body.make(f"mul i64 %lane, {body.program.sizes['local']}")
    return body.make(f"add i64 {body.word(LOCAL)}, {offset}")


@ACCESSES.of("cvta")
def _cvta(body: Body, i: Instruction) -> None:
    """To a generic address, or `.to` one of a space."""
    space = i.code[-2]
    if space not in _SPACES or i.code[1:-2] not in ((), ("to",)) or width_of(i.code[-1]) != 64:
        body.refuse("expected .global, .shared, .local or .const, and 64 bits")
    value = body.read(i.operands[1], "b64")
    if space in ("shared", "local"):
        change = "sub" if "to" in i.code else "add"
        value = body.make(f"{change} i64 {value}, {own_memory(body, space)}")
    body.write(i.operands[0], value, "b64")


# -------------------------------------------------------------------- load and store


def _elements(body: Body, i: Instruction, operand: Operand) -> tuple[Operand, ...]:
    count = next((_VECTORS[each] for each in i.code if each in _VECTORS), 1)
    items = operand.items if isinstance(operand, Group) else (operand,)
    if len(items) != count:
        body.refuse(f"expected {count} registers")
    return items


def _guarded(body: Body) -> tuple[str, str, str]:
    """Begin what only happens where the guard holds: the blocks before, within and after."""
    before = body.block
    within, after = body.labels(2)
    if body.instruction.predicate is not None:
        guard, _ = body.raw(body.instruction.predicate)
        body.add(f"br i1 {guard}, label %{within}, label %{after}")
        body.begin(within)
    return before, within, after


def _rejoin(body: Body, before: str, after: str, results: dict[str, str]) -> None:
    """Go on for all threads; `results` are the new numbers of registers where the guard held."""
    if body.instruction.predicate is not None:
        end = body.block
        body.add(f"br label %{after}")
        body.begin(after)
        for name, value in results.items():
            old, of = body.numbers[name], f"i{body.width(name)}"
            results[name] = body.make(f"phi {of} [ {value}, %{end} ], [ {old}, %{before} ]")
    body.numbers.update(results)


def _fill(body: Body, operand: Operand, bits: str, kind: str) -> tuple[str, str]:
    """The number that a register gets from loaded bits: its sign or zeros fill a wider one."""
    if not isinstance(operand, Name):
        body.refuse("a register was expected as the result")
    width, own = body.width(operand.name), width_of(kind)
    if width < own:
        body.refuse(f"{operand.name} has {width} bits: too few for .{kind}")
    if width > own:
        bits = body.make(f"{'sext' if kind[0] == 's' else 'zext'} i{own} {bits} to i{width}")
    return operand.name, bits


@ACCESSES.of("ld")
def _load(body: Body, i: Instruction) -> None:
    space, kind = _space(body, i, _ORDER | _CACHING | {*_VECTORS}), i.code[-1]
    elements, width = _elements(body, i, i.operands[0]), width_of(kind)
    before, _, after = _guarded(body)
    if space == "param":
        pointer = _parameter(body, i.operands[1], width // 8 * len(elements))
    else:
        pointer = _checked(body, i.operands[1], space, width // 8 * len(elements))
    results = {}
    for k, element in enumerate(elements):
        at = body.make(f"getelementptr i{width}, ptr {pointer}, i64 {k}")
        bits = body.make(f"load i{width}, ptr {at}")
        if element != Name("_"):
            name, bits = _fill(body, element, bits, kind)
            results[name] = bits
    _rejoin(body, before, after, results)


def _parameter(body: Body, operand: Operand, size: int) -> str:
    known = body.program.module.parameters
    if not (isinstance(operand, Address) and isinstance(operand.base, Name)):
        body.refuse("a parameter was expected")
    if operand.base.name not in known or not 0 <= operand.offset <= 8 - size:
        body.refuse("it lies outside the kernel's parameters")
    at = 8 * known.index(operand.base.name) + operand.offset
    return body.once(f"getelementptr i8, ptr {body.pointer(PARAMETERS)}, i64 {at}")


@ACCESSES.of("st")
def _store(body: Body, i: Instruction) -> None:
    space, kind = _space(body, i, _ORDER | _CACHING | {*_VECTORS}), i.code[-1]
    if space in ("param", "const"):
        body.refuse(f".{space} cannot be written")
    width = width_of(kind)
    # What is stored are bits: a subnormal stays one.
    values = [body.read_narrow(each, f"b{width}") for each in _elements(body, i, i.operands[1])]
    before, _, after = _guarded(body)
    pointer = _checked(body, i.operands[0], space, width // 8 * len(values))
    for k, value in enumerate(values):
        at = body.make(f"getelementptr i{width}, ptr {pointer}, i64 {k}")
        body.add(f"store i{width} {value}, ptr {at}")
    _rejoin(body, before, after, {})


# -------------------------------------------------------------------- atomics

_ATOMICS = {
    "add": "add",
    "exch": "xchg",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "inc": "uinc_wrap",
    "dec": "udec_wrap",
}


@ACCESSES.of("atom", "red")
def _atomic(body: Body, i: Instruction) -> None:
    """One thread after the other, in their order; launches side by side see whole numbers too."""
    operation, kind = i.code[-2:]
    space = _space(body, i, {*_ORDER, operation})
    width = width_of(kind)
    if space not in ("global", "shared", "") or width < 32:
        body.refuse("expected .global or .shared, and 32 or 64 bits")
    if is_float(kind):
        if operation != "add" or (kind == "f32" and space != "global"):
            body.refuse("of floats, only .add is known, for .f32 in .global memory")
        if kind == "f32":
            body.flushing.add(True)  # It flushes, and has no modifier that says so.
    results = 0 if i.code[0] == "red" else 1
    values = [body.read(each, kind) for each in i.operands[results + 1 :]]
    before, _, after = _guarded(body)
    pointer = _checked(body, i.operands[results], space, width // 8)
    old = _exchanged(body, operation, kind, pointer, values)
    target = i.operands[0]
    kept = {}
    if results and target != Name("_"):
        name, bits = _fill(body, target, body.bits(old, kind), f"b{width}")
        kept[name] = bits
    _rejoin(body, before, after, kept)


def _exchanged(body: Body, operation: str, kind: str, pointer: str, values: list[str]) -> str:
    """What was in memory before the operation."""
    of = llvm_type(kind)
    if operation == "cas":
        expected, new = values
        both = body.make(f"cmpxchg ptr {pointer}, {of} {expected}, {of} {new} seq_cst seq_cst")
        return body.make(f"extractvalue {{{of}, i1}} {both}, 0")
    if operation in ("min", "max") and kind[0] in "us":
        name = ("u" if kind[0] == "u" else "") + operation
    elif is_float(kind):
        name = "fadd"
    elif operation in _ATOMICS:
        name = _ATOMICS[operation]
    else:
        body.refuse(f"the operation .{operation} is not known")
    return body.make(f"atomicrmw {name} ptr {pointer}, {of} {values[0]} seq_cst")


@ACCESSES.of("membar", "fence")
def _fence(body: Body, i: Instruction) -> None:
    """Nothing: what a thread did is seen by those that come after it."""
