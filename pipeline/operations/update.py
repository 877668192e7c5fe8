"""Take changes of a source into its dataset; only new and changed rows are computed.

A shard without a changed or removed row stays. Unchanged rows of other shards are copied. New and
changed rows make new shards, for the run that follows. A file that was moved or copied gets the
features of the committed row with the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import RowError, SourceError
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    commits,
    commits_as,
    plan_row_of,
    quarantined_rows,
)
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.driver_lock import Fence, held
from earmill.pipeline.dataset.revision import NewShard, begin_revision, is_finished
from earmill.pipeline.dataset.snapshot import good_plan_rows, read_snapshot, require_current
from earmill.pipeline.driver import events
from earmill.pipeline.operations.open_job import Changes, compare, other_features, stored_dataset
from earmill.pipeline.operations.retry import RowFilter
from earmill.pipeline.planning.equal_rows import computes_equal_once, equal_rows
from earmill.pipeline.planning.make_plan import check_items, check_listeners, known_types
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import cut
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.sources import Item, Source
from earmill.pipeline.sources.base import fetch, listing
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.source import reference_column
from earmill.pipeline.spec.spans import recording_of
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

# Why a revision was begun, in the dataset's history.
UPDATE, RETRY = "update", "retry"
Place = tuple[str, str]  # Shard and row id of a committed row whose features are copied.
SPAN = ("start_s", "end_s")


def start_update(spec: JobSpec, sink: events.Sink = events.ignore) -> None:
    """Begin a revision of a finished dataset if the source has changed; `run_job` with `resume`
    carries it out."""
    with finished_job(spec, sink) as job:
        if job is None:
            return
        sink(events.Step("listing the source"))
        source = planned_source(spec)
        items = list(listing(source))
        check_items(items, spec)
        if spec.listener_columns:
            check_listeners(spec, sorted({name for item in items for name in item.extra}))
        changes = compare(job.plan.items(), items)
        if changes:
            sink(events.Note(f"the source has changed, {changes}"))
            job.revise(source, items, changes, UPDATE)


@contextmanager
def finished_job(spec: JobSpec, sink: events.Sink = events.ignore) -> Iterator[FinishedJob | None]:
    """Hold the lock for a change of the plan; None without a finished dataset."""
    layout = Layout.open(spec.output.uri, spec.output.storage_options)
    if stored_dataset(spec, layout) is None:
        yield None
        return
    with held(layout) as fence:
        dataset = stored_dataset(spec, layout)  # another command may have removed it
        plan = None if dataset is None else Plan.read(layout, dataset.plan_id)
        if dataset is None or plan is None:
            yield None
        elif is_finished(layout, plan):
            yield FinishedJob(spec, layout, dataset, plan, fence)
        else:
            sink(events.Note("an earlier run was cut off: it is finished first, then run it again"))
            yield None


def start_retry(spec: JobSpec, chosen: RowFilter, sink: events.Sink = events.ignore) -> None:
    """Begin a revision that retries quarantined rows whose source file has changed, which needs a
    new plan. `run_job` retries the rows whose file is unchanged."""
    with finished_job(spec) as job:
        if job is None:
            return
        records = commits(job.layout)
        source = planned_source(spec)
        try:
            listed = {item.row_id: item for item in listing(source)}
        except SourceError:
            return  # the run reports it
        rows, recordings = set[str](), set[str]()
        for shard in job.plan.shards:
            items = {item.row_id: item for item in shard.items}
            failed = quarantined_rows(job.layout, records[shard.shard_id])
            matching = {plan_row_of(row.row_id, items) for row in failed if chosen(row)}
            changed = [
                items[row_id]
                for row_id in matching & items.keys() & listed.keys()
                if other_features(items[row_id], listed[row_id], spec.listener_columns)
            ]
            # A new shard has no commit to replace, so all its matching rows are tried.
            rows |= matching if changed else set()
            recordings |= {recording_of(item.row_id) for item in changed if item.part_of}
        if not rows:
            return
        sink(events.Note(f"files have changed: {len(rows):,} quarantined rows are planned anew"))
        # All spans of a recording must be of the same file.
        rows |= {
            item.row_id
            for item in job.plan.items()
            if item.part_of and item.row_id in listed and recording_of(item.row_id) in recordings
        }
        planned = [
            listed.get(item.row_id, item) if item.row_id in rows else item
            for item in job.plan.items()
        ]
        job.revise(source, planned, Changes(changed=tuple(sorted(rows))), RETRY)


@dataclass(frozen=True)
class FinishedJob:
    """A job with a finished dataset, and the right to change it."""

    spec: JobSpec
    layout: Layout
    dataset: DatasetFile
    plan: Plan
    fence: Fence

    def revise(
        self,
        source: Source,
        items: Sequence[Item],
        changes: Changes,
        why: str,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a revision with the rows that a source lists now, and their changes. `about` has
        the facts of the listing; None asks the source, which has just listed its rows."""
        gone = {*changes.removed, *changes.changed}
        listed = {item.row_id: item for item in items}
        touched, added = list[str](), list[NewShard]()
        for shard in self.plan.shards:
            same = [item.row_id for item in shard.items if item.row_id not in gone]
            if len(same) == len(shard.items):
                continue
            touched.append(shard.shard_id)
            if same:
                rows = tuple(listed[row_id] for row_id in same)
                added.append(NewShard(rows, tuple((shard.shard_id, row_id) for row_id in same)))
        wanted = {*changes.added, *changes.changed}
        fresh = [item for item in items if item.row_id in wanted]
        known = self._relabelled(listed, changes.changed) | self._moved(source, fresh)
        for rows in self._cut(item for item in fresh if item.row_id in known):
            added.append(NewShard(rows, tuple(known[item.row_id] for item in rows)))
        computed = [item for item in fresh if item.row_id not in known]
        # Computed rows with the same bytes as another computed row.
        computes_once = computes_equal_once(self.spec)
        equal = equal_rows(source, lambda: computed) if computes_once else {}
        for is_copy in (False, True):
            for rows in self._cut(item for item in computed if (item.row_id in equal) is is_copy):
                added.append(NewShard(rows))
        begin_revision(
            self.layout,
            self.dataset,
            self.plan,
            why=why,
            dropped=touched,
            added=added,
            about=_facts_of_listing(source, items) if about is None else about,
            equal=equal,
            fence=self.fence,
        )

    def _cut(self, items: Iterator[Item]) -> Iterator[tuple[Item, ...]]:
        output = self.spec.output
        return (tuple(rows) for rows in cut(items, output.shard_seconds, output.shard_rows))

    def _relabelled(self, listed: Mapping[str, Item], changed: Collection[str]) -> dict[str, Place]:
        """Return good rows of which only carried-through columns have changed."""
        if not changed:
            return {}
        snapshot = read_snapshot(self.layout, require_current(self.layout))
        good = good_plan_rows(self.layout, snapshot) & {*changed}
        return {
            item.row_id: (shard.shard_id, item.row_id)
            for shard in self.plan.shards
            for item in shard.items
            if item.row_id in good
            and not other_features(item, listed[item.row_id], self.spec.listener_columns)
        }

    def _moved(self, source: Source, fresh: Sequence[Item]) -> dict[str, Place]:
        """Return new rows with the bytes and span of a committed row; reads files of equal size.
        Rows of pairs, and of listeners from a column, are computed: the features of equal audio may
        differ."""
        if reference_column(self.spec.source) is not None or self.spec.listener_columns:
            return {}
        sizes = {item.size for item in fresh if item.size is not None}
        parts = {}
        if self.spec.audio.spans is not None or self.spec.audio.variants is not None:
            parts = {item.row_id: part for item in self.plan.items() if (part := _part(item))}
        there = committed_bytes(self.layout, sizes, parts)
        alike = {key[:-1] for key in there}
        suspects = [item for item in fresh if _stretch(item) in alike]
        found = {}
        for item, stream in fetch(source, suspects) if suspects else ():
            if isinstance(stream, RowError):
                continue  # the run quarantines it
            with stream:
                key = (*_stretch(item), sha256_of(stream))
            if key in there:
                found[item.row_id] = there[key]
        return found


