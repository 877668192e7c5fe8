"""The real work behind a worker: warm models, process a shard's rows, publish it.

Several shards may be inside at once. On a CPU there are two: while one uses the models, the other
is decoded or written, and the models are taken in the order in which shards arrived; the next one
takes over while the last clips are under way, so that no core waits. On a GPU there are as many as
fill its launches, and they share these. What ends up in files is the same whatever
overlaps: a shard's rows depend on nothing but its items and the spec.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import SpillError, WorkerCrashError
from earmill.pipeline.common.retries import patient
from earmill.pipeline.common.timing import (
    ENCODE,
    FOR_FILES,
    FOR_MODELS,
    MODEL,
    OTHER,
    CpuSeconds,
    StageTimes,
    doing,
    library_threads,
)
from earmill.pipeline.dataset.lease import UNFENCED, Fence
from earmill.pipeline.dataset.provenance import VALUE_PACKAGES
from earmill.pipeline.dataset.publish import publish_shard, shard_attrs
from earmill.pipeline.dataset.recompute import Again
from earmill.pipeline.formats.dtypes import Caster
from earmill.pipeline.formats.format import BINARY
from earmill.pipeline.formats.registry import (
    Encoding,
    format_of,
    read_back,
    row_table,
    stored_streams,
    write_table,
)
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow, total
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources.fetch import longest_wait_s
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import commit_path
from earmill.pipeline.storage.retrying import longest_call_s
from earmill.pipeline.storage.scratch import own_folder, private_scratch, shared_scratch, sweep
from earmill.pipeline.worker.feature_values import stored
from earmill.pipeline.worker.messages import (
    CONCURRENT_SHARDS,
    MOST_ROWS_TOLD,
    BadRow,
    PublishError,
    ShardNotes,
    ShardOrder,
    WorkerInfo,
)
from earmill.pipeline.worker.models import WarmModels, warm_models
from earmill.pipeline.worker.row_pipeline import RowProcessor, ShardRows, quarantined
from earmill.pipeline.worker.turns import Turn, Turns, free_turn

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.spec.job import JobSpec

# What keeps a shard waiting for longer may be what it will be killed for: a read of the source, or
# a call to the output.
SLOW_READ_S, SLOW_CALL_S = 2.0, 5.0


@dataclass(frozen=True)
class WorkerJob:
    """All a worker needs to know; travels to it once.

    Args:
        spec: The job, storage options included.
        plan_id: Goes into commit records.
        threads: Kernel threads of this worker.
        folder: The driver's working folder, against which the spec's relative paths resolve.
        device: `cpu`; `cuda`, or `auto` for a GPU where one works.
        shards: How many may be in flight on a GPU.
        parquet_form: What a cell of a stream is in the dataset's Parquet files.
        streams: The dataset's streams, as dataset.json describes them: an earlier release may have
            begun it, and all of its shards are stored alike. Empty for those of a new dataset.
        extra_types: Types of carried-through columns over the whole plan.
        again: Shards whose commit is to be replaced.
        scratch: Name of the run's folder for what is written before it is published.
        fence: The run's right to write to the output.
    """

    spec: JobSpec
    plan_id: str
    threads: int
    folder: str
    device: str = "cpu"
    shards: int = CONCURRENT_SHARDS
    parquet_form: str = BINARY
    streams: Sequence[Mapping[str, Any]] = ()
    extra_types: Mapping[str, Any] = field(default_factory=dict)
    again: Mapping[str, Again] = field(default_factory=dict)
    scratch: str = "workers"
    fence: Fence = UNFENCED

    def __call__(self) -> ShardRunner:
        """Build the runner; called inside the worker's process."""
        return ShardRunner(self)


