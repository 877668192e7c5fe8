"""The GPU backend, on a GPU or its interpreter: clips of any lengths in one launch.

All data stay on the device and the current stream. No call waits for results but `download`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import BackendError
from amtcore.kernels.backend import Backend, Chain, Gradients, Samples
from amtcore.kernels.chain import (
    ChainPlan,
    ChainTables,
    Steps,
    bank_layout,
    check_keeps_rate,
    first_rows,
    pad_filters,
    unpad_filters,
)
from amtcore.kernels.gpu.chain_kernel import (
    ChainKernelSpec,
    Row,
    adjoint_of,
    kernel_of,
    work_size,
)
from amtcore.kernels.gpu.launcher import FEW_WARPS, MANY_WARPS, Kernel, Launcher
from amtcore.kernels.gpu.ptx import compiled
from amtcore.kernels.gpu.row_kernel import row_kernel
from amtcore.kernels.operation import RowOperation
from amtcore.kernels.operations.modulation_filters import filter_states, get_filter
from amtcore.kernels.vector.lanes import groups_of, pack_tensor, unpack_tensor
from amtcore.kernels.vector.simd import LANES


def table_rows(table: NDArray[Any]) -> tuple[Row, ...]:
    """Return a kernel table as constants."""
    return tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in table)


@dataclass(frozen=True)
class Clips:
    """The places of a launch's clips in its input and output.

    Rows of `table` (5, clip): order of processing, first sample in the input, length in samples,
    first number in the output, samples of the signal before this clip.
    """

    table: Tensor

    @classmethod
    def equal(
        cls, batch: int, input_size: int, samples: int, output_size: int, device: torch.device
    ) -> Clips:
        """Place signals of equal lengths one after another; computed on the device."""
        number = torch.arange(batch, device=device)
        length, before = torch.full_like(number, samples), torch.zeros_like(number)
        return cls(torch.stack((number, number * input_size, length, number * output_size, before)))

    @classmethod
    def ragged(
        cls, begins: Sequence[int], lengths: Sequence[int], places: Sequence[int],
        starts: Sequence[int], device: torch.device,
    ) -> Clips:  # fmt: skip
        """Place signals of any lengths, to be processed from the longest to the shortest."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        table = torch.tensor([order, begins, lengths, places, starts])
        if device.type == "cuda":
            table = table.pin_memory()
        return cls(table.to(device, non_blocking=True))


def start(launcher: Launcher, kernel: Kernel, warps: int, *arguments: Tensor | int) -> None:
    """Launch a kernel whose first parameter is its queue."""
    queue = torch.zeros(1, dtype=torch.int64, device=launcher.device)
    launcher.launch(kernel, warps, (queue, *arguments))


def run_forward(
    launcher: Launcher, spec: ChainKernelSpec, channels: int, clips: Clips, x: Tensor, coef: Tensor,
    state: Tensor, columns: Tensor, out: Tensor, width: int = 0,
    frame: tuple[int, int, int, int] = (1, 1, 1, 0),
) -> None:  # fmt: skip
    """Run a chain over clips.

    Args:
        channels: Of every clip.
        x: All samples.
        coef: (group, rows * LANES).
        state: (clip, group, rows * LANES), changed in place.
        columns: (group, filter, LANES) output column of each lane.
        out: All outputs.
        width: Columns of a pooled frame.
        frame: Samples and frames of their ratio, samples an output, lookahead.
    """
    count, groups = clips.table.shape[1], groups_of(channels)
    if count == 0 or x.numel() == 0:
        return
    kernel = compiled("forward", spec, lambda: kernel_of(spec), spec.warps)
    order, begins, lengths, places, starts = clips.table.unbind()
    warps = min(launcher.resident_warps(kernel), count * groups)
    start(
        launcher, kernel, warps, order, count, groups, channels, x, begins, lengths, coef, state,
        columns, out, places, starts, width, *frame,
    )  # fmt: skip


