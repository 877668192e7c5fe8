"""The rows of one shard, from bytes to feature rows and quarantine rows, inside one process.

    fetch --> decode, resample, calibrate --> windows --> batches --> model --> check, cast --> rows
    feeder thread    decode threads           in order    extraction.py         decode threads

Decoding runs ahead of the model within a bound in bytes. A bad row becomes a quarantine row at its
place; any other exception is a fault of the program or the machine and ends the attempt. Rows come
out in planned order, and no value depends on timing, batches or neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from earmill.pipeline.audio.decoding_children import DecodingChildren
from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.common.errors import RowError, TooLongError, TooShortError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.common.timing import (
    DECODE,
    ENCODE,
    FETCH,
    MODEL,
    CpuTally,
    Stages,
    carried,
    counted,
)
from earmill.pipeline.formats.dtypes import Caster, as_stored
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow, Scalar
from earmill.pipeline.sources.base import Item, Source
from earmill.pipeline.sources.fetch import check_arrived
from earmill.pipeline.sources.witness import Witnesses, fetch_confirmed
from earmill.pipeline.spec.spans import warm_up_s
from earmill.pipeline.worker.device import Gpu
from earmill.pipeline.worker.extraction import Turn, Window, extraction_on, free_turn
from earmill.pipeline.worker.feature_values import Made, Stored, stored
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS
from earmill.pipeline.worker.prefetch import prefetched
from earmill.pipeline.worker.prepare import LONG_S, Clip, LongClip, Preparer, Target, own_frames

if TYPE_CHECKING:
    from amtcore.features.base import Extractor
    from earmill.pipeline.spec.job import JobSpec

Prepared = list[Clip] | LongClip | QuarantineRow

# Decoded samples that may wait for the model, per shard in flight.
PREFETCH_BYTES = 64 * 2**20
# Clips are sorted into batches, or put into launches, within a window of this much signal.
WINDOW_BYTES = 32 * 2**20
# Where many shards are in flight they share this for what waits.
ALL_PREFETCH_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Good and bad rows of a shard, both in planned order."""

    good: list[FeatureRow]
    bad: list[QuarantineRow]


