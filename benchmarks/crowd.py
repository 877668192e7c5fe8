"""A thousand workers on one driver: shards per second, and their bounds.

The workers sleep instead of computing, and commit real shards (`benchmarks.sleeping_workers`);
claims, lock, ledger and loop are the code of a job. The workers offer more than this machine can
write, so the rate is its limit. There are three bounds. Publishing takes CPU time for encoding and
hashing, which a cluster does on all its machines. The one driver takes CPU time. And a commit of
one Parquet file needs `FLUSHES` flushes of the disk. CPU time is measured from a tenth to nine
tenths of the shards. The disk is measured alone before, with the same number of threads. The stores
take turns; the table has the median run of each, and the range. Files stay until the end: a disk
that has just removed many files is slow to create new ones.

    python -m benchmarks.crowd [FOLDER]            commits to a folder there, and to memory
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

from benchmarks.report import table, write_section
from benchmarks.sleeping_workers import PROCESSES, WRITERS, run_sleeping
from earmill.pipeline.driver import events
from earmill.pipeline.spec.job import JobSpec

WORKERS, SHARDS, SLEEP_S, ROUNDS = 1000, 6000, 4.0, 3
MEMORY = Path("/dev/shm")
WANTED = 200
# Flushes of the data and rows files, their two folders, the record and its folder.
FLUSHES = 6
FLUSHING_S = 3.0


@dataclass(frozen=True, order=True)
class Rates:
    """Commits per second, busy cores, CPU ms of a commit, and possible flushes per second."""

    commits: float
    busy: float
    publishing_ms: float
    driver_ms: float
    could_flush: float


class Watch:
    """Takes events; notes time and CPU seconds of driver and writers at two points of the run."""

    def __init__(self) -> None:
        self._done = 0
        self.at_s: list[float] = []
        self.cpu_s: list[tuple[float, float]] = []

    def __call__(self, event: events.Event) -> None:
        if not isinstance(event, events.ShardDone):
            return
        self._done += 1
        if self._done in (SHARDS // 10, SHARDS * 9 // 10):
            driver = psutil.Process()
            writers = driver.children(recursive=True)
            self.at_s.append(time.perf_counter())
            self.cpu_s.append((_cpu_s(driver), sum(map(_cpu_s, writers))))

    def rates(self, could_flush: float) -> Rates:
        """Return the rates between the two points."""
        count = SHARDS * 9 // 10 - SHARDS // 10
        rate = count / (self.at_s[1] - self.at_s[0])
        driver, writers = (
            1e3 * (after - before) / count for before, after in zip(*self.cpu_s, strict=True)
        )
        return Rates(rate, rate * (writers + driver) / 1e3, writers, driver, could_flush)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def flushes_a_second(folder: Path) -> float:
    """Return how many new small files per second the idle disk makes durable."""
    until_s = time.perf_counter() + FLUSHING_S

    def flush(writer: int) -> int:
        count = 0
        while time.perf_counter() < until_s:
            with open(folder / f"{writer}-{count}", "wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            count += 1
        return count

    writers = PROCESSES * WRITERS
    with ThreadPoolExecutor(writers) as pool:
        return sum(pool.map(flush, range(writers))) / FLUSHING_S


def measure(folder: Path) -> Rates:
    """Measure one run on a store in a folder."""
    flushed = folder / "flushed"
    flushed.mkdir()
    could = flushes_a_second(flushed) / FLUSHES
    manifest = folder / "m.csv"
    rows = (f"clips/{n:07d}.flac,600" for n in range(SHARDS))
    manifest.write_text("\n".join(["uri,seconds", *rows]))
    columns = {"uri": "uri", "duration": "seconds"}
    spec = JobSpec.load(
        {
            "source": {"kind": "manifest", "uri": str(manifest), "columns": columns},
            "extract": [{"model": "dau1997", "streams": {"adaptation": {}}}],
            "output": {"uri": f"{folder}/out", "formats": ["parquet"]},
        }
    )
    watch = Watch()
    end = run_sleeping(spec, workers=WORKERS, sleep_s=SLEEP_S, sink=watch)
    assert end.rows_ok == SHARDS, end.message
    return watch.rates(could)


def in_turns(places: dict[str, Path | None]) -> dict[str, list[Rates]]:
    """Return the runs of each store, from the slowest to the fastest."""
    found: dict[str, list[Rates]] = {name: [] for name in places}
    with ExitStack() as stack:
        for _ in range(ROUNDS):
            for name, parent in places.items():
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=parent))
                found[name].append(measure(Path(folder)))
    return {name: sorted(runs) for name, runs in found.items()}


def line(name: str, runs: list[Rates]) -> list[str]:
    """Return the line of a store's median run."""
    commits, busy, publishing, driver, could = astuple(runs[len(runs) // 2])
    return [
        name,
        f"{commits:.0f} ({runs[0].commits:.0f}-{runs[-1].commits:.0f})",
        f"{busy:.2f}",
        f"{publishing:.1f}",
        f"{driver:.2f}",
        f"{1e3 / driver:.0f}",
        f"{could:.0f}",
    ]


def main(arguments: list[str]) -> None:
    """Measure both stores."""
    places: dict[str, Path | None] = {"disk": Path(arguments[0]) if arguments else None}
    if MEMORY.is_dir():
        places["memory"] = MEMORY
    lines = [line(name, runs) for name, runs in in_turns(places).items()]
    head = [
        "store",
        "commits/s",
        "cores busy",
        "publishing, CPU ms",
        "driver, CPU ms",
        "one driver could take/s",
        "the store alone could flush/s",
    ]
    note = (
        f"{WORKERS} workers, {SHARDS} shards of one row, {SLEEP_S:g} s of sleep each on average; "
        f"wanted: {WANTED} commits a second. The median of {ROUNDS} runs in turns, and the range. "
        "Workers, driver and store share this machine and its cores, and publishing is what they "
        "are spent on. With writers elsewhere the driver's own CPU time is a bound, and what the "
        f"store flushes: {FLUSHES} times a commit."
    )
    write_section(
        "A thousand workers", "python -m benchmarks.crowd", f"{table(head, lines)}\n\n{note}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
