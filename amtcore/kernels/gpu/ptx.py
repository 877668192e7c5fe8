"""From a Python function to PTX: lowered by numba, assembled by the NVPTX back end inside llvmlite.

Everything a kernel calls becomes part of it, and the optimiser then keeps in registers what has
constant places. Float32 arithmetic flushes denormals to zero, as the processor's kernel threads do;
no multiplication and addition are contracted that the kernel did not ask to be.

A kernel is made on first use, and kept in memory and on disk under its key, together with the hash
of all kernel sources: numba's front end takes seconds, the text on disk none.
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
from amtcore.kernels.gpu.ptx_cache import cached_ptx
from amtcore.numba_internals import lower_to_text

TRIPLE = "nvptx64-nvidia-cuda"
#: The oldest GPU that kernels are made for; newer ones compile its PTX for themselves.
ARCHITECTURE = "sm_80"
PTX_VERSION = "+ptx80"
#: Of every function: flush denormals, and move no vote or shuffle to where fewer threads are.
_EVERY = 'convergent "denormal-fp-math-f32"="preserve-sign,preserve-sign"'


@functools.cache
def _machine(architecture: str) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(TRIPLE)
    return target.create_target_machine(cpu=architecture, features=PTX_VERSION, opt=3)


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
    """A kernel that passes its parameters on to numba's function."""
    launch = f'"nvvm.reqntid"="{THREADS}" "nvvm.minctasm"="{warps}"'
    names = [f"i64 %a{i}" for i in range(parameters)]
    kinds = ", ".join(["ptr", "ptr", *("i64" for _ in names)])
    return f"""
declare i32 @"{inner}"({kinds})
define ptx_kernel void @{name}({", ".join(names)}) {launch} {_EVERY} {{
  %result = alloca ptr
  %error = alloca ptr
  %status = call i32 @"{inner}"({", ".join(["ptr %result", "ptr %error", *names])})
  ret void
}}
"""


def assemble(
    text: str,
    inner: str,
    name: str,
    parameters: int,
    warps: int,
    architecture: str = ARCHITECTURE,
) -> str:
    """PTX of a kernel.

    Args:
        text: LLVM IR as `lower_to_text` gives it.
        inner: The kernel's function in it.
        name: What the entry is to be called.
        parameters: How many 64-bit integers it takes.
        warps: Of a multiprocessor that its registers must leave room for.
        architecture: The GPU.
    """
    machine = _machine(architecture)
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
                parameters = len(signature(function).parameters)
                module, inner = lower_to_text(function, [types.int64] * parameters, types.void)
                return assemble(module, inner, name, parameters, warps)

            _kernels[text] = Kernel(name, cached_ptx(text, compile_now))
        return _kernels[text]
