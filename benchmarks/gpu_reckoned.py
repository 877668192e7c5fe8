"""Speed of every model on GPUs that are not here, reckoned from machine code.

The interpreter runs a model's kernels on speech and counts every PTX instruction; ptxas assembles
the same PTX for the chip and says which of its instructions came of which line. So the machine's
instructions per second of audio are known, their pipes, and the cycles of one warp alone; `chips`
makes times of them. What torch does in the loudness models is counted apart, see `torch_work`.
`python -m benchmarks.gpu` measures instead where there is a GPU.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from amtcore import Glasberg2002, King2019, Moore2016
from amtcore.features.build import build_extractor
from amtcore.kernels.backends.warp import WarpBackend
from amtcore.kernels.families.envelope.reference import hilbert_envelope
from amtcore.kernels.warp.interpreter import Profile
from amtcore.kernels.warp.launching import Kernel
from benchmarks.chips import A100, H100, SCHEDULERS, Chip, bound_cycles, pipe_of, resident_warps
from benchmarks.gpu_kernels import recorded
from benchmarks.report import table, write_section
from benchmarks.sass import assemble, disassemble
from benchmarks.sass_flow import (
    code_of,
    cycles_alone,
    executions,
    innermost,
    shortest_path,
)
from benchmarks.torch_work import LAUNCH_S, TorchWork, torch_work
from earmill.jobs.demo_audio import speech
from tests.amtcore.warp_cases import Recorder

FS_HZ, LOUDNESS_FS_HZ = 44100, 32000
CLIP_S, SHORT_S = 1.0, 0.25
#: A job's launch for the loudness models.
BATCH, BATCH_CLIP_S = 64, 10.0
#: What kernels ask ptxas to keep room for, and what they might.
_ASKED, _ASKED_WARPS = re.compile(r"\.minnctapersm \d+"), (8, 12, 16)
_HEAD = ("model", "chip", "registers", "spilled", "warps a multiprocessor", "fewest", "executed",
         "one warp alone", "bound by", "times real time")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model as a job runs it.

    Args:
        label: Its name in the table.
        model, params: As for `build_extractor`.
        in_registers: Whether the loop over samples has no loop inside, so that its fewest
            instructions say something.
        seconds: Of speech for the interpreter.
        envelopes: Whether Hilbert envelopes are taken, of the bands that the module says.
    """

    label: str
    model: str
    params: dict[str, Any] = field(default_factory=dict)
    in_registers: bool = True
    seconds: float = CLIP_S
    envelopes: bool = False


CASES = (
    Case("Dau1997", "dau1997"),
    Case("Osses2021", "osses2021"),
    Case("King2019, phase_insens='none'", "king2019", {"phase_insens": "none"}),
    Case(
        "King2019, Hilbert envelope",
        "king2019",
        in_registers=False,
        seconds=SHORT_S,
        envelopes=True,
    ),
    Case("Paulick2024", "paulick2024", in_registers=False, seconds=SHORT_S),
    Case("Paulick2024, jepsen2008", "paulick2024", {"model": "jepsen2008"}, False, SHORT_S),
)
LOUDNESS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "Moore2016, two ears": (Moore2016, (2,)),
    "Glasberg2002": (lambda: Glasberg2002(LOUDNESS_FS_HZ), ()),
}


@dataclass(frozen=True)
class Executed:
    """One kernel on one chip, for one second of audio of one clip.

    Args:
        registers, spilled_bytes: Of a thread.
        warps: That a multiprocessor holds at once.
        fewest: Instructions of a sample where nothing rare happens.
        instructions: Executed by all warps of the clip.
        bound_cycles: That a scheduler cannot go below.
        alone_cycles: Of its warps, each alone on a scheduler.
    """

    registers: int
    spilled_bytes: int
    warps: int
    fewest: int
    instructions: float
    bound_cycles: float
    alone_cycles: float

    def seconds(self, chip: Chip) -> float:
        """Of the chip, when it is full."""
        cycles = max(self.bound_cycles, self.alone_cycles * SCHEDULERS / self.warps)
        return cycles / (chip.multiprocessors * SCHEDULERS * chip.clock_hz)

    @property
    def limit(self) -> str:
        """What the time is made of."""
        waits = self.alone_cycles * SCHEDULERS / self.warps > self.bound_cycles
        return "waiting" if waits else "issue or pipes"


