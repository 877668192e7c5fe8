"""A dataset on the hub: one commit of exactly its snapshot, resumed, never over another's work."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import earmill
from earmill.jobs.cli import run
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import read_current
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.event_data import write_spikes
from tests.pipeline.hub.pushing import ID, pushed, puts
from tests.pipeline.hub.stand_in import TOKEN, HubStandIn, said
from tests.pipeline.outputs import (
    make_row,
    publish,
    small_dataset,
)

# How huggingface_hub sends large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def test_one_commit_holds_the_snapshot_and_nothing_else(
    stand_in: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = small_dataset(tmp_path / "features")  # in both formats
    finalise(layout)
    layout.write_bytes("data/00009-deadbeef.parquet", b"of a crashed attempt")
    layout.write_bytes("driver.json", b"{}")
    assert pushed(layout, "--private", "--json") == 0
    *_, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    repo = stand_in.repos[ID]
    assert repo.private is True and repo.messages == [
        "initial",
        "speech: snapshot 1 (extract), 3 rows",
    ]
    copy = stand_in.write(ID, tmp_path / "copy")
    (copy / ".gitattributes").unlink()
    assert last["event"] == "pushed" and last["commit"] == repo.branches["main"]
    assert last["files"] == last["files_total"] == sum(p.is_file() for p in copy.rglob("*"))
    assert (
        not (copy / "data/00009-deadbeef.parquet").exists() and not (copy / "driver.json").exists()
    )
    report = verify(Layout.open(copy))
    assert report.problems == [] and report.orphans == [] and report.rows_ok == 3
    theirs, ours = earmill.open_features(copy), earmill.open_features(layout.root)
    for one, other in zip(theirs, ours, strict=True):
        assert one.row_id == other.row_id
        np.testing.assert_array_equal(one.features["modulation"], other.features["modulation"])
    assert set(puts(stand_in)) == {1}


def test_the_pushed_parquet_loads_as_the_viewer_loads_it(
    stand_in: HubStandIn, tmp_path: Path
) -> None:
    from datasets import load_dataset

    layout = write_spikes(tmp_path / "features", finalised=True).layout
    assert pushed(layout) == 0
    copy = stand_in.write(ID, tmp_path / "copy")
    loaded = load_dataset(str(copy), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["train"]
    rows, ours = loaded["train"], earmill.open_features(layout.root)
    assert rows.features["row_id"].dtype == "string"
    assert rows.features["modulation"].dtype == "binary"
    assert rows.features["seconds"].dtype == "float64"
    for row in ours:
        found = rows[row.index]
        assert (found["row_id"], found["seconds"]) == (row.row_id, row.seconds)
        frames = np.frombuffer(found["modulation"], "<f2").reshape(-1, 7)
        np.testing.assert_array_equal(frames, row.features["modulation"])


def test_again_sends_nothing_and_a_new_snapshot_only_what_is_new(
    stand_in: HubStandIn, layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pushed(layout) == 0
    commits = len(stand_in.repos[ID].trees)
    before = dict(stand_in.puts)
    capsys.readouterr()
    assert pushed(layout) == 0
    assert "nothing to push" in capsys.readouterr().out
    assert len(stand_in.repos[ID].trees) == commits and stand_in.puts == before
    rows = [make_row("a.wav"), make_row("b.wav", 7), make_row("bad.wav", 9)]
    assert publish(layout, "00000", "000000aa", rows, generation=1, formats=("parquet",))
    finalise(layout)
    assert pushed(layout, "--message", "bad.wav mended") == 0
    assert stand_in.repos[ID].messages[-1] == "bad.wav mended"
    new = stand_in.puts.keys() - before.keys()
    assert new and set(puts(stand_in)) == {1}
    copy = stand_in.write(ID, tmp_path / "copy")
    # Those of the replaced commit went, those that stay were not sent.
    assert (
        not list((copy / "data").glob("00000-00000000*")) and len(earmill.open_features(copy)) == 4
    )
    assert verify(Layout.open(copy)).problems == []


@pytest.mark.parametrize("private", [None, "--public"])
def test_a_branch_and_visibility(stand_in: HubStandIn, layout: Layout, private: str | None) -> None:
    assert pushed(layout, "--revision", "v2", *([private] if private else [])) == 0
    repo = stand_in.repos[ID]
    assert repo.private is (None if private is None else False)
    assert set(stand_in.tree(ID)) == {".gitattributes"}
    assert "current.json" in stand_in.tree(ID, "v2")


def test_a_dry_run_asks_the_hub_nothing(
    stand_in: HubStandIn, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pushed(layout, "--dry-run", "--json") == 0
    (told,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (told["rows"], told["rows_bad"], told["licenses"]) == (3, 2, {})
    assert pushed(layout, "--dry-run") == 0
    assert "licence of the features: not stated" in capsys.readouterr().out
    assert stand_in.seen == []
    assert pushed(layout) == 0
    capsys.readouterr()
    tree = {k: v for k, v in stand_in.tree(ID).items() if k != ".gitattributes"}
    assert (told["files"], told["bytes"]) == (len(tree), sum(map(len, tree.values())))


def test_a_repository_of_something_else_is_refused(
    stand_in: HubStandIn, layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pushed(layout) == 0
    other = write_spikes(tmp_path / "other", finalised=True).layout
    assert pushed(other) == 1
    assert "found the features of another job; take another id" in capsys.readouterr().err
    assert pushed(other, "--replace") == 0
    copy = stand_in.write(ID, tmp_path / "copy")
    assert verify(Layout.open(copy)).problems == [] and len(earmill.open_features(copy)) == 5
    stand_in.repos[ID].commit("main", {"train.csv": ("regular", b"1")}, "else")
    assert pushed(layout) == 1
    assert "found train.csv" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["unfinished", "missing", "shorter", "changed"])
def test_what_verify_refuses_is_not_pushed(
    damage: str, stand_in: HubStandIn, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "data/00001-00000001.parquet"
    if damage == "unfinished":
        layout.delete("commits/00001.json")
    elif damage == "missing":
        layout.delete(name)
    elif damage == "shorter":
        layout.write_bytes(name, layout.read_bytes(name)[:-1])
    else:
        data = bytearray(layout.read_bytes(name))
        data[100] ^= 1
        layout.write_bytes(name, bytes(data))
        assert pushed(layout, "--verify") == 2 and stand_in.seen == []
        assert "content changed" in capsys.readouterr().err
        # Without it the file is hashed on its way: nothing is committed.
        assert pushed(layout) == 1
        assert set(stand_in.tree(ID)) == {".gitattributes"}
        assert "content changed" in capsys.readouterr().err
        return
    assert pushed(layout) == 2 and stand_in.seen == []
    assert "expected a finished dataset that `earmill verify`" in capsys.readouterr().err


def test_features_beside_the_rows_go_along_and_are_looked_at(
    stand_in: HubStandIn,
    layout: Layout,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(made, tmp_path / "features/additions/mel")
    beside = Layout.open(tmp_path / "features/additions/mel")
    current = read_current(beside)
    assert current is not None
    named = replace(current.snapshot, path=f"additions/mel/{current.snapshot.path}")
    finalise(layout, add={"mel": named})
    lost = beside.read_bytes("data/00001-00000001.parquet")
    beside.delete("data/00001-00000001.parquet")
    assert pushed(layout) == 2 and "additions/mel" in capsys.readouterr().err
    beside.write_bytes("data/00001-00000001.parquet", lost)
    assert pushed(layout) == 0
    copy = stand_in.write(ID, tmp_path / "copy")
    joined = earmill.open_features(copy, additions=True)
    assert set(joined.streams) == {"modulation", "envelope", "mel.modulation", "mel.envelope"}
    assert len(joined) == 3 and set(puts(stand_in)) == {1}


def test_a_card_that_the_hub_does_not_take_is_said_in_its_words(
    stand_in: HubStandIn, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.before = lambda request: (
        said(400, "bad", errors=[{"message": "license must be one of ..."}])
        if request.path == "/api/validate-yaml"
        else None
    )
    assert pushed(layout) == 1
    assert "license must be one of ..." in capsys.readouterr().err
    assert set(stand_in.tree(ID)) == {".gitattributes"}


@pytest.mark.parametrize("hub_id", ["speech", "me/speech/x", "me/spe ech", "", "-a/b"])
def test_an_id_that_is_none_is_said_before_anything_is_asked(
    hub_id: str, stand_in: HubStandIn, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", layout.url(), "--", hub_id]) == 2
    assert "user/name" in capsys.readouterr().err and stand_in.seen == []


def test_tokens_are_asked_for_and_shown_nowhere(
    stand_in: HubStandIn,
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert pushed(layout) == 1 and stand_in.seen == []
    assert "set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.undo()


def test_a_wrong_token_is_refused_and_no_token_is_in_any_message_or_file(
    stand_in: HubStandIn,
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_WRONGtoken0123456789")
    assert pushed(layout) == 1
    told = capsys.readouterr()
    assert "the hub refuses (401)" in told.err and "WRONG" not in told.err + told.out
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pushed(layout, "--json") == 0
    told = capsys.readouterr()
    assert TOKEN not in told.err + told.out
    assert all(TOKEN.encode() not in content for content in stand_in.tree(ID).values())
    assert not any(TOKEN in line for line in stand_in.seen)
