"""From a table of compiled functions to one compiled function that picks by code.

Compiled code calls what was known when it was compiled: it cannot look a function up in a dict. So
`dispatcher` writes, once at import, the chain that would else be written by hand beside the table:

    if code == 0: return kernel_0(row, ..)
    if code == 1: return kernel_1(row, ..)
    ..
    raise ParameterError(missing)

The calls are static and may be inlined, and what is not in the table has no function to fall into.
It is text because closures that pass a tuple of arguments on count references to every array in it
for each entry of the table, which took up to a quarter of an operation's time.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from amtcore.errors import ParameterError
from amtcore.kernels.vector.jit import part


def dispatcher(kernels: Mapping[int, Any], missing: str) -> Any:
    """The compiled function (row, ..) that calls `kernels[row[0]]` with the same arguments.

    Args:
        kernels: Code -> compiled function; all have the same parameters, the row first, and the
            same type of result.
        missing: What to raise, as a `ParameterError`, where the row has another code.
    """
    names = [", ".join(inspect.signature(each.py_func).parameters) for each in kernels.values()]
    if len(set(names)) != 1:
        raise ParameterError(f"expected kernels with the same parameters, got {sorted(set(names))}")
    lines = [f"def pick({names[0]}):", "    code = row[0]"]
    for code in kernels:
        lines += [f"    if code == {int(code)}:", f"        return kernel_{code}({names[0]})"]
    lines += ["    raise ParameterError(missing)"]
    scope = {f"kernel_{code}": kernel for code, kernel in kernels.items()}
    scope |= {"missing": missing, "ParameterError": ParameterError}
    exec("\n".join(lines), scope)
    return part(scope["pick"])
