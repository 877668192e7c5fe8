"""Another model's streams beside rows that are there: the same rows, and never another's audio."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import earmill
from earmill import open_features
from earmill.jobs.cli import run as command
from earmill.pipeline.common.errors import CommitError, OutputError, SpecError
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.driver.events import Note
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.operations.update import start_update
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import assert_whole
from tests.pipeline.again_jobs import Killed, module_without_ray  # noqa: F401
from tests.pipeline.changing_corpus import (
    CLIPS,
    Changing,
    Dying,
    corpus_and_output,  # noqa: F401
    fresh,  # noqa: F401
    in_both_formats,
    values_of,
)

MEL = {"name": "mel", "extract": [{"model": "melspectrogram", "fs_hz": 16000}]}
LOW = {"model": "dau1997", "fs_hz": 16000, "params": {"fhigh": 4000}}
AGAIN = {"name": "low", "extract": [LOW]}


def joined(job: Changing, **options: Any) -> dict[str, dict[str, bytes]]:
    ds = open_features(job.out, additions=True, **options)
    return {row.row_id: {k: v.tobytes() for k, v in row.features.items()} for row in ds}


@in_both_formats
def test_rows_have_the_streams_of_both(changing: Changing, tmp_path: Path) -> None:
    before = changing.values()
    end = earmill.add_features(changing.out, MEL)
    assert end.rows_ok == CLIPS and sorted(changing.computed) == changing.names()
    assert changing.values() == before
    # The same as from a job of its own.
    spec = changing.spec(tmp_path / "own").model_dump(mode="json") | {"extract": MEL["extract"]}
    earmill.pipeline.operations.run_job.run_job(earmill.JobSpec.load(spec))
    alone = values_of(tmp_path / "own")
    assert joined(changing) == {row_id: before[row_id] | alone[row_id] for row_id in before}
    assert joined(changing, format="parquet") == joined(changing)
    assert [entry.why for entry in earmill.log(changing.out)] == ["extract", "add-features"]
    assert not earmill.diff(changing.out)
    assert_whole(changing.out)
    assert_whole(changing.out / "additions" / "mel")
    # Snapshots of before have it not, and what is there is not computed again.
    assert joined(changing, snapshot=1) == before
    changing.computed.clear()
    earmill.add_features(changing.out, MEL)
    assert changing.computed == [] and len(earmill.log(changing.out)) == 2


def test_other_audio_of_the_same_size_is_not_added(changing: Changing) -> None:
    name = changing.names()[0]
    nbytes = (changing.corpus / name).stat().st_size
    assert changing.write(name, 78).stat().st_size == nbytes
    with pytest.raises(OutputError, match=f"got other audio in 1 rows .'{name}'.*--update"):
        earmill.add_features(changing.out, MEL)
    assert list(open_features(changing.out, additions=True).streams) == ["modulation"]
    changing.update()
    earmill.add_features(changing.out, MEL)
    both = open_features(changing.out, additions=True)
    assert list(both.streams) == ["modulation", "mel"] and len(both) == CLIPS


def labelled(job: Changing, labels: dict[str, str]) -> JobSpec:
    """A job on clips that a table of Parquet names, with columns of types that JSON lacks."""
    table = pa.table(
        {
            "uri": [*labels],
            "label": pa.array([*labels.values()]),
            "day": pa.array([datetime.date(2026, 1, 2)] * len(labels)),
            "tags": pa.array([["a", "b"]] * len(labels)),
        }
    )
    pq.write_table(table, job.corpus / "rows.parquet")
    spec = job.spec(job.folder / "labelled").model_dump(mode="json")
    return JobSpec.load(
        {**spec, "source": {"kind": "manifest", "uri": str(job.corpus / "rows.parquet")}}
    )


def test_columns_of_all_types_follow_and_are_the_datasets_own(changing: Changing) -> None:
    names, out = changing.names()[:3], changing.folder / "labelled"
    run_job(labelled(changing, dict.fromkeys(names[:2], "dog")))
    earmill.add_features(out, MEL)
    spec = labelled(changing, {names[0]: "cat", names[1]: "dog"})
    start_update(spec)
    run_job(spec, resume=True)
    # No features have changed, so none are left out; labels have, whatever streams are read.
    for streams in (None, ["mel"], ["modulation"]):
        both = open_features(out, additions=True, streams=streams)
        labels = {row.row_id[-len(names[0]) :]: row.extra["label"] for row in both}
        assert labels == {names[0]: "cat", names[1]: "dog"}
        assert both.table["extra_label"].to_pylist() == [*labels.values()]
        assert [[*row.features] for row in both] == [[*both.streams]] * 2
        batch = next(iter(both.iterable(batch_size=2, shuffle=False)))
        assert batch is not None and batch.extra["label"] == [*labels.values()]
    spec = labelled(changing, {names[0]: "cat", names[1]: "dog", names[2]: "dog"})
    start_update(spec)
    run_job(spec, resume=True)
    earmill.add_features(out, MEL)
    rows = list(open_features(out / "additions" / "mel"))
    assert sorted(row.extra["label"] for row in rows) == ["cat", "dog", "dog"]
    for row in rows:
        assert row.extra["day"] == datetime.date(2026, 1, 2) and row.extra["tags"] == ["a", "b"]


def test_a_taken_name_is_led_by_that_of_the_addition(changing: Changing) -> None:
    earmill.add_features(changing.out, AGAIN)
    ds = open_features(changing.out, additions=True)
    assert list(ds.streams) == ["modulation", "low.modulation"]
    assert ds.streams["low.modulation"].name == "low.modulation"
    part = ds.slice(1, 0.1, 0.3)
    whole = ds[1]
    for name in ds.streams:
        first = part.first_frame[name]
        stop = first + len(part.features[name])
        np.testing.assert_array_equal(part.features[name], whole.features[name][first:stop])
    assert ds.table["low.modulation_n_frames"].to_pylist() == [
        len(row.features["low.modulation"]) for row in ds
    ]
    assert int(ds.block_rows().sum()) == len(ds) == CLIPS
    one = open_features(changing.out, additions=True, streams=["low.modulation"])
    assert list(one[0].features) == ["low.modulation"]
    with pytest.raises(ValueError, match="expected streams out of"):
        open_features(changing.out, additions=True, streams=["spikes"])
    batch = next(iter(ds.iterable(seed=1, batch_size=2)))
    assert batch is not None and set(ds.statistics) == set(ds.streams)
    with pytest.raises(KeyError, match="good in 2 sets"):
        ds.by_id("none.wav")


def test_a_damaged_description_of_an_addition_is_a_problem(changing: Changing) -> None:
    earmill.add_features(changing.out, MEL)
    (changing.out / "additions" / "mel" / "dataset.json").write_text("{")
    assert any(line.startswith("additions/mel: ") for line in verify(changing.layout).problems)


@pytest.mark.parametrize("damage", ["data", "byte", "all"])
def test_a_damaged_addition_is_found_and_repaired(
    changing: Changing, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    earmill.add_features(changing.out, MEL)
    now, folder = joined(changing), changing.out / "additions" / "mel"
    assert command(["verify", str(changing.out)]) == 0
    if damage == "byte":
        file = min(path for path in (folder / "data").rglob("*.parquet") if path.is_file())
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        shutil.rmtree(folder if damage == "all" else folder / "data")
    capsys.readouterr()
    assert command(["verify", str(changing.out)]) == 1
    assert "problem: additions/mel: " in " ".join(capsys.readouterr().out.split())
    report = verify(changing.layout)
    assert report.damaged == [] and report.shards == report.shards_planned
    assert report.damaged_additions == ([] if damage == "all" else ["mel"])
    changing.computed.clear()
    earmill.add_features(changing.out, MEL, repair=True)
    assert 0 < len(changing.computed) <= CLIPS - 3 * (damage == "byte")
    assert joined(changing) == now
    assert_whole(changing.out)


def test_after_an_update_it_is_gone_until_it_has_taken_the_change_in(
    changing: Changing, capsys: pytest.CaptureFixture[str]
) -> None:
    earmill.add_features(changing.out, MEL)
    names = changing.names()
    changing.write(names[0], 78, seconds=0.7)  # other audio under a name that both sets have
    (changing.corpus / names[5]).unlink()
    changing.write("new.wav", 77)
    _, seen = changing.update()
    notes = [event.text for event in seen if isinstance(event, Note)]
    assert any("left out: mel; run `earmill add-features" in text for text in notes)
    with pytest.warns(UserWarning, match="left out: mel; run `earmill add-features"):
        assert joined(changing) == changing.values()
    assert command(["inspect", str(changing.out)]) == 0
    assert "added to earlier rows │ mel" in " ".join(capsys.readouterr().out.split())
    assert "log_mel" not in next(iter(changing.values().values()))
    changing.computed.clear()
    earmill.add_features(changing.out, MEL)
    assert sorted(changing.computed) == sorted(["new.wav", names[0]])
    now = joined(changing)
    assert set(now) == set(changing.values())
    assert all(len(streams) == 2 for streams in now.values())
    # No row changes when shards are merged.
    earmill.compact(changing.out, shard_rows=100)
    assert joined(changing) == now
    assert_whole(changing.out)


@in_both_formats
def test_a_kill_leaves_the_dataset_as_it_was_and_the_command_goes_on(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = changing.values()
    Dying.patch(monkeypatch)
    for left in (3, 12, 20):
        Dying.left = left
        with pytest.raises(Killed):
            earmill.add_features(changing.out, MEL)
        Dying.left = 10_000
        assert changing.values() == before == joined(changing)
        assert verify(changing.layout).problems == []
    earmill.add_features(changing.out, MEL)
    assert all(len(streams) == 2 for streams in joined(changing).values())
    assert_whole(changing.out / "additions" / "mel")


def test_mistakes_are_one_line(
    changing: Changing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mel.yaml"
    file.write_text(yaml.safe_dump(MEL))
    assert command(["add-features", str(changing.corpus), str(file)]) == 2
    assert "no dataset.json" in capsys.readouterr().err
    for wrong in ({"name": "a/b", **{"extract": MEL["extract"]}}, {"extract": []}, {"name": "x"}):
        with pytest.raises(SpecError):
            earmill.add_features(changing.out, wrong)
    assert command(["add-features", str(changing.out), str(file)]) == 0
    other = MEL | {"extract": [{"model": "mfcc", "fs_hz": 16000}]}
    with pytest.raises(OutputError, match="another spec"):
        earmill.add_features(changing.out, other)
    with pytest.raises(ValueError, match="one place"):
        open_features([changing.out], additions=True)  # type: ignore[call-overload]
    layout = Layout.open(str(changing.out / "additions" / "mel"))
    (name,) = layout.list("snapshots")
    layout.write_bytes(name, b"{}")
    with pytest.raises((CommitError, OutputError)):
        open_features(changing.out, additions=True)