def _facts_of_listing(source: Source, items: Sequence[Item]) -> dict[str, Any]:
    columns = source.columns()
    return {
        "skipped": dict(source.skipped()),
        "extra_types": known_types(items, columns),
        "extra_labels": {name: list(names) for name, names in columns.labels.items()},
        "dropped": dict(columns.dropped),
    }


def _stretch(item: Item) -> tuple[Any, ...]:
    """Return the size of a row's file and its span. With the bytes they decide the features."""
    return (item.size, item.start_s, item.end_s, _part(item))


def _part(item: Item) -> tuple[Any, ...] | None:
    """Return what else decides the features: the recording of a span, or the variant."""
    return item.part_of or item.variant


def committed_bytes(
    layout: Layout, sizes: Collection[int], parts: Mapping[str, tuple[Any, ...]]
) -> dict[tuple[Any, ...], Place]:
    """Map (bytes, start, end, part, sha256) to the good row with such a file. `parts` maps row ids
    to `_part`. The models hear the audio before a span, and a variant is other audio."""
    if not sizes:
        return {}
    columns = ["plan_row_id", "nbytes", *SPAN, "bytes_sha256"]

    def alike(record: CommitRecord) -> list[dict[str, Any]]:
        rows = read_table(layout, str(record.path("rows")), columns).to_pylist()
        return [row for row in rows if row["nbytes"] in sizes and row["bytes_sha256"]]

    found: dict[tuple[Any, ...], Place] = {}
    for shard, rows in commits_as(layout, alike).items():
        for row in rows:
            row_id, span = row["plan_row_id"], [row[name] for name in SPAN]
            key = (row["nbytes"], *span, parts.get(row_id), row["bytes_sha256"])
            found.setdefault(key, (shard, row_id))
    return found
