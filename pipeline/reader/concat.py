"""Several feature sets as one: rows one set after the other, streams the same in all.

Sets may differ in source, calibration, formats and dtype. Their streams must not: a column has to
mean the same quantity in every row, made by the same model with the same parameters.
"""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa

from earmill.pipeline.formats.dtypes import INT8
from earmill.pipeline.formats.stream_layout import SCALED
from earmill.pipeline.loader.statistics import together
from earmill.pipeline.reader.feature_set import FeatureSet

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.formats.moments import StreamStatistics
    from earmill.pipeline.loader.rows import Row
    from earmill.pipeline.reader.features import Features


class ConcatenatedFeatures(FeatureSet):
    """Feature sets end to end; get one from `open_features` with a list. A sequence of `Row`.

    `Row.index` counts over all sets; the rest of a row is that of its set.

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
    def dtype(self) -> np.dtype:
        """The type of frames; see `Features.dtype`."""
        return self.sets[0].dtype

    @property
    def table(self) -> pa.Table:
        """One line a row, in the order of `ds[i]`; `set` says which of the sets it is from."""
        return _joined([each.table for each in self.sets])

    @property
    def quarantine(self) -> pa.Table:
        """The rows that could not be processed, of all sets; see `Features.quarantine`."""
        return _joined([each.quarantine for each in self.sets])

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""
        return sum(each.nbytes for each in self.sets)

    @property
    def is_local(self) -> bool:
        """Whether all sets lie in files of this machine, or in what it has mounted."""
        return all(each.is_local for each in self.sets)

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Those of all sets together, every frame counted once; see `Features.statistics`."""
        return together([each.statistics for each in self.sets])

    @property
    def fingerprint(self) -> str:
        """Changes when a set does, or their order; a resumed position depends on it."""
        names = ",".join(each.fingerprint for each in self.sets)
        return hashlib.sha256(names.encode()).hexdigest()[:16]

    def block_rows(self) -> np.ndarray:
        """Rows per row group, in order: what is cheap to read together."""
        return np.concatenate([each.block_rows() for each in self.sets])

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return f"ConcatenatedFeatures({list(self.sets)!r})"

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Row by number; negative numbers count from the end."""
        number, which, local = self._place(index)
        return replace(self.sets[which][local], index=number, set=which)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def prefetch(
        self, rows: Sequence[int], spans_s: Sequence[tuple[float, float] | None] | None = None
    ) -> None:
        """Say which rows, or stretches of them, are read next; see `Features.prefetch`."""
        stretches = [None] * len(rows) if spans_s is None else spans_s
        of_sets: dict[int, list[tuple[int, tuple[float, float] | None]]] = {}
        for row, span in zip(rows, stretches, strict=True):
            which = bisect_right(self._starts, row) - 1
            of_sets.setdefault(which, []).append((row - self._starts[which], span))
        for which, wanted in of_sets.items():
            local, spans = zip(*wanted, strict=True)
            self.sets[which].prefetch(local, spans)

    def by_id(self, row_id: str) -> Row:
        """Row by its id; KeyError where no set has it, or more than one."""
        return self[self.index_of(row_id)]

    def index_of(self, row_id: str) -> int:
        """Position of a row id; KeyError where no set has it, or more than one."""
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
        """The frames of a row in a stretch of time; see `Features.slice`."""
        number, which, local = self._place(index)
        return replace(self.sets[which].slice(local, start_s, stop_s), index=number, set=which)

    def read_row(
        self, index: int, span_s: tuple[float, float] | None = None, *, copy: bool = True
    ) -> Row:
        """Read a row, or a stretch of it; see `FeatureSet.read_row`."""
        number, which, local = self._place(index)
        row = self.sets[which].read_row(local, span_s, copy=copy)
        return replace(row, index=number, set=which)

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Where a row came from; see `Features.provenance`."""
        _, which, local = self._place(index)
        return self.sets[which].provenance(local)

    def close(self) -> None:
        """Close what this process has open; reading again opens it anew."""
        for each in self.sets:
            each.close()

    def _place(self, index: SupportsIndex) -> tuple[int, int, int]:
        """Position over all sets, number of the set, and the position in it."""
        if isinstance(index, str):
            raise TypeError(f"rows are numbered from 0, got {index!r}; use ds.by_id for row ids")
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self.sets)} sets with {len(self)} rows")
        number %= len(self)
        which = bisect_right(self._starts, number) - 1
        return number, which, number - self._starts[which]


def check_same_streams(first: Features, other: Features) -> None:
    """Refuse sets whose rows do not hold the same quantities.

    Raises:
        ValueError: It says which stream differs in what.
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
    """What a stream holds, however it is stored."""
    layout = "frames" if info.layout in (INT8, SCALED) else info.layout
    return info.to_dict() | {"scale_factor": 1, "layout": layout}


def _params(features: Features, model: str) -> list[Any]:
    entries = features.dataset.spec.get("extract", ())
    return [
        (entry.get("fs_hz"), entry.get("params")) for entry in entries if entry["model"] == model
    ]


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables of rows end to end, with the number of their set; extra columns may be missing."""
    numbered = [
        table.append_column("set", pa.array(np.full(table.num_rows, number)))
        for number, table in enumerate(tables)
    ]
    return pa.concat_tables(numbered, promote_options="permissive")
