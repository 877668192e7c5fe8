"""What a GPU's machine code says before any GPU runs it: registers, spills, instructions.

ptxas and nvdisasm come with triton, which torch installs on Linux. ptxas assembles a kernel's PTX
for a chip, as the driver would; nvdisasm shows the instructions, and beside each the control bits
in which ptxas wrote how long the issue waits and which scoreboard it waits for (Jia et al., 2018,
"Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", section 2.1).
"""

from __future__ import annotations

import functools
import heapq
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path("backends", "nvidia", "bin")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_WORD = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"\s*([.\w$]+):\s*$")
_TARGET = re.compile(r"`\(([.\w$]+)\)")
_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"*]+)")
_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
#: What ptxas says of a kernel, and what it is called here.
_FACTS = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
    "shared_bytes": r"(\d+) bytes smem",
}


class ToolMissingError(RuntimeError):
    """ptxas or nvdisasm is not installed."""


class RejectedError(ValueError):
    """ptxas does not accept a kernel."""


@functools.cache
def tool(name: str) -> Path:
    """Where ptxas or nvdisasm lies; triton is looked for, not imported."""
    found = importlib.util.find_spec("triton")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, _FOLDER, name)
        if os.access(path, os.X_OK):
            return path
    raise ToolMissingError(
        f"expected {name} below {_FOLDER} of the package triton, found none; install the torch of "
        "Linux on x86-64, which brings triton"
    )


@dataclass(frozen=True)
class Assembled:
    """A kernel for one chip.

    Args:
        arch: The chip, such as "sm_90".
        registers: Of a thread.
        stack_bytes: Local memory of a thread, spilled registers among it.
        spill_store_bytes, spill_load_bytes: Written to local memory for want of registers, and
            read again.
        shared_bytes: Static shared memory of a block.
        cubin: The machine code.
    """

    arch: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    cubin: bytes


def assemble(ptx: str, arch: str, contract: bool = True) -> Assembled:
    """Assemble a kernel.

    Args:
        ptx: Text with one entry.
        arch: "sm_80", "sm_90", ..; the text's own target or a newer one.
        contract: Whether ptxas may make an fma of a product and a sum, as the driver may.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [tool("ptxas"), "-v", f"-arch={arch}", f"-fmad={str(contract).lower()}"]
        done = subprocess.run(
            [*command, source, "-o", cubin], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RejectedError(f"ptxas for {arch}: {done.stdout}{done.stderr}".strip())
        said = done.stdout + done.stderr
        facts = {name: re.search(pattern, said) for name, pattern in _FACTS.items()}
        numbers = {name: int(found[1]) if found else 0 for name, found in facts.items()}
        return Assembled(arch=arch, cubin=cubin.read_bytes(), **numbers)


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Args:
        text: As nvdisasm shows it.
        opcode: Its name with modifiers, without the predicate: "FADD.FTZ".
        control: The bits from which its issue follows.
    """

    text: str
    opcode: str
    control: int

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def stall(self) -> int:
        """Cycles until the next instruction of the warp may issue."""
        return max(self.control & 15, 1)

    @property
    def sets(self) -> tuple[int, int]:
        """Scoreboards that its result and its reading of operands set; 7 is none."""
        return self.control >> 5 & 7, self.control >> 8 & 7

    @property
    def waits_for(self) -> int:
        """Mask of the scoreboards that it waits for."""
        return self.control >> 11 & 63


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel.

    Args:
        instructions: In the order of addresses.
        successors: Of each, the indices of those that may come next.
    """

    instructions: tuple[Instruction, ...]
    successors: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Args:
        header: Index of the instruction through which every round goes.
        body: Indices of all its instructions, wherever ptxas has put them.
    """

    header: int
    body: frozenset[int]


