"""Training batches: rows per second with and without workers, padding, and the time to resume.

The cache is much smaller than the set, so every epoch decodes its rows, as with large sets. Workers
stay between epochs; the first epoch, in which they start, is not counted. Loaders take turns, one
epoch each, so that a round meets the same machine; a ratio is the median over the rounds. CPU time
is counted for the training process alone (its loss to reading) and for all processes. Without
workers, threads decode blocks on both cores, and two workers can only use the time that these
threads leave idle. So the loader without workers also runs on one core, as each worker does. The
last lines plan epochs of a million rows and resume in the middle.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from torch.utils.data import DataLoader

from benchmarks.cores import on_cores
from benchmarks.feature_sets import features, write_set
from benchmarks.report import table, write_section
from earmill import FeatureLoader, FeatureStream, collate, mix, open_features

HOURS = 2.0
BATCH_ROWS = 16
# Frames of 16 rows of mean length, padded.
BATCH_FRAMES = 16_000
CACHE_BYTES, WINDOW_BYTES = 64 * 2**20, 32 * 2**20
EPOCHS = 12
SETTINGS = ((0, None), (1, "fork"), (2, "fork"), (1, "spawn"), (2, "spawn"))
PLANNED_ROWS = 1_000_000
WANTED_RATIO = 1.6


class Planned:
    """The part of a feature set that planning needs: a million rows of 2 to 15 s, eight a block."""

    nbytes, fingerprint = 2**40, "planned"

    def __init__(self) -> None:
        info = {"name": "modulation", "frame_rate_hz": 100.0, "width": 248, "layout": "frames"}
        self.streams = {"modulation": SimpleNamespace(**info)}
        frames = np.random.default_rng(0).integers(200, 1500, PLANNED_ROWS)
        self.table = pa.table({"seconds": frames / 100, "modulation_n_frames": frames})

    def __len__(self) -> int:
        return PLANNED_ROWS

    def block_rows(self) -> np.ndarray:
        """Return the number of rows in each row group."""
        return np.full(PLANNED_ROWS // 8, 8, np.int64)


def rounds(loaders: Sequence[tuple[Any, bool]]) -> np.ndarray:
    """Run epochs of the loaders by turns, on one core where asked.

    Returns (epochs after the first, loaders, 3): wall seconds, CPU seconds of this process, and CPU
    seconds of all processes.
    """
    found: list[list[tuple[float, ...]]] = []
    for n in range(EPOCHS):
        found.append([])
        for loader, one_core in loaders:
            with on_cores(1) if one_core else nullcontext():
                found[-1].append(spent(loader, n))
    return np.array(found[1:])


def spent(loader: Any, epoch: int) -> tuple[float, ...]:
    """Return wall seconds, CPU seconds of this process, and of all processes, of one epoch."""
    if isinstance(loader, FeatureLoader):
        loader.set_epoch(epoch)
    before = time.perf_counter(), time.process_time(), cpu_of_all()
    for _ in loader:
        pass
    after = time.perf_counter(), time.process_time(), cpu_of_all()
    return tuple(now - then for now, then in zip(after, before, strict=True))


def cpu_of_all() -> float:
    """Return the CPU seconds of this process and its running children."""
    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    return sum(found.user + found.system for found in times)


def speeds(place: Path, fmt: str, n_rows: int) -> list[tuple[str, ...]]:
    """Return the lines of one format, each with its ratio to no workers."""
    settings: list[tuple[str, int, str | None, bool]]
    settings = [("FeatureLoader", *setting, False) for setting in SETTINGS]
    settings[1:1] = [("FeatureLoader, one core", 0, None, True)]
    loaders = [(_ours(place, fmt, *setting[1:3]), setting[3]) for setting in settings]
    found = rounds([*loaders, (_bare(place, fmt), False)])
    settings += [("DataLoader, index order", 2, "fork", False)]
    lines: list[tuple[str, ...]] = []
    for n, (what, workers, method, _) in enumerate(settings):
        wall_s, *cpu_s = np.median(found[:, n], axis=0)
        ratios = [found[:, base, 0] / found[:, n, 0] for base in (0, 1)]
        is_asked = workers == 2 and what == "FeatureLoader"
        lines.append(
            (
                *(fmt, what, str(workers), method or ""),
                f"{n_rows / wall_s:.0f}",
                *(f"{np.median(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in ratios),
                f"{WANTED_RATIO:g}" if is_asked else "",
                *(f"{1e3 * each / n_rows:.2f}" for each in cpu_s),
            )
        )
    return lines


def _ours(place: Path, fmt: str, workers: int, method: str | None) -> FeatureLoader:
    ds = open_features(place, format=fmt, cache_bytes=CACHE_BYTES)
    stream = ds.iterable(seed=1, batch_size=BATCH_ROWS, window_bytes=WINDOW_BYTES)
    return FeatureLoader(stream, num_workers=workers, **_options(workers, method))


def _bare(place: Path, fmt: str) -> Any:
    ds = open_features(place, format=fmt, cache_bytes=CACHE_BYTES)
    return DataLoader(
        ds.torch(), BATCH_ROWS, num_workers=2, collate_fn=collate, **_options(2, "fork")
    )


def _options(workers: int, method: str | None) -> dict[str, Any]:
    return {"persistent_workers": True, "multiprocessing_context": method} if workers else {}


def padding(place: Path) -> list[tuple[str, ...]]:
    """Return padding share and batches of an epoch, by way of batching."""
    ds = open_features(place)
    found = []
    for name, chosen in (
        (f"{BATCH_ROWS} rows", {"batch_size": BATCH_ROWS}),
        (f"at most {BATCH_FRAMES} frames", {"batch_frames": BATCH_FRAMES}),
    ):
        stream = ds.iterable(seed=1, **chosen)
        found.append((name, str(stream.n_batches), f"{100 * stream.padding_share():.1f} %"))
    return found


def resumes(place: Path) -> list[tuple[str, ...]]:
    """Return seconds from a state to the rows of the next batch, at three places of an epoch."""
    planned: Any = Planned()
    small = open_features(place)
    mixed = mix([small, small], [3, 1], draws=PLANNED_ROWS)
    made = {
        "batches of 16": lambda: FeatureStream(planned, seed=1, batch_size=BATCH_ROWS),
        "buckets": lambda: FeatureStream(planned, seed=1, batch_frames=BATCH_FRAMES),
        "a mixture of two sets": lambda: mixed.iterable(seed=1, batch_size=BATCH_ROWS),
    }
    found = []
    for name, make in made.items():
        state, taken = make().state_dict(), []
        whole = make().n_batches * (1 if "within" in state else BATCH_ROWS)
        for place_of in (0, whole // 2 // BATCH_ROWS * BATCH_ROWS, whole - BATCH_ROWS):
            stream = make()
            begin = time.perf_counter()
            stream.load_state_dict(state | {"position": place_of})
            stream.left().batch(0)
            taken.append(f"{time.perf_counter() - begin:.2f}")
        found.append((name, *taken))
    return found


def main() -> None:
    """Measure and write the section."""
    # Python 3.12 warns of a fork in a process with threads.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        streams, made = features(HOURS, ["modulation"])
        rows = list(made)
        write_set(place, streams, rows)
        n_rows = len(rows)
        lines = [line for fmt in ("zarr", "parquet") for line in speeds(place, fmt, n_rows)]
        padded, resumed = padding(place), resumes(place)
    head: tuple[str, ...] = ("format", "loader", "workers", "started by", "rows/s", "to no workers")
    head += ("to none, on one core", "wanted", "own CPU ms", "all CPU ms")
    body = "\n\n".join(
        [
            f"{n_rows} rows, {HOURS:g} h of Dau1997 (248 columns at 100 Hz, float16), padded "
            f"batches of {BATCH_ROWS} rows; block cache {CACHE_BYTES >> 20} MB, windows "
            f"{WINDOW_BYTES >> 20} MB. Ratios are to no workers in the same round: the median and "
            f"the range of {EPOCHS - 1} rounds. Without workers threads decode on both cores; "
            "`on one core` they have as much as each of two workers. `own CPU ms` a row is what "
            "the training process spends, `all` with its workers.",
            table(head, lines),
            "Padding of one epoch:",
            table(("batches", "number", "padding"), padded),
            f"Seconds to go on in an epoch of {PLANNED_ROWS} rows, from `load_state_dict` to the "
            "rows of the next batch: the order is computed anew, nothing of what came before is "
            "read, so the place makes no difference.",
            table(("epoch of", "at its start", "in the middle", "at its end"), resumed),
        ]
    )
    write_section("Training batches", "python -m benchmarks.loader", body)


if __name__ == "__main__":
    main()
