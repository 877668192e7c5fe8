"""The output of one job, or a stored dataset: a storage backend and a root. Paths are relative, as
`earmill.pipeline.storage.paths` spells them. All access to an output goes through `Layout`."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from earmill.pipeline.common import errors
from earmill.pipeline.common.byte_streams import SeekableFile
from earmill.pipeline.common.extension_points import ExtensionPoint
from earmill.pipeline.common.text import named_line
from earmill.pipeline.storage.backend import Backend, Entry
from earmill.pipeline.storage.fsspec_store import FsspecBackend
from earmill.pipeline.storage.local_cache import Bytes, LocalCache
from earmill.pipeline.storage.local_store import LocalBackend, files_below
from earmill.pipeline.storage.object_store import AzureBackend, GoogleBackend, S3Backend
from earmill.pipeline.storage.retrying import store_call, store_errors

Names = list[str]
# The first that opens a URI serves it.
BACKENDS: tuple[type[Backend], ...] = (
    LocalBackend,
    S3Backend,
    GoogleBackend,
    AzureBackend,
    FsspecBackend,
)
# Backends of other distributions, by the scheme of their URIs.
STORES = ExtensionPoint("earmill.stores", "store")
# Files of a folder that are uploaded side by side; the backend sends a few parts of each at once.
FILES_AT_ONCE = 4
# Bytes that a request fetches of a remote file that is read from front to back.
READ_AHEAD_BYTES = 4 << 20


@dataclass(frozen=True, repr=False)
class Layout:
    """A storage backend and a root, a path as the backend spells it. Invariants: `write_bytes` and
    `put_if_absent` show a reader the whole content or nothing. At most one of racing calls of
    `put_if_absent` for one path returns True. `repr` has no options."""

    backend: Backend
    root: str
    cache: LocalCache | None = field(default=None, compare=False)

    @classmethod
    def open(
        cls, uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> Layout:
        """Return the layout at any URI or local path, without asking the store; OutputError if no
        filesystem for it is installed."""
        uri = os.fspath(uri)
        scheme, _, rest = uri.partition("://")
        try:
            own = [STORES.load(scheme)] if rest and scheme in STORES.names() else []
            opened = (kind.open(uri, storage_options or {}) for kind in (*own, *BACKENDS))
            return cls(*next(found for found in opened if found is not None))
        except errors.MissingPackageError as err:
            raise errors.OutputError(str(err)) from err
        except (ValueError, TypeError) as err:
            raise errors.OutputError(
                f"expected a local path or an fsspec URI, got {uri!r}: {err}; "
                "check the scheme and storage_options"
            ) from err

    def below(self, rel: str) -> Layout:
        """Return the layout of a folder of this one, with the same store and cache."""
        return replace(self, root=self.path(rel))

    def __repr__(self) -> str:
        return f"Layout({self.url()!r})"

    @property
    def is_local(self) -> bool:
        return self.backend.is_local

    @property
    def _store(self) -> Backend:
        return self.backend.here()

    def url(self, rel: str = "") -> str:
        """Return the full address of a path, without credentials, for messages and cards."""
        return self.backend.url(self.path(rel) if rel else (self.root or "/"))

    def path(self, rel: str) -> str:
        """Return the full path of `rel` as the backend spells it."""
        if not {"", ".", ".."}.isdisjoint(rel.split("/")) or "\\" in rel:
            raise ValueError(f"expected a relative path like 'commits/00000.json', got {rel!r}")
        return f"{self.root}/{rel}"

    def inside(self, rel: str) -> str:
        """Return `path(rel)` for reading; an OutputError if a link leads out of the root."""
        return self.backend.inside(self.root, self.path(rel))

    @store_call("read")
    def exists(self, rel: str) -> bool:
        return self._store.exists(self.path(rel))

    @store_call("read")
    def size(self, rel: str) -> int:
        return self._store.size(self.path(rel))

    @store_call("read")
    def open_file(self, rel: str) -> BinaryIO:
        if self.is_local:
            return LocalBackend().open_file(self.inside(rel))
        return io.BufferedReader(_RemoteFile(self, rel), READ_AHEAD_BYTES)

    @store_call("read")
    def read_bytes(self, rel: str) -> bytes:
        return self._store.read(self.inside(rel))

    def read_if_there(self, rel: str) -> bytes | None:
        """Return the content of a file, or None if there is no such file."""
        with suppress(FileNotFoundError):
            return self.read_bytes(rel)
        return None

    @store_call("read")
    def read_range(self, rel: str, start: int, length: int) -> Any:
        """Return bytes [start, start + length) as a buffer; fewer where the file ends before."""
        return self._store.read_range(self.inside(rel), start, length)

    @store_call("written")
    def write_bytes(self, rel: str, data: bytes) -> None:
        self._store.write(self.path(rel), data)

    @store_call("written")
    def put_if_absent(self, rel: str, data: bytes) -> bool:
        """Create one small file; False if it exists, OutputError if the store has no atomic create.
        After a StorageError it is not known if the file was written."""
        return self._store.create(self.path(rel), data)

    def create_own(self, rel: str, data: bytes) -> bool:
        """Create a small file with content that nobody else writes; see `replace_own`."""
        return self.replace_own(rel, data, None)

    def replace_own(self, rel: str, data: bytes, seen: bytes | None) -> bool:
        """Replace a small file that still holds `seen`, None for nothing, with content that nobody
        else writes; False, and nothing changed, if another process has written there since. The
        file is read after an error: a store may carry out a PUT and lose the answer, and refuse the
        repeated PUT."""
        try:
            put = self.put_if_absent(rel, data) if seen is None else self._replace(rel, data, seen)
        except Exception:  # stores raise their own roots (botocore is no OSError)
            if self.read_if_there(rel) == data:
                return True
            raise
        return put or self.read_if_there(rel) == data

    @store_call("written")
    def _replace(self, rel: str, data: bytes, seen: bytes) -> bool:
        return self._store.replace(self.path(rel), seen, data)

    @store_call("removed")
    def remove_own(self, rel: str, seen: bytes) -> bool:
        """Remove a small file that still holds `seen`; else return False, and change nothing."""
        return self._store.remove(self.path(rel), seen)

    def list(self, rel: str) -> Names:
        """Return every finished file under a folder, sorted; empty where the folder is missing."""
        return sorted(self.entries(rel))

    def sizes(self, rel: str) -> dict[str, int]:
        """Return every finished file under a folder (or the file itself) with its bytes."""
        return {name: entry.nbytes for name, entry in self.entries(rel).items()}

    @store_call("listed")
    def entries(self, rel: str) -> dict[str, Entry]:
        """Return every finished file under a folder (or the file itself) with size and time."""
        start = len(self.root) + 1
        found = {name[start:]: entry for name, entry in self._store.list(self.path(rel)).items()}
        return {
            name: entry
            for name, entry in found.items()
            if entry.is_file and not any(part.startswith(".") for part in name.split("/"))
        }

    @store_call("listed", None)
    def everything(self) -> dict[str, Entry]:
        """Return every file of the output, unfinished ones too."""
        start = len(self.root) + 1
        return {name[start:]: entry for name, entry in self._store.list(self.root).items()}

    @store_call("removed")
    def delete(self, rel: str) -> None:
        self._store.delete(self.path(rel))

    @store_call("written", 1)
    def upload_file(self, local: str | Path, rel: str) -> None:
        """Publish one local file, which may be moved; durable on a local disk after `settle`."""
        self._store.upload(str(local), self.path(rel))

    def upload_dir(self, local: str | Path, rel: str) -> None:
        """Publish a local folder: on a disk in one visible step, on a store file by file."""
        if self.is_local:
            self.upload_file(local, rel)
            return

        def upload(name: str) -> None:
            self.upload_file(f"{local}/{name}", f"{rel}/{name}")

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            # After an error, `map` cancels the uploads that have not begun.
            list(pool.map(upload, files_below(local)))

    @store_call("written", None)
    def settle(self, names: Sequence[str]) -> None:
        """Make what was uploaded under these names outlive a power cut."""
        self._store.settle([self.path(name) for name in names])

    def check_writable(self) -> None:
        """Raise OutputError, before any work, unless commits to this output are possible and safe;
        some stores overwrite where they must refuse."""
        token = secrets.token_hex(4)
        probe = f".probe-{token}"
        try:
            first = self.create_own(probe, token.encode())
            second = self.put_if_absent(probe, b"second")
            self.delete(probe)
        except errors.OutputError:
            raise
        except Exception as error:  # stores raise their own roots (botocore is no OSError)
            if isinstance(error, errors.StorageError) and error.transient and not self.is_local:
                raise
            what = str(error) if isinstance(error, errors.StorageError) else named_line(error)
            raise errors.OutputError(
                f"cannot write to {self.url()}: {what}; "
                "check that the place exists, its permissions and the credentials"
            ) from error
        if not first or second:
            raise errors.OutputError(
                f"{self.url()} overwrites a file although told to create it only if absent; "
                "commits would not be exactly once there: use a store that honours If-None-Match"
            )


@contextmanager
def open_output(
    uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> Iterator[Layout]:
    """Open the output of a job; errors of its store become errors of one line."""
    layout = Layout.open(uri, storage_options)
    with store_errors(layout.url()):
        yield layout


class _RemoteFile(SeekableFile):
    """A remote file that is read by ranges, with the retries of its layout."""

    def __init__(self, layout: Layout, rel: str) -> None:
        super().__init__(layout.size(rel))
        self._layout, self._rel = layout, rel

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")
        length = max(0, min(len(view), self._size - self._at))
        found = memoryview(self._layout.read_range(self._rel, self._at, length)) if length else b""
        view[: len(found)] = found
        self._at += len(found)
        return len(found)


class StoredFile:
    """A committed file with its size and hash. It is read by plain calls: a memory map would end
    the reader by a signal if another process cut a local file short."""

    def __init__(self, layout: Layout, rel: str, nbytes: int, sha256: str) -> None:
        self.layout, self.rel, self.nbytes, self._sha256 = layout, rel, nbytes, sha256

    def read(self, start: int, length: int) -> Bytes:
        """Return bytes [start, start + length); CommitError if the file is missing or too short."""

        def fetched(start: int, length: int) -> Bytes:
            return np.frombuffer(self.layout.read_range(self.rel, start, length), np.uint8)

        def short(why: str) -> errors.CommitError:
            return errors.CommitError(
                f"{self.layout.url(self.rel)}: expected {length} bytes from byte {start} on, the "
                f"file {why}; it is damaged: run `earmill verify`"
            )

        if not 0 <= start <= start + length <= self.nbytes:
            raise short(f"was committed with {self.nbytes} bytes")
        cache = self.layout.cache
        try:  # where the file ends before, fewer bytes come
            if cache is None:
                found = fetched(start, length)
            else:
                found = cache.read(self._sha256, self.nbytes, start, length, fetched)
        except (FileNotFoundError, errors.StorageError) as error:
            if isinstance(error.__cause__, errors.NotRegularError):
                raise errors.CommitError(str(error)) from error
            is_there = not isinstance(error.__cause__, NotADirectoryError)
            if is_there and not isinstance(error, FileNotFoundError):
                raise
            raise errors.CommitError(
                f"{self.layout.url(self.rel)} is missing although it is committed; run "
                "`earmill verify`"
            ) from error
        if len(found) != length:
            raise short(f"ends after {start + len(found)}")
        return found
