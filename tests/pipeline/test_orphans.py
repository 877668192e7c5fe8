"""Leftovers go on request, and nothing else ever does."""

from __future__ import annotations

from pathlib import Path

import pytest

from earmill.pipeline.common.errors import CommitError, LockedError, OutputError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.driver_lock import DriverLock
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.garbage import collect_garbage
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import PLAN, contents, make_bad, make_row, publish, small_dataset

LEFT = {
    "data/00001-deadbeef.zarr/zarr.json": b"{}",
    "data/00001-deadbeef.zarr/modulation/values/c/0/0": b"x",
    "data/00001-deadbeef.parquet": b"",
    "rows/00000-deadbeef.parquet": b"",
}
KEPT = {
    "rows/00007-deadbeef.parquet": b"of a shard that may yet be committed",
    "data/notes.txt": b"not ours",
    "data/00001-00000001.zarr/more": b"inside a committed store",
}


def everything(layout: Layout) -> dict[str, bytes]:
    folders = ("data", "rows", "quarantine", "commits", "index", "snapshots")
    return {name: data for folder in folders for name, data in contents(layout, folder).items()}


def test_attempts_that_lost_are_removed_and_the_rest_stays(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    whole = everything(layout)
    for name, data in (LEFT | KEPT).items():
        layout.write_bytes(name, data)
    layout.write_bytes(".scratch/00000-x/part", b"")
    assert verify(layout).orphans == sorted(LEFT | KEPT)
    assert collect_garbage(layout, grace_s=0).parts == (
        "data/00001-deadbeef.parquet",
        "data/00001-deadbeef.zarr",
        "rows/00000-deadbeef.parquet",
        ".scratch",
    )
    assert everything(layout) == whole | KEPT
    report = verify(layout)
    assert report.problems == [] and report.orphans == sorted(KEPT)
    assert not (tmp_path / ".scratch").exists() and not layout.exists("driver.json")


def test_nothing_goes_while_a_driver_works_or_its_record_is_unreadable(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    for name, data in LEFT.items():
        layout.write_bytes(name, data)
    with DriverLock(layout), pytest.raises(LockedError, match="another driver works"):
        collect_garbage(layout, grace_s=0)
    layout.write_bytes("commits/00001.json", b"{")
    with pytest.raises(CommitError, match=r"commits/00001\.json"):
        collect_garbage(layout, grace_s=0)
    assert set(LEFT) <= set(everything(layout)) and layout.exists("data/00001-00000001.parquet")
    with pytest.raises(OutputError, match=r"holds no dataset\.json"):
        collect_garbage(Layout.open(tmp_path / "elsewhere"), grace_s=0)


def test_what_a_replaced_commit_names_is_no_orphan(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    old = {file.path for file in commits(layout)["00000"].files}
    rows = [make_row("a.wav"), make_row("b.wav", 7)]
    bad = [make_bad("bad.wav")]
    publish(layout, "00000", "0000aaaa", rows, bad, plan_rows=PLAN["00000"], generation=1)
    finalise(layout)
    report = verify(layout)
    assert report.problems == [] and report.orphans == []
    assert set(report.replaced) == old
    collect_garbage(layout)
    assert verify(layout) == report
