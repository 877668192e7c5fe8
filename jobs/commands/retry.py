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

from earmill.jobs.commands.extract import run_and_report
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
from earmill.jobs.terminal import console, say_json


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
    log_format: LogFormat = None,
    metrics: Metrics = None,
    quiet: Quiet = False,
) -> None:
    """Try quarantined rows again; run it where the job ran, as relative paths are relative to that.

    Exit codes: as of `extract`.
    """
    from earmill.pipeline.driver.stored_job import find_retry
    from earmill.pipeline.driver.update import start_retry

    options = parse_storage_options(storage_options)
    overrides = run_overrides(set_, log_format, metrics)
    found = find_retry(uri, options, where=where, job=job, overrides=overrides)
    if found is None:
        _nothing(uri, as_json)
        raise typer.Exit(0)
    spec, choose = found
    end = run_and_report(
        spec,
        resume=True,
        first=lambda sink: start_retry(spec, where, sink),
        again=choose,
        as_json=as_json,
        quiet=quiet,
        ray_address=ray_address,
    )
    raise typer.Exit(end.exit_code)


def _nothing(uri: str, as_json: bool) -> None:
    text = "no quarantined row matches: nothing to try again"
    if as_json:
        say_json({"event": "summary", "status": "nothing_to_do", "message": text, "output": uri})
    else:
        console(soft_wrap=True).print(text)