def disassemble(cubin: bytes) -> Code:
    """Instructions of a cubin with one kernel, and where they lead."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [tool("nvdisasm"), "-c", "-hex", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    low = 0
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            low = int(found[3], 16)
            opcode = _OPCODE.match(found[2])
            assert opcode, f"an instruction without an opcode: {line}"
            instructions.append(Instruction(found[2].strip(), opcode[1], low))
        elif second := _SECOND_WORD.match(line):
            last = instructions[-1]
            control = (low | int(second[1], 16) << 64) >> 105
            instructions[-1] = Instruction(last.text, last.opcode, control)
    return Code(tuple(instructions), _successors(instructions, labels))


def _successors(
    instructions: Sequence[Instruction], labels: dict[str, int]
) -> tuple[tuple[int, ...], ...]:
    """Where each instruction leads. Divergent paths meet at BSYNC, which goes on where the BSSY of
    its barrier said."""
    meeting: dict[str, int] = {}
    every: list[tuple[int, ...]] = []
    for k, each in enumerate(instructions):
        following = (k + 1,) if k + 1 < len(instructions) else ()
        target = _TARGET.search(each.text)
        conditional = each.text.startswith("@") or ".DIV" in each.opcode
        conditional |= re.search(r"BRA\S*\s+!?U?P\d", each.text) is not None
        if each.name == "BSSY" and target:
            meeting[each.text.split()[-2].rstrip(",")] = labels[target[1]]
        if each.name == "BRA" and target:
            every.append((labels[target[1]], *(following if conditional else ())))
        elif each.name in ("BRX", "BRXU") and (several := _TARGETS.search(each.text)):
            names = [name.strip(" `()") for name in several[1].split(",")]
            every.append(tuple(labels[name] for name in names if name in labels))
        elif each.name in ("EXIT", "RET"):
            every.append(following if conditional else ())
        elif each.name == "BSYNC" and each.text.split()[-1] in meeting:
            every.append((meeting[each.text.split()[-1]],))
        else:
            every.append(following)
    return tuple(every)


def _before(code: Code) -> list[list[int]]:
    """Where each instruction may be come to from."""
    before: list[list[int]] = [[] for _ in code.instructions]
    for k, successors in enumerate(code.successors):
        for at in successors:
            before[at].append(k)
    return before


def _dominators(code: Code, before: Sequence[Sequence[int]]) -> list[int]:
    """Of each instruction, the mask of those that every way to it goes through; 0 where there is
    no way."""
    masks = [0] * len(code.instructions)
    changed = True
    while changed:
        changed = False
        for k, old in enumerate(masks):
            known = [masks[j] for j in before[k] if masks[j]]
            if k and not known:
                continue
            mask = functools.reduce(int.__and__, known) if k else 0
            masks[k] = mask | 1 << k
            changed |= masks[k] != old
    return masks


def loops_of(code: Code) -> list[Loop]:
    """All natural loops, by header: what leads back to an instruction that it must have come
    through. Code that is merely placed behind its loop is part of it."""
    before = _before(code)
    masks = _dominators(code, before)
    bodies: dict[int, set[int]] = {}
    for k, successors in enumerate(code.successors):
        for header in successors:
            if not masks[k] >> header & 1:
                continue
            body, ahead = bodies.setdefault(header, {header}), [k]
            while ahead:
                at = ahead.pop()
                if at not in body:
                    body.add(at)
                    ahead += before[at]
    return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]


def own(loop: Loop, loops: Sequence[Loop]) -> list[int]:
    """Indices of a loop's instructions that are in no loop inside it."""
    inside = [each.body for each in loops if each.body < loop.body]
    return sorted(loop.body.difference(*inside))


def main_loop(code: Code) -> Loop:
    """The loop with the most instructions of its own: over samples, in a kernel that does all of a
    sample's work in registers."""
    loops = loops_of(code)
    if not loops:
        raise ValueError("expected a kernel with a loop, found none")
    return max(loops, key=lambda loop: len(own(loop, loops)))


def shortest_path(code: Code, loop: Loop, avoided: Collection[str] = ("CALL",)) -> list[int]:
    """Indices of the fewest instructions once round a loop: what runs where nothing rare does.

    Args:
        code: The kernel.
        loop: One of its loops.
        avoided: Names of instructions that only rare paths have, such as the call of the slow
            division, which subnormal and infinite operands need.
    """
    best, came_from = {loop.header: 0}, dict[int, int]()
    queue = [(0, loop.header)]
    while queue:
        length, k = heapq.heappop(queue)
        for at in code.successors[k]:
            if at == loop.header:
                path = [k]
                while path[-1] != loop.header:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if at not in loop.body or code.instructions[at].name in avoided:
                continue
            if length + 1 < best.get(at, length + 2):
                best[at], came_from[at] = length + 1, k
                heapq.heappush(queue, (length + 1, at))
    raise ValueError("expected a way round the loop without rare instructions, found none")


#: Cycles until a result of variable latency is there, hits in the first-level cache (Jia et al.,
#: 2019, table 4.1; Luo et al., 2024, "Benchmarking and dissecting the Nvidia Hopper GPU
#: architecture", table 5).
_LATENCY = {"MUFU": 23, "LDS": 29, "LDG": 35, "LDL": 35, "LDC": 25, "SHFL": 24, "ATOMG": 300}
_OTHER_LATENCY, _READ_LATENCY = 20, 10


def cycles_alone(code: Code, path: Sequence[int]) -> int:
    """Cycles that one warp alone takes for a path of a loop, in the steady state: the stalls that
    ptxas wrote, and waiting for scoreboards."""
    now, ends, ready = 0, [0], [0] * 6
    for _ in range(4):
        for k in path:
            each = code.instructions[k]
            waited = [ready[i] for i in range(6) if each.waits_for >> i & 1]
            now = max([now, *waited])
            result, operands = each.sets
            if result < 6:
                latency = _LATENCY.get(each.name, _OTHER_LATENCY)
                ready[result] = max(ready[result], now + latency)
            if operands < 6:
                ready[operands] = max(ready[operands], now + _READ_LATENCY)
            now += each.stall
        ends.append(now)
    return ends[-1] - ends[-2]


def contracts(ptx: str, arch: str) -> bool:
    """Whether ptxas makes another code of the kernel when it may contract products and sums."""
    return assemble(ptx, arch, True).cubin != assemble(ptx, arch, False).cubin
