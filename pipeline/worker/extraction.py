"""Clips through a job's models: in batches of similar lengths on a CPU, in launches on a GPU.

What a clip becomes depends on neither. A long clip goes through chunk by chunk, its features into
files. On a CPU two calls are under way where the models allow it: the kernels' threads begin with
the clips of the second while the last ones of the first are still at it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.counts import counts
from earmill.pipeline.common.timing import (
    DECODE,
    ENCODE,
    FOR_MODELS,
    MODEL,
    CpuTally,
    carried,
    counted,
    doing,
)
from earmill.pipeline.formats.dtypes import Caster
from earmill.pipeline.worker.batches import LaunchBatcher, form_batches
from earmill.pipeline.worker.device import DeviceInput, Gpu, as_array, device_errors
from earmill.pipeline.worker.feature_values import Made, Stored, as_row_errors, extracted, spill
from earmill.pipeline.worker.prefetch import prefetched
from earmill.pipeline.worker.prepare import Clip, LongClip, OwnFrames

if TYPE_CHECKING:
    from amtcore.features.base import Extractor


class Turn:
    """A place in a line."""

    def __init__(self, line: deque[Turn], changed: threading.Condition) -> None:
        self._line, self._changed = line, changed
        with changed:
            line.append(self)

    def wait(self) -> None:
        """Returns when everyone who lined up before has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._line[0] is self)

    def over(self) -> None:
        """Leave the line; again is no harm."""
        with self._changed:
            if self in self._line:
                self._line.remove(self)
                self._changed.notify_all()


