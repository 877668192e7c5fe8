"""The plan: every row assigned to a shard, made once, stored, never changed.

Rows keep the source's order. They are cut into shards by expected audio seconds, so that shards
cost about the same time. The plan id is a hash of the rows, their shards and the spec.

The file of a plan of few rows is one table, which is checked against the plan id when it is read. A
plan of many rows is an index of parts (`planning.shards`), each checked against its own hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from earmill.pipeline.common.arrow_types import extra_types
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.text import one_line, quantity
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.planning import shards
from earmill.pipeline.planning.shards import Shard, StoredShard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.sources.files import BLANK_ROW
from earmill.pipeline.storage.documents import table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import plan_path


@dataclass(frozen=True)
class Plan:
    plan_id: str  # Hash of rows, shards and spec.
    spec_sha256: str
    shards: tuple[Shard, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)  # Files left out, by extension.
    # Carried-through column to its type, see `earmill.pipeline.common.arrow_types`.
    extra_types: Mapping[str, Any] = field(default_factory=dict)
    # Column of class numbers to the names of the classes.
    extra_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)  # Columns left out, to the reason.
    estimated: int = 0  # Rows whose duration is estimated from their bytes.
    split: int = 0  # Shards that begin within a row group, which each of its shards fetches.
    in_order: int = 0  # Long recordings that stay whole in a job with spans.
    copied: int = 0  # Shards at the end whose rows are copies of earlier rows: equal files.
    missing: int = 0  # Rows of a table whose local file did not exist at the listing.
    first_missing: str = ""  # Name of the first of these files.

    @property
    def computed(self) -> tuple[Shard, ...]:
        return self.shards[: len(self.shards) - self.copied]

    @property
    def copies(self) -> tuple[Shard, ...]:
        return self.shards[len(self.shards) - self.copied :]

    @property
    def notes(self) -> list[str]:
        lines = [skipped_text(self.skipped)]
        if self.dropped:
            kept = [f"{name} ({why})" for name, why in sorted(self.dropped.items())]
            lines.append(f"columns not carried through: {', '.join(kept)}")
        if self.estimated == 1:
            lines.append("the duration of 1 row is estimated from its bytes")
        elif self.estimated:
            lines.append(f"durations of {self.estimated:,} rows are estimated from their bytes")
        if self.split:
            lines.append(
                f"{self.split:,} of the shards begin within a row group, which each of its shards "
                "fetches whole: write smaller row groups, or raise output.shard_seconds and "
                "output.shard_rows"
            )
        if self.in_order:
            lines.append(
                f"{self.in_order:,} long recordings are computed in order, each by one worker: "
                "their length is not known, they begin within a second, or they cannot be read in "
                "parts (use WAV or FLAC in a folder, a bucket or a manifest)"
            )
        if copied := sum(shard.rows for shard in self.copies):
            lines.append(
                f"{copied:,} rows are files equal to others: they are copied, not computed"
            )
        if self.missing:
            lines.append(
                f"{self.missing:,} of {self.rows:,} rows name a file that cannot be found, first "
                f"{one_line(self.first_missing)}: they will be in quarantine; check the paths "
                "(source.prefix of a manifest) and what is mounted"
            )
        return [line for line in lines if line]

    @cached_property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def items(self) -> Iterator[Item]:
        return (item for shard in self.shards for item in shard.items)

    @property
    def parts(self) -> tuple[StoredShard, ...]:
        """Return the shards of a plan in parts; none if the plan has its rows in memory."""
        return tuple(shard for shard in self.shards if isinstance(shard, StoredShard))

    def write(self, store: Layout) -> str:
        path = plan_path(self.plan_id)
        if self.parts:
            shards.store_parts(self.parts, store, self.plan_id)
        if not store.exists(path):
            store.write_bytes(path, encode_plan(self))
        return path

    @staticmethod
    def read(store: Layout, plan_id: str) -> Plan:
        """Read a stored plan; CommitError if it was altered."""
        path = plan_path(plan_id)
        try:
            plan = decode_plan(store.read_bytes(path), store, plan_id)
        except CommitError as error:
            raise CommitError(f"{path}: {error}") from error
        except (OSError, KeyError, ValueError) as error:
            raise CommitError(
                f"{path}: the plan cannot be read: {one_line(error)}; restore it from a copy, or "
                "take another output.uri"
            ) from error
        actual = plan.plan_id if plan.parts else shards.PlanId.of(plan.shards, plan.spec_sha256)
        if not plan.plan_id == plan_id == actual:
            raise CommitError(f"{path}: expected plan {plan_id}, got rows of plan {actual}")
        return plan


def plan_of(plan_shards: Sequence[Shard], spec_sha256: str, **about: Any) -> Plan:
    writer = shards.ShardWriter(spec_sha256, shards.typed_columns(about.get("extra_types", {})))
    for shard in plan_shards:
        writer.add(Shard(shard.shard_id, shard.items))
    packed = tuple(writer.end())
    return Plan(str(writer.plan_id), spec_sha256, packed, **about, estimated=writer.estimated)


# Fields with facts about the source.
ABOUT = ("skipped", "extra_types", "extra_labels", "dropped", "estimated", "split")
# Fields that are stored only if they are not 0 or empty.
ABOUT_SOME = ("in_order", "copied", "missing", "first_missing")


def read_row_ids(store: Layout, plan_id: str) -> dict[str, list[str]]:
    """Read the row ids of a stored plan by shard, both in order."""
    raw = store.read_bytes(plan_path(plan_id))
    tables: Iterable[pa.Table]
    if _metadata(table_of(raw, ["shard"]))["version"] == shards.PARTED_VERSION:
        parts = shards.parts_of(decode_plan(raw, store, plan_id).parts)
        tables = (table_of(part.read(), ["shard", "row_id"]) for part in parts)
    else:
        tables = [table_of(raw, ["shard", "row_id"])]
    row_ids: dict[str, list[str]] = {}
    for table in tables:
        row_ids |= shards.by_shard(table, table.column("row_id").to_pylist())
    return dict(sorted(row_ids.items()))


def encode_plan(plan: Plan) -> bytes:
    """Encode the file of a plan: its rows, or an index of its parts."""
    typed = shards.typed_columns(plan.extra_types)
    fields = {name: getattr(plan, name) for name in (*ABOUT, *ABOUT_SOME)}
    about = {name: value for name, value in fields.items() if value or name in ABOUT}
    metadata = {
        "plan_id": plan.plan_id,
        "spec_sha256": plan.spec_sha256,
        "about": json.dumps(about, sort_keys=True),
        "version": shards.TYPED_VERSION if typed else shards.PLAN_VERSION,
    }
    if not plan.parts:
        return shards.encoded(shards.rows_table(plan.shards, typed), metadata)
    sha256s = [part.sha256 for part in shards.parts_of(plan.parts)]
    metadata |= {"version": shards.PARTED_VERSION, "parts": json.dumps(sha256s)}
    table = shards.index_table(plan.parts)
    return shards.encoded(table, {**metadata, "check": _index_check(table, metadata)})


def _index_check(table: pa.Table, metadata: Mapping[str, str]) -> str:
    """Hash a plan's index, which holds no rows: the plan id cannot be recomputed from it."""
    values = [metadata[name] for name in ("plan_id", "spec_sha256", "about", "parts")]
    return hashlib.sha256(json.dumps([values, table.to_pydict()]).encode()).hexdigest()


