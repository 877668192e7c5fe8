"""How kernels are compiled: each of them once, together with all that it calls.

A kernel is a few dozen small functions. By itself numba compiles every function to machine code
with wrappers. Most of that code would only run inside a kernel. Here are two kinds instead:

    part     typed and lowered where a kernel calls it, once for all constants
    kernel   called by Python: optimised once as a whole with its parts, and kept on disk

A part belongs to no machine, so `kernels.gpu` compiles parts for a GPU as well.
`amtcore.numba_internals` makes numba do this.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from amtcore.kernels.vector.kernel_cache import KernelFiles, sources_digest
from amtcore.numba_internals import Kernel, Part


def _with_key(function: Callable[..., Any], key: str | None) -> Callable[..., Any]:
    """Put a hash of what the code depends on into the function's name in machine code.

    Functions of one name get numbers in the order in which a process compiles them. Without the
    hash, code of two processes can have one name. Code that is loaded later would then run the code
    that came first.
    """
    if key is None and function.__closure__:
        key = repr([cell.cell_contents for cell in function.__closure__])
    if key:
        function.__qualname__ += "_" + hashlib.sha256(key.encode()).hexdigest()[:12]
    return function


def part(function: Any = None, *, key: str | None = None, **options: Any) -> Any:
    """Decorator of a function that kernels are made of.

    Args:
        key: What its code depends on beside sources and types; None is the constants around it.
        options: Options of numba, such as `forceinline`.
    """
    if function is None:
        return functools.partial(part, key=key, **options)
    return Part(_with_key(function, key), options)


def kernel(function: Any = None, *, key: str | None = None) -> Any:
    """Decorator of a function that Python calls; it runs without the interpreter's lock.

    Args:
        key: What its code depends on beside sources and types; None is the constants around it.
    Raises:
        KernelCacheError: Others can write to the folder from which the kernel would be loaded.
    """
    if function is None:
        return functools.partial(kernel, key=key)
    sources_digest()
    return Kernel(_with_key(function, key), KernelFiles(function))
