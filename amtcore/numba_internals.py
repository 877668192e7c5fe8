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
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numba
from llvmlite import ir
from numba import types

#: The release of numba with which all tests ran.
TRIED = "0.68.1"
#: Every internal name of numba that we use, as module:name, with the reason.
NEEDED = {
    # The compilation of kernels and parts.
    "numba.core.registry:CPUDispatcher":
        "`numba.njit` returns an object of this class and takes no subclass of it.",
    "numba.core.registry:CPUDispatcher.get_call_template":
        "No option of `numba.njit` compiles one function for all constants of a type.",
    "numba.core.registry:CPUDispatcher.add_overload":
        "It makes a function callable from Python; a part has no machine code to be called.",
    "numba.core.caching:NullCache":
        "The key of numba's own cache lacks the sources of functions that a kernel calls.",
    "numba.core.compiler:Compiler":
        "The option `pipeline_class` expects a subclass; the public `CompilerBase` has no passes.",
    "numba.core.compiler:CompileResult":
        "Loaded code becomes an object of this class; publicly only `cache=True` makes one.",
    "numba.core.compiler:CompileResult._reduce": "No public method turns compiled code into bytes.",
    "numba.core.compiler:CompileResult._rebuild":
        "No public method loads the compiled code that `_reduce` gave.",
    "numba.core.compiler:CompileResult._find_referenced_environments":
        "Constants of parts are registered only for functions that Python calls.",
    "numba.core.serialize:dumps":
        "`pickle.dumps` cannot write the modules and functions that compiled code refers to.",
    "numba.core.runtime:rtsys":
        "Loaded code calls numba's memory manager, which starts only when numba compiles.",
    "numba.core.codegen:JITCodeLibrary":
        "Without a library of our own every part would be optimised and compiled twice.",
    "numba.core.codegen:CPUCodeLibrary._optimize_final_module":
        "It optimises a function alone; a part is optimised in its kernel, or for a GPU.",
    "numba.core.codegen:CPUCodeLibrary._finalize_final_module": "This step makes machine code.",
    "numba.core.codegen:CPUCodeLibrary._finalize_dynamic_globals":
        "The replaced step also notes addresses of this process, which must not be kept on disk.",
    # The second target, for threads of a GPU. `numba.extending` cannot define a target.
    "numba.core.target_extension:CPU":
        "A target that derives from it inherits everything that numba has for processors.",
    "numba.core.target_extension:target_registry": "Targets are found here by name.",
    "numba.core.target_extension:dispatcher_registry":
        "numba finds the dispatcher of a target here.",
    "numba.core.target_extension:jit_registry":
        "numba finds the decorator for the bodies of its own `overload` functions here.",
    "numba.core.target_extension:target_override":
        "Compilation for another target than the processor begins with it.",
    "numba.core.dispatcher:Dispatcher":
        "A function that code for another target calls must be one.",
    "numba.core.descriptors:TargetDescriptor":
        "A dispatcher finds the contexts of its target in one.",
    "numba.core.typing:Context":
        "It finds the functions that a kernel calls, which are others on another target.",
    "numba.core.cpu:CPUContext":
        "It lowers typed code; for a GPU without reference counts and without calls of C.",
    "numba.core.cpu:CPUTargetOptions": "A target needs the options that its functions take.",
    "numba.core.datamodel:default_manager":
        "`register_model` sets a model for all targets; a vector has another model on a GPU.",
    "numba.core.codegen:AOTCPUCodegen":
        "It makes modules of LLVM IR that are not loaded into the process.",
    "numba.core.codegen:AOTCPUCodegen._library_class":
        "Our library replaces the one that optimises for a processor.",
    "numba.core.codegen:AOTCodeLibrary": "It links a function with all that it calls.",
    "numba.core.codegen:CPUCodeLibrary._optimize_functions":
        "This step optimises for the processor too.",
    "numba.core.codegen:AOTCodeLibrary._ensure_finalized":
        "The text of a module is complete only after this step.",
    "numba.core.compiler:compile_extra": "`numba.njit` compiles for the processor only.",
    "numba.core.compiler:Flags": "`compile_extra` takes its options in one.",
    "numba.core.compiler_lock:global_compiler_lock":
        "LLVM's own state is shared, so LLVM must not compile in two threads at a time.",
    "numba.core.base:BaseContext.make_array":
        "Intrinsics need the address of an array's numbers; `numba.extending` has no name for it.",
    "numba.core.cgutils:_StructProxy._getvalue":
        "numba's own documentation of extensions ends with this method, which has no public name.",
}  # fmt: skip


def _look_up(path: str) -> Any:
    """Return an internal name of numba, given as module:name."""
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"expected numba to have {name} in {module}, got numba {numba.__version__} without it; "
            f"install another release: amtcore was tried with numba {TRIED}"
        ) from error


#: The names by themselves, such as `_numba.CPUDispatcher`.
_numba: Any = SimpleNamespace(**{path.partition(":")[2]: _look_up(path) for path in NEEDED})
#: The lock under which numba and llvmlite compile; callers of LLVM need it as well.
compiler_lock: Any = _numba.global_compiler_lock


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


