"""Clips through a job's models, and their features: checked, cast, joined.

On a CPU clips go through in batches of similar lengths, on a GPU in launches; a clip's features
depend on neither. A stream is an array of frames, or the events of a clip (`SpikeEvents`), which
become a table of whole numbers. A long clip goes through chunk by chunk, its features into files.
"""

from __future__ import annotations

import math
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.common.errors import DtypeRangeError, NonFiniteFeatureError, RowError
from earmill.pipeline.common.monitoring import CpuSeconds, carried, counted, counts, current, doing
from earmill.pipeline.formats.values import BLOCK_FRAMES, Caster, CastError, Frames, Spilled, Values
from earmill.pipeline.sources.base import Item
from earmill.pipeline.worker.device import DeviceInput, Gpu, device_errors
from earmill.pipeline.worker.launches import LaunchBatcher
from earmill.pipeline.worker.listeners import ModelOfRow
from earmill.pipeline.worker.prefetch import prefetched
from earmill.pipeline.worker.prepare import Clip, LongClip, ModelOutput

if TYPE_CHECKING:
    from amtcore.features.feature_model import Extractor


# Buckets of clip lengths: the longest clip of each, in samples.
FIRST_BUCKET_SAMPLES = 1000
BUCKET_RATIO = 1.5
BUCKET_ENDS = [math.floor(FIRST_BUCKET_SAMPLES * BUCKET_RATIO**k) for k in range(64)]


def form_batches(lengths: Sequence[int], max_samples: int) -> list[list[int]]:
    """Split clips into batches, as positions in `lengths`, of at most `max_samples` or of one clip.
    A batch has clips of one length bucket, so padding is bounded and kernels meet few shapes."""
    by_bucket: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        by_bucket.setdefault(bisect_left(BUCKET_ENDS, length), []).append(position)
    batches: list[list[int]] = []
    for _, members in sorted(by_bucket.items()):
        size = 0
        for position in members:
            if not size or size + lengths[position] > max_samples:
                batches.append([])
                size = 0
            batches[-1].append(position)
            size += lengths[position]
    return batches


def extracted(extractor: Extractor, signals: Sequence[Frames]) -> list[dict[str, Any]]:
    """Return the features of a batch, with a RowError in place of each refused stream."""
    from amtcore.errors import NonFiniteError  # loads torch, which only workers need

    try:
        return extractor.extract(signals)
    except NonFiniteError as error:
        if len(signals) == 1:
            refused = NonFiniteFeatureError(f"the model refused: {error}")
            return [{info.name: refused for info in extractor.streams}]
        return [made for signal in signals for made in extracted(extractor, [signal])]


@dataclass(frozen=True)
class CastFeatures:
    streams: dict[str, Values] = field(default_factory=dict)  # Values as in `FeatureRow`.
    steps: dict[str, int] = field(default_factory=dict)  # Steps of events and int8 frames.
    errors: dict[str, CastError] = field(default_factory=dict)  # Cast errors of frames.
    begun: dict[str, Frames] = field(default_factory=dict)  # Int8 frames of the next block.

    def take(self, name: str, made: Any, cast: Caster, *, last: bool) -> Frames:
        """Return a stretch of a stream, cast, and note its steps and cast errors; or RowError."""
        if isinstance(made, RowError):
            raise made
        if isinstance(made, np.ndarray):
            if name in cast.in_blocks:
                self.steps[name] = self.steps.get(name, 0) + len(made)
                # Frames behind the last full int8 block wait for the next stretch.
                held = np.concatenate([self.begun[name], made]) if name in self.begun else made
                due = len(held) if last else len(held) // BLOCK_FRAMES * BLOCK_FRAMES
                self.begun[name], made = held[due:].copy(), held[:due]
            frames, error = cast(name, made)
            before = self.errors.get(name)
            self.errors[name] = error if before is None else CastError.of_all([before, error])
            return frames
        self.steps[name] = made.first_frame + made.n_frames
        try:
            columns: Frames = made.to_columns()
        except ValueError as error:
            raise DtypeRangeError(f"stream {name}: {error}") from error
        return columns

    def spill(
        self, made: ModelOutput, cast: Caster, folder: str | None, *, last: bool = False
    ) -> None:
        """Cast the next stretch of a long clip and append it to files in `folder`."""
        for name, stretch in made.items():
            rows = self.take(name, stretch, cast, last=last)
            if name not in self.streams:
                self.streams[name] = Spilled(rows.dtype, rows.shape[1], folder)
            self.streams[name].append(rows)  # type: ignore[union-attr]


