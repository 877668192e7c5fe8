"""Names that numba keeps to itself, in one place, each with the reason why we need it.

The rest of `amtcore` uses numba and llvmlite by their public names. A release of numba may rename
an internal name. Therefore all of them are looked up when this module is imported. The import fails
and tells which name is missing, before anything is compiled. `make core-versions` tries the oldest
and the newest release of numba.

What the names are needed for:

    Part            A function inside a kernel. It becomes LLVM IR, without machine code of its own.
    Kernel          A function that Python calls. Its machine code is kept on disk.
    lower_to_text   LLVM IR of a kernel and all it calls, for one thread of a GPU.
"""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numba
from llvmlite import ir
from numba import types

#: The release of numba with which all tests ran. With 0.62.0, the oldest that is allowed, a test of
#: GPU kernels fails (`test_gpu_kernels.py`, faults).
TRIED = "0.68.1"
#: Every internal name of numba that we use, as module:name, with the reason.
NEEDED: dict[str, str] = {}


def _need(path: str, why: str) -> Any:
    """Look up an internal name of numba, given as module:name, and note it in `NEEDED`.

    Raises:
        ImportError: This release of numba has no such name.
    """
    NEEDED[path] = why
    module, _, name = path.partition(":")
    try:
        value = importlib.import_module(module)
        for each in name.split("."):
            value = getattr(value, each)
        return value
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"expected numba to have {name} in {module}, got numba {numba.__version__} without it; "
            f"install another release: amtcore was tried with numba {TRIED}"
        ) from error


# The compilation of kernels and parts.
_CPUDispatcher: Any = _need(
    "numba.core.registry:CPUDispatcher",
    "`numba.njit` returns an object of this class, but cannot be given a subclass. Parts must not "
    "be compiled once for each constant, and kernels have a cache of their own.",
)
_need(
    "numba.core.registry:CPUDispatcher.get_call_template",
    "Callers find the signature of a part here; no option of `numba.njit` ignores literal types.",
)
_need(
    "numba.core.registry:CPUDispatcher.add_overload",
    "This method makes a function callable from Python; a part has no machine code to be called.",
)
_NullCache: Any = _need(
    "numba.core.caching:NullCache",
    "Kernels replace the cache of `numba.njit`, whose key lacks the sources of the functions that "
    "a kernel calls: old code would run after such a source has changed.",
)
_Compiler: Any = _need(
    "numba.core.compiler:Compiler",
    "The option `pipeline_class` of `numba.njit` expects a subclass of it; the public "
    "`CompilerBase` has no passes.",
)
_CompileResult: Any = _need(
    "numba.core.compiler:CompileResult",
    "Loaded code becomes an object of this class; only `numba.njit(cache=True)` makes it publicly.",
)
_need(
    "numba.core.compiler:CompileResult._reduce",
    "No public method turns compiled code into bytes, which a cache of our own must write.",
)
_need(
    "numba.core.compiler:CompileResult._rebuild",
    "No public method loads the compiled code that `_reduce` gave.",
)
_need(
    "numba.core.compiler:CompileResult._find_referenced_environments",
    "Constants of parts are registered only for functions that Python calls, and for loaded code.",
)
_dumps: Any = _need(
    "numba.core.serialize:dumps",
    "`pickle.dumps` cannot write the modules and functions that compiled code refers to.",
)
_rtsys: Any = _need(
    "numba.core.runtime:rtsys",
    "Loaded code calls numba's memory manager, which numba starts only when it compiles.",
)
_JITCodeLibrary: Any = _need(
    "numba.core.codegen:JITCodeLibrary",
    "No option keeps numba from making machine code of every function; the parts of a kernel would "
    "be optimised and compiled twice.",
)
_need(
    "numba.core.codegen:CPUCodeLibrary._optimize_final_module",
    "This step optimises a function on its own, for the processor. A part is optimised inside its "
    "kernel, and code for a GPU by LLVM's optimiser for GPUs.",
)
_need(
    "numba.core.codegen:CPUCodeLibrary._finalize_final_module",
    "This step makes machine code.",
)
_need(
    "numba.core.codegen:CPUCodeLibrary._finalize_dynamic_globals",
    "The replaced step also notes addresses of this process, with which code must not be kept.",
)

