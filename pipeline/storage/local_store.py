"""Files of this machine: durable, visible in one step, created once, replaced under a lock.

Writing: a hidden temporary file, flushed, then `os.replace`. Creating: the same with `os.link`,
which fails where the name is taken; O_EXCL on filesystems without links. Replacing and removing:
compared under a lock on the folder, which ends with its holder. fsspec's local filesystem has a
race when it creates a file, and obstore's has no conditional replace, so neither is used.
Publishing: files are flushed, then renamed into place; renames outlive a power cut after `settle`.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from earmill.pipeline.common.byte_streams import open_regular
from earmill.pipeline.common.errors import NotRegularError, OutputError, StorageError
from earmill.pipeline.storage.backend import Backend, Entry, local_path

# A holder of the folder's lock needs milliseconds; a frozen holder must be ended.
LOCK_WAIT_S, _LOCK_STEP_S = 20.0, 0.05
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True)
class LocalBackend(Backend):
    """The filesystem of this machine; paths are absolute."""

    is_local: ClassVar[bool] = True

    @classmethod
    def open(cls, uri: str, options: Mapping[str, Any]) -> tuple[LocalBackend, str] | None:
        path = local_path(uri)
        return None if path is None else (cls(), path.rstrip("/"))

    def inside(self, root: str, path: str) -> str:
        real_root = os.path.realpath(root or "/")
        if os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
            raise OutputError(
                f"{path} is a link out of the dataset, which is never followed; "
                "put the file itself in its place"
            )
        return path

    def url(self, path: str) -> str:
        return path or "/"

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def read(self, path: str) -> bytes:
        with self.open_file(path) as file:
            return file.read()

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with self.open_file(path) as file:
            file.seek(start)
            return file.read(length)

    def open_file(self, path: str) -> io.BufferedReader:
        """Open a file; raise StorageError where a pipe, device or folder has its name."""
        try:
            return open_regular(path)
        except NotRegularError as error:
            raise StorageError(f"{error}; put the file back, or run `earmill verify`") from error

    def write(self, path: str, data: bytes) -> None:
        write_local(path, data)

    def create(self, path: str, data: bytes) -> bool:
        path = os.path.abspath(path)
        temporary = _written_beside(path, data)
        try:
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Without hard links a crash can leave half a JSON, which readers refuse.
                _write_new(path, data)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        sync_folder(os.path.dirname(path))
        return True

    def replace(self, path: str, seen: bytes, data: bytes) -> bool:
        return _if_it_holds(path, seen, lambda: write_local(path, data))

    def list(self, path: str) -> dict[str, Entry]:
        path = path or "/"
        if not os.path.isdir(path):
            return {path: _entry(path)} if os.path.lexists(path) else {}
        found = {}
        for folder, _, names in os.walk(path):
            for name in names:
                with suppress(FileNotFoundError):  # removed since it was listed
                    file = os.path.join(folder, name)
                    found[file] = _entry(file)
        return found

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)

    def remove(self, path: str, seen: bytes) -> bool:
        return _if_it_holds(path, seen, lambda: os.unlink(path))

    def upload(self, local: str, path: str) -> None:
        move_in(Path(local), Path(path))

    def settle(self, paths: Iterable[str]) -> None:
        for folder in dict.fromkeys(map(os.path.dirname, paths)):
            sync_folder(folder)


@contextmanager
def _opened_folder(path: str) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)  # and with it a lock on it


def sync_folder(path: str) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    with _opened_folder(path) as handle:
        os.fsync(handle)


def make_folder(path: str) -> None:
    """Make a folder and missing folders above it, their names durable. A folder without the right
    to read, as /scratch of many clusters, cannot be flushed."""
    if not path or os.path.isdir(path):
        return
    above = os.path.dirname(path)
    make_folder(above)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    with suppress(PermissionError):
        sync_folder(above or os.curdir)


def _write_new(path: str, data: bytes) -> None:
    """Create `path` with O_EXCL and make it durable; on failure leave nothing behind."""
    with open(path, "xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(path)
            raise


def _written_beside(path: str, data: bytes) -> str:
    """Write a hidden file beside `path`, whose folder is made if it is missing."""
    folder, name = os.path.split(path)
    make_folder(folder)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
    _write_new(temporary, data)
    return temporary


def write_local(path: str, data: bytes) -> None:
    """Write or replace a local file so that a reader sees the old or the new content, no mix."""
    path = os.path.abspath(path)  # a bare name has no folder to make or to flush
    temporary = _written_beside(path, data)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def _if_it_holds(path: str, seen: bytes, change: Callable[[], None]) -> bool:
    """Change a file under a lock on its folder; False if it does not hold `seen`. OutputError if
    another process has kept the folder locked for `LOCK_WAIT_S`."""
    folder = os.path.dirname(path)
    try:
        with _opened_folder(folder) as handle:
            _lock(handle, folder)
            with open_regular(path) as file:
                if file.read() != seen:
                    return False
            change()
    except (FileNotFoundError, NotRegularError):
        return False
    return True


def _lock(handle: int, folder: str) -> None:
    last = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > last:
                raise OutputError(
                    f"{folder}: another process has kept it locked for {LOCK_WAIT_S:g} s; "
                    "end the driver that hangs there and run again with --resume"
                ) from None  # the system's error would be taken for too little memory
            time.sleep(_LOCK_STEP_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return  # a filesystem without locks: the file is compared just before


def move_in(source: Path, target: Path) -> None:
    """Publish a local file or folder at `target` in one visible step, its content durable first."""
    make_folder(str(target.parent))
    _sync_tree(source)
    try:
        os.rename(source, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    # From another disk: a copy beside the target, then its rename.
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if source.is_dir():
            shutil.copytree(source, hidden)
        else:
            shutil.copyfile(source, hidden)
        _sync_tree(hidden)
        os.rename(hidden, target)
    except OSError:
        remove(hidden)
        raise


def _sync_tree(path: Path) -> None:
    """Flush every file below `path`, and the folders that name them, to the disk."""
    for entry in [path, *(path.rglob("*") if path.is_dir() else ())]:
        sync_folder(str(entry))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def files_below(folder: str | Path) -> list[str]:
    """Return every file below a folder, links not followed, as `a/b`, in the order of paths."""
    found = (Path(above, name) for above, _, names in os.walk(folder) for name in names)
    return [path.relative_to(folder).as_posix() for path in sorted(found)]


def _entry(path: str) -> Entry:
    """Describe a file; a link is described by its target."""
    try:
        status = os.stat(path)
    except FileNotFoundError:  # a broken link
        status = os.lstat(path)
    return Entry(status.st_size, status.st_mtime, stat.S_ISREG(status.st_mode))
