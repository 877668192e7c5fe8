"""Write a small file whole, and create one only if it is absent, on each kind of store.

Local: a hidden temporary file, then `os.replace` (write) or `os.link` (create), both atomic; where
links are unknown, O_EXCL. S3: PutObject with If-None-Match, 412 = somebody else won, 409 = two are
at it, ask again. Google: ifGenerationMatch=0, 412 = somebody else won. Azure: If-None-Match, 409
BlobAlreadyExists = somebody else won, any other 409 is none of that. fsspec's own local
`mode="create"` looks first and writes then, so it is not used.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from earmill.pipeline.common.errors import OutputError, http_status, store_code
from earmill.pipeline.storage.uploads import protocols

# Waits before asking again after a 409; the other writer needs milliseconds.
CONFLICT_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
# adlfs says "exists" of a container that is being deleted as well; s3fs and gcsfs have no code.
TAKEN = (None, "BlobAlreadyExists", "PreconditionFailed")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
MEMORY_LOCK = threading.Lock()


def sync_folder(path: str) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: str) -> None:
    """Make a folder and what is missing above it, the names of new ones durable.

    One that may be written to and not read, as /scratch of many clusters, cannot be flushed.
    """
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
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(path)
        raise


def _temporary(path: str) -> str:
    """A hidden name beside `path`; its folder is made if need be."""
    folder, name = os.path.split(path)
    make_folder(folder)
    return os.path.join(folder, f".{name}.{secrets.token_hex(4)}")


def write_local(path: str, data: bytes) -> None:
    """Write or replace a local file so that a reader sees the old or the new content, no mix."""
    path = os.path.abspath(path)  # a bare name has no folder to make or to flush
    temporary = _temporary(path)
    _write_new(temporary, data)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def create_local(path: str, data: bytes) -> bool:
    """Create a local file with its whole content; False where the name is taken."""
    path = os.path.abspath(path)
    temporary = _temporary(path)
    _write_new(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        return _create_exclusive(path, data)
    finally:
        os.unlink(temporary)
    sync_folder(os.path.dirname(path))
    return True


def _create_exclusive(path: str, data: bytes) -> bool:
    """For filesystems without hard links: as exclusive, but a crash can leave a part of the data.

    The readers of such files refuse half a JSON by name instead of trusting it.
    """
    try:
        _write_new(path, data)
    except FileExistsError:
        return False
    sync_folder(os.path.dirname(path))
    return True


def create_remote(fs: Any, path: str, data: bytes) -> bool:
    """The same on a store: `fs` is an fsspec filesystem of S3, Google, Azure or memory."""
    names = protocols(fs)
    if names & {"s3", "gs", "abfs"}:
        return _create_object(fs, path, data)
    if "memory" in names:
        return _create_memory(fs, path, data)
    raise OutputError(
        f"{min(names)}:// has no atomic create-if-absent, so commits would not be exactly once; "
        "write to a local folder, s3://, gs:// or abfs://"
    )


def _create_memory(fs: Any, path: str, data: bytes) -> bool:
    """fsspec's memory filesystem checks, then writes; one process needs one lock."""
    with MEMORY_LOCK:
        try:
            fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
    return True


def _create_object(fs: Any, path: str, data: bytes) -> bool:
    try:
        return put_on_condition(path, lambda: fs.pipe_file(path, data, mode="create"))
    except FileExistsError as err:
        code = store_code(err)
        if code not in TAKEN:
            raise OutputError(f"{path}: the store answers {code}; try again later") from err
        return False


def put_on_condition(path: str, put: Callable[[], object]) -> bool:
    """Whether a store carried out a conditional PUT: 412 says no, 409 that two are at it.

    Raises:
        OutputError: The store answers with 409 again and again.
    """
    for wait_s in (*CONFLICT_WAITS_S, None):
        try:
            put()
        except FileExistsError:
            raise
        except Exception as err:  # which class it is depends on the store: decide by status code
            status = http_status(err)
            if status == 412:
                return False
            if status != 409:
                raise
            if wait_s is None:
                raise OutputError(
                    f"{path}: the store still answers 409 Conflict after "
                    f"{len(CONFLICT_WAITS_S) + 1} tries; run again with --resume"
                ) from err
            time.sleep(wait_s)
        else:
            return True
    return False
