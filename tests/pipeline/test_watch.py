"""How far a job is, from plan and commits alone: running, quiet, closing, finished, none at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from earmill.jobs.cli import run
from earmill.pipeline.dataset import watch as module
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.watch import JobProgress, JobWatch, ShardFacts, shard_facts
from earmill.pipeline.storage.layout import Layout

# Written by earlier releases, so their records lack what later ones have.
STORED = Path(__file__).parents[1] / "data" / "layout2" / "dataset"
NOON_S = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "out"))


def edited(out: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = out / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def committed_at(out: Path, *at_s: float) -> None:
    """Every commit, in order, at so many seconds after noon."""
    edited(out, "dataset.json", lambda d: d.update(created="2026-05-01T12:00:00+00:00"))
    for number, seconds in enumerate(at_s):
        when = datetime.fromtimestamp(NOON_S + seconds, UTC).isoformat()
        edited(out, f"commits/{number:05d}.json", lambda d, w=when: d["info"].update(created=w))


def look(out: Path, after_s: float, **options: Any) -> JobProgress:
    found = JobWatch(Layout.open(str(out)), now=lambda: NOON_S + after_s).look(**options)
    assert found is not None
    return found


def test_a_finished_job_is_what_its_commits_say(out: Path) -> None:
    records = commits(Layout.open(str(out))).values()
    found = look(out, 1e9)
    assert (found.state, found.shards_done, found.shards_total) == ("finished", 2, 2)
    assert found.rows_ok == sum(record.rows_ok for record in records)
    assert found.rows_bad == sum(record.rows_bad for record in records) > 0
    # Their records do not say why: the tables do.
    assert sum(found.bad_by_class.values()) == found.rows_bad
    assert found.audio_s_done == pytest.approx(sum(record.seconds for record in records))
    assert found.share_done == 1 and found.eta_s is None and found.unread == 0


def test_a_running_job_has_rates_and_a_time_left(out: Path) -> None:
    committed_at(out, 10.0, 20.0)
    whole = look(out, 25.0)
    layout = Layout.open(str(out))
    last = shard_facts(layout, commits(layout)["00001"])
    (out / "current.json").unlink()
    edited_plan(out, more=2)
    found = look(out, 25.0)
    assert (found.state, found.shards_done, found.shards_total) == ("running", 2, 4)
    # The work on the first commit was before the window: ten seconds for the second.
    assert found.rows_per_s == pytest.approx((last.rows_ok + last.rows_bad) / 10)
    assert found.times_real_time == pytest.approx(last.audio_s / 10)
    assert found.eta_s == pytest.approx(
        (found.audio_s_total - whole.audio_s_total) / (last.audio_s / 10)
    )
    assert found.last_commit_age_s == 5 and found.workers == 1
    # Time in which a commit was due counts.
    assert look(out, 40.0).times_real_time == pytest.approx(last.audio_s / 20)


def edited_plan(out: Path, more: int) -> None:
    """The plan has more shards, each a copy of the first one under another number."""
    watched = JobWatch.look

    def with_more(self: JobWatch, *args: Any, **options: Any) -> JobProgress | None:
        first = self.__dict__.get("_planned", {}).get("00000")
        if first is None:
            watched(self, *args, **options)
            first = self._planned["00000"]
            self._planned |= {f"{100 + n:05d}": first for n in range(more)}
        return watched(self, *args, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(JobWatch, "look", with_more)
    _patches.append(patch)


_patches: list[pytest.MonkeyPatch] = []


@pytest.fixture(autouse=True)
def _unpatched() -> Any:
    yield
    while _patches:
        _patches.pop().undo()


def test_a_job_that_commits_nothing_for_long_is_quiet(out: Path) -> None:
    (out / "current.json").unlink()
    (out / "commits" / "00001.json").unlink()
    committed_at(out, 10.0)
    assert look(out, 100.0).state == "running"
    found = look(out, 500.0)
    assert (found.state, found.last_commit_age_s, found.eta_s) == ("quiet", 490, None)
    # A shard that takes half an hour is none of a quiet job.
    edited(out, "commits/00000.json", lambda d: d["info"].update(timings_s={"process": 1800.0}))
    assert look(out, 500.0).state == "running"


def test_a_job_without_commits_counts_from_its_beginning(out: Path) -> None:
    committed_at(out)
    (out / "current.json").unlink()
    for path in (out / "commits").iterdir():
        path.unlink()
    assert (look(out, 60.0).state, look(out, 60.0).shards_done) == ("running", 0)
    found = look(out, 600.0)
    assert (found.state, found.last_commit_age_s) == ("quiet", None)


def test_a_pause_of_hours_is_no_part_of_the_rate(out: Path) -> None:
    committed_at(out, 0.0, 36_000.0)
    (out / "current.json").unlink()
    edited_plan(out, more=1)
    found = look(out, 36_001.0)
    assert found.state == "running" and found.times_real_time is None


def test_all_committed_without_an_index_is_closing(out: Path) -> None:
    (out / "current.json").unlink()
    assert look(out, 1e9).state == "closing"


def test_each_record_is_read_once_and_the_last_ones_first(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = module.read_commit

    def read(layout: Layout, shard: str, generation: int) -> Any:
        asked.append(shard)
        return real(layout, shard, generation)

    monkeypatch.setattr(module, "read_commit", read)
    job = JobWatch(Layout.open(str(out)))
    first = job.look(most=1)
    assert first is not None and (asked, first.unread) == (["00001"], 1)
    assert first.rows_done == first.rows_total, "what is not read counts as planned"
    left = job._planned["00000"][1] + commits(Layout.open(str(out)))["00001"].seconds
    assert first.audio_s_done == pytest.approx(left)
    again = job.look(most=1)
    assert again is not None and (asked, again.unread) == (["00001", "00000"], 0)
    job.look()
    assert len(asked) == 2


def test_a_damaged_record_is_counted_and_ends_nothing(out: Path) -> None:
    (out / "commits" / "00000.json").write_text("{")
    found = look(out, 1e9)
    assert (found.shards_done, found.unreadable) == (2, 1)


def test_the_command_tells_all_of_it(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", str(out)]) == 0
    told = capsys.readouterr().out
    assert "100.0 %, 2 of 2 shards" in told and "finished" in told
    (out / "current.json").unlink()
    (out / "commits" / "00001.json").unlink()
    assert run(["watch", str(out), "--once"]) == 0
    told = capsys.readouterr().out
    assert "1 of 2 shards" in told and "nothing was committed for" in told
    assert "with --resume" in told
    assert run(["watch", str(out), "--once", "--json"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    assert line["event"] == "watch" and all(f"`{name}`" in page for name in line)


def test_a_place_without_a_job_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        assert run(["watch", str(place)]) == 2
        assert "no job has begun here" in capsys.readouterr().err


def test_waiting_for_a_job_ends_when_it_begins(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    aside = out.rename(out.with_name("aside"))
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        aside.rename(out)

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert run(["watch", str(out), "--wait", "--every", "7"]) == 0
    assert pauses == [7.0] and "finished" in capsys.readouterr().out


@pytest.mark.parametrize("pause_s", [60.0, 600.0])
def test_a_pause_is_no_part_of_the_work(pause_s: float) -> None:
    """The job was stopped, or its machine was: the rest takes as long as before."""

    def facts(at_s: float, took_s: float = 8.0) -> ShardFacts:
        return ShardFacts(
            created_s=at_s, rows_ok=10, rows_bad=0, audio_s=100.0, nbytes=1,
            took_s=took_s, worker=("host", 1), device="cpu", cpu_s=(),
            bad_by_class={}, quarantine=None,
        )  # fmt: skip

    steady = [facts(10.0 * k) for k in range(6)]
    whole = module._Pace.of(steady, 52.0)
    assert (whole.times_real_time, whole.rows_per_s) == (10.0, 1.0)
    after = [*steady[:4], *(facts(10.0 * k + pause_s) for k in (4, 5))]
    # The shard that was under way in the pause says that it took so long.
    after[4] = facts(40.0 + pause_s, took_s=pause_s + 8.0)
    paused = module._Pace.of(after, 52.0 + pause_s)
    assert (paused.times_real_time, paused.rows_per_s) == (10.0, 1.0)
    # Workers that commit together have no pauses between.
    crowd = [facts(20.0 * turn + 0.1 * k, took_s=20.0) for turn in range(3) for k in range(8)]
    assert module._Pace.of(crowd, 41.0).times_real_time == pytest.approx(2300 / 40.7)
