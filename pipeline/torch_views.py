"""The torch forms of anything that reads like a feature set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.datasets_torch import FeatureDataset, FeatureStream


class TorchViews:
    """Gives a feature set its two torch datasets; torch is imported when one is asked for."""

    def torch(self) -> FeatureDataset:
        """A map-style torch dataset."""
        from pipeline.datasets_torch import FeatureDataset

        return FeatureDataset(self)  # type: ignore[arg-type]  # a feature set, or several

    def iterable(self, **settings: Any) -> FeatureStream:
        """A torch IterableDataset; see `pipeline.datasets_torch.FeatureStream` for the settings."""
        from pipeline.datasets_torch import FeatureStream

        return FeatureStream(self, **settings)  # type: ignore[arg-type]  # as above
