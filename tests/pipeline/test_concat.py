"""Several sets as one, rows in quarantine, and what a stream says of itself."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from amtcore.features.registry import build_extractor
from earmill import FeatureLoader, mix, open_features
from earmill.pipeline.formats.format import Encoding
from tests.pipeline.encoded import encode
from tests.pipeline.event_data import STREAMS as EVENT_STREAMS
from tests.pipeline.event_data import write_spikes
from tests.pipeline.reader_data import STREAMS, Writer, ids, make_row, mixed_seconds, write_set


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """20 rows, one of them bad, closed; and 3 other rows in float32, still growing."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    write_set(first, finalised=True)
    more = Writer(second, dtype="float32", formats=("parquet",))
    rows = [make_row(100 + i, mixed_seconds(i), dtype="float32") for i in range(3)]
    more.shard(0, rows, bad=["deaf.wav", "mute.wav"])
    return [first, second]


def test_sets_follow_each_other(two: list[Path]) -> None:
    both = open_features(two)
    first, second = (open_features(path, dtype="float32") for path in two)
    assert len(both) == len(list(both)) == 23 and both.dtype == np.float32
    assert [row.index for row in both] == list(range(23))
    for number, wanted in [(0, first[0]), (19, first[19]), (20, second[0]), (-1, second[2])]:
        row = both[number]
        assert (row.row_id, row.extra, row.seconds) == (wanted.row_id, wanted.extra, wanted.seconds)
        for name in STREAMS:
            np.testing.assert_array_equal(row.features[name.name], wanted.features[name.name])
    assert both.by_id(second[1].row_id).index == 21
    cut = both.slice(22, 0.05, 0.2)
    assert cut.index == 22 and cut.first_frame == {"modulation": 5, "loudness": 2}
    assert both.provenance(20)["uri"] == second.provenance(0)["uri"]
    assert both.table.column("set").to_pylist() == [0] * 20 + [1] * 3
    assert both.table.column("row_id").to_pylist() == [row.row_id for row in both]
    assert both.nbytes == first.nbytes + second.nbytes
    with pytest.raises(IndexError, match="row 23 of a feature set with 23 rows"):
        both[23]
    with pytest.raises(KeyError, match="no set has it"):
        both.by_id("nobody.wav")
    again = pickle.loads(pickle.dumps(both))
    assert again[21].row_id == both[21].row_id


def test_sets_are_shuffled_and_resumed_as_one(two: list[Path]) -> None:
    both = open_features(two)
    stream = both.iterable(seed=2, batch_size=4)
    order = ids(stream)
    assert sorted(order) == list(range(23)) and order != sorted(order)
    loader = FeatureLoader(both.iterable(seed=2, batch_size=4))
    batches = iter(loader)
    assert next(batches).indices.tolist() == order[:4]
    resumed = open_features(two).iterable(seed=2, batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed) == order[4:]
    with pytest.raises(ValueError, match="dataset="):
        open_features(two[::-1]).iterable(seed=2, batch_size=4).load_state_dict(loader.state_dict())
    assert both.torch()[22].index == 22


def test_an_id_of_two_sets_is_not_guessed(two: list[Path]) -> None:
    twice = open_features([two[0], two[0]])
    with pytest.raises(KeyError, match=r"2 sets, at \[7, 27\] has it"):
        twice.by_id(twice[7].row_id)


def test_sets_of_other_streams_are_refused(two: list[Path], tmp_path: Path) -> None:
    other = replace(STREAMS[0], fc_hz=(1.0, 2.0, 3.0), unit="sone")
    Writer(tmp_path / "unit", streams=(other, STREAMS[1])).shard(
        0, [make_row(0, 1.0, (other, STREAMS[1]))]
    )
    with pytest.raises(ValueError, match=r"stream 'modulation' of .* differs .* in fc_hz, unit"):
        open_features([two[0], tmp_path / "unit"])
    Writer(tmp_path / "fewer", streams=STREAMS[:1]).shard(0, [make_row(0, 1.0, STREAMS[:1])])
    with pytest.raises(ValueError, match=r"expected the streams \['modulation', 'loudness'\]"):
        open_features([two[0], tmp_path / "fewer"])
    assert len(open_features([two[0], tmp_path / "fewer"], streams=["modulation"])) == 21
    with pytest.raises(ValueError, match="at least one feature set"):
        open_features([])


