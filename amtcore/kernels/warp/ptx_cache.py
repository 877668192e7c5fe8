"""PTX on disk, beside numba's cache of the CPU's kernels, so that it is compiled once a machine.

    <folder>/<hash of the kernel's key>.ptx:
        // earmill ptx <hash of sources and compilers> <sha256 of what follows>
        the PTX, which takes the first line for a comment

The folder is `earmill_ptx` in NUMBA_CACHE_DIR if that is set, else `__pycache__` beside this file,
else numba's user-wide folder. PTX is code: who can write there is checked as for numba's files. A
file of other sources or compilers, and one that is damaged, is written anew; where nothing can be
written every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba

from amtcore.kernels.vector import whole_files
from amtcore.kernels.vector.kernel_cache import check_private, user_wide_cache
from amtcore.kernels.vector.source_digest import sources_digest

_FOLDER = "earmill_ptx"
_MARK = "// earmill ptx"


def cached_ptx(key: str, compile: Callable[[], str]) -> str:
    """The PTX of a kernel: from the cache, else compiled and kept there.

    Args:
        key: All that decides the text beside the sources: entry, options, architecture.
        compile: Makes it.
    Raises:
        KernelCacheError: Others can write to the folder.
    """
    folder = _private_folder(cache_folder())
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.ptx"
    made_by = _made_by()
    kept = whole_files.read(path, f"{_MARK} {made_by}")
    if kept is not None:
        return kept.decode()
    ptx = compile()
    with contextlib.suppress(OSError):  # no cache: the next process compiles again
        whole_files.write(path, f"{_MARK} {made_by}", ptx.encode())
    return ptx


@functools.cache
def _made_by() -> str:
    """Hash of what makes PTX from a key: sources of the kernels and of this room, compilers."""
    digest = hashlib.sha256(sources_digest().encode())
    digest.update(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where numba would put compiled code of this file."""
    beside = Path(__file__).parent
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR).absolute() / _FOLDER
    if os.access(beside, os.W_OK):
        return beside / "__pycache__"
    return user_wide_cache() / _FOLDER


@functools.cache
def _private_folder(folder: Path) -> Path:
    """The folder, made if it can be; refused where others can place files in it.

    That beside the sources was looked at with them, by `sources_digest`: a team may share it.
    """
    ours = folder.name == _FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700 if ours else 0o777, parents=True, exist_ok=True)
    if ours and folder.exists():
        check_private(folder)
    return folder
