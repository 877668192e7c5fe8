"""Compiled kernels on disk: folders, who may write there, checksums, keys.

    <folder>/<kernel>-<hash of the key>.kernel    machine code for one kernel and its argument types
    <folder>/<kernel>-<hash of the key>.ptx       PTX of a GPU kernel

The key holds all that the code depends on: kernel, types, processor, the sources of all kernels,
and the versions of Python, numba and llvmlite. A file of other sources or of another processor has
another name and is never opened. A damaged file counts as missing.

Code in these folders is run, so a folder that other users can write to is refused. The folders:

    amtcore_kernels in NUMBA_CACHE_DIR, else __pycache__ beside the sources, else the user's cache
    amtcore_kernels in AMTCORE_KERNELS, which another machine has filled; only read, no PTX
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import grp
import hashlib
import logging
import os
import platform
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba

from amtcore.errors import KernelCacheError

#: Environment variable of a folder of kernels that were compiled before.
PREBUILT = "AMTCORE_KERNELS"
FOLDER = "amtcore_kernels"
ADVICE = "chmod -R go-w it, or set NUMBA_CACHE_DIR to a folder of your own"
KERNELS = Path(__file__).parents[1]
_COMPILER = KERNELS.parent / "numba_internals.py"
#: Marks of a source file that has compiled functions, or compiles them.
_COMPILED = (
    b"from numba", b"kernels.vector.jit import", b"numba_internals import", b"device_code import"
)  # fmt: skip
_BESIDE = "__pycache__"


@functools.cache
def sources_digest(folder: Path = KERNELS) -> str:
    """Hash the sources with compiled functions, here and in the folder of a plug-in's kernel.

    Raises:
        KernelCacheError: Others can write to the folder from which kernels would be loaded.
    """
    _check_kernel_cache()
    found = {*KERNELS.rglob("*.py"), _COMPILER, *folder.glob("*.py")}
    sources = [path.read_bytes() for path in sorted(found)]
    compiled = (text for text in sources if any(mark in text for mark in _COMPILED))
    return hashlib.sha256(b"".join(compiled)).hexdigest()


class KernelFiles:
    """The compiled code of one kernel, in place of numba's own cache.

    Args:
        function: The kernel's Python function, whose name tells its constants; see `jit`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__qualname__.replace("<locals>.", "")
        self._sources = Path(function.__code__.co_filename).parent
        code = hashlib.sha256(function.__code__.co_code).hexdigest()
        self._key = function.__module__, code

    def read(self, signature: str, machine: tuple[str, ...]) -> bytes | None:
        """Return the code from the first folder that has it, or None.

        Args:
            signature: The types of the arguments.
            machine: numba's description of the processor; its second item is the name.
        """
        name = self._file_name(signature, machine)
        prebuilt = prebuilt_folder()
        for folder in filter(None, (own_folder(), prebuilt)):
            code = _read(folder / name)
            if code is not None:
                return code
        if prebuilt is not None:
            _warn_once(
                f"{prebuilt.parent} lacks kernels for this processor ({machine[1]}) and these "
                "sources and versions, or they are damaged: they are compiled here; fill it again "
                "on such a machine"
            )
        return None

    def write(self, signature: str, machine: tuple[str, ...], code: bytes) -> None:
        """Keep the code. Where nothing can be written the next process compiles again."""
        _write(own_folder() / self._file_name(signature, machine), code)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from compiling this kernel meanwhile: they find it afterwards."""
        try:
            handle = os.open(own_folder() / f"{self._name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _file_name(self, signature: str, machine: tuple[str, ...]) -> str:
        key = self._key, signature, sources_digest(self._sources), machine
        return _file_name(self._name, "kernel", key)


def cached_ptx(name: str, key: str, compile: Callable[[], str]) -> str:
    """Return the PTX of a GPU kernel from the cache, or compile and cache it.

    Args:
        name: Begin of the file's name.
        key: All that the PTX depends on beside sources and compilers.
        compile: Returns the PTX.
    Raises:
        KernelCacheError: Others can write to the folder.
    """
    path = own_folder() / _file_name(name, "ptx", (key, sources_digest()))
    kept = _read(path)
    if kept is not None:
        return kept.decode()
    ptx = compile()
    _write(path, ptx.encode())
    return ptx


def _file_name(name: str, kind: str, key: object) -> str:
    python = platform.python_version_tuple()[:2]
    whole = repr((name, key, python, numba.__version__, llvmlite.__version__))
    return f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:40]}.{kind}"


def _read(path: Path) -> bytes | None:
    """Return the code of a file with the right checksum, else None."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return code if head == _head(code) else None


def _write(path: Path, code: bytes) -> None:
    """Replace a file atomically, if the folder can be written."""
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_head(code) + b"\n" + code)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _head(code: bytes) -> bytes:
    return f"amtcore kernel {hashlib.sha256(code).hexdigest()}".encode()


def own_folder() -> Path:
    """Return the folder in which this process keeps compiled code."""
    if numba.config.CACHE_DIR:
        return _made_private(Path(numba.config.CACHE_DIR).absolute() / FOLDER)
    if os.access(KERNELS, os.W_OK):
        return _made_private(KERNELS / _BESIDE)
    return _made_private(_user_wide_cache() / FOLDER)


def prebuilt_folder() -> Path | None:
    """Return the folder of kernels that were compiled before, if one is named.

    Raises:
        KernelCacheError: Others can write to it.
    """
    named = os.environ.get(PREBUILT)
    if not named:
        return None
    folder = Path(named).absolute() / FOLDER
    if not folder.is_dir():
        _warn_once(f"{PREBUILT}={named} holds no kernels: they are compiled here")
        return None
    return _made_private(folder)


@functools.cache
def _warn_once(line: str) -> None:
    logging.getLogger("amtcore").warning(line)


def _user_wide_cache() -> Path:
    """Return numba's cache folder if the folder of the sources is read-only."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def _check_kernel_cache() -> None:
    """Raise `KernelCacheError` if other users can write to the cache of kernels."""
    if numba.config.CACHE_DIR:
        folder = Path(numba.config.CACHE_DIR).absolute()
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
        check_private(folder)
        return
    # The cache beside the sources may be shared by a group, like the sources, but not by everybody.
    for cache in KERNELS.rglob(_BESIDE):
        if cache.stat().st_mode & stat.S_IWOTH:
            raise KernelCacheError(f"{cache}: everybody can write to these kernels; {ADVICE}")
    user_wide = _user_wide_cache()
    if not os.access(KERNELS, os.W_OK) and user_wide.exists():
        check_private(user_wide)


@functools.cache
def _made_private(folder: Path) -> Path:
    """Make a folder if possible, and raise if other users can write to it.

    `_check_kernel_cache` has checked `__pycache__` beside the sources, which a group may share.
    """
    ours = folder.name != _BESIDE
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700 if ours else 0o777, parents=True, exist_ok=True)
    if ours and folder.exists():
        check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise if another user can write to a folder or its files, or replace a parent folder."""
    # Parents with and without links resolved: renaming one of them replaces the folder.
    parents = dict.fromkeys((*folder.parents, *folder.resolve().parents))
    # Below lie files, or as in a cache that numba has filled, a folder for each source folder.
    for path in (*parents, folder, *folder.glob("*"), *folder.glob("*/*")):
        why = _open_to_others(path, is_parent=path in folder.parents)
        if why:
            raise KernelCacheError(
                f"{path}: {why}, and compiled kernels in {folder} are run as code; {ADVICE}"
            )


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
