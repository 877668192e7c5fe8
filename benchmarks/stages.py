"""What each stage costs against its own lower bound: its data once through memory, its arithmetic.

A stage at full rate reads an array and writes another, and computes in between. The bound is the
sum of both times, each measured in the same run: filling and copying arrays of the stage's sizes,
and vectors of 32 numbers through every instruction with nothing to wait for. All in CPU time of one
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from amtcore import (
    AdaptLoop,
    Dau1997,
    DRNLFilterbank,
    GammatoneFilterbank,
    HeadphoneFilter,
    IHCEnvelope,
    IHCPaulick2024,
    King2019,
    King2019ModulationFilterbank,
    Paulick2024,
    set_num_threads,
)
from amtcore.kernels.families.envelope.reference import Quadrature
from amtcore.kernels.fused.filters import BANK_MODULUS, BANK_STATE_VARIABLE
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    vload,
    vsqrt,
    vstore,
)
from benchmarks.kernel import FS_HZ
from benchmarks.report import table, write_section

SECONDS = 10
_SAMPLES = SECONDS * FS_HZ
_LIMIT = 3.0
#: What a figure is the least of: so many runs, for so long.
_ROUNDS, _SECONDS_EACH = 7, 2.0
#: Signals at once where a stage has one channel.
_EARS = 8
_HEAD = ("stage", "measured", "memory", "arithmetic", "measured / sum", "bound by")
_INSTRUCTIONS = ("fma", "divide", "sqrt", "exp", "log")


@dataclass(frozen=True)
class Work:
    """Instructions per output number; additions, products, comparisons count as `fma`."""

    fma: float = 0.0
    divide: float = 0.0
    sqrt: float = 0.0
    exp: float = 0.0
    log: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, k) + getattr(other, k) for k in _INSTRUCTIONS))

    def __rmul__(self, times: float) -> Work:
        return Work(*(times * getattr(self, k) for k in _INSTRUCTIONS))


# Counted off the block functions of the kernels.
_COMPLEX_POLE = Work(fma=4)
_POLE_ZERO = Work(fma=5)
_FIRST_ORDER = Work(fma=3)
_SECOND_ORDER = Work(fma=12)
_RECTIFY = Work(fma=1)
_LOOP = Work(fma=3, divide=1)
_LIMITER = Work(fma=8, divide=1, exp=1)
_STICK = Work(fma=8, exp=1, log=1)
_MEMBRANE = Work(fma=13, divide=1, exp=2)
_REAL_BAND = Work(fma=6)
_MODULUS_BAND = Work(fma=8, sqrt=1)


@dataclass(frozen=True)
class Case:
    """A stage, what it is fed, and its work; `library_s` is time in calls that are not ours."""

    label: str
    stage: Callable[[Tensor], Any]
    x: Tensor
    outputs: int
    work: Work
    library_s: float = field(default=0.0)


@njit(nogil=True)
def _stream_through(a: Any, n: int, instruction: int) -> None:
    x, y = vload(a, 0), vload(a, LANES)
    a0, a1, a2, a3 = x, y, x + y, x * y
    for _ in range(n):
        if instruction == 0:
            a0, a1, a2, a3 = fma(a0, x, y), fma(a1, x, y), fma(a2, x, y), fma(a3, x, y)
        elif instruction == 1:
            a0, a1, a2, a3 = y / a0, y / a1, y / a2, y / a3
        elif instruction == 2:
            a0, a1, a2, a3 = vsqrt(a0), vsqrt(a1), vsqrt(a2), vsqrt(a3)
        elif instruction == 3:
            a0, a1, a2, a3 = vexp(a0 * x), vexp(a1 * x), vexp(a2 * x), vexp(a3 * x)
        else:
            a0, a1, a2, a3 = vlog(a0 + y), vlog(a1 + y), vlog(a2 + y), vlog(a3 + y)
    vstore(a, 0, a0 + a1 + a2 + a3)


def _cpu_s(*runs: Callable[[], object]) -> tuple[float, ...]:
    """CPU time of each, the least of many, in turn: what else the machine does meets them all."""
    for run in runs:
        run()
    best, rounds, start = [float("inf")] * len(runs), 0, time.monotonic()
    while rounds < _ROUNDS or time.monotonic() - start < _SECONDS_EACH:
        for i, run in enumerate(runs):
            begin = time.process_time()
            run()
            best[i] = min(best[i], time.process_time() - begin)
        rounds += 1
    return tuple(best)


def _instruction_ns() -> dict[str, float]:
    """Nanoseconds a number, with four vectors in flight."""
    start = np.linspace(0.5, 0.6, 2 * LANES, dtype=np.float32)
    count = 100_000

    def ns(instruction: int) -> float:
        return (
            1e9
            / (4 * LANES * count)
            * _cpu_s(lambda: _stream_through(start.copy(), count, instruction))[0]
        )

    return {name: ns(i) for i, name in enumerate(_INSTRUCTIONS)}


def _memory_pass(read: int, written: int) -> Callable[[], object]:
    """Reading so many numbers and writing others, in one pass."""
    source, target = np.ones(read, np.float32), np.zeros(written, np.float32)
    both = min(read, written)

    def once() -> None:
        np.copyto(target[:both], source[:both])
        target[both:].fill(0)
        source[both:].sum()

    return once


def _limiter_share(env: Tensor) -> float:
    """How many of the limiters run, of five per sample: any channel above 1 is enough."""
    taus, share = AdaptLoop(FS_HZ).tau, 0.0
    for loops in range(1, len(taus) + 1):
        # Loops 1..j alone: their output is 100 where the last quotient is 1.
        y = AdaptLoop(FS_HZ, tau=taus[:loops])(env)
        share += float((y > 100.0).any(1).float().mean())
    return share


def _bank_work(bank: Any) -> Work:
    """Mean over all filters of a `ModulationFilterbank`."""
    kinds = [kind for a, b in pairwise(bank.offsets) for kind in bank.kinds[: b - a]]
    total = Work()
    for kind in kinds:
        low = kind == BANK_STATE_VARIABLE
        total += _SECOND_ORDER if low else _MODULUS_BAND if kind == BANK_MODULUS else _REAL_BAND
    return 1.0 / len(kinds) * total


def _noise() -> Tensor:
    """74 dB SPL where RMS 1 is 100 dB SPL: most samples pass every knee and many overshoot."""
    return 0.05 * torch.randn(1, _SAMPLES, generator=torch.Generator().manual_seed(0))


def _dau_cases(wave: Tensor) -> list[Case]:
    model = Dau1997(FS_HZ)
    channels = model.num_channels
    bands = model.filterbank(wave)
    env = model.ihc(bands)
    adapted, bank = model.adaptation(env), model.modulation
    five = IHCEnvelope(FS_HZ, method="breebaart2001")
    loops = Work(fma=3) + 5 * _LOOP
    limited = loops + _limiter_share(env) * _LIMITER
    gammatone: GammatoneFilterbank = model.filterbank
    return [
        Case("gammatone", gammatone, wave, channels, 4 * _COMPLEX_POLE + Work(fma=1)),
        Case("ihc, one low-pass", model.ihc, bands, channels, _RECTIFY + _FIRST_ORDER),
        Case("ihc, five low-passes", five, bands, channels, _RECTIFY + 5 * _FIRST_ORDER),
        Case("adaptation", model.adaptation, env, channels, limited),
        Case("adaptation, no limiter", AdaptLoop(FS_HZ, "dau1996"), env, channels, loops),
        Case("modulation", bank, adapted, bank.offsets[-1], _bank_work(bank)),
    ]


def _king_cases(wave: Tensor) -> list[Case]:
    model = King2019(FS_HZ)
    bands = model.filterbank(wave)
    env, channels = model.ihc(model.compression(bands)), model.num_channels
    plain = King2019ModulationFilterbank(FS_HZ, phase_insens="none")
    bank = model.modulation_filterbank
    outputs, dropped = channels * bank.num_filters, sum(bank.insensitive)
    share = dropped / bank.num_filters
    transform = Quadrature(_SAMPLES, wave)
    (pair,) = _cpu_s(lambda: transform(torch.complex(wave, wave)))
    return [
        Case("compression", model.compression, bands, channels, _STICK),
        Case("high-pass", model.adaptation_filter, env, channels, _FIRST_ORDER),
        Case("King modulation, no envelope", plain, env, outputs, 2 * _SECOND_ORDER),
        Case(
            "King modulation, Hilbert envelope",
            bank,
            env,
            outputs,
            2 * _SECOND_ORDER + share * Work(fma=4, sqrt=1),
            channels * dropped / 2 * pair,
        ),
    ]


def _paulick_cases(wave: Tensor) -> list[Case]:
    model = Paulick2024(FS_HZ)
    headphone = HeadphoneFilter(FS_HZ)
    drnl: DRNLFilterbank = model.drnl
    membrane: IHCPaulick2024 = model.ihc
    velocity = model.outer_middle_ear(2.0 * wave)
    displaced, channels = drnl(velocity), model.num_channels
    linear, nonlinear = 2 * _POLE_ZERO + 4 * _SECOND_ORDER, 4 * _POLE_ZERO + _STICK + _SECOND_ORDER
    taps = headphone.order + 1
    adapted = model.adaptation(membrane(displaced))
    quarter, decimated = model.resampler, channels / 4
    return [
        Case("FIR ear, 513 taps", headphone, wave.expand(_EARS, -1), _EARS, Work(fma=taps)),
        Case("DRNL", drnl, velocity, channels, linear + nonlinear + Work(fma=1)),
        Case("hair-cell membrane", membrane, displaced, channels, _MEMBRANE),
        Case("decimation by 4", quarter, adapted, decimated, Work(fma=quarter.phases.shape[1])),
    ]


def _row(case: Case, costs: dict[str, float]) -> tuple[str, ...]:
    written = int(case.outputs * _SAMPLES)
    scale = 1e9 / written
    times = _cpu_s(lambda: case.stage(case.x), _memory_pass(case.x.numel(), written))
    measured, memory = (scale * seconds for seconds in times)
    arithmetic = sum(costs[k] * getattr(case.work, k) for k in _INSTRUCTIONS)
    arithmetic += scale * case.library_s
    ratio = measured / (memory + arithmetic)
    return (
        case.label,
        *(f"{ns:.2f}" for ns in (measured, memory, arithmetic)),
        f"{ratio:.1f}" + (" (!)" if ratio > _LIMIT else ""),
        "memory" if memory > arithmetic else "arithmetic",
    )


def main() -> None:
    """Measure and write the section."""
    set_num_threads(1)
    torch.set_num_threads(1)
    costs = _instruction_ns()
    with torch.no_grad():
        wave = _noise()
        cases = [*_dau_cases(wave), *_king_cases(wave), *_paulick_cases(wave)]
        rows = [_row(case, costs) for case in cases]
    mega = _SAMPLES * 31
    rate = 8e-9 * mega / _cpu_s(_memory_pass(mega, mega))[0]
    note = (
        f"Noise of {SECONDS} s at {FS_HZ} Hz and 74 dB SPL, float32, one thread, CPU time, in ns "
        "per output number (sample and channel or filter). Memory: reading the input and writing "
        f"the output once ({rate:.1f} GB/s for equal sizes; into memory that was there before, as "
        "large results use that of earlier ones). Arithmetic: instructions counted off the kernels "
        "times their own rate, in ns "
        + ", ".join(f"{name} {ns:.3f}" for name, ns in costs.items())
        + f" (that is {2 / costs['fma']:.0f} GFlop/s of FMA); for the Hilbert envelope also its "
        f"FFTs, as measured alone. Wanted: a ratio of at most {_LIMIT:g}."
    )
    write_section("Stages", "python -m benchmarks.stages", note + "\n\n" + table(_HEAD, rows))


if __name__ == "__main__":
    main()
