"""PTX of a Python function: lowered by numba, assembled by the NVPTX back end of llvmlite.

All functions that a kernel calls are inlined, so that the optimiser can keep rows with constant
indices in registers. Float32 arithmetic flushes denormals to zero, like the CPU's kernel threads.
A multiplication and an addition are contracted only by an explicit `fma`.

A kernel is compiled on first use, which takes seconds. Memory and disk cache it under its key and
the hash of all kernel sources.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable
from inspect import signature
from typing import Any

import llvmlite.binding as llvm
from numba import types

from amtcore.kernels.gpu.launcher import THREADS, Kernel
from amtcore.kernels.vector.kernel_cache import cached_ptx
from amtcore.numba_internals import lower_to_text

TRIPLE = "nvptx64-nvidia-cuda"
#: The oldest GPU that kernels are made for; newer ones compile its PTX for themselves.
ARCHITECTURE = "sm_80"
PTX_VERSION = "+ptx80"
#: Attributes of every function: flush denormals, and move no vote or shuffle into a branch.
_EVERY = 'convergent "denormal-fp-math-f32"="preserve-sign,preserve-sign"'


@functools.cache
def _machine() -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(TRIPLE)
    return target.create_target_machine(cpu=ARCHITECTURE, features=PTX_VERSION, opt=3)


def _parse(text: str, layout: str) -> Any:
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = TRIPLE, layout
    return module


def _attributed(text: str) -> str:
    """Return the module with the attributes of all functions, and all of them inlined.

    llvmlite 0.45 adds `alwaysinline` to a function's result, so the attribute is written as text.
    """
    return re.sub(r"^(define .*?) ?\{$", rf"\1 alwaysinline {_EVERY} {{", text, flags=re.MULTILINE)


def _entry(name: str, inner: str, parameters: int, warps: int) -> str:
    """Return the IR of a kernel that calls numba's function `inner`.

    The launch bounds are annotations: llvmlite 0.45 ignores the attributes that newer ones have.
    """
    names = [f"i64 %a{i}" for i in range(parameters)]
    kinds = ", ".join(["ptr", "ptr", *("i64" for _ in names)])
    return f"""
declare i32 @"{inner}"({kinds})
define ptx_kernel void @{name}({", ".join(names)}) {_EVERY} {{
  %result = alloca ptr
  %error = alloca ptr
  %status = call i32 @"{inner}"({", ".join(["ptr %result", "ptr %error", *names])})
  ret void
}}
!nvvm.annotations = !{{!0}}
!0 = !{{ptr @{name}, !"reqntidx", i32 {THREADS}, !"minctasm", i32 {warps}}}
"""


def assemble(text: str, inner: str, name: str, parameters: int, warps: int) -> str:
    """Return the PTX of a kernel from LLVM IR of `lower_to_text`, whose function is `inner`.

    `parameters` counts the 64-bit parameters of the entry `name`.
    """
    machine = _machine()
    layout = str(machine.target_data)
    module = _parse(_attributed(text), layout)
    for function in module.functions:
        if not function.is_declaration and function.name != inner:
            function.linkage = "internal"
    module.get_function(inner).linkage = "external"
    kernel = _parse(_entry(name, inner, parameters, warps), layout)
    kernel.link_in(module)
    kernel.get_function(inner).linkage = "internal"
    for variable in kernel.global_variables:
        if variable.linkage == llvm.Linkage.common:  # numba's environments, which nothing reads
            variable.linkage = "internal"
    kernel.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(kernel, builder)
    return str(machine.emit_assembly(kernel))


_lock = threading.Lock()
_kernels: dict[str, Kernel] = {}


def compiled(what: str, key: object, make: Callable[[], Callable[..., None]], warps: int) -> Kernel:
    """Return a kernel from the cache, or compile the function that `make` returns.

    The kernel's name begins with `what`. The `repr` of `key` covers all that the code depends on,
    beside the sources. The registers leave room for `warps` warps on a multiprocessor.
    """
    text = f"{what} {key!r} {warps} {THREADS} {ARCHITECTURE}"
    with _lock:
        if text not in _kernels:
            name = f"{what}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"

            def compile_now() -> str:
                function = make()
                parameters = len(signature(function).parameters)
                module, inner = lower_to_text(function, [types.int64] * parameters, types.void)
                return assemble(module, inner, name, parameters, warps)

            _kernels[text] = Kernel(name, cached_ptx(what, text, compile_now))
        return _kernels[text]
