"""Metrics of a run for Prometheus: over HTTP, or as a text file for node_exporter.

Metrics are made of the driver's events alone, so they change nothing in a run. Names and labels are
part of the interface (docs/watching.md lists them, a test compares). Counters begin at zero with
the process. Gauges named `earmill_job_...` are about the whole job, earlier runs included. No label
takes its values from the corpus.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.missing_modules import needed_modules
from earmill.pipeline.driver import events
from earmill.pipeline.driver.run_totals import Histogram, RunMetrics
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.storage.local_store import write_local

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

TEXT_FILE = ".prom"
WRITE_EVERY_S = 5.0  # Time between two versions of a text file, in seconds.
# The value of a metric, or a value for each label; a tuple where there are several labels.
Values = float | Mapping[Any, float]


@contextmanager
def observed(run: RunSpec, sink: events.Sink) -> Iterator[tuple[events.Sink, events.Sink]]:
    """Yield two sinks for the time of a run: for all events, and for events of metrics alone."""
    if run.metrics is None:
        yield sink, events.ignore
        return
    figures = RunMetrics()

    def both(event: events.Event) -> None:
        figures(event)
        sink(event)

    with exposed(figures, run.metrics) as where:
        sink(events.Note(where))
        yield both, figures


class Collector:
    """Makes the metrics at each scrape; a label `process` tells text files of one machine apart."""

    def __init__(self, figures: RunMetrics, process: str) -> None:
        from prometheus_client import core

        self._figures, self._core = figures, core
        self._gauge = partial(self._filled, core.GaugeMetricFamily)
        self._counter = partial(self._filled, core.CounterMetricFamily)
        self._labels = {"process": process} if process else {}

    def collect(self) -> Iterable[Metric]:
        with self._figures.lock:
            return [*self._job(), *self._work(), *self._workers()]

    def _job(self) -> Iterator[Metric]:
        figures, tally, gauge = self._figures, self._figures.tally, self._gauge
        if figures.started is not None:
            about = (figures.started.job, figures.started.plan_id, figures.started.output)
            text, labels = "Which job this is; always 1.", ("job_name", "plan_id", "output")
            yield gauge("earmill_job_info", text, {about: 1}, *labels)
            rows = {"ok": tally.rows_ok, "quarantined": tally.rows_bad, "planned": tally.rows_total}
            yield gauge("earmill_job_rows", "Rows of the job.", rows, "state")
            audio = {"done": tally.audio_s, "planned": tally.planned_s}
            yield gauge("earmill_job_audio_seconds", "Audio of the job.", audio, "state")
            yield gauge("earmill_job_shards", "Shards of the job.", figures.shards(), "state")
            yield gauge("earmill_job_done_ratio", "How much is done, 0 to 1.", tally.share)
        if tally.left_s is not None and figures.finished is None:
            yield gauge("earmill_job_eta_seconds", "Time left at this rate.", tally.left_s)
        if tally.times_real_time is not None:
            rate = tally.times_real_time
            yield gauge("earmill_times_real_time", "Audio seconds per second.", rate)
        if figures.finished is not None:
            end = {figures.finished.status: figures.finished.exit_code}
            yield gauge("earmill_job_exit_code", "Set at the end of the run.", end, "status")

    def _work(self) -> Iterator[Metric]:
        figures, counter = self._figures, self._counter
        yield counter("earmill_rows", "Rows committed.", figures.rows, "status")
        reasons = figures.quarantined
        yield counter("earmill_rows_quarantined", "Of them, by reason.", reasons, "reason")
        yield counter("earmill_audio_seconds", "Audio of good rows committed.", figures.audio_s)
        yield counter("earmill_output_bytes", "Bytes of data files committed.", figures.nbytes)
        attempts = figures.attempts
        yield counter("earmill_shard_attempts", "Attempts on shards.", attempts, "result")
        text = "Creation of a commit record."
        yield self._histogram("earmill_commit_seconds", text, figures.commits)
        text = "A shard, from fetching to its commit."
        yield self._histogram("earmill_shard_seconds", text, figures.shard_times)
        text = "Stages of shards by the wall clock; they overlap."
        stages = self._core.SummaryMetricFamily(
            "earmill_shard_stage_seconds", text, labels=["stage", *self._labels]
        )
        for stage, (times, total_s) in sorted(figures.stages_s.items()):
            stages.add_metric([stage, *self._labels.values()], count_value=times, sum_value=total_s)
        yield stages
        if figures.last_commit_s is not None:
            text = "When a shard was last committed."
            name = "earmill_last_commit_timestamp_seconds"
            yield self._gauge(name, text, figures.last_commit_s)

    def _workers(self) -> Iterator[Metric]:
        figures, counted = self._figures, self._figures.counted()
        yield self._counter("earmill_cpu_seconds", "CPU of workers.", figures.cpu_s(), "part")
        text, labels = "Tries again, by cause.", ("what", "cause")
        yield self._counter("earmill_retries", text, counted.retries, *labels)
        samples = {"audio": counted.samples, "padding": counted.padding}
        text = "Samples of batches, and what their clips are shorter than the longest."
        yield self._counter("earmill_batch_samples", text, samples, "kind")
        text = "Decoded clips that wait for the models."
        yield self._gauge("earmill_queue_bytes", text, counted.queue_bytes)
        yield self._gauge("earmill_workers", "Worker processes.", figures.pool.workers, "state")

    def _filled(self, kind: Any, name: str, text: str, values: Values, *labels: str) -> Metric:
        metric: Any = kind(name, text, labels=[*labels, *self._labels])
        for key, value in sorted(values.items()) if isinstance(values, Mapping) else [((), values)]:
            named = key if isinstance(key, tuple) else (key,)
            metric.add_metric([*named, *self._labels.values()], float(value))
        return metric

    def _histogram(self, name: str, text: str, times: Histogram) -> Metric:
        metric = self._core.HistogramMetricFamily(name, text, labels=[*self._labels])
        ends, below = map(str, (*times.ends_s, "+Inf")), accumulate(times.counts)
        buckets = list(zip(ends, below, strict=True))
        metric.add_metric([*self._labels.values()], buckets=buckets, sum_value=times.sum_s)
        return metric


@contextmanager
def exposed(figures: RunMetrics, where: str) -> Iterator[str]:
    """Show the metrics for the time of the block, and yield a sentence with the place. The place is
    HOST:PORT, or a text file, whose path may have `{pid}` and `{host}`."""
    with needed_modules("run.metrics"):
        from prometheus_client import CollectorRegistry
    is_file = where.endswith(TEXT_FILE)
    process = f"{socket.gethostname()}-{os.getpid()}" if is_file else ""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(figures, process))
    with (_text_file if is_file else _endpoint)(registry, where) as place:
        yield f"metrics are {place}"


@contextmanager
def _endpoint(registry: CollectorRegistry, where: str) -> Iterator[str]:
    from prometheus_client import start_http_server

    host, _, port = where.rpartition(":")
    try:
        server, thread = start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except (OSError, OverflowError) as error:
        raise OutputError(
            f"run.metrics: cannot listen at {where}: {getattr(error, 'strerror', None) or error}; "
            "another driver on this machine may: give each its own port, or port 0"
        ) from error
    try:
        yield f"at http://{host}:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _text_file(registry: CollectorRegistry, where: str) -> Iterator[str]:
    from prometheus_client import generate_latest

    # Each process of a machine writes a file of its own.
    path = where.replace("{pid}", str(os.getpid())).replace("{host}", socket.gethostname())
    over = threading.Event()

    def write() -> None:
        write_local(path, generate_latest(registry))

    def keep_writing() -> None:
        while not over.wait(WRITE_EVERY_S):
            with suppress(OSError):  # a full disk does not stop the run; try again in 5 seconds
                write()

    try:
        write()
    except OSError as error:
        raise OutputError(
            f"run.metrics: {path} cannot be written: {error.strerror or error}; give a file in a "
            "folder that exists"
        ) from error
    thread = threading.Thread(target=keep_writing, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"written to {path}"
    finally:
        over.set()
        thread.join()
        with suppress(OSError):  # the last event of the run holds the totals, too
            write()
