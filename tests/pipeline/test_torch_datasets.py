"""Torch datasets: each row once, and one order for any split over ranks and workers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import earmill.pipeline.formats.parquet.format as parquet_sink
from earmill import Crop, FeatureLoader, Features, JoinedFeatures, open_features
from earmill.pipeline.loader.collate import collate_jagged, collate_packed, collate_padded
from earmill.pipeline.loader.stream import AHEAD_BATCHES
from tests.pipeline.reader_data import (
    GROUPED_ROWS,
    ROWS_PER_GROUP,
    forks,
    ids,
    loaded,
    make_row,
    mixed_seconds,
    no_process_stays,
    no_read_ahead,
    small_row_groups,
)
from tests.pipeline.reader_data import LOADED_ROWS as N_ROWS
from tests.short import drawn

__all__ = ["no_process_stays", "no_read_ahead"]
quick = drawn(40, derandomize=True)


@pytest.fixture(scope="module")
def small(seven_a_shard: Path) -> Path:
    return seven_a_shard


@pytest.fixture(scope="module")
def grouped(forty_groups: Path) -> Iterator[Path]:
    """The set of 40 row groups; the sinks' sizes stay scaled down for the reader."""
    with small_row_groups():
        yield forty_groups


def check_tensors(features: Any, number: int) -> None:
    wanted = make_row(number, mixed_seconds(number)).streams
    for name, values in wanted.items():
        assert torch.equal(features[name], torch.from_numpy(values))


def test_map_style_rows_are_tensors(small: Path) -> None:
    dataset = open_features(small).torch()
    assert len(dataset) == N_ROWS
    check_tensors(dataset[-1].features, N_ROWS - 1)
    assert ids(dataset.__getitems__([9, 2, 9])) == [9, 2, 9]
    with pytest.raises(IndexError):
        dataset[N_ROWS]


@forks
@pytest.mark.parametrize(
    ("method", "collate"),
    [
        ("fork", collate_padded),
        ("fork", collate_packed),
        ("fork", collate_jagged),
        # A new interpreter takes seconds; `test_epochs` starts some as well.
        pytest.param("spawn", collate_padded, marks=pytest.mark.long),
    ],
)
def test_map_style_through_workers(small: Path, method: str, collate: Any) -> None:
    """Every row arrives whole, in the order asked for, by either way of starting workers."""
    ds = open_features(small)
    assert collate([ds[0]]).row_ids  # handles opened here must not reach the workers
    loader = DataLoader(
        ds.torch(),
        batch_size=8,
        num_workers=2 if method == "fork" else 1,
        collate_fn=collate,
        multiprocessing_context=method,
    )
    seen: list[int] = []
    for batch in loader:
        stream = batch.features["modulation"]
        parts = (
            stream.unbind()
            if isinstance(stream, torch.Tensor)
            else (stream.unpad() if collate is collate_padded else stream.unpack())
        )
        for number, row_id, part in zip(batch.indices.tolist(), batch.row_ids, parts, strict=True):
            wanted = make_row(number, mixed_seconds(number))
            assert row_id == wanted.row_id
            assert torch.equal(part, torch.from_numpy(wanted.streams["modulation"]))
            seen.append(number)
    assert seen == list(range(N_ROWS))


def test_a_stream_is_a_seeded_permutation(small: Path) -> None:
    ds = open_features(small)
    first = ids(ds.iterable(seed=1))
    assert sorted(first) == list(range(N_ROWS))
    assert first != sorted(first)
    assert ids(ds.iterable(seed=1)) == first
    assert ids(ds.iterable(seed=2)) != first
    assert ids(ds.iterable(seed=1, epoch=1)) != first
    assert ids(ds.iterable(shuffle=False)) == list(range(N_ROWS))


def test_a_stream_gives_the_rows_themselves(small: Path) -> None:
    for row in open_features(small).iterable(seed=3):
        check_tensors(row.features, row.index)


def test_format_and_streams_do_not_change_the_order(grouped: Path) -> None:
    chosen = {"seed": 1, "lanes": 2, "window_rows": 8}
    orders = [
        ids(open_features(grouped, **options).iterable(**chosen))
        for options in ({}, {"format": "zarr"}, {"format": "parquet", "streams": ["loudness"]})
    ]
    assert orders[0] == orders[1] == orders[2]


