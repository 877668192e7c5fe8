"""Samples to frames of one feature stream, by the fused kernel or from whole clips.

    clip -> front end -> fused chain: operations, filters, pooling                (any length)
    clip -> front end -> operations at full rate -> one band at a time -> pooling (clip in memory).

The second way serves stages that need the whole signal, such as a Hilbert envelope. The front end
is computed once for all streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.backend import Backend, Samples
from amtcore.kernels.chain import ChainPlan, ChainStep, check_sizes, tables_of_steps
from amtcore.kernels.devices import get_backend
from amtcore.kernels.pooling import POOLS
from amtcore.kernels.vector.threads import get_num_threads, parallel_for, parallel_map
from amtcore.models.time_domain import WholeSignalBands
from amtcore.stages.stage import Stage

#: Signals whose channels a GPU holds at once.
_CHANNEL_BYTES = 2**28
#: Samples of the clips that a GPU filters at once before the filterbank.
_GROUP_SAMPLES = 2**26


class FrontEnd:
    """The stages of a model before its filterbank, in order."""

    def __init__(self, stages: Sequence[Stage], backend: Backend) -> None:
        self._stages, self.backend = stages, backend
        self._states: list[Any] = [None] * len(stages)

    def push(self, chunk: Samples | Tensor, last: bool = False) -> Any:
        """Filter the next samples, and with `last` the samples that were held back."""
        if not self._stages:
            return chunk
        x = self.backend.upload(chunk)
        with torch.no_grad():
            for i, stage in enumerate(self._stages):
                ending = {"last": last} if stage.looks_ahead else {}
                x, self._states[i] = stage.stream(x, self._states[i], **ending)  # type: ignore[operator]
        return self.backend.clip_of(x)


def filtered(stages: Sequence[Stage], backend: Backend, clips: Sequence[Any]) -> list[Any]:
    """Return whole clips behind the front end; on a GPU, clips of similar length go together.

    Zeros after a clip do not change its samples: beyond a clip's end, every stage takes zeros.
    """
    if not stages or backend.name == "cpu":
        return [FrontEnd(stages, backend).push(clip, last=True) for clip in clips]
    made: dict[int, Any] = {}
    for group in alike([len(clip) for clip in clips], _GROUP_SAMPLES):
        signals = backend.share([clips[i] for i in group])
        x = torch.nn.utils.rnn.pad_sequence(signals, batch_first=True)
        y = FrontEnd(stages, backend).push(x, last=True)
        made |= {i: row[: len(clips[i])] for i, row in zip(group, y, strict=True)}
    return [made[i] for i in range(len(clips))]


def alike(lengths: Sequence[int], most_samples: int) -> list[list[int]]:
    """Return groups of positions of similar length, the longest first.

    The shortest of a group has at least three quarters of the longest's samples, and a group of
    several has at most `most_samples`, padding included.

    >>> alike([10, 100, 80, 70, 90], 200)
    [[1, 4], [2, 3], [0]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        fits = groups and (len(groups[-1]) + 1) * longest <= most_samples
        if fits and 4 * lengths[i] >= 3 * longest:
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


class WholeClipFeatures:
    """A stream that needs whole clips: channels at full rate, then one modulation band at a time.

    The memory is a few bands of one clip for each thread. On a GPU clips of similar length run
    together.

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
        self._bands, self._compiled = bands, pooling
        self.width = bands.count * pooling.tables.width
        #: Empty: the grids of a whole clip begin with the clip.
        self.hops: tuple[Fraction, ...] = ()
        self.place(get_backend("cpu"))

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on."""
        self._backend, self._pooling = backend, backend.place(self._compiled)
        self._coef, self._rest = self._coef.to(backend.device), self._rest.to(backend.device)

    def n_frames(self, n_samples: int) -> int:
        """Return the number of whole frames in `n_samples` samples."""
        return self._compiled.n_frames(n_samples * self._bands.rates[0] // self._bands.rates[1])

    def extract(self, clips: Sequence[Any]) -> list[Samples]:
        """Return (frames, width) of each clip, columns channel by channel."""
        groups = self._groups(clips)
        frames: dict[int, list[Any]] = {}

        def run(k: int) -> None:
            made = self._pooled([clips[i] for i in groups[k]])
            frames.update(zip(groups[k], made, strict=True))

        if len(clips) < get_num_threads() or self._backend.name != "cpu":
            for k in range(len(groups)):
                run(k)
        else:
            parallel_for(run, len(groups))
        arrays = iter(self._backend.download([band for i in sorted(frames) for band in frames[i]]))
        nothing = np.empty((0, self.width), self._compiled.coef.dtype)
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
        groups: list[list[int]] = []
        most = 0  # clips of a group, by the length of its first clip, the longest
        for i in sorted(heard, key=lambda i: -len(clips[i])):
            if not groups or len(groups[-1]) >= most:
                most = _CHANNEL_BYTES // (self._coef.shape[0] * len(clips[i]) * 8)
                groups.append([])
            groups[-1].append(i)
        return groups

    def _pooled(self, clips: Sequence[Any]) -> list[list[Any]]:
        """Return the frames of every clip and band, on the device."""
        frames: list[list[Any]] = [[] for _ in clips]
        with torch.no_grad():
            # Padding after a clip does not change its frames, as no operation looks ahead.
            signals = [
                clip if isinstance(clip, Tensor) else self._backend.upload(clip)
                for clip in self._backend.share(list(clips))
            ]
            x = torch.nn.utils.rnn.pad_sequence(signals, batch_first=True).unsqueeze(1)
            rest = self._rest.expand(len(clips), *self._rest.shape)
            channels, _ = self._backend.run_chain(self._tables, x, self._coef, rest)
            lengths = [len(signal) for signal in signals]
            means = self._means(
                [x[:, :n].contiguous() for x, n in zip(channels, lengths, strict=True)]
            )
            bands = self._bands.bands(channels, lengths, [*means[0]])
            for number in range(self._bands.count):
                if number in means[0]:
                    made = [self._backend.clip_of(of_clip[number]) for of_clip in means]
                else:
                    samples = [self._backend.clip_of(of_clip[0]) for of_clip in next(bands)]
                    made = self._pooling.push(samples, self._pooling.fresh(len(samples)), 0)
                for of_clip, pooled in zip(frames, made, strict=True):
                    of_clip.append(pooled)
        return frames

    def _means(self, signals: Sequence[Tensor]) -> list[dict[int, Any]]:
        """Return (frame, channel) of the bands whose means need no band at full rate, by signal."""
        pool, means = self._compiled.tables.pool, self._bands.means
        if means is None or pool not in (POOLS["mean"], POOLS["rms"]):
            return [{} for _ in signals]
        samples, frames = self._compiled.tables.samples_per_frame
        numbers = [torch.arange(self.n_frames(x.shape[-1]) + 1, device=x.device) for x in signals]
        edges = [-(-number * samples // frames) for number in numbers]
        if self._backend.name != "cpu":
            return means(signals, edges, pool == POOLS["rms"])

        def of_signal(i: int) -> dict[int, Any]:
            with torch.no_grad():
                return means(signals[i : i + 1], edges[i : i + 1], pool == POOLS["rms"])[0]

        # A thread of the pool has one thread of torch, which fixes the order of sums.
        return parallel_map(of_signal, len(signals))
