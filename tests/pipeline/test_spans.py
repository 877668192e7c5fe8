"""Recordings in spans: cut where they may be, and frame by frame what the whole recording gives.

The second route is the job without spans, whose rows are tested against the plain one elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amtcore.features.spike_events import SpikeEvents
from earmill.pipeline.common.errors import (
    SourceError,
    SourceOutage,
    SpecError,
)
from earmill.pipeline.formats.int8_rows import dequantised
from earmill.pipeline.planning import spans as planning
from earmill.pipeline.planning.plan import Plan, check_items, make_plan
from earmill.pipeline.planning.spans import SpannedSource, cut_into, planned_source
from earmill.pipeline.sources import Item, open_source, span_reads
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import describe_models
from earmill.pipeline.spec.source import ManifestSpec
from earmill.pipeline.spec.spans import SpansSpec, warm_up_s
from earmill.pipeline.storage.layout import Layout
from tests.pipeline import audio_factory
from tests.pipeline.test_row_pipeline import Job, make_spec
from tests.pipeline.test_span_reads import Counting, counting

FS_HZ = 16000
# Of a stream's largest value: what the states of before leave, and float32 itself.
NEAR = {"dau1997": 2e-7, "osses2021": 1e-6, "king2019": 1e-6, "paulick2024": 2e-6,
        "glasberg2002": 1e-6, "moore2016": 5e-6, "melspectrogram": 1e-6}  # fmt: skip
KING = {"model": "king2019", "fs_hz": FS_HZ, "params": {"phase_insens": "none"}}
LOUD = {"model": "glasberg2002", "fs_hz": 32000}
MEL = {"model": "melspectrogram", "fs_hz": FS_HZ, "params": {"n_fft": 512}}
SPIKES = {"model": "dau1997", "fs_hz": FS_HZ, "streams": {"modulation": {}, "spikes": {}}}


def spanned(folder: Path, seconds: int, *models: dict[str, Any], **changes: Any) -> JobSpec:
    """A job in float32 with spans."""
    job = {
        "source": {"kind": "files", "uri": str(folder)},
        "audio": {"spans": {"seconds": seconds}},
        "extract": list(models) or [{"model": "dau1997", "fs_hz": FS_HZ}],
        "output": {"uri": str(folder / "out"), "dtype": "float32"},
    }
    return JobSpec.load(job, [f"{k.replace('__', '.')}={v}" for k, v in changes.items()])


def without_spans(spec: JobSpec) -> JobSpec:
    return JobSpec.load(spec, ["audio.spans=null"])


def rows_of(spec: JobSpec, **options: Any) -> dict[str, Any]:
    """Rows of a job by id, as its source is planned."""
    job = Job(spec, **options)
    job.items = list(planned_source(spec).items())
    rows = job()
    job.rows.close()
    assert rows.bad == []
    return {row.row_id: row for row in rows.good}


def as_dense(row: Any, name: str) -> np.ndarray:
    """Frames of a row; of events the counts."""
    values = np.asarray(row.streams[name])
    if values.dtype != np.int32:
        return values
    return SpikeEvents.from_columns(values, 0, row.steps[name], 31).dense()


def assert_spans_are_the_whole(spec: JobSpec, near: float, **options: Any) -> None:
    whole, parts = rows_of(without_spans(spec), **options), rows_of(spec, **options)
    assert len(parts) > len(whole)
    for row_id, row in whole.items():
        stem, _, channel = row_id.partition("#ch")
        mine = [
            part
            for name, part in parts.items()
            if name.startswith(f"{stem}#span") and name.endswith(f"#ch{channel}" if channel else "")
        ]
        assert len(mine) >= 2
        assert sum(part.seconds for part in mine) == pytest.approx(row.seconds, abs=1e-9)
        assert sum(part.facts["frames"] for part in mine) == row.facts["frames"]
        for name in row.streams:
            got = np.concatenate([as_dense(part, name) for part in mine])
            wanted = as_dense(row, name)
            assert got.shape == wanted.shape, name
            # An event moves where its threshold is met within rounding: none of these does.
            worst = np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()
            assert worst <= (0 if name == "spikes" else near), (row_id, name)


def write(folder: Path, seconds: float, kind: str = "flac", **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"day.{kind}"
    path.write_bytes(audio_factory.clip(kind, seconds, **options))
    return path


# -- equal to the whole -------------------------------------------------------------------------


@pytest.mark.parametrize("long_s", [120.0, 5.0], ids=["held whole", "streamed"])
def test_frames_and_events_of_spans_are_those_of_the_recording(
    tmp_path: Path, long_s: float
) -> None:
    # 22.05 kHz to 16 kHz: the filter of resampling reaches over the ends of spans.
    write(tmp_path / "in", 43.37, "wav")
    assert_spans_are_the_whole(spanned(tmp_path / "in", 13, SPIKES), NEAR["dau1997"], long_s=long_s)


def test_streams_of_several_models_each_with_its_own_grid(tmp_path: Path) -> None:
    write(tmp_path / "in", 9.9, "wav")
    quick = {"adaptation_kwargs": {"tau": [0.02, 0.05]}}
    rates = {"modulation": {"frame_rate_hz": 62.5}, "envelope": {"pool": "max"}}
    models = {"model": "dau1997", "fs_hz": FS_HZ, "params": quick, "streams": rates}
    spec = spanned(tmp_path / "in", 4, models, MEL)
    assert warm_up_s(spec.audio.spans, Job(spec).models, ["a", "b"]) == 4
    assert_spans_are_the_whole(spec, NEAR["dau1997"], long_s=3.0)


def test_channels_that_are_rows_and_ears_that_are_not(tmp_path: Path) -> None:
    write(tmp_path / "in", 8.0, "wav", channels=2)
    for channels in ("each", "mean"):
        spec = spanned(tmp_path / "in", 2, MEL, audio__channels=channels)
        assert_spans_are_the_whole(spec, NEAR["melspectrogram"])
        assert_spans_are_the_whole(spec, NEAR["melspectrogram"], long_s=1.0)


def test_what_is_stored_differs_by_no_more_than_its_rounding(tmp_path: Path) -> None:
    write(tmp_path / "in", 7.3, "wav")
    assert_spans_are_the_whole(spanned(tmp_path / "in", 2, MEL, output__dtype="float16"), 2**-10)
    spec = spanned(tmp_path / "in", 2, MEL, output__dtype="int8")
    (whole,) = rows_of(without_spans(spec)).values()
    parts = list(rows_of(spec, long_s=2.5).values())
    assert [part.steps["mel"] for part in parts] == [200, 200, 200, 130]
    # Each has blocks of 64 frames of its own, so that scales are others; both err by up to 1/252.
    got = np.concatenate([dequantised(np.asarray(part.streams["mel"])) for part in parts])
    wanted = dequantised(np.asarray(whole.streams["mel"]))
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= 2 / 252 * np.abs(wanted).max()


def test_a_last_span_that_ends_within_a_second_and_a_row_that_is_itself_a_span(
    tmp_path: Path,
) -> None:
    write(tmp_path / "in", 12.0, "wav")
    table = tmp_path / "in" / "rows.csv"
    table.write_text("uri,id,start,end\nday.wav,middle,2,9.43\nday.wav,end,3,\n")
    source = f"{{kind: manifest, uri: {table}}}"
    assert_spans_are_the_whole(spanned(tmp_path / "in", 2, MEL, source=source), 1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "seconds"),
    [
        ({"model": "osses2021", "fs_hz": FS_HZ}, 15),
        (KING, 12),
        ({"model": "paulick2024", "fs_hz": 22050}, 16),
        (LOUD, 40),
        ({"model": "moore2016", "fs_hz": 32000}, 20),
    ],
    ids=["osses2021", "king2019", "paulick2024", "glasberg2002", "moore2016"],
)
def test_every_model_within_its_error(tmp_path: Path, model: dict[str, Any], seconds: int) -> None:
    write(tmp_path / "in", 2.7 * seconds, "wav")
    assert_spans_are_the_whole(spanned(tmp_path / "in", seconds, model), NEAR[model["model"]])


def test_without_a_warm_up_they_differ(tmp_path: Path) -> None:
    """What the tests above would see: a second instead of twelve."""
    write(tmp_path / "in", 43.37, "wav")
    spec = spanned(tmp_path / "in", 13, SPIKES, audio__spans__warm_up_s=1)
    with pytest.raises(AssertionError, match=r"day\.wav.*modulation"):
        assert_spans_are_the_whole(spec, NEAR["dau1997"])


# -- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [15.0, 19.99, 24.9, 25.0, 25.1, 100.0, 8640.5])
@pytest.mark.parametrize("ends", [(None, None), (3.0, None), (None, 1e5), (3.0, 1e5)])
def test_spans_cover_a_row_without_gap_or_overlap(
    seconds: float, ends: tuple[float | None, float | None]
) -> None:
    item = Item("x", "x.wav", start_s=ends[0], end_s=ends[1], seconds=seconds, position=7)
    found = list(cut_into(item, 10))
    assert [part.row_id for part in found] == [
        f"x#span{k + 1}of{len(found)}" for k in range(len(found))
    ]
    begin = ends[0] or 0.0
    assert (found[0].start_s, found[-1].end_s) == (begin, ends[1])
    assert {part.part_of for part in found} == {(begin, ends[1])} and len(found) >= 2
    for one, other in pairwise(found):
        assert one.end_s == other.start_s and one.seconds == 10.0
    assert 5.0 <= found[-1].seconds < 15.0
    assert sum(part.seconds for part in found) == pytest.approx(seconds)
    assert {part.position for part in found} == {7}


def test_what_cannot_be_cut_stays_whole_and_the_plan_says_so(tmp_path: Path) -> None:
    for kind in ("wav", "flac", "mp3", "ogg"):
        write(tmp_path / "in", 9.0, kind).rename(tmp_path / "in" / f"long.{kind}")
    write(tmp_path / "in", 2.9, "wav").rename(tmp_path / "in" / "short.wav")
    spec = spanned(tmp_path / "in", 2, MEL)
    plan = make_plan(planned_source(spec), spec)
    ids = [item.row_id for item in plan.items()]
    assert [i for i in ids if "#span" not in i] == ["long.mp3", "long.ogg", "short.wav"]
    assert {i.split("#")[0] for i in ids if "#span" in i} == {"long.flac", "long.wav"}
    assert plan.in_order == 2
    assert any("2 long recordings are computed in order" in note for note in plan.notes)
    layout = Layout.open(str(tmp_path / "out"))
    plan.write(layout)
    stored = Plan.read(layout)
    assert list(stored.items()) == list(plan.items()) and stored.in_order == 2
    assert all(item.part_of == (0.0, None) for item in stored.items() if "#span" in item.row_id)


@pytest.mark.parametrize(
    ("names", "channels", "said"),
    [
        (("day#span1of2", "x"), "mean", "is called as spans are"),
        (("a", "a"), "mean", "more than once: 'a'"),
        (("a", "a#ch0"), "each", "calls a channel of row 'a'"),
    ],
)
def test_a_recording_in_spans_and_another_row_are_not_called_alike(
    tmp_path: Path, names: tuple[str, str], channels: str, said: str
) -> None:
    """They would be read as one recording, or as spans of one."""
    write(tmp_path / "in", 9.0, "wav")
    table = tmp_path / "in" / "rows.csv"
    table.write_text(f"uri,id,start,end\nday.wav,{names[0]},,\nday.wav,{names[1]},0,2\n")
    source = f"{{kind: manifest, uri: {table}}}"
    spec = spanned(tmp_path / "in", 2, MEL, source=source, audio__channels=channels)
    with pytest.raises(SourceError, match=said):
        make_plan(planned_source(spec), spec)
    with pytest.raises(SourceError, match=said):
        check_items(list(planned_source(spec).items()), spec)


def test_a_plan_without_spans_is_what_it_was(tmp_path: Path) -> None:
    write(tmp_path / "in", 9.0, "wav")
    spec = make_spec(tmp_path / "in")
    plan = make_plan(planned_source(spec), spec)
    assert type(planned_source(spec)) is type(open_source(spec.source))
    assert "spans" not in spec.canonical()["audio"]
    layout = Layout.open(str(tmp_path / "out"))
    raw = layout.read_bytes(plan.write(layout))
    assert b"part_of" not in raw and b"in_order" not in raw


def test_a_part_is_told_from_a_row_with_the_same_ends(tmp_path: Path) -> None:
    """What the models hear before it is another, so plans of the two are two."""
    write(tmp_path / "in", 6.0, "wav")
    spec = spanned(tmp_path / "in", 2, MEL)
    plan = make_plan(planned_source(spec), spec)

    class Rows(SpannedSource):
        def items(self) -> Iterator[Item]:
            from dataclasses import replace

            return (replace(item, part_of=None) for item in super().items())

    assert spec.audio.spans is not None
    plain = make_plan(Rows(open_source(spec.source), spec.audio.spans), spec)
    assert plain.plan_id != plan.plan_id


def test_rows_that_begin_within_a_second_stay_whole(tmp_path: Path) -> None:
    write(tmp_path / "in", 9.0, "wav")
    table = tmp_path / "in" / "rows.csv"
    table.write_text("uri,id,start\nday.wav,odd,0.5\nday.wav,even,1\n")
    spec = spanned(tmp_path / "in", 2, MEL, source=f"{{kind: manifest, uri: {table}}}")
    source = planned_source(spec)
    ids = [item.row_id for item in source.items()]
    assert ids == ["odd", *(f"even#span{k}of4" for k in range(1, 5))]
    assert source.in_order == 1  # type: ignore[attr-defined]


@pytest.fixture(name="large")
def files_that_count_as_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (span_reads, planning):
        monkeypatch.setattr(module, "MEMORY_BYTES", 64 << 10)
    monkeypatch.setattr(span_reads, "BLOCK_BYTES", 8 << 10)
    for kind in ("wav", "flac"):
        write(tmp_path, 60.0, kind).rename(tmp_path / f"a.{kind}")
    return tmp_path


def listed_at(address: str, folder: Path, **columns: str) -> SpannedSource:
    """Both files behind a server, in spans of 20 s."""
    heads, cells = ",".join(["uri", *columns]), ",".join(["", *columns.values()])
    lines = "\n".join(f"{address}/a.{kind}{cells}" for kind in ("wav", "flac"))
    (folder / "rows.csv").write_text(f"{heads}\n{lines}\n")
    spec = ManifestSpec(kind="manifest", uri=str(folder / "rows.csv"), allow=(address,))
    return SpannedSource(open_source(spec), SpansSpec(seconds=20))


def test_the_length_of_a_large_remote_file_is_read_from_its_header(large: Path) -> None:
    with counting(large) as (address, served, _):
        found = list(listed_at(address, large).items())
        assert [item.seconds for item in found] == [20.0] * 6
        assert {item.part_of for item in found} == {(0.0, None)}
        for kind in ("wav", "flac"):
            assert served[f"/a.{kind}"] < 40 << 10 < (large / f"a.{kind}").stat().st_size


def test_a_store_that_goes_away_meanwhile_ends_the_planning(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan in which the recording is whole would be another one."""

    def lost(self: span_reads.RangedStream, size: int | None = -1) -> bytes:
        self.failure = OSError("gone")
        raise self.failure

    with counting(large) as (address, _, _):
        source = listed_at(address, large)
        monkeypatch.setattr(span_reads.RangedStream, "read", lost)
        with pytest.raises(SourceOutage, match="gone"):
            list(source.items())


