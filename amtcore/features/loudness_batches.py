"""Loudness of many signals on a GPU, in batches of a fixed number of blocks.

    signals, longest first    | a a a a a | b b b | c c c | d | e |
    batches of blocks         | a a a a | a b b b | c c c d | e . . . |    (. is silence).

Transforms, products and sums over frames have equal shapes in every batch, and a frame keeps its
place in its block. So the device takes equal kernels and adds in equal order for any set of
signals. Recurrences run over the blocks of each signal. The values of a signal therefore do not
depend on other signals, and the size of a batch bounds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.features.feature_model import ClipFeatures, Frames
from amtcore.features.loudness_pooling import ClipNumbers, Pooler, StreamPlan
from amtcore.kernels.backend import Backend, Chain
from amtcore.kernels.chain import compile_chain, identity_bank
from amtcore.models.composition import require_fusable
from amtcore.models.frame_blocks import BLOCK_FRAMES
from amtcore.models.loudness import Loudness, LoudnessModel, OverTime, Recurrence

#: Blocks of a batch, counted per ear. On a GPU the longest windows of these 65536 frames are 0.5 GB
#: of float32. An interpreter takes few.
_BATCH_BLOCKS = {"cuda": 512}
_FEW_BLOCKS = 4
#: Size of the features that are collected on the device before they go to the host.
_HELD_BYTES = 2**28


@dataclass(frozen=True)
class Signal:
    """A signal, or its part that is known.

    Args:
        ears: (ear, time) in the working type, on the host or on the device.
        first: Index of the first of these samples in the signal.
        samples: Number of known samples of the signal.
        begin: First model frame, which is the first of a block.
        end: Model frame after the last one.
        goes_on: Whether another part will follow, with `begin` at this part's `end`.
        carried: States of recurrences and of pooled streams, by name, from part to part.
    """

    ears: Any
    first: int
    samples: int
    begin: int
    end: int
    goes_on: bool = False
    carried: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockRun:
    """Successive blocks of one signal, `number`, from block `at` of a batch on.

    Their model frames are `begin` to `end` of the signal, `end` excluded.
    """

    number: int
    begin: int
    end: int
    at: int
    blocks: int


@dataclass(frozen=True)
class RunGroup:
    """Successive runs of equal length that run together.

    A run with a part of its signal before or after is alone in its group, with its state `carried`.
    """

    rows: list[BlockRun]
    carried: dict[str, Any] | None

    def cut(self, values: Tensor) -> Tensor:
        """Return (run, frame, ..) of (block, frame, ..)."""
        first, last = self.rows[0], self.rows[-1]
        mine = values[first.at : last.at + last.blocks]
        return mine.reshape(len(self.rows), -1, *values.shape[2:])


class _RunsOverTime(OverTime):
    """Recurrences over the runs of a batch."""

    def __init__(self, groups: Sequence[RunGroup]) -> None:
        super().__init__({})
        self._groups = groups

    def __call__(self, name: str, recurrence: Recurrence, x: Tensor) -> Tensor:
        """Run a recurrence over (block, frame, ..); silent blocks get 0."""
        parts, left = [], len(x)
        for group in self._groups:
            states = {} if group.carried is None else group.carried
            y, states[name] = recurrence(group.cut(x), states.get(name))
            parts.append(y.reshape(-1, *x.shape[1:]))
            left -= len(parts[-1])
        return torch.cat([*parts, x.new_zeros(left, *x.shape[1:])])


def batches_of_runs(signals: Sequence[Signal], size: int) -> Iterator[list[BlockRun]]:
    """Yield the runs of batches of `size` blocks, signals in their order."""
    rows: list[BlockRun] = []
    at = 0
    for number, signal in enumerate(signals):
        begin = signal.begin
        while begin < signal.end:
            blocks = min(size - at, -(-(signal.end - begin) // BLOCK_FRAMES))
            end = min(begin + blocks * BLOCK_FRAMES, signal.end)
            rows.append(BlockRun(number, begin, end, at, blocks))
            begin, at = end, at + blocks
            if at == size:
                yield rows
                rows, at = [], 0
    if rows:
        yield rows


def grouped(rows: Sequence[BlockRun], signals: Sequence[Signal]) -> list[RunGroup]:
    """Group runs that can run together."""
    groups: list[RunGroup] = []
    for row in rows:
        signal = signals[row.number]
        if row.begin > 0 or row.end < signal.end or signal.goes_on:
            groups.append(RunGroup([row], signal.carried))
            continue
        last = groups[-1] if groups else None
        if last is None or last.carried is not None or last.rows[0].blocks != row.blocks:
            groups.append(RunGroup([], None))
        groups[-1].rows.append(row)
    return groups


class _StreamFrames:
    """Frames of one stream: the model's own frames, or pooled by the fused kernel."""

    def __init__(self, plan: StreamPlan, like: Tensor, backend: Backend) -> None:
        self._plan = plan
        self._chain: Chain | None = None
        ratio = plan.ratio or (1, 1)
        if ratio != (1, 1):
            bank, rate = identity_bank(plan.info.width, like), plan.info.frame_rate_hz
            pooling = compile_chain([], bank, plan.info.pool, rate, rate)
            tables = replace(pooling.tables, samples_per_frame=ratio)
            self._chain = backend.place(replace(pooling, tables=tables))

    def take(self, groups: Sequence[RunGroup], loudness: Loudness) -> list[Tensor]:
        """Return the frames that every run completes."""
        values = self._plan.source(loudness)
        chain, n_frames, made = self._chain, self._plan.n_frames, []
        if chain is None:
            for group in groups:
                of_runs = zip(group.rows, group.cut(values), strict=True)
                made += [frames[: row.end - row.begin] for row, frames in of_runs]
            return made
        # (run, column, frame)
        parts = [group.cut(values).transpose(1, 2).contiguous() for group in groups]
        whole = [row for group, rows in zip(groups, parts, strict=True)
                 if group.carried is None for row in rows]  # fmt: skip
        pooled = iter(chain.push(whole, chain.fresh(len(whole)), 0))
        for group, rows in zip(groups, parts, strict=True):
            if group.carried is None:
                made += [next(pooled)[: n_frames(row.end)] for row in group.rows]
                continue
            (row,) = group.rows
            states = group.carried.setdefault(f"pooled {self._plan.info.name}", chain.fresh(1))
            frames = chain.push(list(rows), states, row.begin)[0]
            made.append(frames[: n_frames(row.end) - n_frames(row.begin)])
        return made


