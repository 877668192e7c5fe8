"""`source.limit` and `earmill extract --limit`: the first rows of a source, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earmill.jobs.cli import run
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.reader.open import open_features
from earmill.pipeline.sources import open_source
from earmill.pipeline.sources.base import listing
from earmill.pipeline.spec.job import JobSpec
from tests.chaos.jobs import FEW, write_corpus, write_job
from tests.pipeline import hf_data, tars
from tests.pipeline.workers_here import workers_here

Section = dict[str, Any]


def files(folder: Path) -> Section:
    write_corpus(folder, 5, seconds=0.2)
    return {"kind": "files", "uri": str(folder)}


def manifest(folder: Path) -> Section:
    names = sorted(path.name for path in write_corpus(folder, 5, seconds=0.2).iterdir())
    (folder / "rows.csv").write_text("\n".join(["uri,word", *(f"{name},w" for name in names)]))
    return {"kind": "manifest", "uri": str(folder / "rows.csv")}


def tar_files(folder: Path) -> Section:
    tars.write_shards(folder, 2, 3)
    return {"kind": "webdataset", "uri": str(folder / "*.tar")}


def parquet(folder: Path, streaming: bool = False) -> Section:
    hf_data.write_parquet(folder, hf_data.table())
    return {"kind": "hf", "uri": str(folder), "streaming": streaming}


def streamed(folder: Path) -> Section:
    return parquet(folder, streaming=True)


@pytest.mark.parametrize("make", [files, manifest, tar_files, parquet, streamed])
def test_rows_are_the_first_ones(make: Callable[[Path], Section], tmp_path: Path) -> None:
    section = make(tmp_path / "corpus")
    job = {"source": section, "extract": [{"model": "dau1997"}], "output": {"uri": "o"}}
    limited = JobSpec.load(job | {"source": section | {"limit": 2}})
    whole = JobSpec.load(job)
    all_rows = list(open_source(whole.source).items())
    assert len(all_rows) > 3
    source = open_source(limited.source)
    assert list(source.items()) == all_rows[:2]
    assert [row.row_id for row in listing(source)] == [row.row_id for row in all_rows[:2]]
    plan, complete = make_plan(source, limited), make_plan(open_source(whole.source), whole)
    assert list(plan.items()) == list(complete.items())[:2]
    assert plan.extra_types == complete.extra_types and plan.extra_labels == complete.extra_labels
    # Jobs without a limit keep their hash, and a limit makes another job.
    assert "limit" not in whole.canonical()["source"]
    assert whole.sha256() != limited.sha256()


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    job = {"source": files(tmp_path / "c") | {"limit": 0}, "extract": [{"model": "dau1997"}]}
    with pytest.raises(SpecError, match=r"source\.limit"):
        JobSpec.load(job | {"output": {"uri": "o"}})


def test_a_trial_has_an_output_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", 4, seconds=0.3)
    few = {"params": FEW, "formats": ["parquet"]}
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", **few)
    options = ["--limit", "2", "--workers", "1", "--device", "cpu", "-q"]
    with workers_here():
        assert run(["extract", str(job), *options]) == 0
    assert f"{tmp_path / 'out'}-first-2" in capsys.readouterr().out
    assert len(open_features(f"{tmp_path / 'out'}-first-2")) == 2
    assert not (tmp_path / "out").exists()
    assert run(["extract", str(job), "--limit", "0"]) == 2
    assert run(["extract", str(job), "--workers", "0"]) == 2
    assert run(["extract", str(job), "--device", "tpu"]) == 2


def test_workers_and_device_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from earmill.pipeline.operations import run_job as module

    seen: list[JobSpec] = []

    def refuse(spec: JobSpec, **options: Any) -> Any:
        seen.append(spec)
        raise SpecError("enough")

    monkeypatch.setattr(module, "run_job", refuse)
    job = write_job(tmp_path / "job.yaml", write_corpus(tmp_path / "c", 1), tmp_path / "out")
    assert run(["extract", str(job), "--workers", "3", "--device", "cpu"]) == 2
    assert (seen[0].run.workers, seen[0].run.device) == (3, "cpu")
