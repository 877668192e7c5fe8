"""Speed of the models on this machine's GPU and CPU: `python -m benchmarks.gpu`.

Figures of the GPU are of whole calls as in a job: samples are copied to the device and features
back. The shares are the parts of a call's device time. Times are the best of several runs of one
process. Without a device the script prints one line and exits with 2.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from amtcore import Dau1997, set_num_threads
from amtcore.errors import BackendError, DeviceMemoryError
from amtcore.features.feature_model import Extractor
from amtcore.features.registry import build_extractor, get_model
from amtcore.kernels.gpu.device import DeviceFacts, device_facts
from amtcore.kernels.gpu.driver import device_errors
from benchmarks import loudness, models
from benchmarks.kernel import FS_HZ
from benchmarks.report import table, write_section
from benchmarks.training import step
from earmill.jobs.doctor import as_large_as_fits, best_of

THREADS = 2
CLIP_S = 4.0
#: Clips of a launch, halved until they fit the memory; of models that process whole clips or
#: blocks in waves; of the CPU.
BATCHES, IN_WAVES, CPU_CLIPS = (1500, 4500), (240,), 10
#: Signals of one second in a training step.
STEP_BATCHES = (1, 16, 64)
_REPEATS = 3
_POOLED_HEAD = ("model", "clips", "CPU, two threads", "GPU", "against the CPU", "wanted",
                "kernels", "to the device", "back")  # fmt: skip
_STEP_HEAD = ("signals of 1 s", "CPU, two threads", "GPU", "against the CPU", "wanted")


@dataclass(frozen=True)
class Case:
    """A model with its clips.

    Args:
        label: Name in the table.
        model: Registered name.
        params: Parameters.
        clips: A few signals; batches repeat them.
        wanted: Rate that the GPU should reach.
        batches: Clips of a launch.
    """

    label: str
    model: str
    clips: Sequence[np.ndarray]
    params: Mapping[str, Any]
    wanted: str = ""
    batches: Sequence[int] = BATCHES[:1]

    def extractor(self, backend: str) -> Extractor:
        """Return the extractor of a backend."""
        fs_hz = FS_HZ if self.model not in ("moore2016", "glasberg2002") else loudness.FS_HZ
        return build_extractor(self.model, fs_hz=fs_hz, params=self.params, backend=backend)


def cases() -> list[Case]:
    """Return every model with speech at 74 dB SPL; Dau1997 also with a larger launch."""
    found = [
        Case(
            each.label,
            each.model,
            _speech(each.model),
            each.params,
            batches=IN_WAVES if "Hilbert" in each.label else BATCHES[:1],
        )
        for each in models.CASES
    ]
    for name, ears in (("moore2016", 2), ("glasberg2002", 1)):
        clip = loudness.signal_of("speech", ears, CLIP_S)
        found.append(Case(name.capitalize(), name, [clip], {}, batches=IN_WAVES))
    wanted = {"dau1997": "25000 on an H100", "moore2016": "20 times the CPU"}
    found = [replace(each, wanted=wanted.get(each.model, "")) for each in found]
    return [replace(found[0], batches=BATCHES), *found[1:]]


def _speech(model: str) -> list[np.ndarray]:
    return [clip[: round(CLIP_S * FS_HZ)] for clip in models.signals_of(get_model(model), "speech")]


def pooled_rows(case: Case, gpu: str = "cuda") -> list[tuple[str, ...]]:
    """Return seconds of audio per second on CPU and GPU, and the shares of copying."""
    here, there = case.extractor("cpu"), case.extractor(gpu)
    clips = _repeated(case.clips, CPU_CLIPS)
    cpu = CPU_CLIPS * CLIP_S / best_of(lambda: here.extract(clips), _REPEATS)
    if there.backend.name != gpu:
        return [(case.label, "", f"{cpu:.0f}", "stays on the CPU", "", case.wanted, "", "", "")]
    rows = []
    for wanted_clips in case.batches:
        seconds, count = as_large_as_fits(
            lambda n: best_of(partial(there.extract, _repeated(case.clips, n)), _REPEATS),
            wanted_clips,
        )
        rate = count * CLIP_S / seconds
        shares = device_shares(partial(there.extract, _repeated(case.clips, count)))
        rows.append(
            (case.label, str(count), f"{cpu:.0f}", f"{rate:.0f}", f"{rate / cpu:.0f}", case.wanted,
             *(f"{100 * share:.0f} %" for share in shares))
        )  # fmt: skip
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)  # each row takes minutes
    return rows


def _repeated(clips: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    return [clips[k % len(clips)] for k in range(count)]


def device_shares(run: Callable[[], object]) -> tuple[float, float, float]:
    """Return the shares of kernels, copies to the device and copies back in the device time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return shares_of({each.key: each.self_device_time_total for each in seen.key_averages()})


def shares_of(times: Mapping[str, float]) -> tuple[float, float, float]:
    """Return these shares from the time of each operation of the device."""
    to_device = sum(time for name, time in times.items() if "Memcpy HtoD" in name)
    back = sum(time for name, time in times.items() if "Memcpy DtoH" in name)
    whole = sum(times.values()) or 1.0
    return 1.0 - (to_device + back) / whole, to_device / whole, back / whole