# The second target, for threads of a GPU. `numba.extending` cannot define a target.
_CPU: Any = _need(
    "numba.core.target_extension:CPU",
    "A target that derives from it inherits everything that numba has for processors.",
)
_target_registry: Any = _need(
    "numba.core.target_extension:target_registry",
    "Targets are found here by name.",
)
_dispatcher_registry: Any = _need(
    "numba.core.target_extension:dispatcher_registry",
    "numba finds the dispatcher of a target here.",
)
_jit_registry: Any = _need(
    "numba.core.target_extension:jit_registry",
    "numba finds the decorator for the bodies of its own `overload` functions here.",
)
_target_override: Any = _need(
    "numba.core.target_extension:target_override",
    "Compilation for another target than the processor begins with it.",
)
_Dispatcher: Any = _need(
    "numba.core.dispatcher:Dispatcher",
    "A function that code for another target calls must be one.",
)
_TargetDescriptor: Any = _need(
    "numba.core.descriptors:TargetDescriptor",
    "A dispatcher finds the contexts of its target in one.",
)
_TypingContext: Any = _need(
    "numba.core.typing:Context",
    "It resolves the functions that a kernel calls; for another target these are other objects.",
)
_CPUContext: Any = _need(
    "numba.core.cpu:CPUContext",
    "It lowers typed code; for a GPU without reference counts and without calls of C.",
)
_CPUTargetOptions: Any = _need(
    "numba.core.cpu:CPUTargetOptions",
    "A target needs the options that its functions take.",
)
_default_manager: Any = _need(
    "numba.core.datamodel:default_manager",
    "`register_model` sets a model for all targets; a vector has another model on a GPU.",
)
_AOTCPUCodegen: Any = _need(
    "numba.core.codegen:AOTCPUCodegen",
    "It makes modules of LLVM IR that are not loaded into the process.",
)
_need(
    "numba.core.codegen:AOTCPUCodegen._library_class",
    "The library below replaces the one that optimises for a processor.",
)
_AOTCodeLibrary: Any = _need(
    "numba.core.codegen:AOTCodeLibrary",
    "It links a function with all that it calls.",
)
_need(
    "numba.core.codegen:CPUCodeLibrary._optimize_functions",
    "This step optimises for the processor too.",
)
_need(
    "numba.core.codegen:AOTCodeLibrary._ensure_finalized",
    "The text of a module is complete only after this step.",
)
_compile_extra: Any = _need(
    "numba.core.compiler:compile_extra",
    "`numba.njit` compiles for the processor only.",
)
_Flags: Any = _need(
    "numba.core.compiler:Flags",
    "`compile_extra` takes its options in one.",
)
#: The lock under which numba and llvmlite compile. Callers of LLVM need it as well, because LLVM's
#: own state is shared, and numba has no public name for it.
compiler_lock: Any = _need(
    "numba.core.compiler_lock:global_compiler_lock",
    "LLVM must not compile in two threads at a time.",
)
_need(
    "numba.core.base:BaseContext.make_array",
    "Intrinsics read the address of an array's numbers, and make arrays on memory of a GPU. "
    "`numba.extending` has no name for either, and an intrinsic cannot call `numba.carray`.",
)
_need(
    "numba.core.cgutils:_StructProxy._getvalue",
    "numba's own documentation of extensions ends with this method; it has no public name.",
)


def array_data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Return the pointer to an array's first number, in the code of an intrinsic."""
    return context.make_array(array_type)(context, builder, array).data


def flat_array(context: Any, builder: Any, array_type: Any, data: Any, count: int) -> Any:
    """Return a flat array over memory that nobody owns, in the code of an intrinsic."""
    nitems = context.get_constant(types.intp, count)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(data.type.pointee))
    one_axis = ir.ArrayType(nitems.type, 1)
    array = context.make_array(array_type)(context, builder)
    array.data, array.nitems, array.itemsize = data, nitems, itemsize
    array.shape, array.strides = ir.Constant(one_axis, [nitems]), ir.Constant(one_axis, [itemsize])
    return array._getvalue()