def test_streams_of_other_listeners_or_neurons_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_spikes(tmp_path / name, finalised=True)
    for key, value, named in (
        ("listener", {"audiogram": {"1000": 20}}, "listener of dau1997"),
        ("streams", {"spikes": {"threshold": 2}}, "options of dau1997"),
    ):
        one, two = (open_features(tmp_path / name) for name in ("one", "two"))
        two.dataset.spec["extract"][0][key] = value
        with pytest.raises(ValueError, match=named):
            mix([one, two], [1, 1])


def test_columns_of_other_types_are_named(tmp_path: Path) -> None:
    for name, label in (("one", 1), ("two", "dog")):
        row = replace(make_row(0, 0.1), extra={"label": label})
        Writer(tmp_path / name).shard(0, [row])
    both = open_features([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(ValueError, match=r"one type in all sets.* extra_label .*int64 vs string"):
        both.iterable(batch_size=2, label="label")


def test_quarantine_tells_which_rows_failed_and_why(two: list[Path]) -> None:
    closed, growing, both = open_features(two[0]), open_features(two[1]), open_features(two)
    assert closed.quarantine.to_pylist() == [
        {
            "row_id": "broken.wav",
            "uri": "broken.wav",
            "stage": "decode",
            "error_class": "not_audio",
            "message": "no",
            "attempts": 1,
            "shard": "00001",
        }
    ]
    assert growing.quarantine.column("row_id").to_pylist() == ["deaf.wav", "mute.wav"]
    assert both.quarantine.column("set").to_pylist() == [0, 1, 1]


def test_no_quarantine_is_an_empty_table(tmp_path: Path) -> None:
    Writer(tmp_path).shard(0, [make_row(0, 1.0)])
    table = open_features(tmp_path).quarantine
    assert table.num_rows == 0 and table.column_names[-1] == "shard"


def test_streams_print_as_one_line_each(two: list[Path]) -> None:
    text = repr(open_features(two[0]).streams)
    assert len(text) < 300 and "7 columns in 3 channels of 100 to 300 Hz" in text
    (info,) = build_extractor("dau1997").streams
    assert len(repr(info)) < 150 and "model units" in repr(info)
    (summary,) = build_extractor("glasberg2002", streams={"loudness_summary": {}}).streams
    assert "once a clip" in repr(summary)


def test_zarr_has_its_frequencies_as_coordinates(two: list[Path], tmp_path: Path) -> None:
    path = sorted((two[0] / "data").glob("*.zarr"))[0]
    with xr.open_zarr(path, group="modulation", consolidated=True) as data:
        values = data["values"]
        assert set(values.coords) == {"fc_hz", "mfc_hz"}
        assert values["fc_hz"].values.tolist() == [100.0, 200, 200, 200, 300, 300, 300]
        assert values["mfc_hz"].values.tolist() == list(range(7))
        assert values["fc_hz"].attrs["units"] == "Hz"
        assert values.where(values["fc_hz"] > 250, drop=True).sizes["column"] == 3
        assert data["row_start"].attrs["frame_rate_hz"] == 100.0
    spikes = next(info for info in EVENT_STREAMS if info.layout == "events")
    path = encode("zarr", [], [spikes], folder=tmp_path, name="x.zarr", encoding=Encoding())
    with xr.open_zarr(path, group=spikes.name, consolidated=True) as data:
        assert data["fc_hz"].dims == ("channel",) and data.sizes["channel"] == spikes.width
