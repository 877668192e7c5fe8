"""The GPU backend, on a GPU or its interpreter: clips of any lengths in one launch.

All data stay on the device and the current stream. No call waits for results but `download`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.errors import BackendError
from amtcore.kernels.backend import Backend, Chain, Samples
from amtcore.kernels.chain import ChainPlan, ChainTables
from amtcore.kernels.gpu.chain_kernel import ChainKernelSpec, adjoint_of, kernel_of, work_size
from amtcore.kernels.gpu.device_code import row_kernel
from amtcore.kernels.gpu.launcher import FEW_WARPS, MANY_WARPS, Kernel, Launcher
from amtcore.kernels.gpu.ptx import compiled
from amtcore.kernels.operation import RowOperation
from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.simd import LANES, vload, vstore


class GpuChain(Chain):
    """A chain with its constants on the device."""

    def __init__(self, backend: GpuBackend, plan: ChainPlan) -> None:
        super().__init__(plan)
        self._backend = backend
        self._coef = torch.from_numpy(plan.coef).to(backend.device)
        self._rest = torch.from_numpy(plan.rest).to(backend.device)

    def fresh(self, clips: int) -> Tensor:
        return self._rest.expand(clips, *self._rest.shape).clone()

    def run(
        self,
        tables: ChainTables,
        clips: Sequence[Samples | Tensor],
        states: Tensor,
        starts: Sequence[int],
    ) -> list[Tensor]:
        lengths = [clip.shape[-1] for clip in clips]
        counts = [
            tables.frames_before(start + length) - tables.frames_before(start)
            for start, length in zip(starts, lengths, strict=True)
        ]
        sizes = [clip.numel() if isinstance(clip, Tensor) else clip.size for clip in clips]
        frame_sizes = [count * tables.width for count in counts]
        out = self._coef.new_empty(sum(frame_sizes))
        if clips:
            longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
            begins, places = ([0, *accumulate(each)][:-1] for each in (sizes, frame_sizes))
            table = torch.tensor([longest_first, begins, lengths, places, starts])
            if out.is_cuda:
                table = table.pin_memory()
            self._backend.run_clips(
                tables, table.to(out.device, non_blocking=True), gathered(clips, out.device),
                clips[0].ndim == 1, self._coef, states, out,
            )  # fmt: skip
        return [part.view(-1, tables.width) for part in out.split(frame_sizes)]


def gathered(clips: Sequence[Samples | Tensor], device: torch.device) -> Tensor:
    """Return the samples of all clips on the device, one clip after another.

    Samples in host memory are copied once, through pinned memory.
    """
    if any(isinstance(clip, Tensor) for clip in clips):
        parts = [
            clip.detach().to(device) if isinstance(clip, Tensor) else gathered([clip], device)
            for clip in clips
        ]
        return torch.cat([part.reshape(-1) for part in parts])
    rows = [np.ravel(clip) for clip in clips]  # by numpy: torch warns of memory that is read-only
    dtype, pinned = torch.from_numpy(np.empty(0, rows[0].dtype)).dtype, device.type == "cuda"
    room = torch.empty(sum(map(len, rows)), dtype=dtype, pin_memory=pinned)
    np.concatenate(rows, out=room.numpy())
    return room.to(device, non_blocking=True)


#: Vectors that `GpuBackend.check` adds.
_CHECKED = 32


@kernel
def _add_item(item: int, x: Any, y: Any, out: Any) -> None:
    vstore(out, item * LANES, vload(x, item * LANES) + vload(y, item * LANES))


#: Device memory that the warps of an adjoint may use for their tapes.
_WORK_BYTES = 2**31
#: More items than any GPU runs warps at once.
_MOST_ITEMS = 2**16


class GpuBackend(Backend):
    """Kernels of warps, run by a launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self._own = launcher, threading.local()
        self.name, self.device = launcher.name, launcher.device

    def place(self, chain: ChainPlan) -> Chain:
        return GpuChain(self, chain)

    def stream(self) -> AbstractContextManager[Any]:
        """Return the context of this thread's own stream, if the device has streams.

        The stream first waits for the caller's stream, which may still be computing inputs.
        """
        if self.device.type != "cuda":
            return nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        own: torch.cuda.Stream = self._own.stream
        own.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(own)

    def upload(self, clip: Samples | Tensor) -> Tensor:
        return gathered([clip], self.device).view(clip.shape)

    def clip_of(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def download(self, frames: list[Tensor]) -> list[Samples]:
        """Copy all frames at once and wait for the stream."""
        if not frames:
            return []
        whole = torch.cat([part.reshape(-1) for part in frames])
        if self.device.type == "cuda":
            room = torch.empty_like(whole, device="cpu", pin_memory=True)
            room.copy_(whole, non_blocking=True)
            # The wait for a stream spins, and takes a core from threads that decode.
            copied = torch.cuda.Event(blocking=True)
            copied.record(torch.cuda.current_stream(self.device))
            copied.synchronize()
            whole = room
        parts = whole.split([part.numel() for part in frames])
        return [here.view(part.shape).numpy() for here, part in zip(parts, frames, strict=True)]

    def share(self, clips: list[Any]) -> list[Any]:
        if not clips:
            return []
        whole = gathered(clips, self.device)
        parts = whole.split([len(clip) for clip in clips])
        return list(parts)

    def run_clips(
        self, tables: ChainTables, clips: Tensor, x: Tensor, shared: bool, coef: Tensor,
        state: Tensor, out: Tensor,
    ) -> None:  # fmt: skip
        """Run a chain over clips; coef and state are packed, and state is updated.

        Columns of `clips` (5, clip) hold: order of processing, first sample in x, length in
        samples, first number in `out`, samples of the signal before this clip. With `shared` a clip
        is one row for all channels.
        """
        count, groups = clips.shape[1], len(tables.columns)
        if count == 0 or x.numel() == 0:
            return
        spec = _spec(tables, coef, state, shared)
        made = compiled("forward", spec, lambda: kernel_of(spec), spec.warps)
        order, begins, lengths, places, starts = clips.unbind()
        warps = min(self.launcher.resident_warps(made), count * groups)
        self._start(
            made, warps, order, count, groups, tables.channels, x, begins, lengths, coef, state,
            _columns_on(tables, self.device), out, places, starts, tables.width,
            *tables.samples_per_frame, tables.samples_per_output, tables.lookahead,
        )  # fmt: skip

    def run_full_rate(self, tables: ChainTables, x: Tensor, coef: Tensor, state: Tensor) -> Tensor:
        batch, rows, samples = x.shape
        out = x.new_empty(batch, tables.width, samples)
        number = torch.arange(batch, device=x.device)
        length, before = torch.full_like(number, samples), torch.zeros_like(number)
        places = number * (tables.width * samples)
        clips = torch.stack((number, number * (rows * samples), length, places, before))
        self.run_clips(tables, clips, x, rows == 1, coef, state, out)
        return out

    def run_adjoint(
        self, tables: ChainTables, x: Tensor, gy: Tensor, coef: Tensor, state: Tensor,
        gstate: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (batch, rows, samples), groups = x.shape, len(tables.columns)
        gx, gcoef = (
            x.new_empty(batch, tables.channels, samples), x.new_zeros(batch, *coef.shape)
        )  # fmt: skip
        if batch * groups and samples:
            spec = _spec(tables, coef, state, rows == 1)
            most_warps = FEW_WARPS if spec.double else MANY_WARPS
            made = compiled("adjoint", spec, lambda: adjoint_of(spec), most_warps)
            size = work_size(spec, samples)
            fitting = max(_WORK_BYTES // (size * x.element_size()), 1)
            warps = min(self.launcher.resident_warps(made), batch * groups, fitting)
            self._start(
                made, warps, batch, groups, tables.channels, samples, gy.shape[1], x, gy, gx,
                coef, gcoef, state, gstate, _columns_on(tables, self.device),
                x.new_empty(warps * size), size, rows,
            )  # fmt: skip
        return gx, gcoef

    def run_rows(self, operation: RowOperation, *args: Any) -> Any:
        """Run the GPU kernel, or torch's functions for an operation without one.

        The interpreter's tensors lie in host memory, so CPU kernels can run on them.
        """
        if operation.on_gpu or (operation.only_cpu and self.device.type == "cpu"):
            return super().run_rows(operation, *args)
        if operation.reference is None:
            raise BackendError(
                f"{operation.name} runs on the CPU only, got tensors on {self.device}"
            )
        return operation.reference(*args)

    @property
    def workers(self) -> int:
        return _MOST_ITEMS

    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        if items == 0:
            return
        like = next(a for a in arguments if isinstance(a, Tensor) and a.is_floating_point())
        made = row_kernel(body, arguments, like.dtype == torch.float64, room > 0)
        warps = min(self.launcher.resident_warps(made), items)
        work = (like.new_empty(warps * room), room) if room else ()
        self._start(made, warps, items, *arguments, *work)

    def check(self) -> None:
        """Add two vectors on the device and compare with torch.

        Raises:
            BackendError: The launch fails, or sums are wrong.
        """
        size = _CHECKED * LANES
        x = torch.arange(size, dtype=torch.float32, device=self.device)
        y, out = x.flip(0) * 0.3, torch.full((size + LANES,), -1.0, device=self.device)
        self.run_items(_add_item, _CHECKED, x, y, out)
        if not torch.equal(out[:size], x + y) or bool((out[size:] != -1.0).any()):
            raise BackendError(
                f"the {self.name} launcher adds wrongly: expected {size} sums as torch has them; "
                "please report it with the versions of driver and torch"
            )

    def _start(self, kernel: Kernel, warps: int, *arguments: Tensor | int) -> None:
        """Launch a kernel whose first parameter is its queue."""
        queue = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.launcher.launch(kernel, warps, (queue, *arguments))


@functools.lru_cache(maxsize=64)
def _columns_on(tables: ChainTables, device: torch.device) -> Tensor:
    return torch.from_numpy(tables.columns).to(device)


def _spec(tables: ChainTables, coef: Tensor, state: Tensor, shared: bool) -> ChainKernelSpec:
    """Return the constants of a chain's kernels, for packed coefficients and states."""
    filters = tuple(map(tuple, tables.filters.tolist()))
    double, sizes = coef.dtype == torch.float64, (t.shape[-1] // LANES for t in (coef, state))
    return ChainKernelSpec(tables.steps, tables.rows, filters, tables.pool, shared, double, *sizes)
