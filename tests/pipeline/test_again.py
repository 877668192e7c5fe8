"""Bad rows tried again and damaged shards computed again: real files, real commits, no Ray.

Ray is the only part left out: shards run one after another in this process, by the real books and
the real runner. A kill is an exception between two steps, as nothing but the output survives one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earmill import open_features
from earmill.jobs.cli import run as command
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.one_line import named_line
from earmill.pipeline.dataset.publish import commits
from earmill.pipeline.dataset.recompute import Chooser, damaged, quarantined
from earmill.pipeline.dataset.snapshot import current_index
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.dataset.where import everything, parse_where
from earmill.pipeline.driver import events
from earmill.pipeline.driver import run as driver
from earmill.pipeline.driver.run import run_job
from earmill.pipeline.driver.shard_tracker import Ledger, Result
from earmill.pipeline.driver.stored_job import stored_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.owned_folders import OwnedFolder
from earmill.pipeline.worker.messages import Outcome
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob
from tests.chaos.jobs import committed_files, write_corpus, write_job

CLIPS = 4
BAD = "001.wav"
ALSO_BAD = "002.flac"


class Killed(BaseException):
    """The driver ends here, without a chance to clear up."""


class OneByOne:
    """Runs the pending shards in this process."""

    def __init__(self, job: Any, kill_after: int | None) -> None:
        self._job, self._kill_after = job, kill_after

    def run(self) -> Result:
        job = self._job
        work_of = WorkerJob(
            job.spec,
            job.plan.plan_id,
            2,
            str(Path.cwd()),
            extra_types=job.dataset.extra_types,
            again=job.again,
        )
        runner = ShardRunner(work_of)

        def committed(shard_id: str) -> Any:
            generation = job.again[shard_id].generation if shard_id in job.again else 0
            record = driver.read_commit(job.layout, shard_id, generation)
            return None if record is None else driver._committed(record)

        ledger = Ledger(job.pending, committed, max_attempts=1)
        done = 0
        while not ledger.all_settled:
            assignment = ledger.next(idle=True)
            assert assignment is not None
            if done == self._kill_after:
                raise Killed
            try:
                runner.run(assignment.work.order())
                outcome = Outcome(ok=True)
            except Exception as error:
                cause = error.__cause__ or error
                outcome = Outcome(ok=False, stage="publish", message=named_line(cause))
            ledger.shard_ended(assignment.work, outcome)
            done += 1
        return ledger.result


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(driver, "ray_session", lambda address: nullcontext())
    monkeypatch.setattr(driver, "wait_for_nodes", lambda *_, **__: [])


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job here; `kill_after` so many shards."""

    def run(
        spec: JobSpec, again: Chooser | None = None, kill_after: int | None = None, **more: Any
    ) -> tuple[events.JobFinished, list[events.Event]]:
        monkeypatch.setattr(driver, "_scheduler", lambda job, *_: OneByOne(job, kill_after))
        seen: list[events.Event] = []
        end = run_job(spec, again=again, sink=seen.append, **{"resume": True, **more})
        return end, seen

    return run


