"""Features as datasets of Ray Data. `earmill.BatchExtractor` computes features in `map_batches`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from earmill.pipeline.common.missing_modules import needed_modules
from earmill.pipeline.loader.rows import FeatureRows, Row
from earmill.pipeline.reader.open import open_features

__all__ = ["read_features"]


def read_features(
    uri: str | os.PathLike[str] | list[Any],
    *,
    override_num_blocks: int | None = None,
    **options: Any,
) -> Any:
    """Return a `ray.data.Dataset` with a row for each row of a feature set.

    A row has `row_id`, `index`, `seconds`, the source's columns, and each stream as an array:
    frames (n_frames, width), events (n_events, 3). A source's column of the name of another column
    is called `extra_<name>`. A task reads whole row groups. All nodes need access to the place.

    Args:
        uri: As for `open_features`.
        override_num_blocks: Number of reading tasks; Ray chooses if None.
        options: Further arguments of `open_features`: streams, dtype, snapshot, storage_options.
    Raises:
        SourceError: There is no feature set; further errors as for `open_features`.
    """
    with needed_modules("earmill.ray", "ray"):
        import ray.data
    features = open_features(uri, **options)
    stops = np.cumsum(features.block_rows()).tolist()
    groups = [{"start": a, "stop": b} for a, b in zip([0, *stops], stops, strict=False)]
    pieces = ray.data.from_items(groups, override_num_blocks=override_num_blocks)
    return pieces.flat_map(partial(_rows, features))


def _rows(features: FeatureRows, group: Mapping[str, int]) -> list[dict[str, Any]]:
    return [_columns(features[n]) for n in range(group["start"], group["stop"])]


def _columns(row: Row) -> dict[str, Any]:
    columns = {"row_id": row.row_id, "index": row.index, "seconds": row.seconds}
    for name, values in row.features.items():
        columns[name] = values if isinstance(values, np.ndarray) else values.to_columns()
    extra = {f"extra_{k}" if k in columns else k: value for k, value in row.extra.items()}
    return extra | columns
