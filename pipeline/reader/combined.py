"""Several feature sets as one: end to end, mixed by weight, or side by side.

Sets end to end may differ in source, calibration, formats and dtype, but not in their streams.

A mixture draws from each set in passes over the set. Every pass has an order of its own, and each
epoch continues where the last epoch ended. In an epoch, a set gives as many rows as its weight
says, spread evenly. So no row of a set is drawn twice before all of its rows were drawn (except
within a shuffle window), and every part of an epoch that is longer than a window holds the sets in
the wanted shares.

Sets side by side are joined by row id, in the order of the first set. A row that is missing in a
set is left out. A stream whose name an earlier set has already is called `<set>.<stream>`.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.formats.moments import StreamStatistics
from earmill.pipeline.formats.row_table import columns_of
from earmill.pipeline.formats.stream_layout import SCALED
from earmill.pipeline.formats.values import CLIP, INT8
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Rows
from earmill.pipeline.loader.rows import Row, Span
from earmill.pipeline.loader.statistics import together
from earmill.pipeline.reader.catalog import filtered
from earmill.pipeline.reader.features import Features, FeatureSet

SPREAD_SALT = 5


class CombinedFeatures(FeatureSet):
    """Base class of several sets as one; `sets` has them in order.

    Attributes `streams` and `dtypes` are as in `Features`.
    """

    sets: tuple[Features, ...]

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""
        return sum(each.nbytes for each in self.sets)

    @property
    def is_local(self) -> bool:
        """True if all sets lie on this machine or in a mounted file system."""
        return all(each.is_local for each in self.sets)

    @property
    def fingerprint(self) -> str:
        """Changes when a set changes, or the order of sets; resumed positions depend on it."""
        names = ",".join(each.fingerprint for each in self.sets)
        return hashlib.sha256(names.encode()).hexdigest()[:16]

    def close(self) -> None:
        """Close the open files of this process; reading opens them again."""
        for each in self.sets:
            each.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sets)!r})"


class ConcatenatedFeatures(CombinedFeatures):
    """Feature sets end to end; get one from `open_features` with a list. A sequence of `Row`.

    `Row.index` counts over all sets. All other fields of a row are as in its set.

    Args:
        sets: At least one, with the same streams and dtypes.
    """

    def __init__(self, sets: Sequence[Features]) -> None:
        if not sets:
            raise ValueError("expected at least one feature set, got an empty list")
        for other in sets[1:]:
            check_same_streams(sets[0], other)
        self.sets, self.streams, self.dtypes = tuple(sets), sets[0].streams, sets[0].dtypes
        self._starts = [0, *accumulate(len(each) for each in sets)]

    @property
    def table(self) -> pa.Table:
        """One line for each row, in the order of `ds[i]`; `set` is the number of its set."""
        return _numbered([each.table for each in self.sets])

    def filter(self, where: pc.Expression) -> ConcatenatedFeatures:
        """Return the rows of every set that an expression selects; see `Features.filter`."""
        return ConcatenatedFeatures([each.filter(where) for each in self.sets])

    @property
    def quarantine(self) -> pa.Table:
        """The rows of all sets that could not be processed; see `Features.quarantine`."""
        return _numbered([each.quarantine for each in self.sets])

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Statistics over the frames of all sets; see `Features.statistics`."""
        return together([each.statistics for each in self.sets])

    def block_rows(self) -> np.ndarray:
        """Return the rows per row group, in order; see `Features.block_rows`."""
        return np.concatenate([each.block_rows() for each in self.sets])

    def __len__(self) -> int:
        return self._starts[-1]

    def prefetch(self, rows: Sequence[int], spans_s: Sequence[Span | None] | None = None) -> None:
        """Name the rows, or spans of rows, that are read next; see `Features.prefetch`."""
        spans = [None] * len(rows) if spans_s is None else spans_s
        by_set: dict[int, list[tuple[int, Span | None]]] = {}
        for row, span in zip(rows, spans, strict=True):
            which, local = self._place(row)
            by_set.setdefault(which, []).append((local, span))
        for which, wanted in by_set.items():
            self.sets[which].prefetch(*zip(*wanted, strict=True))

    def index_of(self, row_id: str) -> int:
        """Return the position of a row id.

        Raises:
            KeyError: No set has the id, or several have it.
        """
        places = []
        for start, each in zip(self._starts, self.sets, strict=False):
            try:
                places.append(start + each.index_of(row_id))
            except KeyError:
                continue
        if len(places) != 1:
            where = "no set" if not places else f"{len(places)} sets, at {places}"
            raise KeyError(f"expected one row {row_id!r} in {len(self.sets)} sets, {where} has it")
        return places[0]

    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it; see `FeatureRows.read_row`."""
        which, local = self._place(index)
        row = self.sets[which].read_row(local, span_s, copy=copy)
        return replace(row, index=index, set=which)

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Return the origin of a row; see `Features.provenance`."""
        which, local = self._place(self._position(index))
        return self.sets[which].provenance(local)

    def _place(self, number: int) -> tuple[int, int]:
        """Return the number of the set of a row, and its position in the set."""
        which = bisect_right(self._starts, number) - 1
        return which, number - self._starts[which]


