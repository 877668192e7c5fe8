"""Replace or remove a small file only while it still holds what was seen, on each kind of store.

A driver that was frozen for longer than its lock lasts wakes in the middle of a step and would put
back what another has replaced meanwhile. Local: compared and renamed under a lock on the folder,
which a killed process lets go of. S3: If-Match with the ETag of what was compared; 412 = it has
changed, 501 = this store knows no such condition. There, and on Google and Azure, whose clients
take no condition with a write, it is compared just before: a writer that is frozen within that one
request is not found out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from earmill.pipeline.common.byte_streams import open_regular
from earmill.pipeline.common.errors import NotRegularError, OutputError, http_status
from earmill.pipeline.storage.atomic_create import MEMORY_LOCK, put_on_condition, write_local
from earmill.pipeline.storage.uploads import protocols

# Whoever holds the folder's lock needs milliseconds; one that is frozen there must be ended.
LOCK_WAIT_S, _LOCK_STEP_S = 20.0, 0.05
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def replace_local(path: str, seen: bytes, data: bytes) -> bool:
    """Replace a local file that holds `seen`; False, and nothing changed, where it does not.

    Raises:
        OutputError: Another process has kept the folder locked for `LOCK_WAIT_S`.
    """
    return _if_it_holds(path, seen, lambda: write_local(path, data))


def remove_local(path: str, seen: bytes) -> bool:
    """Remove a local file that holds `seen`; False, and nothing changed, where it does not.

    Raises:
        OutputError: Another process has kept the folder locked for `LOCK_WAIT_S`.
    """
    return _if_it_holds(path, seen, lambda: os.unlink(path))


def _if_it_holds(path: str, seen: bytes, change: Callable[[], None]) -> bool:
    try:
        with _locked(os.path.dirname(path)):
            with open_regular(path) as file:
                if file.read() != seen:
                    return False
            change()
            return True
    except (FileNotFoundError, NotRegularError):
        return False


def remove_remote(fs: Any, path: str, seen: bytes) -> bool:
    """Remove an object that holds `seen`. Stores take no condition with a removal, so the object
    is compared just before."""
    try:
        with MEMORY_LOCK if "memory" in protocols(fs) else nullcontext():
            if bytes(fs.cat_file(path)) != seen:
                return False
            fs.rm_file(path)
            return True
    except FileNotFoundError:
        return False


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)  # and with it the lock


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
        except OSError as err:
            if err.errno not in _NO_LOCKS:
                raise
            return  # a filesystem without locks: what is left is to look just before


def replace_remote(fs: Any, path: str, seen: bytes, data: bytes) -> bool:
    """The same on a store: `fs` is an fsspec filesystem of S3, Google, Azure or memory."""
    try:
        if "memory" in protocols(fs):
            with MEMORY_LOCK:
                return _compare_and_put(fs, path, seen, data)
        if "s3" in protocols(fs):
            return _replace_object(fs, path, seen, data)
        return _compare_and_put(fs, path, seen, data)
    except FileNotFoundError:
        return False


def _compare_and_put(fs: Any, path: str, seen: bytes, data: bytes) -> bool:
    if bytes(fs.cat_file(path)) != seen:
        return False
    fs.pipe_file(path, data)
    return True


def _replace_object(fs: Any, path: str, seen: bytes, data: bytes) -> bool:
    # Before the content: where that is newer than this, the condition fails.
    tag = fs.info(path, refresh=True)["ETag"]
    if bytes(fs.cat_file(path)) != seen:
        return False
    try:
        return put_on_condition(path, lambda: fs.pipe_file(path, data, IfMatch=tag))
    except Exception as err:  # stores raise their own roots (botocore is no OSError)
        if http_status(err) != 501:
            raise
    return _compare_and_put(fs, path, seen, data)