class _PartsTarget(_numba.CPU):
    """The target of parts: a processor, under another name."""


class _PartLibrary(_numba.JITCodeLibrary):
    """LLVM IR, simplified function by function: without this, kernels come out 5 % slower."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _KernelCompiler(_numba.Compiler):
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


class _PartDispatcher(_numba.CPUDispatcher):
    """A function that compiles as a part, such as the functions of numba that a part calls."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        options = {**options, **_PART_OPTIONS}
        super().__init__(function, targetoptions=options, pipeline_class=_PartCompiler)

    def add_overload(self, cres: Any) -> None:
        """Note a compiled signature, for compiled callers only; numba calls this method."""
        self.overloads[tuple(cres.signature.args)] = cres


class _ForAnyConstant:
    """A dispatcher of one function for all constants of a type; the optimiser inserts them."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the signature for these types of arguments; numba calls this method."""
        named = {name: types.unliteral(kind) for name, kind in kws.items()}
        plain = tuple(map(types.unliteral, args))
        return super().get_call_template(plain, named)  # type: ignore[misc]


class Part(_ForAnyConstant, _PartDispatcher):
    """A part of kernels, made of a function and options of `numba.njit`."""


class _Cache(_numba.NullCache):
    """A `KernelFiles` as numba uses a cache."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled kernel for these types, or None."""
        # Compiling needs more of numba, which takes half a second to import.
        _numba.rtsys.initialize(target_context)
        code = self._store.read(str(sig), target_context.codegen().magic_tuple())
        if code is None:
            return None
        return _numba.CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel, unless it holds addresses of this process."""
        if not data.library.has_dynamic_globals:
            self._store.write(str(sig), data.codegen.magic_tuple(), _numba.dumps(data._reduce()))


class Kernel(_numba.CPUDispatcher):
    """A function that Python calls; it is compiled on first use, and runs without Python's lock.

    A `kernel_cache.KernelFiles` keeps its machine code.
    """

    def __init__(self, function: Callable[..., Any], store: Any) -> None:
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

    _numba.target_registry[name] = target
    _numba.dispatcher_registry[_numba.target_registry[name]] = dispatcher
    _numba.jit_registry[_numba.target_registry[name]] = jit


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


class _ThreadTarget(_numba.CPU):
    """The target of code for a GPU; it inherits what numba has for processors."""


class _ThreadLibrary(_numba.AOTCodeLibrary):
    """LLVM IR as it was lowered: its optimiser must know the GPU."""

    def _optimize_functions(self, ll_module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        pass


class _ThreadCodegen(_numba.AOTCPUCodegen):
    _library_class = _ThreadLibrary


class _ThreadContext(_numba.CPUContext):
    """Lowering for one thread."""

    lanes_are_threads = True
    enable_nrt = False

    @compiler_lock
    def init(self) -> None:
        """Set up the context; numba calls this method once."""
        self.is32bit = False
        self._internal_codegen = _ThreadCodegen(_THREAD, cpu_name="x86-64")
        manager = _numba.default_manager.copy()
        for kind, model in _thread_models.items():
            manager.register(kind, model)
        self.data_model_manager = manager

    def post_lowering(self, mod: Any, library: Any) -> None:
        """Link nothing: there are no C functions on a GPU."""

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        """Return what stands for a function that Python cannot call."""
        return lambda: fndesc


class _ThreadTyping(_numba.Context):
    """Types of code for a GPU. Functions compiled for a processor stand for their twins."""

    def resolve_value_type(self, value: Any) -> Any:
        """Return the type of a global value; numba calls this method."""
        compiled = isinstance(value, _numba.CPUDispatcher)
        return super().resolve_value_type(_twin(value) if compiled else value)


class _ThreadDescriptor(_numba.TargetDescriptor):
    options = _numba.CPUTargetOptions

    @functools.cached_property
    def typing_context(self) -> Any:
        return _ThreadTyping()

    @functools.cached_property
    def target_context(self) -> Any:
        return _ThreadContext(self.typing_context, _THREAD)


_DESCRIPTOR = _ThreadDescriptor(_THREAD)


class _ThreadDispatcher(_ForAnyConstant, _numba.Dispatcher):
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
    flags = _numba.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    typing, context = _DESCRIPTOR.typing_context, _DESCRIPTOR.target_context
    context.refresh()
    typing.refresh()
    with _numba.target_override(_THREAD):
        return _numba.compile_extra(typing, context, function, tuple(args), result, flags, {})


def lower_to_text(
    function: Callable[..., Any], args: Sequence[Any], result: Any
) -> tuple[str, str]:
    """Return LLVM IR, not optimised, of a function and all it calls, and its name there.

    The code is for one thread of a GPU; `args` and `result` are numba's types. The function takes
    two pointers, for a result and an exception, before its arguments.
    """
    lowered = _lower(function, args, result)
    with compiler_lock:
        lowered.library._ensure_finalized()
        return lowered.library.get_llvm_str(), lowered.fndesc.llvm_func_name
