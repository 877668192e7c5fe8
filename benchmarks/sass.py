"""What a GPU's machine code says before any GPU runs it: registers, spills, instructions.

ptxas and nvdisasm come with triton, which torch installs on Linux. ptxas assembles a kernel's PTX
for a chip, as the driver would; nvdisasm shows the instructions, and beside each the control bits
in which ptxas wrote how long the issue waits and which scoreboard it waits for (Jia et al., 2018,
"Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", section 2.1).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

_FOLDER = Path("backends", "nvidia", "bin")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_WORD = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"\s*([.\w$]+):\s*$")
_PTX_LINE = re.compile(r"\s*//## File .*, line (\d+)")
_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
#: What ptxas says of a kernel, and what it is called here.
_FACTS = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
    "shared_bytes": r"(\d+) bytes smem",
}


class ToolMissingError(RuntimeError):
    """ptxas or nvdisasm is not installed."""


class RejectedError(ValueError):
    """ptxas does not accept a kernel."""


@functools.cache
def tool(name: str) -> Path:
    """Where ptxas or nvdisasm lies; triton is looked for, not imported."""
    found = importlib.util.find_spec("triton")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, _FOLDER, name)
        if os.access(path, os.X_OK):
            return path
    raise ToolMissingError(
        f"expected {name} below {_FOLDER} of the package triton, found none; install the torch of "
        "Linux on x86-64, which brings triton"
    )


@dataclass(frozen=True)
class Assembled:
    """A kernel for one chip.

    Args:
        arch: The chip, such as "sm_90".
        registers: Of a thread.
        stack_bytes: Local memory of a thread, spilled registers among it.
        spill_store_bytes, spill_load_bytes: Written to local memory for want of registers, and
            read again.
        shared_bytes: Static shared memory of a block.
        cubin: The machine code.
    """

    arch: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    cubin: bytes


def assemble(ptx: str, arch: str, contract: bool = True) -> Assembled:
    """Assemble a kernel.

    Args:
        ptx: Text with one entry.
        arch: "sm_80", "sm_90", ..; the text's own target or a newer one.
        contract: Whether ptxas may make an fma of a product and a sum, as the driver may.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(tool("ptxas")), "-v", "-lineinfo", f"-arch={arch}"]
        command += [f"-fmad={str(contract).lower()}"]
        done = subprocess.run(
            [*command, str(source), "-o", str(cubin)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RejectedError(f"ptxas for {arch}: {done.stdout}{done.stderr}".strip())
        said = done.stdout + done.stderr
        facts = {name: re.search(pattern, said) for name, pattern in _FACTS.items()}
        numbers = {name: int(found[1]) if found else 0 for name, found in facts.items()}
        return Assembled(arch=arch, cubin=cubin.read_bytes(), **numbers)


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Args:
        text: As nvdisasm shows it.
        opcode: Its name with modifiers, without the predicate: "FADD.FTZ".
        control: The bits from which its issue follows.
        ptx_line: The line of the PTX that it was made of, from 1; 0 where ptxas does not say.
    """

    text: str
    opcode: str
    control: int
    ptx_line: int

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def stall(self) -> int:
        """Cycles until the next instruction of the warp may issue."""
        return max(self.control & 15, 1)

    @property
    def sets(self) -> tuple[int, int]:
        """Scoreboards that its result and its reading of operands set; 7 is none."""
        return self.control >> 5 & 7, self.control >> 8 & 7

    @property
    def waits_for(self) -> int:
        """Mask of the scoreboards that it waits for."""
        return self.control >> 11 & 63


@dataclass(frozen=True)
class Listing:
    """A kernel as nvdisasm shows it.

    Args:
        instructions: In the order of addresses.
        labels: Of each label, the index of the instruction that it stands before.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def disassemble(cubin: bytes) -> Listing:
    """Instructions of a cubin with one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(tool("nvdisasm")), "-c", "-hex", "-gp", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    low = ptx_line = 0
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif of_ptx := _PTX_LINE.match(line):
            ptx_line = int(of_ptx[1])
        elif found := _INSTRUCTION.match(line):
            low = int(found[3], 16)
            opcode = _OPCODE.match(found[2])
            assert opcode, f"an instruction without an opcode: {line}"
            instructions.append(Instruction(found[2].strip(), opcode[1], 0, ptx_line))
        elif second := _SECOND_WORD.match(line):
            control = (low | int(second[1], 16) << 64) >> 105
            instructions[-1] = replace(instructions[-1], control=control)
    return Listing(tuple(instructions), labels)