_PART_OPTIONS = {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_KERNEL_OPTIONS = {"nopython": True, "nogil": True, "no_cfunc_wrapper": True}


class _PartsTarget(_CPU):
    """The target of parts: a processor, under another name."""


class _PartLibrary(_JITCodeLibrary):
    """LLVM IR, simplified function by function: without this, kernels come out 5 % slower."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _KernelCompiler(_Compiler):
    """numba's compiler; the functions of numba that a kernel calls become parts."""

    def __init__(self, typing: Any, target: Any, *rest: Any) -> None:
        super().__init__(typing, target.subtarget(target=_PartsTarget), *rest)


class _PartCompiler(_KernelCompiler):
    """numba's compiler up to LLVM IR."""

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        part_library = _PartLibrary(target.codegen(), "part")
        part_target = target.subtarget(get_executable=_refusal_of)
        super().__init__(typing, part_target, part_library, *rest)


def _refusal_of(library: Any, fndesc: Any, environment: Any) -> Callable[..., Any]:
    """Return what stands for a part in place of a function that Python can call."""
    return functools.partial(_refuse, fndesc.qualname, (library, environment))


def _refuse(name: str, *_: Any) -> Any:
    raise TypeError(f"{name} is a part of kernels: expected a call from a compiled function")


class _PartDispatcher(_CPUDispatcher):
    """A function that compiles as a part, such as the functions of numba that a part calls."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        options = {**options, **_PART_OPTIONS}
        super().__init__(function, targetoptions=options, pipeline_class=_PartCompiler)

    def add_overload(self, cres: Any) -> None:
        """Note a compiled signature, for compiled callers only; numba calls this method."""
        self.overloads[tuple(cres.signature.args)] = cres


class _ForAnyConstant:
    """A dispatcher that compiles one function for all constants of a type.

    Constants arrive when the function is optimised inside its kernel.
    """

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the signature for these types of arguments; numba calls this method."""
        named = {name: types.unliteral(kind) for name, kind in kws.items()}
        return super().get_call_template(  # type: ignore[misc]
            tuple(map(types.unliteral, args)), named
        )


class Part(_ForAnyConstant, _PartDispatcher):
    """A part of kernels.

    Args:
        function: The function.
        options: Options of `numba.njit`.
    """


class KernelStore(Protocol):
    """The place where the machine code of one kernel is kept."""

    @property
    def cache_path(self) -> str:
        """The folder, for numba's statistics."""

    def read(self, signature: str, machine: tuple[str, ...]) -> bytes | None:
        """Return the code for these types of arguments and this machine, or None."""

    def write(self, signature: str, machine: tuple[str, ...], code: bytes) -> None:
        """Keep the code for these types of arguments and this machine."""

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes from compiling this kernel meanwhile."""


class _Cache(_NullCache):
    """A `KernelStore` as numba uses a cache."""

    def __init__(self, store: KernelStore) -> None:
        self._store = store

    @property
    def cache_path(self) -> str:
        """The folder, for numba's statistics."""
        return self._store.cache_path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled kernel for these types, or None."""
        # Compiling needs more of numba, which takes half a second to import.
        _rtsys.initialize(target_context)
        code = self._store.read(str(sig), target_context.codegen().magic_tuple())
        if code is None:
            return None
        return _CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel, unless it holds addresses of this process."""
        if not data.library.has_dynamic_globals:
            self._store.write(str(sig), data.codegen.magic_tuple(), _dumps(data._reduce()))


class Kernel(_CPUDispatcher):
    """A function that Python calls; it is compiled on first use, and runs without Python's lock.

    Args:
        function: The function.
        store: The place where its machine code is kept.
    """

    def __init__(self, function: Callable[..., Any], store: KernelStore) -> None:
        super().__init__(function, targetoptions=_KERNEL_OPTIONS, pipeline_class=_KernelCompiler)
        self._store, self._cache = store, _Cache(store)

    def compile(self, sig: Any) -> Any:
        """Compile or load the kernel for these types of arguments; numba calls this method."""
        args = tuple(sig)
        if args in self.overloads:
            return self.overloads[args].entry_point
        with self._store.alone():
            entry = super().compile(args)
        compiled = self.overloads[args]
        for environment in compiled._find_referenced_environments():  # constants of its parts
            compiled.library.codegen.set_env(environment.env_name, environment)
        return entry


def _register_target(name: str, target: type, dispatcher: type, make: Callable[..., Any]) -> None:
    """Make a target known to numba; `make(options, function)` compiles bodies of overloads."""

    def jit(**options: Any) -> Callable[..., Any]:
        options.pop("target", None)
        return functools.partial(make, options)

    _target_registry[name] = target
    _dispatcher_registry[_target_registry[name]] = dispatcher
    _jit_registry[_target_registry[name]] = jit


_register_target(
    "amtcore parts",
    _PartsTarget,
    _PartDispatcher,
    lambda options, function: _PartDispatcher(function, options),
)

# The target below lowers for one thread of a GPU. It takes arrays, tuples, integers and loops from
# the processor's target. A GPU has no exceptions, no reference counts and no C functions.

_THREAD = "amtcore warp"
_THREAD_OPTIONS = {"nopython": True, "error_model": "numpy"}
_thread_models: dict[type, type] = {}


def set_thread_model(kind: type, model: type) -> None:
    """Set how a type is held by one thread of a GPU, in place of its registered model."""
    _thread_models[kind] = model


class _ThreadTarget(_CPU):
    """The target of code for a GPU; it inherits what numba has for processors."""


class _ThreadLibrary(_AOTCodeLibrary):
    """LLVM IR as it was lowered: its optimiser must know the GPU."""

    def _optimize_functions(self, ll_module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        pass


class _ThreadCodegen(_AOTCPUCodegen):
    _library_class = _ThreadLibrary


class _ThreadContext(_CPUContext):
    """Lowering for one thread."""

    lanes_are_threads = True
    enable_nrt = False

    @compiler_lock
    def init(self) -> None:
        """Set up the context; numba calls this method once."""
        self.is32bit = False
        self._internal_codegen = _ThreadCodegen(_THREAD, cpu_name="x86-64")
        manager = _default_manager.copy()
        for kind, model in _thread_models.items():
            manager.register(kind, model)
        self.data_model_manager = manager

    def post_lowering(self, mod: Any, library: Any) -> None:
        """Link nothing: there are no C functions on a GPU."""

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        """Return what stands for a function that Python cannot call."""
        return lambda: fndesc


class _ThreadTyping(_TypingContext):
    """Types of code for a GPU. Functions compiled for a processor stand for their twins."""

    def resolve_value_type(self, value: Any) -> Any:
        """Return the type of a global value; numba calls this method."""
        return super().resolve_value_type(
            _twin(value) if isinstance(value, _CPUDispatcher) else value
        )


class _ThreadDescriptor(_TargetDescriptor):
    options = _CPUTargetOptions

    @functools.cached_property
    def typing_context(self) -> Any:
        return _ThreadTyping()

    @functools.cached_property
    def target_context(self) -> Any:
        return _ThreadContext(self.typing_context, _THREAD)


_DESCRIPTOR = _ThreadDescriptor(_THREAD)


class _ThreadDispatcher(_ForAnyConstant, _Dispatcher):
    """A function that code for a GPU calls."""

    targetdescr = _DESCRIPTOR

    def compile(self, sig: Any) -> Any:
        """Lower the function for these types of arguments; numba calls this method."""
        args = tuple(sig)
        if args not in self.overloads:
            lowered = _lower(self.py_func, args, None)
            self.overloads[args] = lowered
            lowered.target_context.insert_user_function(
                lowered.entry_point, lowered.fndesc, [lowered.library]
            )
        return self.overloads[args].entry_point


_register_target(
    _THREAD,
    _ThreadTarget,
    _ThreadDispatcher,
    lambda options, function: _ThreadDispatcher(function, targetoptions=options | _THREAD_OPTIONS),
)


@functools.cache
def _twin(function: Any) -> _ThreadDispatcher:
    """Return the dispatcher for GPUs of a function that was compiled for a processor."""
    return _ThreadDispatcher(function.py_func, targetoptions=_THREAD_OPTIONS)


def _lower(function: Callable[..., Any], args: Sequence[Any], result: Any) -> Any:
    flags = _Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    typing, context = _DESCRIPTOR.typing_context, _DESCRIPTOR.target_context
    context.refresh()
    typing.refresh()
    with _target_override(_THREAD):
        return _compile_extra(typing, context, function, tuple(args), result, flags, {})


def lower_to_text(
    function: Callable[..., Any], args: Sequence[Any], result: Any
) -> tuple[str, str]:
    """Lower a function and all it calls for one thread of a GPU.

    Args:
        function: A Python function.
        args: numba's types of its arguments.
        result: numba's type of its result.
    Returns:
        LLVM IR of the module, not optimised, and the name of the function in it. numba calls that
        function with two pointers, for a result and an exception, before the arguments.
    """
    lowered = _lower(function, args, result)
    with compiler_lock:
        lowered.library._ensure_finalized()
        return lowered.library.get_llvm_str(), lowered.fndesc.llvm_func_name
