"""Reading rows in order from a bucket on loopback with a delay, compared with the disk.

Client, server and reader share the cores, and reading from the disk keeps both cores busy. So the
share of the disk's rate is a share of CPU time. `CPU share` is the CPU time of reading from the
disk, divided by the CPU time of reader and server with the bucket. `at most` is its bound. For the
bound the storage layer only fetches the same files, in requests of 8 MB, sixteen at once; the rest
costs as much as with the disk. Round trips before the first row reduce
the rate further: three to open a set and two to its first values. They take half as long as reading
an hour from the disk, so longer sets are read too. A real store is another machine. So for `apart`
the reader has one core, with the disk and with the store, and the store has the other core. All
runs take turns.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from benchmarks.cores import apart_from
from benchmarks.feature_sets import STREAMS, features, write_set
from benchmarks.report import table, write_section
from benchmarks.slow_store import SlowStore, slow_store
from earmill import open_features
from earmill.pipeline.storage.layout import Layout

HOURS, ROUNDS = (1.0, 8.0, 16.0), 5
LATENCY_S, WANTED = 0.02, "80 %"
REQUEST_BYTES, REQUESTS = 8 * 2**20, 16
# Files with the values of a format; the other files of a shard have a thousandth of the bytes.
VALUES = {"zarr": "/values/c/", "parquet": ".parquet"}
# Bytes of memory into which files of the disk are read again and again.
KEPT_BYTES = 2**20
HEAD = ("hours", "format", "disk MB/s", "store MB/s", "share", "after opening", "wanted")
HEAD += ("apart: disk MB/s", "apart: store MB/s", "apart: share", "apart: after opening")
HEAD += ("CPU share", "at most", "CPU s: disk", "files alone", "store", "server")
HEAD += ("client alone", "its server", "client alone MB/s", "second epoch, local cache")

# Reads bytes of a file (path, first byte, size) into memory, each piece over the one before.
Move = Callable[[str, int, int, memoryview], None]
Mover = Callable[[], AbstractContextManager[Move]]


@dataclass(frozen=True)
class Taken:
    """Seconds of one pass.

    Args:
        whole: Seconds of opening and reading all rows.
        reading: Seconds of reading.
        cpu: CPU seconds of all processes.
    """

    whole: float
    reading: float
    cpu: float


@dataclass(frozen=True)
class Moved:
    """Seconds of moving the values of a format into memory; CPU seconds of client and server."""

    wall: float
    client: float
    server: float


@dataclass(frozen=True)
class Round:
    """One pass of each run by turns: disk, store with the CPU seconds of its server, and both with
    reader and server on different cores."""

    disk: Taken
    store: Taken
    server: float
    apart: tuple[Taken, Taken]
    alone: Moved
    files: Moved


def taken(opened: Callable[[], Any]) -> Taken:
    """Open a set, read all rows, and return the seconds."""
    begin, busy = time.perf_counter(), time.process_time()
    features = opened()
    there = time.perf_counter()
    if sum(1 for _ in features) != len(features):
        raise RuntimeError("rows are missing")
    end = time.perf_counter()
    spent = Taken(end - begin, end - there, time.process_time() - busy)
    features.close()
    return spent


def values_of(store: SlowStore, fmt: str) -> list[tuple[str, int, int]]:
    """Return path, first byte and size of every request for the values of a format."""
    sizes = Layout.open(store.uri, store.options).sizes("data")
    files = [(name, size) for name, size in sizes.items() if VALUES[fmt] in name]
    return [
        (name, start, min(REQUEST_BYTES, size - start))
        for name, size in files
        for start in range(0, size, REQUEST_BYTES)
    ]


def moved(store: SlowStore, parts: Sequence[tuple[str, int, int]], mover: Mover) -> Moved:
    """Move all parts, sixteen at once."""
    left: SimpleQueue[tuple[str, int, int] | None] = SimpleQueue()
    for part in (*parts, *[None] * REQUESTS):
        left.put(part)

    def work(_: int) -> None:
        memory = memoryview(bytearray(KEPT_BYTES))
        with mover() as move:
            while part := left.get():
                move(*part, memory)

    with ThreadPoolExecutor(REQUESTS) as pool:
        begin, busy, served = time.perf_counter(), time.process_time(), store.cpu_s()
        list(pool.map(work, range(REQUESTS)))
        return Moved(
            time.perf_counter() - begin, time.process_time() - busy, store.cpu_s() - served
        )


@contextmanager
def from_store(layout: Layout) -> Iterator[Move]:
    """Yield a function that reads through the storage layer, which has its own memory."""

    def move(name: str, start: int, nbytes: int, memory: memoryview) -> None:
        if len(layout.read_range(name, start, nbytes)) != nbytes:
            raise RuntimeError("bytes are missing")

    yield move


@contextmanager
def from_disk(place: Path) -> Iterator[Move]:
    """Yield a function that reads from the disk, file by file."""

    def move(name: str, start: int, nbytes: int, memory: memoryview) -> None:
        file = os.open(place / name, os.O_RDONLY)
        try:
            for done in range(0, nbytes, KEPT_BYTES):
                piece = memory[: nbytes - done]
                if os.preadv(file, [piece], start + done) != len(piece):
                    raise RuntimeError("bytes are missing")
        finally:
            os.close(file)

    yield move


def again_s(store: SlowStore, fmt: str) -> float:
    """Return the median seconds of reading from a local cache."""
    with tempfile.TemporaryDirectory() as folder:

        def cached() -> Any:
            far = {"storage_options": store.options, "local_cache": folder}
            return open_features(store.uri, format=fmt, **far)

        for _ in cached():  # fills the cache
            pass
        return median(taken(cached).reading for _ in range(ROUNDS))


def line(place: Path, store: SlowStore, hours: float, fmt: str) -> tuple[str, ...]:
    """Return the line of one set in one format."""
    nbytes = open_features(place, format=fmt).nbytes / 1e6
    parts = values_of(store, fmt)
    movers = [partial(from_store, Layout.open(store.uri, store.options)), partial(from_disk, place)]

    def both() -> tuple[Taken, Taken]:
        far = {"format": fmt, "storage_options": store.options}
        from_there = taken(lambda: open_features(place, format=fmt))
        return from_there, taken(lambda: open_features(store.uri, **far))

    def turn() -> Round:
        served = store.cpu_s()
        found = both()
        served = store.cpu_s() - served
        with apart_from(store.process):
            apart = both()
        return Round(*found, served, apart, *(moved(store, parts, mover) for mover in movers))

    # The first pass imports the modules of reading.
    rounds = [turn() for _ in range(1 + ROUNDS)][1:]

    def middle(of: Callable[[Round], float]) -> float:
        return median(map(of, rounds))

    def rates(pair: Callable[[Round], tuple[Taken, Taken]]) -> tuple[str, ...]:
        pairs = [*map(pair, rounds)]
        shares = sorted(100 * disk.whole / far.whole for disk, far in pairs)
        return (
            *(
                f"{nbytes / median(each.whole for each in side):.0f}"
                for side in zip(*pairs, strict=True)
            ),
            f"{median(shares):.0f} % ({shares[0]:.0f}-{shares[-1]:.0f})",
            f"{100 * median(disk.reading / far.reading for disk, far in pairs):.0f} %",
        )

    reached = middle(lambda r: r.disk.cpu / (r.store.cpu + r.server))
    bound = middle(
        lambda r: r.disk.cpu / (r.disk.cpu - r.files.client + r.alone.client + r.alone.server)
    )
    return (
        *(f"{hours:g}", fmt),
        *(*rates(lambda r: (r.disk, r.store)), WANTED, *rates(lambda r: r.apart)),
        *(f"{100 * reached:.0f} %", f"{100 * bound:.0f} %"),
        f"{middle(lambda r: r.disk.cpu):.2f}",
        f"{middle(lambda r: r.files.client):.2f}",
        f"{middle(lambda r: r.store.cpu):.2f}",
        f"{middle(lambda r: r.server):.2f}",
        f"{middle(lambda r: r.alone.client):.2f}",
        f"{middle(lambda r: r.alone.server):.2f}",
        f"{nbytes / middle(lambda r: r.alone.wall):.0f}",
        f"{nbytes / again_s(store, fmt):.0f}",
    )


def lines(sets: Mapping[float, Path]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each set and format."""
    for hours, place in sets.items():
        with slow_store(place, LATENCY_S) as store:
            for fmt in ("zarr", "parquet"):
                yield line(place, store, hours, fmt)


