"""Types of the columns that a plan carries through: as the source says them, else as rows show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from earmill.pipeline.common.arrow_types import Columns, SeenTypes, type_json
from earmill.pipeline.planning.plan_rows import typed_columns
from earmill.pipeline.sources.base import Item


def known_types(items: Iterable[Item], columns: Columns) -> dict[str, Any]:
    """Carried-through column to its type: as the source knows it, else as these rows have it."""
    seen = SeenTypes()
    for item in items:
        seen.add(unknown(item, columns))
    return with_known(seen, columns)


def typed_of(columns: Columns) -> dict[str, pa.DataType]:
    """Columns that are stored in the type that the source says."""
    return typed_columns({name: type_json(kind) for name, kind in columns.types.items()})


def unknown(item: Item, columns: Columns) -> dict[str, Any]:
    """The cells of columns whose types the source does not say."""
    return {name: value for name, value in item.extra.items() if name not in columns.types}


def with_known(seen: SeenTypes, columns: Columns) -> dict[str, Any]:
    """Types of the columns that rows have shown, and of those that the source says."""
    known = {name: type_json(kind) for name, kind in columns.types.items()}
    return dict(sorted({**seen.found(), **known}.items()))
