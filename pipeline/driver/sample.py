"""Rows of a plan tried before the job runs: read, decoded, computed, stored in a private folder.

Each group of rows goes through the job's own row pipeline and is published like a shard, in this
process, with the threads of one worker: what it takes and what it weighs is what shards will. The
folder is removed afterwards. Rows that fail are counted by reason, as they will be in quarantine.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.common.cpu_time import (
    ENCODE,
    FOR_FILES,
    FOR_MODELS,
    HASH,
    MODEL,
    OTHER,
    CpuTally,
    doing,
)
from earmill.pipeline.common.errors import SourceError, SourceOutage
from earmill.pipeline.common.one_line import one_line
from earmill.pipeline.common.start_up import what_is_made_stays
from earmill.pipeline.dataset.publish import publish_shard, read_commit, shard_attrs
from earmill.pipeline.formats.casting import Caster
from earmill.pipeline.formats.format import BINARY
from earmill.pipeline.formats.registry import stored_streams
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.planning.forecast import EmptyShard, Group, Sampled
from earmill.pipeline.planning.shards import item_seconds
from earmill.pipeline.planning.strata import Strata, Stratum, groups
from earmill.pipeline.sources import Item, Source, open_source
from earmill.pipeline.sources.base import Fetched
from earmill.pipeline.spec.models import validate_models
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.owned_folders import own_folder
from earmill.pipeline.storage.paths import new_attempt
from earmill.pipeline.storage.store_calls import patient
from earmill.pipeline.worker.device import GpuUnusable
from earmill.pipeline.worker.feature_values import stored
from earmill.pipeline.worker.models import WarmModels, warm_models
from earmill.pipeline.worker.prepare import LONG_S
from earmill.pipeline.worker.row_pipeline import RowProcessor, ShardRows

if TYPE_CHECKING:
    from earmill.pipeline.planning.plan import Plan
    from earmill.pipeline.spec.job import JobSpec

# Of a long row so much is tried: it is streamed like the whole.
SPAN_S = LONG_S * 1.25
# Clips of a group for each kernel thread, as the models take clips side by side.
CLIPS_PER_THREAD = 4
# No group is begun after so long, once each stratum has had one.
BUDGET_S = 20.0
# Rows that cannot be had for no fault of theirs.
OUTAGE = "source_outage"
_HASHED_BYTES = 1 << 24


def try_rows(
    spec: JobSpec,
    plan: Plan,
    strata: Strata,
    *,
    seed: int,
    threads: int,
    budget_s: float = BUDGET_S,
) -> Sampled:
    """Process and store the rows that were drawn.

    Args:
        seed: That drew them. threads: Of one worker.
        budget_s: Wall seconds after which no further group is begun.
    Raises:
        SpecError: A model that cannot be built. SourceError: No row could be used.
    """
    began_s = time.perf_counter()
    is_first = "torch" not in sys.modules
    with ExitStack() as until_the_end:
        with what_is_made_stays():
            validate_models(spec)
            first_s = time.perf_counter() - began_s
            models = _warm(spec, threads)
            trial = until_the_end.enter_context(_warm_trial(spec, plan, models, threads))
        warm_s = time.perf_counter() - began_s - first_s
        found = list(_within(budget_s, trial, strata, threads))
        if not any(group.audio_s for group in found):
            raise SourceError(
                f"none of the {sum(group.rows for group in found)} rows that were tried could be "
                f"used: {trial.first_reason}; nothing can be said of the others"
            )
        empty = trial.empty()
    return Sampled(
        tuple(found),
        empty,
        seed=seed,
        took_s=time.perf_counter() - began_s,
        threads=threads,
        device="cpu" if models.gpu is None else models.gpu.backend,
        first_s=first_s if is_first else None,
        warm_s=warm_s,
    )


def _warm(spec: JobSpec, threads: int) -> WarmModels:
    """The models on what the job wants; on cores where no GPU is here."""
    # Who starts a library's threads is who they are counted for from now on.
    with doing(MODEL, CpuTally(), libraries=FOR_MODELS):
        try:
            return warm_models(spec, threads, spec.run.device)
        except GpuUnusable:
            return warm_models(spec, threads, "cpu")


@contextmanager
def _warm_trial(spec: JobSpec, plan: Plan, models: WarmModels, threads: int) -> Iterator[_Trial]:
    """A trial whose readers and writers have run once; its folder goes with it."""
    source = _Timed(open_source(spec.source, spec.audio.array_rate_hz))
    processor = RowProcessor(
        spec, source, models.extractors, decode_threads=max(2, threads), gpu=models.gpu
    )
    with (
        closing(processor),
        tempfile.TemporaryDirectory(prefix="sample-", dir=own_folder()) as folder,
        patient(),
    ):
        trial = _Trial(spec, plan, models, processor, source, Layout.open(folder))
        with doing(ENCODE, CpuTally(), libraries=FOR_FILES):
            trial.warm_up()
        yield trial


def _within(budget_s: float, trial: _Trial, strata: Strata, threads: int) -> Iterator[Group]:
    """One group of each stratum, then another of each, until there is none or time is up."""
    until_s = time.perf_counter() + budget_s
    size = CLIPS_PER_THREAD * threads
    waiting = [(stratum, groups(stratum, size)) for stratum in strata.all]
    is_first_round = True
    while waiting:
        left = []
        for stratum, its in waiting:
            items = next(its, None)
            if items is None:
                continue
            if not is_first_round and time.perf_counter() > until_s:
                return
            yield trial.group(stratum, items)
            left.append((stratum, its))
        waiting, is_first_round = left, False


class _Timed:
    """A source that knows how long it was waited for."""

    def __init__(self, source: Source) -> None:
        self._source, self.waited_s = source, 0.0

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        fetched = self._source.fetch(items)
        while True:
            began_s = time.perf_counter()
            try:
                entry = next(fetched)
            except StopIteration:
                return
            finally:
                self.waited_s += time.perf_counter() - began_s
            yield entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@dataclass(frozen=True)
class _Cost:
    wall_s: float
    cpu_s: float


class _Trial:
    """Groups of rows on their way through the job's pipeline into a private folder."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Plan,
        models: WarmModels,
        processor: RowProcessor,
        source: _Timed,
        layout: Layout,
    ) -> None:
        self._spec, self._plan, self._models = spec, plan, models
        self._processor, self._source, self._layout = processor, source, layout
        infos = [info for model in models.extractors for info in model.streams]
        self._streams = stored_streams(infos, spec.output.dtype, spec.output.formats)
        self._shards = 0
        self._short = self._short_row()
        self._bad: QuarantineRow | None = None
        self.first_reason = "no reason was given"

    def _short_row(self) -> FeatureRow:
        """One frame, of which nothing is known."""
        cast = Caster(self._spec.output.dtype, self._streams)
        features = {
            name: made[:1] if isinstance(made, np.ndarray) else made
            for name, made in self._models.features.items()
        }
        held = stored(features, cast)
        return FeatureRow("empty", "empty", -1, 1.0, {}, {}, held.streams, held.steps)

    def warm_up(self) -> None:
        """The first shard pays for imports."""
        self._publish(ShardRows([self._short], []))

    def empty(self) -> EmptyShard:
        """What a shard costs before it has a row: from one short row to two is what one adds.

        Rows must have been tried: these are told the facts of one of them.
        """
        second = replace(self._short, row_id=f"{self._short.row_id}+")
        tally = CpuTally()
        with doing(OTHER, tally):
            cost, of_one = self._publish(ShardRows([self._short], []))
        of_two = self._publish(ShardRows([self._short, second], []))[1]
        quarantine, only_bad = self._of_bad(of_one)
        return EmptyShard(
            2 * of_one - of_two,
            _whole(tally, cost.cpu_s),
            cost.wall_s,
            quarantine=quarantine,
            only_bad=only_bad,
        )

    def _of_bad(self, of_one: int) -> tuple[int, int]:
        """Bytes that a bad row adds to a shard with others, and of a shard of its own."""
        bad = [row for row in (self._bad,) if row is not None]
        if not bad:
            return 0, 0
        beside = self._publish(ShardRows([self._short], bad))[1]
        return beside - of_one, self._publish(ShardRows([], bad))[1]

    def group(self, stratum: Stratum, items: Sequence[Item]) -> Group:
        """Rows tried together."""
        tally, waited_s = CpuTally(), self._source.waited_s
        spans = [_span(item) if stratum.is_long else item for item in items]
        with doing(OTHER, tally), _Clock() as process:
            rows = self._processed(spans)
        waited_s = self._source.waited_s - waited_s
        with doing(OTHER, tally):
            publish, nbytes = self._publish(rows)
        by_part = _whole(tally, process.cost.cpu_s + publish.cpu_s)
        by_part[HASH] = by_part.get(HASH, 0.0) + _unhashed_s(items, spans)
        for good in rows.good[:1]:
            self._short = replace(good, streams=self._short.streams, steps=self._short.steps)
        for row in rows.bad[:1]:
            self._bad = row
            self.first_reason = f"{row.stage}: {row.error_class}: {row.message}"
        return Group(
            stratum.name,
            rows=len(items),
            bad=dict(Counter(row.error_class for row in rows.bad)),
            planned_s=sum(map(item_seconds, spans)),
            audio_s=sum(row.seconds for row in rows.good),
            cpu_s=by_part,
            publish_cpu_s=publish.cpu_s,
            process_s=process.cost.wall_s,
            publish_s=publish.wall_s,
            fetch_s=waited_s,
            nbytes=nbytes,
            kinds=tuple(sorted({_kind(row.facts) for row in rows.good})),
        )

    def _processed(self, items: Sequence[Item]) -> ShardRows:
        try:
            return self._processor.process(items)
        except SourceOutage as error:  # one file that is gone may look so, where nothing else is
            if len(items) > 1:
                each = [self._processed([item]) for item in items]
                good = [row for rows in each for row in rows.good]
                return ShardRows(good, [row for rows in each for row in rows.bad])
            (item,) = items
            said = one_line(error)
            return ShardRows([], [QuarantineRow(item.row_id, item.uri, "fetch", OUTAGE, said, 1)])

    def _publish(self, rows: ShardRows) -> tuple[_Cost, int]:
        """Store rows as a shard; what that took, and its bytes."""
        output, shard_id = self._spec.output, f"{self._shards:05d}"
        self._shards += 1
        with _Clock() as clock:
            publish_shard(
                self._layout,
                shard_id=shard_id,
                attempt=new_attempt(),
                plan_id=self._plan.plan_id,
                rows=rows.good,
                bad=rows.bad,
                streams=self._streams,
                formats=output.formats,
                attrs=shard_attrs(self._spec.canonical(), self._spec.sha256()),
                info={},
                dtype=output.dtype,
                row_group_profile=output.row_group_profile,
                parquet_form=output.parquet_form or BINARY,
                extra_types=self._plan.extra_types or None,
            )
        record = read_commit(self._layout, shard_id)
        files = () if record is None else record.files
        return clock.cost, sum(file.bytes for file in files)


