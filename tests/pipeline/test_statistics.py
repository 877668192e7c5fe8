"""Statistics: those of all frames, the same bit for bit however they came about, and applied."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from earmill import (
    CommitError,
    Crop,
    FeatureLoader,
    Features,
    JoinedFeatures,
    compute_statistics,
    mix,
    open_features,
)
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.moments import (
    BLOCK_FRAMES,
    RunningMoments,
    StoredMoments,
    StreamStatistics,
    combined,
)
from earmill.pipeline.formats.values import Spilled
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.event_data import write_spikes
from tests.pipeline.reader_data import STREAMS, Writer, make_row, mixed_seconds, write_set
from tests.short import drawn

N_ROWS = 20
LAYOUT2 = Path(__file__).parent.parent / "data" / "layout2" / "dataset"
quick = drawn(40, derandomize=True)
frames_st = hnp.arrays(
    np.float16, st.tuples(st.integers(1, 30), st.just(3)), elements=st.floats(-600, 600, width=16)
)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics")
    write_set(path, n_rows=N_ROWS, finalised=True)
    return path


def numbers(statistics: StreamStatistics) -> tuple[Any, ...]:
    """Every bit of it."""
    columns = (statistics.sums, statistics.squares, statistics.minimum, statistics.maximum)
    return (statistics.count, *(column.tobytes() for column in columns))


def summed(rows: Any, width: int) -> StreamStatistics:
    summing = RunningMoments(width)
    for row in rows:
        summing.add(row)
    return summing.result()


def all_frames(ds: Features, name: str) -> np.ndarray:
    return np.concatenate([row.features[name] for row in ds]).astype(np.float64)


def same(one: Any, other: Any) -> bool:
    return {k: numbers(v) for k, v in one.items()} == {k: numbers(v) for k, v in other.items()}


def test_they_are_those_of_all_frames(closed: Path) -> None:
    ds = open_features(closed)
    assert list(ds.statistics) == ["modulation", "loudness"]
    for name, found in ds.statistics.items():
        frames = all_frames(ds, name)
        assert found.count == len(frames)
        np.testing.assert_allclose(found.mean, frames.mean(0), rtol=1e-14)
        np.testing.assert_allclose(found.variance, frames.var(0), rtol=1e-12)
        np.testing.assert_array_equal(found.minimum, frames.min(0))
        np.testing.assert_array_equal(found.maximum, frames.max(0))


@pytest.mark.parametrize("width", [1, 3])
def test_a_zero_has_no_sign(width: int) -> None:
    plus, minus = np.zeros((1, width), np.float16), -np.zeros((1, width), np.float16)
    both = [numbers(summed(rows, width)) for rows in ([plus, minus], [minus, plus])]
    assert both[0] == both[1]
    assert not np.signbit(summed([minus], width).minimum).any()
    assert not np.signbit(summed([minus], width).maximum).any()


@quick
@given(rows=st.lists(frames_st, min_size=1, max_size=8), data=st.data())
def test_neither_order_nor_cuts_between_rows_change_a_bit(rows: Any, data: Any) -> None:
    whole = summed(rows, 3)
    shuffled = data.draw(st.permutations(rows))
    assert numbers(summed(shuffled, 3)) == numbers(whole)
    frames = np.concatenate(rows).astype(np.float64)
    np.testing.assert_allclose(whole.mean, frames.mean(0), atol=1e-10)
    np.testing.assert_allclose(whole.variance, frames.var(0), atol=1e-7)
    np.testing.assert_array_equal(whole.constant, (frames == frames[0]).all(axis=0))
    cut = data.draw(st.integers(0, len(rows)))
    parts = combined([summed(rows[:cut], 3), summed(rows[cut:], 3)])
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-15, atol=1e-300)
    assert parts.count == whole.count


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 3), (1025, 31), (2500, 1)])
def test_blocks_are_summed_frame_after_frame(dtype: type, shape: tuple[int, int]) -> None:
    """To the bit, what commits of earlier releases hold: numpy's sums along the first axis."""
    values = np.random.default_rng(1).standard_normal((shape[0], 2 * shape[1])).astype(dtype)
    values = values[:, ::2]  # not in one piece
    found = summed([values], shape[1])
    parts = [values[i : i + BLOCK_FRAMES].astype(np.float64) for i in range(0, shape[0], 1024)]
    assert [*found.sums] == [
        math.fsum(c) for c in zip(*(p.sum(axis=0) for p in parts), strict=True)
    ]
    assert [*found.squares] == [
        math.fsum(c) for c in zip(*((p * p).sum(axis=0) for p in parts), strict=True)
    ]
    np.testing.assert_array_equal(found.minimum, values.min(axis=0))
    np.testing.assert_array_equal(found.maximum, values.max(axis=0))