def stored(made: ModelOutput, cast: Caster) -> CastFeatures:
    whole = CastFeatures()
    for name, values in made.items():
        whole.streams[name] = whole.take(name, values, cast, last=True)
    return whole


# A batch is at most this long; fused kernels hold no full-rate output, so this bounds only inputs.
BATCH_S = 160.0
# Callers of models that several callers may use: one computes, the next one is ready.
CALLERS = 2
# Shards that are decoded at a time for a GPU: one alone would wait for its first bytes.
DECODED_SHARDS = 2

# Positions of clips that are computed together, and the features of each.
Batch = tuple[Sequence[int], Future[list[ModelOutput]]]


@dataclass(frozen=True, eq=False)
class Ticket:
    queue: ModelQueue

    def wait(self) -> None:
        """Return when fewer than `served` earlier tickets are out, or this one was given back."""
        queue = self.queue
        with queue.changed:
            queue.changed.wait_for(lambda: self not in [*queue.tickets][queue.served :])

    def give_back(self) -> None:
        with self.queue.changed:
            if self in self.queue.tickets:
                self.queue.tickets.remove(self)
                self.queue.changed.notify_all()


class ModelQueue:
    """First-in, first-out access of shards to the models, of `served` shards at a time."""

    def __init__(self, served: int = 1) -> None:
        self.served = served
        self.changed = threading.Condition()
        self.tickets: deque[Ticket] = deque()

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        ticket = Ticket(self)
        with self.changed:
            self.tickets.append(ticket)
        try:
            yield ticket
        finally:
            ticket.give_back()


class Extraction:
    """The models of a job; `pool` reads long clips ahead, by `ahead_bytes` at most."""

    # Windows of a shard that may be under way while its next one is gathered.
    windows_ahead = 1

    def __init__(
        self,
        extractors: Sequence[Extractor],
        *,
        cast: Caster,
        pool: Executor,
        spill_folder: str | None,
        ahead_bytes: int,
        listeners: Mapping[int, ModelOfRow],
    ) -> None:
        self._extractors, self._listeners = tuple(extractors), listeners
        self._cast, self._pool, self._spill_folder = cast, pool, spill_folder
        self._ahead_bytes = ahead_bytes
        # Models that one caller at a time may use, beside others that several use; by number.
        self._one_caller: dict[int, threading.Lock] = {}
        callers = CALLERS if all(each.takes_several_callers for each in extractors) else 1
        self._callers = ThreadPoolExecutor(callers, thread_name_prefix="model")
        self._queue = ModelQueue()

    def shard(self) -> AbstractContextManager[Ticket]:
        return self._queue.ticket()

    def begin(self, clips: Sequence[Clip]) -> list[Batch]:
        lengths = [clip.signals[0].shape[-1] for clip in clips]
        extract = carried("model", self._extract)
        begun: list[Batch] = []
        for batch in form_batches(lengths, round(BATCH_S * self._extractors[0].fs_hz)):
            counts.batch([lengths[position] for position in batch])
            by_model = zip(*(clips[position].signals for position in batch), strict=True)
            items = [clips[position].item for position in batch]
            begun.append((batch, self._callers.submit(extract, list(by_model), items)))
        return begun

    def long(self, clip: LongClip, ticket: Ticket) -> list[CastFeatures]:
        """Return the features of a long clip, by channel, in files; `ticket` is its shard's."""
        return self._callers.submit(carried("model", self._long), clip).result()

    def close(self) -> None:
        self._callers.shutdown(wait=True, cancel_futures=True)

    def _long(self, clip: LongClip) -> list[CastFeatures]:
        from amtcore.errors import NonFiniteError  # loads torch, which only workers need

        models = [self._model(index, clip.item) for index in range(len(self._extractors))]
        infos = [info for model in self._extractors for info in model.streams]
        channels = [
            (
                CastFeatures(),
                [model.open_stream() for model in models],
                clip.preparer.frame_trim(clip.item, infos),
            )
            for _ in clip.channels
        ]
        pieces = prefetched(
            counted("decode", clip.pieces(), current()),
            lambda piece: piece,
            pool=self._pool,
            nbytes=lambda piece: sum(s.nbytes for signals in piece for s in signals),
            budget_bytes=self._ahead_bytes,
            in_flight=1,
        )
        try:
            for piece in chain(pieces, [None]):  # None is the end of the clip.
                for channel, (whole, streams, own) in enumerate(channels):
                    signals = None if piece is None else piece[channel]
                    for index, stream in enumerate(streams):
                        with doing("model", libraries="models", model=models[index].model):
                            made = (
                                stream.finish() if signals is None else stream.push(signals[index])
                            )
                        with doing("encode"):
                            kept = made if own is None else own.take(made)
                            whole.spill(kept, self._cast, self._spill_folder, last=signals is None)
            for _, _, own in channels:
                if own is not None:
                    own.check()
        except NonFiniteError as error:
            raise NonFiniteFeatureError(f"the model refused: {error}") from error
        finally:
            pieces.close()
        return [whole for whole, _, _ in channels]

    def _model(self, index: int, item: Item) -> Extractor:
        """Return the extractor of a model for a row."""
        listeners = self._listeners.get(index)
        return self._extractors[index] if listeners is None else listeners(item)

    def _extract(
        self, by_model: Sequence[Sequence[Any]], items: Sequence[Item]
    ) -> list[ModelOutput]:
        features: list[dict[str, Any]] = [{} for _ in by_model[0]]
        for index, signals in enumerate(by_model):
            lock, name = self._one_caller.get(index, nullcontext()), self._extractors[index].model
            with lock, doing("model", libraries="models", model=name):
                places: dict[Extractor, list[int]] = {}
                for place, item in enumerate(items):
                    places.setdefault(self._model(index, item), []).append(place)
                for model, of_model in places.items():
                    made = extracted(model, [signals[place] for place in of_model])
                    for place, streams in zip(of_model, made, strict=True):
                        features[place] |= streams
        return [*features]


