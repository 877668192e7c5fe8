"""Snapshots of a dataset: the current index and the commits that it belongs to.

A snapshot is immutable and named by its content. `current.json` names the current snapshot and its
cards, and lists earlier snapshots with hashes. It is written last and replaced
whole, so either the earlier snapshot or the new one counts.

Snapshots are compared by row ids. A row is *changed* if both snapshots have it and its state
differs (good, or the reason of its quarantine), or what its models hear does: samples (their
sha256), sample rate, span, channel, reference recording, variant, or the audiogram of its listener.
Rows of a shard whose commit is in both are not read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import PurePosixPath
from typing import Any

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError, OutputError
from earmill.pipeline.common.text import Shown
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    Committed,
    parsed_json,
    read_commit,
    reading_pool,
)
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.formats.moments import StoredMoments, dataset_moments
from earmill.pipeline.formats.row_table import EXTRA_PREFIX
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import Strict, read_table, table_of
from earmill.pipeline.storage.layout import Layout

CONTENT_CHARS = 16
CARDS = (paths.README_FILE, paths.CROISSANT_FILE)  # Cards that every closed dataset has.
Which = int | str | date  # A snapshot, as users name it: see `find_snapshot`.
PREVIOUS, CURRENT = "previous", "current"
# Facts about a row that decide its features. A table has the last two if its job needs them.
AUDIO = (
    *("pcm_sha256", "rate_hz", "channels", "start_s", "end_s", "channel"),
    *("reference_pcm_sha256", "variant_settings"),
)
# States of rows in an index.
STATUS_OK, STATUS_BAD = "ok", "quarantined"
_MIN_NAME_CHARS = 4


@dataclass(frozen=True, slots=True)
class CommitRef(Strict):
    """The commit record that a snapshot was made of."""

    generation: int
    attempt: str
    sha256: str

    def is_lost_in(self, now: CommitRecord) -> bool:
        """Return True if the current record is this one damaged, or an older generation."""
        if now.generation < self.generation:
            return True
        same = (now.generation, now.attempt) == (self.generation, self.attempt)
        return same and now.sha256 != self.sha256


@dataclass(frozen=True)
class LogEntry(Strict):
    """The origin of a snapshot, and its rows.

    Args:
        number: 1, 2, ... in the order of closing; 0 if the release that wrote it did not count.
        created: Time of closing, ISO 8601, UTC.
        why: Kind of the run that made it.
        revision: Number of the description that it was closed with, 0 for dataset.json.
        added, changed, removed: Rows against the snapshot before; see `compare_snapshots`.
    """

    number: int = 0
    created: str = ""
    why: str = ""
    revision: int = 0
    rows_ok: int = 0
    rows_bad: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0


@dataclass(frozen=True)
class Snapshot(Strict):
    """Files that belong together."""

    index: OutFile
    plan: OutFile
    dataset: OutFile
    commits: Mapping[str, CommitRef]
    # Statistics of the streams that all commits have statistics of.
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    # Name of each set of features beside these rows, in `additions/<name>`, to its snapshot there;
    # the path is relative to this root.
    additions: Mapping[str, OutFile] = field(default_factory=dict)
    # Names of sets beside earlier rows, until `add-features` has computed the rows of today.
    outdated: tuple[str, ...] = ()
    entry: LogEntry = LogEntry()  # Closing an unchanged dataset again keeps the earlier entry.
    layout_version: int = paths.LAYOUT_VERSION

    def to_json(self) -> str:
        data = asdict(self)
        if not self.outdated:  # as releases wrote it that did not know the field
            del data["outdated"]
        return _canonical(data)

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        return parsed_json(cls, text, "a snapshot")

    def is_of(self, records: Mapping[str, Committed | CommitRecord]) -> bool:
        made_of = {shard: (ref.generation, ref.attempt) for shard, ref in self.commits.items()}
        return made_of == {shard: (r.generation, r.attempt) for shard, r in records.items()}


@dataclass(frozen=True)
class EarlierSnapshot(Strict):
    snapshot: OutFile
    entry: LogEntry


@dataclass(frozen=True)
class Current(Strict):
    """The content of current.json."""

    snapshot: OutFile
    cards: tuple[OutFile, ...]  # Of the current snapshot; older datasets lack provenance.jsonld.
    entry: LogEntry = LogEntry()
    history: tuple[EarlierSnapshot, ...] = ()  # The oldest first.
    layout_version: int = paths.LAYOUT_VERSION
    sha256: str = field(default="", compare=False)  # Of the other fields, if read from a file.

    def to_json(self) -> str:
        """Return the JSON text with its own hash; `from_json` gives an equal object."""
        data = asdict(self)
        del data["sha256"]
        if self.entry == LogEntry():  # of a release that kept no log
            del data["entry"], data["history"]
        return _canonical({**data, "sha256": _sha256(_canonical(data).encode())})

    @property
    def all_snapshots(self) -> tuple[EarlierSnapshot, ...]:
        """Return all snapshots that can be read, the oldest first, the current one last."""
        return (*self.history, EarlierSnapshot(self.snapshot, self.entry))

    @classmethod
    def from_json(cls, text: str | bytes) -> Current:
        """Parse current.json; CommitError if any byte is damaged."""
        current = parsed_json(cls, text, paths.CURRENT_FILE)
        if current.to_json() != (text if isinstance(text, str) else text.decode()):
            raise CommitError(f"not {paths.CURRENT_FILE} as it was written: its content changed")
        return current


def _canonical(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require_current(layout: Layout) -> Current:
    """Return `current.json`; OutputError if the dataset was never closed."""
    current = read_current(layout)
    if current is None:
        raise OutputError(
            f"{layout.url()}: expected a closed dataset, found no snapshot; run the job to its end"
        )
    return current


def moments_of(
    records: Mapping[str, CommitRecord], streams: Sequence[Mapping[str, Any]]
) -> dict[str, StoredMoments]:
    return dataset_moments([record.moments for _, record in sorted(records.items())], streams)


def described(path: str, content: bytes) -> OutFile:
    return OutFile(path, len(content), _sha256(content))


def described_file(layout: Layout, path: str) -> OutFile:
    return described(path, layout.read_bytes(path))


def name_of(content: bytes) -> str:
    """Return the name of an immutable file: the start of its sha256."""
    return _sha256(content)[:CONTENT_CHARS]


def put_named(layout: Layout, path_of: Callable[[str], str], content: bytes) -> OutFile:
    """Write a file that is named by its content; one that was damaged since is written again."""
    file = described(path_of(name_of(content)), content)
    if not layout.create_own(file.path, content):
        layout.write_bytes(file.path, content)
    return file


def read_checked(layout: Layout, file: OutFile) -> bytes:
    """Return a file that something names with its hash; CommitError if it is missing or another."""
    try:
        content = layout.read_bytes(file.path)
    except (OSError, ValueError) as err:  # a ValueError: the path leads out of the dataset
        raise CommitError(
            f"{layout.url()}, {file.path}: {type(err).__name__}: {err}; {CLOSE_AGAIN}"
        ) from err
    if _sha256(content) != file.sha256:
        raise CommitError(
            f"{layout.url(file.path)}: content changed (expected sha256 {file.sha256[:12]}, got "
            f"{_sha256(content)[:12]}): it is damaged; {CLOSE_AGAIN}"
        )
    return content


def read_current(layout: Layout) -> Current | None:
    """Return `current.json`, or None if there is none; CommitError if it is damaged."""
    try:
        return Current.from_json(layout.read_bytes(paths.CURRENT_FILE))
    except FileNotFoundError:
        return None
    except CommitError as err:
        raise CommitError(f"{layout.url(paths.CURRENT_FILE)}: {err}; {CLOSE_AGAIN}") from err


def read_snapshot(layout: Layout, named: Current | EarlierSnapshot) -> Snapshot:
    return Snapshot.from_json(read_checked(layout, named.snapshot))


def outdated_text(names: Sequence[str], url: str) -> str:
    """Return what a user must know about features that do not belong to the rows any more."""
    return (
        f"features added to earlier rows are left out: {', '.join(names)}; run "
        f"`earmill add-features {url} JOB.yaml` again with the job of each"
    )


def current_index(layout: Layout) -> str | None:
    """Return the path of the current index, or None; in layout version 1, of the only index."""
    current = read_current(layout)
    if current is not None:
        return read_snapshot(layout, current).index.path
    found = layout.list("index")
    return found[0] if len(found) == 1 else None


def good_plan_rows(layout: Layout, snapshot: Snapshot) -> set[str]:
    table = table_of(read_checked(layout, snapshot.index), ["plan_row_id", "status"])
    columns = (table.column(name).to_pylist() for name in ("plan_row_id", "status"))
    return {row_id for row_id, status in zip(*columns, strict=True) if status == STATUS_OK}


def is_closed(layout: Layout, records: Mapping[str, Committed | CommitRecord]) -> bool:
    """Return True if index and cards of exactly these commits exist, in the newest revision."""
    try:
        current = read_current(layout)
        if current is None or not {card.path for card in current.cards} >= set(CARDS):
            return False
        snapshot = read_snapshot(layout, current)
        for file in (*current.cards, snapshot.plan, snapshot.dataset, snapshot.index):
            read_checked(layout, file)
        dataset = read_dataset(layout)
        is_newest = dataset is not None and dataset.path == snapshot.dataset.path
        return is_newest and snapshot.is_of(records)
    except CommitError:
        return False


@dataclass(frozen=True, repr=False)
class SnapshotDiff(Shown):
    """Rows by which two snapshots differ, good and quarantined ones.

    Args:
        before, after: The log entries of the two.
        added, removed, changed: Row ids, sorted.
        states: Row id to its state before and after: `ok`, the reason of its quarantine, or None.
    """

    before: LogEntry
    after: LogEntry
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    states: Mapping[str, tuple[str | None, str | None]]

    def __bool__(self) -> bool:
        return bool(self.states)

    def shown(self) -> dict[str, str]:
        return {
            "snapshots": f"{self.before.number} to {self.after.number}",
            "added": f"{len(self.added):,}",
            "removed": f"{len(self.removed):,}",
            "changed": f"{len(self.changed):,}",
        }


def log(layout: Layout) -> list[LogEntry]:
    return [past.entry for past in require_current(layout).all_snapshots]


def find_snapshot(layout: Layout, which: Which) -> EarlierSnapshot:
    """Return one snapshot of a dataset; OutputError if there is none.

    Args:
        which: Its number in the log; "current" or "previous"; the start of its name (at least four
            characters); or a date or time, also as ISO 8601 text: the last one closed by then. A
            date means its end; a time without zone is UTC.
    """
    known = require_current(layout).all_snapshots
    found = _chosen(known, which)
    if found is None:
        entries = known[0].entry, known[-1].entry
        first, last = (f"{entry.number} ({entry.created or 'no date'})" for entry in entries)
        raise OutputError(
            f"{layout.url()}: expected a snapshot, got {which!r}; there are {first} to {last}: see "
            "`earmill log`"
        )
    return found


def diff(layout: Layout, before: Which, after: Which = CURRENT) -> SnapshotDiff:
    found = (find_snapshot(layout, before), find_snapshot(layout, after))
    old, new = (replace(read_snapshot(layout, past), entry=past.entry) for past in found)
    return compare_snapshots(layout, old, new)


def known_snapshots(layout: Layout) -> tuple[EarlierSnapshot, ...]:
    """Return all snapshots that were current, the oldest first; if `current.json` is damaged or
    lost, all files of snapshots."""
    try:
        current = read_current(layout)
        if current is not None:
            return current.all_snapshots
    except CommitError:
        pass
    found = []
    for name in layout.list("snapshots"):
        content = layout.read_bytes(name)
        if name_of(content) == PurePosixPath(name).stem:
            file = described(name, content)
            found.append(EarlierSnapshot(file, Snapshot.from_json(content).entry))
    return tuple(sorted(found, key=lambda past: (past.entry.number, past.entry.created)))


def compare_snapshots(layout: Layout, old: Snapshot, new: Snapshot) -> SnapshotDiff:
    before, after = _states(layout, old), _states(layout, new)
    added, removed = after.keys() - before.keys(), before.keys() - after.keys()
    changed, suspects = set[str](), set[str]()
    for row_id in before.keys() & after.keys():
        (state, shard), (state_now, shard_now) = before[row_id], after[row_id]
        if state != state_now:
            changed.add(row_id)
        elif state == STATUS_OK and (
            shard != shard_now or old.commits.get(shard) != new.commits.get(shard)
        ):
            suspects.add(row_id)  # its audio may differ
    facts = (*AUDIO, *(_listener_columns(layout, (old, new)) if suspects else ()))
    audio = facts_of(layout, old, {before[row_id][1] for row_id in suspects}, facts)
    audio_now = facts_of(layout, new, {after[row_id][1] for row_id in suspects}, facts)
    changed |= {row_id for row_id in suspects if audio.get(row_id) != audio_now.get(row_id)}
    states = {
        row_id: (before.get(row_id, (None,))[0], after.get(row_id, (None,))[0])
        for row_id in sorted(added | removed | changed)
    }
    return SnapshotDiff(
        old.entry,
        new.entry,
        added=tuple(sorted(added)),
        removed=tuple(sorted(removed)),
        changed=tuple(sorted(changed)),
        states=states,
    )


def _states(layout: Layout, snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    table = table_of(read_checked(layout, snapshot.index))
    names = ("row_id", "status", "error_class", "shard")
    columns = (table.column(name).to_pylist() for name in names)
    return {
        row_id: (STATUS_OK if status == STATUS_OK else str(reason), shard)
        for row_id, status, reason, shard in zip(*columns, strict=True)
    }


def _listener_columns(layout: Layout, snapshots: Iterable[Snapshot]) -> list[str]:
    """Return the columns of row tables with audiograms that decide features of these rows, or
    features added to them."""
    added = sorted({name for snapshot in snapshots for name in snapshot.additions})
    places = [layout, *(layout.below(paths.addition_path(name)) for name in added)]
    entries = [
        entry
        for dataset in map(read_dataset, places)
        if dataset is not None  # an addition that is lost is a problem for `verify`
        for entry in dataset.spec["extract"]
    ]
    columns = [(entry.get("listener") or {}).get("column") for entry in entries]
    return sorted({f"{EXTRA_PREFIX}{column}" for column in columns if column is not None})


def facts_of(
    layout: Layout, snapshot: Snapshot, shards: Iterable[str], names: Sequence[str]
) -> dict[str, tuple[object, ...]]:
    """Return facts about every good row of some shards by row id; None for a fact that its table
    does not have."""
    refs = {shard: snapshot.commits[shard] for shard in sorted(shards)}

    def of_shard(named: tuple[str, CommitRef]) -> Iterator[tuple[str, tuple[object, ...]]]:
        shard, ref = named
        record = read_commit(layout, shard, ref.generation)
        if record is None or record.attempt != ref.attempt:
            raise CommitError(
                f"{layout.url()}: the commit of shard {shard}, which a snapshot names, is missing; "
                "run `earmill verify`"
            )
        table = read_table(layout, str(record.path("rows")), ["row_id", *names])
        cells = table.to_pydict()
        unknown = [None] * table.num_rows
        rows = zip(*(cells.get(name, unknown) for name in names), strict=True)
        return zip(cells["row_id"], rows, strict=True)

    with reading_pool(layout, len(refs)) as pool:
        return dict(pair for pairs in pool.map(of_shard, refs.items()) for pair in pairs)


def _chosen(known: tuple[EarlierSnapshot, ...], which: Which) -> EarlierSnapshot | None:
    if isinstance(which, bool):
        return None
    if isinstance(which, str) and re.fullmatch(r"[0-9]{1,9}", which):
        which = int(which)
    if isinstance(which, int):
        return next((past for past in known if past.entry.number == which), None)
    if which == CURRENT:
        return known[-1]
    if which == PREVIOUS:
        return known[-2] if len(known) > 1 else None
    until = _end_of(which)
    if until is not None:
        dated = [past for past in known if past.entry.created]
        closed = [p for p in dated if datetime.fromisoformat(p.entry.created) <= until]
        return closed[-1] if closed else None
    name = str(which)
    named = [p for p in known if PurePosixPath(p.snapshot.path).stem.startswith(name)]
    return named[0] if len(named) == 1 and len(name) >= _MIN_NAME_CHARS else None


def _end_of(which: str | date) -> datetime | None:
    """Return the last moment that a date or time means; None for another text."""
    if isinstance(which, str):
        try:
            which = date.fromisoformat(which) if len(which) <= 10 else datetime.fromisoformat(which)
        except ValueError:
            return None
    if not isinstance(which, datetime):
        which = datetime(which.year, which.month, which.day, 23, 59, 59, 999999)
    return which if which.tzinfo else which.replace(tzinfo=UTC)
