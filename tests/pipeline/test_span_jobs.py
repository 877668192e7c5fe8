"""Jobs whose recordings are in spans: killed and gone on with, verified, mended, changed, read.

No Ray: shards run one after another in this process, by the real books and the real runner.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import earmill
from earmill import Recordings, open_features
from earmill.pipeline.dataset.commit_record import commits, committed_shards
from earmill.pipeline.dataset.revision import compact
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.operations.retry import RowFilter, damaged
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.operations.update import start_retry, start_update
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.sources import Item
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.row_pipeline import RowProcessor
from tests.chaos.jobs import assert_whole, committed_files
from tests.pipeline import audio_factory
from tests.pipeline.again_jobs import Killed, module_without_ray, run_here  # noqa: F401
from tests.pipeline.only_plan import only_plan
from tests.pipeline.span_data import (
    SECONDS,
    SPAN_S,
    SPANS,
    assert_equal_values,
    assert_same,
    ids,
    spec_of,
)


@pytest.fixture(name="made", scope="module")
def recording_and_outputs(tmp_path_factory: pytest.TempPathFactory, no_ray: None) -> Path:
    """A recording beside a short clip; its features, in spans and whole."""
    folder = tmp_path_factory.mktemp("spans")
    (folder / "in").mkdir()
    (folder / "in" / "day.flac").write_bytes(audio_factory.clip("flac", SECONDS))
    (folder / "in" / "short.wav").write_bytes(audio_factory.clip("wav", 1.5, seed=1))
    for out, changes in (("spans", {}), ("whole", {"audio__spans": "null"})):
        end = run_job(spec_of(folder / "in", folder / out, **changes))
        assert (end.exit_code, end.rows_bad) == (0, 0)
    return folder


@pytest.fixture(name="out")
def spans_of_a_copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "spans", tmp_path / "out"))


@pytest.fixture(name="computed")
def rows_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    process = RowProcessor.process

    def spied(rows: RowProcessor, items: list[Item], **options: Any) -> Any:
        found.extend(item.row_id for item in items)
        return process(rows, items, **options)

    monkeypatch.setattr(RowProcessor, "process", spied)
    return found


def test_each_span_is_a_row_and_a_shard(made: Path) -> None:
    ds = open_features(made / "spans")
    rows = ds.table.to_pylist()
    assert [row["row_id"] for row in rows] == [*ids(), "short.wav"]
    # The last one is shorter, and has the clip beside it.
    assert [row["shard"] for row in rows] == ["00000", "00001", "00002", *["00003"] * 2]
    assert_whole(made / "spans")
    assert ds.dataset.provenance["spans"] == {"seconds": SPAN_S, "warm_up_s": 12}
    assert "spans" not in open_features(made / "whole").dataset.provenance
    said = ds.provenance(1)
    assert (said["start_s"], said["end_s"], said["frames"]) == (13.0, 26.0, 13 * 16000)


@pytest.mark.parametrize("kill_after", [pytest.param(0, marks=pytest.mark.long), 2])
def test_killed_and_gone_on_with_it_has_the_same_bytes(
    made: Path, tmp_path: Path, go: Any, kill_after: int
) -> None:
    spec = spec_of(made / "in", tmp_path / "out")
    with pytest.raises(Killed):
        go(spec, kill_after=kill_after)
    assert len(committed_shards(Layout.open(str(tmp_path / "out")))) == kill_after
    end, _ = go(spec)
    assert (end.status, end.rows_ok) == ("done", SPANS + 1)
    assert committed_files(tmp_path / "out") == committed_files(made / "spans")
    assert_equal_values(tmp_path / "out", made / "spans")
    assert_whole(tmp_path / "out")


def test_a_span_whose_file_is_lost_is_made_again_alone(
    out: Path, made: Path, go: Any, computed: list[str]
) -> None:
    layout = Layout.open(str(out))
    file = commits(layout)["00002"].path("parquet")
    (out / str(file)).unlink()
    assert verify(layout).damaged == ["00002"]
    end, _ = go(spec_of(made / "in", out), again=damaged)
    assert (end.status, computed) == ("done", [ids()[2]])
    assert_equal_values(out, made / "spans")
    assert_whole(out)


def test_a_span_in_quarantine_is_tried_again_alone(
    made: Path, tmp_path: Path, go: Any, computed: list[str]
) -> None:
    """The recording could not be decoded in its middle; then it is restored, of the same size."""
    shutil.copytree(made / "in", tmp_path / "in")
    path, out = tmp_path / "in" / "day.flac", tmp_path / "out"
    whole, when = path.read_bytes(), path.stat().st_mtime_ns
    at = len(whole) // 2
    path.write_bytes(whole[:at] + bytes(4000) + whole[at + 4000 :])
    os.utime(path, ns=(when, when))
    spec = spec_of(tmp_path / "in", out, output__formats="[parquet]")
    end, _ = go(spec)
    ds = open_features(out)
    bad = ds.quarantine["row_id"].to_pylist()
    # The span that has it, and those that hear it before theirs.
    assert (end.rows_bad, bad) == (len(bad), sorted(bad)) and 0 < len(bad) < SPANS
    found = Recordings(ds)
    assert found.row_ids == ["short.wav"]
    assert [ids()[k - 1] for k in found.incomplete["day.flac"]] == bad
    with pytest.raises(KeyError, match="expected all spans"):
        found.by_id("day.flac")
    path.write_bytes(whole)
    os.utime(path, ns=(when, when))
    computed.clear()
    end, _ = go(spec, again=RowFilter().choose)
    assert (end.rows_bad, computed) == (0, bad)
    assert_equal_values(out, made / "spans")


@pytest.mark.parametrize("kind", ["wav", pytest.param("flac", marks=pytest.mark.long)])
def test_no_recording_is_made_of_two_files(
    tmp_path: Path, go: Any, computed: list[str], kind: str
) -> None:
    """Another of the same length, as WAV also of the same size, took its place between two spans;
    it is planned anew, whole."""
    path = tmp_path / "in" / f"day.{kind}"
    path.parent.mkdir()
    path.write_bytes(audio_factory.clip(kind, SECONDS))
    (path.parent / "short.wav").write_bytes(audio_factory.clip("wav", 1.5, seed=1))
    spec = spec_of(tmp_path / "in", tmp_path / "out", output__formats="[parquet]")
    with pytest.raises(Killed):
        go(spec, resume=False, kill_after=2)
    size = path.stat().st_size
    path.write_bytes(audio_factory.clip(kind, SECONDS, seed=7))
    assert (path.stat().st_size == size) is (kind == "wav")
    end, _ = go(spec)
    assert end.rows_bad == SPANS - 2
    (said,) = {row["message"] for row in open_features(tmp_path / "out").quarantine.to_pylist()}
    assert "changed since it was planned: expected" in said
    computed.clear()
    start_retry(spec, RowFilter())
    end, _ = go(spec)
    assert (end.rows_bad, computed) == (0, ids(path.name))
    assert Recordings(open_features(tmp_path / "out")).row_ids == ["short.wav", path.name]


def test_what_is_computed_again_is_equal_bit_for_bit(made: Path, no_ray: None) -> None:
    report = earmill.verify_deep(made / "spans", SPANS + 1)
    assert (report.ok, report.equal, report.problems) == (True, SPANS + 1, ())


def test_small_shards_are_merged(out: Path, made: Path, no_ray: None) -> None:
    compact(Layout.open(str(out)), shard_seconds=600.0)
    assert_whole(out)
    assert {row["shard"] for row in open_features(out).table.to_pylist()} == {"00004"}
    assert_equal_values(out, made / "spans")


@pytest.mark.long
def test_an_update_computes_what_is_new_and_copies_what_moved(
    made: Path, tmp_path: Path, no_ray: None, computed: list[str]
) -> None:
    corpus, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(made / "in", corpus)
    spec = spec_of(corpus, out)
    run_job(spec)
    computed.clear()
    start_update(spec)
    assert run_job(spec, resume=True).rows_ok == SPANS + 1 and computed == []
    # Told by their bytes and the span, and by what it is a part of.
    (corpus / "day.flac").rename(corpus / "night.flac")
    start_update(spec)
    end = run_job(spec, resume=True)
    assert (end.rows_ok, computed) == (SPANS + 1, [])
    (corpus / "more.flac").write_bytes(audio_factory.clip("flac", 27.0, seed=9))
    start_update(spec)
    end = run_job(spec, resume=True)
    assert (end.rows_ok, computed) == (SPANS + 3, ["more.flac#span1of2", "more.flac#span2of2"])
    moved, before = Recordings(open_features(out)), Recordings(open_features(made / "spans"))
    for name, values in before.by_id("day.flac").features.items():
        assert_same(moved.by_id("night.flac").features[name], values)
    assert_whole(out)


@pytest.mark.long
def test_a_row_with_the_ends_of_a_span_is_no_copy_of_it(
    made: Path, tmp_path: Path, no_ray: None, computed: list[str]
) -> None:
    """It begins cold."""
    table, out = tmp_path / "rows.csv", tmp_path / "out"
    shutil.copy(made / "in" / "day.flac", tmp_path)
    table.write_text("uri,id,start,end\nday.flac,day,,\n")
    spec = spec_of(tmp_path, out, source=f"{{kind: manifest, uri: {table}}}")
    run_job(spec)
    computed.clear()
    table.write_text("uri,id,start,end\nday.flac,day,,\nday.flac,cold,13,26\n")
    start_update(spec)
    run_job(spec, resume=True)
    assert computed == ["cold"]
    ds = open_features(out)
    cold, warm = (ds.by_id(name).features["adaptation"] for name in ("cold", ids("day")[1]))
    assert cold.shape == warm.shape and np.abs(cold - warm).max() > 1.0


def test_another_model_beside_them_warms_up_as_it_needs(out: Path, no_ray: None) -> None:
    job = {
        "name": "mel",
        "extract": [{"model": "melspectrogram", "fs_hz": 16000, "params": {"n_fft": 512}}],
    }
    earmill.add_features(out, job)
    found = Recordings(open_features(out, additions=True)).by_id("day.flac")
    assert set(found.features) == {"adaptation", "spikes", "mel"}
    assert len(found.features["mel"]) == len(found.features["adaptation"]) == 5037
    with pytest.raises(earmill.SpecError, match="got king2019"):
        earmill.add_features(out, {"extract": [{"model": "king2019", "fs_hz": 16000}]})
    with pytest.raises(earmill.SpecError, match="expected 36 or more"):
        earmill.add_features(out, {"extract": [{"model": "glasberg2002"}]})


# -- read as one --------------------------------------------------------------------------------


@pytest.fixture(params=["zarr", "parquet"])
def both(made: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Recordings, Any]]:
    parts = open_features(made / "spans", format=request.param)
    yield Recordings(parts), open_features(made / "whole", format=request.param)


def test_a_recording_reads_as_the_row_it_would_have_been(both: tuple[Recordings, Any]) -> None:
    found, whole = both
    assert found.row_ids == ["day.flac", "short.wav"] and len(found) == 2
    assert found.incomplete == {} and found.streams == whole.streams
    for number, row in enumerate(found):
        wanted = whole.by_id(row.row_id)
        assert (row.index, row.row_id, row.extra) == (number, wanted.row_id, wanted.extra)
        assert found.seconds(number) == row.seconds == pytest.approx(wanted.seconds, abs=1e-9)
        assert row.first_frame == wanted.first_frame
        for name, values in wanted.features.items():
            assert_same(row.features[name], values, near=2e-7)
    assert found[-1].row_id == "short.wav"
    assert repr(found).startswith("Recordings(Features(")


@pytest.mark.parametrize(
    ("start_s", "stop_s"),
    [(0.0, 1.0), (12.5, 13.0), (13.0, 14.0), (12.995, 13.005), (5.0, 47.03), (48.0, None)],
)
def test_stretches_of_a_recording(
    both: tuple[Recordings, Any], start_s: float, stop_s: float | None
) -> None:
    found, whole = both
    number = found.index_of("day.flac")
    row = found.slice(number, start_s, stop_s)
    wanted = whole.slice(whole.index_of("day.flac"), start_s, stop_s)
    assert row.first_frame == wanted.first_frame and row.row_id == "day.flac"
    assert row.start_s == wanted.start_s == start_s
    assert row.seconds == pytest.approx(wanted.seconds)
    for name, values in wanted.features.items():
        assert_same(row.features[name], values, near=2e-7)


def test_a_recording_without_any_good_span_is_incomplete(
    made: Path, tmp_path: Path, no_ray: None
) -> None:
    """Its file goes away between planning and working, while others can be read."""
    shutil.copytree(made / "in", tmp_path / "in")
    shutil.copy(made / "in" / "day.flac", tmp_path / "in" / "night.flac")
    spec = spec_of(tmp_path / "in", tmp_path / "out", output__formats="[parquet]")
    plan = make_plan(planned_source(spec), spec)
    (tmp_path / "in" / "night.flac").write_bytes(b"no audio")
    assert run_job(spec, plan=plan).rows_bad == SPANS
    ds = open_features(tmp_path / "out")
    found = Recordings(ds)
    assert found.row_ids == ["day.flac", "short.wav"]
    assert found.incomplete == {"night.flac": [1, 2, 3, 4]}
    with pytest.raises(KeyError, match="got all but 1, 2, 3, 4: they are in"):
        found.by_id("night.flac")
    # Beside a set that has it whole, it is that one's.
    both = Recordings(open_features([tmp_path / "out", made / "spans"]))
    assert both.row_ids == ["day.flac", "short.wav"] * 2
    assert both.incomplete == {"night.flac": [1, 2, 3, 4]}


def test_what_is_not_there_is_said(made: Path) -> None:
    found = Recordings(open_features(made / "spans"))
    with pytest.raises(KeyError, match="no recording 'night'"):
        found.by_id("night")
    with pytest.raises(TypeError, match="use by_id"):
        found["day.flac"]  # type: ignore[index]
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"recording {index} of 2"):
            found[index]
    for start_s, stop_s in ((-1.0, 2.0), (70.0, None), (3.0, 3.0)):
        with pytest.raises(ValueError, match="inside the recording of 50"):
            found.slice(0, start_s, stop_s)


def test_recordings_of_several_sets_stay_apart(made: Path) -> None:
    """Called alike, in spans in one and whole in the other; none is lost, none is joined."""
    both = Recordings(open_features([made / "spans", made / "whole"]))
    assert both.row_ids == ["day.flac", "short.wav"] * 2
    one, two = (both[number].features["adaptation"] for number in (0, 2))
    assert_same(one, two, near=2e-7)
    assert (both[2].index, both[2].set, both.seconds(0)) == (2, 1, both.seconds(2))
    with pytest.raises(KeyError, match=r"got 2, at \[0, 2\]"):
        both.by_id("day.flac")
    with pytest.raises(TypeError, match="ids are text"):
        both.by_id(0)  # type: ignore[arg-type]


def test_rows_of_a_job_without_spans_are_not_joined_by_their_names(
    tmp_path: Path, no_ray: None
) -> None:
    (tmp_path / "a.wav").write_bytes(audio_factory.clip("wav", 0.5))
    (tmp_path / "b.wav").write_bytes(audio_factory.clip("wav", 0.4, seed=1))
    names = ["take#span1of2", "take#span2of2", "take#span3of9"]
    table = tmp_path / "rows.csv"
    uris = ("a.wav", "b.wav", "b.wav")
    lines = [f"{uri},{name}\n" for uri, name in zip(uris, names, strict=True)]
    table.write_text("".join(["uri,id\n", *lines]))
    source = f"{{kind: manifest, uri: {table}}}"
    run_job(spec_of(tmp_path, tmp_path / "out", audio__spans="null", source=source))
    found = Recordings(open_features(tmp_path / "out"))
    assert (found.row_ids, found.incomplete) == (names, {})
    assert [found.seconds(k) for k in range(3)] == pytest.approx([0.5, 0.4, 0.4])


@pytest.mark.long
def test_channels_that_are_rows_are_recordings_of_their_own(tmp_path: Path, no_ray: None) -> None:
    (tmp_path / "in").mkdir()
    data = audio_factory.clip("wav", 27.0, channels=2)
    (tmp_path / "in" / "day.wav").write_bytes(data)
    run_job(spec_of(tmp_path / "in", tmp_path / "out", audio__channels="each"))
    found = Recordings(open_features(tmp_path / "out"))
    assert found.row_ids == ["day.wav#ch0", "day.wav#ch1"]
    assert [len(row.features["adaptation"]) for row in found] == [2700, 2700]


def test_every_planned_row_is_committed_once(out: Path) -> None:
    layout = Layout.open(str(out))
    planned = [item.row_id for item in only_plan(layout).items()]
    table = open_features(out).table
    assert sorted(planned) == sorted(table["plan_row_id"].to_pylist())
