"""The commands as Python calls: the same job, the same errors, and events for a callback."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import earmill
from earmill.pipeline.common.errors import OutputError, SpecError
from tests.pipeline.again_jobs import shards_run_here
from tests.pipeline.audio_factory import encode, speech_like
from tests.pipeline.workers_here import workers_here


def clip(seed: int) -> bytes:
    """A quarter of a second as a WAV file."""
    return encode(speech_like(0.25, 16000, seed=seed), rate_hz=16000)


def job(folder: Path, clips: int = 3, **run: Any) -> dict[str, Any]:
    """A job on clips of a quarter of a second."""
    (folder / "audio").mkdir(exist_ok=True)
    for i in range(clips):
        (folder / "audio" / f"{i}.wav").write_bytes(clip(i))
    return {
        "source": {"kind": "files", "uri": str(folder / "audio")},
        "extract": [{"model": "dau1997", "fs_hz": 16000, "streams": {"envelope": {}}}],
        "output": {"uri": str(folder / "out"), "formats": ["parquet"], "shard_rows": 2},
        "run": {"executor": "local", "workers": 1, "threads_per_worker": 1, **run},
    }


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, earmill.JobFinished, list[earmill.events.Event]]:
    folder = tmp_path_factory.mktemp("api")
    seen: list[earmill.events.Event] = []
    with workers_here():
        end = earmill.extract(job(folder), progress=seen.append)
    return folder, end, seen


@pytest.fixture
def no_workers() -> Iterator[None]:
    """Shards run in this process."""
    with shards_run_here():
        yield


Finished = tuple[Path, earmill.JobFinished, list[earmill.events.Event]]


def test_a_job_is_a_call_that_tells_every_event(finished: Finished) -> None:
    folder, end, seen = finished
    assert (end.status, end.rows_ok, end.rows_bad, end.shards) == ("done", 3, 0, 2)
    assert seen[-1] is end
    kinds = [event.kind for event in seen]
    assert kinds.count("shard_done") == 2 and "job_started" in kinds
    ds = earmill.open_features(folder / "out")
    assert [row.row_id for row in ds] == ["0.wav", "1.wav", "2.wav"]
    report = earmill.verify(folder / "out")
    assert report.ok and report.hashed and report.rows_ok == 3
    assert not earmill.verify(str(folder / "out"), hashes=False).hashed


def test_the_same_call_again_is_refused_and_resume_finds_nothing_to_do(finished: Finished) -> None:
    folder, _, _ = finished
    with pytest.raises(OutputError, match="--resume"):
        earmill.extract(job(folder))
    end = earmill.extract(job(folder), resume=True)
    assert (end.status, end.rows_ok) == ("nothing_to_do", 3)
    repaired = earmill.extract(job(folder), resume=True, repair=True)
    assert repaired.status == "nothing_to_do"


def test_progress_is_drawn_where_it_is_asked_for(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = finished
    earmill.extract(job(folder), resume=True)
    assert capsys.readouterr().out == ""
    earmill.extract(job(folder), resume=True, progress=True)
    assert "3 rows" in capsys.readouterr().out


def test_a_plan_costs_what_the_command_says(finished: Finished) -> None:
    folder, _, _ = finished
    cost = earmill.plan(job(folder), overrides=["output.shard_rows=1"])
    assert (cost.estimate.rows, cost.estimate.shards) == (3, 3)
    assert cost.estimate.hours == pytest.approx(0.75 / 3600, rel=1e-3)
    assert [stream.name for stream in cost.streams] == ["envelope"]
    assert cost.to_dict()["shards"] == 3 and cost.sample is None
    assert earmill.plan(job(folder)).plan_id != cost.plan_id


@pytest.mark.usefixtures("no_workers")
def test_too_many_bad_rows_are_an_error_that_carries_the_end(tmp_path: Path) -> None:
    spec = job(tmp_path, clips=2, max_bad_fraction=0.1)
    whole = clip(9)
    (tmp_path / "audio" / "bad.wav").write_bytes(b"no audio at all".ljust(len(whole)))
    with pytest.raises(earmill.JobFailedError) as caught:
        earmill.extract(spec)
    end = caught.value.end
    assert (end.rows_ok, end.rows_bad, end.exit_code) == (2, 1, 3)
    assert caught.value.exit_code == 3 and str(caught.value) == end.message
    for copied in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert copied.end == end
    assert earmill.extract(spec, resume=True, check=False).exit_code == 3

    assert earmill.retry(tmp_path / "out", error="truncated") is None
    (tmp_path / "audio" / "bad.wav").write_bytes(whole)
    again = earmill.retry(tmp_path / "out", job=spec)
    assert again is not None and (again.rows_ok, again.rows_bad) == (3, 0)
    assert earmill.verify(tmp_path / "out").ok
    assert earmill.open_features(tmp_path / "out").by_id("bad.wav").seconds == pytest.approx(0.25)


def test_a_stop_ends_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    stop = earmill.StopRequest()
    spec = job(tmp_path, clips=6)
    spec["output"]["shard_rows"] = 1

    def first_shard(event: earmill.events.Event) -> None:
        if event.kind == "shard_done":
            thread = threading.Thread(target=stop, args=("the test",))
            thread.start()
            thread.join()

    with workers_here(), pytest.raises(earmill.JobFailedError) as caught:
        earmill.extract(spec, progress=first_shard, stop=stop)
    assert caught.value.end.status == "stopped" and 1 <= caught.value.end.rows_ok < 6
    with shards_run_here():
        assert earmill.extract(spec, resume=True).rows_ok == 6


@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        (7, (), "expected a job file, a mapping or a JobSpec, got int"),
        ([], (), "got list"),
        ({"source": {}}, (), "source"),
        ({}, "run.workers=1", "expected a list of strings, got the string"),
        ({}, [1], "overrides: expected strings"),
        ("nowhere.yaml", (), "nowhere.yaml"),
    ],
)
def test_what_is_no_job_is_told_before_any_work(
    spec: Any, overrides: Any, message: str, tmp_path: Path
) -> None:
    for call in (earmill.extract, earmill.plan):
        with pytest.raises(SpecError, match=message):
            call(spec, overrides=overrides)


def test_arguments_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume=True"):
        earmill.extract(job(tmp_path), repair=True)
    with pytest.raises(OutputError, match=r"holds no dataset\.json"):
        earmill.verify(tmp_path)
    with pytest.raises(SpecError, match="error: expected a text such as 'unreadable', got 7"):
        earmill.retry(tmp_path, error=7)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="expected a list of strings, got the string"):
        earmill.retry(tmp_path, overrides="run.workers=1")
    with pytest.raises(SpecError, match="got int"):
        earmill.retry(tmp_path, job=7)  # type: ignore[arg-type]


def test_a_spec_that_is_loaded_already_takes_overrides(tmp_path: Path) -> None:
    spec = earmill.JobSpec.load(job(tmp_path))
    changed = earmill.JobSpec.load(spec, ["extract.0.fs_hz=8000", "output.dtype=float32"])
    assert (changed.extract[0].fs_hz, changed.output.dtype) == (8000.0, "float32")
    assert changed.source == spec.source and earmill.JobSpec.load(spec) == spec
    assert earmill.JobSpec.load(spec).sha256() == spec.sha256()


def test_the_error_of_a_job_holds_no_secret(finished: Finished) -> None:
    _, end, _ = finished
    error = earmill.JobFailedError(replace(end, message="s3://key:hush@bucket/out: stopped"))
    assert "hush" not in str(error) and "s3://***@bucket/out" in str(error)
