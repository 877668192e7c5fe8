"""Reading rows in order from a bucket on loopback that waits before each answer, beside the disk.

The bound is what the client for S3 gives by itself: the same files in requests of 8 MB, sixteen at
once, nothing decoded. Client, server and reader share the cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.slow_store import slow_store
from earmill import open_features
from earmill.pipeline.storage.layout import Layout

PASSES = 3
LATENCY_S, WANTED = 0.02, "80 %"
REQUEST_BYTES, REQUESTS = 8 * 2**20, 16
HEAD = ("format", "disk MB/s", "store MB/s", "share", "wanted", "after opening: disk", "store")
HEAD += ("share", "s3fs alone MB/s", "second epoch, local cache")


def seconds_of(opened: Callable[[], Any]) -> tuple[float, float]:
    """Least seconds of opening and reading all rows, and of reading alone."""
    whole = reading = float("inf")
    for _ in range(PASSES):
        begin = time.perf_counter()
        features = opened()
        there = time.perf_counter()
        if sum(1 for _ in features) != len(features):
            raise RuntimeError("rows are missing")
        end = time.perf_counter()
        whole, reading = min(whole, end - begin), min(reading, end - there)
        features.close()
    return whole, reading


def fetching_s(uri: str, options: Mapping[str, Any], suffix: str) -> float:
    """Least seconds of fetching the files of a format and doing nothing with them."""
    layout = Layout.open(uri, options)
    files = [(name, size) for name, size in layout.sizes("data").items() if suffix in name]
    parts = [
        (name, start, min(REQUEST_BYTES, size - start))
        for name, size in files
        for start in range(0, size, REQUEST_BYTES)
    ]
    taken = []
    with ThreadPoolExecutor(REQUESTS) as pool:
        for _ in range(PASSES):
            begin = time.perf_counter()
            fetched = sum(pool.map(lambda part: len(layout.read_range(*part)), parts))
            taken.append(time.perf_counter() - begin)
            if fetched != sum(size for _, size in files):
                raise RuntimeError("bytes are missing")
    return min(taken)


def _line(place: Path, uri: str, options: Mapping[str, Any], fmt: str) -> tuple[str, ...]:
    nbytes = open_features(place, format=fmt).nbytes / 1e6
    disk = seconds_of(lambda: open_features(place, format=fmt))
    store = seconds_of(lambda: open_features(uri, format=fmt, storage_options=options))
    with tempfile.TemporaryDirectory() as folder:

        def cached() -> Any:
            return open_features(uri, format=fmt, storage_options=options, local_cache=folder)

        for _ in cached():  # fills it
            pass
        again = seconds_of(cached)[1]
    figures: list[str] = []
    for here, there in zip(disk, store, strict=True):
        figures += [f"{nbytes / here:.0f}", f"{nbytes / there:.0f}", f"{100 * here / there:.0f} %"]
    alone = fetching_s(uri, options, f".{fmt}")
    figures.insert(3, WANTED)
    return fmt, *figures, f"{nbytes / alone:.0f}", f"{nbytes / again:.0f}"


def lines(place: Path) -> Iterator[tuple[str, ...]]:
    """A line for each format."""
    with slow_store(place, LATENCY_S) as (uri, options):
        for fmt in ("zarr", "parquet"):
            yield _line(place, uri, options, fmt)


def section(place: Path) -> str:
    """The part of the report as Markdown."""
    note = (
        f"In order from a bucket on loopback that waits {1e3 * LATENCY_S:.0f} ms to answer "
        "(`benchmarks/slow_store.py`), on the same cores; `s3fs alone` fetches the same files in "
        "requests of 8 MB and decodes nothing, in MB of the features they hold. The last column "
        "reads again what is in the local cache."
    )
    return f"{note}\n\n{table(HEAD, list(lines(place)))}"
