"""A numba target for one thread of a warp: the block functions' front end, unchanged.

numba types and lowers the same Python functions once more, with a context in which a vector is one
number (`lanes_are_threads`); `assemble` makes PTX of the LLVM IR. Everything else is a processor's:
arrays, tuples, integers, loops. There are no exceptions, no reference counts and no calls of C.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from numba import types
from numba.core import codegen, compiler, cpu, sigutils, typing
from numba.core.compiler_lock import global_compiler_lock
from numba.core.datamodel import default_manager
from numba.core.datamodel.models import PrimitiveModel
from numba.core.descriptors import TargetDescriptor
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher
from numba.core.target_extension import (
    CPU,
    JitDecorator,
    dispatcher_registry,
    jit_registry,
    target_override,
    target_registry,
)

from amtcore.kernels.vector.simd import VecType

_NAME = "amtcore warp"


class _Warp(CPU):
    """The target's place among numba's: what is made for any target, or a processor, is its too."""


class _OneNumber(PrimitiveModel):
    """A vector as a thread holds it."""

    def __init__(self, manager: Any, vec: VecType) -> None:
        super().__init__(manager, vec, manager.lookup(vec.scalar).get_value_type())


class _Library(codegen.AOTCodeLibrary):
    """LLVM IR as it was lowered: its optimiser must know the machine, and that is no processor."""

    def _optimize_functions(self, ll_module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        pass


class _Codegen(codegen.AOTCPUCodegen):
    _library_class = _Library


class _Context(cpu.CPUContext):
    """Lowering for one thread."""

    lanes_are_threads = True
    enable_nrt = False

    @global_compiler_lock
    def init(self) -> None:
        """As numba calls it, once."""
        self.is32bit = False
        self._internal_codegen = _Codegen(_NAME, cpu_name="x86-64")
        own_models: Any = default_manager.copy()
        own_models.register(VecType, _OneNumber)
        self.data_model_manager = own_models

    def post_lowering(self, mod: Any, library: Any) -> None:
        """Nothing is linked to C functions."""

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        """Nothing here can be called by Python."""
        return lambda: fndesc


class _Typing(typing.Context):
    """A function compiled for a processor stands for the same function of this target."""

    def resolve_value_type(self, value: Any) -> Any:
        if isinstance(value, CPUDispatcher):
            value = _twin(value)
        return super().resolve_value_type(value)


class _Descriptor(TargetDescriptor):
    options = cpu.CPUTargetOptions

    @cached_property
    def typing_context(self) -> Any:
        return _Typing()

    @cached_property
    def target_context(self) -> Any:
        return _Context(self.typing_context, _NAME)


_TARGET = _Descriptor(_NAME)
_OPTIONS = {"nopython": True, "error_model": "numpy"}


class _Dispatcher(Dispatcher):
    """A function that others of this target call."""

    targetdescr = _TARGET

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """One compiled function for all constants: they arrive when it becomes part of a kernel."""
        return super().get_call_template(
            tuple(map(types.unliteral, args)), {k: types.unliteral(v) for k, v in kws.items()}
        )

    def compile(self, sig: Any) -> Any:
        """As numba calls it where a call with these types is met."""
        args, _ = sigutils.normalize_signature(sig)
        if args not in self.overloads:
            made = _compile(self.py_func, args, None)
            self.overloads[args] = made
            made.target_context.insert_user_function(made.entry_point, made.fndesc, [made.library])
        return self.overloads[args].entry_point


class _Jit(JitDecorator):
    """How numba compiles the bodies of its own overloads for this target."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kwargs = kwargs

    def __call__(self, function: Any) -> Any:
        given = {key: value for key, value in self._kwargs.items() if key != "target"}
        return _Dispatcher(function, targetoptions={**given, **_OPTIONS})


target_registry[_NAME] = _Warp
dispatcher_registry[target_registry[_NAME]] = _Dispatcher
jit_registry[target_registry[_NAME]] = _Jit

_twins: dict[CPUDispatcher, _Dispatcher] = {}


def _twin(function: CPUDispatcher) -> _Dispatcher:
    """The same Python function for this target."""
    if function not in _twins:
        _twins[function] = _Dispatcher(function.py_func, targetoptions=_OPTIONS)
    return _twins[function]


def _compile(function: Callable[..., Any], args: Sequence[Any], result: Any) -> Any:
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    _TARGET.target_context.refresh()
    _TARGET.typing_context.refresh()
    with target_override(_NAME):
        return compiler.compile_extra(
            _TARGET.typing_context, _TARGET.target_context, function, tuple(args), result, flags, {}
        )


def count_parameters(function: Callable[..., None]) -> int:
    """How many 64-bit integers a kernel takes."""
    return len(inspect.signature(function).parameters)


def lower(function: Callable[..., None]) -> tuple[str, str]:
    """LLVM IR of a kernel and of all it calls, not yet optimised.

    Args:
        function: A Python function of 64-bit integers; returns nothing.
    Returns:
        The module's text, and the name of the kernel's function in it, which numba calls with two
        pointers (for a result and an exception) before the parameters.
    """
    made = _compile(function, [types.int64] * count_parameters(function), types.void)
    with global_compiler_lock:
        made.library._ensure_finalized()
        return made.library.get_llvm_str(), made.fndesc.llvm_func_name
