"""ptxas, which triton brings: the machine code of a kernel for a GPU that is not here."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path("backends", "nvidia", "bin")
# ptxas's own words for each figure.
_FACTS = {
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
}


@functools.cache
def ptxas() -> Path:
    """Return the program's path; triton is looked for, not imported."""
    found = importlib.util.find_spec("triton")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, _FOLDER, "ptxas")
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(
        f"expected ptxas below {_FOLDER} of the package triton, found none; install the torch of "
        "Linux on x86-64, which brings triton"
    )


@dataclass(frozen=True)
class Assembled:
    """A kernel for one chip.

    Args:
        stack_bytes: Local memory of a thread, spilled registers included.
        spill_store_bytes: Bytes of registers that are written to local memory.
        spill_load_bytes: Bytes of registers that are read from local memory.
        cubin: The machine code.
    """

    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    cubin: bytes


def assemble(ptx: str, arch: str, contract: bool = True) -> Assembled:
    """Assemble a kernel.

    Args:
        ptx: Text with one entry.
        arch: Chip, such as "sm_90": the text's own target or a newer one.
        contract: Whether ptxas may make an fma of a product and a sum, as the driver may.
    Raises:
        ValueError: ptxas does not accept the kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        options = ["-v", f"-arch={arch}", f"-fmad={str(contract).lower()}"]
        command = [str(ptxas()), *options, str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = f"{done.stdout}{done.stderr}"
        if done.returncode:
            raise ValueError(f"ptxas for {arch}: {said}".strip())
        facts = {name: re.search(pattern, said) for name, pattern in _FACTS.items()}
        numbers = {name: int(found[1]) if found else 0 for name, found in facts.items()}
        return Assembled(cubin=cubin.read_bytes(), **numbers)


def faults(ptx: str, arch: str) -> list[str]:
    """Return why a kernel is wrong on a chip: it spills, or its rounding is not the source's."""
    made = assemble(ptx, arch)
    found = []
    if made.spill_store_bytes or made.spill_load_bytes or made.stack_bytes:
        found.append(f"spills on {arch}")
    if made.cubin != assemble(ptx, arch, contract=False).cubin:
        found.append(f"contracts on {arch}")
    return found
