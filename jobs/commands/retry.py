"""`earmill retry`: try quarantined rows again, in new attempts that replace their commits.

The job is the one that dataset.json holds. A shard with a matching row is processed again: its good
rows come out as they were, or its commit stays; bad rows that do not match stay in quarantine as
they are. A row whose file is another now is planned anew, as after `extract --update`, but no other
change of the source is taken in. The new commits count when the new index is written; a run that
was stopped is gone on with by the same command, or closed by `earmill extract` with --resume.
"""

from __future__ import annotations

from typing import Annotated

import typer

from earmill.jobs.commands.options import (
    AsJson,
    DatasetUri,
    LogFormat,
    Metrics,
    Overrides,
    Quiet,
    RayAddress,
    StorageOptions,
    parse_storage_options,
    run_overrides,
)
from earmill.jobs.console.job_run import run_and_report
from earmill.jobs.console.terminal import console, say_json

_GONE = "--where is gone: use --error CLASS, --stage STAGE and --uri GLOB, each repeatable"


def retry(
    dataset: DatasetUri,
    error: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Only rows of this error class, such as unreadable."),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Only rows that failed at this stage, such as fetch."),
    ] = None,
    uri: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Only rows whose uri matches `*/2019/*`. All three: repeatable."
        ),
    ] = None,
    where: Annotated[str | None, typer.Option(hidden=True)] = None,
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
    log_format: LogFormat = None,
    metrics: Metrics = None,
    quiet: Quiet = False,
) -> None:
    """Try quarantined rows again; run it where the job ran, as relative paths are relative to that.

    Exit codes: as of `extract`.
    """
    if where is not None:
        raise typer.BadParameter(_GONE)
    from earmill.pipeline.dataset.recompute import RowFilter
    from earmill.pipeline.driver.stored_job import find_retry
    from earmill.pipeline.driver.update import start_retry

    rows = RowFilter.of(error=error or (), stage=stage or (), uri=uri or ())
    options = parse_storage_options(storage_options)
    overrides = run_overrides(set_, log_format, metrics)
    found = find_retry(dataset, options, rows=rows, job=job, overrides=overrides)
    if found is None:
        _nothing(dataset, as_json)
        raise typer.Exit(0)
    spec, choose = found
    end = run_and_report(
        spec,
        resume=True,
        first=lambda sink: start_retry(spec, rows, sink),
        again=choose,
        as_json=as_json,
        quiet=quiet,
        ray_address=ray_address,
    )
    raise typer.Exit(end.exit_code)


def _nothing(uri: str, as_json: bool) -> None:
    text = "no quarantined row matches: nothing to try again; `inspect URI --quarantine` lists them"
    if as_json:
        say_json({"event": "summary", "status": "nothing_to_do", "message": text, "output": uri})
    else:
        console(soft_wrap=True).print(text)
