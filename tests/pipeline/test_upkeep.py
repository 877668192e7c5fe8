"""Small shards merged, and files that no snapshot names removed: values stay, killed or not."""

from __future__ import annotations

import json
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest

import earmill
from earmill import open_features
from earmill.jobs.cli import run as command
from earmill.pipeline.common.errors import LockedError, OutputError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.driver_lock import DriverLock
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.planning import shards
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import assert_whole, committed_files
from tests.pipeline.again_jobs import Killed, module_without_ray  # noqa: F401
from tests.pipeline.changing_corpus import (
    CLIPS,
    Changing,
    Dying,
    corpus_and_output,  # noqa: F401
    fresh,  # noqa: F401
    in_both_formats,
)

NONE = timedelta(0)


def files(job: Changing) -> set[str]:
    return {path.relative_to(job.out).as_posix() for path in job.out.rglob("*") if path.is_file()}


@in_both_formats
def test_small_shards_become_one_with_the_same_values(changing: Changing) -> None:
    before, moments = changing.values(), open_features(changing.out).moments
    rows = [open_features(changing.out).provenance(k) for k in range(CLIPS)]
    entry = earmill.compact(changing.out, shard_rows=100)
    assert entry is not None and (entry.number, entry.why, entry.rows_ok) == (2, "compact", CLIPS)
    assert (entry.added, entry.changed, entry.removed) == (0, 0, 0)
    assert list(commits(changing.layout)) == ["00003"]
    assert changing.values() == changing.values(format="parquet") == before
    assert changing.values(snapshot=1) == before
    ds = open_features(changing.out)
    for name, found in earmill.compute_statistics(ds).items():
        assert found.stored() == ds.moments[name]
        assert ds.moments[name].count == moments[name].count
    left_out = ("shard", "row")
    for number, row in enumerate(rows):
        now = ds.provenance(number)
        assert {k: v for k, v in now.items() if k not in left_out} == {
            k: v for k, v in row.items() if k not in left_out
        }
    assert_whole(changing.out)
    assert earmill.compact(changing.out, shard_rows=100) is None
    # What it made is a dataset like any other: a row changes, is repaired, and merged again.
    (changing.corpus / changing.names()[0]).unlink()
    changing.write("new.wav", 9)
    changing.update()
    assert changing.computed == ["new.wav"] and len(commits(changing.layout)) == 2
    data = next(file.path for file in commits(changing.layout)["00004"].files)
    (changing.out / data).write_bytes(b"")
    assert verify(changing.layout).damaged == ["00004"]
    changing.extract(resume=True, again=lambda layout: {"00004": ()})
    assert_whole(changing.out)


def test_limits_of_merged_shards_are_kept(changing: Changing) -> None:
    earmill.compact(changing.out, shard_rows=4)
    assert [record.rows_ok for record in commits(changing.layout).values()] == [2, 4]
    seconds = sum(record.seconds for record in commits(changing.layout).values())
    assert earmill.compact(changing.out, shard_rows=6, shard_seconds=seconds / 2) is None
    assert earmill.compact(changing.out, shard_rows=6, shard_seconds=2 * seconds) is not None


