"""Bad rows tried again: what comes back, what stays, and retries that are killed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earmill import open_features
from earmill.jobs.cli import run as command
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.driver import events
from earmill.pipeline.formats.rows import QuarantineRow
from earmill.pipeline.operations import run_job as driver
from earmill.pipeline.operations.retry import RowFilter, stored_job
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import OwnedFolder
from tests.chaos.jobs import committed_files
from tests.pipeline.again_jobs import (
    ALSO_BAD,
    BAD,
    Job,
    Killed,
    OneByOne,
    _corpus_as_it_was,  # noqa: F401
    _no_ray,  # noqa: F401
    corpus_made,  # noqa: F401
    finished_job,  # noqa: F401
    good_values,
    run_here,  # noqa: F401
)


def test_a_restored_row_replaces_its_commit_and_nothing_else_changes(job: Job, go: Any) -> None:
    before, old = good_values(job), commits(job.layout)
    stale = open_features(job.out)
    job.restore(BAD)
    end, _ = go(job.spec, RowFilter.of(uri=f"*/{BAD}").choose)
    assert (end.status, end.rows_ok, end.rows_bad) == ("done", 3, 1)
    assert job.bad() == {ALSO_BAD: "truncated"}
    assert job.generations() == {"00000": 1, "00001": 0}
    now = commits(job.layout)
    assert now["00000"].replaces == old["00000"].attempt and now["00001"] == old["00001"]
    values = good_values(job)
    assert set(values) == {*before, BAD}
    assert {row_id: values[row_id] for row_id in before} == before
    report = verify(job.layout)
    assert report.problems == [] and report.orphans == []
    # A reader that was open all the time goes on with what it saw.
    assert {row.row_id for row in stale} == set(before)
    assert {row.row_id: row.features["modulation"].tobytes() for row in stale} == {
        row_id: streams["modulation"] for row_id, streams in before.items()
    }


ROW = QuarantineRow("a", "s3://x/2019/a[1].wav", "fetch", "unreadable", "no", 1)


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ({}, True),
        ({"error": "unreadable"}, True),
        ({"error": ["truncated", "unreadable"]}, True),
        ({"error": "Unreadable"}, False),
        ({"error": "unread"}, False),
        ({"error": "unreadable", "stage": "decode"}, False),
        ({"stage": ["decode", "fetch"], "uri": "s3://x/*"}, True),
        ({"uri": "*/2019/*"}, True),
        ({"uri": ["*/2020/*", "*.wav"]}, True),
        ({"uri": "*/2019"}, False),
        ({"uri": "*.WAV"}, False),
        ({"uri": ROW.uri}, True),
        ({"uri": "*a[0-9].wav"}, False),
    ],
)
def test_a_row_passes_if_each_list_has_a_match(flags: dict[str, Any], passes: bool) -> None:
    assert RowFilter.of(**flags)(ROW) == passes


def test_the_shard_comes_out_as_if_the_row_had_never_been_bad(
    job: Job, go: Any, tmp_path: Path
) -> None:
    job.restore(BAD, ALSO_BAD)
    end, _ = go(job.spec, RowFilter().choose)
    assert (end.rows_ok, end.rows_bad, job.bad()) == (4, 0, {})
    output = job.spec.output.model_copy(update={"uri": str(tmp_path / "fresh")})
    go(job.spec.model_copy(update={"output": output}), resume=False)
    assert committed_files(job.out) == committed_files(tmp_path / "fresh")


def test_rows_that_are_not_asked_for_stay_in_quarantine_untried(job: Job, go: Any) -> None:
    """Shard 00001 holds a truncated row; another of its rows is made bad by hand."""
    job.restore(ALSO_BAD)
    choose = RowFilter().choose(job.layout)
    (kept,) = RowFilter(error=("not_audio",)).choose(job.layout).values()
    assert kept == () and set(choose) == {"00000", "00001"}
    (row,) = pq.read_table(
        job.layout.path(str(commits(job.layout)["00001"].path("quarantine")))
    ).to_pylist()
    from earmill.pipeline.formats.rows import QuarantineRow

    go(job.spec, lambda layout: {"00001": (QuarantineRow(**row),)})
    assert job.generations()["00001"] == 1 and job.bad()[ALSO_BAD] == "truncated"


def test_a_retry_that_fails_again_is_told_and_can_be_repeated(job: Job, go: Any) -> None:
    for generation in (1, 2):
        end, _ = go(job.spec, RowFilter(error=("truncated",)).choose)
        assert (end.status, end.rows_bad) == ("done", 2)
        assert job.generations() == {"00000": 0, "00001": generation}
        assert verify(job.layout).problems == []


@pytest.mark.parametrize("kill_after", [0, 1])
@pytest.mark.parametrize("then", ["resume", "retry"])
def test_a_killed_retry_leaves_a_whole_dataset_and_is_gone_on_with(
    kill_after: int, then: str, job: Job, go: Any
) -> None:
    before = good_values(job)
    job.restore(BAD, ALSO_BAD)
    with pytest.raises(Killed):
        go(job.spec, RowFilter().choose, kill_after=kill_after)
    assert good_values(job) == before  # the snapshot of before counts
    end, _ = go(job.spec, None if then == "resume" else RowFilter().choose)
    report = verify(job.layout)
    assert end.exit_code == 0 and report.problems == []
    if then == "retry":
        assert (report.rows_ok, report.rows_bad) == (4, 0)
    else:
        assert (report.rows_ok, report.rows_bad) == (2 + kill_after, 2 - kill_after)
    values = good_values(job)
    assert {row_id: values[row_id] for row_id in before} == before
    assert max(job.generations().values()) <= 1


def test_a_retry_that_was_killed_while_closing_is_closed_by_the_same_command(
    job: Job, go: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(layout: Layout, **_: Any) -> None:
        raise Killed

    job.restore(BAD, ALSO_BAD)
    with monkeypatch.context() as patch:
        patch.setattr("earmill.pipeline.operations.run_job.finalise", killed)
        with pytest.raises(Killed):
            go(job.spec, RowFilter().choose)
    assert not verify(job.layout).ok and not RowFilter().choose(job.layout)
    for _ in range(2):
        assert command(["retry", str(job.out), "--json"]) == 0
        *_, last = capsys.readouterr().out.splitlines()
        assert verify(job.layout).problems == [] and job.bad() == {}
    assert json.loads(last)["message"].startswith("no quarantined row matches")


def test_a_run_that_only_closes_removes_what_killed_workers_left(
    job: Job, go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, used = OwnedFolder(), OwnedFolder()
    left.let_go()
    job.layout.delete("current.json")
    go(job.spec)
    assert not Path(left.path).exists() and Path(used.path).exists()
    used.remove()


@pytest.mark.parametrize("loss", ["gone", "changed"])
def test_a_good_row_is_never_lost_by_a_retry(loss: str, job: Job, go: Any) -> None:
    before = good_values(job)
    job.restore(BAD)
    victim = job.corpus / next(row_id for row_id in before if row_id.startswith("000"))
    if loss == "gone":
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data[-11] ^= 0x3F
        victim.write_bytes(data)
    end, _ = go(job.spec, RowFilter.of(uri=f"*/{BAD}").choose)
    assert end.exit_code == 1
    what = "not any more" if loss == "gone" else "the audio has changed"
    assert what in end.message and victim.name in end.message
    assert good_values(job) == before and job.generations() == {"00000": 0, "00001": 0}
    assert verify(job.layout).problems == [] and verify(job.layout).orphans == []


def test_a_changed_source_is_told_on_resume(job: Job, go: Any) -> None:
    assert not any(isinstance(event, events.SourceChanged) for event in go(job.spec)[1])
    (job.corpus / "new.wav").write_bytes((job.corpus / BAD).read_bytes())
    os.utime(job.corpus / BAD, (1.0, 1.0))
    (job.corpus / ALSO_BAD).unlink()
    end, seen = go(job.spec)
    (event,) = [event for event in seen if isinstance(event, events.SourceChanged)]
    assert (event.added, event.removed, event.changed) == (1, 1, 1)
    for part in ("'new.wav'", f"'{ALSO_BAD}'", f"'{BAD}'", "--update takes them in"):
        assert part in event.text
    assert event.to_dict()["event"] == "source_changed"
    assert (end.status, end.exit_code) == ("nothing_to_do", 0)
    shutil.rmtree(job.corpus)
    job.corpus.mkdir()
    end, seen = go(job.spec)
    (event,) = [event for event in seen if isinstance(event, events.SourceChanged)]
    assert "could not be listed again" in event.text and end.exit_code == 0


def test_the_retry_command_rebuilds_the_job(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stored_job(job.layout, str(job.out), {}, overrides=["run.max_bad_fraction=0.5"])
    assert spec.sha256() == job.spec.sha256() and spec.output.uri == str(job.out)
    assert spec.run.max_bad_fraction == 0.5
    assert command(["retry", str(job.out), "--error", "worker_crash"]) == 0
    assert "no quarantined row matches" in capsys.readouterr().out
    assert command(["retry", str(job.out), "--where", "error = 'not_audio'"]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "use --error CLASS, --stage STAGE and --uri GLOB" in said
    assert command(["retry", str(job.out), "--uri", ""]) == 2
    assert "uri: expected a text such as '*/2019/*', got ''" in capsys.readouterr().err
    assert command(["retry", str(job.out / "data")]) == 2
    assert "dataset.json" in capsys.readouterr().err
    job.restore(BAD)
    monkeypatch.setattr(driver.Run, "scheduler", lambda _, job, *__: OneByOne(job, None))
    flags = ["--error", "not_audio", "--error", "unreadable", "--stage", "decode", "--uri", "*.wav"]
    more = ["--json", "--set", "run.max_bad_fraction=1"]
    assert command(["retry", str(job.out), *flags, *more]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["rows_ok"] == 3 and job.bad() == {ALSO_BAD: "truncated"}