def test_a_row_in_a_file_gives_the_same(tmp_path: Path) -> None:
    """A long row is summed in the same blocks where it is read back in pieces."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal((3 * BLOCK_FRAMES + 17, 5)).astype(np.float32)
    held = Spilled(np.float32, 5, str(tmp_path))
    for start in range(0, len(row), 1000):
        held.append(row[start : start + 1000])
    assert numbers(summed([held], 5)) == numbers(summed([row], 5))
    backwards = np.asfortranarray(row)
    assert numbers(summed([backwards], 5)) == numbers(summed([row], 5))


def test_a_column_that_does_not_vary_has_no_variance() -> None:
    """0.1 in float32 is no short fraction: squares of it do not sum up without rounding."""
    rows = [np.full((5000, 2), (0.1, 3.7), np.float32)] * 7
    found = summed(rows, 2)
    assert found.constant.tolist() == [True, True]
    assert found.variance.tolist() == [0.0, 0.0]
    shifted = summed([*rows, np.float32([[0.1, 3.8]])], 2)
    assert shifted.constant.tolist() == [True, False]
    assert shifted.variance[1] > 0


def test_computed_and_stored_are_one(closed: Path, tmp_path: Path) -> None:
    """Before and after closing, by another order of commits, in another format, with a scale."""
    stored = open_features(closed).statistics
    for fmt in ("zarr", "parquet"):
        assert same(compute_statistics(open_features(closed, format=fmt)), stored)
    streams = (replace(STREAMS[0], scale_factor=2.0**-9), STREAMS[1])
    writer = Writer(tmp_path, streams=streams)
    rows = [make_row(i, mixed_seconds(i), streams) for i in range(N_ROWS)]
    for number in (2, 0, 1, 3):
        writer.shard(number, rows[6 * number : 6 * number + 6])
    running = open_features(tmp_path)
    assert same(compute_statistics(running), running.statistics)
    np.testing.assert_array_equal(
        running.statistics["modulation"].sums, stored["modulation"].sums * 2.0**-9
    )
    assert numbers(running.statistics["loudness"]) == numbers(stored["loudness"])


def test_several_sets_count_every_frame_once(closed: Path, tmp_path: Path) -> None:
    write_set(tmp_path, n_rows=7)
    both = open_features([closed, tmp_path])
    frames = np.concatenate([all_frames(each, "modulation") for each in both.sets])
    np.testing.assert_allclose(both.statistics["modulation"].mean, frames.mean(0), rtol=1e-14)
    assert same(compute_statistics(both), both.statistics)
    mixed = mix(list(both.sets), [1, 9])
    assert same(mixed.statistics, both.statistics)


def test_sets_side_by_side_have_the_statistics_of_each(closed: Path) -> None:
    names = [{"modulation": "modulation"}, {"loudness": "low.loudness"}]
    sets = [open_features(closed, streams=list(of_set)) for of_set in names]
    computed = compute_statistics(JoinedFeatures(sets, names))
    stored = open_features(closed).statistics
    wanted = {"modulation": stored["modulation"], "low.loudness": stored["loudness"]}
    assert same(computed, wanted)


def test_events_have_none_and_stay_counts(tmp_path: Path) -> None:
    write_spikes(tmp_path, finalised=True)
    ds = open_features(tmp_path)
    assert list(ds.statistics) == ["modulation"]
    for row in ds.iterable(normalise=True):
        np.testing.assert_array_equal(
            row.features["spikes"].dense(), ds[row.index].features["spikes"].dense()
        )
    with pytest.raises(ValueError, match=r"expected streams of frames out of \['modulation'\]"):
        ds.iterable(normalise={"spikes": ds.statistics["modulation"]})


def test_a_normalised_epoch_has_mean_0_and_variance_1(closed: Path) -> None:
    ds = open_features(closed)
    rows = list(ds.iterable(seed=1, normalise=True))
    for name in ds.streams:
        values = torch.cat([row.features[name] for row in rows])
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            values.var(0, correction=0), torch.ones(values.shape[1]), atol=1e-5, rtol=0
        )
    batch = next(iter(FeatureLoader(ds.iterable(batch_size=4, normalise=True, crop=Crop(0.3)))))
    padded = batch.features["modulation"]
    assert padded.values[~padded.mask].abs().max() == 0


def test_columns_that_do_not_vary_become_0_and_that_is_said(tmp_path: Path) -> None:
    writer = Writer(tmp_path, streams=STREAMS[:1])
    row = make_row(0, 0.5, STREAMS[:1])
    values = row.streams["modulation"].copy()
    values[:, [1, 4]] = 0.1
    writer.shard(0, [replace(row, streams={"modulation": values})])
    ds = open_features(tmp_path)
    with pytest.warns(UserWarning, match="stream modulation: columns 1, 4 do not vary; normalised"):
        stream = ds.iterable(normalise=True)
    normal = next(iter(stream)).features["modulation"]
    assert normal[:, [1, 4]].abs().max() == 0
    assert torch.isfinite(normal).all()


def test_a_set_written_before_says_what_to_do() -> None:
    ds = open_features(LAYOUT2)
    with pytest.raises(CommitError, match=r"no statistics of \[.*compute_statistics\(ds\) reads"):
        _ = ds.statistics
    with pytest.raises(CommitError, match="written before"):
        ds.iterable(normalise=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = ds.iterable(normalise=compute_statistics(ds))
    assert all(torch.isfinite(v).all() for row in stream for v in row.features.values()
               if isinstance(v, torch.Tensor))  # fmt: skip


def test_one_shard_without_leaves_the_set_without(tmp_path: Path) -> None:
    """A set that was begun by a release that stored none, and resumed by this one."""
    write_set(tmp_path, n_rows=12)
    record = tmp_path / "commits" / "00001.json"
    text = json.loads(record.read_text())
    del text["moments"]
    record.write_text(json.dumps(text))
    ds = open_features(tmp_path)
    with pytest.raises(CommitError, match="has no statistics of"):
        _ = ds.statistics
    assert compute_statistics(ds)["loudness"].count > 0


def test_verify_finds_statistics_of_other_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write_set(tmp_path, n_rows=12, finalised=True)
    assert not verify(Layout.open(str(tmp_path))).problems
    with monkeypatch.context() as patch:
        patch.setattr("earmill.pipeline.dataset.finalise.moments_of", lambda *_: {})
        finalise(writer.layout)
    found = verify(Layout.open(str(tmp_path))).problems
    assert len(found) == 1 and "its statistics are not those of the commits" in found[0]
    finalise(writer.layout)
    assert not verify(Layout.open(str(tmp_path))).problems


def test_damaged_statistics_are_damage(closed: Path) -> None:
    good = next(iter(commits(Layout.open(str(closed))).values())).moments["loudness"]
    assert numbers(StreamStatistics.read(good, 1)) == numbers(
        StreamStatistics.read(StreamStatistics.read(good, 1).stored(), 1)
    )
    wrong = (
        replace(good, float64=good.float64[:-4]),
        replace(good, float64="$" + good.float64[1:]),
        replace(good, count=-1),
        StoredMoments(3, StreamStatistics(3, *np.full((4, 1), np.nan)).stored().float64),
    )
    for stored in wrong:
        with pytest.raises(CommitError, match="expected statistics of"):
            StreamStatistics.read(stored, 1)
    with pytest.raises(CommitError, match="expected statistics of 2 columns"):
        StreamStatistics.read(good, 2)


def test_wrong_wishes_are_refused(closed: Path) -> None:
    ds = open_features(closed)
    found = ds.statistics
    cases: list[tuple[Any, type[Exception], str]] = [
        (1, TypeError, "expected normalise=True, False or a mapping"),
        ("yes", TypeError, "expected normalise=True, False or a mapping"),
        ({"other": found["loudness"]}, ValueError, "got 'other'"),
        ({"modulation": found["loudness"]}, ValueError, "of 7 columns for modulation, got 1"),
        ({"loudness": (0.0, 1.0)}, TypeError, "as ds.statistics has them, got tuple"),
        ({"loudness": summed([], 1)}, ValueError, "of at least one frame of"),
    ]
    make = partial(ds.iterable, batch_size=2)
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            make(normalise=wrong)
