"""Figures beside time and bytes: GPU hours by stored figures, requests against a server's count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.driver.run import run_job
from earmill.pipeline.planning.estimate import Estimate, estimate
from earmill.pipeline.planning.plan import make_plan
from earmill.pipeline.planning.requests import requests
from earmill.pipeline.planning.sampled_cost import RECKONED_SLOWER, SampledCost, sampled_cost
from earmill.pipeline.planning.speeds import gpu_speeds, reference
from earmill.pipeline.planning.strata import draw
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from tests.chaos.jobs import write_corpus
from tests.pipeline import outages
from tests.pipeline.object_stores import store_of
from tests.pipeline.test_forecast import plan_of_rows, row, sampled, tried


def job(**run: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": "corpus"},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": "out"},
            "run": run,
        }
    )


def cost_of(spec: JobSpec, models: dict[str, float], device: str = "cpu") -> SampledCost:
    plan = plan_of_rows([row(n) for n in range(200)])
    strata = draw(plan, 20, seed=0, long_s=120.0)
    seen = replace(sampled(*[tried(strata.all[0].name, 0.005)] * 2), device=device)
    known = Estimate(200, 800 / 3600, 20, 10**6, {"zarr": 10**6}, 100, None, {})
    return sampled_cost(plan, spec, known, strata, seen, models=models, start_s=9.0)


def test_gpu_hours_are_stored_figures_and_named_so_where_no_gpu_is_here() -> None:
    found = cost_of(job(device="cuda"), {"dau1997": 44100.0})
    rates = [each["dau1997"]["times_real_time"] for each in reference()["gpus"].values()]
    gpu_s = found.figures["gpu_s"]
    assert gpu_s.low == pytest.approx(800.0 / max(rates))
    assert gpu_s.high == pytest.approx(RECKONED_SLOWER * 800.0 / min(rates))
    assert "reckoned where none says measured: no GPU is here" in found.gpu
    assert "H100 SXM" in found.gpu and "H200, measured" in found.gpu
    on_cores = cost_of(job(device="cpu"), {"dau1997": 44100.0})
    assert "gpu_s" not in on_cores.figures and on_cores.gpu == ""
    assert found.figures["cpu_s"].expected < 0.2 * on_cores.figures["cpu_s"].expected


def test_a_gpu_of_this_machine_is_held_as_long_as_the_job() -> None:
    found = cost_of(job(device="cuda", gpus_per_worker=0.5), {"dau1997": 44100.0}, device="cuda")
    assert found.figures["gpu_s"] == found.figures["time_s"].times(0.5) and found.gpu == ""


def test_a_model_without_stored_figures_has_no_gpu_hours() -> None:
    assert gpu_speeds({"mine": 16000.0}) == {}
    found = cost_of(job(device="cuda"), {"mine": 16000.0})
    assert "gpu_s" not in found.figures and "no time on a GPU is known" in found.gpu
    half, whole = gpu_speeds({"dau1997": 22050.0}), gpu_speeds({"dau1997": 44100.0})
    assert half == pytest.approx({gpu: seconds / 2 for gpu, seconds in whole.items()})


def test_a_disk_is_asked_for_nothing() -> None:
    assert not {"puts", "gets"} & set(cost_of(job(), {}).figures)


@pytest.mark.long
@pytest.mark.parametrize("formats", [["parquet"], ["zarr"]])
def test_requests_are_those_that_a_server_counts(
    tmp_path: Path, formats: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    call = outages.FaultyStore.__call__

    def counting(store: Any, environ: dict[str, Any], start_response: Any) -> Any:
        listed = "list-type" in environ.get("QUERY_STRING", "")
        seen.append(("LIST" if listed else environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        return call(store, environ, start_response)

    monkeypatch.setattr(outages.FaultyStore, "__call__", counting)
    with store_of("s3") as place:
        local = write_corpus(tmp_path / "corpus", 8, seconds=1.0)
        audio = place.layout("audio")
        for path in local.iterdir():
            audio.write_bytes(path.name, path.read_bytes())
        spec = JobSpec.load(
            {
                "source": {
                    "kind": "files",
                    "uri": f"{place.uri}/audio",
                    "storage_options": place.options,
                },
                "extract": [{"model": "mfcc", "fs_hz": 16000}],
                "output": {
                    "uri": f"{place.uri}/out",
                    "storage_options": place.options,
                    "formats": formats,
                    "shard_rows": 1,
                },
                "run": {"executor": "local", "workers": 1},
            }
        )
        plan = make_plan(open_source(spec.source), spec)
        infos = [info for model in validate_models(spec) for info in model.streams]
        expected = requests(plan, spec, estimate(plan, spec, infos).objects)
        seen.clear()
        assert run_job(spec).status == "done"
    made = Counter("get" if method in ("GET", "HEAD") else "put" for method, _ in seen)
    assert expected.puts == pytest.approx(made["put"], rel=0.15)
    assert expected.gets == pytest.approx(made["get"], rel=0.15)