class GpuExtraction(Extraction):
    """A job's models on a GPU, for the clips of all shards; `cpu` gets the launches' CPU time."""

    # The queue of clips is bounded, so a shard need not wait for its own.
    windows_ahead = sys.maxsize

    def __init__(
        self,
        extractors: Sequence[Extractor],
        gpu: Gpu,
        cpu: CpuSeconds | None = None,
        **options: Any,
    ) -> None:
        super().__init__(extractors, **options)
        self._cpu = cpu
        self._queue = ModelQueue(DECODED_SHARDS)
        self._input = DeviceInput(gpu)
        # Models without kernels for GPUs run on the processor, where one caller may use them.
        self._one_caller = {
            index: threading.Lock()
            for index, extractor in enumerate(self._extractors)
            if extractor.backend.name == "cpu"
        }
        self._launches = LaunchBatcher(self._run_launch, most_bytes=gpu.launch_bytes())
        counts.watch(self._launches)

    @contextmanager
    def shard(self) -> Iterator[Ticket]:
        # Shards are decoded in order: if all were decoded together, all would be done together, and
        # the device would idle while they are written.
        with self._queue.ticket() as ticket:
            ticket.wait()
            yield ticket

    def begin(self, clips: Sequence[Clip]) -> list[Batch]:
        return [(range(len(clips)), self._launches.submit(clips))]

    def long(self, clip: LongClip, ticket: Ticket) -> list[CastFeatures]:
        # No shard waits for one that is busy with an hour of audio.
        ticket.give_back()
        with ExitStack() as inside:
            # Held for the whole clip: a stream's state is its own, its kernels' buffers are not.
            for lock in self._one_caller.values():
                inside.enter_context(lock)
            inside.enter_context(self._input.stream())
            inside.enter_context(device_errors("a long clip"))
            return self._long(clip)

    def close(self) -> None:
        super().close()
        self._launches.close()

    def _run_launch(self, clips: Sequence[Clip]) -> list[ModelOutput]:
        count = "one clip" if len(clips) == 1 else f"{len(clips)} clips"
        counts.batch([clip.signals[0].shape[-1] for clip in clips])
        with doing("model", self._cpu), self._input.stream(), device_errors(f"a launch of {count}"):
            by_model = self._input.signals(clips)
            for index in self._one_caller:
                # A model on the processor takes arrays.
                by_model[index] = [
                    one if isinstance(one, np.ndarray) else one.cpu().numpy()
                    for one in by_model[index]
                ]
            return self._extract(by_model, [clip.item for clip in clips])
