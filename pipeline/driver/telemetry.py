"""Telemetry of a run: metrics for Prometheus, spans for OpenTelemetry.

Both are made of the driver's events alone, so neither can slow or change a run's work. The
libraries are imported only when they are asked for. Workers count and time in any case
(`common.monitoring`).

Metrics are shown over HTTP, or as a text file for node_exporter. Names and labels are part of the
interface (docs/watching.md lists them, a test compares). Counters begin at zero with the process,
as Prometheus wants them. Gauges named `earmill_job_...` are about the whole job, earlier runs
included. No label takes its values from the corpus.

Spans are one for the job, below it one a shard with a child a stage. The driver makes a shard's
spans of the times that its worker reports. Workers do not import OpenTelemetry, and no row has a
span. Rows that go to quarantine are events of their shard's span (`row_quarantined`, with the row's
id), and so is every reason for trying a shard again. Spans go to the tracer provider of the calling
program (`trace.set_tracer_provider`, or the command `opentelemetry-instrument`). Without one, but
with OTEL_TRACES_EXPORTER or an OTLP endpoint set, the exporter of that name is set up for the run.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import MissingPackageError, OutputError, SpecError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.driver import events
from earmill.pipeline.driver.run_totals import Histogram, RunMetrics
from earmill.pipeline.storage.local_store import write_local

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from earmill.pipeline.spec.job import RunSpec


@contextmanager
def observed(run: RunSpec, sink: events.Sink) -> Iterator[tuple[events.Sink, events.Sink]]:
    """Give two sinks for the time of a run: of all events, and of those for telemetry alone."""
    watchers: list[events.Sink] = []
    with ExitStack() as stack:
        if run.metrics is not None:
            figures = RunMetrics()
            sink(events.Note(stack.enter_context(exposed(figures, run.metrics))))
            watchers.append(figures)
        if (spans := stack.enter_context(traced())) is not None:
            watchers.append(spans)
        if not watchers:
            yield sink, events.ignore
            return

        def observe(event: events.Event) -> None:
            for watcher in watchers:
                watcher(event)

        def both(event: events.Event) -> None:
            observe(event)
            sink(event)

        yield both, observe


# -- metrics --------------------------------------------------------------------------------------

TEXT_FILE = ".prom"
# Time between two versions of a text file, in seconds.
WRITE_EVERY_S = 5.0
# The value of a metric, or a value for each label; a tuple where there are several labels.
Values = float | Mapping[Any, float]
# Placeholders in a file's name, so that each process of a machine writes a file of its own.
PLACES = {"{pid}": lambda: str(os.getpid()), "{host}": socket.gethostname}


class Collector:
    """Makes the metrics at each scrape.

    Every metric has a label `process`, unless that is empty, because metrics in text files of one
    machine must differ.
    """

    def __init__(self, figures: RunMetrics, process: str = "") -> None:
        from prometheus_client import core

        self._figures, self._core = figures, core
        self._labels = {"process": process} if process else {}

    def collect(self) -> Iterable[Metric]:
        with self._figures.lock:
            return [*self._job(), *self._work(), *self._workers()]

    def _job(self) -> Iterator[Metric]:
        figures, tally = self._figures, self._figures.tally
        if figures.started is not None:
            about = (figures.started.job, figures.started.plan_id, figures.started.output)
            text, labels = "Which job this is; always 1.", ("job_name", "plan_id", "output")
            yield self._gauge("earmill_job_info", text, {about: 1}, *labels)
            rows = {"ok": tally.rows_ok, "quarantined": tally.rows_bad, "planned": tally.rows_total}
            yield self._gauge("earmill_job_rows", "Rows of the job.", rows, "state")
            audio = {"done": tally.audio_s, "planned": tally.planned_s}
            yield self._gauge("earmill_job_audio_seconds", "Audio of the job.", audio, "state")
            yield self._gauge("earmill_job_shards", "Shards of the job.", figures.shards(), "state")
            yield self._gauge("earmill_job_done_ratio", "How much is done, 0 to 1.", tally.share)
        if tally.left_s is not None and figures.finished is None:
            yield self._gauge("earmill_job_eta_seconds", "Time left at this rate.", tally.left_s)
        if tally.times_real_time is not None:
            rate = tally.times_real_time
            yield self._gauge("earmill_times_real_time", "Audio seconds per second.", rate)
        if figures.finished is not None:
            end = {figures.finished.status: figures.finished.exit_code}
            yield self._gauge("earmill_job_exit_code", "Set at the end of the run.", end, "status")

    def _work(self) -> Iterator[Metric]:
        figures = self._figures
        yield self._counter("earmill_rows", "Rows committed.", figures.rows, "status")
        reasons = figures.quarantined
        yield self._counter("earmill_rows_quarantined", "Of them, by reason.", reasons, "reason")
        yield self._counter(
            "earmill_audio_seconds", "Audio of good rows committed.", figures.audio_s
        )
        yield self._counter(
            "earmill_output_bytes", "Bytes of data files committed.", figures.nbytes
        )
        attempts = figures.attempts
        yield self._counter("earmill_shard_attempts", "Attempts on shards.", attempts, "result")
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

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        metric = self._core.GaugeMetricFamily(name, text, labels=[*labels, *self._labels])
        return self._filled(metric, values)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        metric = self._core.CounterMetricFamily(name, text, labels=[*labels, *self._labels])
        return self._filled(metric, values)

    def _filled(self, metric: Any, values: Values) -> Metric:
        for key, value in sorted(values.items()) if isinstance(values, Mapping) else [((), values)]:
            labels = key if isinstance(key, tuple) else (key,)
            metric.add_metric([*labels, *self._labels.values()], float(value))
        return metric

    def _histogram(self, name: str, text: str, times: Histogram) -> Metric:
        metric = self._core.HistogramMetricFamily(name, text, labels=[*self._labels])
        buckets, below = list[tuple[str, float]](), 0
        for end_s, count in zip((*times.ends_s, "+Inf"), times.counts, strict=True):
            below += count
            buckets.append((str(end_s), below))
        metric.add_metric([*self._labels.values()], buckets=buckets, sum_value=times.sum_s)
        return metric


@contextmanager
def exposed(figures: RunMetrics, where: str) -> Iterator[str]:
    """Show the metrics for the time of the block; gives a sentence that says where.

    An address `where` is HOST:PORT to listen at, with port 0 for any free port. Else it is the path
    of a text file that ends in .prom, in which `{pid}` and `{host}` are replaced.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "run.metrics needs the package prometheus-client; pip install prometheus-client, or "
            "leave run.metrics out"
        ) from error
    if where.endswith(TEXT_FILE):
        with _text_file(figures, where) as path:
            yield f"metrics are written to {path}"
    else:
        with _endpoint(figures, where) as address:
            yield f"metrics are at http://{address}/metrics"


