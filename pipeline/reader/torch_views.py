"""The torch forms of anything that reads like a feature set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earmill.pipeline.reader.base import FeatureRows
    from earmill.pipeline.reader.torch_datasets import FeatureDataset, FeatureStream


class TorchViews:
    """Gives a feature set its two torch datasets; torch is imported when one is asked for."""

    def torch(self: FeatureRows, *, label: str | None = None) -> FeatureDataset:
        """A map-style torch dataset of rows; `label` names a column of the source."""
        from earmill.pipeline.reader.torch_datasets import FeatureDataset

        return FeatureDataset(self, label=label)

    def iterable(self: FeatureRows, **settings: Any) -> FeatureStream:
        """A torch IterableDataset; see `reader.torch_datasets.FeatureStream` for the settings."""
        from earmill.pipeline.reader.torch_datasets import FeatureStream

        return FeatureStream(self, **settings)
