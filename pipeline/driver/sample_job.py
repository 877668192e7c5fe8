"""What `earmill plan --sample` does beside listing: rows are drawn, tried, and reckoned with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from earmill.pipeline.driver.sample import BUDGET_S
from earmill.pipeline.driver.sample_process import try_apart
from earmill.pipeline.planning.cost import Sampler
from earmill.pipeline.planning.estimate import Estimate
from earmill.pipeline.planning.forecast import Sampled
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.prices import Prices
from earmill.pipeline.planning.sampled_cost import SampledCost, crew_of, sampled_cost
from earmill.pipeline.planning.strata import Strata, draw
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import Description
from earmill.pipeline.worker.prepare import LONG_S

SEEDS = 2**32


class Trial(Protocol):
    """`try_rows`, or what answers like it."""

    def __call__(
        self,
        spec: JobSpec,
        plan: Plan,
        strata: Strata,
        *,
        seed: int,
        threads: int,
        budget_s: float,
    ) -> Sampled: ...


def sampler_of(
    spec: JobSpec,
    rows: int,
    *,
    seed: int | None = None,
    prices: Prices | None = None,
    budget_s: float = BUDGET_S,
    on_begin: Callable[[str], None] = lambda text: None,
    trial: Trial = try_apart,
) -> Sampler:
    """What tries so many rows of a job's plan, reckons with them.

    Args:
        seed: Draws the rows; None draws a seed as well.
        budget_s: As of `try_rows`. on_begin: Told what takes a while.
        trial: Tries rows; in a process of its own, unless a caller has another way.
    """
    seed = random.randrange(SEEDS) if seed is None else seed

    def sample(
        plan: Plan, estimate: Estimate, models: Sequence[Description], start_s: float
    ) -> SampledCost:
        strata = draw(plan, rows, seed, long_s=LONG_S)
        threads = crew_of(spec, len(plan.computed)).threads
        count = sum(len(stratum.drawn) for stratum in strata.all)
        on_begin(f"trying {count:,} of {strata.rows:,} rows")
        sampled = trial(spec, plan, strata, seed=seed, threads=threads, budget_s=budget_s)
        rates = {
            entry.model: described.fs_hz
            for entry, described in zip(spec.extract, models, strict=True)
        }
        return sampled_cost(
            plan,
            spec,
            estimate,
            strata,
            sampled,
            models=rates,
            start_s=start_s,
            prices=prices,
        )

    return sample
