"""Feature sets of the same rows side by side: a row has the streams of all sets.

Rows are joined by id, in the order of the first set. A row that is missing in a set, because it was
quarantined there, is left out. A stream whose name an earlier set has already is called
`<set>.<stream>`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.snapshot import Which, find_snapshot
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.reader.catalog import load_catalog
from earmill.pipeline.reader.features import CombinedFeatures, Features
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import addition_path

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.formats.moments import StreamStatistics
    from earmill.pipeline.loader.rows import Row, Span


class JoinedFeatures(CombinedFeatures):
    """Feature sets side by side; get one from `open_features`. A sequence of `Row`.

    Args:
        sets: At least one; the first is the dataset itself.
        names: For each set, its streams and their names here, see `stream_names`.
    """

    def __init__(self, sets: Sequence[Features], names: Sequence[Mapping[str, str]]) -> None:
        self.sets, self._names = tuple(sets), tuple(names)
        places = [
            {row_id: k for k, row_id in enumerate(each.table["row_id"].to_pylist())}
            for each in sets
        ]
        kept = [row_id for row_id in places[0] if all(row_id in of for of in places[1:])]
        self._rows = [np.array([of[row_id] for row_id in kept], np.int64) for of in places]
        self._index = {row_id: k for k, row_id in enumerate(kept)}

    @property
    def streams(self) -> dict[str, StreamInfo]:
        """Descriptions of the streams that are read, by name."""
        return {
            called: replace(each.streams[name], name=called)
            for each, names in zip(self.sets, self._names, strict=True)
            for name, called in names.items()
        }

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of the frames of each stream; see `Features.dtypes`."""
        return {
            called: each.dtypes[name]
            for each, names in zip(self.sets, self._names, strict=True)
            for name, called in names.items()
        }

    @property
    def table(self) -> pa.Table:
        """One line for each row, from the first set, with the frames of all streams."""
        table = self.sets[0].table.take(self._rows[0])
        for each, rows, names in zip(self.sets, self._rows, self._names, strict=True):
            other = each.table.take(rows)
            for name, called in names.items():
                info = each.streams[name]
                columns = layout_of(info).place_columns
                for column, named in zip(
                    columns, layout_of(replace(info, name=called)).place_columns, strict=True
                ):
                    if named not in table.column_names:
                        table = table.append_column(named, other.column(column))
        return table

    @property
    def quarantine(self) -> pa.Table:
        """The rows of all sets that could not be processed; see `Features.quarantine`."""
        return pa.concat_tables([each.quarantine for each in self.sets])

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Statistics of each set over all of its own rows; see `Features.statistics`."""
        return {
            called: each.statistics[name]
            for each, names in zip(self.sets, self._names, strict=True)
            for name, called in names.items()
            if name in each.statistics
        }

    def block_rows(self) -> np.ndarray:
        """Return the rows per row group of the first set, in order."""
        ends = np.cumsum(self.sets[0].block_rows())
        counts = np.diff(np.searchsorted(self._rows[0], ends), prepend=0)
        return counts[counts > 0]

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        return f"JoinedFeatures({list(self.sets)!r})"

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Return a row by number; negative numbers count from the end."""
        number = self._position(index)
        return self._row(number, [each[int(rows[number])] for each, rows in self._pairs()])

    def prefetch(self, rows: Sequence[int], spans_s: Sequence[Span | None] | None = None) -> None:
        """Name the rows, or spans of rows, that are read next; see `Features.prefetch`."""
        for each, places in self._pairs():
            each.prefetch([int(places[row]) for row in rows], spans_s)

    def index_of(self, row_id: str) -> int:
        """Return the position of a row id; KeyError if a set lacks it."""
        if row_id not in self._index:
            raise KeyError(f"expected a row that is good in {len(self.sets)} sets, got {row_id!r}")
        return self._index[row_id]

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """Return the frames of a span of a row; see `Features.slice`."""
        number = self._position(index)
        found = [each.slice(int(rows[number]), start_s, stop_s) for each, rows in self._pairs()]
        return self._row(number, found)

    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it; see `FeatureSet.read_row`."""
        return self._row(
            index,
            [each.read_row(int(rows[index]), span_s, copy=copy) for each, rows in self._pairs()],
        )

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Return the origin of a row of the first set; see `Features.provenance`."""
        return self.sets[0].provenance(int(self._rows[0][self._position(index)]))

    def _pairs(self) -> Iterator[tuple[Features, np.ndarray]]:
        return zip(self.sets, self._rows, strict=True)

    def _row(self, number: int, found: Sequence[Row]) -> Row:
        pairs = list(zip(found, self._names, strict=True))
        return replace(
            found[0],
            index=number,
            features={k: row.features[name] for row, of in pairs for name, k in of.items()},
            first_frame={k: row.first_frame[name] for row, of in pairs for name, k in of.items()},
        )


def open_joined(
    uri: str | os.PathLike[str],
    which: Which | None,
    streams: Sequence[str] | None,
    storage_options: Mapping[str, Any],
    open_set: Callable[[str, Which | None, list[str]], Features],
) -> JoinedFeatures:
    """Open a set with its additions, as a snapshot of the set names them.

    Args:
        streams: Names of streams here; None reads all.
        open_set: Opens a set by place, snapshot and streams.
    Raises:
        OutputError: An addition lacks the snapshot that is named.
        CommitError: The snapshot of an addition has other bytes than the one that was added.
        ValueError: A stream is unknown.
    """
    layout = Layout.open(os.fspath(uri), storage_options)
    catalog = load_catalog(layout, which)
    places: dict[str, tuple[str, Which | None]] = {"": (os.fspath(uri), which)}
    known: dict[str, Sequence[str]] = {"": tuple(catalog.streams)}
    for name, file in catalog.additions.items():
        place = f"{os.fspath(uri).rstrip('/')}/{addition_path(name)}"
        stem = PurePosixPath(file.path).stem
        there = Layout.open(place, storage_options)
        if find_snapshot(there, stem).snapshot.sha256 != file.sha256:
            raise CommitError(f"{there.url()}: snapshot {stem} is another than the one added")
        places[name], known[name] = (place, stem), tuple(load_catalog(there, stem).streams)
    names = dict(zip(known, stream_names(known), strict=True))
    called = [each for of in names.values() for each in of.values()]
    if streams is not None and (not streams or set(streams) - set(called)):
        raise ValueError(f"expected streams out of {called}, got {list(streams)}")
    wanted = {
        key: {name: each for name, each in of.items() if streams is None or each in streams}
        for key, of in names.items()
    }
    chosen = {key: of for key, of in wanted.items() if of}
    sets = [open_set(*places[key], list(of)) for key, of in chosen.items()]
    return JoinedFeatures(sets, list(chosen.values()))


def stream_names(sets: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return the name here of each stream of each set, given the streams by set."""
    taken = set[str]()
    found = []
    for name, streams in sets.items():
        called = {each: f"{name}.{each}" if each in taken else each for each in streams}
        taken.update(called.values())
        found.append(called)
    return found
