"""How kernels are compiled: each of them once, together with all it is made of.

A kernel is a few dozen small functions. numba makes machine code of every function by itself, with
wrappers to call it by: most of a compilation went into code that only ever runs inside a kernel.
Here are two kinds instead:

    part     typed and lowered where a kernel calls it; one for all constants it is called with
    kernel   called by Python: takes its parts in, is optimised once as a whole and kept on disk

What is a part belongs to no machine, so `kernels.gpu` compiles parts for a GPU as well. How numba
is brought to this is in `amtcore.numba_internals`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from amtcore.kernels.vector.kernel_files import KernelFiles
from amtcore.kernels.vector.source_digest import sources_digest
from amtcore.numba_internals import Kernel, Part


def _with_key(function: Callable[..., Any], key: str | None) -> Callable[..., Any]:
    """The function, whose name in machine code says what its code depends on.

    numba numbers functions of one name in the order in which a process compiles them. Code of two
    processes can so have one name, and code that is loaded later would run what came first.
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
        options: numba's, `forceinline` for one.
    """
    if function is None:
        return functools.partial(part, key=key, **options)
    return Part(_with_key(function, key), options)


def kernel(function: Any = None, *, key: str | None = None) -> Any:
    """Decorator of what Python calls: compiled for the types it is called with, kept on disk; runs
    without the interpreter's lock.

    Args:
        key: What its code depends on beside sources and types; None is the constants around it.
    Raises:
        KernelCacheError: Others can write to the folder from which it would be loaded.
    """
    if function is None:
        return functools.partial(kernel, key=key)
    sources_digest()
    _with_key(function, key)
    return Kernel(function, KernelFiles(function, key))
