"""The kernel of a row operation on a GPU: a queue of items around the operation's own function.

    while there are items:  body(item, *arguments)

Arguments are addresses of flat arrays and sizes. Each warp may have scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.gpu.device_code import compile_text, integers_at, numbers_of, take, warp_id
from amtcore.kernels.gpu.launcher import FEW_WARPS, MANY_WARPS, Kernel
from amtcore.kernels.gpu.ptx import compiled
from amtcore.kernels.vector.source_digest import sources_digest


def row_kernel(body: Any, arguments: Sequence[Tensor | int], double: bool, room: bool) -> Kernel:
    """Return the compiled kernel around `body(item, *arguments[, room])`.

    `arguments` gives the kinds: floating-point tensors (float64 if `double`), int64 tensors, and
    integers. With `room`, each warp has scratch memory.
    """
    kinds = "".join(map(_kind, arguments))
    function = body.py_func
    constants = [cell.cell_contents for cell in function.__closure__ or ()]
    sources = sources_digest(Path(function.__code__.co_filename).parent)
    key = (function.__module__, function.__qualname__, constants, sources, kinds, double, room)
    return compiled(
        function.__name__, key, lambda: _text(body, kinds, double, room),
        FEW_WARPS if double else MANY_WARPS,
    )  # fmt: skip


def _kind(argument: Tensor | int) -> str:
    """One letter: numbers, integers in memory, or a size."""
    if not isinstance(argument, Tensor):
        return "s"
    return "i" if argument.dtype == torch.int64 else "n"


def _text(body: Any, kinds: str, double: bool, room: bool) -> Callable[..., Any]:
    names = [f"a{k}" for k in range(len(kinds))]
    arrays = {"n": "numbers({})", "i": "integers({})", "s": "{}"}
    given = [arrays[kind].format(name) for kind, name in zip(kinds, names, strict=True)]
    parameters, lines = ["queue", "items", *names], []
    if room:
        parameters += ["work", "size"]
        lines = ["room = numbers(work)[warp_id() * size :]"]
        given.append("room")
    lines += [
        "while True:",
        "    item = take(queue)",
        "    if item >= items:",
        "        return",
        f"    body(item, {', '.join(given)})",
    ]
    scope = {"body": body, "numbers": numbers_of(double), "integers": integers_at, "take": take,
             "warp_id": warp_id}  # fmt: skip
    return compile_text(", ".join(parameters), lines, scope).py_func  # type: ignore[attr-defined]
