"""An index is read only with the commits it was made of, and a closing is whole or done again."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError, EarmillError
from earmill.pipeline.dataset.commit_record import Committed, commits, commits_as
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import current_index, is_closed
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import (
    contents,
    dataset_file,
    make_bad,
    make_row,
    publish,
    small_dataset,
    spec_of_formats,
    write_plan,
)
from tests.short import some

NAMES = ("a.wav", "b.wav", "c.wav", "d.wav")
# The bad row and why. The second leads to two indexes, of which the stale one is listed last.
BAD_FIRST = (("a.wav", "not_audio"), ("b.wav", "unreadable"))


def begun(folder: Path, bad: str, reason: str, fmt: str = "parquet") -> Layout:
    """A closed dataset of two shards, in the first of which a row is bad."""
    layout = Layout.open(folder)
    write_plan(layout, {"00000": NAMES[:3], "00001": NAMES[3:]})
    open_dataset(layout, dataset_file(spec=spec_of_formats(fmt)))
    good = [make_row(name) for name in NAMES[:3] if name != bad]
    publish(layout, "00000", "000000aa", good, [make_bad(bad, reason)], formats=(fmt,))
    publish(layout, "00001", "000000bb", [make_row("d.wav")], formats=(fmt,))
    finalise(layout)
    return layout


def commit_anew(layout: Layout, fmt: str = "parquet") -> None:
    """The bad row's file was restored, and the shard's commit is made again."""
    layout.delete("commits/00000.json")
    rows = [make_row(name) for name in NAMES[:3]]
    publish(layout, "00000", "000000cc", rows, formats=(fmt,))


def check_values(layout: Layout, fmt: str, names: tuple[str, ...]) -> None:
    ds = open_features(layout.root, format=fmt)
    assert tuple(row.row_id for row in ds) == names
    for row in ds:
        expected = make_row(row.row_id).streams
        for name, values in row.features.items():
            np.testing.assert_array_equal(values, expected[name])
        assert ds.provenance(row.index)["uri"] == f"corpus/{row.row_id}"


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
@pytest.mark.parametrize(("bad", "reason"), some(2, BAD_FIRST))
def test_a_shard_committed_anew_is_read_by_the_new_index_only(
    bad: str, reason: str, fmt: str, tmp_path: Path
) -> None:
    layout = begun(tmp_path, bad, reason, fmt)
    commit_anew(layout, fmt)
    assert any("attempt 000000cc, but the index" in line for line in verify(layout).problems)
    stale = open_features(layout.root, format=fmt)
    with pytest.raises(CommitError, match=r"attempt 000000aa as in the index, got 000000cc.*resum"):
        stale[0]
    np.testing.assert_array_equal(
        stale.by_id("d.wav").features["envelope"], make_row("d.wav").streams["envelope"]
    )
    finalise(layout)
    assert len(layout.list("index")) == 2
    check_values(layout, fmt, NAMES)
    assert verify(layout).problems == []


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
@pytest.mark.parametrize(("bad", "reason"), some(2, BAD_FIRST, 1))
def test_without_attempts_the_row_ids_of_the_files_still_decide(
    bad: str, reason: str, fmt: str, tmp_path: Path
) -> None:
    """Layout version 1 names no index: a stale one is caught where it meets a file."""
    layout = begun(tmp_path, bad, reason, fmt)
    commit_anew(layout, fmt)
    shutil.rmtree(tmp_path / "snapshots")
    (tmp_path / "current.json").unlink()
    for name in ("dataset.json", "commits/00000.json", "commits/00001.json"):
        data = json.loads(layout.read_bytes(name)) | {"layout_version": 1}
        layout.write_bytes(name, json.dumps(data).encode())
    stale = open_features(layout.root, format=fmt)
    wrong = [row_id for row_id in NAMES if row_id not in (bad, "d.wav") and row_id > bad]
    for row_id in wrong:
        with pytest.raises(CommitError, match=r"the index (has row|expects)"):
            stale.by_id(row_id)
        with pytest.raises(CommitError, match="not at its place"):
            stale.provenance(stale.index_of(row_id))
    layout.write_bytes("index/0000000000000000.parquet", b"")
    assert any("nothing says which one counts" in line for line in verify(layout).problems)
    assert current_index(layout) is None
    check_values(layout, fmt, NAMES)  # of two indexes none counts: the commits are asked


class Dying(Layout):
    """A disk that is full from the write of one file on."""

    full_at = ""

    def write_bytes(self, rel: str, data: bytes) -> None:
        self._check(rel)
        super().write_bytes(rel, data)

    def put_if_absent(self, rel: str, data: bytes) -> bool:
        self._check(rel)
        return super().put_if_absent(rel, data)

    def _check(self, rel: str) -> None:
        if rel.startswith(self.full_at):
            raise OSError(errno.ENOSPC, "No space left on device", rel)


@pytest.mark.parametrize(
    "full_at",
    ["index", "snapshots", "README.md", "croissant.json", "provenance.jsonld", "current.json"],
)
def test_a_closing_that_was_cut_off_is_seen_and_done_again(full_at: str, tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    dying = type("At", (Dying,), {"full_at": full_at})(layout.backend, layout.root)
    with pytest.raises(OSError, match="No space left"):
        finalise(dying)
    assert not is_closed(layout, commits(layout))
    if full_at != "index":
        (problem,) = verify(layout).problems
        assert problem.startswith("current.json: missing") and "--resume" in problem
    assert len(open_features(tmp_path)) == 3
    finalise(layout)
    assert is_closed(layout, commits(layout)) and verify(layout).problems == []


@pytest.mark.parametrize("card", ["README.md", "croissant.json", "provenance.jsonld"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda layout, card: layout.delete(card),
        lambda layout, card: layout.write_bytes(card, layout.read_bytes(card) + b"\n"),
    ],
    ids=["missing", "stale"],
)
def test_a_missing_or_stale_card_is_a_problem_and_comes_back(
    card: str, damage: Callable[[Layout, str], None], tmp_path: Path
) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    whole = layout.read_bytes(card)
    damage(layout, card)
    problems = verify(layout, hashes=False).problems
    assert len(problems) == 1 and card in problems[0] and "--resume" in problems[0]
    assert not is_closed(layout, commits(layout))
    finalise(layout)
    assert layout.read_bytes(card) == whole
    assert is_closed(layout, commits(layout)) and verify(layout).problems == []


def flip(layout: Layout, name: str, bit: int) -> None:
    data = bytearray(layout.read_bytes(name))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    layout.write_bytes(name, bytes(data))


@pytest.mark.parametrize(
    "bit", [4321, *(pytest.param(bit, marks=pytest.mark.long) for bit in (0, 99_999_997))]
)
def test_one_flipped_bit_in_any_file_is_found(bit: int, tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    before = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file()
    }
    assert {"dataset.json", "current.json", "README.md", "plan/plan0.parquet"} <= set(before)
    # The files of a store are hashed one by one: all of them are flipped at once, the others alone.
    chunks = [name for name in before if ".zarr/" in name]
    assert len(chunks) > 30
    for names in (chunks, *([name] for name in before if name not in chunks)):
        for name in names:
            flip(layout, name, bit)
        try:
            problems = verify(layout).problems
        except EarmillError as err:
            problems = [str(err)]
        for name in names:
            assert any(name in line for line in problems), (name, problems)
            layout.write_bytes(name, before[name])
    assert verify(layout).problems == []


def test_closing_again_never_approves_what_was_damaged(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    closed = layout.read_bytes("current.json")
    for name in ("commits/00001.json", "dataset.json", "plan/plan0.parquet"):
        whole = layout.read_bytes(name)
        data: Any = whole.replace(b'"info": {', b'"info":  {').replace(b'"name": "s', b'"name": "S')
        layout.write_bytes(name, data if name.endswith("json") else _rewritten(whole))
        with pytest.raises(CommitError, match="changed since the dataset was closed") as caught:
            finalise(layout)
        assert name in str(caught.value)
        layout.write_bytes(name, whole)
    assert layout.read_bytes("current.json") == closed


def _rewritten(plan: bytes) -> bytes:
    """The same rows in other bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetFile(pa.BufferReader(plan)) as file:
        pq.write_table(file.read(), sink, compression="none")
    return sink.getvalue().to_pybytes()


