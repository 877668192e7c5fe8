"""A source that changed: only rows that differ are computed, in a new snapshot, kill it or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import earmill
from earmill import open_features
from earmill.jobs.cli import run as command
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.driver import events
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.operations.update import start_update
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import assert_whole, committed_files
from tests.pipeline.again_jobs import Killed, module_without_ray  # noqa: F401
from tests.pipeline.changing_corpus import (
    Changing,
    Dying,
    corpus_and_output,  # noqa: F401
    fresh,  # noqa: F401
    in_both_formats,
    values_of,
)

ALL_BAD = ["run.max_bad_fraction=1"]


def changed_names(job: Changing) -> tuple[str, str, str]:
    """Return the names of a row to add, of a row to change and of a row to remove."""
    names = job.names()
    return "new.wav", names[2], names[5]


@in_both_formats
def test_only_rows_that_differ_are_computed_and_the_rest_is_as_it_was(
    changing: Changing, tmp_path: Path
) -> None:
    before, old_files = changing.values(), committed_files(changing.out)
    added, other, gone = changed_names(changing)
    changing.write(added, 77)
    changing.write(other, 78, seconds=0.7)
    (changing.corpus / gone).unlink()
    end, _ = changing.update()
    assert (end.status, end.exit_code, end.rows_ok, end.rows_bad) == ("done", 0, 6, 0)
    assert sorted(changing.computed) == sorted([added, other])
    assert_whole(changing.out)
    # The same as extracted anew, and the rows that are the same are the same bit for bit.
    changing.extract(tmp_path / "anew")
    now = changing.values()
    assert now == values_of(tmp_path / "anew") == changing.values(format="parquet")
    assert all(now[row_id] == before[row_id] for row_id in before if row_id not in (other, gone))
    assert now[other] != before[other] and gone not in now
    # The shard without such a row is the one of before, not a copy.
    assert {name for name in old_files if "00000" in name} <= set(committed_files(changing.out))
    ds = open_features(changing.out)
    for name, found in earmill.compute_statistics(ds).items():
        assert found.stored() == ds.moments[name]


@in_both_formats
def test_the_snapshot_of_before_stays_readable_and_the_log_says_what_changed(
    changing: Changing,
) -> None:
    before = changing.values()
    added, other, gone = changed_names(changing)
    changing.write(added, 77)
    changing.write(other, 78, seconds=0.7)
    (changing.corpus / gone).unlink()
    changing.update()
    assert changing.values(snapshot=1) == changing.values(snapshot="previous") == before
    assert changing.values(snapshot=1, format="parquet") == before
    first, second = earmill.log(changing.out)
    assert (first.why, first.rows_ok, first.added) == ("extract", 6, 6)
    assert (second.why, second.rows_ok) == ("update", 6)
    assert (second.added, second.changed, second.removed) == (1, 1, 1)
    found = earmill.diff(changing.out)
    assert (found.added, found.changed, found.removed) == ((added,), (other,), (gone,))
    # And on and on: what goes comes back, under new shards.
    shutil.copy(changing.corpus / added, changing.corpus / "again.wav")
    (changing.corpus / added).unlink()
    changing.update()
    assert set(changing.values()) == {*before, "again.wav"} - {gone}
    assert changing.values(snapshot=1) == before
    assert [entry.number for entry in earmill.log(changing.out)] == [1, 2, 3]
    assert_whole(changing.out)


def test_a_file_that_was_moved_copied_or_touched_is_not_computed_again(changing: Changing) -> None:
    before, names = changing.values(), changing.names()
    for copy in ("one", "two"):
        shutil.copy(changing.corpus / names[1], changing.corpus / f"{copy}-{names[1]}")
    changing.touch(names[2])
    # Of the same size, but with other audio.
    data = bytearray((changing.corpus / names[0]).read_bytes())
    data[-9] ^= 1
    (changing.corpus / f"like-{names[0]}").write_bytes(data)
    (changing.corpus / names[0]).rename(changing.corpus / f"moved-{names[0]}")
    changing.update()
    assert sorted(changing.computed) == [f"like-{names[0]}"]
    now = changing.values()
    assert now[f"moved-{names[0]}"] == before[names[0]]
    assert now[f"one-{names[1]}"] == now[f"two-{names[1]}"] == now[names[1]] == before[names[1]]
    ds = open_features(changing.out)
    moved = ds.provenance(ds.index_of(f"moved-{names[0]}"))
    assert moved["uri"] == str(changing.corpus / f"moved-{names[0]}")
    assert ds.provenance(ds.index_of(names[2]))["mtime"] == 1e9
    assert_whole(changing.out)
    # All is known now.
    assert changing.update()[0].status == "nothing_to_do"


@pytest.mark.parametrize("what", ["a row is copied", "a row is removed"])
def test_an_update_that_computes_nothing_says_that_it_is_done(
    what: str, changing: Changing
) -> None:
    name = changing.names()[0]
    if what == "a row is copied":
        shutil.copy(changing.corpus / name, changing.corpus / f"copy-{name}")
    else:
        (changing.corpus / name).unlink()
    end, _ = changing.update()
    rows = len(changing.names())
    assert (end.status, end.exit_code, end.rows_ok, changing.computed) == ("done", 0, rows, [])
    assert end.message.startswith(f"done: {rows} rows ok, 0 quarantined, no audio had to be")
    assert "nothing to do" in changing.update()[0].message


def test_without_update_the_command_says_what_has_changed(
    changing: Changing, capsys: pytest.CaptureFixture[str]
) -> None:
    added, _, gone = changed_names(changing)
    changing.write(added, 77)
    (changing.corpus / gone).unlink()
    with pytest.raises(OutputError, match=rf"--update .*1 added \('{added}'\), 1 removed") as said:
        changing.extract()
    assert "\n" not in str(said.value)
    seen: list[events.Event] = []
    end = changing.extract(resume=True, sink=seen.append)
    assert end.status == "nothing_to_do"
    (event,) = [event for event in seen if isinstance(event, events.SourceChanged)]
    assert "--update takes them in" in event.text
    assert len(earmill.log(changing.out)) == 1
    file = changing.folder / "job.yaml"
    assert command(["extract", str(file), "--update", "--resume", "--repair"]) == 2
    assert "two runs" in capsys.readouterr().err


def test_a_retry_takes_the_files_of_its_rows_as_they_are_now(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, (first, second, third, *_) = changing.values(), changing.names()
    whole = {name: (changing.corpus / name).read_bytes() for name in (first, second, third)}
    for name in whole:
        (changing.corpus / name).write_bytes(b"not audio, of another size")
    end, _ = changing.update()
    assert (end.rows_ok, end.rows_bad) == (3, 3)
    for name in (first, third):
        (changing.corpus / name).write_bytes(whole[name])
    changing.write("new.wav", 8)
    changing.computed.clear()
    again = earmill.retry(changing.out, uri=f"*/{first}", overrides=ALL_BAD)
    assert again is not None and (again.rows_ok, again.rows_bad) == (4, 2)
    assert changing.computed == [first]  # neither the third, which was not meant, nor what is new
    assert changing.values()[first] == before[first]
    assert [entry.why for entry in earmill.log(changing.out)] == ["extract", "update", "retry"]
    assert earmill.diff(changing.out).changed == (first,)

    def killed(*_: object, **__: object) -> None:
        raise Killed

    # Killed between plan and work, the same command goes on; rows as they were are tried as well.
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("earmill.pipeline.operations.run_job.run_job", killed)
        earmill.retry(changing.out, overrides=ALL_BAD)
    assert len(earmill.log(changing.out)) == 3
    again = earmill.retry(changing.out, overrides=ALL_BAD)
    assert again is not None and (again.rows_ok, again.rows_bad) == (5, 1)
    assert set(changing.values()) == {*before} - {second}
    assert_whole(changing.out)


def test_rows_that_only_went_need_no_worker(changing: Changing) -> None:
    names = changing.names()
    for name in names[:3]:
        (changing.corpus / name).unlink()
    end, _ = changing.update()
    assert changing.computed == [] and set(changing.values()) == set(names[3:])
    assert end.rows_ok == 3
    assert_whole(changing.out)
    # Rows in quarantine come along as they are, and a source without rows is no change to take in.
    (changing.corpus / names[4]).write_bytes(b"not audio")
    end, _ = changing.update()
    assert (end.rows_ok, end.rows_bad) == (2, 1)
    (changing.corpus / names[5]).unlink()
    end, _ = changing.update()
    assert (end.rows_ok, end.rows_bad, changing.computed) == (1, 1, [])
    assert open_features(changing.out).quarantine["row_id"].to_pylist() == [names[4]]
    for path in changing.corpus.iterdir():
        path.unlink()
    with pytest.raises(earmill.SourceError, match="no audio files"):
        changing.update()
    assert_whole(changing.out)


@in_both_formats
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_an_update_that_is_killed_anywhere_ends_as_if_it_had_not_been(
    step: int, changing: Changing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, other, gone = changed_names(changing)
    changing.write(added, 77)
    changing.write(other, 78, seconds=0.7)
    (changing.corpus / gone).unlink()
    shutil.copytree(changing.out, tmp_path / "before")
    old, rows = changing.values(), len(changing.values())
    changing.update()
    whole, now = committed_files(changing.out), changing.values()
    Dying.patch(monkeypatch)
    kills = 0
    while True:
        shutil.rmtree(changing.out)
        shutil.copytree(tmp_path / "before", changing.out)
        Dying.left = step * kills
        try:
            changing.update()
            break
        except Killed:
            kills += 1
        Dying.left = 10_000
        assert changing.values() in (old, now) and changing.values(snapshot=1) == old
        end, _ = changing.update()
        assert end.exit_code == 0 and end.rows_ok == rows
        assert committed_files(changing.out) == whole and changing.values() == now
        assert [entry.why for entry in earmill.log(changing.out)] == ["extract", "update"]
        assert verify(changing.layout).problems == []
    assert kills > 3


def manifest_job(job: Changing, cells: dict[str, object], out: Path) -> JobSpec:
    """The first clips by a manifest, with a column that is carried through."""
    lines = [{"uri": str(job.corpus / name), "take": take} for name, take in cells.items()]
    file = job.folder / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = job.spec(out).model_dump(mode="json")
    source = {"kind": "manifest", "uri": str(file), "allow": [str(job.corpus)]}
    return JobSpec.load({**spec, "source": source})


def test_columns_that_are_carried_through_are_taken_in_without_computing(
    changing: Changing, tmp_path: Path
) -> None:
    names, out = changing.names()[:3], tmp_path / "out"
    run_job(manifest_job(changing, {names[0]: 1, names[1]: 2, names[2]: 3}, out))
    before, stored = values_of(out), read_dataset(Layout.open(str(out)))
    spec = manifest_job(changing, {names[0]: 1, names[1]: 2.5, names[2]: 3}, out)
    changing.computed.clear()
    start_update(spec)
    run_job(spec, resume=True)
    assert changing.computed == [] and values_of(out) == before
    takes = open_features(out).table["extra_take"].to_pylist()
    assert sorted(takes) == [1, 2.5, 3] and stored is not None
    assert sorted(open_features(out, snapshot=1).table["extra_take"].to_pylist()) == [1, 2, 3]
    assert_whole(out)
    spec = manifest_job(changing, {names[0]: "one", names[1]: 2.5, names[2]: 3}, out)
    with pytest.raises(OutputError, match="column 'take' of the source was double"):
        start_update(spec)
    assert_whole(out)
    spec = manifest_job(changing, {names[0]: 2**53 + 1, names[1]: 2, names[2]: 3}, out)
    with pytest.raises(OutputError, match="double would round 9007199254740993 of row"):
        start_update(spec)
    assert_whole(out)