class _Clock:
    """Wall and CPU seconds of this process inside a block."""

    def __enter__(self) -> _Clock:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.cost = _Cost(time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s)


def _whole(tally: CpuTally, spent_s: float) -> dict[str, float]:
    """CPU seconds by part; what nobody claims is `other`."""
    found = tally.seconds()
    found[OTHER] = max(0.0, spent_s - sum(s for part, s in found.items() if part != OTHER))
    return found


def _span(item: Item) -> Item:
    """The beginning of a long row."""
    start_s = item.start_s or 0.0
    if item_seconds(item) <= SPAN_S:
        return item
    end_s = start_s + SPAN_S
    return replace(item, start_s=start_s, end_s=end_s, seconds=SPAN_S, part_of=None)


def _unhashed_s(items: Sequence[Item], spans: Sequence[Item]) -> float:
    """CPU seconds of the checksum of whole files, which is not taken of parts: a span's share."""
    nbytes = sum(
        (item.size or 0) * item_seconds(span) / item_seconds(item)
        for item, span in zip(items, spans, strict=True)
        if span is not item and item.start_s is item.end_s is None
    )
    return nbytes * _hash_s_per_byte() if nbytes else 0.0


@lru_cache(maxsize=1)
def _hash_s_per_byte() -> float:
    with _Clock() as clock:
        hashlib.sha256(bytes(_HASHED_BYTES)).digest()
    return clock.cost.cpu_s / _HASHED_BYTES


def _kind(facts: Mapping[str, Any]) -> str:
    """`wav 44100 Hz 2 ch`."""
    return f"{facts.get('container')} {facts.get('rate_hz'):g} Hz {facts.get('channels')} ch"
