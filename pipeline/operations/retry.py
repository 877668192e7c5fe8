"""The job of a stored dataset, and the shards whose quarantined rows are tried again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.dataset.description import require_dataset
from earmill.pipeline.dataset.recompute import Chooser, RowFilter, quarantined, was_cut_off
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.retrying import store_errors

Job = str | Mapping[str, Any] | JobSpec


def stored_job(
    layout: Layout,
    uri: str,
    storage_options: Mapping[str, Any],
    *,
    job: Job | None = None,
    overrides: Iterable[str] = (),
) -> JobSpec:
    """Return the job of a dataset, with this place as output.

    Args:
        layout: The dataset's place.
        uri: The same place as the caller wrote it.
        storage_options: Storage options of the place.
        job: The job file, for keys that dataset.json does not hold: credentials, `run`.
        overrides: `a.b=c` strings.
    Raises:
        OutputError: There is no dataset.
        SpecError: The job is wrong, or dataset.json names code to import; such code is taken from
            the author's job file only.
    """
    dataset = require_dataset(layout)
    known: Mapping[str, Any] = {}
    if job is not None:
        spec = JobSpec.load(job, overrides=overrides)
        known = spec.output.storage_options
    else:
        output = {**dataset.spec["output"], "uri": uri}
        stored = {**dataset.spec, "name": dataset.name, "output": output}
        spec = JobSpec.load(stored, overrides=overrides)
        _check_no_code(spec, layout)
    options = dict(storage_options or known)
    place = spec.output.model_copy(update={"uri": uri, "storage_options": options})
    return spec.model_copy(update={"output": place})


def find_retry(
    uri: str,
    storage_options: Mapping[str, Any],
    *,
    rows: RowFilter,
    job: Job | None,
    overrides: Iterable[str],
) -> tuple[JobSpec, Chooser] | None:
    """Return the job that retries quarantined rows, and the chooser of their shards.

    Args:
        uri: The dataset.
        storage_options: Storage options of its place.
        rows: Which quarantined rows.
        job: See `stored_job`.
        overrides: `a.b=c` strings.
    Returns:
        None if no row matches and no earlier retry was cut off.
    Raises:
        OutputError, SpecError: As `stored_job`.
    """
    choose = quarantined(rows)
    layout = Layout.open(uri, storage_options)
    with store_errors(layout.url()):
        spec = stored_job(layout, uri, storage_options, job=job, overrides=overrides)
        work = choose(layout) or was_cut_off(layout)
    return (spec, choose) if work else None


def _check_no_code(spec: JobSpec, layout: Layout) -> None:
    """Refuse a dataset that names code to import, because it may come from anyone."""
    from amtcore.features.registry import get_model  # loads torch, which only such a job needs

    for index, entry in enumerate(spec.extract):
        if get_model(entry.model).names_code:
            raise SpecError(
                f"extract.{index}: {layout.url()}/dataset.json names code to import for model "
                f"{entry.model!r}, which is only taken from the job's own file; give it with --job"
            )
