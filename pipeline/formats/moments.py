"""Mean, variance and range of a stream, column by column, summed so that the result is one number.

Every block of BLOCK_FRAMES frames of a row is summed in float64, frame after frame (pairwise if
there is one column). Sums of blocks are added without rounding (`math.fsum`) and rounded once, so a
shard's numbers depend on its rows alone, and a dataset's on its shards in order. Squares of float16
and float32 are exact in float64.

The numbers are stored as `count` and the base64 of little-endian float64: sums, sums of squares,
smallest and largest of every column. Events have no statistics.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.gathering import gathered
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import EventLayout, layout_of
from earmill.pipeline.formats.values import JOINED_BYTES, Frames, Values, converted, join, sliced
from earmill.pipeline.storage.documents import Strict

BLOCK_FRAMES = 1024
Columns = NDArray[np.float64]


@dataclass(frozen=True)
class StoredMoments(Strict):
    """`StreamStatistics` in the form that is stored in JSON."""

    count: int
    float64: str


@dataclass(frozen=True, eq=False)
class StreamStatistics:
    """Statistics of a stream of frames, column by column, over all frames.

    Args:
        count: Frames.
        sums, squares, minimum, maximum: (width,) float64, of values in the stream's unit.
    """

    count: int
    sums: Columns
    squares: Columns
    minimum: Columns
    maximum: Columns

    @cached_property
    def mean(self) -> Columns:
        """(width,) float64."""
        return np.array([total / max(1, self.count) for total in self.sums.tolist()])

    @cached_property
    def variance(self) -> Columns:
        """(width,) float64, of the population; 0 exactly in columns that do not vary."""
        n = max(1, self.count)
        pairs = zip(self.sums.tolist(), self.squares.tolist(), strict=True)
        found = [float(Fraction(q) / n - (Fraction(s) / n) ** 2) for s, q in pairs]
        return np.where(self.constant, 0.0, np.maximum(found, 0.0))

    @property
    def std(self) -> Columns:
        """(width,) float64."""
        return np.sqrt(self.variance)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """(width,) True for columns with one value in all frames."""
        same: NDArray[np.bool_] = self.minimum == self.maximum
        return same

    def scaled(self, factor: float) -> StreamStatistics:
        """Return the statistics of all values times a power of two, exactly."""
        low_high = (self.minimum * factor, self.maximum * factor)
        return StreamStatistics(self.count, self.sums * factor, self.squares * factor**2, *low_high)

    def stored(self) -> StoredMoments:
        table = np.stack([self.sums, self.squares, self.minimum, self.maximum]).astype("<f8")
        return StoredMoments(self.count, base64.b64encode(table.tobytes()).decode())

    @classmethod
    def read(cls, stored: StoredMoments, width: int) -> StreamStatistics:
        """Read statistics from JSON; a CommitError if it is damaged."""
        try:
            table = np.frombuffer(base64.b64decode(stored.float64, validate=True), "<f8")
            table = table.reshape(4, width).astype(np.float64)
        except (ValueError, binascii.Error) as err:
            raise CommitError(f"expected statistics of {width} columns, got others: {err}") from err
        if stored.count < 0 or not np.isfinite(table).all():
            raise CommitError("expected statistics of finite numbers, got others")
        return cls(stored.count, *table)


class RunningMoments:
    def __init__(self, width: int) -> None:
        self._count = 0
        self._sums, self._squares = [np.zeros(width)], [np.zeros(width)]
        self._low, self._high = np.full(width, np.inf), np.full(width, -np.inf)

    def add(self, row: Values) -> None:
        """Add a row: (n_frames, width), float16, float32 or float64."""
        self.add_blocks(sliced(row, BLOCK_FRAMES))

    def add_blocks(self, blocks: Iterable[Frames]) -> None:
        """Add the blocks of some rows: BLOCK_FRAMES frames each, fewer at the end of a row."""
        for some in gathered(blocks, attrgetter("nbytes"), JOINED_BYTES):
            self._add(some)

    def _add(self, blocks: Sequence[Frames]) -> None:
        ends = [*accumulate(map(len, blocks), initial=0)]
        whole = join(blocks)
        if whole.dtype == np.float16:  # numpy compares and converts float32 ten times as fast
            whole = converted(whole, np.dtype(np.float32))
        np.minimum(self._low, whole.min(axis=0), out=self._low)
        np.maximum(self._high, whole.max(axis=0), out=self._high)
        # In C order numpy adds frame after frame; a single column it adds pairwise. Commits hold
        # sums in this order.
        wide = whole.astype(np.float64, order="C")
        self._sums += [wide[first:last].sum(axis=0) for first, last in pairwise(ends)]
        np.multiply(wide, wide, out=wide)
        self._squares += [wide[first:last].sum(axis=0) for first, last in pairwise(ends)]
        self._count += ends[-1]

    def result(self) -> StreamStatistics:
        low = self._low if self._count else self._sums[0]
        high = self._high if self._count else self._sums[0]
        sums, squares = _exact_sum(self._sums), _exact_sum(self._squares)
        # 0.0 and -0.0 are equal, so their order decides which is kept; adding 0.0 removes the sign.
        return StreamStatistics(self._count, sums, squares, low + 0.0, high + 0.0)


def combined(parts: Sequence[StreamStatistics]) -> StreamStatistics:
    filled = [part for part in parts if part.count] or list(parts[:1])
    return StreamStatistics(
        sum(part.count for part in filled),
        _exact_sum([part.sums for part in filled]),
        _exact_sum([part.squares for part in filled]),
        np.min([part.minimum for part in filled], axis=0),
        np.max([part.maximum for part in filled], axis=0),
    )


def shard_moments(
    rows: Sequence[FeatureRow], streams: Sequence[StreamInfo]
) -> dict[str, StoredMoments]:
    found = {}
    for info in streams:
        layout = layout_of(info)
        if has_statistics(info):
            summing = RunningMoments(info.width)
            summing.add_blocks(b for row in rows for b in layout.frame_blocks(row, BLOCK_FRAMES))
            found[info.name] = summing.result().scaled(info.scale_factor).stored()
    return found


def dataset_moments(
    shards: Iterable[Mapping[str, StoredMoments]], streams: Sequence[StreamInfo | Mapping[str, Any]]
) -> dict[str, StoredMoments]:
    """Combine the statistics of a dataset's shards, in order; a stream that a shard lacks (before
    layout version 3) is left out."""
    known, found = list(shards), {}
    for info in streams:
        layout = layout_of(info)
        parts = [shard[layout.name] for shard in known if layout.name in shard]
        if has_statistics(info) and parts and len(parts) == len(known):
            read = [StreamStatistics.read(part, layout.width) for part in parts]
            found[layout.name] = combined(read).stored()
    return found


def has_statistics(info: StreamInfo | Mapping[str, Any]) -> bool:
    return not isinstance(layout_of(info), EventLayout)


def _exact_sum(parts: Sequence[Columns]) -> Columns:
    if len(parts) <= 2:  # a single sum is rounded once as it is
        return np.asarray(np.sum(parts, axis=0))
    return np.array([math.fsum(column) for column in np.stack(parts, axis=1).tolist()])
