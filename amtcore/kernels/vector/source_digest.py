"""A hash of the kernels' sources, a part of the key of every compiled kernel on disk.

Every kernel needs the hash, so this module also checks the cache folder first.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from amtcore.kernels.vector.kernel_cache import check_kernel_cache

#: Marks of a source file that has compiled functions, or compiles them.
_COMPILED = (b"from numba", b"kernels.vector.jit import", b"numba_internals import")
KERNELS = Path(__file__).parents[1]
_COMPILER = KERNELS.parent / "numba_internals.py"


@functools.cache
def sources_digest(folder: Path = KERNELS) -> str:
    """Hash the sources with compiled functions, here and in the folder of a plug-in's kernel.

    Raises:
        KernelCacheError: Others can write to the folder from which kernels would be loaded.
    """
    check_kernel_cache()
    found = {*KERNELS.rglob("*.py"), _COMPILER, *folder.glob("*.py")}
    sources = [path.read_bytes() for path in sorted(found)]
    compiled = (text for text in sources if any(mark in text for mark in _COMPILED))
    return hashlib.sha256(b"".join(compiled)).hexdigest()