class Job:
    """A finished job with two bad rows beside good ones in its shards, and its restored corpus."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.corpus, self.out = folder, folder / "corpus", folder / "out"
        self.file = write_job(folder / "job.yaml", self.corpus, self.out, shard_rows=2)
        self.spec = JobSpec.load(
            self.file, overrides=("output.shard_seconds=100", "run.max_bad_fraction=1")
        )
        self.layout = Layout.open(str(self.out))

    def bad(self) -> dict[str, str]:
        """Rows in quarantine by the index that counts."""
        table = pq.read_table(self.layout.path(str(current_index(self.layout))))
        return {
            row["row_id"]: row["error_class"] for row in table.to_pylist() if row["status"] != "ok"
        }

    def restore(self, *names: str) -> None:
        """The planned file comes back, as after an outage: same size, same time."""
        for name in names:
            time_ns = (self.corpus / name).stat().st_mtime_ns
            shutil.copy(self.folder / "whole" / name, self.corpus / name)
            os.utime(self.corpus / name, ns=(time_ns, time_ns))

    def generations(self) -> dict[str, int]:
        return {shard: record.generation for shard, record in commits(self.layout).items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four clips in two shards; one row of each is bad."""
    folder = tmp_path_factory.mktemp("again")
    write_corpus(folder / "whole", CLIPS, seconds=0.5)
    shutil.copytree(folder / "whole", folder / "corpus")
    # Of the planned size: a file of another is never taken for the planned one.
    size = (folder / "whole" / BAD).stat().st_size
    (folder / "corpus" / BAD).write_bytes(b"not audio at all".ljust(size))
    data = (folder / "whole" / ALSO_BAD).read_bytes()
    (folder / "corpus" / ALSO_BAD).write_bytes(data[: len(data) // 2].ljust(len(data)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path.cwd())
        patch.setattr(driver, "ray_session", lambda address: nullcontext())
        patch.setattr(driver, "wait_for_nodes", lambda *_, **__: [])
        patch.setattr(driver, "_scheduler", lambda job, *_: OneByOne(job, None))
        end = run_job(Job(folder).spec)
    assert (end.rows_ok, end.rows_bad, end.shards) == (2, 2, 2)
    yield folder


@pytest.fixture
def job(made: Path, tmp_path: Path) -> Job:
    """A copy of the output; the corpus is named by its path, so it is the shared one."""
    shutil.copytree(made / "out", tmp_path / "out")
    shutil.copytree(made / "corpus", tmp_path / "before")
    here = Job(made)
    here.out, here.layout = tmp_path / "out", Layout.open(str(tmp_path / "out"))
    here.spec = here.spec.model_copy(
        update={"output": here.spec.output.model_copy(update={"uri": str(here.out)})}
    )
    return here


@pytest.fixture(autouse=True)
def _corpus_as_it_was(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    yield
    if "job" in request.fixturenames:
        corpus = request.getfixturevalue("made") / "corpus"
        shutil.rmtree(corpus)
        shutil.copytree(tmp_path / "before", corpus)


def good_values(job: Job) -> dict[str, dict[str, bytes]]:
    return {
        row.row_id: {name: values.tobytes() for name, values in row.features.items()}
        for row in open_features(job.out)
    }


def test_a_restored_row_replaces_its_commit_and_nothing_else_changes(job: Job, go: Any) -> None:
    before, old = good_values(job), commits(job.layout)
    stale = open_features(job.out)
    job.restore(BAD)
    end, _ = go(job.spec, quarantined(parse_where(f"row_id = '{BAD}'")))
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


def test_the_shard_comes_out_as_if_the_row_had_never_been_bad(
    job: Job, go: Any, tmp_path: Path
) -> None:
    job.restore(BAD, ALSO_BAD)
    end, _ = go(job.spec, quarantined(everything))
    assert (end.rows_ok, end.rows_bad, job.bad()) == (4, 0, {})
    output = job.spec.output.model_copy(update={"uri": str(tmp_path / "fresh")})
    go(job.spec.model_copy(update={"output": output}), resume=False)
    assert committed_files(job.out) == committed_files(tmp_path / "fresh")


def test_rows_that_are_not_asked_for_stay_in_quarantine_untried(job: Job, go: Any) -> None:
    """Shard 00001 holds a truncated row; another of its rows is made bad by hand."""
    job.restore(ALSO_BAD)
    choose = quarantined(everything)(job.layout)
    (kept,) = quarantined(parse_where("error = 'not_audio'"))(job.layout).values()
    assert kept == () and set(choose) == {"00000", "00001"}
    (row,) = pq.read_table(
        job.layout.path(str(commits(job.layout)["00001"].path("quarantine")))
    ).to_pylist()
    from earmill.pipeline.formats.rows import QuarantineRow

    go(job.spec, lambda layout: {"00001": (QuarantineRow(**row),)})
    assert job.generations()["00001"] == 1 and job.bad()[ALSO_BAD] == "truncated"


def test_a_retry_that_fails_again_is_told_and_can_be_repeated(job: Job, go: Any) -> None:
    for generation in (1, 2):
        end, _ = go(job.spec, quarantined(parse_where("error = 'truncated'")))
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
        go(job.spec, quarantined(everything), kill_after=kill_after)
    assert good_values(job) == before  # the snapshot of before counts
    end, _ = go(job.spec, None if then == "resume" else quarantined(everything))
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
    def killed(layout: Layout) -> None:
        raise Killed

    job.restore(BAD, ALSO_BAD)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "finalise", killed)
        with pytest.raises(Killed):
            go(job.spec, quarantined(everything))
    assert not verify(job.layout).ok and not quarantined(everything)(job.layout)
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
    end, _ = go(job.spec, quarantined(parse_where(f"row_id = '{BAD}'")))
    assert end.exit_code == 1
    what = "not any more" if loss == "gone" else "the audio has changed"
    assert what in end.message and victim.name in end.message
    assert good_values(job) == before and job.generations() == {"00000": 0, "00001": 0}
    assert verify(job.layout).problems == [] and verify(job.layout).orphans == []


def _change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {"missing": Path.unlink, "changed": _change}


@pytest.mark.parametrize("kind", list(DAMAGE))
@pytest.mark.parametrize("pattern", ["data/00001-*.parquet", "rows/00001-*", "commits/00001.json"])
def test_a_damaged_shard_is_computed_again(kind: str, pattern: str, job: Job, go: Any) -> None:
    before = good_values(job)
    (victim,) = job.out.glob(pattern)
    DAMAGE[kind](victim)
    assert not verify(job.layout).ok
    if kind == "changed" and pattern.startswith("commits"):
        # Wherever the changed byte fell, the record is no JSON now.
        victim.write_bytes(victim.read_bytes().rstrip()[:-1])
        with pytest.raises(CommitError, match=r"--resume --repair"):
            go(job.spec)
    go(job.spec, damaged)
    report = verify(job.layout)
    assert report.problems == [] and report.damaged == []
    assert good_values(job) == before
    anew = kind == "missing" and pattern.startswith("commits")
    assert job.generations() == {"00000": 0, "00001": 0 if anew else 1}


def test_a_lost_replacement_never_brings_the_commit_of_before_back(job: Job, go: Any) -> None:
    job.restore(BAD)
    go(job.spec, quarantined(parse_where(f"row_id = '{BAD}'")))
    files, values = committed_files(job.out), good_values(job)
    job.layout.delete("commits/00000.r1.json")
    report = verify(job.layout)
    assert report.damaged == ["00000"] and "00000.r1.json: missing" in report.problems[0]
    with pytest.raises(CommitError, match=r"commits/00000\.r1\.json.*--repair"):
        go(job.spec)
    assert not verify(job.layout).ok
    go(job.spec, damaged)
    assert verify(job.layout).problems == [] and good_values(job) == values
    assert committed_files(job.out) == files and job.bad() == {ALSO_BAD: "truncated"}


def test_repair_of_a_damaged_index_or_card_needs_no_shard(job: Job, go: Any) -> None:
    for name in (str(current_index(job.layout)), "README.md", "current.json"):
        job.layout.write_bytes(name, job.layout.read_bytes(name)[:-1])
        assert not verify(job.layout).ok
        end, _ = go(job.spec)
        assert end.status == "nothing_to_do" and verify(job.layout).problems == []
    assert job.generations() == {"00000": 0, "00001": 0}
    job.layout.write_bytes("index/0123456789abcdef.parquet", b"of an earlier closing")
    (problem,) = verify(job.layout).problems
    assert problem.startswith("index/0123456789abcdef.parquet") and "may be removed" in problem


def test_a_replaced_commit_of_version_1_raises_the_version(job: Job, go: Any) -> None:
    for name in ("dataset.json", *job.layout.list("commits")):
        data = json.loads(job.layout.read_bytes(name)) | {"layout_version": 1}
        job.layout.write_bytes(name, json.dumps(data, indent=1, sort_keys=True).encode())
    for name in ("current.json", *job.layout.list("snapshots")):
        job.layout.delete(name)
    go(job.spec)
    assert json.loads(job.layout.read_bytes("dataset.json"))["layout_version"] == 1
    job.restore(BAD)
    go(job.spec, quarantined(parse_where(f"row_id = '{BAD}'")))
    assert json.loads(job.layout.read_bytes("dataset.json"))["layout_version"] == 2
    assert verify(job.layout).problems == [] and job.bad() == {ALSO_BAD: "truncated"}


def test_a_changed_source_is_told_on_resume(job: Job, go: Any) -> None:
    assert not any(isinstance(event, events.SourceChanged) for event in go(job.spec)[1])
    (job.corpus / "new.wav").write_bytes((job.corpus / BAD).read_bytes())
    os.utime(job.corpus / BAD, (1.0, 1.0))
    (job.corpus / ALSO_BAD).unlink()
    end, seen = go(job.spec)
    (event,) = [event for event in seen if isinstance(event, events.SourceChanged)]
    assert (event.added, event.removed, event.changed) == (1, 1, 1)
    for part in ("'new.wav'", f"'{ALSO_BAD}'", f"'{BAD}'", "another output.uri"):
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
    assert command(["retry", str(job.out), "--where", "error = 'worker_crash'"]) == 0
    assert "no quarantined row matches" in capsys.readouterr().out
    assert command(["retry", str(job.out), "--where", "error = nothing"]) == 2
    assert "text in quotes" in capsys.readouterr().err
    assert command(["retry", str(job.out / "data")]) == 2
    assert "dataset.json" in capsys.readouterr().err
    job.restore(BAD)
    monkeypatch.setattr(driver, "_scheduler", lambda job, *_: OneByOne(job, None))
    where = "error in ('not_audio')"
    more = ["--json", "--set", "run.max_bad_fraction=1"]
    assert command(["retry", str(job.out), "--where", where, *more]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["rows_ok"] == 3 and job.bad() == {ALSO_BAD: "truncated"}


def test_there_must_be_something_to_replace(tmp_path: Path) -> None:
    from tests.pipeline.outputs import make_row, publish

    layout = Layout.open(tmp_path)
    with pytest.raises(CommitError, match=r"expected commits/00000\.json, which this attempt"):
        publish(layout, rows=[make_row("a")], generation=1)
    assert publish(layout, rows=[make_row("a")])
    assert publish(layout, attempt="00000002", rows=[make_row("a")], generation=1)
    assert not publish(layout, attempt="00000003", rows=[make_row("a")], generation=1)
    assert commits(layout)["00000"].attempt == "00000002"
