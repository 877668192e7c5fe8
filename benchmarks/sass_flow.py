"""How a kernel's machine code runs: its loops, the fewest instructions round them, and all of them.

Two counts of instructions per sample: the fewest that a round of the loop over samples takes, where
nothing rare happens; and what a signal executes, by the interpreter's count of every PTX
instruction and the line of PTX that ptxas notes for each of the machine's.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from benchmarks.sass import Instruction, Listing

_TARGET = re.compile(r"`\(([.\w$]+)\)")
_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"*]+)")
_CONDITIONAL = re.compile(r"@|BRA\S*\s+!?U?P\d")
_BARRIER = re.compile(r"\bB\d+\b")
#: Subroutines of ptxas for subnormal and infinite operands of divisions and roots.
_SLOW = "slowpath"


@dataclass(frozen=True)
class Code:
    """A kernel's instructions and where they lead.

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


def _is_subroutine(each: Instruction) -> bool:
    """Whether this calls one of ptxas's own; calls of labels are jumps."""
    target = _TARGET.search(each.text)
    return each.name == "CALL" and not (target and target[1].startswith(".L"))


def _is_rare(each: Instruction) -> bool:
    return _is_subroutine(each) and _SLOW in each.text


def code_of(listing: Listing) -> Code:
    """The kernel with the ways through it, for warps whose threads are together. Divergent paths
    meet at BSYNC, which goes on where the BSSY that set its barrier on the way there said."""
    instructions, labels = listing.instructions, listing.labels
    successors: list[tuple[int, ...]] = [()] * len(instructions)
    meeting: list[dict[str, frozenset[int]] | None] = [None] * len(instructions)
    ahead: list[tuple[int, dict[str, frozenset[int]]]] = [(0, {})]
    while ahead:
        k, coming = ahead.pop()
        known = meeting[k]
        union = {
            name: coming.get(name, frozenset()) | (known or {}).get(name, frozenset())
            for name in {*coming, *(known or {})}
        }
        if union == known:
            continue
        meeting[k] = union
        each = instructions[k]
        barrier = _BARRIER.search(each.text)
        target = _TARGET.search(each.text)
        after = union
        if each.name == "BSSY" and barrier and target:
            after = {**union, barrier[0]: frozenset({labels[target[1]]})}
        if each.name == "BSYNC" and barrier and union.get(barrier[0]):
            successors[k] = tuple(sorted(union[barrier[0]]))
        else:
            successors[k] = _leads_to(k, each, labels, len(instructions))
        ahead += [(at, after) for at in successors[k]]
    return Code(instructions, tuple(successors))


def _leads_to(k: int, each: Instruction, labels: Mapping[str, int], count: int) -> tuple[int, ...]:
    following = (k + 1,) if k + 1 < count else ()
    conditional = _CONDITIONAL.match(each.text) is not None
    target = _TARGET.search(each.text)
    if ".DIV" in each.opcode:
        return following
    if target and (each.name == "BRA" or (each.name == "CALL" and not _is_subroutine(each))):
        return (labels[target[1]], *(following if conditional else ()))
    if each.name in ("BRX", "BRXU") and (several := _TARGETS.search(each.text)):
        names = (name.strip(" `()") for name in several[1].split(","))
        return tuple(labels[name] for name in names if name in labels)
    if each.name in ("EXIT", "RET"):
        return following if conditional else ()
    return following


def _before(code: Code) -> list[list[int]]:
    """Where each instruction may be come to from."""
    before: list[list[int]] = [[] for _ in code.instructions]
    for k, successors in enumerate(code.successors):
        for at in successors:
            before[at].append(k)
    return before


def _dominators(before: Sequence[Sequence[int]]) -> list[int]:
    """Of each instruction, the mask of those that every way to it goes through; 0 where there is
    no way."""
    masks = [0] * len(before)
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
    masks = _dominators(before)
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


