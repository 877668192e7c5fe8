"""A shard in one format, as a file or folder of a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earmill.pipeline.formats.format import Encoding, format_of
from earmill.pipeline.formats.rows import FeatureRow


def encode(
    fmt: str,
    rows: Sequence[FeatureRow],
    streams: Sequence[Any],
    *,
    folder: Path,
    name: str,
    encoding: Encoding,
) -> Path:
    """Write it as `folder/name`, and say where that is."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    format_of(fmt).write(path, rows, streams, encoding)
    return path
