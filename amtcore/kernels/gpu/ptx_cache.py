"""PTX on disk, beside numba's cache of the CPU's kernels, so that it is compiled once a machine.

    <folder>/<hash of the kernel's key>.ptx:
        // amtcore ptx <hash of sources and compilers> <sha256 of what follows>
        the PTX, which takes the first line for a comment

The folder is `amtcore_ptx` in NUMBA_CACHE_DIR if that is set, else `__pycache__` beside this file,
else numba's user-wide folder. PTX is code: who can write there is checked as for numba's files. A
file of other sources or compilers, and one that is damaged, is written anew; where nothing can be
written every process compiles for itself.
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
    """The PTX of a kernel: from the cache, else compiled and kept there.

    Args:
        key: All that decides the text beside the sources: entry, options, architecture.
        compile: Makes it.
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
    """Hash of what makes PTX from a key: sources of the kernels and of this room, compilers."""
    digest = hashlib.sha256(sources_digest().encode())
    digest.update(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where numba would put compiled code of this file."""
    return folder_for(_FOLDER, Path(__file__).parent)