@in_both_formats
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
def test_compacting_and_collecting_may_be_killed_anywhere(
    step: int, changing: Changing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(changing.out, tmp_path / "before")
    before = changing.values()

    def work() -> None:
        earmill.compact(changing.out, shard_rows=4)
        earmill.gc(changing.out, keep=1, grace=NONE)

    work()
    whole, left = committed_files(changing.out), len(files(changing))
    Dying.patch(monkeypatch)
    kills = 0
    while True:
        shutil.rmtree(changing.out)
        shutil.copytree(tmp_path / "before", changing.out)
        Dying.left = step * kills
        try:
            work()
            break
        except Killed:
            kills += 1
        Dying.left = 10_000
        assert changing.values() == before
        work()
        assert committed_files(changing.out) == whole and changing.values() == before
        assert verify(changing.layout).problems == []
        assert len(files(changing)) == left
    assert kills > 3


def test_what_was_half_written_when_its_process_was_killed_goes_after_the_grace_time(
    changing: Changing,
) -> None:
    now = files(changing)
    left = (
        ".probe-0a0b0c0d",
        "driver.json.0123456789abcdef",
        "index/.0123456789abcdef.parquet.01020304",
        "data/.00000-0a0b0c0d.zarr.01020304/c/0",
        ".scratch-0a0b0c0d/00000-01020304/data/00000-01020304.parquet",
    )
    for name in left:
        path = changing.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    found = earmill.gc(changing.out)
    assert (found.files, found.young) == (0, len(left)) and files(changing) == {*now, *left}
    found = earmill.gc(changing.out, grace=NONE)
    assert (found.files, found.bytes) == (len(left), 4 * len(left))
    assert files(changing) == now
    assert verify(changing.layout).problems == []


def test_what_no_snapshot_names_goes_after_the_grace_time(changing: Changing) -> None:
    before = changing.values()
    earmill.compact(changing.out, shard_rows=100)
    now = files(changing)
    # Old snapshots are not asked for, so all of it stays; then they are, but all is young.
    assert earmill.gc(changing.out, grace=NONE).files == 0
    young = earmill.gc(changing.out, older_than=NONE, dry_run=True)
    assert (young.files, [entry.number for entry in young.snapshots]) == (0, [1])
    assert young.young > 10 and files(changing) == now
    with DriverLock(changing.layout), pytest.raises(LockedError):
        earmill.gc(changing.out, grace=NONE)
    (changing.out / "data" / "00099-deadbeef.parquet").write_bytes(b"may yet be committed")
    (changing.out / "data" / "00003-deadbeef.parquet").write_bytes(b"lost")
    found = earmill.gc(changing.out, keep=1, grace=NONE)
    assert [entry.number for entry in found.snapshots] == [1] and found.young == 0
    gone = now - files(changing)
    assert "commits/00000.json" in gone and "dataset.json" not in gone
    assert not [name for name in files(changing) if "/00000-" in name]
    assert changing.values() == changing.values(format="parquet") == before
    assert (changing.out / "data" / "00099-deadbeef.parquet").exists()
    assert not (changing.out / "data" / "00003-deadbeef.parquet").exists()
    report = verify(changing.layout)
    assert (report.problems, report.replaced) == ([], [])
    assert [entry.number for entry in earmill.log(changing.out)] == [2]
    with pytest.raises(OutputError, match="expected a snapshot, got 1"):
        changing.values(snapshot=1)
    # And it goes on: the next update begins with what is left.
    changing.write("new.wav", 8)
    changing.update()
    assert set(changing.values()) == {*before, "new.wav"}
    assert [entry.number for entry in earmill.log(changing.out)] == [2, 3]


def test_plans_in_parts_are_revised_and_kept(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PART_ROWS", 2)
    (changing.corpus / changing.names()[0]).unlink()
    changing.write("new.wav", 8)
    changing.update()
    in_parts = changing.values()
    assert len(changing.layout.list("plan")) > 3
    earmill.gc(changing.out, keep=1, grace=NONE)
    assert_whole(changing.out)
    changing.write("newer.wav", 9)
    changing.update()
    earmill.compact(changing.out, shard_rows=4)
    earmill.gc(changing.out, keep=1, grace=NONE)
    assert_whole(changing.out)
    assert changing.values().items() >= in_parts.items()
    assert earmill.verify_deep(changing.out, 9).equal == CLIPS + 1


def test_an_update_under_way_loses_nothing(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = changing.values()
    (changing.corpus / changing.names()[0]).unlink()
    changing.write("new.wav", 8)
    Dying.patch(monkeypatch)
    Dying.left = 9
    with pytest.raises(Killed):
        changing.update()
    Dying.left = 10_000
    with pytest.raises(OutputError, match="--resume first"):
        earmill.compact(changing.out)
    earmill.gc(changing.out, keep=1, grace=NONE)
    assert changing.values() == before
    changing.update()
    assert set(changing.values()) == set(changing.names())
    assert_whole(changing.out)


@pytest.mark.parametrize("place", ["folder", "memory://times"])
def test_files_say_when_they_were_written(place: str, tmp_path: Path) -> None:
    layout = Layout.open(str(tmp_path) if place == "folder" else place)
    begun = time.time()
    layout.write_bytes("data/a", b"x")
    layout.write_bytes("data/.b", b"unfinished")
    ((name, entry),) = layout.entries("data").items()
    assert name == "data/a" and entry.modified is not None
    assert begun - 2 <= entry.modified <= time.time() + 2


def test_the_commands(changing: Changing, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(changing.out)
    assert command(["compact", out, "--shard-rows", "100"]) == 0
    assert f"snapshot 2: {CLIPS} rows ok, 0 quarantined" in capsys.readouterr().out
    assert command(["compact", out]) == 0
    assert "nothing to merge" in capsys.readouterr().out
    assert command(["gc", out, "--keep", "1", "--dry-run", "--grace", "0s"]) == 0
    assert "commits/00000.json: would be removed" in capsys.readouterr().out
    assert command(["gc", out, "--older-than", "30d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == []
    assert command(["gc", out, "--older-than", "soon"]) == 2
    assert "a time such as 12h" in capsys.readouterr().err
    assert command(["gc", str(changing.corpus)]) == 2
