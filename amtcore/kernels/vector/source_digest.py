"""A hash of the kernels' sources, which becomes part of the key of numba's disk cache.

By itself numba looks only at the file of the function it caches and would go on using code that
was compiled from an older version of a function it calls. Every cached kernel asks for the hash, so
this is also where the cache itself is looked at first.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from amtcore.kernels.vector.kernel_cache import check_kernel_cache

#: What is in every file that holds compiled functions.
_COMPILED = b"from numba"


@functools.cache
def sources_digest() -> str:
    """Hash of every source that holds compiled functions.

    Raises:
        KernelCacheError: Others can write to the folder from which kernels would be loaded.
    """
    check_kernel_cache()
    kernels = Path(__file__).parents[1]
    sources = [path.read_bytes() for path in sorted(kernels.rglob("*.py"))]
    return hashlib.sha256(b"".join(text for text in sources if _COMPILED in text)).hexdigest()