def main() -> None:
    """Measure and write the section."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        sets = {hours: Path(folder) / f"{hours:g}" for hours in HOURS}
        for hours, place in sets.items():
            write_set(place, *features(hours, STREAMS))
        found = list(lines(sets))
    note = (
        "All Dau1997 streams, in order, from a bucket on loopback that waits "
        f"{1e3 * LATENCY_S:.0f} ms to answer (`benchmarks/slow_store.py`), and from the disk, on "
        "the same cores; an hour, eight and sixteen, ten minutes a shard. Medians of "
        f"{ROUNDS} rounds of disk, store and client; a share is that of one round, in brackets the "
        "range. `share` counts opening, `after opening` does not. `apart`: the reader has one core "
        "with disk and store alike, the store the other. `CPU share`: CPU seconds of "
        "reading from the disk, to those of reader and server with the bucket. `client alone` "
        "is the storage layer: it fetches the files that hold values, in requests of 8 MB, sixteen "
        "at once; `files alone` reads them so from the disk. `at most` is the `CPU share` of "
        "a reader that costs as much as the disk's, with the first in place of the second. Where "
        "both cores are busy a share can be no larger, but by using them better than the disk's "
        "reader does. The last column reads again what is in the local cache."
    )
    command = "python -m benchmarks.remote_reader"
    write_section("Rows from a bucket", command, f"{note}\n\n{table(HEAD, found)}")


if __name__ == "__main__":
    main()