class ShardRunner:
    """Processes and publishes shards.

    Args:
        job: What to do.
        make_rows: Builds the row pipeline; RowProcessor unless a caller extends it.
    """

    def __init__(
        self, job: WorkerJob, make_rows: Callable[..., RowProcessor] = RowProcessor
    ) -> None:
        if os.path.isdir(job.folder):
            # A worker of a joined cluster starts wherever `ray start` was called.
            os.chdir(job.folder)
        self._job, self._make_rows = job, make_rows
        self._spec = job.spec
        self._layout = Layout.open(job.spec.output.uri, job.spec.output.storage_options)
        self._turns = Turns()
        # Tables are as large as features: no more shards are written at a time than have a core.
        self._writers = threading.Semaphore(max(CONCURRENT_SHARDS, job.threads))
        self._models: WarmModels | None = None
        self._rows: RowProcessor | None = None
        self._in_flight: dict[str, float] = {}
        self._lock = threading.Lock()
        self._cpu, self._cpu_before_s = CpuSeconds(), 0.0
        # Stored in every data file; the same for every attempt.
        self._attrs = shard_attrs(self._spec.canonical(), self._spec.sha256())

    def warm_up(self) -> WorkerInfo:
        """Open the source, build models and run them and the writers once; cheap when repeated."""
        if self._rows is None:
            sweep()  # what workers that were killed on this machine have left
            source = open_source(self._spec.source, self._spec.audio.array_rate_hz)
            # Who starts a library's threads is who they are counted for from now on.
            with doing(MODEL, CpuSeconds(), libraries=FOR_MODELS):
                models = warm_models(self._spec, self._job.threads, self._job.device)
            with doing(ENCODE, CpuSeconds(), libraries=FOR_FILES):
                self._exercise_writers(models)
            self._rows = self._make_rows(
                self._spec,
                source,
                models.extractors,
                decode_threads=max(2, self._job.threads),
                spill_folder=self._layout.root if self._layout.is_local else None,
                gpu=models.gpu,
                shards=self._shards(models),
                cpu=self._cpu,
            )
            self._models = models
            library_threads.begin()
            self._cpu_before_s = time.process_time()
        return self._info_of(self._warm)

    def run(self, order: ShardOrder) -> ShardNotes | None:
        """Process the shard and publish it, unless another attempt has done so already."""
        with patient(self._spec.run.retry_s), doing(OTHER, CpuSeconds(self._cpu)):
            return self._run(order)

    def _run(self, order: ShardOrder) -> ShardNotes | None:
        if self._layout.exists(commit_path(order.shard.shard_id, self._again(order).generation)):
            return None
        started, stages = time.perf_counter(), StageTimes()
        try:
            rows = self._process(order, stages)
            seconds = time.perf_counter() - started
            with self._writers:
                won = self._publish(order, rows, seconds, stages)
            return ShardNotes(order.attempt, won, stages.stretches(), _told(rows.bad))
        finally:
            with self._lock:
                self._in_flight.pop(order.attempt, None)

    def _again(self, order: ShardOrder) -> Again:
        """How the shard is committed; as generation 0 where it is for the first time."""
        return self._job.again.get(order.shard.shard_id, Again())

    def probe(self, items: Sequence[Item]) -> None:
        """Process and encode rows and forget them: either may be what kills the worker."""
        with doing(OTHER, self._cpu):
            self._probe(items)

    def _probe(self, items: Sequence[Item]) -> None:
        with self._line() as turn:
            rows = self._extracted(items, turn=turn)
        try:
            with private_scratch(self._layout, "probe") as folder:
                streams = self._streams(self._warm)
                self._encode(rows.good, streams, folder, self._job.extra_types or None)
        except OSError as error:
            raise PublishError("rows could not be encoded") from error

    def seconds_in_flight(self) -> float:
        """Audio seconds through the models in shards that are not published yet."""
        with self._lock:
            return sum(self._in_flight.values())

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of the process since it was warm, by part; what nobody claims is `other`."""
        found = self._cpu.seconds()
        spent_s = time.process_time() - self._cpu_before_s
        found[OTHER] = found.get(OTHER, 0.0) + max(0.0, spent_s - sum(found.values()))
        return found

    def waits_for(self) -> str:
        """`source` or `output` while it takes long to answer."""
        if longest_wait_s() > SLOW_READ_S:
            return "source"
        return "output" if longest_call_s() > SLOW_CALL_S else ""

    @property
    def _processor(self) -> RowProcessor:
        if self._rows is None:
            self.warm_up()
        if self._rows is None:
            raise RuntimeError("the worker is not warm")
        return self._rows

    @property
    def _warm(self) -> WarmModels:
        if self._models is None:
            self.warm_up()
        if self._models is None:
            raise RuntimeError("the worker is not warm")
        return self._models

    def _process(self, order: ShardOrder, stages: StageTimes) -> ShardRows:
        def count(seconds: float) -> None:
            with self._lock:
                self._in_flight[order.attempt] = self._in_flight.get(order.attempt, 0.0) + seconds

        planned = {item.row_id for item in order.shard.items}
        # A channel alone cannot stay behind: its row is processed whole.
        kept = [row for row in self._again(order).keep if row.row_id in planned]
        known = {row.row_id for row in kept}
        items = [
            item
            for item in order.shard.items
            if item.row_id not in order.culprits and item.row_id not in known
        ]
        with self._line() as turn:
            rows = self._extracted(
                items,
                attempts=order.attempts,
                witnesses=order.witnesses,
                turn=turn,
                on_audio=count,
                memory_share=order.memory_share,
                stages=stages,
            )
        culprits = [
            quarantined(item.row_id, item, _crash(order.culprits[item.row_id]), order.attempts)
            for item in order.shard.items
            if item.row_id in order.culprits and item.row_id not in known
        ]
        return ShardRows(rows.good, rows.bad + culprits + kept)

    def _shards(self, models: WarmModels) -> int:
        """How many may be inside at once."""
        return CONCURRENT_SHARDS if models.gpu is None else self._job.shards

    def _info_of(self, models: WarmModels) -> WorkerInfo:
        return WorkerInfo(
            pid=os.getpid(),
            device="cpu" if models.gpu is None else models.gpu.backend,
            threads=self._job.threads,
            shards=self._shards(models),
            note=models.note,
        )

    def _line(self) -> AbstractContextManager[Turn]:
        """A place in the line for the models; on a GPU nobody waits for another."""
        return self._turns.line_up() if self._warm.gpu is None else nullcontext(free_turn())

    def _extracted(self, items: Sequence[Item], **options: Any) -> ShardRows:
        try:
            return self._processor.process(items, **options)
        except SpillError as error:
            raise PublishError("the features of a long row found no room") from error

    def _publish(
        self, order: ShardOrder, rows: ShardRows, process_s: float, stages: StageTimes
    ) -> bool:
        shard, output = order.shard, self._spec.output
        try:
            return publish_shard(
                self._layout,
                shard_id=shard.shard_id,
                attempt=order.attempt,
                plan_id=self._job.plan_id,
                rows=rows.good,
                bad=rows.bad,
                streams=self._streams(self._warm),
                formats=output.formats,
                attrs=self._attrs,
                info=self._info(order, process_s) | _cast_errors(rows.good),
                dtype=output.dtype,
                row_group_profile=output.row_group_profile,
                parquet_form=self._job.parquet_form,
                plan_rows=[item.row_id for item in shard.items],
                extra_types=self._job.extra_types or None,
                generation=self._again(order).generation,
                folder=shared_scratch(self._layout, self._job.scratch),
                stages=stages,
                fence=self._job.fence,
            )
        except Exception as error:
            raise PublishError(f"shard {shard.shard_id} could not be published") from error

    def _streams(self, models: WarmModels) -> list[StreamInfo]:
        if self._job.streams:
            from amtcore.features.stream_info import StreamInfo

            return [StreamInfo.from_dict(info) for info in self._job.streams]
        infos = [info for model in models.extractors for info in model.streams]
        return stored_streams(infos, self._spec.output.dtype, self._spec.output.formats)

    def _exercise_writers(self, models: WarmModels) -> None:
        """Encode a row and read it back: what the writers import costs seconds the first time."""
        streams = self._streams(models)
        held = stored(models.features, Caster(self._spec.output.dtype, streams))
        row = FeatureRow("warm-up", "warm-up", -1, 1.0, {}, {}, held.streams, held.steps)
        with tempfile.TemporaryDirectory(prefix="warm-up-", dir=own_folder()) as name:
            self._encode([row], streams, Path(name), None)
        value_versions()

    def _encode(
        self,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        folder: Path,
        extra_types: Mapping[str, Any] | None,
    ) -> None:
        """Write rows as a shard's files and read them back."""
        output, form = self._spec.output, self._job.parquet_form
        encoding = Encoding(output.dtype, output.row_group_profile, extra_types, self._attrs, form)
        for fmt in output.formats:
            path = folder / f"w{format_of(fmt).suffix}"
            format_of(fmt).write(path, rows, streams, encoding)
            read_back(fmt, path, streams)
        write_table(row_table(rows, streams, extra_types), folder / "rows.parquet")

    def _info(self, order: ShardOrder, process_s: float) -> dict[str, Any]:
        """Stored in the commit record only: who did it, with what, and how long it took."""
        return {
            "device": self._warm.device,
            "versions": value_versions(),
            "worker": _whereabouts(),
            "threads": self._job.threads,
            "attempts": order.attempts,
            "timings_s": {"process": round(process_s, 6)},
        }


def _cast_errors(rows: Sequence[FeatureRow]) -> dict[str, Any]:
    """Stored in the commit record: what float16 cost each stream; the same whatever the attempt."""
    found = total(row.cast_errors for row in rows)
    return {"cast_errors": {k: v.to_dict() for k, v in sorted(found.items()) if v.nonzero}}


def _told(bad: Sequence[QuarantineRow]) -> tuple[BadRow, ...]:
    """Quarantined rows for who watches."""
    return tuple(
        BadRow(row.row_id, row.stage, row.error_class, row.message) for row in bad[:MOST_ROWS_TOLD]
    )


def _whereabouts() -> dict[str, Any]:
    """Host, process and, inside Ray, the node."""
    found: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        found["ray_node"] = ray.get_runtime_context().get_node_id()
    return found


@lru_cache(maxsize=1)
def value_versions() -> dict[str, str]:
    """Versions of the packages that can change a feature, without looking at all the others."""
    found = {}
    for name in VALUE_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _crash(reason: str) -> WorkerCrashError:
    return WorkerCrashError(f"processing this row alone fails its worker: {reason}")
