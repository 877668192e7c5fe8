"""Samples to frames of one feature stream, by the fused kernel or from whole clips.

- `FusedFeatures`: clip -> front end -> fused chain of operations, filters, pooling. Any length.
- `FullRateFeatures`: clip -> front end -> operations -> one band at a time -> pooling. It serves
  stages that need the whole signal. The channels of the clip are in memory.
- `EnvelopeFeatures`: clip -> front end -> fused chain -> Hilbert envelopes -> means. The bands of
  the clip are in memory at a reduced rate.

The front end is computed once for all streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from amtcore.kernels.backend import Backend, Chain, Samples
from amtcore.kernels.chain import ChainPlan, ChainStep, check_sizes, tables_of_steps
from amtcore.kernels.devices import get_backend
from amtcore.kernels.pooling import POOLS
from amtcore.kernels.vector.threads import get_num_threads, parallel_for, parallel_map
from amtcore.models.time_domain import WholeSignalBands
from amtcore.stages.envelope_means import envelope_means, zeros_around
from amtcore.stages.stage import Stage

#: Signals whose channels a GPU holds at once.
_CHANNEL_BYTES = 2**31
#: Samples of the clips that a GPU filters at once before the filterbank.
_GROUP_SAMPLES = 2**26


class FrontEnd:
    """The stages of a model before its filterbank, in order."""

    def __init__(self, stages: Sequence[Stage], backend: Backend) -> None:
        self._stages, self.backend = stages, backend
        self._states: list[Any] = [None] * len(stages)

    def push(
        self, chunk: Samples | Tensor, last: bool = False, beyond: Tensor | None = None
    ) -> Any:
        """Filter the next samples, and with `last` the samples that were held back.

        `beyond` is True behind the end of each of several clips. A stage takes zeros there, where
        the stage before it rings on.
        """
        if not self._stages:
            return chunk
        x = self.backend.upload(chunk)
        with torch.no_grad():
            for i, stage in enumerate(self._stages):
                ending = {"last": last} if stage.looks_ahead else {}
                x, self._states[i] = stage.stream(x, self._states[i], **ending)  # type: ignore[operator]
                if beyond is not None:
                    x = x.masked_fill(beyond, 0.0)
        return self.backend.clip_of(x)


def filtered(stages: Sequence[Stage], backend: Backend, clips: Sequence[Any]) -> list[Any]:
    """Return whole clips behind the front end; on a GPU, clips of similar length go together."""
    if not stages or backend.name == "cpu":
        return [FrontEnd(stages, backend).push(clip, last=True) for clip in clips]
    made: dict[int, Any] = {}
    for group in alike([len(clip) for clip in clips], _GROUP_SAMPLES, least_share=0.75):
        signals = backend.share([clips[i] for i in group])
        x = torch.nn.utils.rnn.pad_sequence(signals, batch_first=True)
        lengths = torch.tensor([[len(signal)] for signal in signals]).to(x.device)
        beyond = torch.arange(x.shape[1], device=x.device) >= lengths
        y = FrontEnd(stages, backend).push(x, last=True, beyond=beyond)
        made |= {i: row[: len(clips[i])] for i, row in zip(group, y, strict=True)}
    return [made[i] for i in range(len(clips))]


def alike(lengths: Sequence[int], most_samples: int, least_share: float = 0.0) -> list[list[int]]:
    """Return groups of positions of similar length, the longest first.

    The shortest of a group has at least `least_share` of the longest's samples, and a group of
    several has at most `most_samples`, padding included.

    >>> alike([10, 100, 80, 70, 90], 200, least_share=0.75)
    [[1, 4], [2, 3], [0]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        fits = groups and (len(groups[-1]) + 1) * longest <= most_samples
        if fits and lengths[i] >= least_share * longest:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class FusedFeatures:
    """A stream of the fused kernel, chunk by chunk or whole."""

    def __init__(self, chain: ChainPlan) -> None:
        self._compiled, self.width = chain, chain.tables.width
        #: Samples from frame to frame, and factors by which the chain decimates.
        self.hops = chain.hops
        #: Bytes of one number.
        self.itemsize = chain.coef.itemsize
        self.place(get_backend("cpu"))

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on."""
        self._backend, self.chain = backend, backend.place(self._compiled)

    def n_frames(self, n_samples: int) -> int:
        """Return the number of whole frames in `n_samples` samples."""
        return self._compiled.n_frames(n_samples)

    def fresh(self, clips: int) -> Any:
        """Return the states of `clips` signals before their first sample, for `push`."""
        return self.chain.fresh(clips)

    def push(self, clips: Sequence[Any], states: Any, start: int) -> list[Samples]:
        """Return the frames that the next samples of each clip complete."""
        return self._backend.download(self.chain.push(clips, states, start))

    def finish(self, states: Any, samples: Sequence[int]) -> list[Samples]:
        """Return the frames of each clip that waited for the end of its `samples` samples."""
        return self._backend.download(self.chain.finish(states, samples))

    def extract(self, clips: Sequence[Any]) -> list[Samples]:
        """Return (frames, width) of each clip."""
        states = self.fresh(len(clips))
        frames = self.push(clips, states, 0)
        if self._compiled.tail is None:
            return frames
        last = self.finish(states, [len(clip) for clip in clips])
        return [np.concatenate(parts) for parts in zip(frames, last, strict=True)]


class WholeClipFeatures(ABC):
    """A stream that needs whole clips. On a GPU clips of similar length run together.

    Args:
        bands: The modulation bands of a channel.
        pooling: Pools one band of all channels.
    """

    def __init__(self, bands: WholeSignalBands, pooling: ChainPlan) -> None:
        self._bands, self._pooling = bands, pooling
        self.width = bands.count * pooling.tables.width
        #: Empty: the grids of a whole clip begin with the clip.
        self.hops: tuple[Fraction, ...] = ()
        self.place(get_backend("cpu"))

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on."""
        self._backend = backend

    def n_frames(self, n_samples: int) -> int:
        """Return the number of whole frames in `n_samples` samples."""
        return self._pooling.n_frames(n_samples * self._bands.rates[0] // self._bands.rates[1])

    def extract(self, clips: Sequence[Any]) -> list[Samples]:
        """Return (frames, width) of each clip, columns channel by channel."""
        groups = self._groups(clips)
        frames: dict[int, list[Any]] = {}

        def run(k: int) -> None:
            with torch.no_grad():
                signals = [
                    clip if isinstance(clip, Tensor) else self._backend.upload(clip)
                    for clip in self._backend.share([clips[i] for i in groups[k]])
                ]
                frames.update(zip(groups[k], self._pooled(signals), strict=True))

        if len(clips) < get_num_threads() or self._backend.name != "cpu":
            for k in range(len(groups)):
                run(k)
        else:
            parallel_for(run, len(groups))
        arrays = iter(self._backend.download([band for i in sorted(frames) for band in frames[i]]))
        nothing = np.empty((0, self.width), self._pooling.coef.dtype)
        return [
            np.stack([*islice(arrays, self._bands.count)], -1).reshape(-1, self.width)
            if i in frames
            else nothing
            for i in range(len(clips))
        ]

    def _groups(self, clips: Sequence[Any]) -> list[list[int]]:
        """Group the clips with frames that run together; on the CPU each runs alone."""
        heard = [i for i, clip in enumerate(clips) if self.n_frames(len(clip))]
        if self._backend.name == "cpu":
            return [[i] for i in heard]
        most_samples = _CHANNEL_BYTES // (self._pooling.tables.channels * 8)
        groups = alike([len(clips[i]) for i in heard], most_samples)
        return [[heard[k] for k in group] for group in groups]

    @abstractmethod
    def _pooled(self, signals: Sequence[Tensor]) -> list[list[Any]]:
        """Return for each signal the frames of each band, (frame, channel), on the device."""


class FullRateFeatures(WholeClipFeatures):
    """Channels at full rate, then one modulation band at a time.

    The memory is a few bands of one clip for each thread.

    Args:
        ops: Operations up to the bands' input.
        bands: Computes the bands.
        pooling: Pools one band of all channels.
    """

    def __init__(
        self, ops: Sequence[ChainStep], bands: WholeSignalBands, pooling: ChainPlan
    ) -> None:
        check_sizes(ops)
        self._coef = torch.cat([op.coef for op in ops], 1)
        steps = tuple((op.operation, op.argument) for op in ops)
        self._tables = tables_of_steps(steps, len(self._coef))
        self._rest = torch.cat([op.state for op in ops], 1)
        super().__init__(bands, pooling)

    def place(self, backend: Backend) -> None:
        super().place(backend)
        self._chain = backend.place(self._pooling)
        self._coef, self._rest = self._coef.to(backend.device), self._rest.to(backend.device)

    def _pooled(self, signals: Sequence[Tensor]) -> list[list[Any]]:
        frames: list[list[Any]] = [[] for _ in signals]
        # Padding after a clip does not change its frames, as no operation looks ahead.
        x = torch.nn.utils.rnn.pad_sequence(list(signals), batch_first=True).unsqueeze(1)
        rest = self._rest.expand(len(signals), *self._rest.shape)
        channels, _ = self._backend.run_chain(self._tables, x, self._coef, rest)
        for band in self._bands.bands(channels, [len(signal) for signal in signals]):
            samples = [self._backend.clip_of(of_clip[0]) for of_clip in band]
            for of_clip, pooled in zip(frames, _pushed(self._chain, samples), strict=True):
                of_clip.append(pooled)
        return frames


class EnvelopeFeatures(WholeClipFeatures):
    """Means or root mean squares of bands, some of them Hilbert envelopes at a reduced rate.

    The fused kernel pools the bands without an envelope, and computes cells of the others; see
    `envelope_means`. No band is in memory at full rate.

    Args:
        bands: The bands and their `filters`.
        pooling: Pools one band of all channels, by "mean" or "rms".
        plain: Pools the bands without an envelope; None if there are none.
        cells: Computes the cells, as its frames.
        steps: Samples of the cells of a channel's envelopes.
    """

    def __init__(
        self, bands: WholeSignalBands, pooling: ChainPlan, plain: ChainPlan | None,
        cells: ChainPlan, steps: Sequence[int],
    ) -> None:  # fmt: skip
        self._plain_plan, self._cells_plan, self._steps = plain, cells, steps
        super().__init__(bands, pooling)

    def place(self, backend: Backend) -> None:
        super().place(backend)
        self._plain = self._plain_plan and backend.place(self._plain_plan)
        self._cells = backend.place(self._cells_plan)

    def _pooled(self, signals: Sequence[Tensor]) -> list[list[Any]]:
        backend, tables, filters = self._backend, self._pooling.tables, self._bands.filters
        assert filters is not None, "bands have filters if envelopes alone need the whole signal"
        (samples, frames), square = tables.samples_per_frame, tables.pool == POOLS["rms"]
        padded = [pad(x, zeros_around(len(x), self._steps)) for x in signals]
        cells = _pushed(self._cells, [backend.clip_of(x) for x in padded])
        plain = self._plain and _pushed(self._plain, [backend.clip_of(x) for x in signals])

        def of_signal(i: int) -> list[Any]:
            of_cells = cells[i] if isinstance(cells[i], Tensor) else backend.upload(cells[i])
            count = len(signals[i])
            edges = -(-torch.arange(self.n_frames(count) + 1) * samples // frames)
            with torch.no_grad():
                means = envelope_means(of_cells, count, self._steps, edges, square)
            envelopes = iter(_bands(backend.clip_of(means), tables.channels))
            others = iter(_bands(plain[i], tables.channels) if plain else [])
            return [next(envelopes if each else others) for each in filters.is_envelope]

        if backend.name != "cpu":
            return [of_signal(i) for i in range(len(signals))]
        # A thread of the pool has one thread of torch, which fixes the order of sums.
        return parallel_map(of_signal, len(signals))


def _pushed(chain: Chain, clips: Sequence[Any]) -> list[Any]:
    """Return the frames of whole clips."""
    return chain.push(clips, chain.fresh(len(clips)), 0)


def _bands(frames: Any, channels: int) -> list[Any]:
    """Split frames of all channels and bands into (frame, channel) of each band."""
    by_band = frames.reshape(len(frames), channels, -1)
    return [by_band[:, :, m] for m in range(by_band.shape[2])]
