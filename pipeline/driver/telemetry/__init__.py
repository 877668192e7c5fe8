"""Telemetry of a run: metrics for Prometheus, spans for OpenTelemetry.

Both are made of the driver's events alone, so neither can slow or change a run's work. The
libraries are imported only when they are asked for. Workers count and time in any case
(`common.monitoring`, `common.monitoring`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from earmill.pipeline.driver import events
from earmill.pipeline.driver.telemetry.opentelemetry import traced

if TYPE_CHECKING:
    from earmill.pipeline.spec.job import RunSpec


@contextmanager
def observed(run: RunSpec, sink: events.Sink) -> Iterator[tuple[events.Sink, events.Sink]]:
    """Give two sinks for the time of a run: of all events, and of the events for telemetry alone.

    Args:
        run: Says where metrics are shown.
        sink: Takes the events for people.
    Raises:
        OutputError: The address or file of the metrics cannot be used.
        MissingPackageError: The package for what was asked for is missing.
    """
    watchers: list[Callable[[events.Event], None]] = []
    with ExitStack() as stack:
        if run.metrics is not None:
            from earmill.pipeline.driver.telemetry.prometheus import exposed
            from earmill.pipeline.driver.telemetry.run_totals import RunMetrics

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
