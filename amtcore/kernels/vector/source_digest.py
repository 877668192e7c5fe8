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

# Names of the files that hold compiled functions.
COMPILED = frozenset({"simd.py", "transpose.py", "cpu.py", "adjoint.py"})


@functools.cache
def sources_digest() -> str:
    """Hash of every source that holds compiled functions.

    Raises:
        KernelCacheError: Others can write to the folder from which kernels would be loaded.
    """
    check_kernel_cache()
    kernels = Path(__file__).parents[1]
    sources = sorted(path for path in kernels.rglob("*.py") if path.name in COMPILED)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
