"""Runs the GPU's kernels without a GPU: the same PTX, the same arguments, the same queue.

Float32 arithmetic with `.ftz` flushes subnormals as PTX defines, whatever mode the calling thread
is in; then the host flushes those of float64 as well, which PTX would keep. All else is exact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import KernelError, ParameterError
from amtcore.kernels.gpu.launcher import THREADS, Kernel, Launcher
from amtcore_interpreter import body
from amtcore_interpreter.compiled import Compiled, compile_ptx
from amtcore_interpreter.machine import run_warps
from amtcore_interpreter.program import zeros

#: Turns of every warp before Python gets to look at signals, and at how much there is to do.
_ROUNDS = 500
_REASONS = {
    body.TRAP: "a trap",
    body.BAD_BRANCH: "the branch table has no such entry",
    body.STUCK: "the threads wait for others of their mask that never come",
    body.NOT_IN_MASK: "the thread is not in its own mask",
    body.NO_SOURCE: "the number of a thread that does not take part",
}


@dataclass(frozen=True)
class Profile:
    """What a kernel's warps have executed, over all launches.

    Attributes:
        instructions: PTX instructions, each counted once per warp that executed it.
        lines: Each instruction's text and how often warps executed it, in order.
    """

    instructions: int
    lines: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Window:
    """Memory that a kernel may touch."""

    name: str
    address: int
    size: int

    def distance(self, address: int) -> int:
        """Bytes between an address and the window."""
        return max(self.address - address, address - self.address - self.size, 0)


@dataclass
class _Memory:
    """What a launch needs beside the tensors."""

    frames: NDArray[np.int64]
    registers: NDArray[np.uint8]
    held: list[NDArray[np.generic]]


class InterpretedLauncher(Launcher):
    """Runs kernels on CPU tensors, instruction by instruction. Launches return when done.

    Args:
        resident: Warps that are said to run at once; few, so that they share a queue.
        patience: A kernel that has executed so many times as many instructions as it has is
            compiled again, for speed. Its results are the same.
        backwards: Whether the last thread of a warp goes first. A kernel whose threads wait for
            each other wherever they must has the same results either way.
    """

    name = "interpreted"
    device = torch.device("cpu")

    def __init__(
        self, resident: int = 8, patience: int = 10_000, *, backwards: bool = False
    ) -> None:
        if resident < 1:
            raise ParameterError(f"resident must be 1 or more, got {resident}")
        self.resident, self.patience, self.backwards = resident, patience, backwards
        self._lock = threading.Lock()
        self._compiled: dict[str, Compiled] = {}

    def resident_warps(self, kernel: Kernel) -> int:
        """As given to the constructor."""
        return self.resident

    def launch(self, kernel: Kernel, warps: int, arguments: Sequence[Tensor | int]) -> None:
        """Run a kernel to its end.

        Raises:
            KernelError: An instruction is not known, or a thread did what a GPU stops at: an access
                outside the tensors given or at no multiple of its size, a trap, threads that wait
                for each other for ever.
        """
        if warps < 1:
            raise KernelError(f"kernel {kernel.name}: warps must be 1 or more, got {warps}")
        compiled = self._get(kernel)
        values, windows = _unpack(kernel, compiled, arguments)
        memory = _allocate(compiled, warps, values, windows)
        memory.frames[:, body.BACKWARDS] = self.backwards
        with _flushing(compiled.translation.flushes):
            stopped = self._run(compiled, memory)
        if stopped >= 0:
            raise KernelError(_explained(kernel, compiled, memory, stopped, windows))

    def profile(self, kernel: Kernel) -> Profile:
        """What the kernel's warps have executed so far."""
        compiled = self._get(kernel)
        with self._lock:
            hits = compiled.hits.tolist()
        lines = [
            (instruction.text, count)
            for piece, count in zip(compiled.program.pieces, hits, strict=True)
            for instruction in compiled.program.instructions(piece)
        ]
        return Profile(sum(count for _, count in lines), tuple(lines))

    def _run(self, compiled: Compiled, memory: _Memory) -> int:
        """The warp that stopped, or -1."""
        registers = memory.registers
        words, given = registers.view(np.uint32), np.zeros(THREADS, np.uint32)
        finished = np.zeros(len(registers), np.bool_)
        status = -2
        while status == -2:
            self._consider(compiled)
            hits = np.zeros_like(compiled.hits)
            status = run_warps(
                compiled.pieces, compiled.rows, compiled.firsts, hits, memory.frames, words,
                registers, given, finished, _ROUNDS,
            )  # fmt: skip
            with self._lock:
                compiled.hits += hits
        return int(status)

    def _consider(self, compiled: Compiled) -> None:
        """Compile for speed what runs for long."""
        with self._lock:
            executed = int(compiled.hits @ compiled.lengths)
            if executed >= self.patience * len(compiled.program.module.instructions):
                compiled.optimise()

    def _get(self, kernel: Kernel) -> Compiled:
        with self._lock:
            compiled = self._compiled.get(kernel.ptx)
            if compiled is None:
                compiled = self._compiled[kernel.ptx] = compile_ptx(kernel.ptx)
        entry = compiled.program.module.entry
        if entry != kernel.name:
            raise KernelError(f"the module's entry is {entry!r}: expected {kernel.name!r}")
        return compiled


