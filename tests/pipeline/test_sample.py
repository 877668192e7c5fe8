"""Rows tried before a job runs, on real small files, and what the job is held against later."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from earmill.jobs.cli import run
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.driver import sample_process
from earmill.pipeline.driver.run import run_job
from earmill.pipeline.driver.sample import _within, try_rows
from earmill.pipeline.driver.sample_job import sampler_of
from earmill.pipeline.planning.cost import JobCost, job_cost
from earmill.pipeline.planning.prices import Prices
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline import audio_factory

GOOD, DAMAGED = 10, 3
PRICES = Prices(currency="EUR", core_hour=3600.0, storage_gb_month=1.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Estimates are kept here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(GOOD):
        kind = "flac" if index % 2 else "wav"
        data = audio_factory.clip(kind, 0.8 + 0.1 * index, seed=index)
        (folder / f"{index:03d}.{kind}").write_bytes(data)
    return folder


def spec_of(corpus: Path, **output: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": str(corpus)},
            "extract": [{"model": "mfcc", "fs_hz": 16000}],
            "output": {
                "uri": str(corpus.parent / "out"),
                "formats": ["parquet"],
                "shard_seconds": 3,
                **output,
            },
            "run": {
                "executor": "local",
                "workers": 1,
                "threads_per_worker": 1,
                "max_bad_fraction": 1.0,
            },
        }
    )


def costed(spec: JobSpec, rows: int = 48, **more: Any) -> JobCost:
    """By a sample in this process, which has imported all that a child would."""
    return job_cost(spec, sampler=sampler_of(spec, rows, seed=1, **{"trial": try_rows} | more))


def damage(corpus: Path, count: int) -> None:
    """Some files become no audio."""
    for path in sorted(corpus.iterdir())[:count]:
        path.write_bytes(b"no audio at all" * 40)


def test_a_sample_of_all_rows_has_every_figure(corpus: Path) -> None:
    damage(corpus, DAMAGED)
    spec = spec_of(corpus)
    result = costed(spec, prices=PRICES)
    sample = result.sample
    assert sample is not None
    assert (sample.rows_tried, sum(sample.bad.values())) == (GOOD, DAMAGED)
    assert sample.bad_share.expected == pytest.approx(DAMAGED / GOOD)
    assert not (corpus.parent / "out").exists(), "planning writes nothing"
    assert set(sample.figures) == {"time_s", "cpu_s", "core_s", "stored_bytes", "objects", "money"}
    for value in sample.figures.values():
        assert 0 < value.low <= value.expected <= value.high
    json.dumps(result.to_dict())


@pytest.mark.parametrize(
    ("form", "damaged"),
    [
        ("zarr", 0),  # Parquet with damage: in the test above
        pytest.param("parquet", 0, marks=pytest.mark.long),
        pytest.param("zarr", DAMAGED, marks=pytest.mark.long),
    ],
)
def test_bytes_of_small_shards_are_known(corpus: Path, form: str, damaged: int) -> None:
    """What shards weigh beside their rows counts most where they are small."""
    damage(corpus, damaged)
    spec = spec_of(corpus, formats=[form])
    sample = costed(spec).sample
    assert sample is not None
    run_job(spec)
    actual = verify(Layout.open(spec.output.uri)).bytes
    assert sample.figures["stored_bytes"].expected == pytest.approx(actual, rel=0.05)


def test_rows_do_not_pay_for_a_look_at_all_that_was_imported(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[tuple[bool, int, int]] = []

    def seen(*args: Any) -> Any:
        looked_at.append((gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count()))
        return _within(*args)

    monkeypatch.setattr("earmill.pipeline.driver.sample._within", seen)
    gc.unfreeze()
    costed(spec_of(corpus))
    ((is_on, objects, left_out),) = looked_at
    assert is_on and objects < left_out / 10


def test_the_command_shows_it(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(corpus)
    job, prices = tmp_path / "job.yaml", tmp_path / "prices.yaml"
    job.write_text(json.dumps(spec.model_dump(mode="json")))
    prices.write_text("{currency: EUR, core_hour: 0.04}")
    arguments = ["plan", str(job), "--sample", "6", "--seed", "2", "--prices", str(prices)]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    for text in ("EUR", "bound by", "stored", "seed 2", ".flac, ", "CPU", "cores held"):
        assert text in shown


@pytest.mark.parametrize("rows", [1, 48])
def test_one_row(corpus: Path, rows: int) -> None:
    for path in sorted(corpus.iterdir())[1:]:
        path.unlink()
    sample = costed(spec_of(corpus), rows=rows).sample
    assert sample is not None and sample.rows_tried == 1
    assert sample.figures["stored_bytes"].expected > 0


def test_when_no_row_can_be_used_that_is_the_line(corpus: Path) -> None:
    damage(corpus, GOOD)
    with pytest.raises(SourceError, match=r"none of the \d+ rows that were tried .*not_audio"):
        costed(spec_of(corpus))


def test_a_row_that_is_gone_is_a_bad_row(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(corpus)
    sampler = sampler_of(spec, 48, seed=1, trial=try_rows)

    def gone_first(plan: Any, *more: Any) -> Any:
        sorted(corpus.iterdir())[0].unlink()
        return sampler(plan, *more)

    sample = job_cost(spec, sampler=gone_first).sample
    assert sample is not None and sum(sample.bad.values()) == 1


def test_an_empty_corpus_and_wrong_options_are_one_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(spec_of(corpus).model_dump(mode="json")))
    assert run(["plan", str(job), "--prices", "x.yaml"]) == 2
    assert "--sample" in capsys.readouterr().err
    assert run(["plan", str(job), "--sample", "4", "--prices", str(tmp_path / "x.yaml")]) == 2
    assert "there is no such price file" in capsys.readouterr().err
    damage(corpus, GOOD)
    assert run(["plan", str(job), "--sample", "4"]) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "trying" not in one]
    assert "none of the" in line
    for path in corpus.iterdir():
        path.unlink()
    assert run(["plan", str(job), "--sample", "4"]) == 2
    assert "no audio files" in capsys.readouterr().err


def test_a_row_that_ends_its_process_is_one_line(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried apart from whoever plans."""
    monkeypatch.setattr(sample_process, "COMMAND", "import os; os.write(2, b'bang'); os.abort()")
    with pytest.raises(SourceError, match=r"ended their process \(bang\)"):
        costed(spec_of(corpus), trial=sample_process.try_apart)
