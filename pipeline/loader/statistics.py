"""Mean and variance of the streams of a set, and normalised features; see `formats.moments`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from earmill.pipeline.common.text import few
from earmill.pipeline.formats.moments import (
    RunningMoments,
    StreamStatistics,
    combined,
    has_statistics,
)
from earmill.pipeline.loader.rows import FeatureRows

Of = Mapping[str, StreamStatistics]
NAMED_COLUMNS = 8


def compute_statistics(features: FeatureRows) -> dict[str, StreamStatistics]:
    """Compute the statistics of the streams of frames of a set, by reading every row once.

    Args:
        features: One set, or several sets as one. If it is opened in its stored dtype or a wider
            one, the numbers equal those that a job stores.
    """
    table = features.table
    # Sets end to end have numbers and the same streams. Sets side by side have other streams each.
    if "set" in table.column_names:
        sets: Any = features
        return together([compute_statistics(each) for each in sets.sets])
    shards = table.column("shard").to_pylist()
    by_shard = groupby(range(len(shards)), shards.__getitem__)
    return together([_summed(features, rows) for _, rows in by_shard] or [_summed(features, [])])


def together(parts: list[dict[str, StreamStatistics]]) -> dict[str, StreamStatistics]:
    """Return the statistics of several sets as one, every frame counted once."""
    return {name: combined([part[name] for part in parts]) for name in parts[0]}


def framed(features: FeatureRows) -> list[str]:
    return [name for name, info in features.streams.items() if has_statistics(info)]


def _summed(features: FeatureRows, rows: Iterable[int]) -> dict[str, StreamStatistics]:
    summing = {name: RunningMoments(features.streams[name].width) for name in framed(features)}
    for number in rows:
        row = features[number]
        for name, one in summing.items():
            one.add(row.features[name])
    return {name: one.result() for name, one in summing.items()}


class Normaliser:
    """Scales frames to mean 0 and variance 1 in every column, in the dtype that is read. Constant
    columns become 0, with one warning. `wanted` is True for the set's own statistics."""

    def __init__(self, features: FeatureRows, wanted: bool | Of) -> None:
        if wanted is not True and not isinstance(wanted, Mapping):
            raise TypeError(
                "expected normalise=True, False or a mapping of streams to their statistics, got "
                f"{wanted!r}"
            )
        self._of: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._dtypes = features.dtypes
        for name, statistics in (features.statistics if wanted is True else wanted).items():
            _check(features, name, statistics)
            std = np.where(statistics.constant, 1.0, statistics.std)
            exact = np.result_type(self._dtypes[name], np.float32)
            self._of[name] = statistics.mean.astype(exact), std.astype(exact)
            columns = np.flatnonzero(statistics.constant).tolist()
            if columns:
                named = few([*map(str, columns)], NAMED_COLUMNS, ", ")
                warnings.warn(
                    f"stream {name}: columns {named} do not vary; normalised, they are 0",
                    stacklevel=4,
                )

    def __call__(self, features: Mapping[str, Any]) -> dict[str, Any]:
        normal = dict(features)
        for name, (mean, std) in self._of.items():
            values = features[name].astype(mean.dtype)
            values -= mean
            values /= std
            normal[name] = values.astype(self._dtypes[name], copy=False)
        return normal


def _check(features: FeatureRows, name: str, statistics: Any) -> None:
    if name not in framed(features):
        raise ValueError(
            f"normalise: expected streams of frames out of {framed(features)}, got {name!r}"
        )
    if not isinstance(statistics, StreamStatistics):
        raise TypeError(
            f"normalise: expected statistics of {name}, as ds.statistics has them, got "
            f"{type(statistics).__name__}"
        )
    width = features.streams[name].width
    if len(statistics.sums) != width:
        raise ValueError(
            f"normalise: expected statistics of {width} columns for {name}, got "
            f"{len(statistics.sums)}; take those of the same stream"
        )
    if not statistics.count:
        raise ValueError(f"normalise: expected statistics of at least one frame of {name}, got 0")
