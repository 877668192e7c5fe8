"""Temporary folders: of this process, and those in which shards are written before publishing.

A shard is written on the output's own disk, if there is one: publishing is a rename, and a full
disk shows before anything is visible. The owner of a process folder keeps a lock file in it locked;
the system releases the lock however the owner ends, so that other processes can remove the folder.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.retrying import store_call

PREFIX = "earmill-tmp-"
LOCK = "owner.lock"
SCRATCH_FOLDER = ".scratch"
MKDIR_TRIES = 100


class OwnedFolder:
    """A new folder in the system's folder for temporary files, owned until `remove` or the end."""

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        # Locked before it gets the name by which `sweep` looks for folders.
        hidden = tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent)
        self._lock = os.open(os.path.join(hidden, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = os.path.join(parent, os.path.basename(hidden).removeprefix("."))
        os.rename(hidden, self.path)
        self.owner_pid = os.getpid()

    def remove(self) -> None:
        """Remove the folder with everything in it, but not in a forked child of its owner; safe to
        call again."""
        if self.owner_pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
            self.let_go()

    def let_go(self) -> None:
        """Release the lock, so that any process may remove the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: str | None = None) -> None:
    """Remove the folders that killed processes left in the system's folder, or in another."""
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or being removed
        try:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


_own: OwnedFolder | None = None
_making = threading.Lock()


def own_folder() -> str:
    """Return this process's folder for temporary files, made on first use and removed at exit."""
    global _own
    with _making:
        if _own is None or _own.owner_pid != os.getpid() or not os.path.isdir(_own.path):
            _own = OwnedFolder()
            atexit.register(_own.remove)
        return _own.path


def make_below(folder: Path, *, exist_ok: bool = False) -> Path:
    """Make a folder whose parent another worker may remove at any time while empty."""
    for _ in range(MKDIR_TRIES):
        # pathlib reports a parent that vanishes meanwhile as missing or as existing.
        with suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=exist_ok)
            return folder
    raise OutputError(f"{folder.parent} cannot be made: another process keeps removing it")


@contextmanager
def private_scratch(layout: Layout, name: str) -> Iterator[Path]:
    """Make a local folder for one caller, removed at exit."""
    if not layout.is_local:
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=own_folder()) as found:
            yield Path(found)
        return
    parent = Path(layout.root) / SCRATCH_FOLDER
    folder = make_below(parent / f"{name}-{secrets.token_hex(4)}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty: another worker uses it
            parent.rmdir()


def shared_scratch(layout: Layout, name: str) -> Path | None:
    """Return the folder of this name, shared by all callers until `clear_scratch`; None if the
    output has no disk. A folder for each shard is slow on a disk that has just removed many."""
    if not layout.is_local:
        return None
    return make_below(Path(layout.root) / SCRATCH_FOLDER / name, exist_ok=True)


@store_call("cleared", None)
def clear_scratch(layout: Layout, name: str = "") -> None:
    """Remove one shared folder, or, with the lock held, all files of killed attempts. Workers of an
    overtaken driver may still publish out of the folder, and a removal follows a folder through its
    rename. So it is moved away first: later files are not found there."""
    if not layout.is_local:
        return
    root = Path(layout.root)
    with suppress(FileNotFoundError):
        aside = f"{SCRATCH_FOLDER}-{secrets.token_hex(4)}"
        os.rename(root / SCRATCH_FOLDER / name, root / aside)
    with suppress(OSError):  # not there, or another worker uses it
        os.rmdir(root / SCRATCH_FOLDER)
    for left in root.glob(f"{SCRATCH_FOLDER}-*"):
        shutil.rmtree(left, ignore_errors=True)
