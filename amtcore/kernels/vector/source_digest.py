"""A hash of the kernels' sources, which is part of the key of every compiled kernel on disk.

Every kernel asks for the hash, so this is also where the cache itself is looked at first.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from amtcore.kernels.vector.kernel_cache import check_kernel_cache

#: A file that holds compiled functions, or compiles them, contains one of these.
_COMPILED = (b"from numba", b"kernels.vector.jit import", b"numba_internals import")
KERNELS = Path(__file__).parents[1]
_COMPILER = KERNELS.parent / "numba_internals.py"


@functools.cache
def sources_digest(folder: Path = KERNELS) -> str:
    """Hash of the sources with compiled functions: of all kernels here, and beside another one.

    Args:
        folder: Of the kernel's source, which may be another distribution's.
    Raises:
        KernelCacheError: Others can write to the folder from which kernels would be loaded.
    """
    check_kernel_cache()
    found = {*KERNELS.rglob("*.py"), _COMPILER, *folder.glob("*.py")}
    sources = [path.read_bytes() for path in sorted(found)]
    compiled = (text for text in sources if any(mark in text for mark in _COMPILED))
    return hashlib.sha256(b"".join(compiled)).hexdigest()
