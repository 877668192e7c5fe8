"""Reading rows in order from a bucket on loopback that waits before each answer, beside the disk.

Client, server and reader share the cores, so what can be had is bounded by CPU time: what reading
from the disk takes, and what the client for S3 and the server take to move the same files (in
requests of 8 MB, sixteen at once, nothing decoded), divided by the cores. `at most` is that as a
share of the rate from the disk. What is reached is less by the round trips before the first row:
three to open a set and three more to its first values, which is as long as reading an hour from the
disk takes; so a longer set is read too. The reader itself goes past s3fs
(`storage/straight_ranges.py`), for less CPU time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.slow_store import SlowStore, slow_store
from earmill import open_features
from earmill.pipeline.storage.layout import Layout

PASSES = 3
LATENCY_S, WANTED = 0.02, "80 %"
REQUEST_BYTES, REQUESTS = 8 * 2**20, 16
# Where a format keeps values; the other files of a shard are a thousandth of it.
VALUES = {"zarr": "/values/c/", "parquet": ".parquet"}
HEAD = (
    "hours",
    "format",
    "disk MB/s",
    "store MB/s",
    "share",
    "after opening: disk",
    "store",
    "share",
)
HEAD += ("wanted", "at most", "CPU s: disk", "store", "s3fs alone", "server")
HEAD += ("s3fs alone MB/s", "second epoch, local cache")


@dataclass(frozen=True)
class Taken:
    """Least seconds of some passes.

    Args:
        whole: Of opening and reading all rows. reading: Of reading. cpu: CPU seconds of all.
    """

    whole: float
    reading: float
    cpu: float


def taken(opened: Callable[[], Any]) -> Taken:
    """Of opening a set and reading all its rows."""
    passes = []
    for _ in range(PASSES):
        begin, busy = time.perf_counter(), time.process_time()
        features = opened()
        there = time.perf_counter()
        if sum(1 for _ in features) != len(features):
            raise RuntimeError("rows are missing")
        end = time.perf_counter()
        passes.append((end - begin, end - there, time.process_time() - busy))
        features.close()
    return Taken(*(min(each) for each in zip(*passes, strict=True)))


def fetching(store: SlowStore, fmt: str) -> tuple[float, float, float]:
    """Least seconds of fetching the values of a format and doing nothing with them, and CPU seconds
    of client and server."""
    layout = Layout.open(store.uri, store.options)
    files = [(name, size) for name, size in layout.sizes("data").items() if VALUES[fmt] in name]
    parts = [
        (name, start, min(REQUEST_BYTES, size - start))
        for name, size in files
        for start in range(0, size, REQUEST_BYTES)
    ]
    passes = []
    with ThreadPoolExecutor(REQUESTS) as pool:
        for _ in range(PASSES):
            begin, busy, served = time.perf_counter(), time.process_time(), store.cpu_s()
            fetched = sum(pool.map(lambda part: len(layout.read_range(*part)), parts))
            passes.append(
                (
                    time.perf_counter() - begin,
                    time.process_time() - busy,
                    store.cpu_s() - served,
                )
            )
            if fetched != sum(size for _, size in files):
                raise RuntimeError("bytes are missing")
    wall, cpu, server = (min(each) for each in zip(*passes, strict=True))
    return wall, cpu, server


def _line(place: Path, store: SlowStore, hours: float, fmt: str) -> tuple[str, ...]:
    nbytes = open_features(place, format=fmt).nbytes / 1e6
    far = {"format": fmt, "storage_options": store.options}
    disk = taken(lambda: open_features(place, format=fmt))
    there = taken(lambda: open_features(store.uri, **far))
    with tempfile.TemporaryDirectory() as folder:

        def cached() -> Any:
            return open_features(store.uri, local_cache=folder, **far)

        for _ in cached():  # fills it
            pass
        again = taken(cached).reading
    alone, client, server = fetching(store, fmt)
    cores = len(os.sched_getaffinity(0))
    bound = disk.whole / ((disk.cpu + client + server) / cores)
    figures = []
    for here, away in ((disk.whole, there.whole), (disk.reading, there.reading)):
        figures += [f"{nbytes / here:.0f}", f"{nbytes / away:.0f}", f"{100 * here / away:.0f} %"]
    figures += [WANTED, f"{100 * min(1.0, bound):.0f} %"]
    figures += [f"{seconds:.2f}" for seconds in (disk.cpu, there.cpu, client, server)]
    return f"{hours:g}", fmt, *figures, f"{nbytes / alone:.0f}", f"{nbytes / again:.0f}"


def lines(sets: Mapping[float, Path]) -> Iterator[tuple[str, ...]]:
    """A line for each set, by its hours, and format."""
    for hours, place in sets.items():
        with slow_store(place, LATENCY_S) as store:
            for fmt in ("zarr", "parquet"):
                yield _line(place, store, hours, fmt)


def section(sets: Mapping[float, Path]) -> str:
    """The part of the report as Markdown.

    Args:
        sets: By their hours.
    """
    note = (
        f"In order from a bucket on loopback that waits {1e3 * LATENCY_S:.0f} ms to answer "
        "(`benchmarks/slow_store.py`), on the same cores: the hour, and a longer set of rows that "
        "are made in the same way, ten minutes a shard. `s3fs alone` fetches the files that hold "
        "values in requests of 8 MB, sixteen at once, and decodes nothing, in MB of the features "
        "they hold. `at most` is the share that the cores allow: the CPU seconds of reading from "
        "the disk, of s3fs alone and of the server, divided by the cores. The last column reads "
        "again what is in the local cache."
    )
    return f"{note}\n\n{table(HEAD, list(lines(sets)))}"
