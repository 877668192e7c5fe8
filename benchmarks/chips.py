"""What a kernel would reach on a chip, reckoned from its machine code.

    cycles of a scheduler = max(instructions issued, busiest pipe, cycles of one warp alone / warps)

A scheduler issues one instruction a cycle, whatever its kind; a pipe with fewer lanes than a warp
has threads takes several cycles for one; and too few warps leave the scheduler waiting for
results. What this leaves out: misses of the first-level cache, bank conflicts, power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.sass import Assembled, Instruction

#: Schedulers of a multiprocessor, their registers, and its blocks at most; one block is one warp.
SCHEDULERS, REGISTERS, BLOCKS = 4, 16384, 32
#: Registers and bytes of shared memory are handed out in such portions; the system takes so many
#: bytes of every block's.
_REGISTER_PORTION, _SHARED_PORTION, _SYSTEM_SHARED = 256, 128, 1024
_FMA = ("FADD", "FMUL", "FFMA", "FADD32I", "FMUL32I", "FFMA32I", "HFMA2", "HADD2", "HMUL2")
_SPECIAL = ("MUFU", "FCHK", "F2I", "I2F", "I2FP", "F2F", "F2FP", "FRND", "POPC", "FLO", "BREV")
_MEMORY = ("LD", "ST", "SHFL", "ATOM", "RED")
_DOUBLE = ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX")
#: No pipe of lanes: branches, barriers, and what a warp does once for all of its threads.
_ISSUED_ONLY = ("BRA", "BRX", "BSSY", "BSYNC", "BREAK", "CALL", "RET", "EXIT", "NOP", "WARPSYNC",
                "BAR", "YIELD", "DEPBAR", "BMOV", "NANOSLEEP", "ERRBAR", "CCTL")  # fmt: skip


@dataclass(frozen=True)
class Chip:
    """A GPU. Lanes of a multiprocessor are results a cycle (CUDA C++ Programming Guide, "Throughput
    of native arithmetic instructions").

    Args:
        name: As sold.
        arch: What ptxas calls it.
        multiprocessors: How many it has.
        clock_hz: Boost clock of the data sheet.
        shared_bytes: Shared memory of a multiprocessor.
        bytes_s, flops_s: Memory's bandwidth, and what matrix products in single precision reach
            (80 % of the data sheet's).
        fma, integer, special, memory, double: Lanes.
    """

    name: str
    arch: str
    multiprocessors: int
    clock_hz: float
    shared_bytes: int
    bytes_s: float
    flops_s: float
    fma: int
    integer: int = 64
    special: int = 16
    memory: int = 32
    double: int = 64


H100 = Chip("H100 SXM", "sm_90", 132, 1.755e9, 228 * 1024, 3.35e12, 0.8 * 67e12, fma=128)
A100 = Chip(
    "A100 80 GB", "sm_80", 108, 1.41e9, 164 * 1024, 2.04e12, 0.8 * 19.5e12, fma=64, double=32
)


def pipe_of(each: Instruction) -> str:
    """The lanes that an instruction goes through."""
    if each.name in _FMA:
        return "fma"
    if each.name in _SPECIAL:
        return "special"
    if each.name in _DOUBLE:
        return "double"
    if each.name in _ISSUED_ONLY or (each.name.startswith("U") and each.name != "UNDEF"):
        return "issue"
    return "memory" if each.name.startswith(_MEMORY) else "integer"


def bound_cycles(mix: Mapping[str, float], chip: Chip) -> float:
    """Cycles that a scheduler cannot go below, with as many warps as one likes.

    Args:
        mix: How many instructions go through each pipe.
        chip: Where.
    """
    lanes = {"fma": chip.fma, "integer": chip.integer, "special": chip.special,
             "memory": chip.memory, "double": chip.double}  # fmt: skip
    busy = [mix.get(pipe, 0.0) * 32 * SCHEDULERS / lanes[pipe] for pipe in lanes]
    return max(float(sum(mix.values())), *busy)


def resident_warps(kernel: Assembled, chip: Chip) -> int:
    """Warps of a multiprocessor, by registers and shared memory, for blocks of one warp."""
    of_warp = -(-kernel.registers * 32 // _REGISTER_PORTION) * _REGISTER_PORTION
    shared = -(-kernel.shared_bytes // _SHARED_PORTION) * _SHARED_PORTION + _SYSTEM_SHARED
    return min(SCHEDULERS * (REGISTERS // max(of_warp, 1)), chip.shared_bytes // shared, BLOCKS)
