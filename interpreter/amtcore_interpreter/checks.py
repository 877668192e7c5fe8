"""What a piece calls where an access is not within the window that it last had.

LLVM assembly, as the pieces are: `stop` writes down why a thread does not go on, `miss` does so for
an address; `find` looks for a window of the launch, `own` for a generic address in the thread's own
shared or local memory.
"""

from __future__ import annotations

from amtcore_interpreter.body import (
    ADDRESS,
    INSTRUCTION,
    LOCAL,
    MISALIGNED,
    OUTSIDE,
    REASON,
    SHARED,
    THREAD,
    WINDOW_COUNT,
    WINDOWS,
)
from amtcore_interpreter.program import Program


def checks(program: Program) -> str:
    """The functions, for the variables of this program."""
    return _STOP_AND_FIND + _own(program)


def _own(program: Program) -> str:
    lines = ["define internal i1 @own(ptr %frame, i64 %lane, i64 %address, i64 %size) noinline {"]
    bases = {"shared": ("shared.0", SHARED), "local": ("local.0", LOCAL)}
    for name, word in bases.values():
        lines.append(f"  %{name}.at = getelementptr i64, ptr %frame, i64 {word}")
        lines.append(f"  %{name} = load i64, ptr %{name}.at")
    lines.append(f"  %thread = mul i64 %lane, {program.sizes['local']}")
    lines.append("  %local.1 = add i64 %local.0, %thread")
    lines.append("  %r0 = and i1 false, false")
    count = 0
    for space, base in (("shared", "%shared.0"), ("local", "%local.1")):
        for variable in program.variables(space):
            k, count = count, count + 1
            lines += [
                f"  %a{k} = sub i64 %address, {base}",
                f"  %o{k} = sub i64 %a{k}, {program.windows[variable.name]}",
                f"  %e{k} = add i64 %o{k}, %size",
                f"  %s{k} = icmp ult i64 %o{k}, {max(variable.size, 1)}",
                f"  %t{k} = icmp ule i64 %e{k}, {variable.size}",
                f"  %u{k} = and i1 %s{k}, %t{k}",
                f"  %r{k + 1} = or i1 %r{k}, %u{k}",
            ]
    return "\n".join([*lines, f"  ret i1 %r{count}", "}", ""])


_WHERE = "ptr %frame, i64 %address, i64 %lane, i64 %number"

_STOP_AND_FIND = f"""
define internal void @stop({_WHERE}, i64 %reason) noinline {{
  %instruction.at = getelementptr i64, ptr %frame, i64 {INSTRUCTION}
  store i64 %number, ptr %instruction.at
  %address.at = getelementptr i64, ptr %frame, i64 {ADDRESS}
  store i64 %address, ptr %address.at
  %thread.at = getelementptr i64, ptr %frame, i64 {THREAD}
  store i64 %lane, ptr %thread.at
  %reason.at = getelementptr i64, ptr %frame, i64 {REASON}
  store i64 %reason, ptr %reason.at
  ret void
}}

define internal void @miss({_WHERE}, i64 %size) noinline {{
  %mask = sub i64 %size, 1
  %rest = and i64 %address, %mask
  %aligned = icmp eq i64 %rest, 0
  %reason = select i1 %aligned, i64 {OUTSIDE}, i64 {MISALIGNED}
  call void @stop(ptr %frame, i64 %address, i64 %lane, i64 %number, i64 %reason)
  ret void
}}

define internal i1 @find({_WHERE}, i64 %size, ptr %site, i1 %generic) noinline {{
begin:
  %windows.at = getelementptr i64, ptr %frame, i64 {WINDOWS}
  %windows.address = load i64, ptr %windows.at
  %windows = inttoptr i64 %windows.address to ptr
  %count.at = getelementptr i64, ptr %frame, i64 {WINDOW_COUNT}
  %count = load i64, ptr %count.at
  %mask = sub i64 %size, 1
  %keep = xor i64 %mask, -1
  %rest = and i64 %address, %mask
  %aligned = icmp eq i64 %rest, 0
  br i1 %aligned, label %next, label %no
next:
  %k = phi i64 [ 0, %begin ], [ %k.next, %look ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %look, label %nowhere
look:
  %first = shl i64 %k, 1
  %low.at = getelementptr i64, ptr %windows, i64 %first
  %low = load i64, ptr %low.at
  %length.at = getelementptr i64, ptr %low.at, i64 1
  %length = load i64, ptr %length.at
  %offset = sub i64 %address, %low
  %room = sub i64 %length, %size
  %large = icmp uge i64 %length, %size
  %within = icmp ule i64 %offset, %room
  %inside = and i1 %large, %within
  %k.next = add i64 %k, 1
  br i1 %inside, label %yes, label %next
yes:
  %up = add i64 %low, %mask
  %begin.at = and i64 %up, %keep
  store i64 %begin.at, ptr %site
  %end = add i64 %low, %length
  %span = sub i64 %end, %begin.at
  %steps = udiv i64 %span, %size
  %steps.at = getelementptr i64, ptr %site, i64 1
  store i64 %steps, ptr %steps.at
  ret i1 true
nowhere:
  %own = call i1 @own(ptr %frame, i64 %lane, i64 %address, i64 %size)
  %mine = and i1 %own, %generic
  br i1 %mine, label %there, label %no
there:
  ret i1 true
no:
  call void @miss({_WHERE}, i64 %size)
  ret i1 false
}}

"""
