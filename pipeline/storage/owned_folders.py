"""Temporary folders that know whether their owner lives.

A folder holds a lock file that its owner keeps locked; the system lets go of it however the owner
ends. So whoever comes next can tell what a killed process left from what is in use, and removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

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
