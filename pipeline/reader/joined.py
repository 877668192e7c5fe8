"""Sets of features of the same rows as one: a row has the streams of all of them.

Rows are joined by their id, in the order of the first set; one that is missing in a set (it was
quarantined there) is left out. A stream whose name is taken by a set before is called
`<set>.<stream>`.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.history import Which, find_snapshot
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.reader.catalog import load_catalog
from earmill.pipeline.reader.feature_set import FeatureSet
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import addition_path

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.formats.moments import StreamStatistics
    from earmill.pipeline.loader.rows import Row
    from earmill.pipeline.reader.features import Features


class JoinedFeatures(FeatureSet):
    """Feature sets side by side; get one from `open_features`. A sequence of `Row`.

    Args:
        sets: At least one, the dataset's own first.
        names: Stream of each set to what it is called here, see `stream_names`.
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
    def dtype(self) -> np.dtype:
        """The type of frames; see `Features.dtype`."""
        return np.result_type(*self.dtypes.values())

    @property
    def table(self) -> pa.Table:
        """One line a row, as the first set has it, with the frames of all streams."""
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
        """The rows that could not be processed, of all sets; see `Features.quarantine`."""
        return pa.concat_tables([each.quarantine for each in self.sets])

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""
        return sum(each.nbytes for each in self.sets)

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Those of every set, over all of its rows; see `Features.statistics`."""
        return {
            called: each.statistics[name]
            for each, names in zip(self.sets, self._names, strict=True)
            for name, called in names.items()
            if name in each.statistics
        }

    @property
    def fingerprint(self) -> str:
        """Changes when a set does; a resumed position depends on it."""
        names = ",".join(each.fingerprint for each in self.sets)
        return hashlib.sha256(names.encode()).hexdigest()[:16]

    def block_rows(self) -> np.ndarray:
        """Rows per row group of the first set, in order: what is cheap to read together."""
        ends = np.cumsum(self.sets[0].block_rows())
        counts = np.diff(np.searchsorted(self._rows[0], ends), prepend=0)
        return counts[counts > 0]

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        return f"JoinedFeatures({list(self.sets)!r})"

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Row by number; negative numbers count from the end."""
        number = self._position(index)
        return self._row(number, [each[int(rows[number])] for each, rows in self._pairs()])

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def prefetch(
        self, rows: Sequence[int], spans_s: Sequence[tuple[float, float] | None] | None = None
    ) -> None:
        """Say which rows, or stretches of them, are read next; see `Features.prefetch`."""
        for each, places in self._pairs():
            each.prefetch([int(places[row]) for row in rows], spans_s)

    def by_id(self, row_id: str) -> Row:
        """Row by its id; KeyError where not all sets have it."""
        return self[self.index_of(row_id)]

    def index_of(self, row_id: str) -> int:
        """Position of a row id; KeyError where not all sets have it."""
        if row_id not in self._index:
            raise KeyError(f"expected a row that is good in {len(self.sets)} sets, got {row_id!r}")
        return self._index[row_id]

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """The frames of a row in a stretch of time; see `Features.slice`."""
        number = self._position(index)
        found = [each.slice(int(rows[number]), start_s, stop_s) for each, rows in self._pairs()]
        return self._row(number, found)

    def read_row(
        self, index: int, span_s: tuple[float, float] | None = None, *, copy: bool = True
    ) -> Row:
        """Read a row, or a stretch of it; see `FeatureSet.read_row`."""
        return self._row(
            index,
            [each.read_row(int(rows[index]), span_s, copy=copy) for each, rows in self._pairs()],
        )

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Where a row of the first set came from; see `Features.provenance`."""
        return self.sets[0].provenance(int(self._rows[0][self._position(index)]))

    def close(self) -> None:
        """Close what this process has open; reading again opens it anew."""
        for each in self.sets:
            each.close()

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

    def _position(self, index: SupportsIndex) -> int:
        if isinstance(index, str):
            raise TypeError(f"rows are numbered from 0, got {index!r}; use ds.by_id for row ids")
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)} rows")
        return number % len(self)


def open_joined(
    uri: str | os.PathLike[str],
    which: Which | None,
    streams: Sequence[str] | None,
    storage_options: Mapping[str, Any],
    open_set: Callable[[str, Which | None, list[str]], Features],
) -> JoinedFeatures:
    """A set with its additions, as one snapshot of it names them.

    Args:
        streams: By the names they have here; None reads all.
        open_set: Opens a set: place, snapshot, streams.
    Raises:
        OutputError: An addition has no such snapshot any more. CommitError: It is another one.
        ValueError: A stream that there is not.
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
    """Streams of each set, by the set's name, to what they are called side by side."""
    taken = set[str]()
    found = []
    for name, streams in sets.items():
        called = {each: f"{name}.{each}" if each in taken else each for each in streams}
        taken.update(called.values())
        found.append(called)
    return found
