"""Streams with one row a clip: exact in every dtype, columns of the table of rows, and filters."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import earmill
from amtcore.features.stream_info import PER_CLIP, PER_CLIP_RATE_HZ, StreamInfo
from earmill.jobs.cli import app
from earmill.pipeline.common.errors import CommitError, SpecError
from earmill.pipeline.formats.row_table import check_stream_names
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import as_stored
from tests.pipeline.reader_data import STREAMS, Writer, make_row

LEVELS = StreamInfo(
    "levels", "meter", "LUFS", 2, PER_CLIP_RATE_HZ, PER_CLIP, ("clip", "statistic"), (0, 1, 2),
    columns=("integrated", "peak"),
)  # fmt: skip
SCORE = replace(LEVELS, name="score", width=1, columns=(), channel_offsets=(0, 1))


def loudness(row: int) -> np.ndarray:
    """Values that float16 cannot hold."""
    return np.array([[-23.0001 - row, 0.1 * row]], np.float32)


def row(number: int) -> FeatureRow:
    """Row `number` with both streams of clips."""
    made = make_row(number, 0.2)
    score = np.array([[number]], np.float32)
    return replace(made, streams={**made.streams, "levels": loudness(number), "score": score})


@pytest.fixture(scope="module")
def open_and_closed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A set of two shards of three rows, before and after finalise. No test changes them."""
    places = tmp_path_factory.mktemp("open"), tmp_path_factory.mktemp("closed")
    streams = [*STREAMS, *as_stored([LEVELS, SCORE], "float16")]
    writer = Writer(places[1], formats=("parquet", "zarr", "webdataset"), streams=streams)
    for shard in (0, 1):
        writer.shard(shard, [row(3 * shard + k) for k in range(3)], bad=[f"bad{shard}.wav"])
    shutil.copytree(places[1], places[0], dirs_exist_ok=True)
    writer.finalise()
    return places


@pytest.fixture
def closed(open_and_closed: tuple[Path, Path]) -> Path:
    return open_and_closed[1]


@pytest.mark.parametrize("finalised", [True, False])
@pytest.mark.parametrize("format", ["parquet", "zarr", "webdataset"])
def test_values_are_exact_and_in_the_table(
    open_and_closed: tuple[Path, Path], format: str, finalised: bool
) -> None:
    ds = earmill.open_features(open_and_closed[finalised], format=format)
    table = ds.table
    assert table["levels_integrated"].to_pylist() == [float(loudness(k)[0, 0]) for k in range(6)]
    assert table["score_value"].to_pylist() == [0, 1, 2, 3, 4, 5]
    for number, each in enumerate(ds):
        np.testing.assert_array_equal(each.features["levels"], loudness(number))
        assert each.features["modulation"].dtype == np.float32


def test_other_libraries_read_them_as_columns(closed: Path) -> None:
    (first, _) = sorted(closed.glob("data/**/*.parquet"))
    table = pq.read_table(first, columns=["levels_peak"], use_threads=False)
    assert table["levels_peak"].to_pylist() == [float(loudness(k)[0, 1]) for k in range(3)]


@pytest.mark.parametrize("format", ["parquet", "zarr", "webdataset"])
def test_a_filtered_set_has_the_features_of_its_rows(closed: Path, format: str) -> None:
    whole = earmill.open_features(closed, format=format)
    some = whole.filter(pc.field("levels_integrated") < -24.5).filter(pc.field("score_value") < 5)
    assert [each.row_id for each in some] == [whole[k].row_id for k in (2, 3, 4)]
    for each, number in zip(some, (2, 3, 4), strict=True):
        np.testing.assert_array_equal(each.features["levels"], loudness(number))
        np.testing.assert_array_equal(
            each.features["modulation"], whole[number].features["modulation"]
        )
    assert some.fingerprint != whole.fingerprint and len(whole) == 6
    assert some.by_id(whole[3].row_id).index == 1
    with pytest.raises(CommitError, match="filtered"):
        some.statistics  # noqa: B018
    assert set(earmill.compute_statistics(some)) >= {"modulation", "loudness"}


def test_filters_by_long_lists_have_fingerprints_of_their_own(closed: Path) -> None:
    """A stream must not resume in another set; pyarrow's text of a filter shortens long lists."""
    ds = earmill.open_features(closed)
    others = [f"none{number}.wav" for number in range(30)]

    def chosen(number: int) -> str:
        rows = [*others[:15], row(number).row_id, *others[15:]]
        return ds.filter(pc.field("row_id").isin(rows)).fingerprint

    assert len({chosen(number) for number in range(6)}) == 6
    assert ds.filter(pc.field("seconds") > 0).fingerprint == ds.fingerprint


