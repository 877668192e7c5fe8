"""Compiled kernels: made on first use, kept in memory and on disk.

What a kernel is made of is its key, together with the hash of all kernel sources; numba's front end
takes seconds, the text on disk none.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from amtcore.kernels.warp.assemble import ARCHITECTURE, assemble
from amtcore.kernels.warp.launching import Kernel
from amtcore.kernels.warp.ptx_cache import cached_ptx
from amtcore.kernels.warp.target import count_parameters, lower

_lock = threading.Lock()
_kernels: dict[str, Kernel] = {}


def compiled(
    what: str,
    key: object,
    make: Callable[[], Callable[..., None]],
    warps: int,
) -> Kernel:
    """A kernel by its key.

    Args:
        what: A word for it, which begins its name.
        key: All that its code depends on beside the sources; its `repr` counts.
        make: Builds the Python function, where the kernel is not there yet.
        warps: Of a multiprocessor that its registers must leave room for.
    """
    text = f"{what} {key!r} {warps} {ARCHITECTURE}"
    with _lock:
        if text not in _kernels:
            name = f"{what}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"

            def compile_now() -> str:
                function = make()
                module, inner = lower(function)
                return assemble(module, inner, name, count_parameters(function), warps)

            _kernels[text] = Kernel(name, cached_ptx(text, compile_now))
        return _kernels[text]
