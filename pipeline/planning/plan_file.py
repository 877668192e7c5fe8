"""The file of a plan: one table of rows, or an index of parts, with what is known of the source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from earmill.pipeline.common.arrow_types import extra_types
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.planning.parts import (
    Store,
    StoredShard,
    index_table,
    part_tables,
    parts_of,
    stored_shards,
)
from earmill.pipeline.planning.plan_rows import (
    by_shard,
    encoded,
    items_of,
    rows_table,
    typed_columns,
)
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.storage.arrow_tables import table_of
from earmill.pipeline.storage.paths import is_plan_path, plan_path

# Version 2 has columns of the source in their own types beside the JSON of the others; version 3 is
# an index of parts.
PLAN_VERSION, TYPED_VERSION, PARTED_VERSION = "1", "2", "3"
# What the plan says of the source beside its rows.
ABOUT = ("skipped", "extra_types", "extra_labels", "dropped", "estimated", "split")
# The same, only where there are any.
ABOUT_SOME = ("in_order", "copied", "missing", "first_missing")


def read_row_ids(store: Store, plan_id: str) -> dict[str, list[str]]:
    """Row ids of a stored plan by shard, both in order: two columns, for who needs no more.

    Raises:
        CommitError: A plan of another version, or a damaged part.
    """
    raw = store.read_bytes(plan_path(plan_id))
    tables: Iterator[pa.Table]
    table = table_of(raw, ["shard"])
    if _check_version(table)[b"version"].decode() == PARTED_VERSION:
        parts = decode_plan(raw, store, plan_id)["shards"]
        tables = part_tables(parts, ["shard", "row_id"])
    else:
        tables = iter([table_of(raw, ["shard", "row_id"])])
    found: dict[str, list[str]] = {}
    for table in tables:
        found |= by_shard(table, table.column("row_id").to_pylist())
    return dict(sorted(found.items()))


def encode_plan(fields: Mapping[str, Any], parts: Sequence[StoredShard]) -> bytes:
    """Encode a plan as its file: its rows, or of a plan in parts an index of them.

    Args:
        fields: The fields of the `Plan`, by name; `decode_plan` returns them.
        parts: The shards of a plan in parts; empty where the plan has its rows.
    """
    typed = typed_columns(fields["extra_types"])
    about = {name: fields[name] for name in ABOUT}
    about |= {name: fields[name] for name in ABOUT_SOME if fields[name]}
    metadata = {
        "plan_id": fields["plan_id"],
        "spec_sha256": fields["spec_sha256"],
        "about": json.dumps(about, sort_keys=True),
        "version": TYPED_VERSION if typed else PLAN_VERSION,
    }
    if not parts:
        return encoded(rows_table(fields["shards"], typed), metadata)
    sha256s = [part.sha256 for part in parts_of(parts)]
    metadata |= {"version": PARTED_VERSION, "parts": json.dumps(sha256s)}
    table = index_table(parts)
    return encoded(table, {**metadata, "check": _index_check(table, metadata)})


def _index_check(table: pa.Table, metadata: Mapping[str, str]) -> str:
    """A hash of what an index says, as it holds no rows to reckon the plan's id from."""
    said = [metadata[name] for name in ("plan_id", "spec_sha256", "about", "parts")]
    return hashlib.sha256(json.dumps([said, table.to_pydict()]).encode()).hexdigest()


def decode_plan(raw: bytes, store: Store, plan_id: str) -> dict[str, Any]:
    """The fields of `Plan` out of its file.

    Raises:
        CommitError: A file of another version, or an index that was altered. KeyError, ValueError,
        OSError: It cannot be read.
    """
    table = table_of(raw)
    metadata = {key.decode(): text.decode() for key, text in _check_version(table).items()}
    about = loads_json(metadata.get("about", "{}"), max_chars=None)
    shards: tuple[Shard, ...]
    if metadata["version"] == PARTED_VERSION:
        if _index_check(table, metadata) != metadata["check"]:
            raise CommitError("the index of the plan was altered; restore it from a copy")
        sha256s = loads_json(metadata["parts"], max_chars=None)
        shards = stored_shards(table, sha256s, store, plan_id)
    else:
        groups = by_shard(table, items_of(table))
        shards = tuple(Shard(shard_id, tuple(items)) for shard_id, items in groups.items())
        if "extra_types" not in about:  # written before plans had it
            about["extra_types"] = extra_types(
                item.extra for items in groups.values() for item in items
            )
    kept = {name: about[name] for name in (*ABOUT, *ABOUT_SOME) if name in about}
    return {name: metadata[name] for name in ("plan_id", "spec_sha256")} | {"shards": shards} | kept


def _check_version(table: pa.Table) -> dict[bytes, bytes]:
    """What the table says of itself, if this release can read it."""
    metadata: dict[bytes, bytes] = table.schema.metadata or {}
    version = metadata.get(b"version", b"").decode()
    if version not in (PLAN_VERSION, TYPED_VERSION, PARTED_VERSION):
        raise CommitError(
            f"expected a plan of version 1, 2 or 3, got {version!r}; use the release that wrote it"
        )
    return metadata


def only_plan(store: Store) -> str:
    """The path of the only plan that is stored; CommitError where there is none, or more."""
    plans = [name for name in store.list("plan") if is_plan_path(name)]
    if len(plans) != 1:
        raise CommitError(f"expected one plan, found {len(plans)}: {', '.join(plans) or 'none'}")
    return plans[0]
