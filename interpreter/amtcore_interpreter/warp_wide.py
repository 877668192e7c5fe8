"""Instructions of the whole warp: shuffles, votes and barriers, as rows of numbers.

A row is (what, mask, result, other result, source, lane, clamp). All but the first are byte offsets
in a warp's register memory, -1 where there is none; literals have a place there too.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import KernelError
from amtcore.kernels.gpu.launcher import THREADS
from amtcore_interpreter.program import Program
from amtcore_interpreter.ptx import Instruction, Name, Number, Operand, Pair

#: What a row asks for.
(
    STRAIGHT,
    SHUFFLE_IDX,
    SHUFFLE_UP,
    SHUFFLE_DOWN,
    SHUFFLE_BFLY,
    VOTE_ANY,
    VOTE_ALL,
    VOTE_UNI,
    VOTE_BALLOT,
    ACTIVE,
    BARRIER,
) = range(11)
WHAT, MASK, RESULT, OTHER_RESULT, SOURCE, LANE, CLAMP = range(7)

_SHUFFLES = {
    "idx": SHUFFLE_IDX,
    "up": SHUFFLE_UP,
    "down": SHUFFLE_DOWN,
    "bfly": SHUFFLE_BFLY,
}
_VOTES = {
    ("any", "pred"): VOTE_ANY,
    ("all", "pred"): VOTE_ALL,
    ("uni", "pred"): VOTE_UNI,
    ("ballot", "b32"): VOTE_BALLOT,
}


def describe(program: Program) -> NDArray[np.int64]:
    """A row for each piece; those of single threads have STRAIGHT."""
    rows = np.full((len(program.pieces), CLAMP + 1), -1, np.int64)
    for row, piece in zip(rows, program.pieces, strict=True):
        row[WHAT] = STRAIGHT
        if piece.warp_wide:
            _Row(program, program.module.instructions[piece.first], row)
    return rows


class _Row:
    def __init__(self, program: Program, i: Instruction, row: NDArray[np.int64]) -> None:
        self.program, self.instruction, self.row = program, i, row
        if i.predicate is not None:
            self.refuse("a guarded instruction of the whole warp")
        getattr(self, i.code[0])()

    def refuse(self, why: str) -> NoReturn:
        raise KernelError(
            f"kernel {self.program.module.entry}: {self.instruction.text!r} is not interpreted: "
            f"{why}"
        )

    def place(self, operand: Operand, width: int) -> int:
        """Where a register or a literal lies."""
        if isinstance(operand, Number) and width == 32:
            constants, value = self.program.constants, operand.value % (1 << 32)
            if value not in constants:
                constants[value] = self.program.sizes["registers"]
                self.program.sizes["registers"] += 4 * THREADS
            return constants[value]
        if not isinstance(operand, Name) or operand.negated:
            self.refuse("a register was expected")
        if operand.name == "_":
            return -1
        if self.program.module.registers.get(operand.name) != width:
            self.refuse(f"{operand.name} is no register of {width} bits")
        return self.program.slots[operand.name]

    def shfl(self) -> None:
        i, row = self.instruction, self.row
        mode = i.code[2] if len(i.code) == 4 else ""
        if i.code[1] != "sync" or mode not in _SHUFFLES or i.code[-1] != "b32":
            self.refuse("expected shfl.sync.idx, .up, .down or .bfly of .b32")
        result, source, lane, clamp, mask = i.operands
        if isinstance(result, Pair):
            row[OTHER_RESULT] = self.place(result.second, 1)
            result = result.first
        row[WHAT], row[RESULT] = _SHUFFLES[mode], self.place(result, 32)
        row[SOURCE], row[LANE] = self.place(source, 32), self.place(lane, 32)
        row[CLAMP], row[MASK] = self.place(clamp, 32), self.place(mask, 32)

    def vote(self) -> None:
        i, row = self.instruction, self.row
        if i.code[1] != "sync" or i.code[2:] not in _VOTES:
            self.refuse("expected vote.sync.any, .all, .uni or .ballot")
        row[WHAT] = _VOTES[i.code[2], i.code[3]]
        result, source, mask = i.operands
        row[RESULT] = self.place(result, 32 if row[WHAT] == VOTE_BALLOT else 1)
        row[SOURCE], row[MASK] = self.place(source, 1), self.place(mask, 32)

    def activemask(self) -> None:
        self.row[WHAT] = ACTIVE
        self.row[RESULT] = self.place(self.instruction.operands[0], 32)

    def bar(self) -> None:
        i, row = self.instruction, self.row
        row[WHAT] = BARRIER
        if i.code == ("bar", "warp", "sync"):
            row[MASK] = self.place(i.operands[0], 32)
        elif i.code[-1] == "sync" and i.operands in ((Number(0),), (Number(0), Number(THREADS))):
            # A block is one warp: its barrier is that of the warp.
            row[MASK] = self.place(Number(-1), 32)
        else:
            self.refuse("expected barrier 0 of all threads, or bar.warp.sync")

    def barrier(self) -> None:
        allowed = {"barrier", "cta", "sync", "aligned"}
        if "sync" not in self.instruction.code or set(self.instruction.code) - allowed:
            self.refuse("expected barrier.sync 0")
        self.row[WHAT] = BARRIER
        if self.instruction.operands not in ((Number(0),), (Number(0), Number(THREADS))):
            self.refuse("expected barrier 0 of all threads")
        self.row[MASK] = self.place(Number(-1), 32)
