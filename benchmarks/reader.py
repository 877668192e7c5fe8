"""Reading rows: earmill's formats beside alternatives, with the same rows in the same run.

An hour of all Dau1997 streams. Every store is opened again for every pass, so that its memory is
empty; its files are in the page cache. MB are of features as stored in float16 (spikes: int32).
earmill returns float32 in the stream's unit and checks events; the others return stored values.
Needs the extra `bench`; alternatives that are not installed are skipped and named.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.feature_sets import hour, write_set
from benchmarks.report import table, write_section
from benchmarks.rivals import RIVALS, Kinds, Store
from earmill import open_features
from earmill.pipeline.formats.stream_layout import layout_of

PLOT = Path(__file__).parents[1] / "docs" / "reader.svg"
PASSES = 3
WANTED = "Zarr in order 1500 MB/s, shuffled 1000 MB/s, Parquet in order 1000 MB/s"


class Ours(Store):
    """A feature set in one of its formats."""

    fmt: str

    def _open(self) -> Any:
        return open_features(self.folder, format=self.fmt)

    def write(self, rows: Any) -> None:
        """Do nothing, because the set is written already."""

    def in_order(self) -> Iterator[Any]:
        return (row.features for row in self._open())

    def _stream(self) -> Any:
        return self._open().iterable(seed=7)

    def shuffled(self) -> Iterator[Any]:
        return (row.features for row in self._stream())

    def from_half(self) -> Iterator[Any]:
        state = self._stream().state_dict()
        stream = self._stream()
        stream.load_state_dict(state | {"position": self.n_rows // 2})
        return (row.features for row in stream)


class OurZarr(Ours):
    name, fmt = "earmill, Zarr", "zarr"


class OurParquet(Ours):
    name, fmt = "earmill, Parquet", "parquet"


def seconds_of(make: Callable[[], Iterator[Any]], n_rows: int) -> tuple[float, float]:
    """Return the least wall and CPU seconds of several passes over all rows."""
    wall = cpu = float("inf")
    for _ in range(PASSES):
        begin, busy = time.perf_counter(), time.process_time()
        count = sum(1 for _ in make())
        wall, cpu = (
            min(wall, time.perf_counter() - begin),
            min(cpu, time.process_time() - busy),
        )
        if count != n_rows:
            raise RuntimeError(f"expected {n_rows} rows, got {count}")
    return wall, cpu


def first_row_s(make: Callable[[], Iterator[Any]]) -> float:
    """Return the least seconds until the first row."""
    taken = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        next(iter(make()))
        taken.append(time.perf_counter() - begin)
    return min(taken)


def nbytes_of(folder: Path, suffix: str = "") -> int:
    """Return the bytes of a folder's files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if suffix in path.as_posix())


def compare(folder: Path, place: Path, rows: list[Any], kinds: Kinds) -> list[dict[str, Any]]:
    """Return the figures of every store, earmill's first."""
    nbytes = sum(values.nbytes for row in rows for values in row.streams.values())
    found = []
    for kind in (OurZarr, OurParquet, *RIVALS):
        ours = issubclass(kind, Ours)
        store = kind(place if ours else folder / kind.__name__, kinds, len(rows))
        try:
            store.write(row.streams for row in rows)
        except ImportError as error:
            print(f"{kind.name}: left out, {error}")
            continue
        size = nbytes_of(place / "data", f".{store.fmt}") if ours else nbytes_of(store.folder)
        line: dict[str, Any] = {"name": kind.name, "bytes": size, "raw": nbytes}
        for order in ("in_order", "shuffled"):
            wall, cpu = seconds_of(getattr(store, order), len(rows))
            line[order] = nbytes / wall / 1e6
            line[f"{order}_rows"] = len(rows) / wall
            line[f"{order}_cpu"] = nbytes / cpu / 1e6
        left = sum(1 for _ in store.from_half())
        if left != len(rows) - len(rows) // 2:
            raise RuntimeError(f"{kind.name}: expected the second half of the rows, got {left}")
        line["resume"] = first_row_s(store.from_half)
        found.append(line)
        print(
            {
                key: value if isinstance(value, str) else round(value, 4)
                for key, value in line.items()
            }
        )
    return found


def plot(found: list[Mapping[str, Any]]) -> None:
    """Draw bars of both orders for the docs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "reader"
    figure, axes = plt.subplots(figsize=(8, 3.4))
    places = np.arange(len(found))
    for shift, order, label in ((-0.2, "in_order", "in order"), (0.2, "shuffled", "shuffled")):
        axes.barh(places + shift, [line[order] for line in found], 0.38, label=label)
    axes.set_yticks(places, [line["name"] for line in found])
    axes.invert_yaxis()
    axes.set_xlabel("MB of float16 features a second, one process, two cores")
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def section(found: list[Mapping[str, Any]], n_rows: int) -> str:
    """Return the section as Markdown."""
    head = ("store", "bytes on disk", "in order MB/s", "rows/s", "MB per CPU s")
    head += ("shuffled MB/s", "rows/s", "MB per CPU s", "resume s")
    lines = [
        (
            line["name"],
            f"{line['bytes'] / 1e6:.0f} MB ({line['raw'] / line['bytes']:.2f} x)",
            *(
                f"{line[key]:.0f}"
                for order in ("in_order", "shuffled")
                for key in (order, f"{order}_rows", f"{order}_cpu")
            ),
            f"{line['resume']:.3f}",
        )
        for line in found
    ]
    note = (
        f"{n_rows} rows, an hour of all Dau1997 streams ({found[0]['raw'] / 1e6:.0f} MB in float16 "
        "and int32). Own caches cold, page cache warm; best of three passes. `resume` is the time "
        "from opening to the first row after half a shuffled epoch. Wanted: " + WANTED + "."
    )
    return f"{note}\n\n{table(head, lines)}"


def main() -> None:
    """Measure, draw and write the section."""
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="reader-"))
    try:
        streams, made = hour()
        rows, place = list(made), folder / "ours"
        write_set(place, streams, rows)
        layouts = {info.name: layout_of(info) for info in streams}
        kinds = {k: (v.stored_width, v.stored_dtype("float16")) for k, v in layouts.items()}
        found = compare(folder, place, rows, kinds)
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
    plot(found)
    write_section("Reading rows", "python -m benchmarks.reader", section(found, len(rows)))


if __name__ == "__main__":
    main()
