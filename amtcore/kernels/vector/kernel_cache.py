"""Folders of compiled kernels, and the check that only this user or root can write there.

numba unpickles index files and runs code from its disk cache. Another user who can write there can
run code in this process, so such a folder is refused before any kernel is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

import numba

from amtcore.errors import KernelCacheError

ADVICE = "chmod -R go-w it, or set NUMBA_CACHE_DIR to a folder of your own"
#: Depth of numba's cache: a folder for each source folder, with files.
_LEVELS = 2
_BESIDE = "__pycache__"


def check_kernel_cache() -> None:
    """Raise `KernelCacheError` if other users can write to the cache of kernels."""
    if numba.config.CACHE_DIR:
        folder = Path(numba.config.CACHE_DIR).absolute()
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
        check_private(folder)
        return
    # The cache beside the sources may be shared by a group, like the sources, but not by everybody.
    sources = Path(__file__).parents[1]
    for cache in sources.rglob(_BESIDE):
        if cache.stat().st_mode & stat.S_IWOTH:
            raise KernelCacheError(f"{cache}: everybody can write to these kernels; {ADVICE}")
    user_wide = user_wide_cache()
    if not os.access(sources, os.W_OK) and user_wide.exists():
        check_private(user_wide)


def user_wide_cache() -> Path:
    """Return numba's cache folder if the folder of the sources is read-only."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def folder_for(name: str, sources: Path) -> Path:
    """Return the folder for code that is compiled from the folder `sources`.

    This is folder `name` of NUMBA_CACHE_DIR, else __pycache__ in `sources`, else folder `name` of
    the user-wide cache.
    """
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR).absolute() / name
    if os.access(sources, os.W_OK):
        return sources / _BESIDE
    return user_wide_cache() / name


@functools.cache
def made_private(folder: Path) -> Path:
    """Make a folder if possible, and raise if other users can write to it.

    `check_kernel_cache` has checked `__pycache__` beside the sources, which a group may share.
    """
    ours = folder.name != _BESIDE
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700 if ours else 0o777, parents=True, exist_ok=True)
    if ours and folder.exists():
        check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise if another user can write to a folder or its files, or replace a parent folder."""
    for path in (*_parents(folder), *_entries(folder, _LEVELS)):
        why = _open_to_others(path, is_parent=path in folder.parents)
        if why:
            raise KernelCacheError(
                f"{path}: {why}, and compiled kernels in {folder} are run as code; {ADVICE}"
            )


def _parents(folder: Path) -> Iterator[Path]:
    """Yield the parents with and without links resolved: renaming one replaces the folder."""
    yield from dict.fromkeys((*folder.parents, *folder.resolve().parents))


def _entries(folder: Path, levels: int) -> Iterator[Path]:
    yield folder
    if levels and folder.is_dir():
        for path in folder.iterdir():
            yield from _entries(path, levels - 1)


def _open_to_others(path: Path, *, is_parent: bool) -> str:
    """Return the reason why another user can change `path`, or an empty text."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""  # another process replaced its own entry meanwhile
    mode = stat.S_IMODE(status.st_mode)
    if is_parent:
        shared = bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
        return f"everybody can write to it (mode {mode:o})" if shared else ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if mode & stat.S_IWOTH:
        return f"everybody can write to it (mode {mode:o})"
    if mode & stat.S_IWGRP and not _own_group(status.st_gid):
        return f"its group can write to it (mode {mode:o})"
    return ""


def _own_group(gid: int) -> bool:
    """Return True if a group has no members but this user or root."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and not group.gr_mem
