"""The files of one committed shard, out of its commit record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.commit_record import CommitRecord
from earmill.pipeline.dataset.stored_rows import promise_of
from earmill.pipeline.formats.format import Promise
from earmill.pipeline.formats.registry import installed
from earmill.pipeline.storage.layout import Layout

if TYPE_CHECKING:
    from amtcore.features.stream_info import StreamInfo


@dataclass(frozen=True, slots=True)
class ShardPaths:
    """The files of one committed shard: feature files by format, and the table of its rows.

    `promises` is what the feature files are held against, by format.
    """

    data: Mapping[str, str]
    rows: str
    promises: Mapping[str, Promise]


def paths_of(
    layout: Layout, record: CommitRecord, streams: Mapping[str, StreamInfo], dtype: str
) -> ShardPaths:
    """The files that a record names, with what they are held against.

    Raises:
        CommitError: The record belongs to another dataset.
    """
    try:
        formats = installed(record.formats)
        data = {name: record.path(name) for name in formats}
        rows = record.path("rows")
        promises = {name: promise_of(record, streams, dtype, fmt) for name, fmt in formats.items()}
    except (ValueError, KeyError, TypeError) as err:
        raise CommitError(
            f"{layout.url()}: the commit record of shard {record.shard!r} does not belong to this "
            f"dataset: {type(err).__name__}: {err}; run `earmill verify`"
        ) from err
    return ShardPaths({fmt: path for fmt, path in data.items() if path}, str(rows), promises)