def check_same_streams(first: Features, other: Features) -> None:
    """Refuse two sets whose streams differ; the error names the stream and the fields."""
    if list(first.streams) != list(other.streams):
        raise ValueError(
            f"expected the streams {list(first.streams)} of {first!r}, got {list(other.streams)} "
            f"in {other!r}; choose with streams=[...]"
        )
    for name, info in first.streams.items():
        one, two = (_quantity(each) for each in (info, other.streams[name]))
        differing = sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
        one, two = (_settings(each.dataset.spec, info) for each in (first, other))
        differing += [f"{key} of {info.model}" for key in one if one[key] != two[key]]
        if differing:
            raise ValueError(
                f"stream {name!r} of {other!r} differs from that of {first!r} in "
                f"{', '.join(differing)}: features of different streams cannot be read as one set"
            )


def _quantity(info: StreamInfo) -> dict[str, Any]:
    """Return the description of a stream without how it is stored."""
    layout = "frames" if info.layout in (CLIP, INT8, SCALED) else info.layout
    return info.to_dict() | {"scale_factor": 1, "layout": layout}


def _settings(spec: Mapping[str, Any], info: StreamInfo) -> dict[str, list[Any]]:
    """Return the settings of a stream that are not in its description: one for each entry."""
    entries = [entry for entry in spec.get("extract", ()) if entry["model"] == info.model]
    found = {key: [entry.get(key) for entry in entries] for key in ("fs_hz", "params", "listener")}
    if info.layout == "events":
        # The neurons of a stream of events are its options. A listener's name follows its own.
        streams = [(entry.get("streams") or {}).items() for entry in entries]
        found["options"] = [[v or {} for k, v in of if info.name.startswith(k)] for of in streams]
    return found


