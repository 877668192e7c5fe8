"""`earmill extract`: run a job to its end, or as far as it gets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.job_run import reported_run

if TYPE_CHECKING:
    from earmill.pipeline.spec.job import JobSpec

# Ray sets this variable for the entry point of a submitted job, and for no other process.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


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
    finish: Annotated[
        bool,
        typer.Option(
            "--finish", help="Compute nothing; write the index if every shard is committed."
        ),
    ] = False,
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
        raise typer.BadParameter("--repair goes on with an output: add --resume")
    if (repair or update) and (join or finish):
        raise typer.BadParameter("--repair and --update need the output for themselves")
    if repair and update:
        raise typer.BadParameter("--repair and --update are two runs: repair first")
    # A wrong job file is reported before torch and the rest are imported.
    spec = JobSpec.load(
        job, overrides=options.run_overrides(set_, log_format, metrics, ray_address)
    )
    check_submitted(spec)
    from earmill.pipeline.dataset.recompute import damaged
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.operations.update import start_update

    with reported_run(log_format=spec.run.log_format, as_json=as_json, quiet=quiet) as (sink, stop):
        if update:
            start_update(spec, sink)
        end = run_job(
            spec,
            resume=resume or update,
            again=damaged if repair else None,
            sink=sink,
            stop=stop,
            join=join,
            finish=finish,
        )
    raise typer.Exit(end.exit_code)


def check_submitted(spec: JobSpec) -> None:
    """Refuse a relative output of a job that was started by `ray job submit`.

    Ray runs such a job in a copy of the submitted folder and deletes the copy afterwards, features
    included.
    """
    from earmill.pipeline.common.errors import SpecError
    from earmill.pipeline.storage.fsspec_store import is_local

    uri = spec.output.uri
    relative = is_local(uri) and not os.path.isabs(uri)
    if SUBMITTED in os.environ and relative:
        raise SpecError(
            "output.uri: expected an absolute path or a bucket, as `ray job submit` runs this in a "
            f"folder that is deleted afterwards, got {uri}; --set output.uri=s3://... or a path "
            "that all nodes share"
        )
