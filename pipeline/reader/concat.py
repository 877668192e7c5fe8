"""Several feature sets as one: end to end, or mixed by weight.

Sets may differ in source, calibration, formats and dtype. Their streams must be the same: each
column holds the same quantity in every row, made by the same model with the same parameters.

A mixture draws from each set in passes over the set. Every pass has an order of its own, and each
epoch continues where the last epoch ended. In an epoch, a set gives as many rows as its weight
says, spread evenly over the epoch. So no row of a set is drawn twice before all of its rows were
drawn (except within a shuffle window), and every part of an epoch that is longer than a window
holds the sets in the wanted shares.
"""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa

from earmill.pipeline.formats.stream_layout import SCALED
from earmill.pipeline.formats.values import INT8
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Rows
from earmill.pipeline.loader.statistics import together
from earmill.pipeline.reader.features import CombinedFeatures, Features

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.formats.moments import StreamStatistics
    from earmill.pipeline.loader.rows import Row, Span


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
        self.sets = tuple(sets)
        self._starts = [0, *accumulate(len(each) for each in sets)]

    @property
    def streams(self) -> dict[str, StreamInfo]:
        """Descriptions of the streams that are read, by name."""
        return self.sets[0].streams

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of the frames of each stream; see `Features.dtypes`."""
        return self.sets[0].dtypes

    @property
    def table(self) -> pa.Table:
        """One line for each row, in the order of `ds[i]`; `set` is the number of its set."""
        return _joined([each.table for each in self.sets])

    @property
    def quarantine(self) -> pa.Table:
        """The rows of all sets that could not be processed; see `Features.quarantine`."""
        return _joined([each.quarantine for each in self.sets])

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Statistics over the frames of all sets; see `Features.statistics`."""
        return together([each.statistics for each in self.sets])

    def block_rows(self) -> np.ndarray:
        """Return the rows per row group, in order; see `Features.block_rows`."""
        return np.concatenate([each.block_rows() for each in self.sets])

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return f"ConcatenatedFeatures({list(self.sets)!r})"

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Return a row by number; negative numbers count from the end."""
        number, which, local = self._place(index)
        return replace(self.sets[which][local], index=number, set=which)

    def prefetch(self, rows: Sequence[int], spans_s: Sequence[Span | None] | None = None) -> None:
        """Name the rows, or spans of rows, that are read next; see `Features.prefetch`."""
        stretches = [None] * len(rows) if spans_s is None else spans_s
        of_sets: dict[int, list[tuple[int, Span | None]]] = {}
        for row, span in zip(rows, stretches, strict=True):
            which = bisect_right(self._starts, row) - 1
            of_sets.setdefault(which, []).append((row - self._starts[which], span))
        for which, wanted in of_sets.items():
            local, spans = zip(*wanted, strict=True)
            self.sets[which].prefetch(local, spans)

    def index_of(self, row_id: str) -> int:
        """Return the position of a row id.

        Raises:
            KeyError: No set has the id, or several have it.
        """
        found = []
        for start, each in zip(self._starts, self.sets, strict=False):
            try:
                found.append(start + each.index_of(row_id))
            except KeyError:
                continue
        if len(found) != 1:
            where = "no set" if not found else f"{len(found)} sets, at {found}"
            raise KeyError(f"expected one row {row_id!r} in {len(self.sets)} sets, {where} has it")
        return found[0]

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """Return the frames of a span of a row; see `Features.slice`."""
        number, which, local = self._place(index)
        return replace(self.sets[which].slice(local, start_s, stop_s), index=number, set=which)

    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it; see `FeatureSet.read_row`."""
        number, which, local = self._place(index)
        row = self.sets[which].read_row(local, span_s, copy=copy)
        return replace(row, index=number, set=which)

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Return the origin of a row; see `Features.provenance`."""
        _, which, local = self._place(index)
        return self.sets[which].provenance(local)

    def _place(self, index: SupportsIndex) -> tuple[int, int, int]:
        """Return the position over all sets, the number of the set, and the position in it."""
        number = self._position(index)
        which = bisect_right(self._starts, number) - 1
        return number, which, number - self._starts[which]


def check_same_streams(first: Features, other: Features) -> None:
    """Refuse two sets whose streams differ.

    Raises:
        ValueError: The message names the stream and the fields that differ.
    """
    if list(first.streams) != list(other.streams):
        raise ValueError(
            f"expected the streams {list(first.streams)} of {first!r}, got {list(other.streams)} "
            f"in {other!r}; choose with streams=[...]"
        )
    for name, info in first.streams.items():
        one, two = (_quantity(each) for each in (info, other.streams[name]))
        differing = sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
        params = [_params(each, info.model) for each in (first, other)]
        if params[0] != params[1]:
            differing.append(f"params of {info.model}")
        if differing:
            raise ValueError(
                f"stream {name!r} of {other!r} differs from that of {first!r} in "
                f"{', '.join(differing)}: features of different streams cannot be read as one set"
            )


def _quantity(info: StreamInfo) -> dict[str, Any]:
    """Return the description of a stream without how it is stored."""
    layout = "frames" if info.layout in (INT8, SCALED) else info.layout
    return info.to_dict() | {"scale_factor": 1, "layout": layout}


def _params(features: Features, model: str) -> list[Any]:
    entries = features.dataset.spec.get("extract", ())
    return [
        (entry.get("fs_hz"), entry.get("params")) for entry in entries if entry["model"] == model
    ]


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables of rows and add the number of the set; extra columns may be missing."""
    numbered = [
        table.append_column("set", pa.array(np.full(table.num_rows, number)))
        for number, table in enumerate(tables)
    ]
    return pa.concat_tables(numbered, promote_options="permissive")