def _numbered(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables of rows and add the number of the set; extra columns may be missing."""
    numbered = [
        table.append_column("set", pa.array(np.full(table.num_rows, number)))
        for number, table in enumerate(tables)
    ]
    try:
        return pa.concat_tables(numbered, promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise ValueError(
            f"expected columns of one type in all sets, as text or as numbers, got {error}; each "
            "set can be read alone"
        ) from error


def mix(
    sets: Sequence[Features], weights: Sequence[float], *, draws: int | None = None
) -> MixedFeatures:
    """Mix feature sets: `iterable()` draws from each set by weight.

    Args:
        sets: Opened with the same streams and dtypes, at least one.
        weights: One for each set, above 0; they are scaled to the sum 1.
        draws: Rows of an epoch over all ranks; None takes the number of rows of all sets.
    Raises:
        TypeError, ValueError: An argument is invalid.
    Example:
        both = mix([open_features("speech"), open_features("music")], [3, 1], draws=100_000)
        loader = FeatureLoader(both.iterable(seed=1, batch_size=16))
        next(iter(loader)).sets               # which set each row is from
    """
    return MixedFeatures(sets, weights, draws)


class MixedFeatures(ConcatenatedFeatures):
    """Sets mixed by weight, see `mix`. By number and by id, the sets follow one another.

    Attributes:
        weights: The given weights, scaled to the sum 1.
        draws: Rows of an epoch.
        counts: Rows of each set in an epoch.
    """

    def __init__(
        self, sets: Sequence[Features], weights: Sequence[float], draws: int | None = None
    ) -> None:
        strange: Any = type(sets).__name__
        if isinstance(sets, Sequence):
            strange = [type(each).__name__ for each in sets if not isinstance(each, Features)][:1]
        if strange:
            raise TypeError(
                f"mix: expected a list of opened feature sets, got {strange}; "
                "mix([open_features(a), open_features(b)], [3, 1])"
            )
        super().__init__(sets)
        if any(each.dtypes != sets[0].dtypes for each in sets):
            dtypes = [each.dtype.name for each in sets]
            raise ValueError(
                f"mix: expected sets of the same dtypes, got {dtypes}; open them all alike, with "
                "the same dtype="
            )
        empty = [i for i, each in enumerate(sets) if not len(each)]
        if empty:
            raise ValueError(f"mix: expected rows in every set, set {empty[0]} has none")
        self.weights = _checked_weights(weights, len(sets))
        self.draws = sum(map(len, sets)) if draws is None else order.check_whole("draws", draws)
        if self.draws < 1:
            raise ValueError(f"mix: draws must be at least 1, got {self.draws}")
        self.mixture = self.counts = _counts(self.weights, self.draws)

    def filter(self, where: pc.Expression) -> MixedFeatures:
        """Return a mixture of the rows that an expression selects, with the same weights."""
        return MixedFeatures([each.filter(where) for each in self.sets], self.weights, self.draws)

    def __repr__(self) -> str:
        return f"MixedFeatures({list(self.sets)!r}, weights={list(self.weights)}, {self.draws})"

    def block_order(self, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows of an epoch in the order of shuffled blocks, and each row's pass."""
        chosen: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "epoch": epoch}
        drawn = [self._drawn(part, **chosen) for part in range(len(self.sets))]
        # Each row of a set has a time in the epoch, 0 to 1: one in each of equal steps.
        times = []
        for part, count in enumerate(self.counts):
            within: Any = 0.5
            if shuffle:
                by = {"seed": seed, "epoch": epoch, "salt": SPREAD_SALT, "part": part + 1}
                within = order.unit(order.keys(count, **by))
            times.append((np.arange(count) + within) / max(1, count))
        merged = np.argsort(np.concatenate(times), kind="stable")
        rows, passes = (np.concatenate(column)[merged] for column in zip(*drawn, strict=True))
        return rows, passes

    def _drawn(self, part: int, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows and passes that one set gives to an epoch."""
        n_rows, needed = len(self.sets[part]), self.counts[part]
        # Python's integers do not overflow; an epoch may be any 63-bit number.
        number, at = divmod(epoch * needed, n_rows)
        blocks = self.sets[part].block_rows()
        rows, passes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while needed:
            whole = order.block_order(
                blocks, shuffle=shuffle, seed=seed, epoch=number % 2**63, part=part + 1
            )
            taken = whole[at : at + needed]
            rows.append(self._starts[part] + taken)
            passes.append(np.full(len(taken), number % 2**63, np.int64))
            number, at, needed = number + 1, 0, needed - len(taken)
        return np.concatenate(rows), np.concatenate(passes)


def _checked_weights(weights: Any, n_sets: int) -> tuple[float, ...]:
    if isinstance(weights, str) or not isinstance(weights, Sequence | np.ndarray):
        raise TypeError(f"mix: weights takes a list of numbers, one a set, got {weights!r}")
    if len(weights) != n_sets:
        raise ValueError(f"mix: expected {n_sets} weights, one a set, got {len(weights)}")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(f"mix: weights are numbers, got {weight!r}")
        if not 0 < float(weight) < math.inf:
            raise ValueError(f"mix: weights are above 0, got {weight!r}; leave that set out")
    total = math.fsum(float(weight) for weight in weights)
    return tuple(float(weight) / total for weight in weights)


def _counts(weights: Sequence[float], draws: int) -> tuple[int, ...]:
    """Return the rows of each set in an epoch: shares rounded by the largest remainder."""
    shares = [weight * draws for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_rest[: draws - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


class JoinedFeatures(CombinedFeatures):
    """Feature sets side by side; get one from `open_features`. A sequence of `Row`.

    Args:
        sets: At least one; the first is the dataset itself.
        names: For each set, its streams and their names here, see `reader.open`.
    """

    def __init__(self, sets: Sequence[Features], names: Sequence[Mapping[str, str]]) -> None:
        self.sets, self._names = tuple(sets), names
        # Set, name of a stream in it, and name of the stream here.
        self._named = [
            (number, name, called)
            for number, of_set in enumerate(names)
            for name, called in of_set.items()
            if name in sets[number].streams
        ]
        self.streams = {
            called: replace(sets[number].streams[name], name=called)
            for number, name, called in self._named
        }
        self.dtypes = {called: sets[k].dtypes[name] for k, name, called in self._named}
        places = [
            {row_id: k for k, row_id in enumerate(each.table["row_id"].to_pylist())}
            for each in sets
        ]
        kept = [row_id for row_id in places[0] if all(row_id in of for of in places[1:])]
        self._rows = [np.array([of[row_id] for row_id in kept], np.int64) for of in places]
        self._index = {row_id: k for k, row_id in enumerate(kept)}

    @property
    def table(self) -> pa.Table:
        """One line for each row, from the first set, with the columns of the named streams of all
        sets, read or not."""
        columns: dict[str, pa.ChunkedArray] = {}
        for each, rows, names in zip(self.sets, self._rows, self._names, strict=True):
            taken, renamed = each.table.take(rows), dict[str, str]()
            if each is self.sets[0]:
                streams = {k for info in each.dataset.streams for k in columns_of(info)}
                renamed = {k: k for k in taken.column_names if k not in streams}
            for info in each.dataset.streams:
                if info["name"] in names:
                    called = columns_of({**info, "name": names[info["name"]]})
                    renamed |= zip(columns_of(info), called, strict=True)
            for column, new in renamed.items():
                columns.setdefault(new, taken.column(column))
        return pa.table(columns)

    def filter(self, where: pc.Expression) -> JoinedFeatures:
        """Return the rows that an expression selects; see `Features.filter`."""
        row_ids = filtered(self.table, where).column("row_id").combine_chunks()
        first = self.sets[0].filter(pc.field("row_id").isin(row_ids))
        return JoinedFeatures([first, *self.sets[1:]], self._names)

    @property
    def quarantine(self) -> pa.Table:
        """The rows of all sets that could not be processed; see `Features.quarantine`."""
        return pa.concat_tables([each.quarantine for each in self.sets])

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Statistics of each set over all of its own rows; see `Features.statistics`."""
        known = [each.statistics for each in self.sets]
        return {
            called: known[number][name]
            for number, name, called in self._named
            if name in known[number]
        }

    def block_rows(self) -> np.ndarray:
        """Return the rows per row group of the first set, in order."""
        ends = np.cumsum(self.sets[0].block_rows())
        counts = np.diff(np.searchsorted(self._rows[0], ends), prepend=0)
        return counts[counts > 0]

    def __len__(self) -> int:
        return len(self._index)

    def prefetch(self, rows: Sequence[int], spans_s: Sequence[Span | None] | None = None) -> None:
        """Name the rows, or spans of rows, that are read next; see `Features.prefetch`."""
        for each, places in zip(self.sets, self._rows, strict=True):
            if each.streams:
                each.prefetch([int(places[row]) for row in rows], spans_s)

    def index_of(self, row_id: str) -> int:
        """Return the position of a row id; KeyError if a set lacks it."""
        if row_id not in self._index:
            raise KeyError(f"expected a row that is good in {len(self.sets)} sets, got {row_id!r}")
        return self._index[row_id]

    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it; see `FeatureRows.read_row`."""
        rows = [
            each.read_row(int(places[index]), span_s, copy=copy)
            for each, places in zip(self.sets, self._rows, strict=True)
        ]
        return replace(
            rows[0],
            index=index,
            features={called: rows[k].features[name] for k, name, called in self._named},
            first_frame={called: rows[k].first_frame[name] for k, name, called in self._named},
        )

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Return the origin of a row of the first set; see `Features.provenance`."""
        return self.sets[0].provenance(int(self._rows[0][self._position(index)]))
