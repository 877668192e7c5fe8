"""Base class of feature sets: their order in an epoch, their torch datasets, their table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.common.missing_modules import needed_modules
from earmill.pipeline.loader import display
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Rows

if TYPE_CHECKING:
    from earmill.pipeline.loader.rows import FeatureRows, Row
    from earmill.pipeline.loader.stream import FeatureDataset, FeatureStream


class FeatureSet:
    """Base class of sets that are `FeatureRows`; torch is imported when a torch dataset is made.

    Attributes:
        mixture: Rows of each set in an epoch, where sets are mixed by weight; else None.
    """

    mixture: tuple[int, ...] | None = None

    def _repr_html_(self: FeatureRows) -> str:
        return display.set_table(f"{type(self).__name__}: {len(self)} rows", self.streams)

    def block_order(
        self: FeatureRows, *, shuffle: bool, seed: int, epoch: int
    ) -> tuple[Rows, Rows]:
        """Return the rows of an epoch in the order of shuffled blocks, and the epoch for each."""
        rows = order.block_order(self.block_rows(), shuffle=shuffle, seed=seed, epoch=epoch)
        return rows, np.full(len(rows), epoch, np.int64)

    def read_row(
        self: FeatureRows,
        index: int,
        span_s: tuple[float, float] | None = None,
        *,
        copy: bool = True,
    ) -> Row:
        """Read a row, or a stretch of it, for a collate.

        Args:
            index: The row's number, from 0.
            span_s: Start and end of the stretch, s; None for the whole row.
            copy: Return fresh arrays. If False, frames may be views of cached blocks (`FrameView`).
        """
        return self[index] if span_s is None else self.slice(index, *span_s)

    def torch(self: FeatureRows, *, label: str | None = None) -> FeatureDataset:
        """A map-style torch dataset of rows; `label` names a column of the source."""
        with needed_modules("torch datasets"):
            from earmill.pipeline.loader.stream import FeatureDataset

        return FeatureDataset(self, label=label)

    def iterable(self: FeatureRows, **settings: Any) -> FeatureStream:
        """A torch IterableDataset; see `loader.stream.FeatureStream` for the settings."""
        with needed_modules("torch datasets"):
            from earmill.pipeline.loader.stream import FeatureStream

        return FeatureStream(self, **settings)