def innermost(code: Code) -> Loop:
    """The largest loop with none inside: that over samples, where all of a sample's work is done in
    registers."""
    loops = loops_of(code)
    inner = [each for each in loops if not any(other.body < each.body for other in loops)]
    if not inner:
        raise ValueError("expected a kernel with a loop, found none")
    return max(inner, key=lambda loop: len(loop.body))


def shortest_path(code: Code, loop: Loop) -> list[int]:
    """Indices of the fewest instructions once round a loop, without subroutines: what runs where
    nothing rare does."""
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
            if at not in loop.body or _is_subroutine(code.instructions[at]):
                continue
            if length + 1 < best.get(at, length + 2):
                best[at], came_from[at] = length + 1, k
                heapq.heappush(queue, (length + 1, at))
    raise ValueError("expected a way round the loop without rare instructions, found none")


def blocks_of(code: Code) -> list[range]:
    """Straight runs of instructions that can be reached."""
    starts = {0}
    for k, successors in enumerate(code.successors):
        if successors not in ((), (k + 1,)):
            starts.update((*successors, k + 1))
    before = _before(code)
    starts.update(k for k, each in enumerate(before) if len(each) > 1)
    ends = sorted({*starts, len(code.instructions)})
    runs = [range(a, b) for a, b in itertools.pairwise(ends) if a < b]
    return [run for run in runs if run.start == 0 or before[run.start]]


def _copies(made: Counter[str]) -> int:
    """How often an instruction of the PTX was put into the code, by how many there are of each that
    it became: most of what becomes of one is there once a copy."""
    sizes = Counter(made.values())
    return max(sizes, key=lambda count: (sizes[count], count))


def executions(code: Code, hits: Mapping[int, int]) -> list[tuple[range, float]]:
    """Every straight run and how often warps execute it.

    Instructions of a run are executed equally often, but some were moved into it from elsewhere: so
    the median of what is known of them counts. Where ptxas has unrolled a loop, or put code into
    several branches, the copies share what the PTX's instruction was executed.

    Args:
        code: The kernel.
        hits: Line of the PTX -> how often warps execute it.
    """
    runs = [run for run in blocks_of(code) if not any(_is_rare(code.instructions[k]) for k in run)]
    made: dict[int, Counter[str]] = defaultdict(Counter)
    for each in (code.instructions[k] for run in runs for k in run):
        made[each.ptx_line][each.opcode] += 1
    shares = {line: hits[line] / _copies(made[line]) for line in made if line in hits}
    counted = []
    for run in runs:
        lines = (code.instructions[k].ptx_line for k in run)
        known = [shares[line] for line in lines if line in shares]
        counted.append((run, median_low(known) if known else 0.0))
    return counted


#: Cycles until a result of variable latency is there, hits in the first-level cache (Jia et al.,
#: 2019, table 4.1; Luo et al., 2024, "Benchmarking and dissecting the Nvidia Hopper GPU
#: architecture", table 5).
_LATENCY = {"MUFU": 23, "LDS": 29, "LDG": 35, "LDL": 35, "LDC": 25, "SHFL": 24, "ATOMG": 300}
_OTHER_LATENCY, _READ_LATENCY = 20, 10


def cycles_alone(code: Code, path: Sequence[int], rounds: int = 4) -> int:
    """Cycles that one warp alone takes for a path of a loop in the steady state, or once for a
    straight run: the stalls that ptxas wrote, and waiting for scoreboards."""
    now, before, ready = 0, 0, defaultdict[int, int](int)
    for _ in range(rounds):
        before = now
        for k in path:
            each = code.instructions[k]
            now = max([now, *(ready[i] for i in range(6) if each.waits_for >> i & 1)])
            result, operands = each.sets
            if result < 6:
                latency = _LATENCY.get(each.name, _OTHER_LATENCY)
                ready[result] = max(ready[result], now + latency)
            if operands < 6:
                ready[operands] = max(ready[operands], now + _READ_LATENCY)
            now += each.stall
    return now - before
