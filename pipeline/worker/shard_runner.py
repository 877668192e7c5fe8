"""The runner of a worker: warm models, process a shard's rows, publish the shard. Shards in flight
get the models in the order of their arrival; their files do not depend on the overlap."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import SpillError, WorkerCrashError
from earmill.pipeline.common.monitoring import CpuSeconds, StageTimes, doing, library_threads
from earmill.pipeline.common.retries import patient
from earmill.pipeline.dataset.commit_record import Recommit
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.driver_lock import UNFENCED, Fence
from earmill.pipeline.dataset.provenance import VALUE_PACKAGES
from earmill.pipeline.dataset.publish import encoding_of, publish_shard
from earmill.pipeline.formats.format import format_of
from earmill.pipeline.formats.row_table import row_table, write_table
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.formats.values import Caster, total
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources.base import waits
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import commit_path
from earmill.pipeline.storage.retrying import calls
from earmill.pipeline.storage.scratch import own_folder, private_scratch, shared_scratch, sweep
from earmill.pipeline.worker.extraction import stored
from earmill.pipeline.worker.messages import (
    CONCURRENT_SHARDS,
    MOST_ROWS_TOLD,
    PublishError,
    ShardNotes,
    ShardOrder,
    WorkerInfo,
)
from earmill.pipeline.worker.models import warm_models
from earmill.pipeline.worker.row_pipeline import RowProcessor, ShardRows, quarantined

# A longer read of the source, or call to the output, is named when a shard is killed for hanging.
SLOW_READ_S, SLOW_CALL_S = 2.0, 5.0


@dataclass(frozen=True)
class WorkerJob:
    """A job as it is sent to a worker; called there, it builds the runner."""

    spec: JobSpec  # Storage options included.
    dataset: DatasetFile  # An earlier release may have written it.
    threads: int  # Threads of kernels.
    folder: str  # Folder of the driver, for relative paths of the spec.
    device: str = "cpu"  # `cpu`; `cuda`, or `auto` for a GPU where one works.
    shards: int = CONCURRENT_SHARDS  # Most shards in flight on a GPU.
    again: Mapping[str, Recommit] = field(default_factory=dict)  # Commits to be replaced.
    scratch: str = "workers"  # Folder of the run for unpublished files.
    fence: Fence = UNFENCED  # The run's right to write to the output.

    def __call__(self) -> ShardRunner:
        return ShardRunner(self)


@dataclass(frozen=True)
class _Ready:
    rows: RowProcessor
    provenance: Mapping[str, Any]  # Facts that are in all commit records of this worker.
    info: WorkerInfo  # Facts for the driver.


class ShardRunner:
    """Processes and publishes shards; `make_rows` builds the row pipeline."""

    def __init__(
        self, job: WorkerJob, make_rows: Callable[..., RowProcessor] = RowProcessor
    ) -> None:
        if os.path.isdir(job.folder):
            # A worker of a joined cluster starts wherever `ray start` was called.
            os.chdir(job.folder)
        self._job, self._make_rows = job, make_rows
        self._spec = job.spec
        self._streams = [StreamInfo.from_dict(info) for info in job.dataset.streams]
        self._layout = Layout.open(job.spec.output.uri, job.spec.output.storage_options)
        # Tables are as large as features, so no more shards are written at a time than cores allow.
        self._writers = threading.Semaphore(max(CONCURRENT_SHARDS, job.threads))
        self._in_flight: dict[str, float] = {}  # An attempt's entry is its thread's alone.
        self._cpu, self._cpu_before_s = CpuSeconds(), 0.0

    def warm_up(self) -> WorkerInfo:
        return self._ready.info

    def run(self, order: ShardOrder) -> ShardNotes | None:
        """Process the shard and publish it; None where another attempt has published it already."""
        again = self._job.again.get(order.shard.shard_id, Recommit())
        with patient(self._spec.run.retry_s), doing("other", CpuSeconds(self._cpu)):
            if self._layout.exists(commit_path(order.shard.shard_id, again.generation)):
                return None
            started, stages = time.perf_counter(), StageTimes()
            try:
                rows = self._process(order, again.keep, stages)
                process_s = time.perf_counter() - started
                with self._writers:
                    won = self._publish(order, again.generation, rows, process_s, stages)
            finally:
                self._in_flight.pop(order.attempt, None)
            bad = rows.bad[:MOST_ROWS_TOLD]
            return ShardNotes(won, stages.stretches(), bad)

    def probe(self, items: Sequence[Item]) -> None:
        """Process and encode rows without publishing them, as either may kill the worker."""
        with doing("other", self._cpu):
            try:
                rows = self._ready.rows.process(items)
            except SpillError as error:
                raise PublishError("the features of a long row found no room") from error
            try:
                with private_scratch(self._layout, "probe") as folder:
                    self._encode(rows.good, folder)
            except OSError as error:
                raise PublishError("rows could not be encoded") from error

    def seconds_in_flight(self) -> float:
        """Audio seconds through the models in shards that are not published yet."""
        return sum(self._in_flight.copy().values())

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of the process since it was warm, by part; the rest is `other`."""
        by_part = self._cpu.seconds()
        spent_s = time.process_time() - self._cpu_before_s
        by_part["other"] = by_part.get("other", 0.0) + max(0.0, spent_s - sum(by_part.values()))
        return by_part

    def waits_for(self) -> str:
        """Return the kind of outage that a slow read or call points to; empty if there is none."""
        if waits.longest_s() > SLOW_READ_S:
            return "source"
        return "output" if calls.longest_s() > SLOW_CALL_S else ""

    def close(self) -> None:
        self._ready.rows.close()

    @cached_property
    def _ready(self) -> _Ready:
        spec, job = self._spec, self._job
        sweep()  # files of workers that were killed on this machine
        source = open_source(spec.source, spec.audio.array_rate_hz)
        # A library's threads count for the part of the work that starts them.
        with doing("model", CpuSeconds(), libraries="models"):
            models = warm_models(spec, job.threads, job.device)
        # Encode a row and read it back: the writers' imports cost seconds the first time.
        with (
            doing("encode", CpuSeconds(), libraries="files"),
            tempfile.TemporaryDirectory(prefix="warm-up-", dir=own_folder()) as name,
        ):
            held = stored(models.features, Caster(spec.output.dtype, self._streams))
            row = FeatureRow("warm-up", "warm-up", -1, 1.0, {}, {}, held.streams, held.steps)
            self._encode([row], Path(name))
        shards = CONCURRENT_SHARDS if models.gpu is None else job.shards
        rows = self._make_rows(
            spec,
            source,
            models.extractors,
            decode_threads=job.threads,
            spill_folder=self._layout.root if self._layout.is_local else None,
            gpu=models.gpu,
            shards=shards,
            cpu=self._cpu,
        )
        device = "cpu" if models.gpu is None else models.gpu.backend
        info = WorkerInfo(os.getpid(), device, job.threads, shards, models.note)
        library_threads.begin()
        self._cpu_before_s = time.process_time()
        whereabouts = {"host": socket.gethostname(), "pid": os.getpid()}
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            whereabouts["ray_node"] = ray.get_runtime_context().get_node_id()
        provenance = {
            "device": models.device,
            "versions": value_versions(),
            "worker": whereabouts,
            "threads": job.threads,
        }
        return _Ready(rows, provenance, info)

    def _process(
        self, order: ShardOrder, keep: Sequence[QuarantineRow], stages: StageTimes
    ) -> ShardRows:
        def count(seconds: float) -> None:
            self._in_flight[order.attempt] = self._in_flight.get(order.attempt, 0.0) + seconds

        planned = {item.row_id for item in order.shard.items}
        # A channel alone cannot stay behind: its row is processed whole.
        kept = [row for row in keep if row.row_id in planned]
        known = {row.row_id for row in kept}
        items = [item for item in order.shard.items if item.row_id not in known]
        try:
            rows = self._ready.rows.process(
                [item for item in items if item.row_id not in order.culprits],
                attempts=order.attempts,
                witnesses=order.witnesses,
                on_audio=count,
                memory_share=order.memory_share,
                stages=stages,
            )
        except SpillError as error:
            raise PublishError("the features of a long row found no room") from error
        culprits = []
        for item in items:
            if item.row_id in order.culprits:
                reason = order.culprits[item.row_id]
                crash = WorkerCrashError(f"processing this row alone fails its worker: {reason}")
                culprits.append(quarantined(item.row_id, item, crash, order.attempts))
        return ShardRows(rows.good, rows.bad + culprits + kept)

    def _publish(
        self,
        order: ShardOrder,
        generation: int,
        rows: ShardRows,
        process_s: float,
        stages: StageTimes,
    ) -> bool:
        shard = order.shard
        cast_errors = total(row.cast_errors for row in rows.good)
        # Stored in the commit record only. The cast errors are the same for every attempt.
        info = {
            **self._ready.provenance,
            "attempts": order.attempts,
            "timings_s": {"process": round(process_s, 6)},
            "cast_errors": {k: asdict(v) for k, v in sorted(cast_errors.items()) if v.nonzero},
        }
        try:
            return publish_shard(
                self._layout,
                self._job.dataset,
                shard_id=shard.shard_id,
                attempt=order.attempt,
                rows=rows.good,
                bad=rows.bad,
                info=info,
                plan_rows=[item.row_id for item in shard.items],
                generation=generation,
                folder=shared_scratch(self._layout, self._job.scratch),
                stages=stages,
                fence=self._job.fence,
            )
        except Exception as error:
            raise PublishError(f"shard {shard.shard_id} could not be published") from error

    def _encode(self, rows: Sequence[FeatureRow], folder: Path) -> None:
        encoding = encoding_of(self._job.dataset)
        for fmt in self._spec.output.formats:
            path = folder / f"w{format_of(fmt).suffix}"
            format_of(fmt).write(path, rows, self._streams, encoding)
            format_of(fmt).digest(path, self._streams)
        write_table(row_table(rows, self._streams, encoding.extra_types), folder / "rows.parquet")


def value_versions() -> dict[str, str]:
    """Return versions of the packages that can change a feature."""
    found = {}
    for name in VALUE_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