def test_sets_end_to_end_mixed_and_empty(closed: Path, tmp_path: Path) -> None:
    one, two = closed, Path(shutil.copytree(closed, tmp_path / "two"))
    loud = pc.field("score_value") > 3
    assert len(earmill.open_features([one, two]).filter(loud)) == 4
    mixed = earmill.mix([earmill.open_features(each) for each in (one, two)], [1, 1], draws=4)
    assert {each.row_id for each in mixed.filter(loud)} == {row(4).row_id, row(5).row_id}
    nothing = earmill.open_features(one).filter(pc.field("score_value") > 9)
    assert len(nothing) == 0 and list(nothing) == []


def test_values_of_sets_side_by_side_have_the_names_of_their_streams(closed: Path) -> None:
    """`levels` of one set is `more.levels` beside it, also where one of the two is not read."""
    whole, added = (earmill.open_features(closed, streams=[k]) for k in ("modulation", "score"))
    names = [info["name"] for info in whole.dataset.streams]
    called = {name: f"more.{name}" for name in names}
    alone = earmill.JoinedFeatures([added], [called])
    both = earmill.JoinedFeatures([whole, added], [{name: name for name in names}, called])
    for joined, streams in ((alone, ["more.score"]), (both, ["modulation", "more.score"])):
        assert list(joined.streams) == list(joined[2].features) == streams
        assert joined.table["more.levels_peak"].equals(whole.table["levels_peak"])
    assert "levels_peak" not in alone.table.column_names
    assert set(whole.table.column_names) < set(both.table.column_names)


def test_a_wrong_expression_is_refused(closed: Path) -> None:
    ds = earmill.open_features(closed)
    for wrong in (pc.field("lufs") > 1, "score_value > 1", pc.field("row_id") > 1, [True] * 6):
        with pytest.raises(ValueError, match=r"filter: expected .* the columns are .*score_value"):
            ds.filter(wrong)  # type: ignore[arg-type]


def test_names_of_values_are_not_names_of_streams() -> None:
    stored = as_stored([LEVELS], "float16")
    with pytest.raises(SpecError, match="levels_peak"):
        check_stream_names([*stored, replace(STREAMS[1], name="levels_peak")])
    with pytest.raises(SpecError, match="'extra'"):  # `extra_start` is a column of a source
        check_stream_names([replace(STREAMS[1], name="extra")])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--where-min", "score_value=2", "--where-max", "levels_peak=0.35"], [2, 3]),
        (["--where-min", "seconds=1"], []),
    ],
)
def test_inspect_lists_chosen_rows(closed: Path, arguments: list[str], wanted: list[int]) -> None:
    listed = CliRunner().invoke(app, ["inspect", str(closed), *arguments])
    ids = [row(number).row_id for number in wanted]
    assert listed.exit_code == 0, listed.output
    assert [line.split("  ")[0] for line in listed.output.splitlines()[:-1]] == ids
    assert listed.output.splitlines()[-1] == f"{len(ids)} of 6 rows"
    as_json = CliRunner().invoke(app, ["inspect", str(closed), *arguments, "--json"])
    assert [each["row_id"] for each in json.loads(as_json.output)] == ids


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--where-min", f"extra_session={2**53 + 1}"], [1, 2]),
        (["--where-max", f"extra_session={2**53}.5"], [0]),
        (["--where-min", "extra_session=-inf", "--where-max", "extra_session=1e300"], [0, 1, 2]),
    ],
)
def test_inspect_compares_integers_that_double_would_round(
    tmp_path: Path, arguments: list[str], wanted: list[int]
) -> None:
    writer = Writer(tmp_path, streams=STREAMS)
    rows = [replace(make_row(k, 0.2), extra={"session": 2**53 + k}) for k in range(3)]
    writer.shard(0, [*rows, replace(make_row(3, 0.2), extra={"session": None})])
    writer.finalise()
    listed = CliRunner().invoke(app, ["inspect", str(tmp_path), *arguments])
    lines = [f"{rows[k].row_id}  extra_session {2**53 + k}" for k in wanted]
    assert listed.output.splitlines() == [*lines, f"{len(wanted)} of 4 rows"]


@pytest.mark.parametrize("limit", ["lufs=1", "row_id=1", "seconds", "seconds=loud", "seconds=nan"])
def test_inspect_refuses_other_limits(closed: Path, limit: str) -> None:
    refused = CliRunner().invoke(app, ["inspect", str(closed), "--where-min", limit])
    assert refused.exit_code == 2 and "expected" in refused.output
