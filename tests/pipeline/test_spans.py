"""Recordings in spans: cut where they may be, and frame by frame what the whole recording gives.

The second route is the job without spans, whose rows are tested against the plain one elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amtcore.features.spike_events import SpikeEvents
from earmill.pipeline.common.errors import (
    SpecError,
)
from earmill.pipeline.formats.values import dequantised
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import describe_models
from earmill.pipeline.spec.spans import SpansSpec, warm_up_s
from tests.pipeline.span_data import FS_HZ, MEL, spanned, without_spans, write
from tests.pipeline.test_row_pipeline import Job, make_spec

# Of a stream's largest value: what the states of before leave, and float32 itself.
NEAR = {"dau1997": 2e-7, "osses2021": 1e-6, "king2019": 1e-6, "paulick2024": 2e-6,
        "glasberg2002": 1e-6, "moore2016": 5e-6, "melspectrogram": 1e-6}  # fmt: skip
KING = {"model": "king2019", "fs_hz": FS_HZ, "params": {"phase_insens": "none"}}
LOUD = {"model": "glasberg2002", "fs_hz": 32000}
SPIKES = {"model": "dau1997", "fs_hz": FS_HZ, "streams": {"modulation": {}, "spikes": {}}}


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