def hits_of(ptx: str, profile: Profile) -> dict[int, int]:
    """How often warps executed the instruction in each line of the PTX, lines from 1."""

    def bare(text: str) -> str:
        return " ".join(text.split()).rstrip("; ")

    lines = [bare(line) for line in ptx.splitlines()]
    hits, at = {}, 0
    for text, count in profile.lines:
        at = lines.index(bare(text), at) + 1
        hits[at] = count
    return hits


def executed(kernel: Kernel, profile: Profile, chip: Chip, seconds: float) -> Executed:
    """What a kernel executes on a chip, from what the interpreter counted in so many seconds."""
    made = assemble(kernel.ptx, chip.arch)
    code = code_of(disassemble(made.cubin))
    runs = executions(code, hits_of(kernel.ptx, profile))
    mix: dict[str, float] = defaultdict(float)
    alone = 0.0
    for run, count in runs:
        for k in run:
            mix[pipe_of(code.instructions[k])] += count / seconds
        alone += cycles_alone(code, run, rounds=1) * count / seconds
    return Executed(
        registers=made.registers,
        spilled_bytes=made.spill_store_bytes + made.spill_load_bytes,
        warps=resident_warps(made, chip),
        fewest=len(shortest_path(code, innermost(code))),
        instructions=sum(mix.values()),
        bound_cycles=bound_cycles(mix, chip),
        alone_cycles=alone,
    )


def _speech(fs_hz: int, seconds: float) -> np.ndarray:
    """At 74 dB SPL, where RMS 1 is 100 dB SPL, from inside a longer clip: no silence before it."""
    wave = speech(np.random.default_rng(0), fs_hz, 2.0 + seconds)[fs_hz:]
    wave = wave[: int(fs_hz * seconds)]
    return (0.05 * wave / np.sqrt(np.mean(wave**2))).astype(np.float32)


