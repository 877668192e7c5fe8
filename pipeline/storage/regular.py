"""Opening a local file, and nothing else that may stand under its name.

A pipe waits for a writer, a device may never end, a socket cannot be read: none of them is a
recording, nor a file of a dataset. The kind is asked before opening, because opening alone can do
something to a device. It is asked again afterwards, because a name can be given to something else
in between.
"""

from __future__ import annotations

import io
import os
import stat

from earmill.pipeline.common.errors import NotRegularError

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str) -> io.BufferedReader:
    """A regular file, links followed, opened for reading; NotRegularError for anything else."""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: str) -> int:
    """The descriptor of `open_regular`, which the caller closes."""
    check_regular(path)
    # Does not wait, whatever has taken the file's place since.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str) -> None:
    """Raise NotRegularError where a name leads to something that is no regular file."""
    _check(path, os.stat(path).st_mode)


def _check(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotRegularError(f"{path}: expected a regular file, got {kind}")
