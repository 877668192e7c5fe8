"""From a dataset to its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from earmill.jobs.local_paths import check_local
from earmill.jobs.report.about import about
from earmill.jobs.report.corpus import corpus, row_facts
from earmill.jobs.report.examples import chosen, examples, shown_text
from earmill.jobs.report.page import report_page
from earmill.jobs.report.quarantine import bad_rows_of, quarantine
from earmill.jobs.report.rows import rows_of
from earmill.jobs.report.stored import Stored
from earmill.jobs.report.work import work_of
from earmill.pipeline.common.errors import EarmillError, OutputError
from earmill.pipeline.common.text import quantity
from earmill.pipeline.dataset.watch import count_reasons
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.atomic_create import write_local
from earmill.pipeline.storage.store_errors import store_errors

# Rows that are looked at closely, at most; of each so many seconds.
MOST_EXAMPLES = 50
SECONDS = (0.1, 120.0)
NO_SOUND = "the report was made without sound"
UNSAID = "not said by the record"


@dataclass(frozen=True)
class Options:
    """How much of a dataset its report shows.

    Args:
        rows: Of the table, at most. examples: Rows that are looked at closely.
        row_ids: Which; none are chosen by length. seconds: Of each, from its start.
        audio: Embed what is heard of them.
    Raises:
        ValueError: A number is out of its range, or `row_ids` is one id instead of a list.
    """

    rows: int = 1000
    examples: int = 4
    row_ids: Sequence[str] = ()
    seconds: float = 10.0
    audio: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.row_ids, str):
            raise ValueError(f"row_ids: expected a list of ids, got {self.row_ids!r}")
        _check_number("rows", self.rows, 0, math.inf, whole=True)
        _check_number("examples", self.examples, 0, MOST_EXAMPLES, whole=True)
        _check_number("seconds", self.seconds, *SECONDS, whole=False)


def write_report(
    uri: str,
    out: Path,
    *,
    options: Options,
    storage_options: Mapping[str, Any],
    job: JobSpec | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the report of a dataset; what it takes and raises is that of `report_html`.

    Raises:
        OutputError: The file cannot be written, or is not one of this machine.
    """
    check_local(out)
    with store_errors(uri):
        page = report_html(
            uri, options=options, storage_options=storage_options, job=job, on_begin=on_begin
        )
    try:
        write_local(str(out), page.encode())
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}; choose another --out") from error
    return out


def report_html(
    uri: str,
    *,
    options: Options,
    storage_options: Mapping[str, Any],
    job: JobSpec | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> str:
    """The report of a dataset as one HTML page.

    Args:
        job: Where dataset.json does not say all: credentials of the source.
        on_begin: Told what takes a while.
    Raises:
        SourceError: No dataset there, nothing committed yet, or no row of a name.
        CommitError: A file of the dataset is damaged.
    """
    on_begin("reading index and commits")
    stored = Stored.open(uri, storage_options)
    positions = chosen(stored.features, options.examples, options.row_ids)
    facts, bad = row_facts(stored), bad_rows_of(stored, options.rows)
    on_begin(f"drawing {quantity(len(positions), 'row')}")
    shown = examples(
        stored,
        positions,
        seconds=options.seconds,
        job=_job(stored, job) if options.audio else NO_SOUND,
    )
    dataset = stored.features.dataset
    return report_page(
        {
            "name": dataset.name,
            "place": stored.layout.url(),
            "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "closed": stored.entry is not None,
            "models": [str(entry.get("model")) for entry in dataset.spec["extract"]],
            "corpus": corpus(stored, facts),
            "quarantine": quarantine(_reasons(stored), bad),
            "work": work_of(stored.facts),
            "examples": [(example, shown_text(example)) for example in shown],
            "rows": rows_of(stored, facts, bad, options.rows),
            "about": about(stored),
        }
    )


def _check_number(name: str, value: float, low: float, high: float, *, whole: bool) -> None:
    kind, called = (Integral, "a whole number") if whole else (Real, "a number")
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        limits = f"of {low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}: expected {called} {limits}, got {value!r}")


def _reasons(stored: Stored) -> dict[str, int]:
    reasons = count_reasons(stored.facts)
    unsaid = stored.rows_bad - sum(reasons.values())
    return {**reasons, UNSAID: unsaid} if unsaid > 0 else reasons


def _job(stored: Stored, job: JobSpec | None) -> JobSpec | str:
    """The job that names the source; why there is none, where dataset.json holds no valid one."""
    if job is not None:
        return job
    dataset = stored.features.dataset
    output = {**dataset.spec["output"], "uri": stored.layout.url()}
    try:
        return JobSpec.load({**dataset.spec, "name": dataset.name, "output": output})
    except EarmillError as error:
        return f"the job in dataset.json cannot be read: {error}"
