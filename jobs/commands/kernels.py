"""`earmill kernels`: compile kernels before a job needs them, for an image or a bucket."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import check_local, say
from earmill.pipeline.common.errors import SpecError


def kernels(
    folder: Annotated[Path, typer.Argument(help="Output folder; name it in AMTCORE_KERNELS.")],
    job: Annotated[
        str | None,
        typer.Option(metavar="JOB.yaml", help="Compile the kernels of this job alone."),
    ] = None,
    set_: options.Overrides = None,
    cpu: Annotated[
        str | None, typer.Option(help="Processor as LLVM names it; this machine's if left out.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help='Features of the processor, such as "+avx2,+fma,-avx512f".')
    ] = None,
) -> None:
    """Compile kernels into a folder that machines of one kind can share.

    Jobs on machines with AMTCORE_KERNELS=FOLDER load these kernels instead of compiling, if
    processor, features, sources and versions agree; otherwise they compile as usual.
    """
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.worker.models import compile_into, entries_of, entries_of_all

    check_local(folder)
    if features is not None and cpu is None:
        raise SpecError("--features: expected --cpu beside it, got none; name the processor")
    entries = (
        entries_of_all() if job is None else entries_of(JobSpec.load(job, overrides=set_ or ()))
    )
    failed = compile_into(folder, entries, cpu=cpu, features=features)
    files = sorted(folder.rglob("*.kernel"))
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    say(f"{len(files)} kernels, {megabytes:.1f} MB in {folder}")
    for line in failed:
        say(line, sys.stderr)
    if failed:
        raise typer.Exit(1)
