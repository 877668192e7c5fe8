"""PTX for the interpreter's tests: a module around a few instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from amtcore_interpreter import InterpretedLauncher
from numpy.typing import NDArray

from amtcore.kernels.gpu.launcher import THREADS, Kernel

REGISTERS = """
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %d<40>;
    .reg .f32 %f<8>; .reg .f64 %g<8>;
"""
LANES = np.arange(THREADS, dtype=np.int32)
#: Each thread's address of a 32-bit number: %d1 of parameter `a`, %d2 of `b`.
PLACES = """
    ld.param.b64 %d30, [a]; mov.u32 %r30, %tid.x; mad.wide.u32 %d1, %r30, 4, %d30;
"""
#: Torch has few unsigned types; bits are bits.
_SIGNED = {"u": "i"}


def kernel(code: str, parameters: str = "", before: str = "") -> Kernel:
    """A kernel `k`; `parameters` are names, `before` is declared outside of it."""
    declared = ", ".join(f".param .u64 {name}" for name in parameters.split())
    text = f"""
.version 8.0
.target sm_80
.address_size 64
{before}
.visible .entry k({declared})
{{
{REGISTERS}
{code}
}}
"""
    return Kernel("k", text)


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """A tensor with the array's bits, on its memory."""
    kind = array.dtype
    return torch.from_numpy(array.view(_SIGNED.get(kind.kind, kind.kind) + str(kind.itemsize)))


def per_thread(
    code: str, result: Any, *inputs: NDArray[Any], patience: int = 10_000
) -> NDArray[Any]:
    """Run `code` in a thread for each element: `%x0`, `%x1`, .. are its inputs, `%y` its result.

    The inputs' lengths are a multiple of 32; `result` is a numpy type.
    """
    count = len(inputs[0])
    output = np.zeros(count, result)
    arrays = [*(np.ascontiguousarray(each) for each in inputs), output]
    lines = ["mov.u32 %r38, %ctaid.x; mov.u32 %r39, %tid.x; mad.lo.u32 %r39, %r38, 32, %r39;"]
    for k, array in enumerate(arrays):
        name, width = ("%y" if array is output else f"%x{k}"), 8 * array.itemsize
        lines.append(f".reg .b{max(width, 16)} {name};")
        lines.append(f"ld.param.b64 %d38, [a{k}];")
        lines.append(f"mad.wide.u32 %d{k}, %r39, {array.itemsize}, %d38;")
        if array is not output:
            lines.append(f"ld.global.b{width} {name}, [%d{k}];")
    lines += [code, f"st.global.b{8 * output.itemsize} [%d{len(inputs)}], %y;", "ret;"]
    made = kernel("\n".join(lines), " ".join(f"a{k}" for k in range(len(arrays))))
    launcher = InterpretedLauncher(patience=patience)
    launcher.launch(made, count // THREADS, [tensor_of(each) for each in arrays])
    return output


def launch(code: str, *arguments: torch.Tensor | int, warps: int = 1, before: str = "") -> None:
    """Run a kernel of these instructions; its parameters are `a`, `b` ..."""
    names = "a b c d"[: 2 * len(arguments)]
    InterpretedLauncher().launch(kernel(code, names, before), warps, arguments)


def words(count: int = THREADS) -> torch.Tensor:
    """The numbers from 0 on, of 32 bits."""
    return torch.arange(count, dtype=torch.int32)
