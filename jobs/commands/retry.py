"""`earmill retry`: process quarantined rows again, in commits that replace the old ones.

dataset.json holds the job. A shard with a matching row is processed again: its good rows must come
out unchanged, else its old commit stays. Bad rows that do not match stay in quarantine. A row whose
file has changed is planned again, as by `extract --update`; other changes of the source are not
read. The new commits count once the new index is written. After an interruption run the command
again, or finish the run with `earmill extract --resume`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.job_run import reported_run
from earmill.jobs.console.terminal import console, say_json

_GONE = "--where is gone: use --error CLASS, --stage STAGE and --uri GLOB, each repeatable"


def retry(
    dataset: options.DatasetUri,
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
    set_: options.Overrides = None,
    job: options.JobOfDataset = None,
    as_json: options.AsJson = False,
    ray_address: options.RayAddress = None,
    storage_options: options.StorageOptions = None,
    log_format: options.LogFormat = None,
    metrics: options.Metrics = None,
    quiet: options.Quiet = False,
) -> None:
    """Process quarantined rows again. Run it in the folder where the job ran.

    `extract` has the same exit codes.
    """
    if where is not None:
        raise typer.BadParameter(_GONE)
    from earmill.pipeline.dataset.recompute import RowFilter
    from earmill.pipeline.operations.retry import find_retry
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.operations.update import start_retry

    rows = RowFilter.of(error=error or (), stage=stage or (), uri=uri or ())
    store_options = options.parse_storage_options(storage_options)
    overrides = options.run_overrides(set_, log_format, metrics, ray_address)
    job_and_rows = find_retry(dataset, store_options, rows=rows, job=job, overrides=overrides)
    if job_and_rows is None:
        _print_no_match(dataset, as_json)
        raise typer.Exit(0)
    spec, choose = job_and_rows
    with reported_run(log_format=spec.run.log_format, as_json=as_json, quiet=quiet) as (sink, stop):
        start_retry(spec, rows, sink)
        end = run_job(spec, resume=True, again=choose, sink=sink, stop=stop)
    raise typer.Exit(end.exit_code)


def _print_no_match(uri: str, as_json: bool) -> None:
    text = "no quarantined row matches: nothing to try again; `inspect URI --quarantine` lists them"
    if as_json:
        say_json({"event": "summary", "status": "nothing_to_do", "message": text, "output": uri})
    else:
        console(soft_wrap=True).print(text)
