"""The one path type, and the on-disk layout (version 1) as a grammar.

Everything that touches the output goes through `Layout`: an fsspec filesystem and a root that are
never turned back into a string and parsed again. Paths handed to it are relative and use `/`::

    root       = dataset.json driver.json? plan data* rows* quarantine* commits* index* cards?
    plan       = plan/<plan-id>.parquet                  immutable
    data       = data/<shard>-<attempt>.zarr/...         Zarr v3 store, one group a stream
               | data/<shard>-<attempt>.parquet          one row a clip
    rows       = rows/<shard>-<attempt>.parquet          scalars and provenance of every good row
    quarantine = quarantine/<shard>-<attempt>.parquet    only where a shard has bad rows
    commits    = commits/<shard>.json                    put-if-absent, names all of the above
    index      = index/<snapshot>.parquet                snapshot = start of its own sha256
    cards      = README.md croissant.json
    shard      = five or more digits       attempt = eight hex digits

`rows/` stands beside `data/`, not in it, so that `data/*.parquet` is exactly the feature files.
Names that start with a dot are unfinished work: no listing shows them and no reader trusts them.
A file that no commit names is garbage of a crashed attempt. Nothing is edited or renamed later.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import OutputError
from pipeline.putonce import create_local, create_remote, sync_folder, write_local

LAYOUT_VERSION = 1

DATASET_FILE = "dataset.json"
DRIVER_FILE = "driver.json"
README_FILE = "README.md"
CROISSANT_FILE = "croissant.json"
SCRATCH_FOLDER = ".scratch"
MKDIR_TRIES = 100

DATA_SUFFIXES = {"zarr": ".zarr", "parquet": ".parquet"}

Names = list[str]

_SHARD = re.compile(r"[0-9]{5,}")
_ATTEMPT = re.compile(r"[0-9a-f]{8}")
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")


def _stem(shard_id: str, attempt: str) -> str:
    if not _SHARD.fullmatch(shard_id):
        raise ValueError(f"a shard id is five or more digits, got {shard_id!r}")
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"an attempt is eight lower-case hex digits, got {attempt!r}")
    return f"{shard_id}-{attempt}"


def _named(kind: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a {kind} id is letters, digits, _ and -, got {name!r}")
    return name


def is_shard_id(name: str) -> bool:
    """Whether a name has the form of a shard id."""
    return _SHARD.fullmatch(name) is not None


def data_path(shard_id: str, attempt: str, fmt: str) -> str:
    """Path of one shard's feature file (Parquet) or store (Zarr)."""
    if fmt not in DATA_SUFFIXES:
        raise ValueError(f"format is one of {sorted(DATA_SUFFIXES)}, got {fmt!r}")
    return f"data/{_stem(shard_id, attempt)}{DATA_SUFFIXES[fmt]}"


def rows_path(shard_id: str, attempt: str) -> str:
    """Path of one shard's table of row scalars and row provenance."""
    return f"rows/{_stem(shard_id, attempt)}.parquet"


def quarantine_path(shard_id: str, attempt: str) -> str:
    """Path of one shard's table of bad rows."""
    return f"quarantine/{_stem(shard_id, attempt)}.parquet"


def commit_path(shard_id: str) -> str:
    """Path of one shard's commit record."""
    _stem(shard_id, "00000000")
    return f"commits/{shard_id}.json"


def plan_path(plan_id: str) -> str:
    """Path of a stored plan."""
    return f"plan/{_named('plan', plan_id)}.parquet"


def index_path(snapshot: str) -> str:
    """Path of one index snapshot."""
    return f"index/{_named('snapshot', snapshot)}.parquet"


def new_attempt() -> str:
    """A fresh attempt id, unique per try of a shard."""
    return secrets.token_hex(4)


def _checked(rel: str) -> str:
    parts = rel.split("/")
    if not rel or any(part in ("", ".", "..") for part in parts) or "\\" in rel:
        raise ValueError(f"expected a relative path like 'commits/00000.json', got {rel!r}")
    return rel


