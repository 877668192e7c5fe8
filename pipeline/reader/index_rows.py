"""The table of rows that a catalog has: which columns it shows, and what an index must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.row_table import BASE_TYPES, EXTRA_PREFIX, FACT_TYPES
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import is_shard_id

if TYPE_CHECKING:
    from amtcore.features.stream_info import StreamInfo

SHOWN = ("row_id", "plan_row_id", "channel", "seconds", "uri", "shard", "row")


def check_rows(layout: Layout, table: pa.Table, streams: Mapping[str, StreamInfo]) -> None:
    """Refuse a table whose rows have no name, lie in no shard or at no place; how far they reach is
    checked where they are read."""
    places = ("row", *_place_names(streams))
    kinds = {name: pa.types.is_integer for name in places}
    kinds |= {"row_id": pa.types.is_string, "shard": pa.types.is_string}
    kinds |= {"seconds": pa.types.is_floating}
    columns = {name: table.column(name) for name in kinds}
    strange = [name for name, is_kind in kinds.items() if not is_kind(columns[name].type)]
    empty = [name for name, column in columns.items() if column.null_count]
    if strange or empty:
        raise CommitError(
            f"{layout.url()}: expected a name, a shard and places of every row, the index has none "
            f"in its column {(strange or empty)[0]!r}; run `earmill verify`"
        )
    strange = [name for name in columns["shard"].unique().to_pylist() if not is_shard_id(name)]
    negative = [name for name in places if (pc.min(columns[name]).as_py() or 0) < 0]
    if strange or negative:
        raise CommitError(
            f"{layout.url()}: expected shard ids and places from 0, the index holds "
            f"{strange[:1] or negative}; run `earmill verify`"
        )


def good_rows(table: pa.Table, streams: Mapping[str, StreamInfo]) -> pa.Table:
    """The good rows of an index, in shard order; columns are copied only where rows go or move."""
    good, shown = pc.equal(table.column("status"), "ok"), shown_columns(table, streams)
    del table
    if not pc.all(good, min_count=0, skip_nulls=False).as_py():
        shown = shown.filter(good)
    order = pc.sort_indices(shown, [("shard", "ascending"), ("row", "ascending")])
    if not np.array_equal(order, np.arange(len(shown))):
        shown = shown.take(order)
    return shown


def shown_columns(table: pa.Table, streams: Mapping[str, StreamInfo]) -> pa.Table:
    """The columns of `Catalog.table`, in one order whatever they came from."""
    extras = sorted(filter(is_extra, table.column_names))
    return table.select([*SHOWN, *_place_names(streams), *extras])


def fact_names(table: pa.Table, streams: Mapping[str, StreamInfo]) -> list[str]:
    """The provenance columns of a table of rows."""
    places = set(_place_names(streams))
    return [
        name
        for name in table.column_names
        if name in FACT_TYPES or not (name in BASE_TYPES or name in places or is_extra(name))
    ]


def is_extra(name: str) -> bool:
    """Whether a column was carried through from the source."""
    return name.startswith(EXTRA_PREFIX)


def _place_names(streams: Mapping[str, StreamInfo]) -> list[str]:
    return [column for info in streams.values() for column in layout_of(info).place_columns]
