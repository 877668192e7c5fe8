"""The disk cache of PTX, beside numba's cache of the CPU's kernels.

    <folder>/<hash of the kernel's key>.ptx:
        // amtcore ptx <hash of sources and compilers> <sha256 of the PTX>
        the PTX, to which the first line is a comment

The folder is `amtcore_ptx` in NUMBA_CACHE_DIR, else `__pycache__` beside this file, else numba's
user-wide folder. PTX is code, so folders that others can write to are refused. Outdated and damaged
files are replaced. Without a writable folder every process compiles its own PTX.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba

from amtcore.kernels.vector import whole_files
from amtcore.kernels.vector.kernel_cache import folder_for, made_private
from amtcore.kernels.vector.source_digest import sources_digest

_FOLDER = "amtcore_ptx"
_MARK = "// amtcore ptx"


def cached_ptx(key: str, compile: Callable[[], str]) -> str:
    """Return the PTX of a kernel from the cache, or compile and cache it.

    Args:
        key: Entry, options and architecture of the kernel.
        compile: Returns the PTX.
    Raises:
        KernelCacheError: Others can write to the folder.
    """
    folder = made_private(cache_folder())
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
    """Return a hash of the sources and compilers that the PTX depends on."""
    digest = hashlib.sha256(sources_digest().encode())
    digest.update(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder in which numba would cache compiled code of this file."""
    return folder_for(_FOLDER, Path(__file__).parent)