def run_model(case: Case, seconds: float) -> tuple[Recorder, int]:
    """Its kernels, run on so much speech, and the warps that a clip takes."""
    extractor = build_extractor(case.model, fs_hz=FS_HZ, params=case.params)
    scale = np.float32(2.0 if extractor.input_unit == "pa" else 1.0)
    with recorded() as launcher:
        extractor.place(WarpBackend(launcher))
        extractor.extract([scale * _speech(FS_HZ, seconds)])
    info = extractor.streams[0]
    return launcher, -(-len(info.fc_hz) // 32)


def _row(
    label: str,
    chip: Chip,
    parts: list[Executed],
    per: float,
    work: TorchWork | None,
    in_registers: bool = False,
) -> tuple[str, ...]:
    """Of all kernels of a model: the busiest one's registers, and the time of all."""
    main = max(parts, key=lambda part: part.seconds(chip))
    kernels = sum(part.seconds(chip) for part in parts)
    of_torch = work.seconds(chip) if work else 0.0
    return (
        label,
        chip.name,
        f"{main.registers}",
        f"{sum(part.spilled_bytes for part in parts)}",
        f"{main.warps}",
        f"{main.fewest}" if in_registers else "",
        f"{sum(part.instructions for part in parts) / per:.0f}",
        f"{sum(part.alone_cycles for part in parts) / per:.0f}",
        main.limit if kernels > of_torch else "torch",
        f"{1.0 / (kernels + of_torch):.0f}",
    )


def _more_warps(case: Case, launcher: Recorder) -> str:
    """What ptxas would make of a model's kernel if more warps were to share a multiprocessor."""
    (kernel,) = launcher.used.values()
    profile, lines = launcher.profile(kernel), []
    for warps in _ASKED_WARPS:
        other = Kernel(kernel.name, _ASKED.sub(f".minnctapersm {warps}", kernel.ptx))
        part = executed(other, profile, H100, case.seconds)
        lines.append(
            f"{warps}: {part.registers} registers, {part.spilled_bytes} bytes spilled, "
            f"{1.0 / part.seconds(H100):.0f} times real time"
        )
    return f"{case.label} by the number of warps asked for, {H100.name}: {'; '.join(lines)}."


def chain_rows() -> tuple[list[tuple[str, ...]], list[str]]:
    """The time-domain models."""
    rows, notes = [], []
    for case in CASES:
        launcher, warps = run_model(case, case.seconds)
        if case.in_registers and len(launcher.used) == 1:
            notes.append(_more_warps(case, launcher))
        for chip in (H100, A100):
            parts = [
                executed(kernel, launcher.profile(kernel), chip, case.seconds)
                for kernel in launcher.used.values()
            ]
            work = _envelope_work() if case.envelopes else None
            per = FS_HZ * warps
            rows.append(_row(case.label, chip, parts, per, work, case.in_registers))
    return rows, notes


@functools.cache
def _envelope_work() -> TorchWork:
    """King2019's Hilbert envelopes, which torch's transforms make: clip by clip and filter by
    filter, all channels at once."""
    model = King2019(FS_HZ)
    channels, filters = model.num_channels, sum(model.modulation_filterbank.insensitive)
    shape = channels, int(BATCH_CLIP_S * FS_HZ)
    one = torch_work(hilbert_envelope, shape, BATCH_CLIP_S)
    return TorchWork(1, one.bytes * channels * filters, 0.0, one.launches * filters)


def loudness_rows() -> tuple[list[tuple[str, ...]], list[str]]:
    """The loudness models: their kernels per frame, and what torch does beside them."""
    rows, notes = [], []
    for label, (build, ears) in LOUDNESS.items():
        x = torch.from_numpy(2.0 * _speech(LOUDNESS_FS_HZ, SHORT_S)).expand(*ears, -1)
        with recorded() as launcher, torch.no_grad():
            build()(x.unsqueeze(0))
        shape = (BATCH, *ears, int(BATCH_CLIP_S * LOUDNESS_FS_HZ))
        work = torch_work(build(), shape, BATCH_CLIP_S)
        notes.append(_torch_note(label, work))
        for chip in (H100, A100):
            parts = [
                executed(kernel, launcher.profile(kernel), chip, SHORT_S)
                for kernel in launcher.used.values()
            ]
            rows.append(_row(label, chip, parts, 1000.0, work))
    return rows, notes


def _torch_note(label: str, work: TorchWork) -> str:
    return (
        f"{label}: torch moves {work.bytes / 1e6:.0f} MB and multiplies {work.flops / 1e9:.1f} "
        f"GFlop a second of audio, in {work.launches:.0f} operations for all of {work.batch} clips."
    )


_METHOD = f"""\
Reckoned, not measured: neither chip has run this. float32, 100 frames a second (the loudness
models: one a ms). The interpreter ran each model's kernels on speech at 74 dB SPL; ptxas (as triton
ships it) assembled the same PTX for the chip. Registers, spilled bytes and warps a multiprocessor
are those of the kernel that takes longest. Fewest: instructions once round the loop over samples,
where nothing rare happens. Executed, and cycles of one warp alone: per sample and warp (loudness:
per frame), of all kernels, everything included that the speech made happen. Time of a scheduler is
the largest of: instructions issued, one a cycle; the busiest pipe, by its lanes; cycles alone over
the warps that a scheduler holds. {H100.name}: {H100.multiprocessors} multiprocessors at
{H100.clock_hz / 1e9:.3f} GHz, {A100.name}: {A100.multiprocessors} at {A100.clock_hz / 1e9:.2f} GHz,
both full of clips. Left out: misses of the first-level cache, copies to and from the host, power
limits. Operations of torch in the loudness models and Hilbert envelopes are added by bandwidth (a
transform takes three ways through memory), products by 80 % of the chip's peak, {BATCH} clips of
{BATCH_CLIP_S:g} s at a time, {LAUNCH_S * 1e6:g} us to start each."""


def main() -> None:
    """Reckon and write the section."""
    rows, more = chain_rows()
    loudness, notes = loudness_rows()
    body = " ".join(_METHOD.split()) + "\n\n" + table(_HEAD, [*rows, *loudness])
    write_section(
        "GPU, reckoned",
        "python -m benchmarks.gpu_reckoned",
        body + "\n\n" + " ".join([*more, *notes]),
    )


if __name__ == "__main__":
    main()
