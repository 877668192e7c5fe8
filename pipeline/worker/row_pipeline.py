"""The rows of one shard, from bytes to feature rows and quarantine rows, inside one process.

    fetch --> decode, resample, calibrate --> windows --> batches --> model --> check, cast --> rows
    feeder thread    decode threads           in order    extraction.py         decode threads

Each stage is a generator over the stage before. A bad row becomes a quarantine row in its place;
any other exception is a fault of program or machine, and ends the attempt. Rows come out in planned
order, and no value depends on timing, batches or other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from earmill.pipeline.audio.decode import BlockReader
from earmill.pipeline.audio.decoder_pool import DecoderPool
from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.common.errors import RowError, TooLongError, TooShortError
from earmill.pipeline.common.gathering import gathered
from earmill.pipeline.common.monitoring import CpuSeconds, StageTimes, carried, counted, current
from earmill.pipeline.common.text import one_line
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.formats.values import Caster, as_stored
from earmill.pipeline.planning.shards import item_seconds
from earmill.pipeline.sources.base import Item, Source, reference_item
from earmill.pipeline.sources.fetch import check_arrived
from earmill.pipeline.sources.source_probe import SourceProbes, fetch_confirmed
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import takes_pairs
from earmill.pipeline.spec.source import reference_column
from earmill.pipeline.spec.spans import warm_up_s
from earmill.pipeline.worker.device import Gpu
from earmill.pipeline.worker.extraction import (
    Batch,
    CastFeatures,
    Extraction,
    GpuExtraction,
    Ticket,
    stored,
)
from earmill.pipeline.worker.listeners import column_listeners
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS
from earmill.pipeline.worker.pairs import FetchedRow, PairStream, joined
from earmill.pipeline.worker.prefetch import prefetched
from earmill.pipeline.worker.prepare import (
    LONG_S,
    Clip,
    LongClip,
    ModelOutput,
    Preparer,
    Target,
)

if TYPE_CHECKING:
    from amtcore.features.feature_model import Extractor

Prepared = list[Clip] | LongClip | QuarantineRow
Row = FeatureRow | QuarantineRow
# Number of a row in its shard, and of a clip in its row: a channel may be a clip of its own.
Place = tuple[int, int]
# Clips for the models, or a row that goes alone.
Window = list[tuple[Place, Clip]] | tuple[Place, LongClip] | tuple[Place, QuarantineRow]
T = TypeVar("T")

# Rows that go to a decode thread together, up to this much audio or this many rows: handing over a
# clip of 0.2 s costs as much as decoding it.
TASK_S, TASK_ROWS = 4.0, 16
# Decoded samples that may wait for the model, per shard in flight.
PREFETCH_BYTES = 64 * 2**20
# Clips are sorted into batches, or put into launches, within a window of this much signal.
WINDOW_BYTES = 32 * 2**20
# Decoded samples that may wait for the model, of all shards in flight.
ALL_PREFETCH_BYTES = 2**30
# Decoded samples that may wait in a shard for a GPU, where DECODED_SHARDS are decoded at a time.
GPU_PREFETCH_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class ShardRows:
    good: list[FeatureRow]
    bad: list[QuarantineRow]


class RowProcessor:
    """A job's row pipeline, with its decode threads and warm models. Clips above `long_s` are
    streamed, their features into files in `spill_folder`. `cpu` gets the CPU time of launches."""

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
        cpu: CpuSeconds | None = None,
    ) -> None:
        self._source, self._extractors = source, tuple(extractors)
        self._witnesses = SourceProbes()
        infos = [info for model in self._extractors for info in model.streams]
        self._cast = Caster(spec.output.dtype, as_stored(infos, spec.output.dtype))
        self._each = spec.audio.channels == "each"
        targets = tuple(
            Target(
                model.fs_hz, model.input_unit, max(model.input_channels), min(model.input_channels)
            )
            for model in self._extractors
        )
        column = reference_column(spec.source)
        # The column of the reference recordings; None if no model takes pairs.
        self._references = column if any(map(takes_pairs, self._extractors)) else None
        self._reference_witnesses = SourceProbes()
        # Both recordings of a pair are resampled here, because their lengths are compared.
        is_plain = self._references is None
        on_device = gpu is not None and spec.audio.resampler == ON_DEVICES and is_plain
        self._children = DecoderPool()
        opened = self._children.open if spec.run.decode_in_child else BlockReader
        names = [entry.model for entry in spec.extract]
        warm_s = warm_up_s(spec.audio.spans, self._extractors, names)
        self._preparer = Preparer(spec.audio, targets, long_s, on_device, opened, warm_s)
        self._infos = infos
        self._decode_threads = decode_threads
        self._pool = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        # Lasting threads, one a shard, because a streamed source keeps its place per thread.
        self._feeders = ThreadPoolExecutor(shards, thread_name_prefix="feed")
        # Long clips of many shards may be under way at once, also on a GPU.
        ahead_bytes = min(PREFETCH_BYTES, ALL_PREFETCH_BYTES // shards)
        self._ahead_bytes = ahead_bytes if gpu is None else GPU_PREFETCH_BYTES
        self._listeners = column_listeners(spec, self._extractors)
        options: dict[str, Any] = {
            "cast": self._cast,
            "listeners": self._listeners,
            "pool": self._pool,
            "spill_folder": spill_folder,
            "ahead_bytes": ahead_bytes,
        }
        self.extraction = (
            Extraction(self._extractors, **options)
            if gpu is None
            else GpuExtraction(self._extractors, gpu, cpu, **options)
        )

    def process(
        self,
        items: Sequence[Item],
        *,
        attempts: int = 1,
        witnesses: Sequence[Item] = (),
        on_audio: Callable[[float], None] = lambda seconds: None,
        memory_share: float = 1.0,
        stages: StageTimes | None = None,
    ) -> ShardRows:
        """Process all rows of a shard, in planned order. For `witnesses` see `fetch_confirmed`.
        `on_audio` gets the seconds of each row that is through the models."""
        stages = stages or StageTimes()
        rows: dict[Place, Row] = {}
        casts: list[Future[dict[Place, Row]]] = []
        prepared = self._prepared(self._fetched(items, witnesses), memory_share, stages)
        with self.extraction.shard() as ticket, closing(prepared):
            most_bytes = int(WINDOW_BYTES * memory_share)
            windows = in_windows(stages.during("decode", prepared), most_bytes)
            cast = carried("encode", self._feature_rows)

            def good() -> Iterator[tuple[Place, Clip, ModelOutput | CastFeatures]]:
                for place, clip, features in self._extracted(windows, ticket, stages):
                    if isinstance(clip, QuarantineRow):
                        rows[place] = clip
                        continue
                    if place[1] == 0:
                        on_audio(clip.seconds)
                    # A row that waits to be cast holds no samples.
                    yield place, replace(clip, signals=()), features

            for task in in_tasks(good(), lambda row: row[1].seconds):
                casts.append(self._pool.submit(cast, task))
        for done in casts:
            rows.update(done.result())
        finished = [rows[place] for place in sorted(rows)]
        return ShardRows(
            [row for row in finished if isinstance(row, FeatureRow)],
            [replace(row, attempts=attempts) for row in finished if isinstance(row, QuarantineRow)],
        )

    def prepare(self, item: Item, stream: BinaryIO | PairStream) -> list[Clip] | LongClip:
        try:
            for model_of in self._listeners.values():
                model_of(item)
        except RowError:
            stream.close()
            raise
        prepared = self._preparer.open(item, stream)
        if isinstance(prepared, LongClip):
            of_whole = [
                each for each in self._extractors if not each.can_stream or takes_pairs(each)
            ]
            if of_whole:
                whole = of_whole[0]
                prepared.close()
                advice = f", or {whole.streaming_advice}" if whole.streaming_advice else ""
                raise TooLongError(
                    f"{item.uri}: expected at most {self._preparer.long_s:g} s for {whole.model}, "
                    "whose streams need whole clips, got more; cut it into spans with a "
                    f"manifest{advice}"
                )
            return prepared
        for clip in prepared:
            for extractor, signal in zip(self._extractors, clip.signals, strict=True):
                samples = signal.shape[-1]
                empty = [name for name, n in extractor.n_frames(samples).items() if n < 1]
                if empty:
                    raise TooShortError(
                        f"{item.uri}: expected at least one frame of {', '.join(empty)}, got "
                        f"{samples / extractor.fs_hz * 1000:.3g} ms of audio"
                    )
        return prepared

    def close(self) -> None:
        self.extraction.close()
        for pool in (self._feeders, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._children.close()

    def _prepared(
        self, fetched: Iterator[FetchedRow], memory_share: float, stages: StageTimes
    ) -> Generator[Prepared, None, None]:
        def prepare(entry: FetchedRow) -> Prepared:
            item, stream = entry
            try:
                if isinstance(stream, RowError):
                    raise stream
                try:
                    return self.prepare(item, stream)
                finally:
                    # A read that failed looks like a short file to a decoder.
                    check_arrived(stream, item.uri)
            except RowError as error:
                return quarantined(item.row_id, item, error)

        def prepare_all(task: list[FetchedRow]) -> list[Prepared]:
            done: list[Prepared] = []
            try:
                while len(done) < len(task):
                    done.append(prepare(task[len(done)]))
            except BaseException:
                _release([*done, *task[len(done) + 1 :]])
                raise
            return done

        tasks = in_tasks(fetched, lambda entry: item_seconds(entry[0]))
        made = prefetched(
            stages.during("fetch", counted("fetch", tasks, current())),
            carried("decode", prepare_all),
            pool=self._pool,
            nbytes=lambda task: sum(map(_nbytes, task)),
            budget_bytes=int(self._ahead_bytes * memory_share),
            in_flight=self._decode_threads + 1,
            feeders=self._feeders,
            release=_release,
        )
        with closing(made):
            for task in made:
                yield from task

    def _fetched(self, items: Sequence[Item], witnesses: Sequence[Item]) -> Iterator[FetchedRow]:
        """Yield the rows with their bytes, in a job of pairs with both recordings' bytes. Missing
        reference recordings are confirmed as missing rows are."""
        own = fetch_confirmed(self._source, items, self._witnesses, witnesses)
        if self._references is None:
            yield from own
            return
        source = getattr(self._source, "references", None) or self._source
        wanted, known = (
            [one for item in rows if (one := reference_item(item)) is not None]
            for rows in (items, witnesses)
        )
        references = fetch_confirmed(source, wanted, self._reference_witnesses, known)
        yield from joined(own, references, self._references)

    def _extracted(
        self, windows: Iterable[Window], ticket: Ticket, stages: StageTimes
    ) -> Iterator[tuple[Place, Clip | QuarantineRow, ModelOutput | CastFeatures]]:
        """Extract the features of every clip; the oldest window is finished first. The ticket is
        given back once all clips are on their way, so that the next shard can begin."""
        under_way: deque[tuple[list[tuple[Place, Clip]], Sequence[Batch]]] = deque()

        def finished(left: int) -> Iterator[tuple[Place, Clip, ModelOutput]]:
            while under_way:
                window, batches = under_way[0]
                if len(under_way) <= left and not all(made.done() for _, made in batches):
                    return
                for positions, made in batches:
                    for position, features in zip(positions, made.result(), strict=True):
                        yield *window[position], features
                stages.mark("model")
                under_way.popleft()

        try:
            for entry in windows:
                if isinstance(entry, list):
                    ticket.wait()
                    stages.mark("model")
                    under_way.append((entry, self.extraction.begin([clip for _, clip in entry])))
                    yield from finished(self.extraction.windows_ahead)
                elif isinstance(entry[1], QuarantineRow):
                    yield *entry, {}
                else:
                    ticket.wait()
                    yield from finished(0)
                    yield from self._long(*entry, ticket, stages)
            ticket.give_back()
            yield from finished(0)
        finally:
            for _, batches in under_way:
                for _, made in batches:
                    made.cancel()

    def _long(
        self, place: Place, clip: LongClip, ticket: Ticket, stages: StageTimes
    ) -> Iterator[tuple[Place, Clip | QuarantineRow, ModelOutput | CastFeatures]]:
        item = clip.item
        try:
            try:
                with stages.stage("model"):
                    features = self.extraction.long(clip, ticket)
            finally:
                clip.close()
                check_arrived(clip.stream, item.uri)
        except RowError as error:
            yield place, quarantined(item.row_id, item, error), {}
            return
        for number, (channel, made) in enumerate(zip(clip.channels, features, strict=True)):
            done = Clip(item, channel, clip.seconds, (), clip.facts(number))
            yield (place[0], number), done, made

    def _feature_rows(
        self, task: list[tuple[Place, Clip, ModelOutput | CastFeatures]]
    ) -> dict[Place, Row]:
        return {place: self._feature_row(clip, made) for place, clip, made in task}

    def _feature_row(self, clip: Clip, features: ModelOutput | CastFeatures) -> Row:
        """Return a finished row, or its quarantine row where the features cannot be stored."""
        item = clip.item
        row_id = f"{item.row_id}#ch{clip.channel}" if self._each else item.row_id
        try:
            if not isinstance(features, CastFeatures):
                if trim := self._preparer.frame_trim(item, self._infos):
                    features = trim.take(features)
                    trim.check()
                features = stored(features, self._cast)
        except RowError as error:
            return quarantined(row_id, item, error)
        scalars = (row_id, item.row_id, clip.channel, clip.seconds, clip.facts, item.extra)
        return FeatureRow(*scalars, features.streams, features.steps, features.errors)


def in_tasks(rows: Iterable[T], seconds: Callable[[T], float]) -> Iterator[list[T]]:
    """Gather neighbours for one task of a decode thread; see `gathered`."""
    return gathered(rows, seconds, TASK_S, TASK_ROWS, _release)


def _release(task: Iterable[Any]) -> None:
    """Close the files of rows that were fetched or prepared."""
    for row in task:
        if isinstance(row, LongClip):
            row.close()
        elif isinstance(row, tuple) and not isinstance(row[1], (RowError, Clip)):
            row[1].close()


def in_windows(prepared: Iterable[Prepared], most_bytes: int) -> Iterator[Window]:
    """Gather clips in windows of about `most_bytes`; long clips and bad rows are yielded alone."""
    window: list[tuple[Place, Clip]] = []
    size = 0
    for number, entry in enumerate(prepared):
        if isinstance(entry, QuarantineRow):
            yield (number, 0), entry
            continue
        if isinstance(entry, list):
            window += [((number, position), clip) for position, clip in enumerate(entry)]
            size += _nbytes(entry)
            if size < most_bytes:
                continue
        if window:
            yield window
            window, size = [], 0
        if isinstance(entry, LongClip):
            yield (number, 0), entry
    if window:
        yield window


def quarantined(row_id: str, item: Item, error: RowError, attempts: int = 1) -> QuarantineRow:
    message = one_line(error)
    return QuarantineRow(row_id, item.uri, error.stage, error.error_class, message, attempts)


def _nbytes(entry: Prepared) -> int:
    if isinstance(entry, QuarantineRow):
        return 0
    return entry.nbytes if isinstance(entry, LongClip) else sum(clip.nbytes for clip in entry)
