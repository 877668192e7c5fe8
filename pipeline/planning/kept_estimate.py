"""An estimate that is kept with its job, and what the job took.

`earmill plan` writes nothing to an output: what it reckoned goes to the user's cache, under the id
of the plan. A job of that plan takes it from there into its output, beside the plan, and at the end
of each run says there what it has taken so far.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from earmill.pipeline.common.user_cache import keep, read_kept
from earmill.pipeline.planning.forecast import Range
from earmill.pipeline.planning.prices import Prices
from earmill.pipeline.planning.sampled_cost import SampledCost, money
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import estimate_path
from earmill.pipeline.storage.typed_json import Strict, typed_json

# What a run can be held against, in this order.
COMPARED = ("time_s", "cpu_s", "core_s", "stored_bytes", "objects", "money")
_KIND = "estimate"


@dataclass(frozen=True)
class Taken(Strict):
    """What the runs of a job that came to an end have taken, all in all.

    Args:
        runs: How many. shards: That they committed.
        time_s: Wall seconds, starts included. cpu_s: CPU seconds.
        core_s: Seconds for which cores were held.
    """

    runs: int = 0
    shards: int = 0
    time_s: float = 0.0
    cpu_s: float = 0.0
    core_s: float = 0.0

    def plus(self, other: Taken) -> Taken:
        """Both together."""
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        return Taken(**sums)


@dataclass(frozen=True)
class KeptEstimate(Strict):
    """The content of `plan/<plan-id>.estimate.json`.

    Args:
        plan_id: Of which plan. made: When, ISO 8601.
        workers, threads: That it holds for. executor: As in the job.
        rows_tried, rows_bad, seed: Of the sample.
        figures: As of `SampledCost`. bytes_in: Of the source's files.
        prices: As given. taken: By the runs so far.
    """

    plan_id: str
    made: str
    executor: str
    workers: int
    threads: int
    rows_tried: int
    rows_bad: int
    seed: int
    figures: dict[str, Range]
    bytes_in: int
    prices: Prices | None = None
    taken: Taken = Taken()

    def to_json(self) -> str:
        """As it is stored."""
        values = asdict(replace(self, prices=None))
        prices = None if self.prices is None else self.prices.model_dump()
        return json.dumps({**values, "prices": prices}, indent=1, sort_keys=True)

    def compared(self, *, stored_bytes: float, objects: float, shards: int) -> dict[str, Any]:
        """Each figure's range and its actual value; what a part of the runs took is no actual one.

        Args:
            shards: Of the plan.
        """
        actual: dict[str, float] = {"stored_bytes": stored_bytes, "objects": objects}
        if self.taken.shards >= shards:
            actual |= {name: getattr(self.taken, name) for name in ("time_s", "cpu_s", "core_s")}
            if self.prices is not None:
                known = {name: Range(v, v, v) for name, v in actual.items()}
                sums = money(self.prices, {**self.figures, **known}, self.bytes_in)
                actual["money"] = sums.expected
        return {
            name: {**asdict(self.figures[name]), "actual": actual[name]}
            for name in COMPARED
            if name in actual and name in self.figures
        }


def remember(plan_id: str, spec_executor: str, cost: SampledCost, bytes_in: int) -> None:
    """Keep an estimate on this machine until a job of the plan begins."""
    kept = KeptEstimate(
        plan_id=plan_id,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        executor=spec_executor,
        workers=cost.crew.workers,
        threads=cost.crew.threads,
        rows_tried=cost.rows_tried,
        rows_bad=sum(cost.bad.values()),
        seed=cost.seed,
        figures=dict(cost.figures),
        bytes_in=bytes_in,
        prices=cost.prices,
    )
    keep(_KIND, plan_id, kept.to_json())


def read_estimate(layout: Layout, plan_id: str) -> KeptEstimate | None:
    """The estimate of a dataset's plan; None where there is none that can be read."""
    try:
        return typed_json(KeptEstimate, layout.read_bytes(estimate_path(plan_id)))
    except (FileNotFoundError, ValueError):
        return None


def take_along(layout: Layout, plan_id: str) -> None:
    """Put what is kept for a plan into its output, unless there is one already."""
    text = read_kept(_KIND, plan_id)
    if not isinstance(text, str) or layout.exists(estimate_path(plan_id)):
        return
    try:
        typed_json(KeptEstimate, text)
    except ValueError:
        return  # of another release
    layout.write_bytes(estimate_path(plan_id), text.encode())


def add_taken(layout: Layout, kept: KeptEstimate, taken: Taken) -> KeptEstimate:
    """Add what a run has taken, and store that."""
    known = replace(kept, taken=kept.taken.plus(taken))
    layout.write_bytes(estimate_path(kept.plan_id), known.to_json().encode())
    return known
