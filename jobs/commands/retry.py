"""`earmill retry`: try quarantined rows again, in new attempts that replace their commits.

The job is the one that dataset.json holds. A shard with a matching row is processed again: its good
rows come out as they were, or its commit stays; bad rows that do not match stay in quarantine as
they are. The new commits count when the new index is written; a run that was stopped is gone on
with by the same command, or closed by `earmill extract` with --resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.commands.extract import run_and_report
from jobs.commands.options import (
    AsJson,
    DatasetUri,
    Overrides,
    RayAddress,
    StorageOptions,
    parse_storage_options,
)
from jobs.terminal import console, say_json

if TYPE_CHECKING:
    from pipeline.layout import Layout
    from pipeline.spec import JobSpec


def retry(
    uri: DatasetUri,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Which rows, by the columns of the quarantine table (row_id, uri, stage, "
            "error_class, for short error, message, attempts): \"error = 'unreadable' and uri like "
            "'%/2019/%'\", \"error in ('unreadable', 'truncated')\". All without it.",
        ),
    ] = None,
    set_: Overrides = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB.yaml",
            help="The job file, where dataset.json does not say all: credentials of the source, "
            "the `run` section.",
        ),
    ] = None,
    as_json: AsJson = False,
    ray_address: RayAddress = None,
    storage_options: StorageOptions = None,
) -> None:
    """Try quarantined rows again; run it where the job ran, as relative paths are relative to that.

    Exit codes: as of `extract`.
    """
    from pipeline.again import quarantined, was_cut_off
    from pipeline.layout import Layout
    from pipeline.store_errors import store_errors
    from pipeline.where import everything, parse_where

    choose = quarantined(everything if where is None else parse_where(where))
    options = parse_storage_options(storage_options)
    layout = Layout.open(uri, options)
    with store_errors(layout.url()):
        spec = job_of(layout, uri, options, job=job, overrides=set_ or ())
        work = choose(layout) or was_cut_off(layout)
    if not work:
        _nothing(uri, as_json)
        raise typer.Exit(0)
    end = run_and_report(spec, resume=True, again=choose, as_json=as_json, ray_address=ray_address)
    raise typer.Exit(end.exit_code)


def job_of(
    layout: Layout,
    uri: str,
    storage_options: dict[str, Any],
    *,
    job: str | None = None,
    overrides: list[str] | tuple[str, ...] = (),
) -> JobSpec:
    """The job that made a dataset, out of dataset.json or a job file, with this place as output."""
    from pipeline.dataset_file import read_dataset
    from pipeline.errors import OutputError
    from pipeline.spec import JobSpec

    dataset = read_dataset(layout)
    if dataset is None:
        raise OutputError(f"{layout.url()} holds no dataset.json; give the output.uri of a job")
    if job is not None:
        spec = JobSpec.load(job, overrides=overrides)
        known = spec.output.storage_options
    else:
        output = {**dataset.spec["output"], "uri": uri}
        spec = JobSpec.load(
            {**dataset.spec, "name": dataset.name, "output": output}, overrides=overrides
        )
        known = {}
    place = spec.output.model_copy(update={"uri": uri, "storage_options": storage_options or known})
    return spec.model_copy(update={"output": place})


def _nothing(uri: str, as_json: bool) -> None:
    text = "no quarantined row matches: nothing to try again"
    if as_json:
        say_json({"event": "summary", "status": "nothing_to_do", "message": text, "output": uri})
    else:
        console(soft_wrap=True).print(text)
