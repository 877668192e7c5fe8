"""`earmill plan`: what a job would do and cost; writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands.options import AsJson, JobFile, Overrides, Quiet
from earmill.jobs.console.estimate import print_estimate
from earmill.jobs.console.terminal import say_json, teller

if TYPE_CHECKING:
    from earmill.pipeline.planning.estimate import Sampler
    from earmill.pipeline.spec.job import JobSpec


def plan(
    job: JobFile,
    set_: Overrides = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Time the job's models here first, which takes seconds and is remembered.",
        ),
    ] = False,
    sample: Annotated[
        int,
        typer.Option(
            "--sample",
            metavar="ROWS",
            min=0,
            help="Process this many random rows in a private folder, and scale what they take and "
            "weigh by seconds of audio. 0 processes none.",
        ),
    ] = 0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --sample: draws the same rows again.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what a job would do: rows, hours, shards, bytes, time. Writes nothing to its output."""
    from earmill.pipeline.spec.job import JobSpec

    if not sample and seed is not None:
        raise typer.BadParameter("--seed goes with --sample ROWS")

    # A wrong spec is told at once, before the rest is imported.
    spec = JobSpec.load(job, overrides=set_ or ())
    from earmill.pipeline.planning.estimate import job_cost

    tell = teller(quiet=quiet)
    sampler = _sampler(spec, sample, seed, tell) if sample else None
    result = job_cost(spec, measure=measure, sampler=sampler).to_dict()
    say_json(result) if as_json else print_estimate(result)


def _sampler(spec: JobSpec, rows: int, seed: int | None, tell: Callable[[str], None]) -> Sampler:
    """Return a function that samples the plan, and tells that it begins."""
    from earmill.pipeline.driver.sample import sample

    return partial(sample, spec=spec, rows=rows, seed=seed, on_begin=tell)
