"""A run as OpenTelemetry spans: one for the job, below it one a shard with a child a stage.

The driver makes a shard's spans of the times that its worker reports. Workers do not import
OpenTelemetry, and no row has a span. Rows that go to quarantine are events of their shard's span
(`row_quarantined`, with the row's id), and so is every reason for trying a shard again.

Spans go to the tracer provider of the calling program (`trace.set_tracer_provider`, or the command
`opentelemetry-instrument`). Without one, but with OTEL_TRACES_EXPORTER or an OTLP endpoint set, the
exporter of that name is set up for the run. Without either nothing is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import MissingPackageError, SpecError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.driver import events

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OTLP, CONSOLE, NONE = "otlp", "console", "none"
ADVICE = "pip install 'earmill[telemetry]'"


class Spans:
    """Takes every event of a run; the job's span ends with `close`.

    Args:
        tracer: Makes spans.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._job: Span | None = None

    def __call__(self, event: events.Event) -> None:
        """Turn an event into the job's span, a shard's span, or an event of the job's span."""
        match event:
            case events.JobStarted():
                names = {"job": event.job, "plan_id": event.plan_id, "output": event.output}
                sizes = {"shards": event.shards_total, "rows": event.rows_total}
                attributes: dict[str, Any] = {**names, **sizes}
                self._job = self._tracer.start_span("earmill.job", attributes=_named(attributes))
            case events.ShardAttempt():
                self._shard(event)
            case events.ShardRetry() | events.ShardWaits() | events.ShardFailed():
                what = {"shard": event.shard_id, "reason": one_line(event.reason)}
                self._note(event.kind, what)
            case events.WorkerLost():
                self._note(event.kind, {"worker": event.worker, "reason": one_line(event.reason)})
            case events.CulpritFound():
                row = {"row_id": event.row_id, "reason": one_line(event.reason)}
                self._note(event.kind, {"shard": event.shard_id, **row})
            case events.JobFinished():
                self._finish(event)

    def close(self) -> None:
        """End the job's span, whatever happened."""
        if self._job is not None:
            self._job.end()
            self._job = None

    def _note(self, name: str, what: dict[str, Any]) -> None:
        if self._job is not None:
            self._job.add_event(name, _named(what))

    def _shard(self, event: events.ShardAttempt) -> None:
        from opentelemetry.trace import Status, StatusCode

        stages = {} if event.notes is None else event.notes.stages
        began_s = min([event.began_s, *(began for began, _ in stages.values())])
        ended_s = max([event.ended_s, *(ended for _, ended in stages.values())])
        parent = self._below(self._job)
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
        below = self._below(span)
        for stage, (stage_began_s, stage_ended_s) in stages.items():
            name = f"earmill.{stage}"
            child = self._tracer.start_span(name, below, start_time=_ns(stage_began_s))
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

    def _below(self, span: Span | None) -> Any:
        """Return the context whose spans are children of this span."""
        from opentelemetry.trace import set_span_in_context

        return None if span is None else set_span_in_context(span)


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