def test_old_snapshots_stay(tmp_path: Path) -> None:
    layout = begun(tmp_path, "b.wav", "unreadable")
    before = contents(layout, "snapshots") | contents(layout, "index")
    commit_anew(layout)
    finalise(layout)
    after = contents(layout, "snapshots") | contents(layout, "index")
    assert len(after) == 4 and before.items() <= after.items()


def test_what_a_driver_keeps_of_commits_tells_a_closed_set_and_skips_what_it_knows(
    tmp_path: Path,
) -> None:
    layout = begun(tmp_path, *BAD_FIRST[0])
    records = commits(layout)
    kept = commits_as(layout, Committed.of)
    assert is_closed(layout, kept)
    for shard, record in records.items():
        assert (kept[shard].rows_ok, kept[shard].rows_bad) == (record.rows_ok, record.rows_bad)
        assert kept[shard].seconds == record.seconds
        assert kept[shard].nbytes == sum(file.bytes for file in record.files)
    # A record that is known already is not read again, whatever has become of it.
    layout.write_bytes("commits/00000.json", b"half a rec")
    assert commits_as(layout, Committed.of, without={"00000"}) == {"00001": kept["00001"]}
    with pytest.raises(CommitError, match="00000"):
        commits_as(layout, Committed.of)
    commit_anew(layout)
    assert not is_closed(layout, commits_as(layout, Committed.of))
