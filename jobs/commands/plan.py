"""`earmill plan`: estimate the work of a job; writes nothing."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.estimate import print_estimate
from earmill.jobs.console.terminal import say_json, teller


def plan(
    job: options.JobFile,
    set_: options.Overrides = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Time the job's models here first; this takes seconds and is cached.",
        ),
    ] = False,
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
    """Show what a job would do: rows, hours, shards, bytes, time. Writes nothing to its output."""
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
    result = job_cost(spec, measure=measure, sampler=sampler).to_dict()
    say_json(result) if as_json else print_estimate(result)