SPREAD_SALT = 5


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
        if not isinstance(sets, Sequence) or not all(isinstance(each, Features) for each in sets):
            raise TypeError(
                f"mix: expected a list of opened feature sets, got {_kind(sets)}; "
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
        wanted = sum(map(len, sets)) if draws is None else order.check_whole("draws", draws)
        if wanted < 1:
            raise ValueError(f"mix: draws must be at least 1, got {wanted}")
        self.draws, self.counts = wanted, _counts(self.weights, wanted)
        self.mixture = self.counts

    def __repr__(self) -> str:
        return f"MixedFeatures({list(self.sets)!r}, weights={list(self.weights)}, {self.draws})"

    def block_order(self, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows of an epoch in the order of shuffled blocks, and each row's pass."""
        drawn = [
            self._drawn(part, shuffle=shuffle, seed=seed, epoch=epoch)
            for part in range(len(self.sets))
        ]
        times = [
            self._times(part, shuffle=shuffle, seed=seed, epoch=epoch)
            for part in range(len(self.sets))
        ]
        merged = np.argsort(np.concatenate(times), kind="stable")
        rows, passes = (np.concatenate(column)[merged] for column in zip(*drawn, strict=True))
        return rows, passes

    def _drawn(self, part: int, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows and passes that one set gives to an epoch."""
        n_rows, count = len(self.sets[part]), self.counts[part]
        # Python's integers do not overflow; an epoch may be any 63-bit number.
        first, at = divmod(epoch * count, n_rows)
        blocks = self.sets[part].block_rows()
        rows, passes, needed = [], [], count
        while needed:
            whole = order.block_order(
                blocks, shuffle=shuffle, seed=seed, epoch=first % 2**63, part=part + 1
            )
            taken = whole[at : at + needed]
            rows.append(self._starts[part] + taken)
            passes.append(np.full(len(taken), first % 2**63, np.int64))
            first, at, needed = first + 1, 0, needed - len(taken)
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *rows]), np.concatenate([none, *passes])

    def _times(self, part: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
        """Return the time of each row of a set in the epoch, 0 to 1: one in each of equal steps."""
        count = self.counts[part]
        within: Any = 0.5
        if shuffle:
            drawn = order.keys(count, seed=seed, epoch=epoch, salt=SPREAD_SALT, part=part + 1)
            within = order.unit(drawn)
        return np.asarray((np.arange(count) + within) / max(1, count))


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


def _kind(sets: Any) -> str:
    if not isinstance(sets, Sequence):
        return type(sets).__name__
    return str([type(each).__name__ for each in sets if not isinstance(each, Features)][:1])
