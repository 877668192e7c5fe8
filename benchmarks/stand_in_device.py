"""Jobs on a stand-in for a GPU: `python -m benchmarks.stand_in_device [HOURS] [PYTHON]`.

The device sleeps for the time that its rate implies, so this shows whether a job feeds its device.
The model (`benchmarks.stand_in_model`) goes the way of a GPU's models. It returns noise with the
frames of Dau1997. The host's rate is the rate of a job on the cores, with a model that answers at
once. PYTHON is the interpreter of release ca8dd45; releases take turns. Rates count from the first
warm worker to the written index.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile

from benchmarks import stand_in_model
from benchmarks.job import CLIP_S, HOUR_CLIPS, cpu_table, run_job, write_corpus
from benchmarks.report import table, write_section

HOURS = 5
# Rates of devices, as parts of the host's rate right before.
DEVICES = (1 / 3, 2 / 3, 1.0)
HERE, THERE = "this commit", "ca8dd45"
# Wanted shares of the smaller rate, of one hour and of more; CPU time over soundfile's; cores busy.
WANTED_HOUR, WANTED = 0.75, 0.90
OVER_SOUNDFILE, CORES_BUSY = 1.2, 0.85
_HEAD = ("audio", "device", "release", "host", "job", "of the smaller", "wanted", "cores busy",
         "others")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One job: seconds of audio per second, shares of the cores, last event."""

    rate: float
    busy: float
    others: float
    end: dict

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per second of audio."""
        spent = self.end["cpu_s"]
        return 1000 * (sum(spent.values()) - spent["idle"]) / self.end["seconds"]


def register(folder: Path) -> None:
    """Make a distribution in a folder that has the model, for either release."""
    shutil.copy(stand_in_model.__file__, folder)
    about = folder / "stand_in-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
    model = f"{stand_in_model.NAME} = stand_in_model:StandIn\n"
    groups = [f"[{group}]\n{model}" for group in ("amtcore.models", "earmill.models")]
    (about / "entry_points.txt").write_text("\n".join(groups))


def run(corpus: Path, extension: Path, python: str, device: float | None) -> Run:
    """Run one job on a device, or on the cores."""
    spec = {
        "source": {"kind": "files", "uri": str(corpus)},
        "extract": [{"model": stand_in_model.NAME}],
        "run": {"device": "cpu" if device is None else "cuda"},
    }
    environment = {
        "PYTHONPATH": str(extension),
        "AMTCORE_GPU": "interpreted",
        stand_in_model.RATE_VARIABLE: "" if device is None else str(device),
    }
    with tempfile.TemporaryDirectory() as folder:
        options: Any = {"python": python, "environment": environment, "shards": {}}
        events, _ = run_job(Path(folder), spec, **options)
    ready, end = events["workers_ready"], events["summary"]
    took_s = end["at_s"] - ready["at_s"]
    spent_s = sum(end["cpu_s"].values()) - end["cpu_s"]["idle"]
    others_s = max(0.0, end["busy_s"] - ready["busy_s"] - spent_s)
    cores_s = took_s * (os.cpu_count() or 1)
    return Run(end["seconds"] / took_s, spent_s / cores_s, others_s / cores_s, end)


def soundfile_ms(corpus: Path) -> float:
    """Return the CPU milliseconds that soundfile takes to decode a second of audio."""
    paths = sorted(corpus.rglob("*.flac"))
    before_s = time.process_time()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda path: soundfile.read(path, dtype="float32"), paths):
            pass
    return 1000 * (time.process_time() - before_s) / (len(paths) * CLIP_S)


class Measurement:
    """All runs of some releases; `hosts` are the runs on the cores, by release."""

    def __init__(self, hours: int, pythons: dict[str, str], root: Path) -> None:
        self._pythons, self._extension = pythons, root / "extension"
        self._extension.mkdir()
        register(self._extension)
        self._corpora = {hours: root / "audio", 1: root / "audio" / "0"}
        for hour in range(hours):
            write_corpus(root / "audio" / str(hour), stand_in_model.FS_HZ)
        self.hosts: dict[str, list[Run]] = {release: [] for release in pythons}
        self.soundfile_ms: list[float] = []
        self.rows: list[tuple[str, ...]] = []

    def measure(self) -> None:
        """Run everything, releases by turns, each device between two runs of the host."""
        self._run_hosts()
        for part in DEVICES:
            device = round(part * statistics.fmean(runs[-1].rate for runs in self.hosts.values()))
            made = [
                (hours, release, self._run(release, hours, device))
                for hours in self._corpora
                for release in self._pythons
            ]
            self._run_hosts()
            self.rows += [self._row(hours, release, device, run) for hours, release, run in made]

    def _run_hosts(self) -> None:
        self.soundfile_ms.append(soundfile_ms(self._corpora[1]))
        for release, runs in self.hosts.items():
            runs.append(self._run(release, max(self._corpora), None))

    def _run(self, release: str, hours: int, device: float | None) -> Run:
        made = run(self._corpora[hours], self._extension, self._pythons[release], device)
        print(hours, release, device, f"{made.rate:.0f}", f"{made.busy:.0%}", f"{made.others:.0%}",
              f"{made.cpu_ms:.3f} ms", sep=" | ", file=sys.stderr, flush=True)  # fmt: skip
        return made

    def _row(self, hours: int, release: str, device: float, made: Run) -> tuple[str, ...]:
        host = statistics.fmean(run.rate for run in self.hosts[release][-2:])
        wanted = WANTED_HOUR if hours == 1 else WANTED
        shares = made.rate / min(host, device), wanted, made.busy, made.others
        rates = (f"{rate:.0f}" for rate in (host, made.rate))
        return f"{hours} h", f"{device:.0f}", release, *rates, *(f"{each:.0%}" for each in shares)


def main() -> None:
    """Measure all and write the section."""
    hours = int((sys.argv[1:] or [HOURS])[0])
    pythons = {THERE: sys.argv[2]} if len(sys.argv) > 2 else {}
    with tempfile.TemporaryDirectory() as folder:
        measured = Measurement(hours, pythons | {HERE: sys.executable}, Path(folder))
        measured.measure()
    decoding_ms = statistics.median(measured.soundfile_ms)
    alone = []
    for release, runs in measured.hosts.items():
        rate, busy, others, cpu_ms = (
            statistics.median(getattr(one, name) for one in runs)
            for name in ("rate", "busy", "others", "cpu_ms")
        )
        alone.append(
            (release, f"{rate:.0f}", f"{busy:.0%}", f"{others:.0%}", f"{cpu_ms:.3f}",
             f"{cpu_ms / decoding_ms:.2f}")
        )  # fmt: skip
    costs = cpu_table({release: runs[-1].end for release, runs in measured.hosts.items()})
    parts = [
        f"{hours} h of generated speech at {stand_in_model.FS_HZ} Hz, {hours * HOUR_CLIPS} FLAC "
        f"files of {CLIP_S:g} s, float16 Zarr, {os.cpu_count()} cores, one worker. A launch "
        "sleeps as long as the device's rate implies. Rates are seconds of audio per second. The "
        f"host's is the mean of {hours} h before and after, on the cores with a model that answers "
        "at once. The smaller is the smaller of device and host. Others is the share of the cores "
        "that other processes had; where that is more than a few percent, they also take what a "
        "job leaves idle, and a row compares with the host right before and after it alone.",
        table(_HEAD, measured.rows),
        f"The host alone, medians of {len(measured.soundfile_ms)} runs of {hours} h. soundfile "
        f"alone took {decoding_ms:.3f} CPU ms to decode a second of audio, between the same runs. "
        f"Wanted: at most {OVER_SOUNDFILE:g} times that, and cores busy to {CORES_BUSY:.0%} where "
        "no other process runs.",
        table(("release", "host", "cores busy", "others", "CPU ms", "of soundfile"), alone),
        # The last row relates to the model, which computes nothing.
        costs.rpartition("\n")[0],
    ]
    command = f"python -m benchmarks.stand_in_device {hours}" + " PYTHON" * bool(sys.argv[2:])
    write_section("A job that feeds its device", command, "\n\n".join(parts))


if __name__ == "__main__":
    main()
