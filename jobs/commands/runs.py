"""Commands that estimate or run a job: `plan`, `extract`, `add-features` and `retry`."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.job_texts import print_estimate
from earmill.jobs.console.progress import reported_run
from earmill.jobs.console.terminal import console, say_json, teller
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.storage.backend import is_local

# Ray sets this variable for the entry point of a submitted job, and for no other process.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def plan(
    job: options.JobFile,
    set_: options.Overrides = None,
    sample: Annotated[
        int,
        typer.Option(
            "--sample",
            metavar="ROWS",
            min=0,
            help="Process this many random rows in a private folder, and scale their time and size "
            "by seconds of audio. 0 processes none.",
        ),
    ] = 0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --sample: draw the same rows again.")
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what a job would do: rows, hours, shards, bytes. Writes nothing to its output."""
    from earmill.pipeline.spec.job import JobSpec

    if not sample and seed is not None:
        raise typer.BadParameter("--seed goes with --sample ROWS")

    # A wrong job file is reported before the rest is imported.
    spec = JobSpec.load(job, overrides=set_ or ())
    from earmill.pipeline.planning.estimate import job_cost

    sampler = None
    if sample:
        from earmill.pipeline.operations.sample import sample as run_sample

        on_begin = teller(quiet=quiet)
        sampler = partial(run_sample, spec=spec, rows=sample, seed=seed, on_begin=on_begin)
    result = job_cost(spec, sampler).to_dict()
    say_json(result) if as_json else print_estimate(result)


def extract(
    job: options.JobFile,
    set_: options.Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an output that holds commits of this job.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="With --resume: read every file first, and compute the shards with a missing or "
            "damaged file again.",
        ),
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Compute the rows that were added or changed in the source since the output was "
            "finished, as a new snapshot. Implies --resume.",
        ),
    ] = False,
    join: Annotated[
        bool,
        typer.Option(
            "--join",
            help="Work beside other drivers on this output, whatever their executor, and take over "
            "shards that they leave. Implies --resume.",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="ROWS",
            help="Try the job on its first rows. Its output gets a name of its own, which ends in "
            "-first-ROWS.",
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish", help="Compute nothing; write the index if every shard is committed."
        ),
    ] = False,
    workers: options.Workers = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    ray_address: options.RayAddress = None,
    log_format: options.LogFormat = None,
    metrics: options.Metrics = None,
    quiet: options.Quiet = False,
) -> None:
    """Extract the features of a corpus.

    Exit codes: 0 done, 1 failed or stopped, 2 bad usage or spec, 3 too many rows quarantined.
    """
    from earmill.pipeline.spec.job import JobSpec

    if repair and not resume:
        raise typer.BadParameter("--repair reads an existing output: add --resume")
    if (repair or update) and (join or finish):
        raise typer.BadParameter("--repair and --update need the output for themselves")
    if repair and update:
        raise typer.BadParameter("--repair and --update are two runs: repair first")
    # A wrong job file is reported before the rest is imported.
    run = {"workers": workers, "device": device, "log_format": log_format, "metrics": metrics}
    overrides = options.run_overrides(set_, **run, ray_address=ray_address)
    spec = JobSpec.load(job, overrides=overrides)
    if limit is not None:
        first = f"{spec.output.uri.rstrip('/')}-first-{limit}"
        overrides += [f"source.limit={limit}", f"output.uri={json.dumps(first)}"]
        spec = JobSpec.load(job, overrides=overrides)
    # Ray deletes the copy of the folder in which it runs a submitted job, features included.
    uri = spec.output.uri
    if SUBMITTED in os.environ and is_local(uri) and not os.path.isabs(uri):
        raise SpecError(
            "output.uri: expected an absolute path or a bucket, as `ray job submit` runs this in a "
            f"folder that is deleted afterwards, got {uri}; --set output.uri=s3://... or a path "
            "that all nodes share"
        )
    from earmill.pipeline.operations.retry import damaged
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.operations.update import start_update

    with reported_run(as_json=as_json, log_format=spec.run.log_format, quiet=quiet) as (sink, stop):
        if update:
            start_update(spec, sink)
        end = run_job(
            spec,
            resume=resume or update,
            again=damaged if repair else None,
            join=join,
            finish=finish,
            sink=sink,
            stop=stop,
        )
    raise typer.Exit(end.exit_code)


def add_features(
    uri: options.DatasetUri,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml",
            help="Job file with the models: `extract`, `name`, `run` and credentials of the source "
            "are read from it; source, audio and formats are the dataset's.",
        ),
    ],
    set_: options.Overrides = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Read every added file first, and compute damaged shards again."
        ),
    ] = False,
    workers: options.Workers = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    ray_address: options.RayAddress = None,
    storage_options: options.StorageOptions = None,
    log_format: options.LogFormat = None,
    metrics: options.Metrics = None,
    quiet: options.Quiet = False,
) -> None:
    """Compute other models' streams for the rows of a dataset. `open_features` with
    `additions=True` reads both.

    Run it again after an update to compute the new rows. `extract` has the same exit codes.
    """
    from earmill.pipeline.operations.add_features import add_features as add

    run = {"workers": workers, "device": device, "log_format": log_format, "metrics": metrics}
    log_lines = log_format or "text"
    with reported_run(as_json=as_json, log_format=log_lines, quiet=quiet) as (sink, stop):
        end = add(
            uri,
            job,
            storage_options=storage_options,
            overrides=options.run_overrides(set_, **run, ray_address=ray_address),
            sink=sink,
            stop=stop,
            repair=repair,
        )
    raise typer.Exit(end.exit_code)


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
    workers: options.Workers = None,
    device: options.Device = None,
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
    # dataset.json holds the job. A shard with a matching row is processed again: its good rows must
    # come out unchanged, else its old commit stays. Bad rows that do not match stay in quarantine.
    # A row whose file has changed is planned again, as by `extract --update`; other changes of the
    # source are not read. The new commits count once the new index is written.
    if where is not None:
        raise typer.BadParameter(
            "--where is gone: use --error CLASS, --stage STAGE and --uri GLOB, each repeatable"
        )
    from earmill.pipeline.operations.retry import RowFilter, find_retry
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.operations.update import start_retry

    rows = RowFilter.of(error=error or (), stage=stage or (), uri=uri or ())
    run = {"workers": workers, "device": device, "log_format": log_format, "metrics": metrics}
    overrides = options.run_overrides(set_, **run, ray_address=ray_address)
    spec = find_retry(dataset, storage_options or {}, rows=rows, job=job, overrides=overrides)
    if spec is None:
        text = (
            "no quarantined row matches: nothing to try again; `inspect URI --quarantine` lists "
            "them"
        )
        event = {"event": "summary", "status": "nothing_to_do", "message": text, "output": dataset}
        say_json(event) if as_json else console(soft_wrap=True).print(text)
        return
    with reported_run(as_json=as_json, log_format=spec.run.log_format, quiet=quiet) as (sink, stop):
        start_retry(spec, rows, sink)
        end = run_job(spec, resume=True, again=rows.choose, sink=sink, stop=stop)
    raise typer.Exit(end.exit_code)