def decode_plan(raw: bytes, store: Layout, plan_id: str) -> Plan:
    """Decode a plan from its file; KeyError, ValueError, OSError if it is damaged."""
    table = table_of(raw)
    metadata = _metadata(table)
    about = loads_json(metadata.get("about", "{}"), max_chars=None)
    plan_shards: tuple[Shard, ...]
    if metadata["version"] == shards.PARTED_VERSION:
        if _index_check(table, metadata) != metadata["check"]:
            raise CommitError("the index of the plan was altered; restore it from a copy")
        sha256s = loads_json(metadata["parts"], max_chars=None)
        plan_shards = shards.stored_shards(table, sha256s, store, plan_id)
    else:
        groups = shards.by_shard(table, shards.items_of(table))
        plan_shards = tuple(Shard(shard_id, tuple(items)) for shard_id, items in groups.items())
        if "extra_types" not in about:  # earlier releases did not store them
            about["extra_types"] = extra_types(
                item.extra for items in groups.values() for item in items
            )
    kept = {name: about[name] for name in (*ABOUT, *ABOUT_SOME) if name in about}
    return Plan(metadata["plan_id"], metadata["spec_sha256"], plan_shards, **kept)


def _metadata(table: pa.Table) -> dict[str, str]:
    """Return the table's metadata; CommitError if this release cannot read its version."""
    metadata = {key.decode(): text.decode() for key, text in (table.schema.metadata or {}).items()}
    version = metadata.get("version", "")
    if version not in (shards.PLAN_VERSION, shards.TYPED_VERSION, shards.PARTED_VERSION):
        raise CommitError(
            f"expected a plan of version 1, 2 or 3, got {version!r}; use the release that wrote it"
        )
    return metadata


NAMED_KINDS = 6


def skipped_text(skipped: Mapping[str, int]) -> str:
    """Return `12 files skipped: .txt 10, .jpg 2`; an empty text if no file was skipped."""
    total = sum(skipped.values())
    if total == 0:
        return ""
    # The most frequent first.
    ordered = sorted(skipped.items(), key=lambda entry: (-entry[1], entry[0]))
    kinds = [f"{kind} {count:,}" for kind, count in ordered]
    more = f", {len(kinds) - NAMED_KINDS} more kinds" if len(kinds) > NAMED_KINDS else ""
    if set(skipped) == {BLANK_ROW}:
        return f"{quantity(total, 'blank row')} skipped"
    return f"{quantity(total, 'file')} skipped: {', '.join(kinds[:NAMED_KINDS])}{more}"
