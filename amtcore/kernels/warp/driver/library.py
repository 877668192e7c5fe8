"""The functions of libcuda that we call: names, C signatures, and nothing else.

Every pointer is a `void *` to ctypes, so arguments are `byref(..)`, arrays or integers. A function
returns a CUresult, 0 for success.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"

Functions = Mapping[str, Callable[..., int]]

#: C types of the arguments, from cuda.h.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuModuleLoadDataEx": (c_void_p, c_char_p, c_uint, c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (c_void_p, c_void_p, c_int, c_size_t),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}
#: Not in every driver that torch runs with: CUDA 12.4 and newer.
OPTIONAL: dict[str, tuple[Any, ...]] = {"cuFuncLoad": (c_void_p,)}


@functools.cache
def load_library() -> Functions:
    """The functions by name; `OSError` where the system has no driver."""
    return functions_of(ctypes.CDLL(LIBRARY))


def functions_of(library: ctypes.CDLL) -> Functions:
    """The functions of a loaded library, with their signatures."""
    functions: dict[str, Callable[..., int]] = {}
    for name, signature in (SIGNATURES | OPTIONAL).items():
        function = getattr(library, name, None)
        if function is None and name in OPTIONAL:
            continue
        if function is None:
            raise OSError(f"{LIBRARY} has no {name}: it is no NVIDIA driver, or a very old one")
        function.argtypes, function.restype = signature, c_int
        functions[name] = function
    return functions
