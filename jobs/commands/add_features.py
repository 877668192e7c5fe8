"""`earmill add-features`: compute another model's streams for the rows of a dataset."""

from __future__ import annotations

from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.job_run import reported_run


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
    as_json: options.AsJson = False,
    ray_address: options.RayAddress = None,
    storage_options: options.StorageOptions = None,
    log_format: options.LogFormat = None,
    metrics: options.Metrics = None,
    quiet: options.Quiet = False,
) -> None:
    """Compute other models' streams for the rows of a dataset; readers see both.

    Run it again after an update to compute the new rows. `extract` has the same exit codes.
    """
    from earmill.pipeline.operations.add_features import add_features as add

    with reported_run(as_json=as_json, log_format=log_format or "text", quiet=quiet) as (
        sink,
        stop,
    ):
        end = add(
            uri,
            job,
            storage_options=options.parse_storage_options(storage_options),
            overrides=options.run_overrides(set_, log_format, metrics, ray_address),
            sink=sink,
            stop=stop,
        )
    raise typer.Exit(end.exit_code)
