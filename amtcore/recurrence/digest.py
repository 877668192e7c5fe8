"""A hash of the kernels' sources, which becomes part of the key of numba's disk cache.

By itself numba looks only at the file of the function it caches and would go on using code that
was compiled from an older version of a function it calls. Every cached kernel asks for the hash, so
this is also where the cache itself is looked at first.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from .kernel_cache import check_kernel_cache


@functools.cache
def sources_digest() -> str:
    """Hash of every source that holds compiled functions.

    Raises:
        KernelCacheError: Others can write to the folder from which kernels would be loaded.
    """
    check_kernel_cache()
    root = Path(__file__).parent
    sources = [root / "simd.py", root / "transpose.py"]
    sources += sorted(root.glob("*/cpu.py")) + sorted(root.glob("*/adjoint.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
