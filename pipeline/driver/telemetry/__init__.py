"""What a run shows to the machines that watch it: figures for Prometheus, spans for OpenTelemetry.

Both are fed the events of the driver and nothing else, so neither can slow or change a run's work;
where neither is asked for, nothing of this is imported. Workers count and time for them anyway
(`common.counts`, `common.timing`).
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
    """Where a run's events go, and where those go that are for telemetry alone.

    Raises:
        OutputError: The metrics' address or file is not to be had.
        MissingPackageError: A package is missing that was asked for.
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