@contextmanager
def _endpoint(figures: RunMetrics, where: str) -> Iterator[str]:
    from prometheus_client import start_http_server

    host, _, port = where.rpartition(":")
    try:
        server, thread = start_http_server(
            int(port), addr=host.strip("[]"), registry=_registry(figures)
        )
    except (OSError, OverflowError) as error:
        raise OutputError(
            f"run.metrics: cannot listen at {where}: {getattr(error, 'strerror', None) or error}; "
            "another driver on this machine may: give each its own port, or port 0"
        ) from error
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _text_file(figures: RunMetrics, where: str) -> Iterator[str]:
    """Write the file every 5 seconds and once more at the end; the file stays."""
    from prometheus_client import generate_latest

    path = where
    for place, value in PLACES.items():
        path = path.replace(place, value())
    registry = _registry(figures, f"{socket.gethostname()}-{os.getpid()}")
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
        yield path
    finally:
        over.set()
        thread.join()
        with suppress(OSError):  # the last event of the run holds the totals, too
            write()


def _registry(figures: RunMetrics, process: str = "") -> CollectorRegistry:
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(figures, process))
    return registry


# -- spans ----------------------------------------------------------------------------------------

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OTLP, CONSOLE, NONE = "otlp", "console", "none"
ADVICE = "pip install 'earmill[telemetry]'"


