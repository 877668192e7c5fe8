"""Metrics of a run for Prometheus: over HTTP, or as a text file for node_exporter.

Names and labels are part of the interface (docs/watching.md lists them, a test compares). Counters
begin at zero with the process, as Prometheus wants them. Gauges named `earmill_job_...` are about
the whole job, earlier runs included. No label takes its values from the corpus.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import MissingPackageError, OutputError
from earmill.pipeline.driver.telemetry.run_totals import Histogram, RunMetrics
from earmill.pipeline.storage.local_store import write_local

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

TEXT_FILE = ".prom"
# Time between two versions of a text file, in seconds.
WRITE_EVERY_S = 5.0
# Placeholders in a file's name, so that each process of a machine writes a file of its own.
PLACES = {"{pid}": lambda: str(os.getpid()), "{host}": socket.gethostname}

# Label to value, and the value of the metric.
Samples = list[tuple[dict[str, str], float]]


class Collector:
    """Makes the metrics at each scrape.

    Args:
        figures: The run's totals.
        process: Value of a label `process` on every metric; empty for no such label. Metrics in
            text files of one machine must differ.
    """

    def __init__(self, figures: RunMetrics, process: str = "") -> None:
        self._figures = figures
        self._labels = {"process": process} if process else {}

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of now."""
        with self._figures.lock:
            return [*self._job(), *self._work(), *self._workers()]

    def _job(self) -> Iterator[Metric]:
        figures, state, tally = self._figures, self._figures.state, self._figures.tally
        if state.started is not None:
            about = {"job_name": state.started.job, "plan_id": state.started.plan_id}
            info = [({**about, "output": state.started.output}, 1.0)]
            yield self._gauge("earmill_job_info", "Which job this is; always 1.", info)
            rows = {"ok": tally.rows_ok, "quarantined": tally.rows_bad, "planned": tally.rows_total}
            yield self._by("earmill_job_rows", "Rows of the job.", "state", rows)
            audio = {"done": tally.audio_s, "planned": tally.planned_s}
            yield self._by("earmill_job_audio_seconds", "Audio of the job.", "state", audio)
            yield self._by("earmill_job_shards", "Shards of the job.", "state", figures.shards())
            yield self._one("earmill_job_done_ratio", "How much is done, 0 to 1.", tally.share)
        if tally.left_s is not None and state.finished is None:
            yield self._one("earmill_job_eta_seconds", "Time left at this rate.", tally.left_s)
        if tally.times_real_time is not None:
            rate = tally.times_real_time
            yield self._one("earmill_times_real_time", "Audio seconds per second.", rate)
        if state.finished is not None:
            end = [({"status": state.finished.status}, float(state.finished.exit_code))]
            yield self._gauge("earmill_job_exit_code", "Set at the end of the run.", end)

    def _work(self) -> Iterator[Metric]:
        state = self._figures.state
        yield self._by("earmill_rows", "Rows committed.", "status", state.rows, total=True)
        yield self._by(
            "earmill_rows_quarantined",
            "Of them, by reason.",
            "reason",
            state.quarantined,
            total=True,
        )
        yield self._total("earmill_audio_seconds", "Audio of good rows committed.", state.audio_s)
        yield self._total("earmill_output_bytes", "Bytes of data files committed.", state.nbytes)
        yield self._by(
            "earmill_shard_attempts", "Attempts on shards.", "result", state.attempts, total=True
        )
        yield self._histogram(
            "earmill_commit_seconds", "Creation of a commit record.", state.commits
        )
        yield self._histogram(
            "earmill_shard_seconds", "A shard, from fetching to its commit.", state.shard_times
        )
        yield self._stages()
        if state.last_commit_s is not None:
            yield self._one(
                "earmill_last_commit_timestamp_seconds",
                "When a shard was last committed.",
                state.last_commit_s,
            )

    def _workers(self) -> Iterator[Metric]:
        figures, counted = self._figures, self._figures.counted()
        cpu_s = figures.cpu_s()
        yield self._by("earmill_cpu_seconds", "CPU of workers.", "part", cpu_s, total=True)
        retries = [
            ({"what": what, "cause": cause}, float(n))
            for (what, cause), n in sorted(counted.retries.items())
        ]
        yield self._counter("earmill_retries", "Tries again, by cause.", retries, ["what", "cause"])
        samples = {"audio": counted.samples, "padding": counted.padding}
        text = "Samples of batches, and what their clips are shorter than the longest."
        yield self._by("earmill_batch_samples", text, "kind", samples, total=True)
        text = "Decoded clips that wait for the models."
        yield self._one("earmill_queue_bytes", text, counted.queue_bytes)
        workers = figures.state.workers
        yield self._by("earmill_workers", "Worker processes.", "state", workers)

    # -- one metric ---------------------------------------------------------------------------

    def _by(
        self, name: str, text: str, label: str, values: Mapping[str, float], *, total: bool = False
    ) -> Metric:
        samples = [({label: key}, float(value)) for key, value in sorted(values.items())]
        make = self._counter if total else self._gauge
        return make(name, text, samples, [label])

    def _one(self, name: str, text: str, value: float) -> Metric:
        return self._gauge(name, text, [({}, float(value))], [])

    def _total(self, name: str, text: str, value: float) -> Metric:
        return self._counter(name, text, [({}, float(value))], [])

    def _counter(
        self,
        name: str,
        text: str,
        samples: Samples,
        labels: list[str],
    ) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily(name, text, labels=self._names(labels)), samples)

    def _gauge(
        self,
        name: str,
        text: str,
        samples: Samples,
        labels: list[str] | None = None,
    ) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        names = labels if labels is not None else list(samples[0][0])
        return self._filled(GaugeMetricFamily(name, text, labels=self._names(names)), samples)

    def _names(self, labels: list[str]) -> list[str]:
        return [*labels, *self._labels]

    def _filled(self, metric: Any, samples: Samples) -> Metric:
        for labels, value in samples:
            metric.add_metric([*labels.values(), *self._labels.values()], value)
        return metric

    def _histogram(self, name: str, text: str, times: Histogram) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        metric = HistogramMetricFamily(name, text, labels=self._names([]))
        buckets, below = list[tuple[str, float]](), 0
        for end_s, count in zip((*times.ends_s, None), times.counts, strict=True):
            below += count
            buckets.append(("+Inf" if end_s is None else str(end_s), below))
        metric.add_metric([*self._labels.values()], buckets=buckets, sum_value=times.sum_s)
        return metric

    def _stages(self) -> Metric:
        from prometheus_client.core import SummaryMetricFamily

        text = "Stages of shards by the wall clock; they overlap."
        names = self._names(["stage"])
        metric = SummaryMetricFamily("earmill_shard_stage_seconds", text, labels=names)
        for stage, (times, total_s) in sorted(self._figures.state.stages_s.items()):
            metric.add_metric([stage, *self._labels.values()], count_value=times, sum_value=total_s)
        return metric


@contextmanager
def exposed(figures: RunMetrics, where: str) -> Iterator[str]:
    """Show the metrics for the time of the block; gives a sentence that says where.

    Args:
        figures: The run's totals.
        where: HOST:PORT to listen at, with port 0 for any free port; or the path of a text file
            that ends in .prom, in which `{pid}` and `{host}` are replaced.
    Raises:
        MissingPackageError: prometheus_client is not installed.
        OutputError: The address or file cannot be used.
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
            int(port), addr=host.strip("[]"), registry=_registry(Collector(figures))
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
    registry = _registry(Collector(figures, f"{socket.gethostname()}-{os.getpid()}"))
    over = threading.Event()

    def write() -> None:
        write_local(path, generate_latest(registry))

    def keep_writing() -> None:
        while not over.wait(WRITE_EVERY_S):
            try:
                write()
            except OSError:  # a full disk does not stop the run; try again in 5 seconds
                continue

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
        try:
            write()
        except OSError:  # the last event of the run holds the totals, too
            pass


def _registry(collector: Collector) -> CollectorRegistry:
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
