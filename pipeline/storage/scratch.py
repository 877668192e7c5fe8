"""Where a shard is written before it is published: on the output's own disk where there is one.

Publishing is then a rename, and a full disk shows while encoding, before anything is visible. What
killed attempts leave there is removed by whoever comes next with the driver's lock.

Temporary folders that know whether their owner lives.

A folder holds a lock file that its owner keeps locked; the system lets go of it however the owner
ends. So whoever comes next can tell what a killed process left from what is in use, and removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_files import make_below, new_folder
from earmill.pipeline.storage.retrying import store_call

PREFIX = "earmill-tmp-"
LOCK = "owner.lock"


class OwnedFolder:
    """A new folder, ours until `remove` or the end of this process.

    Args:
        prefix: Of its name. parent: Where; None takes the system's folder for temporary files.
    """

    def __init__(self, prefix: str = PREFIX, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        # Locked before it gets the name under which others look for what is left over.
        hidden = tempfile.mkdtemp(prefix=f".{prefix}", dir=parent)
        self._lock = os.open(os.path.join(hidden, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = os.path.join(parent, os.path.basename(hidden).removeprefix("."))
        os.rename(hidden, self.path)
        self.owner_pid = os.getpid()

    def remove(self) -> None:
        """Remove it with all that is in it; safe to call again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Leave it to whoever finds it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def abandoned(prefix: str = PREFIX, parent: str | None = None) -> Iterator[str]:
    """Folders whose owners are gone; each is locked by us while it is looked at."""
    for folder in sorted(Path(parent or tempfile.gettempdir()).glob(f"{prefix}*")):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield str(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def sweep(prefix: str = PREFIX, parent: str | None = None) -> None:
    """Remove what killed processes left."""
    for folder in abandoned(prefix, parent):
        shutil.rmtree(folder, ignore_errors=True)


_mine: OwnedFolder | None = None
_making = threading.Lock()


def own_folder() -> str:
    """This process's folder for temporary files; made on first use, removed at exit."""
    global _mine
    with _making:
        if _mine is None or _mine.owner_pid != os.getpid() or not os.path.isdir(_mine.path):
            _mine = OwnedFolder()
            atexit.register(_at_exit(_mine))
        return _mine.path


def _at_exit(folder: OwnedFolder) -> Callable[[], None]:
    def remove() -> None:
        if folder.owner_pid == os.getpid():  # a forked child is no owner
            folder.remove()

    return remove


SCRATCH_FOLDER = ".scratch"


@contextmanager
def private_scratch(layout: Layout, name: str) -> Iterator[Path]:
    """A local folder of one's own, removed at exit."""
    if not layout.is_local:
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=own_folder()) as found:
            yield Path(found)
        return
    parent = Path(layout.root) / SCRATCH_FOLDER
    folder = new_folder(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty: somebody else works there
            parent.rmdir()


def shared_scratch(layout: Layout, name: str) -> Path | None:
    """The folder of this name, for all who know the name, until `clear_scratch`; None where the
    output has no disk.

    A folder for each shard is dear: a disk that has just removed many searches long for room for a
    new file.
    """
    if not layout.is_local:
        return None
    return make_below(Path(layout.root) / SCRATCH_FOLDER / name, exist_ok=True)


@store_call("cleared", None)
def clear_scratch(layout: Layout, name: str = "") -> None:
    """Remove what killed attempts left; of all only while holding the driver lock.

    Workers of a driver that was taken over may still publish out of it, and a deletion that has
    begun follows a folder through its rename. So it is moved out of their way first: what they try
    to publish afterwards is not found, and what they have published is not touched.

    Args:
        name: Of a shared folder, to remove this one alone.
    """
    if not layout.is_local:
        return
    root = Path(layout.root)
    with suppress(FileNotFoundError):
        aside = f"{SCRATCH_FOLDER}-{secrets.token_hex(4)}"
        os.rename(root / SCRATCH_FOLDER / name, root / aside)
    with suppress(OSError):  # not there, or somebody else works there
        os.rmdir(root / SCRATCH_FOLDER)
    for left in root.glob(f"{SCRATCH_FOLDER}-*"):
        shutil.rmtree(left, ignore_errors=True)