class LoudnessBatches:
    """A loudness model and its streams on a GPU; any number of callers at once.

    Args:
        model: Model on the backend's device.
        plans: Streams.
        backend: Backend of the computation.
        taps: Taps of the ear filter on the device.
    """

    def __init__(
        self, model: LoudnessModel, plans: Sequence[StreamPlan], backend: Backend, taps: Tensor
    ) -> None:
        self._model, self._plans, self._taps, self._grid = model, plans, taps, model.grid()
        self.backend = backend
        self.dtype: np.dtype[Any] = np.dtype(str(model.dtype).removeprefix("torch."))
        self._blocks = _BATCH_BLOCKS.get(backend.device.type, _FEW_BLOCKS)
        self._streams = [_StreamFrames(plan, model.fc.cpu(), backend) for plan in plans]

    def finishers(self) -> list[ClipNumbers | Pooler]:
        """Return the last step of every stream of a signal: its unit, or numbers of a clip."""
        return [plan.pooler(pooled=True) for plan in self._plans]

    def as_input(self, ears: Any) -> Any:
        """Convert (ear, time) to the working type; a tensor goes to the device."""
        if isinstance(ears, Tensor):
            return ears.to(self.backend.device, self._model.dtype)
        return np.ascontiguousarray(ears, self.dtype)

    def extract(self, clips: Sequence[Any]) -> list[ClipFeatures]:
        """Return the features of clips (ear, time)."""
        signals = [
            Signal(clip, 0, clip.shape[-1], 0, clip.shape[-1] // self._grid.hop)
            for clip in map(self.as_input, clips)
        ]
        return self.made(signals, [self.finishers() for _ in clips], last=True)

    def made(
        self,
        signals: Sequence[Signal],
        finishers: Sequence[Sequence[ClipNumbers | Pooler]],
        last: bool,
    ) -> list[ClipFeatures]:
        """Return the frames of every signal by stream; with `last` the signals end here."""
        require_fusable(self._model, self._model.named_children())
        pieces: list[list[list[Frames]]] = [
            [[np.empty((0, plan.source_width), self.dtype)] for plan in self._plans]
            for _ in signals
        ]
        with torch.no_grad(), self.backend.stream():
            for ears in sorted({len(signal.ears) for signal in signals}):
                alike = [i for i, signal in enumerate(signals) if len(signal.ears) == ears]
                alike.sort(key=lambda i: signals[i].begin - signals[i].end)  # longest first
                self._run([signals[i] for i in alike], [pieces[i] for i in alike])
        return [
            {
                plan.info.name: finisher.push(np.concatenate(parts), last)
                for plan, parts, finisher in zip(self._plans, of_signal, mine, strict=True)
            }
            for of_signal, mine in zip(pieces, finishers, strict=True)
        ]

    def _run(self, signals: Sequence[Signal], pieces: Sequence[list[list[Frames]]]) -> None:
        """Run signals with equal numbers of ears, and add to the pieces of every stream."""
        size = max(self._blocks // len(signals[0].ears), 1)
        held: list[Tensor] = []
        places: list[list[Frames]] = []

        def take_down() -> None:
            for place, frames in zip(places, self.backend.download(held), strict=True):
                place.append(frames)
            held.clear()
            places.clear()

        for rows in batches_of_runs(signals, size):
            groups = grouped(rows, signals)
            x, inside = self._samples(rows, signals, size)
            loudness = self._model.run_blocks(x, inside, self._taps, _RunsOverTime(groups))
            for k, stream in enumerate(self._streams):
                held += stream.take(groups, loudness)
                places += [pieces[row.number][k] for row in rows]
            if sum(frames.nbytes for frames in held) > _HELD_BYTES:
                take_down()
        take_down()

    def _samples(
        self, rows: Sequence[BlockRun], signals: Sequence[Signal], size: int
    ) -> tuple[Tensor, Tensor]:
        """Return (block, ear, samples), and (block, 1, samples), True inside a signal."""
        grid, parts, place = self._grid, [], 0
        # Rows of the table: place of sample 0 of the signal in the parts, distance of ears, index
        # of the block's first sample, and length of the signal.
        table: Any = np.zeros((4, size), np.int64)
        for row in rows:
            signal, span = signals[row.number], BLOCK_FRAMES * grid.hop
            starts = row.begin * grid.hop - grid.reach + span * np.arange(row.blocks)
            low = max(int(starts[0]), 0)
            high = min(int(starts[-1]) + grid.segment_samples, signal.samples)
            parts += [ear[low - signal.first : high - signal.first] for ear in signal.ears]
            columns = table[:, row.at : row.at + row.blocks]
            columns[0], columns[1], columns[3] = place - low, high - low, signal.samples
            columns[2] = starts
            place += (high - low) * len(signal.ears)
        samples = torch.cat(self.backend.share(parts))
        zero, stride, first, length = self.backend.upload(table)[:, :, None, None]
        index = first + torch.arange(grid.segment_samples, device=first.device)
        inside = (index >= 0) & (index < length)
        ear = torch.arange(len(signals[0].ears), device=first.device)[:, None]
        where = (zero + ear * stride + index).clamp(0, len(samples) - 1)
        return samples[where], inside
