"""Bring a finished dataset to the Hugging Face hub: one commit that holds its current snapshot.

Large files are uploaded first, in groups, and belong to no commit until the end. Committed files
are skipped; files of an interrupted push are found by their sha256. The new commit follows the
commit that the branch had in the beginning, or is not made. It removes files of older snapshots.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import CommitError, HubError, OutputError
from earmill.pipeline.common.gathering import within
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.common.text import Shown, bytes_text, few
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.description import DatasetFile, require_dataset
from earmill.pipeline.dataset.snapshot import (
    Current,
    LogEntry,
    described_file,
    read_current,
    read_snapshot,
    require_current,
)
from earmill.pipeline.dataset.verify import Report, verify
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.hub.repo import HubRepo
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CURRENT_FILE, DATASET_FILE, addition_path, commit_path
from earmill.pipeline.storage.scratch import own_folder

# Most files and bytes of a group, which is fetched, hashed and uploaded together.
GROUP_FILES, GROUP_BYTES = 256, 256 * 2**20
READ_THREADS = 8
# Documented for `create_commit`: more in one commit is refused, or times out.
MOST_FILES = 25_000
# Files of a repository that was made on the web page.
OF_THE_HUB = (".gitattributes", "README.md", "LICENSE", ".gitignore")
FOLDERS = tuple("data rows quarantine commits index snapshots plan revisions additions".split())


@dataclass(frozen=True)
class Contents:
    """The files of a finished dataset and their description."""

    dataset: DatasetFile
    entry: LogEntry  # Log entry of the current snapshot.
    files: Mapping[str, OutFile]  # Files by path, relative to the root.
    report: Report  # Result of `verify`.

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def contents_of(layout: Layout, *, hashes: bool = False) -> Contents:
    """Return the files of a finished dataset's current snapshot; OutputError if there is none, or
    `verify` refuses it. With `hashes` every file is read, else only sizes and small files."""
    report = verify(layout, hashes=hashes)
    if report.problems:
        raise OutputError(
            f"{layout.url()}: expected a finished dataset that `earmill verify` finds whole, "
            f"got: {few(report.problems, 1)}"
        )
    dataset, current = require_dataset(layout), require_current(layout)
    files = {file.path: file for file in _files(layout, current)}
    return Contents(dataset, current.entry, files, report)


def _files(layout: Layout, current: Current) -> Iterator[OutFile]:
    snapshot, records = read_snapshot(layout, current), commits(layout)
    yield from (current.snapshot, *current.cards)
    yield from (snapshot.index, snapshot.plan, snapshot.dataset)
    # Files whose hashes are in no record.
    yield described_file(layout, CURRENT_FILE)
    if snapshot.dataset.path != DATASET_FILE:
        yield described_file(layout, DATASET_FILE)
    plan_id = snapshot.plan.path.removeprefix("plan/").removesuffix(".parquet")
    for part in layout.list(f"plan/{plan_id}"):
        yield described_file(layout, part)
    change = require_dataset(layout).change
    if change is not None and change.carried is not None:
        yield change.carried
    sizes = layout.sizes("commits")
    for shard, ref in snapshot.commits.items():
        path = commit_path(shard, ref.generation)
        yield OutFile(path, sizes[path], ref.sha256)
        yield from records[shard].files
    for name, named in snapshot.additions.items():
        folder = addition_path(name)
        place = layout.below(folder)
        added = read_current(place)
        if added is None or f"{folder}/{added.snapshot.path}" != named.path:
            raise OutputError(
                f"{layout.url()}: the added features {name!r} are of another snapshot than the one "
                "that counts; run `earmill add-features` again"
            )
        for file in _files(place, added):
            yield replace(file, path=f"{folder}/{file.path}")


@dataclass(frozen=True)
class Progress:
    """The state of a push."""

    files_total: int
    bytes_total: int
    # Done: sent by this push, or there already.
    files: int = 0
    bytes: int = 0
    files_sent: int = 0
    bytes_sent: int = 0

    def after(self, done: Collection[OutFile], sent: Collection[OutFile] = ()) -> Progress:
        """Return the state after more files are done, of which some were sent."""
        return replace(
            self,
            files=self.files + len(done),
            bytes=self.bytes + sum(file.bytes for file in done),
            files_sent=self.files_sent + len(sent),
            bytes_sent=self.bytes_sent + sum(file.bytes for file in sent),
        )


@dataclass(frozen=True, repr=False)
class Pushed(Shown):
    """A dataset on the hub."""

    url: str  # Page of the dataset.
    commit: str  # Commit that holds it.
    is_new: bool  # This push made that commit.
    progress: Progress  # Files that were sent, and files that were there.
    removed: tuple[str, ...]  # Files of older snapshots that were removed.

    def shown(self) -> dict[str, str]:
        sent = self.progress
        return {
            "page": self.url,
            "commit": self.commit[:12] if self.is_new else f"{self.commit[:12]}, was there",
            "sent": f"{sent.files_sent:,} of {sent.files:,} files, {bytes_text(sent.bytes_sent)}",
            "removed": f"{len(self.removed):,} files of older snapshots",
        }


def push(
    layout: Layout,
    contents: Contents,
    repo: HubRepo,
    *,
    private: bool | None = None,
    message: str | None = None,
    replace_other: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Pushed:
    """Upload the missing files and commit them; `contents` are by `contents_of`.

    A repository that does not exist is made, with the account's default visibility if `private` is
    None. With `replace_other`, another dataset in it is replaced. After each group, `on_progress`
    is called.

    Raises:
        HubError: The hub refuses or does not answer, or the repository has changed meanwhile.
        CommitError: A file is not as its commit says: nothing was committed.
    """
    repo.create(private)
    parent = repo.head()
    there = repo.files(parent)
    if not replace_other:
        _refuse_another(repo, there, parent, contents.dataset)
    files = contents.files
    same = {path for path in files if path in there and _is_same(layout, files[path], there[path])}
    missing = [file for path, file in sorted(files.items()) if path not in same]
    # Files in folders of ours may belong to an older snapshot.
    ours = tuple(f"{folder}/" for folder in FOLDERS)
    removed = sorted(path for path in there if path not in files and path.startswith(ours))
    if len(missing) > MOST_FILES:
        raise HubError(
            f"{repo.repo_id}: expected at most {MOST_FILES:,} files in one commit, got "
            f"{len(missing):,}; merge shards with `earmill compact`, or write Parquet alone"
        )
    progress = Progress(len(files), contents.bytes).after([files[path] for path in same])
    on_progress(progress)
    if not missing and not removed:
        return Pushed(repo.url, parent, False, progress, ())
    # Content that the hub holds is not sent again.
    held = repo.uploaded(missing)
    additions: list[CommitOperationAdd] = []
    for group in within(missing, lambda file: (1, file.bytes), (GROUP_FILES, GROUP_BYTES)):
        additions += _upload(layout, repo, group)
        sent = {file.sha256: file for file in group if file.sha256 not in held}.values()
        progress = progress.after(group, sent)
        held.update(file.sha256 for file in sent)
        on_progress(progress)
    name, entry = contents.dataset.name, contents.entry
    commit = repo.commit(
        additions,
        removed,
        message=message or f"{name}: snapshot {entry.number} ({entry.why}), {entry.rows_ok} rows",
        parent=parent,
        proof=(CURRENT_FILE, git_hash(layout.read_bytes(CURRENT_FILE))),
    )
    return Pushed(repo.url, commit, True, progress, tuple(removed))


def _refuse_another(
    repo: HubRepo, there: Collection[str], parent: str, dataset: DatasetFile
) -> None:
    """Raise HubError if the repository holds something else."""
    others = sorted({path.split("/")[0] for path in there} - set(OF_THE_HUB))
    if DATASET_FILE in there:
        is_ours = f'"{dataset.spec_sha256}"'.encode() in repo.read(DATASET_FILE, parent)
        others = [] if is_ours else ["the features of another job"]
    if others:
        raise HubError(
            f"{repo.repo_id}: expected an empty repository or an earlier push of this dataset, "
            f"found {few(others, separator=', ')}; take another id, or --replace (the repository's "
            "history keeps what was there)"
        )


def _is_same(layout: Layout, file: OutFile, stored: RepoFile) -> bool:
    if stored.size != file.bytes:
        return False
    if stored.lfs is not None:
        return stored.lfs.sha256 == file.sha256
    return git_hash(layout.read_bytes(file.path)) == stored.blob_id


def _upload(layout: Layout, repo: HubRepo, group: Sequence[OutFile]) -> list[CommitOperationAdd]:
    """Upload a group; small text files are part of the commit and are kept in memory."""

    def local(file: OutFile) -> Path:
        """Return the path of a local copy of a file; CommitError if its content changed."""
        place = Path(layout.inside(file.path)) if layout.is_local else Path(folder) / file.path
        if not layout.is_local:
            place.parent.mkdir(parents=True, exist_ok=True)
            with layout.open_file(file.path) as source, place.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        with place.open("rb") as stream:
            got = sha256_of(stream)
        if got != file.sha256:
            raise CommitError(
                f"{file.path}: content changed (sha256 {got[:12]}, expected {file.sha256[:12]}); "
                "nothing was committed: see `earmill verify`, and repair it with --resume --repair"
            )
        return place

    with (
        tempfile.TemporaryDirectory(prefix="push-", dir=own_folder()) as folder,
        Threads(READ_THREADS) as pool,
    ):
        places = list(pool.map(local, group))
        additions = [
            CommitOperationAdd(file.path, str(place))
            for file, place in zip(group, places, strict=True)
        ]
        once = {file.sha256: one for file, one in zip(group, additions, strict=True)}
        repo.upload(list(once.values()))
        if len(once) < len(additions):  # the hub now has the content of equal files
            repo.upload(additions)
        for addition, place in zip(additions, places, strict=True):
            # The client replaces the content of an uploaded file by empty bytes.
            if addition.path_or_fileobj != b"":
                addition.path_or_fileobj = place.read_bytes()
    return additions
