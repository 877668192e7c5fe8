"""Rows tried in a process of their own, which is as a worker's: what they cost there, they will.

It has a worker's share of memory to keep and of threads for libraries, it imports what a worker
does, while the files of these libraries are as warm as a job that follows will find them, and it
ends with a row that ends it. The order comes by standard input, as it may hold credentials.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import EarmillError, SourceError
from earmill.pipeline.common.one_line import one_line
from earmill.pipeline.driver.executor import KEPT_MEMORY, worker_environment
from earmill.pipeline.driver.sample import BUDGET_S, try_rows

if TYPE_CHECKING:
    from earmill.pipeline.planning.forecast import Sampled
    from earmill.pipeline.planning.plan import Plan
    from earmill.pipeline.planning.strata import Strata
    from earmill.pipeline.spec.job import JobSpec

COMMAND = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; "
    "from earmill.pipeline.driver.sample_process import answer; answer()"
)


def try_apart(
    spec: JobSpec,
    plan: Plan,
    strata: Strata,
    *,
    seed: int,
    threads: int,
    budget_s: float = BUDGET_S,
) -> Sampled:
    """`try_rows` in a process of its own.

    Raises:
        SourceError: The process died. Else as `try_rows`.
    """
    # A plan may have a million rows; those that were drawn go along.
    drawn, few = replace(strata, by_shard=()), replace(plan, shards=())
    options = {"seed": seed, "threads": threads, "budget_s": budget_s}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *sys.path],
        input=pickle.dumps((spec, few, drawn, options)),
        capture_output=True,
        check=False,
        env=KEPT_MEMORY | os.environ | worker_environment(threads),
    )
    if done.returncode:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        why = one_line(said[-1]) if said else f"exit code {done.returncode}"
        raise SourceError(f"trying rows ended their process ({why}); plan without --sample")
    found: Sampled | EarmillError = pickle.loads(done.stdout)
    if isinstance(found, EarmillError):
        raise found
    return found


def answer() -> None:
    """What the process does."""
    # What libraries print is no answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    spec, plan, strata, options = pickle.load(sys.stdin.buffer)
    found: Sampled | EarmillError
    try:
        found = try_rows(spec, plan, strata, **options)
    except EarmillError as error:
        found = error
    with os.fdopen(answers, "wb") as out:
        pickle.dump(found, out)