@forks
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_row_once_over_ranks_and_workers(small: Path, world: int, workers: int) -> None:
    """By a bare DataLoader whose batch size the stream does not know."""
    seen: Counter[int] = Counter()
    for rank in range(world):
        stream = open_features(small).iterable(seed=4, rank=rank, world_size=world)
        loader = DataLoader(stream, batch_size=5, num_workers=workers, collate_fn=ids)
        batches = list(loader)
        assert sum(map(len, batches)) == len(stream)
        seen.update(number for batch in batches for number in batch)
    assert seen == Counter(range(N_ROWS))


@forks
def test_batches_do_not_depend_on_the_number_of_workers(grouped: Path) -> None:
    ds = open_features(grouped)
    orders = []
    for workers in (0, 1, 2):
        stream = ds.iterable(seed=7, batch_size=6, lanes=4, window_rows=8)
        loader = FeatureLoader(stream, num_workers=workers)
        orders.append(loaded(loader))
        assert len(loader) == len(orders[-1])
    assert orders[0] == orders[1] == orders[2]
    assert [number for batch in orders[0] for number in batch] == ids(
        ds.iterable(seed=7, batch_size=6, lanes=4, window_rows=8)
    )


@pytest.mark.parametrize(("even", "total"), [(True, 27), ("pad", 27), ("drop", 24), (False, 26)])
def test_even_ranks(small: Path, even: Any, total: int) -> None:
    """26 rows on 3 ranks: 9 each with one repeated, or 8 each with two left out."""
    ds = open_features(small)
    shares = [
        ids(ds.iterable(seed=2, rank=rank, world_size=3, batch_size=4, even=even))
        for rank in range(3)
    ]
    assert sum(map(len, shares)) == total
    if even is not False:
        assert len(set(map(len, shares))) == 1
    counts = Counter(number for share in shares for number in share)
    assert len(counts) == min(total, N_ROWS)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1"),
        ({"seed": -1}, "seed must be an integer"),
        ({"epoch": -1}, "epoch must be an integer"),
        ({"even": "maybe"}, "even must be False"),
        ({"batch_size": 0}, "batch_rows must be at least 1"),
    ],
)
def test_wrong_settings_are_named(small: Path, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_features(small).iterable(**chosen)


def blocks_read(grouped: Path, ranks: int, **chosen: Any) -> int:
    """Row groups of one stream read by all ranks together, each with room for 3 of its windows."""
    total = 0
    for rank in range(ranks):
        ds = open_features(grouped, streams=["modulation"], format="parquet", cache_bytes=22_000)
        for _ in ds.iterable(seed=1, rank=rank, world_size=ranks, batch_size=2, **chosen):
            pass
        total += ds.io.blocks_read
    return total


@pytest.mark.usefixtures("no_read_ahead")
def test_a_shuffled_scan_reads_each_row_group_about_once(grouped: Path) -> None:
    """40 row groups; edges of lanes and windows may cost a few more, a whole shuffle far more."""
    n_groups = GROUPED_ROWS // ROWS_PER_GROUP
    windowed: dict[str, Any] = {"lanes": 4, "window_rows": 2 * ROWS_PER_GROUP}
    assert n_groups <= blocks_read(grouped, 1, lanes=1, window_rows=8) <= 1.1 * n_groups
    assert n_groups <= blocks_read(grouped, 2, **windowed) <= 1.25 * n_groups
    assert n_groups <= blocks_read(grouped, 4, **windowed) <= 1.25 * n_groups
    assert blocks_read(grouped, 1, lanes=1, window_rows=GROUPED_ROWS) > 2 * n_groups


def test_the_reader_knows_the_row_groups(grouped: Path) -> None:
    """The rule that the order uses gives the row groups that are in the files."""
    ds: Features = open_features(grouped)
    sizes = []
    for path in sorted((grouped / "data").glob("*.parquet")):
        meta = parquet_sink.pq.ParquetFile(path).metadata
        sizes += [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
    np.testing.assert_array_equal(ds.block_rows(), sizes)


def test_the_reader_sends_nothing_through_torch_distributed(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for rank and world size; a collective in a loader could wait for ever."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.distributed was used")

    for name in ("init_process_group", "barrier", "broadcast", "all_reduce", "all_gather"):
        monkeypatch.setattr(torch.distributed, name, refused)
    stream = open_features(small).iterable(seed=1, rank=0, world_size=2, batch_size=4, even=True)
    assert sum(map(len, loaded(FeatureLoader(stream)))) == N_ROWS // 2


@pytest.mark.parametrize("sets", [1, 2])
def test_the_set_is_told_what_comes_next(
    small: Path, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch before it is read, with those after it, by their numbers in their own set; of
    crops their stretches."""
    told: list[tuple[list[int], Any]] = []
    monkeypatch.setattr(
        Features, "prefetch", lambda _, rows, spans=None: told.append((list(rows), spans))
    )
    ds = open_features([small] * sets)
    make = {"seed": 1, "batch_size": 8}
    batches = loaded(FeatureLoader(ds.iterable(**make)))
    ahead = [
        [n for batch in batches[k : k + AHEAD_BATCHES] for n in batch] for k in range(len(batches))
    ]
    split = [[n % N_ROWS for n in rows if n // N_ROWS == k] for rows in ahead for k in range(sets)]
    assert sorted(rows for rows, _ in told) == sorted(filter(None, split))
    told.clear()
    cut = list(FeatureLoader(ds.iterable(**make, crop=Crop(0.1))))
    assert [batch.indices.tolist() for batch in cut] == batches
    assert sorted(rows for rows, _ in told) == sorted(filter(None, split))
    starts = {int(n): float(s) for b in cut for n, s in zip(b.indices, b.start_s, strict=True)}
    for rows, spans in told[: sets == 1 and len(told)]:
        for row, span in zip(rows, spans, strict=True):
            assert span in (None, (starts[row], starts[row] + 0.1))
        assert len({*spans}) > len(rows) / 2


@forks
def test_a_copied_set_reads_in_workers(small: Path, tmp_path: Path) -> None:
    """The index travels in the pickle, files are opened where they are read."""
    copy = shutil.copytree(small, tmp_path / "copy")
    loader = FeatureLoader(open_features(copy).iterable(batch_size=13), num_workers=1)
    assert sorted(n for batch in loaded(loader) for n in batch) == list(range(N_ROWS))


@forks
def test_joined_sets_read_in_as_many_workers_as_there_are_cores(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [open_features(small), open_features(small)]
    names = [{name: lead + name for name in sets[0].streams} for lead in ("", "other.")]
    monkeypatch.setattr("earmill.pipeline.loader.stream.cores", lambda: 1)
    loader = FeatureLoader(JoinedFeatures(sets, names).iterable(batch_size=13), num_workers=1)
    assert sorted(n for batch in loaded(loader) for n in batch) == list(range(N_ROWS))


@pytest.mark.parametrize(
    ("workers", "local", "ahead"), [(1, True, True), (2, True, False), (2, False, True)]
)
def test_a_worker_reads_ahead_where_a_core_is_free_or_a_store_is_waited_for(
    small: Path, monkeypatch: pytest.MonkeyPatch, workers: int, local: bool, ahead: bool
) -> None:
    ds = open_features([small, small])
    stream = ds.iterable(batch_size=4)
    told: list[Any] = []
    monkeypatch.setattr("earmill.pipeline.loader.stream.cores", lambda: 2)
    monkeypatch.setattr(type(ds), "is_local", local)
    monkeypatch.setattr(type(ds), "prefetch", lambda *given: told.append(given))
    for _ in stream.worker_batches(0, workers):
        pass
    assert told  # nobody's worker
    told.clear()
    monkeypatch.setattr("earmill.pipeline.loader.stream.get_worker_info", lambda: "a worker's")
    for _ in stream.worker_batches(0, workers):
        pass
    assert bool(told) == ahead
    monkeypatch.undo()
    assert ds.is_local and open_features(small).is_local
