"""The torch forms of anything that reads like a feature set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.missing_modules import needed_modules
from earmill.pipeline.reader import shown

if TYPE_CHECKING:
    from earmill.pipeline.reader.base import FeatureRows
    from earmill.pipeline.reader.torch_datasets import FeatureDataset, FeatureStream


class TorchViews:
    """Gives a feature set its two torch datasets, and its table in notebooks; torch is imported
    when a dataset is asked for."""

    def _repr_html_(self: FeatureRows) -> str:
        return shown.set_table(f"{type(self).__name__}: {len(self)} rows", self.streams)

    def torch(self: FeatureRows, *, label: str | None = None) -> FeatureDataset:
        """A map-style torch dataset of rows; `label` names a column of the source."""
        with needed_modules("torch datasets"):
            from earmill.pipeline.reader.torch_datasets import FeatureDataset

        return FeatureDataset(self, label=label)

    def iterable(self: FeatureRows, **settings: Any) -> FeatureStream:
        """A torch IterableDataset; see `reader.torch_datasets.FeatureStream` for the settings."""
        with needed_modules("torch datasets"):
            from earmill.pipeline.reader.torch_datasets import FeatureStream

        return FeatureStream(self, **settings)