@pytest.mark.parametrize("columns", [{}, {"end": "60"}], ids=["length guessed", "length given"])
def test_a_large_file_whose_server_gives_no_ranges_is_not_fetched_for_each_span(
    large: Path, monkeypatch: pytest.MonkeyPatch, columns: dict[str, str]
) -> None:
    monkeypatch.setattr(Counting, "has_ranges", False)
    with counting(large) as (address, served, _):
        source = listed_at(address, large, **columns)
        assert [item.part_of for item in source.items()] == [None, None]
        assert source.in_order == 2
        for kind in ("wav", "flac"):  # one answer each, which is not read to its end
            assert served[f"/a.{kind}"] == (large / f"a.{kind}").stat().st_size


def test_a_source_that_does_not_read_parts_is_not_cut(tmp_path: Path) -> None:
    write(tmp_path / "in", 9.0, "wav")
    files = open_source(spanned(tmp_path / "in", 2).source)

    class Whole:
        items = staticmethod(files.items)

    source = SpannedSource(Whole(), SpansSpec(seconds=2))  # type: ignore[arg-type]
    assert [item.row_id for item in source.items()] == ["day.wav"] and source.in_order == 1


# -- the spec -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seconds": 1}, "greater than or equal to 2"),
        ({"seconds": 2.5}, "expected a whole number"),
        ({"seconds": 600, "warm_up_s": 0}, "greater than or equal to 1"),
        ({"seconds": 10, "warm_up_s": 11}, "expected seconds of 11 or more"),
        ({"second": 600}, "second"),
    ],
)
def test_bad_values_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make_spec(tmp_path, audio__spans=changes)