def _unpack(
    kernel: Kernel, compiled: Compiled, arguments: Sequence[Tensor | int]
) -> tuple[list[int], list[_Window]]:
    """The parameters as integers, and all that a thread may touch."""
    parameters = compiled.program.module.parameters
    if len(arguments) != len(parameters):
        raise KernelError(
            f"kernel {kernel.name} has {len(parameters)} parameters: got {len(arguments)}"
        )
    values, windows = [], []
    for number, argument in enumerate(arguments):
        if not isinstance(argument, Tensor):
            values.append(int(argument))
            continue
        if argument.device.type != "cpu" or not argument.is_contiguous():
            raise KernelError(
                f"argument {number} of kernel {kernel.name} must be contiguous and on the CPU, got "
                f"strides {argument.stride()} on {argument.device}"
            )
        values.append(argument.data_ptr())
        size = argument.numel() * argument.element_size()
        windows.append(_Window(f"argument {number}", argument.data_ptr(), size))
    program = compiled.program
    own = [*program.variables("global"), *program.variables("const")]
    windows += [_Window(each.name, program.windows[each.name], each.size) for each in own]
    return values, windows


def _allocate(compiled: Compiled, warps: int, values: list[int], windows: list[_Window]) -> _Memory:
    sizes, code = compiled.program.sizes, compiled.program.module.instructions
    parameters = np.array([value % (1 << 64) for value in values] or [0], np.uint64)
    table = np.array([(each.address, each.size) for each in windows] or [(0, 0)], np.int64)
    sites = np.zeros((len(code), 2), np.int64)
    shared = zeros(warps * sizes["shared"])
    local = zeros(warps * THREADS * sizes["local"])
    frames = np.zeros((warps, body.FRAME_WORDS), np.int64)
    number = np.arange(warps)
    frames[:, body.SHARED] = shared.ctypes.data + number * sizes["shared"]
    frames[:, body.LOCAL] = local.ctypes.data + number * THREADS * sizes["local"]
    frames[:, body.PARAMETERS] = parameters.ctypes.data
    frames[:, body.WINDOWS] = table.ctypes.data
    frames[:, body.WINDOW_COUNT] = len(windows)
    frames[:, body.SITES] = sites.ctypes.data
    frames[:, body.WARP], frames[:, body.WARPS] = number, warps
    row = -(-sizes["registers"] // 64) * 64 or 64
    registers = zeros(warps * row).reshape(warps, row)
    for value, at in compiled.program.constants.items():
        registers[:, at : at + 4 * THREADS].view(np.uint32)[:] = value
    return _Memory(frames, registers, [parameters, table, sites, shared, local])


@contextmanager
def _flushing(wanted: bool) -> Iterator[None]:
    """The calling thread's way with subnormals, for a while."""
    with np.errstate(all="ignore"):
        before = bool(np.float32(1e-40) * np.float32(1.0) == 0)
    torch.set_flush_denormal(wanted)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _explained(
    kernel: Kernel, compiled: Compiled, memory: _Memory, warp: int, windows: list[_Window]
) -> str:
    frame = memory.frames[warp]
    instruction = compiled.program.module.instructions[frame[body.INSTRUCTION]]
    reason, address = int(frame[body.REASON]), int(frame[body.ADDRESS])
    if reason == body.OUTSIDE:
        why = f"{_place(instruction.code, address, windows)} lies outside what was given"
    elif reason == body.MISALIGNED:
        why = f"{_place(instruction.code, address, windows)} is no multiple of the access's size"
    else:
        why = _REASONS[reason]
    return (
        f"kernel {kernel.name}, warp {warp}, thread {frame[body.THREAD]}: {instruction.text!r}: "
        f"{why}"
    )


def _place(code: tuple[str, ...], address: int, windows: list[_Window]) -> str:
    """An address, counted from the nearest tensor."""
    for space in ("shared", "local"):
        if space in code:
            return f"byte {address} of {space} memory"
    nearest = min(windows, key=lambda each: each.distance(address), default=None)
    if nearest is None:
        return f"address {address:#x}"
    return f"byte {address - nearest.address} of {nearest.name}, which has {nearest.size} bytes,"
