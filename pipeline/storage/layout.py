"""The one path type: an fsspec filesystem and a root.

Everything that touches the output goes through `Layout`, which is never turned back into a string
and parsed again. Paths handed to it are relative, as `earmill.pipeline.storage.paths` spells them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.byte_streams import open_regular
from earmill.pipeline.common.errors import (
    MissingPackageError,
    NotRegularError,
    OutputError,
    StorageError,
)
from earmill.pipeline.common.redact import redact
from earmill.pipeline.storage.atomic_create import create_local, create_remote, write_local
from earmill.pipeline.storage.atomic_replace import (
    remove_local,
    remove_remote,
    replace_local,
    replace_remote,
)
from earmill.pipeline.storage.fsspec_store import (
    MAGIC_CHARACTERS,
    ONE_REQUEST_BYTES,
    filesystem_of,
    in_one_request,
    local_path,
)
from earmill.pipeline.storage.local_cache import LocalCache
from earmill.pipeline.storage.local_files import move_in, sync_names
from earmill.pipeline.storage.retrying import store_call
from earmill.pipeline.storage.straight_ranges import (
    Bytes,
    parts_straight,
    whole_straight,
)
from earmill.pipeline.storage.uploads import FILES_AT_ONCE, in_parts

Names = list[str]


def _checked(rel: str) -> str:
    parts = rel.split("/")
    if not rel or any(part in ("", ".", "..") for part in parts) or "\\" in rel:
        raise ValueError(f"expected a relative path like 'commits/00000.json', got {rel!r}")
    return rel


def _is_file(info: Mapping[str, Any]) -> bool:
    return info["type"] == "file" or os.path.isfile(info["name"])


def _is_unfinished(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _modified(info: Mapping[str, Any]) -> float | None:
    """When a file was written, as one filesystem or the other says it."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        time = info.get(key)
        if isinstance(time, int | float):
            return float(time)
        if isinstance(time, datetime):
            return time.timestamp()
        if isinstance(time, str):
            with suppress(ValueError):
                return datetime.fromisoformat(time).timestamp()
    return None