class Spans:
    """Takes every event of a run; the job's span ends with `close`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._job: Span | None = None

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.JobStarted():
                names = {"job": event.job, "plan_id": event.plan_id, "output": event.output}
                sizes = {"shards": event.shards_total, "rows": event.rows_total}
                attributes: dict[str, Any] = {**names, **sizes}
                self._job = self._tracer.start_span("earmill.job", attributes=_named(attributes))
            case events.ShardAttempt():
                self._shard(event)
            case events.ShardRetry() | events.ShardWaits() | events.ShardFailed():
                self._note(event, shard=event.shard_id)
            case events.WorkerLost():
                self._note(event, worker=event.worker)
            case events.CulpritFound():
                self._note(event, shard=event.shard_id, row_id=event.row_id)
            case events.JobFinished():
                self._finish(event)

    def close(self) -> None:
        if self._job is not None:
            self._job.end()
            self._job = None

    def _note(self, event: Any, **what: Any) -> None:
        """Add an event with a reason to the job's span."""
        if self._job is not None:
            reason = one_line(event.reason)
            self._job.add_event(event.kind, _named({**what, "reason": reason}))

    def _shard(self, event: events.ShardAttempt) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        stages = {} if event.notes is None else event.notes.stages
        began_s = min([event.began_s, *(began for began, _ in stages.values())])
        ended_s = max([event.ended_s, *(ended for _, ended in stages.values())])
        parent = None if self._job is None else set_span_in_context(self._job)
        span = self._tracer.start_span("earmill.shard", parent, start_time=_ns(began_s))
        span.set_attributes(_named({"shard": event.shard_id, "worker": event.worker}))
        if event.notes is not None:
            span.set_attributes(_named({"attempt": event.notes.attempt, "won": event.notes.won}))
            for row in event.notes.bad:
                what = {"row_id": row.row_id, "stage": row.stage, "error_class": row.error_class}
                span.add_event(
                    events.RowQuarantined.kind,
                    _named({**what, "message": one_line(row.message)}),
                    timestamp=_ns(ended_s),
                )
        if event.error:
            span.set_status(Status(StatusCode.ERROR, one_line(event.error)))
        below = set_span_in_context(span)
        for stage, (began_s, stage_ended_s) in stages.items():
            child = self._tracer.start_span(f"earmill.{stage}", below, start_time=_ns(began_s))
            child.end(_ns(stage_ended_s))
        span.end(_ns(ended_s))

    def _finish(self, event: events.JobFinished) -> None:
        from opentelemetry.trace import Status, StatusCode

        if self._job is None:
            return
        rows = {"rows_ok": event.rows_ok, "rows_bad": event.rows_bad}
        ends = {"status": event.status, "exit_code": event.exit_code, **rows}
        self._job.set_attributes(_named(ends))
        if event.exit_code:
            self._job.set_status(Status(StatusCode.ERROR, one_line(event.message)))


@contextmanager
def traced() -> Iterator[Spans | None]:
    """Give a maker of spans for the time of a run; None where no tracing is set up.

    Raises:
        MissingPackageError: The environment names an exporter that is not installed.
        SpecError: The environment names an unknown exporter.
    """
    provider, ours = _provider()
    if provider is None:
        yield None
        return
    spans = Spans(provider.get_tracer("earmill"))
    try:
        yield spans
    finally:
        spans.close()
        if ours:
            provider.shutdown()


def _provider() -> tuple[Any, bool]:
    """Return the tracer provider or None, and True if it was made here."""
    api = sys.modules.get("opentelemetry.trace")
    if api is not None and hasattr(api.get_tracer_provider(), "add_span_processor"):
        return api.get_tracer_provider(), False
    wanted = os.environ.get(EXPORTER, "").strip()
    if not wanted and any(os.environ.get(name) for name in ENDPOINTS):
        wanted = OTLP
    if wanted in ("", NONE):
        return None, False
    try:
        return _made(wanted), True
    except ImportError as error:
        raise MissingPackageError(
            f"{EXPORTER} asks for {wanted}, and {error.name or 'a package'} is not installed; "
            f"{ADVICE}, or set {EXPORTER}=none"
        ) from error


def _made(wanted: str) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    exporter: Any
    if wanted == OTLP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    elif wanted == CONSOLE:
        # Standard output has the progress.
        exporter = ConsoleSpanExporter(out=sys.stderr)
    else:
        raise SpecError(
            f"{EXPORTER}: expected otlp, console or none, got {wanted!r}; start the job with "
            "opentelemetry-instrument for others"
        )
    provider = TracerProvider(resource=Resource.create({"service.name": "earmill"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    """Prefix the names of attributes, because other programs may use `shard`, too."""
    return {f"earmill.{name}": value for name, value in attributes.items()}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
