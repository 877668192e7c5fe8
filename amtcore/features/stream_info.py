"""Descriptions of feature streams, as plain values that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: `pool` and rate of a stream with one row a clip.
PER_CLIP, PER_CLIP_RATE_HZ = "clip", 0.0


@dataclass(frozen=True)
class StreamKind:
    """A feature stream that a model offers: its unit, axes and summary.

    `layout` is "frames", or "events" for sparse streams that another stream of the model drives.
    """

    unit: str
    axes: tuple[str, ...]
    summary: str
    layout: str = "frames"

    def info(
        self, name: str, model: str, width: int, frame_rate_hz: float, pool: str, **more: Any
    ) -> StreamInfo:
        """Return the description of a stream of this kind; by default a column is a channel."""
        usual: Any = {"unit": self.unit, "axes": self.axes, "layout": self.layout}
        usual["channel_offsets"] = tuple(range(width + 1))
        given: Any = {"width": width, "frame_rate_hz": frame_rate_hz, "pool": pool}
        return StreamInfo(name, model, **usual | given | more)


@dataclass(frozen=True)
class StreamInfo:
    """One feature stream.

    Args:
        name: Name of the stream.
        model: Name of the model.
        unit: Unit of the values.
        width: Columns per frame.
        frame_rate_hz: Frames per second.
        pool: Statistic of a frame: mean, rms, max or subsample; "model" for frames that the model
            makes itself, "clip" for one row a clip.
        axes: Names of the two axes.
        channel_offsets: (channel + 1), cuts the columns into channels of M_i columns.
        fc_hz: Centre frequency of each channel.
        mfc_hz: Modulation centre frequency of each column; empty without a modulation axis.
        columns: Name of each column, for streams whose columns are different quantities.
        layout: "frames", or "events" for sparse streams with a neuron a column and a step a frame.
            "int8" for stored frames with scales.
        scale_factor: Factor from stored values to `unit`; models leave it at 1.
    """

    name: str
    model: str
    unit: str
    width: int
    frame_rate_hz: float
    pool: str
    axes: tuple[str, ...]
    channel_offsets: tuple[int, ...]
    fc_hz: tuple[float, ...] = ()
    mfc_hz: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    layout: str = "frames"
    scale_factor: float = 1.0

    def __repr__(self) -> str:
        """One line; the numbers of each channel and column are in the attributes."""
        low_high = f" of {self.fc_hz[0]:.6g} to {self.fc_hz[-1]:.6g} Hz" if self.fc_hz else ""
        channels = len(self.channel_offsets) - 1
        rate = f" at {self.frame_rate_hz:g} Hz" if self.frame_rate_hz else " once a clip"
        return (
            f"<{self.model} {self.name}: {self.width} columns in {channels} channels{low_high}, "
            f"{self.layout}{rate} ({self.pool}), {self.unit}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, without the last three fields at their default."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        added = {"columns": [], "layout": "frames", "scale_factor": 1.0}
        return {k: value for k, value in plain.items() if k not in added or value != added[k]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StreamInfo:
        """The inverse of `to_dict`."""
        plain: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)
