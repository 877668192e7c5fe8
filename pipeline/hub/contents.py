"""The files of a dataset's current snapshot, each with its size and sha256, and no others.

They are a dataset of their own: a copy of them is read, verified and gone on with as the original.
Older snapshots, replaced commits, leftovers of crashed attempts and the files of drivers stay
where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.dataset.commit_record import CommitRecord, commits
from earmill.pipeline.dataset.description import DatasetFile, read_dataset
from earmill.pipeline.dataset.snapshot import (
    Current,
    LogEntry,
    Snapshot,
    described,
    read_current,
    read_snapshot,
)
from earmill.pipeline.dataset.verify import Report, verify
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import (
    CURRENT_FILE,
    DATASET_FILE,
    addition_path,
    commit_path,
)


@dataclass(frozen=True)
class Contents:
    """The files of a finished dataset and their description.

    Args:
        dataset: Description of the dataset.
        entry: Log entry of the current snapshot.
        files: Path, relative to the root, to file.
        report: Result of `verify`.
    """

    dataset: DatasetFile
    entry: LogEntry
    files: Mapping[str, OutFile]
    report: Report

    @property
    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.bytes for file in self.files.values())


def contents_of(layout: Layout, *, hashes: bool = False) -> Contents:
    """Return the contents of a finished dataset.

    Args:
        layout: The output.
        hashes: Read every file and compare its sha256; else sizes and small files only.
    Raises:
        OutputError: No dataset, one that is not finished, or one that `verify` refuses.
    """
    report = _whole(layout, hashes)
    dataset, current = read_dataset(layout), read_current(layout)
    if dataset is None or current is None:
        raise OutputError(
            f"{layout.url()}: expected a finished dataset, got one that was not closed; run "
            "`earmill extract` with --resume, which closes it"
        )
    for name in read_snapshot(layout, current).additions:
        _whole(_beside(layout, name), hashes)
    files = {file.path: file for file in _files(layout, current)}
    return Contents(dataset, current.entry, files, report)


def _whole(layout: Layout, hashes: bool) -> Report:
    """Return the report of `verify`; OutputError if it names a problem."""
    report = verify(layout, hashes=hashes)
    if report.problems:
        more = f"; and {len(report.problems) - 1} more" if len(report.problems) > 1 else ""
        raise OutputError(
            f"{layout.url()}: expected a finished dataset that `earmill verify` finds whole, got: "
            f"{report.problems[0]}{more}"
        )
    return report


def _beside(layout: Layout, name: str) -> Layout:
    """Where a set of features beside the rows is."""
    return layout.below(addition_path(name))


def _files(layout: Layout, current: Current) -> Iterator[OutFile]:
    snapshot = read_snapshot(layout, current)
    records = commits(layout)
    yield from (current.snapshot, *current.cards)
    yield from (snapshot.index, snapshot.plan, snapshot.dataset)
    yield _small(layout, CURRENT_FILE)
    if snapshot.dataset.path != DATASET_FILE:
        yield _small(layout, DATASET_FILE)
    plan_id = snapshot.plan.path.removeprefix("plan/").removesuffix(".parquet")
    yield from (_small(layout, part) for part in layout.list(f"plan/{plan_id}"))
    yield from _carried(layout)
    yield from _committed(layout, snapshot, records)
    for name, named in snapshot.additions.items():
        yield from _addition(layout, name, named)


def _committed(
    layout: Layout, snapshot: Snapshot, records: Mapping[str, CommitRecord]
) -> Iterator[OutFile]:
    """Commit records, and the files that they name."""
    sizes = layout.sizes("commits")
    for shard, ref in snapshot.commits.items():
        path = commit_path(shard, ref.generation)
        yield OutFile(path, sizes[path], ref.sha256)
        yield from records[shard].files


def _carried(layout: Layout) -> Iterator[OutFile]:
    """The table of copied rows that a revision names."""
    dataset = read_dataset(layout)
    if dataset is not None and dataset.change is not None and dataset.change.carried is not None:
        yield dataset.change.carried


def _addition(layout: Layout, name: str, named: OutFile) -> Iterator[OutFile]:
    """The files of a set of features beside the rows."""
    folder = addition_path(name)
    place = _beside(layout, name)
    current = read_current(place)
    if current is None or f"{folder}/{current.snapshot.path}" != named.path:
        raise OutputError(
            f"{layout.url()}: the added features {name!r} are of another snapshot than the one "
            "that counts; run `earmill add-features` again"
        )
    for file in _files(place, current):
        yield replace(file, path=f"{folder}/{file.path}")


def _small(layout: Layout, path: str) -> OutFile:
    """A file that nothing names with its hash."""
    return described(path, layout.read_bytes(path))