def test_a_level_that_needs_the_whole_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="rms1_db_spl with spans"):
        spanned(tmp_path, 600, audio__calibration={"level_db_spl": 65.0})


@pytest.mark.parametrize(
    ("model", "seconds", "said"),
    [
        ({"model": "dau1997"}, 11, "expected 12 or more, which the warm-up of dau1997"),
        ({"model": "king2019"}, 600, "got king2019"),
        (LOUD | {"streams": {"loudness_summary": {}}}, 600, "got glasberg2002"),
        (MEL | {"fs_hz": 44100, "params": {"hop_length": 441 * 7}}, 600, "multiple of 7 s"),
        (MEL | {"fs_hz": 44100, "params": {"hop_length": 441 * 7}}, 602, ""),
    ],
    ids=["too short", "whole clips", "row a clip", "grid", "on the grid"],
)
def test_what_models_do_not_allow_is_refused_before_any_work(
    tmp_path: Path, model: dict[str, Any], seconds: int, said: str
) -> None:
    if model["model"] == "melspectrogram":
        model = {**model, "params": {**model["params"], "n_fft": 4096}}
    spec = spanned(tmp_path, seconds, model)
    if not said:
        assert [each.grid_s for each in describe_models(spec)] == [7]
        return
    with pytest.raises(SpecError, match=said):
        describe_models(spec)


def test_a_given_warm_up_keeps_to_the_grid_and_counts(tmp_path: Path) -> None:
    class Model:
        memory_s, grid_s = 0.1, 4

    def warm(**spans: int) -> int:
        return warm_up_s(SpansSpec(**spans), [Model()], ["m"])  # type: ignore[list-item]

    assert warm(seconds=600) == 4
    assert warm(seconds=600, warm_up_s=8) == 8
    with pytest.raises(SpecError, match=r"audio\.spans\.warm_up_s: expected a multiple of 4 s"):
        warm(seconds=600, warm_up_s=6)
    assert warm_up_s(None, [], []) == 0
