"""Which columns of a Hugging Face dataset are carried through, in their types, and which not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import pyarrow as pa

from earmill.pipeline.common.arrow_types import Columns, kept_type
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.common.text import nearest
from earmill.pipeline.sources.audio_cells import check_audio_type
from earmill.pipeline.spec.source import HfSpec


def features_of(spec: HfSpec, dataset: Any) -> Any:
    """The dataset's features; SourceError when a column that the job names is missing."""
    if dataset.features is None:  # a stream that has to be peeked into
        dataset = dataset._resolve_features()
    features = dataset.features
    named = [spec.audio_column, spec.id_column, spec.duration_column]
    for name in [name for name in named if name is not None and name not in features]:
        raise SourceError(
            f"source {spec.uri}: no column {name!r}{nearest(name, list(features))} "
            f"(columns: {', '.join(features)})"
        )
    for name in [name for name in named[1:] if name is not None]:
        if not isinstance(features[name], datasets.Value | datasets.ClassLabel):
            raise SourceError(
                f"source {spec.uri}: expected a column of single values, got {name!r} of "
                f"{_name(features[name])}"
            )
    return features


def audio_type(spec: HfSpec, features: Any, array_rate_hz: int | None) -> Any:
    """Return the Arrow type of the audio column, as its cells are stored.

    Raises:
        SourceError: The column holds no audio, or none that can be read.
    """
    kind = features.arrow_schema.field(spec.audio_column).type
    try:
        check_audio_type(spec.audio_column, kind, array_rate_hz)
    except SourceError as error:
        raise SourceError(f"source {spec.uri}: {error}") from error
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def carried(spec: HfSpec, features: Any) -> Columns:
    """Every column but the audio and the ids: its type and its class names, or why not."""
    schema = features.arrow_schema
    types, dropped = {}, {}
    labels: dict[str, tuple[str, ...]] = {}
    for name, feature in features.items():
        if name in (spec.audio_column, spec.id_column):
            continue
        kind = kept_type(schema.field(name).type)
        if kind is None:
            dropped[name] = _name(feature)
        else:
            types[name] = kind
            labels.update(_labels(name, feature))
    return Columns(types, labels, dropped)


def _labels(path: str, feature: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(feature, datasets.ClassLabel):
        if feature.names:
            yield path, tuple(feature.names)
    elif isinstance(feature, Mapping):
        for name, part in feature.items():
            yield from _labels(f"{path}.{name}", part)
    elif isinstance(feature, datasets.List | datasets.LargeList):
        yield from _labels(f"{path}[]", feature.feature)


def _name(feature: Any) -> str:
    """What a user knows a feature as: Image, Array2D, binary."""
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__
