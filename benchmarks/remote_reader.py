"""Reading rows in order from a bucket on loopback that waits before each answer, beside the disk.

Client, server and reader share the cores, so what can be had is bounded by CPU time: what reading
from the disk takes, and what the client for S3 and the server take to move the same files (in
requests of 8 MB, sixteen at once, nothing decoded), divided by the cores. `at most` is that as a
share of the rate from the disk. What is reached is less by the round trips before the first row:
three to open a set and two more to its first values, which is half as long as reading an hour from
the disk takes; so a longer set is read too. The reader itself goes past s3fs
(`storage/straight_ranges.py`), for less CPU time. Disk, store and s3fs take turns.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.feature_sets import STREAMS, features, write_set
from benchmarks.report import table, write_section
from benchmarks.slow_store import SlowStore, slow_store
from earmill import open_features
from earmill.pipeline.storage.layout import Layout

HOURS, ROUNDS = (1.0, 8.0), 5
LATENCY_S, WANTED = 0.02, "80 %"
REQUEST_BYTES, REQUESTS = 8 * 2**20, 16
# Where a format keeps values; the other files of a shard are a thousandth of it.
VALUES = {"zarr": "/values/c/", "parquet": ".parquet"}
HEAD = ("hours", "format", "disk MB/s", "store MB/s", "share", "after opening")
HEAD += ("wanted", "at most", "CPU s: disk", "store", "s3fs alone", "server")
HEAD += ("s3fs alone MB/s", "second epoch, local cache")


@dataclass(frozen=True)
class Taken:
    """Seconds of one pass.

    Args:
        whole: Of opening and reading all rows. reading: Of reading. cpu: CPU seconds of all.
    """

    whole: float
    reading: float
    cpu: float


@dataclass(frozen=True)
class Fetched:
    """Seconds of fetching the values of a format and doing nothing with them; CPU seconds of client
    and server."""

    wall: float
    client: float
    server: float


@dataclass(frozen=True)
class Round:
    """One pass of each, right after one another."""

    disk: Taken
    store: Taken
    alone: Fetched


def taken(opened: Callable[[], Any]) -> Taken:
    """Of opening a set and reading all its rows."""
    begin, busy = time.perf_counter(), time.process_time()
    features = opened()
    there = time.perf_counter()
    if sum(1 for _ in features) != len(features):
        raise RuntimeError("rows are missing")
    end = time.perf_counter()
    spent = Taken(end - begin, end - there, time.process_time() - busy)
    features.close()
    return spent


def fetched(store: SlowStore, fmt: str) -> Fetched:
    """Of all files of a format that hold values."""
    layout = Layout.open(store.uri, store.options)
    files = [(name, size) for name, size in layout.sizes("data").items() if VALUES[fmt] in name]
    parts = [
        (name, start, min(REQUEST_BYTES, size - start))
        for name, size in files
        for start in range(0, size, REQUEST_BYTES)
    ]
    with ThreadPoolExecutor(REQUESTS) as pool:
        begin, busy, served = time.perf_counter(), time.process_time(), store.cpu_s()
        found = sum(pool.map(lambda part: len(layout.read_range(*part)), parts))
        spent = Fetched(
            time.perf_counter() - begin, time.process_time() - busy, store.cpu_s() - served
        )
    if found != sum(size for _, size in files):
        raise RuntimeError("bytes are missing")
    return spent


def again_s(store: SlowStore, fmt: str) -> float:
    """Seconds of reading what is in a local cache; the median."""
    with tempfile.TemporaryDirectory() as folder:

        def cached() -> Any:
            far = {"storage_options": store.options, "local_cache": folder}
            return open_features(store.uri, format=fmt, **far)

        for _ in cached():  # fills it
            pass
        return median(taken(cached).reading for _ in range(ROUNDS))


def line(place: Path, store: SlowStore, hours: float, fmt: str) -> tuple[str, ...]:
    """One set in one format."""
    nbytes = open_features(place, format=fmt).nbytes / 1e6
    cores = len(os.sched_getaffinity(0))
    rounds = [
        Round(
            taken(lambda: open_features(place, format=fmt)),
            taken(lambda: open_features(store.uri, format=fmt, storage_options=store.options)),
            fetched(store, fmt),
        )
        for _ in range(1 + ROUNDS)
    ][1:]  # the first one imports what reading needs

    def middle(of: Callable[[Round], float]) -> float:
        return median(map(of, rounds))

    shares = sorted(100 * each.disk.whole / each.store.whole for each in rounds)
    bound = middle(
        lambda r: r.disk.whole / ((r.disk.cpu + r.alone.client + r.alone.server) / cores)
    )
    return (
        *(f"{hours:g}", fmt),
        f"{nbytes / middle(lambda r: r.disk.whole):.0f}",
        f"{nbytes / middle(lambda r: r.store.whole):.0f}",
        f"{median(shares):.0f} % ({shares[0]:.0f}-{shares[-1]:.0f})",
        f"{100 * middle(lambda r: r.disk.reading / r.store.reading):.0f} %",
        *(WANTED, f"{100 * min(1.0, bound):.0f} %"),
        f"{middle(lambda r: r.disk.cpu):.2f}",
        f"{middle(lambda r: r.store.cpu):.2f}",
        f"{middle(lambda r: r.alone.client):.2f}",
        f"{middle(lambda r: r.alone.server):.2f}",
        f"{nbytes / middle(lambda r: r.alone.wall):.0f}",
        f"{nbytes / again_s(store, fmt):.0f}",
    )


def lines(sets: Mapping[float, Path]) -> Iterator[tuple[str, ...]]:
    """A line for each set, by its hours, and format."""
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
        "the same cores; an hour, and eight, ten minutes a shard. Medians of "
        f"{ROUNDS} rounds of disk, store and s3fs; a share is that of one round, in brackets the "
        "range. `share` counts opening, `after opening` does not. `s3fs alone` fetches the files "
        "that hold values in requests of 8 MB, sixteen at once, and decodes nothing, in MB of the "
        "features they hold. `at most` is the share that the cores allow: the CPU seconds of "
        "reading from the disk, of s3fs alone and of the server, divided by the cores. The last "
        "column reads again what is in the local cache."
    )
    command = "python -m benchmarks.remote_reader"
    write_section("Rows from a bucket", command, f"{note}\n\n{table(HEAD, found)}")


if __name__ == "__main__":
    main()
