"""Every file below a folder, once: hidden ones left out, links to folders followed, no way round.

Local folders are walked here, because fsspec does not follow links to folders. Real folders come
first; a link then adds what was not seen yet, so that a row is named by its real path where it has
one. A link to a folder that holds the root would lead back here and out into everything else.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

HIDDEN = "hidden"
NO_EXTENSION = "no extension"
# A row of a table; counted beside files.
BLANK_ROW = "blank row"

Entry = tuple[str, dict[str, Any]]
Identity = tuple[int, int]


class Walk:
    """One walk over a local folder; iterate once.

    Args:
        root: Its path.
        hidden: Take files and folders whose name begins with a dot as well.
    Attributes:
        left_out: Hidden files and folders met on the way.
    """

    def __init__(self, root: str, *, hidden: bool = False) -> None:
        self._root, self._hidden = root, hidden
        self._seen = set(_ancestors(root))
        self._links: list[tuple[str, str]] = []
        self.left_out = 0

    def __iter__(self) -> Iterator[Entry]:
        """Path below the root and what is known of the file; `size` only of regular ones."""
        yield from self._folder(self._root, "")
        while self._links:
            self._links.sort(reverse=True)
            path, name = self._links.pop()
            found = _identity(os.stat(path))
            if found not in self._seen:
                self._seen.add(found)
                yield from self._folder(path, f"{name}/")

    def _folder(self, path: str, prefix: str) -> Iterator[Entry]:
        waiting = [(path, prefix)]
        while waiting:
            path, prefix = waiting.pop()
            with os.scandir(path) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            for entry in found:
                name = prefix + entry.name
                if entry.name.startswith(".") and not self._hidden:
                    self.left_out += 1
                elif entry.is_dir(follow_symlinks=False):
                    identity = _identity(entry.stat(follow_symlinks=False))
                    if identity not in self._seen:
                        self._seen.add(identity)
                        waiting.append((entry.path, f"{name}/"))
                elif _is_folder(entry):
                    self._links.append((entry.path, name))
                else:
                    yield name, file_info(entry.path)


def file_info(path: str) -> dict[str, Any]:
    """Size and time of a file; empty for what is none, or a link to nowhere."""
    try:
        found = os.stat(path)
    except OSError:
        return {}
    return {"size": found.st_size, "mtime": found.st_mtime} if stat.S_ISREG(found.st_mode) else {}


def is_hidden(name: str) -> bool:
    """Whether a part of a path below the root begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def by_extension(names: Iterator[str]) -> Counter[str]:
    """How many files have which ending."""
    return Counter(PurePosixPath(name).suffix.lower() or NO_EXTENSION for name in names)


def _is_folder(link: os.DirEntry[str]) -> bool:
    try:
        return link.is_dir()
    except OSError:  # it leads to itself
        return False


def _ancestors(path: str) -> Iterator[Identity]:
    """The folder itself and all that hold it."""
    path = os.path.realpath(path)
    while True:
        yield _identity(os.stat(path))
        parent = os.path.dirname(path)
        if parent == path:
            return
        path = parent


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino
