"""Clips through a job's models: in batches of similar lengths on a CPU, in launches on a GPU.

A clip's features depend on neither. A long clip goes through chunk by chunk, its features into
files. On a CPU two calls are under way where the models allow it, so that the kernels' threads do
not idle at the end of a call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.counts import counts
from earmill.pipeline.common.timing import (
    DECODE,
    ENCODE,
    FOR_MODELS,
    MODEL,
    CpuSeconds,
    carried,
    counted,
    current,
    doing,
)
from earmill.pipeline.formats.values import Caster
from earmill.pipeline.worker.batches import LaunchBatcher, form_batches
from earmill.pipeline.worker.device import DeviceInput, Gpu, as_array, device_errors
from earmill.pipeline.worker.feature_values import (
    CastFeatures,
    ModelOutput,
    as_row_errors,
    extracted,
    spill,
)
from earmill.pipeline.worker.prefetch import prefetched
from earmill.pipeline.worker.prepare import Clip, FrameTrim, LongClip

if TYPE_CHECKING:
    from amtcore.features.base import Extractor


# A batch is at most this long; fused kernels hold no full-rate output, so this bounds only inputs.
BATCH_S = 160.0
# Callers of models that several callers may use: one computes, the next one is ready.
CALLERS = 2

# Positions of clips that are computed together, and per clip stream name -> (frames, width), or
# events.
Batch = tuple[Sequence[int], Future[list[ModelOutput]]]


@dataclass(frozen=True, eq=False)
class Ticket:
    """A shard's place in the queue for the models."""

    queue: ModelQueue

    def wait(self) -> None:
        """Return when all shards that lined up before have given their tickets back."""
        with self.queue.changed:
            self.queue.changed.wait_for(lambda: self.queue.tickets[0] is self)

    def give_back(self) -> None:
        """Let the next shard use the models; repeating it does no harm."""
        with self.queue.changed:
            if self in self.queue.tickets:
                self.queue.tickets.remove(self)
                self.queue.changed.notify_all()


class ModelQueue:
    """First-in, first-out access of shards to the models.

    Example:
        >>> queue = ModelQueue()
        >>> with queue.ticket() as ticket:
        ...     ticket.wait()  # returns when the shards that lined up before are done
        ...     ticket.give_back()  # the next shard may begin; the end of the block does it too
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tickets: deque[Ticket] = deque()

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Hold a place in the queue until it is given back or the block ends."""
        ticket = Ticket(self)
        with self.changed:
            self.tickets.append(ticket)
        try:
            yield ticket
        finally:
            ticket.give_back()


class Extraction:
    """The models of a job.

    Attributes:
        windows_ahead: Windows of a shard that may be under way while the next is filled.

    Args:
        extractors: One a model of the spec, in its order.
        cast: Casts the frames of long clips.
        spill_folder: Folder of their files.
        pool: Threads that read long clips ahead.
        ahead_bytes: Most bytes that are read ahead.
    """

    windows_ahead = 1

    def __init__(
        self,
        extractors: Sequence[Extractor],
        *,
        cast: Caster,
        pool: Executor,
        spill_folder: str | None,
        ahead_bytes: int,
    ) -> None:
        self._extractors = tuple(extractors)
        self._cast, self._pool, self._spill_folder = cast, pool, spill_folder
        self._ahead_bytes = ahead_bytes
        # Models that one caller at a time may use, beside others that several use; by number.
        self._one_caller: dict[int, threading.Lock] = {}
        callers = CALLERS if all(each.takes_several_callers for each in extractors) else 1
        self._callers = ThreadPoolExecutor(callers, thread_name_prefix="model")
        self._queue = ModelQueue()

    def shard(self) -> AbstractContextManager[Ticket]:
        """Return a context for the clips of one shard, with its ticket for the models."""
        return self._queue.ticket()

    def begin(self, clips: Sequence[Clip]) -> list[Batch]:
        """Start the extraction of a shard's next clips."""
        lengths = [clip.signals[0].shape[-1] for clip in clips]
        extract = carried(MODEL, self._extract)
        begun: list[Batch] = []
        for batch in form_batches(lengths, round(BATCH_S * self._extractors[0].fs_hz)):
            counts.batch([lengths[position] for position in batch])
            made = self._callers.submit(extract, [clips[position] for position in batch])
            begun.append((batch, made))
        return begun

    def long(self, clip: LongClip) -> list[CastFeatures]:
        """Return the features of a long clip, channel by channel.

        They are cast at once and go to files, so memory does not grow with the clip.
        """
        return self._callers.submit(carried(MODEL, self._long), clip).result()

    def close(self) -> None:
        """End the threads."""
        self._callers.shutdown(wait=True, cancel_futures=True)

    def _long(self, clip: LongClip) -> list[CastFeatures]:
        channels = len(clip.channels)
        streams = [[model.open_stream() for model in self._extractors] for _ in range(channels)]
        wholes = [CastFeatures() for _ in range(channels)]
        infos = [info for model in self._extractors for info in model.streams]
        owns = [clip.frame_trim(infos) for _ in range(channels)]
        pieces = prefetched(
            counted(DECODE, clip.pieces(), current()),
            lambda piece: piece,
            pool=self._pool,
            nbytes=lambda piece: sum(s.nbytes for signals in piece for s in signals),
            budget_bytes=self._ahead_bytes,
            in_flight=1,
        )
        with closing(pieces), as_row_errors():
            for piece in pieces:
                for channel, signals in enumerate(piece):
                    for stream, signal in zip(streams[channel], signals, strict=True):
                        with doing(MODEL, libraries=FOR_MODELS):
                            made = stream.push(signal)
                        self._spill(wholes[channel], made, owns[channel])
            for whole, of_models, own in zip(wholes, streams, owns, strict=True):
                for stream in of_models:
                    with doing(MODEL, libraries=FOR_MODELS):
                        made = stream.finish()
                    self._spill(whole, made, own, last=True)
                if own is not None:
                    own.check()
        return wholes

    def _extract(self, clips: Sequence[Clip]) -> list[ModelOutput]:
        return self._through([[c.signals[k] for c in clips] for k in range(len(self._extractors))])

    def _through(self, by_model: Sequence[Sequence[Any]]) -> list[ModelOutput]:
        """Return every model's features of its signals, clip by clip."""
        features: list[dict[str, Any]] = [{} for _ in by_model[0]]
        for index, signals in enumerate(by_model):
            lock = self._one_caller.get(index, nullcontext())
            with lock, doing(MODEL, libraries=FOR_MODELS):
                made = extracted(self._extractors[index], signals)
            for row, streams in zip(features, made, strict=True):
                row |= streams
        return [*features]

    def _spill(
        self, whole: CastFeatures, made: ModelOutput, own: FrameTrim | None, *, last: bool = False
    ) -> None:
        with doing(ENCODE):
            kept = made if own is None else own.take(made)
            spill(whole, kept, self._cast, self._spill_folder, last=last)


