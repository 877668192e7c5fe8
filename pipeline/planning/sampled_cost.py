"""All figures of a job by a sample of its rows: time, hours, bytes, objects, requests, money."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from earmill.pipeline.common.cpu_time import MODEL
from earmill.pipeline.common.machine import cores
from earmill.pipeline.planning.estimate import Estimate
from earmill.pipeline.planning.forecast import (
    END_PER_SHARD_S,
    END_S,
    Crew,
    Forecast,
    Range,
    Sampled,
    forecast,
    shards_with_bad,
)
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.prices import Prices
from earmill.pipeline.planning.requests import requests
from earmill.pipeline.planning.speeds import gpu_speeds
from earmill.pipeline.planning.strata import Strata
from earmill.pipeline.spec.job import JobSpec

# From the call to a warm worker, beside what models take: driver, Ray, and processes that begin.
EXECUTOR_START_S = {"ray": 3.5, "local": 0.5, "slurm-array": 0.5}
START_DIFFERS = 0.2
# Figures are of full launches, most of them reckoned: the slowest may be half as fast, the fastest
# is a limit.
RECKONED_SLOWER = 2.0
FIGURES = ("time_s", "cpu_s", "core_s", "gpu_s", "stored_bytes", "objects", "puts", "gets", "money")


@dataclass(frozen=True)
class SampledCost:
    """What a job is expected to take, by a sample of its rows.

    Args:
        figures: Of `FIGURES` those that are known: wall seconds from the call to the end; CPU
            seconds; seconds for which cores and GPUs are held; bytes of committed files; objects
            and requests; money, where there are prices.
        bad_share: Of rows that will be in quarantine.
        cpu_parts: CPU seconds of the workers by part. bound_by: What most of the time is spent on.
        crew: Workers, their threads, and cores of this machine.
        tried: Rows that were, of how many, by stratum. kinds: Of files among them.
        bad: Of the rows that were tried, by reason. seed: Drew them. took_s: Wall seconds.
        device: That computed the sample. gpu: Where the figures of GPUs are from, if any.
        prices: As given; None without.
    """

    figures: Mapping[str, Range]
    bad_share: Range
    cpu_parts: Mapping[str, float]
    bound_by: str
    crew: Crew
    tried: Mapping[str, tuple[int, int]]
    kinds: tuple[str, ...]
    bad: Mapping[str, int]
    seed: int
    took_s: float
    device: str
    gpu: str = ""
    prices: Prices | None = field(default=None)

    @property
    def rows_tried(self) -> int:
        """In all."""
        return sum(tried for tried, _ in self.tried.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        named = {f"{name}": asdict(value) for name, value in self.figures.items()}
        return {
            **asdict(replace(self, prices=None, figures={})),
            "figures": named,
            "prices": None if self.prices is None else self.prices.model_dump(),
        }


def crew_of(spec: JobSpec, shards: int) -> Crew:
    """The workers of a job, were it to run on this machine."""
    workers = min(spec.run.workers or 1, shards)
    threads = spec.run.threads_per_worker or max(1, cores() // workers)
    return Crew(workers, threads, max(cores(), 1))


def sampled_cost(
    plan: Plan,
    spec: JobSpec,
    estimate: Estimate,
    strata: Strata,
    sampled: Sampled,
    *,
    models: Mapping[str, float],
    start_s: float,
    prices: Prices | None = None,
) -> SampledCost:
    """Reckon all figures.

    Args:
        estimate: Of the same plan. models: Of the job, with their rates in Hz.
        start_s: From the call to a warm worker, where the sample does not know it.
    """
    crew = crew_of(spec, len(plan.computed))
    wants_gpu = spec.run.device == "cuda" and sampled.device == "cpu"
    expected = forecast(strata, _without_model(sampled) if wants_gpu else sampled, crew)
    gpu_s, gpu = _on_gpu(plan, sampled, wants_gpu, models)
    work_s = expected.work_s
    if wants_gpu and gpu_s is not None:
        work_s = Range(
            *(max(a, b / crew.workers) for a, b in zip(_all(work_s), _all(gpu_s), strict=True))
        )
    time_s = _time(plan, spec, sampled, work_s, start_s)
    # A worker with more threads than the machine has cores holds no more than these.
    held = min(crew.workers * crew.threads, crew.cores)
    objects = _objects(strata, estimate, expected)
    counted = requests(plan, spec, estimate.objects)
    extra = objects.plus(-estimate.objects)
    figures = {
        "time_s": time_s,
        "cpu_s": expected.cpu_s,
        "core_s": time_s.times(held),
        "stored_bytes": expected.stored_bytes,
        "objects": objects,
    }
    if gpu_s is not None:
        figures["gpu_s"] = gpu_s
    elif sampled.device != "cpu":
        figures["gpu_s"] = time_s.times(crew.workers * spec.run.gpus_wanted)
    if counted.puts or counted.gets:
        figures["puts"] = extra.plus(counted.puts) if counted.puts else _exactly(0)
        figures["gets"] = _exactly(counted.gets)
    if prices is not None:
        figures["money"] = money(prices, figures, estimate.bytes_in)
    return SampledCost(
        figures=figures,
        bad_share=expected.bad_share,
        cpu_parts=expected.parts,
        bound_by="the GPU" if wants_gpu and work_s != expected.work_s else expected.bound_by,
        crew=crew,
        tried=_tried(strata, sampled),
        kinds=tuple(sorted({kind for group in sampled.groups for kind in group.kinds})),
        bad=sampled.bad,
        seed=sampled.seed,
        took_s=round(sampled.took_s, 2),
        device=sampled.device,
        gpu=gpu,
        prices=prices,
    )


def money(prices: Prices, figures: Mapping[str, Range], bytes_in: float) -> Range:
    """What figures cost; those that are missing are nothing."""

    def at(end: str) -> float:
        def value(name: str) -> float:
            return float(getattr(figures[name], end)) if name in figures else 0.0

        return prices.of(
            core_s=value("core_s"),
            gpu_s=value("gpu_s"),
            puts=value("puts"),
            gets=value("gets"),
            stored_bytes=value("stored_bytes"),
            read_bytes=bytes_in,
        )

    return Range(at("low"), at("expected"), at("high"))


def _time(plan: Plan, spec: JobSpec, sampled: Sampled, work_s: Range, start_s: float) -> Range:
    """From the call to the end."""
    if sampled.first_s is not None:
        # Driver and worker import and build the models, one after the other.
        start_s = 2 * sampled.first_s + sampled.warm_s + EXECUTOR_START_S[spec.run.executor]
    start = Range(start_s, start_s, start_s).at_least(START_DIFFERS)
    end_s = END_S + END_PER_SHARD_S * len(plan.shards)
    return Range(*(a + b + end_s for a, b in zip(_all(start), _all(work_s), strict=True)))


def _objects(strata: Strata, estimate: Estimate, expected: Forecast) -> Range:
    """A shard has one more where one of its rows is bad."""
    share = expected.bad_share
    # Bad rows that are neighbours share a shard: at best they fill some and spare the others.
    low = math.floor(min(share.low, share.expected) * strata.shards)
    likely, high = (round(shards_with_bad(strata, each)) for each in (share.expected, share.high))
    return Range(low, likely, high).plus(estimate.objects)


def _on_gpu(
    plan: Plan,
    sampled: Sampled,
    wants_gpu: bool,
    models: Mapping[str, float],
) -> tuple[Range | None, str]:
    """GPU seconds by stored figures, and their origin; None where the sample has its own."""
    if not wants_gpu:
        return None, ""
    known = gpu_speeds(models)
    if not known:
        return None, "no time on a GPU is known for these models"
    planned_s = sum(group.planned_s for group in sampled.groups)
    audio_s = sum(group.audio_s for group in sampled.groups)
    whole_s = sum(shard.seconds for shard in plan.computed) * audio_s / planned_s
    of_gpus = {gpu: whole_s * gpu_s for gpu, gpu_s in known.items()}
    fastest, slowest = min(of_gpus.values()), max(of_gpus.values())
    names = "; ".join(sorted(of_gpus))
    middle = (fastest + slowest) / 2
    return (
        Range(fastest, middle, RECKONED_SLOWER * slowest),
        f"GPU hours are stored figures for {names}, of full launches, reckoned where none says "
        "measured: no GPU is here",
    )


def _without_model(sampled: Sampled) -> Sampled:
    """What is left for cores where a GPU computes."""

    def left(cpu_s: Mapping[str, float]) -> dict[str, float]:
        return {part: seconds for part, seconds in cpu_s.items() if part != MODEL}

    return replace(
        sampled,
        groups=tuple(
            replace(group, cpu_s=left(group.cpu_s), process_s=0.0) for group in sampled.groups
        ),
    )


def _tried(strata: Strata, sampled: Sampled) -> dict[str, tuple[int, int]]:
    return {
        stratum.name: (
            sum(group.rows for group in sampled.groups if group.stratum == stratum.name),
            stratum.rows,
        )
        for stratum in strata.all
    }


def _exactly(value: float) -> Range:
    return Range(value, value, value)


def _all(value: Range) -> tuple[float, float, float]:
    return value.low, value.expected, value.high
