"""What keeps an output in order, as Python calls, and what shows and publishes it: gc, push, ...

Each does what the command of its name does and raises what the command would print.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earmill.pipeline.dataset.garbage import Collected
    from earmill.pipeline.dataset.history import SnapshotDiff, Which
    from earmill.pipeline.dataset.snapshot import LogEntry
    from earmill.pipeline.hub.push import Pushed
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.storage.layout import Layout

Uri = str | os.PathLike[str]


def log(uri: Uri, *, storage_options: Mapping[str, Any] | None = None) -> list[LogEntry]:
    """The snapshots of a dataset, as `earmill log` lists them: the oldest first, the last counts.

    Args:
        uri: Output of a job. storage_options: Of the place.
    Raises:
        OutputError: Nothing was closed there so far.
    """
    from earmill.pipeline.dataset.history import log as read_log

    with opened_layout(uri, storage_options) as layout:
        return read_log(layout)


def diff(
    uri: Uri,
    before: Which = "previous",
    after: Which = "current",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> SnapshotDiff:
    """Rows by which two snapshots of a dataset differ, as `earmill diff` shows them.

    Args:
        uri: Output of a job. storage_options: Of the place.
        before, after: Each a number of `log`, "previous", "current", a date or a name.
    Raises:
        OutputError: There is no such snapshot.
    Example:
        found = earmill.diff("features", 1, 2)
        print(found.added, found.changed, found.removed)
    """
    from earmill.pipeline.dataset.history import diff as compare

    with opened_layout(uri, storage_options) as layout:
        return compare(layout, before, after)


def compact(
    uri: Uri,
    *,
    shard_seconds: float | None = None,
    shard_rows: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LogEntry | None:
    """Merge small shards into larger ones, as `earmill compact` does; values stay bit for bit.

    Args:
        uri: Output of a job that has finished. storage_options: Of the place.
        shard_seconds, shard_rows: Audio and rows of a merged shard, at most; None takes what the
            job says.
    Returns:
        The log entry of the new snapshot; None where there was nothing to merge.
    Raises:
        OutputError: No dataset there, or one that is not finished. LockedError: A driver is at it.
    """
    from earmill.jobs.console.progress import logged_text
    from earmill.pipeline.dataset.compact import compact as merge

    with opened_layout(uri, storage_options) as layout:
        return merge(
            layout, shard_seconds=shard_seconds, shard_rows=shard_rows, on_begin=logged_text()
        )


def gc(
    uri: Uri,
    *,
    keep: int | None = None,
    older_than: timedelta | None = None,
    grace: timedelta = timedelta(hours=24),
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Collected:
    """Remove what no snapshot names, as `earmill gc` does; the one that counts always stays.

    Args:
        uri: Output of a job. storage_options: Of the place.
        keep: Keep this many snapshots, the newest. older_than: Remove those closed so long ago.
            With both a snapshot goes that neither keeps; with none all stay.
        grace: Files younger than this stay, whatever names them.
        dry_run: Only say what would go.
    Returns:
        Snapshots, files and bytes that went.
    Raises:
        OutputError: No closed dataset there. LockedError: A driver is at it.
    """
    from earmill.pipeline.dataset.garbage import collect_garbage

    with opened_layout(uri, storage_options) as layout:
        return collect_garbage(
            layout,
            keep=keep,
            older_than=older_than,
            grace_s=grace.total_seconds(),
            dry_run=dry_run,
        )


def push(
    uri: Uri,
    hub_id: str,
    *,
    private: bool | None = None,
    revision: str = "main",
    message: str | None = None,
    verify: bool = False,
    replace: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pushed:
    """Upload a finished dataset to the Hugging Face hub in one commit, as `earmill push` does.

    Args:
        uri: Output of a job. storage_options: Of the place.
        hub_id: `user/name`; made if it is new, and then `private` or as the account's default says.
        revision: The branch. message: Of the commit.
        verify: First compare the sha256 of every file, not sizes alone.
        replace: Also where the repository holds another dataset.
    Raises:
        OutputError: Not finished, or not whole; no such id. HubError: The hub refuses or does not
            answer, or somebody else committed meanwhile. CommitError: A file has changed.
    """
    from earmill.pipeline.hub.contents import contents_of
    from earmill.pipeline.hub.push import push as upload
    from earmill.pipeline.hub.repo import HubRepo

    with opened_layout(uri, storage_options) as layout:
        contents = contents_of(layout, hashes=verify)
    repo = HubRepo(hub_id, revision)
    return upload(layout, contents, repo, private=private, message=message, replace_other=replace)


def report(
    uri: Uri,
    out: Uri = "report.html",
    *,
    rows: int = 1000,
    examples: int = 4,
    row_ids: Sequence[str] = (),
    seconds: float = 10.0,
    audio: bool = True,
    job: JobSpec | Mapping[str, Any] | str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write one HTML page that shows a dataset, as `earmill report` does.

    Args:
        uri: Output of a job. storage_options: Of the place.
        out: File to write, on this machine.
        rows: Of the table, at most. examples: Rows that are looked at closely, 0 to 50.
        row_ids: Which; none are chosen by length. seconds: Of each, from its start, 0.1 to 120.
        audio: Embed their sound, if the source is there.
        job: The job's own spec, for credentials of the source.
        on_begin: Told what takes a while.
    Returns:
        The file.
    Raises:
        SourceError: No dataset there, nothing committed yet, or no row of a name.
        CommitError: A file of the dataset is damaged. OutputError: `out` cannot be written.
        ValueError: A number is out of its range. SpecError: `job` is no valid one.
    """
    from earmill.jobs.console.progress import logged_text
    from earmill.jobs.report.build import Options, write_report
    from earmill.pipeline.spec.job import JobSpec

    options = Options(rows, examples, row_ids, seconds, audio)
    return write_report(
        os.fspath(uri),
        Path(out),
        options=options,
        storage_options=storage_options or {},
        job=None if job is None else JobSpec.load(job),
        on_begin=logged_text(on_begin),
    )


@contextmanager
def opened_layout(uri: Uri, storage_options: Mapping[str, Any] | None) -> Iterator[Layout]:
    """A place, whose store's errors become ours."""
    from earmill.pipeline.storage.layout import Layout
    from earmill.pipeline.storage.store_errors import store_errors

    layout = Layout.open(os.fspath(uri), storage_options or {})
    with store_errors(layout.url()):
        yield layout
