"""The CPU backend: channels are packed into lanes; threads take clips and groups of lanes.

Operators keep state as (batch, channel, value) and pack it into lanes on every call. A pooled
chain keeps its state packed between the chunks of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.backend import Backend, Chain, Samples
from amtcore.kernels.chain import ChainPlan, ChainTables, scratch_rows
from amtcore.kernels.cpu.chain_loop import loop_of
from amtcore.kernels.pooling import POOL_BANK, STORE, STORE_BANK
from amtcore.kernels.vector.arrays import aligned_array, empty, training
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import get_num_threads, parallel_for

Array = NDArray[Any]
#: Arrays of clips: a list, or one array with a first axis for them.
Arrays = Sequence[Array] | Array


class CpuChain(Chain):
    """A pooled chain on this processor."""

    def fresh(self, clips: int) -> list[Array]:
        return [self.plan.rest.copy() for _ in range(clips)]

    def run(
        self, tables: ChainTables, clips: Sequence[Array], states: Arrays, starts: Sequence[int]
    ) -> list[Array]:
        coef, outs = self.plan.coef, []
        for clip, start in zip(clips, starts, strict=True):
            frames = tables.frames_before(start + clip.shape[-1]) - tables.frames_before(start)
            outs.append(np.empty((frames, tables.width), coef.dtype))
        _run(tables, [np.atleast_2d(clip) for clip in clips], coef, states, outs, starts)
        return outs


class CpuBackend(Backend):
    """Kernels on threads."""

    name = "cpu"
    device = torch.device("cpu")

    def place(self, chain: ChainPlan) -> CpuChain:
        return CpuChain(chain)

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def upload(self, clip: Samples | Tensor) -> Tensor:
        """Return a tensor that shares the memory of `clip` if that memory is writable."""
        if isinstance(clip, Tensor):
            return clip
        return torch.from_numpy(np.require(clip, requirements=["C", "W"]))

    def clip_of(self, x: Tensor) -> Samples:
        samples: Samples = x.numpy()
        return samples

    def download(self, frames: list[Any]) -> list[Samples]:
        return frames

    def run_full_rate(self, tables: ChainTables, x: Tensor, coef: Tensor, state: Tensor) -> Tensor:
        out = empty((x.shape[0], tables.width, x.shape[2]), x)
        _run(tables, x.numpy(), coef.numpy(), state.numpy(), out.numpy(), [0] * len(x))
        return out

    def run_adjoint(
        self, tables: ChainTables, x: Tensor, gy: Tensor, coef: Tensor, state: Tensor,
        gstate: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        loop, ops = loop_of(tables.steps, tables.rows)
        room, shared = scratch_rows(tables.steps, tables.filters[:, 0]), x.shape[1] == 1
        with training():
            gx = empty((x.shape[0], tables.channels, x.shape[2]), x)
        gcoef = coef.new_zeros(x.shape[0], *coef.shape)
        inputs, upstream, gx_np, gcoefs = (t.numpy() for t in (x, gy, gx, gcoef))
        coefs, states, gstates = (t.numpy() for t in (coef, state, gstate))

        def one(b: int, g: int, part: slice) -> None:
            source = inputs[b] if shared else inputs[b, part]
            loop.run_adjoint(
                source, upstream[b], gx_np[b, part], shared, part.stop - part.start, ops, coefs[g],
                gcoefs[b, g], states[b, g], gstates[b, g], tables.filters, tables.columns[g],
                room,
            )  # fmt: skip

        _over_items(one, len(inputs), tables)
        return gx, gcoef

    @property
    def workers(self) -> int:
        return get_num_threads()

    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        flat = [a.reshape(-1).numpy() if isinstance(a, Tensor) else a for a in arguments]
        rooms: dict[int, Array] = {}  # by thread

        def one(item: int) -> None:
            thread = get_ident()
            if thread not in rooms:
                numbers = (a for a in flat if isinstance(a, np.ndarray) and a.dtype.kind == "f")
                rooms[thread] = aligned_array(room, next(numbers).dtype)
            body(item, *flat, rooms[thread])

        parallel_for(one if room else lambda item: body(item, *flat), items)


def _run(
    tables: ChainTables, clips: Arrays, coef: Array, states: Arrays, outs: Arrays,
    starts: Sequence[int],
) -> None:  # fmt: skip
    """Run a chain over clips.

    Args:
        tables: The chain.
        clips: Waveforms of any lengths, (channel or 1, time).
        coef: (group, rows * LANES).
        states: Per clip (group, rows * LANES); updated in place.
        outs: Per clip the frames, (frame, width), or the outputs at full rate, (width, time).
        starts: Index in its signal of the first sample of every clip.
    """
    loop, ops = loop_of(tables.steps, tables.rows)
    mode = POOL_BANK if tables.pool is not None else STORE_BANK if len(tables.filters) else STORE
    samples, frames = tables.samples_per_frame
    output = tables.samples_per_output, tables.lookahead

    def one(i: int, g: int, part: slice) -> None:
        shared = len(clips[i]) == 1
        source = np.ascontiguousarray(clips[i] if shared else clips[i][part])
        frame = np.array([samples, frames, starts[i], *output], np.int64)
        loop.run_chain(
            source, source.shape[1], shared, part.stop - part.start, ops, coef[g], states[i][g],
            mode, tables.filters, tables.columns[g], tables.pool or 0, frame, outs[i],
        )  # fmt: skip

    _over_items(one, len(clips), tables)


def _over_items(one: Callable[[int, int, slice], None], clips: int, tables: ChainTables) -> None:
    """Call `one(clip, group, channels of the group)` on the pool."""
    groups = len(tables.columns)

    def item(k: int) -> None:
        i, g = divmod(k, groups)
        one(i, g, slice(g * LANES, min((g + 1) * LANES, tables.channels)))

    parallel_for(item, clips * groups)