class RowProcessor:
    """A job's row pipeline; holds the decode threads and the warm models.

    Args:
        spec: The job. source: Hands out the bytes; asked by one thread per shard in flight.
        extractors: One a model of the spec, in its order; on a CPU used by one caller at a time.
        decode_threads: Threads that decode, resample, check and cast.
        long_s: Clips above this are streamed through decoder and model, their features into files.
        spill_folder: Where these files lie; None takes the system's folder for temporary files.
        gpu: What the extractors were built for, where that is not the CPU.
        shards: How many may be in flight.
        cpu: Gets the CPU time of launches, which several shards share.
    """

    def __init__(
        self,
        spec: JobSpec,
        source: Source,
        extractors: Sequence[Extractor],
        *,
        decode_threads: int,
        long_s: float = LONG_S,
        spill_folder: str | None = None,
        gpu: Gpu | None = None,
        shards: int = CONCURRENT_SHARDS,
        cpu: CpuTally | None = None,
    ) -> None:
        self._source, self._extractors = source, tuple(extractors)
        self._witnesses = Witnesses()
        infos = [info for model in self._extractors for info in model.streams]
        self._cast = Caster(spec.output.dtype, as_stored(infos, spec.output.dtype))
        self._each = spec.audio.channels == "each"
        targets = tuple(
            Target(model.fs_hz, model.input_unit, max(model.input_channels))
            for model in self._extractors
        )
        on_device = gpu is not None and spec.audio.resampler == ON_DEVICES
        self._children = DecodingChildren() if spec.run.decode_in_child else None
        names = [entry.model for entry in spec.extract]
        warm_s = warm_up_s(spec.audio.spans, self._extractors, names)
        self._preparer = Preparer(spec.audio, targets, long_s, on_device, self._children, warm_s)
        self._infos = infos
        self._decode_threads = decode_threads
        self._pool = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        # Lasting threads, because a streamed source keeps its place per thread; one a shard.
        self._feeders = ThreadPoolExecutor(shards, thread_name_prefix="feed")
        self._ahead_bytes = min(PREFETCH_BYTES, ALL_PREFETCH_BYTES // shards)
        self.extraction = extraction_on(
            gpu,
            self._extractors,
            cpu=cpu,
            cast=self._cast,
            pool=self._pool,
            spill_folder=spill_folder,
            ahead_bytes=self._ahead_bytes,
        )

    def process(
        self,
        items: Sequence[Item],
        *,
        attempts: int = 1,
        witnesses: Sequence[Item] = (),
        turn: Turn | None = None,
        on_audio: Callable[[float], None] = lambda seconds: None,
        memory_share: float = 1.0,
        stages: Stages | None = None,
    ) -> ShardRows:
        """All rows of a shard.

        Args:
            attempts: Recorded with quarantined rows.
            witnesses: Rows of the source that were read elsewhere; see `fetch_confirmed`.
            turn: Waited for before the models are first used, and over once all clips are on their
                way to them.
            on_audio: Told the seconds of audio of each row that is through the models.
            memory_share: Part of the usual bytes for clips that wait and for batches.
            stages: Told when rows are fetched, decoded, and in the models.
        Raises:
            SourceOutage: Bytes could not be had for no row's fault; nothing is to be published.
        """
        with self.extraction.shard():
            run = _ShardRun(self, attempts, on_audio, memory_share, stages or Stages())
            return run.run(items, witnesses, turn or free_turn())

    def prepare(self, item: Item, stream: BinaryIO) -> list[Clip] | LongClip:
        """Decode one row; a subclass may do more. Raises a RowError for bad input."""
        return self._preparer.open(item, stream)

    def close(self) -> None:
        """End the threads."""
        self.extraction.close()
        for pool in (self._feeders, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        if self._children is not None:
            self._children.close()

    # -- for _ShardRun ------------------------------------------------------------------------

    def prepared(
        self,
        items: Sequence[Item],
        attempts: int,
        witnesses: Sequence[Item] = (),
        memory_share: float = 1.0,
        stages: Stages | None = None,
    ) -> Generator[Prepared, None, None]:
        """Every row, decoded ahead, in order."""

        def work(entry: tuple[Item, BinaryIO | RowError]) -> Prepared:
            item, stream = entry
            try:
                if isinstance(stream, RowError):
                    raise stream
                try:
                    return self._checked(self.prepare(item, stream))
                finally:
                    # A read that failed looks like a short file to a decoder.
                    check_arrived(stream, item.uri)
            except RowError as error:
                return quarantined(item.row_id, item, error, attempts)

        fetched = fetch_confirmed(self._source, items, self._witnesses, witnesses)
        return prefetched(
            (stages or Stages()).during(FETCH, counted(FETCH, fetched)),
            carried(DECODE, work),
            pool=self._pool,
            nbytes=_nbytes,
            budget_bytes=int(self._ahead_bytes * memory_share),
            in_flight=self._decode_threads + 1,
            feeders=self._feeders,
        )

    def later(self, work: Callable[..., FeatureRow | QuarantineRow], *args: Any) -> Future[Any]:
        """Make a row ready to be written, in the decode threads."""
        return self._pool.submit(carried(ENCODE, work), *args)

    def row_id(self, item: Item, channel: int) -> str:
        """The row id of one channel of a planned row."""
        return f"{item.row_id}#ch{channel}" if self._each else item.row_id

    def feature_row(
        self,
        item: Item,
        channel: int,
        seconds: float,
        facts: dict[str, Scalar],
        features: Made | Stored,
        attempts: int,
    ) -> FeatureRow | QuarantineRow:
        """A finished row, or its quarantine row where the features cannot be stored."""
        row_id = self.row_id(item, channel)
        try:
            held = features
            if not isinstance(held, Stored):
                made = own_frames(held, self._preparer.margins(item), self._infos)
                held = stored(made, self._cast)
        except RowError as error:
            return quarantined(row_id, item, error, attempts)
        scalars = (row_id, item.row_id, channel, seconds, facts, item.extra)
        return FeatureRow(*scalars, held.streams, held.steps, held.errors)

    def _checked(self, prepared: list[Clip] | LongClip) -> list[Clip] | LongClip:
        if isinstance(prepared, LongClip):
            try:
                check_streamable(self._extractors, self._preparer.long_s, prepared.item)
            except RowError:
                prepared.close()
                raise
            return prepared
        for clip in prepared:
            for extractor, signal in zip(self._extractors, clip.signals, strict=True):
                check_length(extractor, signal.shape[-1], clip.item)
        return prepared


class _ShardRun:
    """One shard on its way through; collects rows as futures in planned order."""

    def __init__(
        self,
        rows: RowProcessor,
        attempts: int,
        on_audio: Callable[[float], None],
        memory_share: float,
        stages: Stages,
    ) -> None:
        self._rows, self._attempts, self._on_audio = rows, attempts, on_audio
        self._stages = stages
        self._memory_share, self._full_bytes = memory_share, int(WINDOW_BYTES * memory_share)
        self._done: list[list[Future[Any] | QuarantineRow]] = []
        # Place in the shard, clip, and the audio it stands for in the progress.
        self._window: list[tuple[int, Clip, float]] = []
        self._window_bytes = 0
        self._under_way: deque[tuple[list[tuple[int, Clip, float]], Window]] = deque()

    def run(self, items: Sequence[Item], witnesses: Sequence[Item], turn: Turn) -> ShardRows:
        try:
            self._extract(items, witnesses, turn)
            return self._gather()
        finally:
            for _, window in self._under_way:
                window.cancel()

    def _extract(self, items: Sequence[Item], witnesses: Sequence[Item], turn: Turn) -> None:
        rows = self._rows.prepared(
            items, self._attempts, witnesses, self._memory_share, self._stages
        )
        with closing(rows) as prepared:
            for entry in self._stages.during(DECODE, prepared):
                place = len(self._done)
                self._done.append([])
                if isinstance(entry, QuarantineRow):
                    self._done[place].append(entry)
                    continue
                if self._is_full(entry):
                    turn.wait()
                self._take(place, entry)
            turn.wait()
            self._flush()
            # What comes next stands behind the last of ours: no core waits in between.
            turn.over()
            self._collect(0)

    def _is_full(self, entry: list[Clip] | LongClip) -> bool:
        return (
            isinstance(entry, LongClip) or self._window_bytes + _nbytes(entry) >= self._full_bytes
        )

    def _take(self, place: int, entry: list[Clip] | LongClip) -> None:
        if isinstance(entry, LongClip):
            self._flush()
            self._collect(0)
            self._extract_long(place, entry)
            return
        self._window += [(place, clip, clip.seconds / len(entry)) for clip in entry]
        self._window_bytes += _nbytes(entry)
        if self._window_bytes >= self._full_bytes:
            self._flush()

    def _flush(self) -> None:
        window, self._window, self._window_bytes = self._window, [], 0
        if window:
            self._stages.touch(MODEL)
            begun = self._rows.extraction.begin([clip for _, clip, _ in window])
            self._under_way.append((window, begun))
        self._collect(self._rows.extraction.windows_ahead)

    def _collect(self, left: int) -> None:
        """Take what the models made of windows, the oldest first, until so many are under way."""
        while len(self._under_way) > left:
            window, begun = self._under_way[0]
            finished: dict[int, Future[Any]] = {}
            for batch, features in begun.results():
                for position, found in zip(batch, features, strict=True):
                    _, clip, seconds = window[position]
                    finished[position] = self._later(
                        clip.item, clip.channel, clip.seconds, clip.facts, found
                    )
                    self._on_audio(seconds)
            for position, (place, _, _) in enumerate(window):
                self._done[place].append(finished[position])
            self._stages.touch(MODEL)
            self._under_way.popleft()

    def _extract_long(self, place: int, clip: LongClip) -> None:
        try:
            try:
                with self._stages.stage(MODEL):
                    features = self._rows.extraction.long(clip)
            finally:
                clip.close()
                check_arrived(clip.stream, clip.item.uri)
        except RowError as error:
            bad = quarantined(clip.item.row_id, clip.item, error, self._attempts)
            self._done[place].append(bad)
            return
        for position, (channel, found) in enumerate(zip(clip.channels, features, strict=True)):
            facts = clip.facts(position)
            self._done[place].append(self._later(clip.item, channel, clip.seconds, facts, found))
        self._on_audio(clip.seconds)

    def _later(self, *row: Any) -> Future[Any]:
        return self._rows.later(self._rows.feature_row, *row, self._attempts)

    def _gather(self) -> ShardRows:
        rows = [
            row if isinstance(row, QuarantineRow) else row.result()
            for place in self._done
            for row in place
        ]
        good = [row for row in rows if isinstance(row, FeatureRow)]
        return ShardRows(good, [row for row in rows if isinstance(row, QuarantineRow)])


def check_length(extractor: Extractor, n_samples: int, item: Item) -> None:
    """Raise TooShortError unless every stream gets at least one frame."""
    empty = [name for name, frames in extractor.n_frames(n_samples).items() if frames < 1]
    if empty:
        raise TooShortError(
            f"{item.uri}: expected at least one frame of {', '.join(empty)}, got "
            f"{n_samples / extractor.fs_hz * 1000:.3g} ms of audio"
        )


def check_streamable(extractors: Sequence[Extractor], long_s: float, item: Item) -> None:
    """Raise TooLongError where a long clip meets a stream that cannot go chunk by chunk."""
    whole = [stream.model for each in extractors if not each.can_stream for stream in each.streams]
    if whole:
        king = ", or set phase_insens to none and leave subfs out"
        raise TooLongError(
            f"{item.uri}: expected at most {long_s:g} s for {whole[0]}, whose streams need whole "
            f"clips, got more; cut it into spans with a manifest"
            f"{king if whole[0] == 'king2019' else ''}"
        )


def quarantined(row_id: str, item: Item, error: RowError, attempts: int) -> QuarantineRow:
    """The quarantine row of an error."""
    said = one_line(error)
    return QuarantineRow(row_id, item.uri, error.stage, error.error_class, said, attempts)


def _nbytes(entry: Prepared) -> int:
    if isinstance(entry, QuarantineRow):
        return 0
    if isinstance(entry, LongClip):
        return entry.nbytes
    return sum(clip.nbytes for clip in entry)