class GpuChain:
    """A chain with its constants on the device; methods as in `backend.Chain`."""

    def __init__(self, launcher: Launcher, chain: ChainPlan) -> None:
        self.tables, self.tail, self._chain = chain.tables, chain.tail, chain
        self._launcher = launcher
        device = launcher.device
        self._coef = torch.from_numpy(chain.coef).to(device)
        self._rest = torch.from_numpy(chain.rest).to(device)
        self._columns = torch.from_numpy(chain.tables.columns).to(device)
        self.n_frames = chain.n_frames

    def fresh(self, clips: int) -> Tensor:
        return self._rest.expand(clips, *self._rest.shape).clone()

    def push(self, clips: Sequence[Samples | Tensor], states: Tensor, start: int) -> list[Tensor]:
        return self._run(self.tables, clips, states, [start] * len(clips))

    def finish(self, states: Tensor, samples: Sequence[int]) -> list[Tensor]:
        silences = [self._coef.new_zeros(self._chain.zeros_after(count)) for count in samples]
        return self._run(self.tail or self.tables, silences, states, samples)

    def _run(
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
            begins = [0, *accumulate(sizes)][:-1]
            places = [0, *accumulate(frame_sizes)][:-1]
            ratio = *tables.samples_per_frame, tables.samples_per_output, tables.lookahead
            run_forward(
                self._launcher, self._spec(tables, clips[0].ndim == 1), tables.channels,
                Clips.ragged(begins, lengths, places, starts, out.device),
                gathered(clips, out.device), self._coef, states, self._columns, out, tables.width,
                ratio,
            )  # fmt: skip
        parts = out.split(frame_sizes)
        return [part.view(-1, tables.width) for part in parts]

    def _spec(self, tables: ChainTables, shared: bool) -> ChainKernelSpec:
        coefs, states = self._coef.shape[1] // LANES, self._rest.shape[1] // LANES
        double, filters = self._coef.dtype == torch.float64, table_rows(tables.filters)
        return ChainKernelSpec(
            tables.steps, tables.rows, filters, tables.pool, shared, double, coefs, states
        )


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


#: Device memory that the warps of an adjoint may use for their tapes.
_WORK_BYTES = 2**31


class GpuBackend(Backend):
    """Kernels of warps, run by a launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self._own = launcher, threading.local()
        self.name, self.device = launcher.name, launcher.device

    def place(self, chain: ChainPlan) -> Chain:
        return GpuChain(self.launcher, chain)

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
            torch.cuda.current_stream(self.device).synchronize()
            whole = room
        parts = whole.split([part.numel() for part in frames])
        return [here.view(part.shape).numpy() for here, part in zip(parts, frames, strict=True)]

    def share(self, clips: list[Any]) -> list[Any]:
        whole = gathered(clips, self.device)
        parts = whole.split([len(clip) for clip in clips])
        return list(parts)

    def run_steps(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        check_keeps_rate(steps)
        (batch, rows, samples), channels = x.shape, coef.shape[0]
        spec = _spec(steps, x, coef, state)
        out, packed = x.new_empty(batch, channels, samples), pack_tensor(state)
        clips = Clips.equal(batch, rows * samples, samples, channels * samples, x.device)
        given = x.detach().contiguous(), pack_tensor(coef), packed, _no_columns(x.device), out
        run_forward(self.launcher, spec, channels, clips, *given)
        return out, unpack_tensor(packed, channels)

    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        (batch, channels, samples), most = x.shape, len(kinds)
        spec, columns = _bank(x, tuple(kinds), tuple(offsets), coef.shape[1])
        out, packed = (
            x.new_empty(batch, offsets[-1], samples),
            pack_tensor(pad_filters(state, offsets, most)),
        )
        clips = Clips.equal(batch, channels * samples, samples, offsets[-1] * samples, x.device)
        given = x.detach().contiguous(), pack_tensor(pad_filters(coef, offsets, most)), packed
        run_forward(self.launcher, spec, channels, clips, *given, columns, out)
        return out, unpad_filters(unpack_tensor(packed, channels), offsets, most)

    def run_step_adjoint(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        channels, spec = coef.shape[0], _spec(steps, x, coef, state)
        packed = pack_tensor(coef), pack_tensor(state), pack_tensor(gstate)
        gx, gcoef = self._adjoint(spec, x, gy, packed, _no_columns(x.device), channels)
        if x.shape[1] != channels:
            gx = gx.sum(1, keepdim=True)
        return gx, gcoef, unpack_tensor(packed[2], channels)

    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        channels, most = x.shape[1], len(kinds)
        spec, columns = _bank(x, tuple(kinds), tuple(offsets), coef.shape[1])
        coefs, states, gstates = (
            pack_tensor(pad_filters(t, offsets, most)) for t in (coef, state, gstate)
        )
        gx, gcoef = self._adjoint(spec, x, gy, (coefs, states, gstates), columns, channels)
        gstate = unpack_tensor(gstates, channels)
        return gx, unpad_filters(gcoef, offsets, most), unpad_filters(gstate, offsets, most)

    def _adjoint(
        self, spec: ChainKernelSpec, x: Tensor, gy: Tensor, packed: tuple[Tensor, Tensor, Tensor],
        columns: Tensor, channels: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the gradients of the input, (batch, channel, time), and of the coefficients.

        The gradient of the last state in packed[2] becomes the gradient of the first state.
        """
        (batch, rows, samples), (coef, state, gstate) = x.shape, packed
        gx, gcoef = x.new_empty(batch, channels, samples), x.new_zeros(batch, *coef.shape)
        items = batch * groups_of(channels)
        if items and samples:
            kernel = compiled(
                "adjoint",
                spec,
                lambda: adjoint_of(spec),
                FEW_WARPS if spec.double else MANY_WARPS,
            )
            size = work_size(spec, samples)
            most = max(_WORK_BYTES // (size * x.element_size()), 1)
            warps = min(self.launcher.resident_warps(kernel), items, most)
            start(
                self.launcher, kernel, warps, batch, groups_of(channels), channels, samples,
                gy.shape[1], x.detach().contiguous(), gy.detach().contiguous(), gx, coef, gcoef,
                state, gstate, columns, x.new_empty(warps * size), size, rows,
            )  # fmt: skip
        return gx, unpack_tensor(gcoef, channels).sum(0)

    def run_rows(self, operation: RowOperation, *args: Any) -> Any:
        """Run the GPU kernel, or torch's functions for an operation without one.

        The interpreter's tensors lie in host memory, so CPU kernels can run on them.
        """
        if operation.gpu is not None:
            return operation.gpu(self, *args)
        of_processor = operation.numbers_only or operation.reference is None
        if of_processor and self.device.type == "cpu":
            return operation.cpu(self, *args)
        if operation.reference is None:
            raise BackendError(
                f"{operation.name} runs on the CPU only, got tensors on {self.device}"
            )
        return operation.reference(*args)

    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        if items == 0:
            return
        like = next(a for a in arguments if isinstance(a, Tensor) and a.is_floating_point())
        kernel = row_kernel(body, arguments, like.dtype == torch.float64, room > 0)
        warps = min(self.launcher.resident_warps(kernel), items)
        work = (like.new_empty(warps * room), room) if room else ()
        start(self.launcher, kernel, warps, items, *arguments, *work)


@functools.lru_cache
def _no_columns(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _layout(
    kinds: tuple[int, ...], offsets: tuple[int, ...], coefs: int, device: torch.device
) -> tuple[tuple[Row, ...], Tensor]:
    """Return the table of a bank, and on the device the output column of each lane's filters."""
    for kind in kinds:
        get_filter(kind)
    filters, columns = bank_layout(kinds, offsets, coefs, 0, 0)
    return table_rows(filters), torch.from_numpy(columns).to(device)


def _bank(
    x: Tensor, kinds: tuple[int, ...], offsets: tuple[int, ...], coefs: int
) -> tuple[ChainKernelSpec, Tensor]:
    """Return the spec of a filter bank alone, and its output columns."""
    filters, columns = _layout(kinds, offsets, coefs, x.device)
    most, double = len(kinds), x.dtype == torch.float64
    return ChainKernelSpec(
        (), (), filters, None, False, double, coefs * most, filter_states(coefs) * most
    ), columns


def _spec(steps: Steps, x: Tensor, coef: Tensor, state: Tensor) -> ChainKernelSpec:
    """Return the spec of operations alone, at full rate."""
    shared, double = x.shape[1] == 1, x.dtype == torch.float64
    return ChainKernelSpec(
        steps, first_rows(steps), (), None, shared, double, coef.shape[1], state.shape[2]
    )
