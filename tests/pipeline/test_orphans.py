"""Leftovers go on request, and nothing else ever does."""

from __future__ import annotations

from pathlib import Path

import pytest

from earmill.pipeline.common.errors import LockedError, OutputError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.driver_lock import DriverLock
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.garbage import remove_orphans
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
    (tmp_path / ".scratch" / "00000-x").mkdir(parents=True)
    assert verify(layout).orphans == sorted(LEFT | KEPT)
    removed = remove_orphans(layout)
    assert removed.parts == [
        "data/00001-deadbeef.parquet",
        "data/00001-deadbeef.zarr",
        "rows/00000-deadbeef.parquet",
    ]
    assert removed.kept == sorted(KEPT)
    assert everything(layout) == whole | KEPT
    report = verify(layout)
    assert report.problems == [] and report.orphans == sorted(KEPT)
    assert not (tmp_path / ".scratch").exists() and not layout.exists("driver.json")


def test_nothing_goes_while_a_driver_works_or_its_record_is_unreadable(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    for name, data in LEFT.items():
        layout.write_bytes(name, data)
    with DriverLock(layout), pytest.raises(LockedError, match="another driver works"):
        remove_orphans(layout)
    layout.write_bytes("commits/00001.json", b"{")
    assert remove_orphans(layout).parts == ["rows/00000-deadbeef.parquet"]
    left = [name for name in LEFT if name.startswith("data/00001")]
    assert set(left) <= set(everything(layout)) and layout.exists("data/00001-00000001.parquet")
    with pytest.raises(OutputError, match=r"holds no dataset\.json"):
        remove_orphans(Layout.open(tmp_path / "elsewhere"))


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
    assert remove_orphans(layout).parts == []
    assert verify(layout) == report