def step_rows(device: str = "cuda") -> list[tuple[str, ...]]:
    """Return the rate of a training step of Dau1997 on CPU and GPU."""
    cpu = 1.0 / _step_seconds(Dau1997(FS_HZ, learnable=True), 1, "cpu")
    model = Dau1997(FS_HZ, learnable=True).to(device)
    rows = []
    for batch in STEP_BATCHES:
        try:
            with device_errors(f"a step of {batch}"):
                gpu = batch / _step_seconds(model, batch, device)
        except DeviceMemoryError:
            rows.append((str(batch), f"{cpu:.1f}", "out of memory", "", ""))
            break
        wanted = "20 times" if batch == STEP_BATCHES[-1] else ""
        rows.append((str(batch), f"{cpu:.1f}", f"{gpu:.1f}", f"{gpu / cpu:.0f}", wanted))
    return rows


def _step_seconds(model: Dau1997, batch: int, device: str) -> float:
    generator = torch.Generator().manual_seed(0)
    x = (0.05 * torch.randn(batch, FS_HZ, generator=generator)).to(device)

    def run() -> None:
        step(model, x)
        if x.is_cuda:
            torch.cuda.synchronize()

    return best_of(run, _REPEATS)


_START = """
import time
begin = time.perf_counter()
import numpy as np
from amtcore.features.registry import build_extractor
from amtcore.features.registry import get_model
build_extractor("dau1997", fs_hz=44100, backend="cuda").extract([np.zeros(4410, np.float32)])
print(time.perf_counter() - begin)
"""


def start_rows() -> list[tuple[str, str]]:
    """Return the time of a worker's start without cached kernels, with PTX, with all kernels."""

    def seconds(ptx: str, driver: str) -> str:
        environment = os.environ | {"NUMBA_CACHE_DIR": ptx, "CUDA_CACHE_PATH": driver}
        command = [sys.executable, "-c", _START]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return f"{float(done.stdout):.2f}"

    with tempfile.TemporaryDirectory() as ptx, tempfile.TemporaryDirectory() as driver:
        nothing = seconds(ptx, driver)
        with tempfile.TemporaryDirectory() as empty:
            only_ptx = seconds(ptx, empty)
        return [
            ("worker start to first features on the GPU, nothing compiled", nothing),
            ("the same, PTX in its cache, the driver's cache empty", only_ptx),
            ("the same, both kept", seconds(ptx, driver)),
        ]


#: Warp instructions that a multiprocessor of sm_80 and newer can start in a cycle.
_SCHEDULERS = 4


def cycles(facts: DeviceFacts, gpu: str = "cuda") -> str:
    """Return the cycles of a sample of pooled Dau1997; its 31 channels are one warp a clip."""
    extractor = build_extractor("dau1997", fs_hz=FS_HZ, backend=gpu)
    # On the device, so that only features are copied.
    clip = torch.from_numpy(_speech("dau1997")[0]).to(extractor.backend.device)

    def seconds(count: int) -> float:
        return best_of(partial(extractor.extract, [clip] * count), _REPEATS)

    alone = seconds(1) * facts.clock_hz / len(clip)
    per_clip, count = as_large_as_fits(lambda count: seconds(count) / count, BATCHES[0])
    # With every scheduler busy in every cycle.
    instructions_per_s = facts.clock_hz * facts.multiprocessors * _SCHEDULERS
    return (
        f"Pooled Dau1997: a sample takes {alone:,.0f} cycles for one warp alone, and "
        f"{per_clip * instructions_per_s / len(clip):,.0f} instructions' time a warp "
        f"with {count} clips, at the highest clock with all schedulers busy."
    )


def facts_or_exit(script: str) -> DeviceFacts:
    """Return facts of this machine's GPU; without one print a line and exit with 2."""
    try:
        return device_facts()
    except BackendError as error:
        print(f"benchmarks.{script}: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Measure and write the section, again after each part: a lent machine may be taken away."""
    facts = facts_or_exit("gpu")
    set_num_threads(THREADS)
    torch.set_num_threads(THREADS)
    begin = time.perf_counter()
    parts = [
        f"{facts}.",
        "Seconds of audio per second, float32, clips of "
        f"{CLIP_S:g} s of speech at 74 dB SPL, samples and features copied. Shares are of the "
        "device's busy time in a call.",
    ]

    def write(*more: str) -> None:
        took = f"The section took {time.perf_counter() - begin:.0f} s."
        write_section("GPU", "python -m benchmarks.gpu", "\n\n".join([*parts, *more, took]))

    pooled: list[tuple[str, ...]] = []
    for case in cases():
        pooled += pooled_rows(case)
        write(table(_POOLED_HEAD, pooled))
    parts += [table(_POOLED_HEAD, pooled), cycles(facts)]
    write()
    parts += [
        "A training step of a learnable Dau1997: forward and backward over whole seconds at full "
        "rate, gradients of the input and of every constant; seconds of audio per second.",
        table(_STEP_HEAD, step_rows()),
    ]
    write()
    parts.append(table(("what", "seconds"), start_rows()))
    write()


if __name__ == "__main__":
    main()