class GpuExtraction(Extraction):
    """The models of a job on a GPU, for the clips of all shards in flight at once.

    Args:
        gpu: The GPU that the extractors were built for.
        cpu: Gets the launches' CPU time.
    """

    # A launch is waited for where it begins.
    windows_ahead = 0

    def __init__(
        self,
        extractors: Sequence[Extractor],
        gpu: Gpu,
        cpu: CpuSeconds | None = None,
        **options: Any,
    ) -> None:
        super().__init__(extractors, **options)
        self._cpu = cpu
        self._input = DeviceInput(gpu)
        # Models without kernels for GPUs run on the processor, where one caller may use them.
        self._one_caller = {
            index: threading.Lock()
            for index, extractor in enumerate(self._extractors)
            if extractor.backend.name == "cpu"
        }
        self._launches = LaunchBatcher[Clip, ModelOutput](
            self._extract, most_bytes=gpu.launch_bytes()
        )

    @contextmanager
    def shard(self) -> Iterator[Ticket]:
        # Shards share launches, so none waits for another.
        with self._launches.shard(), ModelQueue().ticket() as ticket:
            yield ticket

    def begin(self, clips: Sequence[Clip]) -> list[Batch]:
        made = Future[list[ModelOutput]]()
        made.set_result(self._launches.extract(clips))
        return [(range(len(clips)), made)]

    def long(self, clip: LongClip) -> list[CastFeatures]:
        # No launch waits for a shard that is busy with an hour of audio.
        with ExitStack() as inside:
            inside.enter_context(self._launches.away())
            # Held for the whole clip: a stream's state is its own, its kernels' buffers are not.
            for lock in self._one_caller.values():
                inside.enter_context(lock)
            inside.enter_context(self._input.stream())
            inside.enter_context(device_errors("a long clip"))
            return self._long(clip)

    def close(self) -> None:
        super().close()
        self._launches.close()

    def _extract(self, clips: Sequence[Clip]) -> list[ModelOutput]:
        count = "one clip" if len(clips) == 1 else f"{len(clips)} clips"
        counts.batch([clip.signals[0].shape[-1] for clip in clips])
        with (
            doing(MODEL, self._cpu),
            self._input.stream(),
            device_errors(f"a launch of {count}"),
        ):
            by_model = self._input.signals(clips)
            for index in self._one_caller:
                by_model[index] = [as_array(signal) for signal in by_model[index]]
            return self._through(by_model)


def extraction_on(
    gpu: Gpu | None, extractors: Sequence[Extractor], cpu: CpuSeconds | None, **options: Any
) -> Extraction:
    """Return the extraction for the device that the models were built for."""
    if gpu is None:
        return Extraction(extractors, **options)
    return GpuExtraction(extractors, gpu, cpu, **options)
