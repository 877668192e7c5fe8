"""Where compiled kernels are kept, and who can write there.

numba's disk cache is code: an index file is unpickled and a shared object is run. Whoever can place
files there runs what they like in every process that imports the models, so a folder that others
can write to is refused before any kernel is loaded. Folders of this user or root are fine.
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
#: numba keeps a folder for each source folder below its cache, and files in these.
_LEVELS = 2
_BESIDE = "__pycache__"


def check_kernel_cache() -> None:
    """Refuse a cache of kernels that others can write to; `KernelCacheError` names it."""
    if numba.config.CACHE_DIR:
        folder = Path(numba.config.CACHE_DIR).absolute()
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
        check_private(folder)
        return
    # Beside the sources, which are code as well: the sticky world is refused, a team is not.
    sources = Path(__file__).parents[1]
    for cache in sources.rglob(_BESIDE):
        if cache.stat().st_mode & stat.S_IWOTH:
            raise KernelCacheError(f"{cache}: everybody can write to these kernels; {ADVICE}")
    user_wide = user_wide_cache()
    if not os.access(sources, os.W_OK) and user_wide.exists():
        check_private(user_wide)


def user_wide_cache() -> Path:
    """Where numba goes when it may not write beside the sources."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def folder_for(name: str, sources: Path) -> Path:
    """Where code that is compiled from a folder of sources is kept: folder `name` of
    NUMBA_CACHE_DIR, else __pycache__ beside them, else folder `name` where numba would go."""
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR).absolute() / name
    if os.access(sources, os.W_OK):
        return sources / _BESIDE
    return user_wide_cache() / name


@functools.cache
def made_private(folder: Path) -> Path:
    """The folder, made if it can be; refused where others can place files in it.

    That beside the sources was looked at with them, by `check_kernel_cache`: a team may share it.
    """
    ours = folder.name != _BESIDE
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700 if ours else 0o777, parents=True, exist_ok=True)
    if ours and folder.exists():
        check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder where somebody else can place a file, now or in the name of its parents."""
    for path in (*_parents(folder), *_entries(folder, _LEVELS)):
        why = _open_to_others(path, is_parent=path in folder.parents)
        if why:
            raise KernelCacheError(
                f"{path}: {why}, and compiled kernels in {folder} are run as code; {ADVICE}"
            )


def _parents(folder: Path) -> Iterator[Path]:
    """Folders above, links resolved as well: who can rename one can replace what is below."""
    yield from dict.fromkeys((*folder.parents, *folder.resolve().parents))


def _entries(folder: Path, levels: int) -> Iterator[Path]:
    yield folder
    if levels and folder.is_dir():
        for path in folder.iterdir():
            yield from _entries(path, levels - 1)


def _open_to_others(path: Path, *, is_parent: bool) -> str:
    """Why somebody else decides what lies at `path`; empty where nobody does."""
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
    """Whether a group holds nobody but this user or root, as the private groups of users do."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and not group.gr_mem