@dataclass(frozen=True, repr=False)
class Layout:
    """A filesystem and a root: the output of one job, or a dataset somebody reads.

    Args:
        fs: fsspec filesystem, credentials inside it.
        root: Path within it, as that filesystem spells it (no protocol).

    Invariants: `write_bytes` and `put_if_absent` show a reader the whole content or nothing, and of
    any number of racing `put_if_absent` calls for one path at most one returns True. The text form
    holds no storage option.
    """

    fs: Any
    root: str

    @classmethod
    def open(
        cls, uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> Layout:
        """A layout at any fsspec URI or local path. Touches nothing yet.

        Raises:
            OutputError: The URI names no filesystem that is installed here.
        """
        uri = os.fspath(uri)
        options = dict(storage_options or {})
        if "://" in uri and not uri.startswith(("file://", "local://", "memory://")):
            # Another process commits while we look: a cached listing would hide it.
            options.setdefault("use_listings_cache", False)
        try:
            fs, root = fsspec.core.url_to_fs(uri, **options)
        except (ValueError, ImportError, TypeError) as err:
            raise OutputError(
                f"expected a local path or an fsspec URI, got {uri!r}: {err}; "
                "check the scheme, storage_options and that its package is installed"
            ) from err
        return cls(fs, str(root).rstrip("/"))

    def __repr__(self) -> str:
        return f"Layout({self.url()!r})"

    @property
    def is_local(self) -> bool:
        """True where plain os calls reach the same files."""
        return isinstance(self.fs, LocalFileSystem)

    def url(self, rel: str = "") -> str:
        """Full address of a path, for messages and cards; never holds credentials."""
        path = self.path(rel) if rel else (self.root or "/")
        return path if self.is_local else str(self.fs.unstrip_protocol(path))

    def path(self, rel: str) -> str:
        """Full path of `rel` in the terms of `fs`."""
        return f"{self.root}/{_checked(rel)}"

    def exists(self, rel: str) -> bool:
        """Whether a file (or, locally, a folder) is there now."""
        return bool(self.fs.exists(self.path(rel)))

    def size(self, rel: str) -> int:
        """Bytes of one file; FileNotFoundError where it is missing."""
        return int(self.fs.size(self.path(rel)))

    def open_file(self, rel: str) -> BinaryIO:
        """A readable, seekable binary file."""
        return self.fs.open(self.path(rel), "rb")

    def read_bytes(self, rel: str) -> bytes:
        """The whole content of one file."""
        return bytes(self.fs.cat_file(self.path(rel)))

    def write_bytes(self, rel: str, data: bytes) -> None:
        """Write or replace one small file: temporary file and rename locally, one PUT elsewhere."""
        if self.is_local:
            write_local(self.path(rel), data)
        else:
            self.fs.pipe_file(self.path(rel), data)

    def put_if_absent(self, rel: str, data: bytes) -> bool:
        """Create one small file; False, and nothing changed, where it already exists.

        Raises:
            OutputError: This store has no atomic create, or keeps answering with a conflict.
            OSError: The write failed for another reason; whether it landed is then unknown.
        """
        path = self.path(rel)
        return create_local(path, data) if self.is_local else create_remote(self.fs, path, data)

    def list(self, rel: str) -> Names:
        """Every finished file under a folder, sorted; empty where the folder is missing."""
        return sorted(self.sizes(rel))

    def sizes(self, rel: str) -> dict[str, int]:
        """Every finished file under a folder (or the file itself) with its bytes."""
        found = self.fs.find(self.path(rel), withdirs=False, detail=True)
        start = len(self.root) + 1
        sizes = {str(info["name"])[start:]: int(info["size"] or 0) for info in found.values()}
        return {
            name: size
            for name, size in sizes.items()
            if not any(part.startswith(".") for part in name.split("/"))
        }

    def delete(self, rel: str) -> None:
        """Remove a file or a folder; fine where it is already gone."""
        try:
            self.fs.rm(self.path(rel), recursive=True)
        except FileNotFoundError:
            return

    def upload_file(self, local: str | Path, rel: str) -> None:
        """Publish one local file. It may be moved: do not use it afterwards."""
        if self.is_local:
            _move_in(Path(local), Path(self.path(rel)))
        else:
            self.fs.put_file(str(local), self.path(rel))

    def upload_dir(self, local: str | Path, rel: str) -> None:
        """Publish a local folder with everything in it. It may be moved."""
        if self.is_local:
            _move_in(Path(local), Path(self.path(rel)))
            return
        files = sorted(path for path in Path(local).rglob("*") if path.is_file())
        names = [path.relative_to(local).as_posix() for path in files]
        self.fs.put([str(path) for path in files], [self.path(f"{rel}/{name}") for name in names])

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A private local folder, removed at exit, on the output's own disk where there is one.

        Being on the same disk makes publishing a rename, and makes a full disk show up while
        encoding, before anything is visible.
        """
        parent = Path(self.root) / SCRATCH_FOLDER if self.is_local else None
        if parent is not None:
            folder = _new_folder(parent, name)
        else:
            folder = Path(tempfile.mkdtemp(prefix=f"earmill-{name}-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if parent is not None:
                with suppress(OSError):  # not empty: somebody else works there
                    parent.rmdir()

    def clear_scratch(self) -> None:
        """Remove what killed attempts left; call only while holding the driver lock."""
        if self.is_local:
            shutil.rmtree(Path(self.root) / SCRATCH_FOLDER, ignore_errors=True)

    def check_writable(self) -> None:
        """Prove, before any work, that this output can be written and that commits are safe there.

        Raises:
            OutputError: Not writable, or the store overwrites where it must refuse.
        """
        probe = f".probe-{secrets.token_hex(4)}"
        try:
            first = self.put_if_absent(probe, b"first")
            second = self.put_if_absent(probe, b"second")
            self.delete(probe)
        except OutputError:
            raise
        except Exception as err:  # stores raise their own roots (botocore is no OSError)
            raise OutputError(
                f"cannot write to {self.url()}: {type(err).__name__}: {err}; "
                "check that the place exists, its permissions and the credentials"
            ) from err
        if not first or second:
            raise OutputError(
                f"{self.url()} overwrites a file although told to create it only if absent; "
                "commits would not be exactly once there: use a store that honours If-None-Match"
            )


def _new_folder(parent: Path, name: str) -> Path:
    """A new folder below `parent`, which another worker may remove at any time while empty."""
    folder = parent / f"{name}-{secrets.token_hex(4)}"
    for _ in range(MKDIR_TRIES):
        # pathlib reports a parent that vanishes under its hands as missing or as existing.
        with suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise OutputError(f"{parent} cannot be made: another process keeps removing it")


def _move_in(source: Path, target: Path) -> None:
    """Publish a local file or folder at `target` in one visible step, durable first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sync_tree(source)
    try:
        os.rename(source, target)
    except OSError as err:
        if err.errno != errno.EXDEV:
            raise
        _copy_in(source, target)
    sync_folder(str(target.parent))


def _copy_in(source: Path, target: Path) -> None:
    """The same across two disks: copy beside the target under a hidden name, then rename."""
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if source.is_dir():
            shutil.copytree(source, hidden)
        else:
            shutil.copyfile(source, hidden)
        _sync_tree(hidden)
        os.rename(hidden, target)
    except OSError:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.unlink(missing_ok=True)
        raise


def _sync_tree(path: Path) -> None:
    """Flush every file below `path`, and the folders that name them, to the disk."""
    for entry in [path, *(path.rglob("*") if path.is_dir() else ())]:
        sync_folder(str(entry))
