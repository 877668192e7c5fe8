"""The job that made a dataset, out of the dataset itself; and what of it is tried again."""

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
    """The job of a dataset, with this place as output.

    Args:
        storage_options: Of the place.
        job: The job file, where dataset.json does not say all: credentials of the source, `run`.
        overrides: `a.b=c` strings.
    Raises:
        OutputError: No dataset there. SpecError: The job is wrong, or names code to import, which
            is taken from its author's file only.
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
    """The job that tries quarantined rows again, and what chooses their shards; None for no work.

    Args:
        rows: Which quarantined rows.
        storage_options, job, overrides: As of `stored_job`.
    Raises:
        As `stored_job`.
    """
    choose = quarantined(rows)
    layout = Layout.open(uri, storage_options)
    with store_errors(layout.url()):
        spec = stored_job(layout, uri, storage_options, job=job, overrides=overrides)
        work = choose(layout) or was_cut_off(layout)
    return (spec, choose) if work else None


def _check_no_code(spec: JobSpec, layout: Layout) -> None:
    """A dataset may come from anyone: code that it names is not imported."""
    from amtcore.features.registry import get_model  # loads torch, which only such a job needs

    for index, entry in enumerate(spec.extract):
        if get_model(entry.model).names_code:
            raise SpecError(
                f"extract.{index}: {layout.url()}/dataset.json names code to import for model "
                f"{entry.model!r}, which is only taken from the job's own file; give it with --job"
            )