class Turns:
    """One caller at a time, in the order of arrival, for a part of what they do.

    Example:
        >>> turns = Turns()
        >>> with turns.line_up() as turn:
        ...     turn.wait()  # returns when everyone who lined up before has left
        ...     turn.over()  # the next one may begin; the end of the block says so too
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[Turn] = deque()

    @contextmanager
    def line_up(self) -> Iterator[Turn]:
        """A place in the line, until it says that it is over or the block ends."""
        turn = Turn(self._line, self._changed)
        try:
            yield turn
        finally:
            turn.over()


def free_turn() -> Turn:
    """A turn that nobody else waits for."""
    return Turn(deque(), threading.Condition())


# A batch is at most this long; fused kernels hold no full-rate output, so this bounds only inputs.
BATCH_S = 160.0
# Calls of models that may be used by several callers: one computes, the next one stands behind it.
CALLERS = 2

Batch = Sequence[int]


class Window:
    """Some clips of a shard on their way through the models, in batches."""

    def __init__(self, batches: Sequence[tuple[Batch, Future[list[Made]]]]) -> None:
        self._batches = batches

    def results(self) -> Iterator[tuple[Batch, list[Made]]]:
        """The clips' positions, and per clip stream name -> (frames, width), or events; waits for
        each batch."""
        for batch, made in self._batches:
            yield batch, made.result()

    def cancel(self) -> None:
        """Nobody wants the batches that have not begun."""
        for _, made in self._batches:
            made.cancel()


class Extraction:
    """The models of a job.

    Attributes:
        windows_ahead: How many of a shard's windows may be under way while the next is filled.

    Args:
        extractors: One a model of the spec, in its order.
        cast: For the frames of long clips. spill_folder: Where their files lie.
        pool: Reads long clips ahead, within `ahead_bytes`.
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
        callers = CALLERS if all(each.takes_several_callers for each in extractors) else 1
        # First come, first served.
        self._callers = ThreadPoolExecutor(callers, thread_name_prefix="model")

    def shard(self) -> AbstractContextManager[None]:
        """Inside, a shard's clips come."""
        return nullcontext()

    def begin(self, clips: Sequence[Clip]) -> Window:
        """Start on a shard's next clips."""
        lengths = [clip.signals[0].shape[-1] for clip in clips]
        batches = form_batches(lengths, round(BATCH_S * self._extractors[0].fs_hz))
        for batch in batches:
            counts.batch([lengths[position] for position in batch])
        extract = carried(MODEL, self._extract)
        return Window(
            [
                (batch, self._callers.submit(extract, [clips[position] for position in batch]))
                for batch in batches
            ]
        )

    def long(self, clip: LongClip) -> list[Stored]:
        """Features of a long clip, channel by channel, in memory that does not grow with it.

        They are cast at once and go to files.
        """
        return self._callers.submit(carried(MODEL, self._long), clip).result()

    def close(self) -> None:
        """End what runs beside the callers."""
        self._callers.shutdown(wait=True, cancel_futures=True)

    def _long(self, clip: LongClip) -> list[Stored]:
        channels = len(clip.channels)
        streams = [[model.open_stream() for model in self._extractors] for _ in range(channels)]
        wholes = [Stored() for _ in range(channels)]
        infos = [info for model in self._extractors for info in model.streams]
        owns = [clip.own_frames(infos) for _ in range(channels)]
        pieces = prefetched(
            counted(DECODE, clip.pieces()),
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

    def _extract(self, clips: Sequence[Clip]) -> list[Made]:
        return self._through([[c.signals[k] for c in clips] for k in range(len(self._extractors))])

    def _through(self, by_model: Sequence[Sequence[Any]]) -> list[Made]:
        """Every model's features of its signals, clip by clip."""
        features: list[dict[str, Any]] = [{} for _ in by_model[0]]
        for index, signals in enumerate(by_model):
            for row, streams in zip(features, self._model(index, signals), strict=True):
                row |= streams
        return [*features]

    def _model(self, index: int, signals: Sequence[Any]) -> Sequence[Made]:
        with doing(MODEL, libraries=FOR_MODELS):
            return extracted(self._extractors[index], signals)

    def _spill(
        self, whole: Stored, made: Made, own: OwnFrames | None, *, last: bool = False
    ) -> None:
        with doing(ENCODE):
            kept = made if own is None else own.take(made)
            spill(whole, kept, self._cast, self._spill_folder, last=last)


class GpuExtraction(Extraction):
    """The same on a GPU, for the clips of all shards in flight at once.

    Args:
        gpu: The one that the extractors were built for.
        cpu: Gets the launches' CPU time.
    """

    # A launch is waited for where it begins.
    windows_ahead = 0

    def __init__(
        self,
        extractors: Sequence[Extractor],
        gpu: Gpu,
        cpu: CpuTally | None = None,
        **options: Any,
    ) -> None:
        super().__init__(extractors, **options)
        self._cpu = cpu
        self._input = DeviceInput(gpu)
        # Models without kernels for GPUs stay on the processor, where one caller may use them.
        self._one_caller = {
            index: threading.Lock()
            for index, extractor in enumerate(self._extractors)
            if extractor.backend.name == "cpu"
        }
        self._launches = LaunchBatcher[Clip, Made](self._extract, most_bytes=gpu.launch_bytes())

    def shard(self) -> AbstractContextManager[None]:
        return self._launches.shard()

    def begin(self, clips: Sequence[Clip]) -> Window:
        made = Future[list[Made]]()
        made.set_result(self._launches.extract(clips))
        return Window([(range(len(clips)), made)])

    def long(self, clip: LongClip) -> list[Stored]:
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

    def _extract(self, clips: Sequence[Clip]) -> list[Made]:
        count = "one clip" if len(clips) == 1 else f"{len(clips)} clips"
        counts.batch([clip.signals[0].shape[-1] for clip in clips])
        with (
            doing(MODEL, self._cpu),
            self._input.stream(),
            device_errors(f"a launch of {count}"),
        ):
            return self._through(self._input.signals(clips))

    def _model(self, index: int, signals: Sequence[Any]) -> Sequence[Made]:
        if index not in self._one_caller:
            return super()._model(index, signals)
        with self._one_caller[index]:
            return super()._model(index, [as_array(signal) for signal in signals])


def extraction_on(
    gpu: Gpu | None, extractors: Sequence[Extractor], cpu: CpuTally | None, **options: Any
) -> Extraction:
    """The models on what they were built for."""
    if gpu is None:
        return Extraction(extractors, **options)
    return GpuExtraction(extractors, gpu, cpu, **options)
