"""How kernels are compiled: each of them once, together with all it is made of.

A kernel is a few dozen small functions. numba makes machine code of every function by itself, with
wrappers to call it by: most of a compilation went into code that only ever runs inside a kernel.
Here are two kinds instead:

    part     typed and lowered where a kernel calls it; one for all constants it is called with
    kernel   called by Python: takes its parts in, is optimised once as a whole and kept on disk

What is a part belongs to no machine, so `kernels.warp` compiles parts for a GPU as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import codegen, compiler, sigutils
from numba.core.registry import CPUDispatcher
from numba.core.target_extension import (
    CPU,
    JitDecorator,
    dispatcher_registry,
    jit_registry,
    target_registry,
)

from amtcore.kernels.vector.kernel_files import KernelFiles
from amtcore.kernels.vector.source_digest import sources_digest

_NAME = "amtcore parts"
_PART = {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_KERNEL = {"nopython": True, "nogil": True, "no_cfunc_wrapper": True}


class _Parts(CPU):
    """Functions inside a kernel; everything numba has for a processor is theirs too."""


class _PartLibrary(codegen.JITCodeLibrary):
    """LLVM IR, simplified function by function (without that kernels come out 5 % slower): the
    kernel that takes it in is optimised as a whole."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _KernelCompiler(compiler.Compiler):
    """numba's compiler, whose own functions become parts as well."""

    def __init__(self, typing: Any, target: Any, *rest: Any) -> None:
        super().__init__(typing, target.subtarget(target=_Parts), *rest)


class _PartCompiler(_KernelCompiler):
    """The same, ending with LLVM IR."""

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        made = _PartLibrary(target.codegen(), "part")
        super().__init__(typing, target.subtarget(get_executable=_name_of), made, *rest)


def _name_of(library: Any, fndesc: Any, environment: Any) -> Callable[..., Any]:
    """What callers find a part by, in place of the function that Python would call."""
    return functools.partial(_refuse, fndesc.qualname, (library, environment))


def _refuse(name: str, *_: Any) -> Any:
    raise TypeError(f"{name} is a part of kernels: expected a call from a compiled function")


class _Dispatcher(CPUDispatcher):
    """A function that compiles as a part, as do numba's own that it needs."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=options | _PART, pipeline_class=_PartCompiler)

    def add_overload(self, cres: Any) -> None:
        """As numba calls it; Python finds nothing to call."""
        self.overloads[tuple(cres.signature.args)] = cres

    def _compile_for_args(self, *args: Any, **kwargs: Any) -> Any:
        _refuse(self.py_func.__qualname__)


class _Part(_Dispatcher):
    """A part as it is written here."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """One function for all constants: they arrive when it becomes part of a kernel."""
        return super().get_call_template(
            tuple(map(types.unliteral, args)), {k: types.unliteral(v) for k, v in kws.items()}
        )


class _Jit(JitDecorator):
    """How numba compiles the bodies of its own overloads inside a kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kwargs = kwargs

    def __call__(self, function: Any) -> Any:
        return _Dispatcher(function, {k: v for k, v in self._kwargs.items() if k != "target"})


target_registry[_NAME] = _Parts
dispatcher_registry[target_registry[_NAME]] = _Dispatcher
jit_registry[target_registry[_NAME]] = _Jit


class _Kernel(CPUDispatcher):
    """A function that Python calls, compiled on first use."""

    def compile(self, sig: Any) -> Any:
        """As numba calls it where a call with these types is met."""
        args = tuple(sigutils.normalize_signature(sig)[0])
        if args in self.overloads:
            return self.overloads[args].entry_point
        with self._cache.alone():
            entry = super().compile(sig)
        made = self.overloads[args]
        for environment in made._find_referenced_environments():  # those of its parts
            made.library.codegen.set_env(environment.env_name, environment)
        return entry


def part(function: Any = None, **options: Any) -> Any:
    """Decorator of a function that kernels are made of.

    Args:
        options: numba's, `forceinline` for one.
    """
    if function is None:
        return functools.partial(part, **options)
    return _Part(function, options)


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
    made = _Kernel(function, targetoptions=_KERNEL, pipeline_class=_KernelCompiler)
    made._cache = KernelFiles(function, key)
    return made