@dataclass(frozen=True, repr=False)
class Layout:
    """A filesystem and a root: the output of one job, or a dataset somebody reads.

    Args:
        fs: fsspec filesystem, credentials inside it.
        root: Path within it, as that filesystem spells it (no protocol).
        cache: Where parts of its files are kept that never change; None for nowhere.

    Invariants: `write_bytes` and `put_if_absent` show a reader the whole content or nothing, and of
    any number of racing `put_if_absent` calls for one path at most one returns True. The text form
    holds no storage option.
    """

    fs: Any
    root: str
    cache: LocalCache | None = field(default=None, compare=False)

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
        if local_path(uri) is None and not uri.startswith("memory://"):
            # Another process commits while we look: a cached listing would hide it.
            options.setdefault("use_listings_cache", False)
        try:
            fs, root = filesystem_of(uri, **options)
        except MissingPackageError as err:
            raise OutputError(str(err)) from err
        except (ValueError, TypeError) as err:
            raise OutputError(
                f"expected a local path or an fsspec URI, got {uri!r}: {err}; "
                "check the scheme and storage_options"
            ) from err
        return cls(fs, root.rstrip("/"))

    def __repr__(self) -> str:
        return f"Layout({self.url()!r})"

    @property
    def is_local(self) -> bool:
        """True where plain os calls reach the same files."""
        return isinstance(self.fs, LocalFileSystem)

    def url(self, rel: str = "") -> str:
        """Full address of a path, for messages and cards; never holds credentials."""
        path = self.path(rel) if rel else (self.root or "/")
        return path if self.is_local else redact(str(self.fs.unstrip_protocol(path)))

    def path(self, rel: str) -> str:
        """Full path of `rel` in the terms of `fs`."""
        return f"{self.root}/{_checked(rel)}"

    def inside(self, rel: str) -> str:
        """`path(rel)` for reading: never outside the root, whatever links lie on the way.

        Raises:
            OutputError: A link leads out of the root.
        """
        path = self.path(rel)
        if self.is_local:
            root = os.path.realpath(self.root or "/")
            real = os.path.realpath(path)
            if os.path.commonpath([root, real]) != root:
                raise OutputError(
                    f"{path} is a link out of the dataset, which is never followed; "
                    "put what it should hold in its place"
                )
        return path

    @store_call("read")
    def exists(self, rel: str) -> bool:
        """Whether a file (or, locally, a folder) is there now."""
        return bool(self.fs.exists(self.path(rel)))

    @store_call("read")
    def size(self, rel: str) -> int:
        """Bytes of one file; FileNotFoundError where it is missing."""
        return int(self.fs.size(self.path(rel)))

    @store_call("read")
    def open_file(self, rel: str) -> BinaryIO:
        """A readable, seekable binary file."""
        return self._open_local(rel) if self.is_local else self.fs.open(self.inside(rel), "rb")

    def _open_local(self, rel: str) -> BinaryIO:
        """A file on this machine; StorageError where a pipe, device or folder has its name."""
        try:
            return open_regular(self.inside(rel))
        except NotRegularError as error:
            raise StorageError(f"{error}; put the file back, or run `earmill verify`") from error

    @store_call("read")
    def read_bytes(self, rel: str, nbytes: int | None = None) -> bytes:
        """The whole content of one file, of so many bytes where that is known."""
        if self.is_local:
            with self._open_local(rel) as file:
                return file.read()
        if (nbytes or 0) <= ONE_REQUEST_BYTES:
            found = self.read_whole_straight(rel, ONE_REQUEST_BYTES)
            if found is not None:
                return found
        return bytes(self.fs.cat_file(self.inside(rel), **in_one_request(self.fs, nbytes)))

    @store_call("read")
    def read_range(self, rel: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length) of one file; fewer where it ends before."""
        if self.is_local:
            with self._open_local(rel) as file:
                file.seek(start)
                return file.read(length)
        return bytes(self.fs.cat_file(self.inside(rel), start=start, end=start + length))

    def parts_straight(
        self, rel: str, start: int, sizes: Sequence[int], memory: Bytes
    ) -> Iterator[Bytes]:
        """The bytes from `start` on of a file that has so many in parts, past the filesystem, all
        in `memory`; fewer where that cannot be or goes wrong, and `read_range` is to be asked."""
        return parts_straight(self.fs, self.path(rel), start, sizes, memory)

    def read_whole_straight(self, rel: str, most: int) -> bytes | None:
        """The whole content of a file of at most so many bytes, past the filesystem; None where
        that cannot be or goes wrong."""
        return whole_straight(self.fs, self.path(rel), most)

    @store_call("written")
    def write_bytes(self, rel: str, data: bytes) -> None:
        """Write or replace one small file: temporary file and rename locally, one PUT elsewhere."""
        if self.is_local:
            write_local(self.path(rel), data)
        else:
            self.fs.pipe_file(self.path(rel), data)

    @store_call("written")
    def put_if_absent(self, rel: str, data: bytes) -> bool:
        """Create one small file; False, and nothing changed, where it already exists.

        Raises:
            OutputError: This store has no atomic create, or keeps answering with a conflict.
            StorageError: The write failed for another reason; whether it landed is then unknown.
        """
        path = self.path(rel)
        return create_local(path, data) if self.is_local else create_remote(self.fs, path, data)

    def create_own(self, rel: str, data: bytes) -> bool:
        """`put_if_absent` for content that nobody else writes: False only where it is another's.

        A store may carry out a PUT and lose the answer; the client then repeats it and is refused
        by its own effect, or gives up. What is there now tells.
        """
        try:
            if self.put_if_absent(rel, data):
                return True
        except Exception:  # stores raise their own roots (botocore is no OSError)
            if self._holds(rel, data):
                return True
            raise
        return self._holds(rel, data)

    def replace_own(self, rel: str, data: bytes, seen: bytes | None) -> bool:
        """Replace a small file that still holds what was seen of it, None for nothing; False, and
        nothing changed, where another has written there since.

        As with `create_own` the answer may be lost: what is there now tells.

        Raises:
            OutputError: The place stays locked, or answers with a conflict again and again.
            StorageError: The write failed for another reason; whether it landed is then unknown.
        """
        if seen is None:
            return self.create_own(rel, data)
        try:
            if self._replace(rel, data, seen):
                return True
        except StorageError:
            if self._holds(rel, data):
                return True
            raise
        return self._holds(rel, data)

    @store_call("written")
    def _replace(self, rel: str, data: bytes, seen: bytes) -> bool:
        path = self.path(rel)
        if self.is_local:
            return replace_local(path, seen, data)
        return replace_remote(self.fs, path, seen, data)

    @store_call("removed")
    def remove_own(self, rel: str, seen: bytes) -> bool:
        """Remove a small file that still holds what was seen of it; False, and nothing changed,
        where another has written there since or the file is gone.

        Raises:
            OutputError: The place stays locked.
        """
        path = self.path(rel)
        return remove_local(path, seen) if self.is_local else remove_remote(self.fs, path, seen)

    def _holds(self, rel: str, data: bytes) -> bool:
        try:
            return self.read_bytes(rel) == data
        except FileNotFoundError:
            return False

    def list(self, rel: str) -> Names:
        """Every finished file under a folder, sorted; empty where the folder is missing."""
        return sorted(self.sizes(rel))

    @store_call("listed")
    def sizes(self, rel: str) -> dict[str, int]:
        """Every finished file under a folder (or the file itself) with its bytes."""
        if self.is_local and os.path.isfile(self.path(rel)):
            return {} if _is_unfinished(rel) else {rel: os.path.getsize(self.path(rel))}
        found = self.fs.find(self.path(rel), withdirs=False, detail=True)
        if isinstance(found, list):  # adlfs, of a path that is a file
            found = {path: self.fs.info(path) for path in found}
        start = len(self.root) + 1
        if self.is_local:  # a pipe or device is no file; of a link its target counts
            found = {path: info for path, info in found.items() if _is_file(info)}
        sizes = {str(info["name"])[start:]: int(info["size"] or 0) for info in found.values()}
        return {name: size for name, size in sizes.items() if not _is_unfinished(name)}

    @store_call("listed")
    def modified(self, rel: str) -> dict[str, float | None]:
        """Every finished file under a folder with the time of its last change, seconds since 1970;
        None where the store does not say."""
        found = self.fs.find(self.path(rel), withdirs=False, detail=True)
        start = len(self.root) + 1
        times = {str(info["name"])[start:]: _modified(info) for info in found.values()}
        return {name: time for name, time in times.items() if not _is_unfinished(name)}

    @store_call("listed", None)
    def everything(self) -> dict[str, tuple[int, float | None]]:
        """Every file with its bytes and the time of its last change, unfinished ones too."""
        found = self.fs.find(self.root or "/", withdirs=False, detail=True)
        start = len(self.root) + 1
        return {
            str(info["name"])[start:]: (int(info["size"] or 0), _modified(info))
            for info in found.values()
        }

    @store_call("removed")
    def delete(self, rel: str) -> None:
        """Remove a file or a folder; fine where it is already gone."""
        path = self.path(rel)
        try:
            if self.is_local or not MAGIC_CHARACTERS.search(path):
                self.fs.rm(path, recursive=True)
                return
            # fsspec would take the path for a pattern, and remove what others have.
            for file in self.fs.find(path):
                self.fs.rm_file(file)
        except FileNotFoundError:
            return

    @store_call("written", 1)
    def upload_file(self, local: str | Path, rel: str) -> None:
        """Publish one local file. It may be moved: do not use it afterwards. Durable at once on a
        store, on a local disk after `settle`."""
        if self.is_local:
            move_in(Path(local), Path(self.path(rel)))
        else:
            self.fs.put_file(str(local), self.path(rel), **in_parts(self.fs))

    @store_call("written", 1)
    def upload_dir(self, local: str | Path, rel: str) -> None:
        """Publish a local folder with everything in it, as `upload_file` does a file."""
        if self.is_local:
            move_in(Path(local), Path(self.path(rel)))
            return
        files = sorted(path for path in Path(local).rglob("*") if path.is_file())
        names = [path.relative_to(local).as_posix() for path in files]
        targets = [self.path(f"{rel}/{name}") for name in names]
        sources = [str(path) for path in files]
        # Not in one call: fsspec leaves the tasks behind one that fails as they are.
        for some in range(0, len(sources), FILES_AT_ONCE):
            now = slice(some, some + FILES_AT_ONCE)
            self.fs.put(sources[now], targets[now], batch_size=FILES_AT_ONCE, **in_parts(self.fs))

    @store_call("written", None)
    def settle(self, names: Sequence[str]) -> None:
        """Make what was uploaded under these names outlive a power cut."""
        if self.is_local:
            sync_names(map(self.path, names))

    def check_writable(self) -> None:
        """Prove, before any work, that this output can be written and that commits are safe there.

        Raises:
            OutputError: Not writable, or the store overwrites where it must refuse.
        """
        token = secrets.token_hex(4)
        probe = f".probe-{token}"
        try:
            first = self.create_own(probe, token.encode())
            second = self.put_if_absent(probe, b"second")
            self.delete(probe)
        except OutputError:
            raise
        except StorageError as err:
            if err.transient and not self.is_local:
                raise
            raise OutputError(
                f"cannot write to {self.url()}: {err}; "
                "check that the place exists, its permissions and the credentials"
            ) from err
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
