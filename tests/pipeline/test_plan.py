"""Plans: every row in exactly one shard, the same id for the same input, and an honest estimate."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.arrow_types import Columns
from earmill.pipeline.common.errors import CommitError, SourceError
from earmill.pipeline.formats.format import Encoding
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.zarr.write import write_zarr
from earmill.pipeline.planning.estimate import estimate
from earmill.pipeline.planning.make_plan import check_items, make_plan
from earmill.pipeline.planning.plan import Plan, read_row_ids
from earmill.pipeline.planning.shards import UNKNOWN_SECONDS, cut, item_seconds
from earmill.pipeline.sources.base import Fetched, Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import plan_path


class ListSource:
    """A source that is a list of items."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def items(self) -> Iterator[Item]:
        return iter(self._items)

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        raise NotImplementedError("plans are made without reading")

    def columns(self) -> Columns:
        return Columns()

    def skipped(self) -> dict[str, int]:
        return {".txt": 10, ".jpg": 2}

    def describe(self) -> dict[str, Any]:
        return {}


def spec(**output: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": "x"},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": "out", **output},
        }
    )


def clips(seconds: Sequence[float | None], **fields: Any) -> list[Item]:
    return [
        Item(row_id=f"clip{i}", uri=f"/a/clip{i}.wav", seconds=s, position=i, **fields)
        for i, s in enumerate(seconds)
    ]


RICH = [
    Item("a", "s3://b/a.flac", None, None, "e1", 10, 1.5, 2.5, {"x": 1, "é": "ü"}, 0),
    Item("b#1", "/b.wav", 0.25, 1.75, None, 20, 1700000000.123456, 1.5, {"x": None, "ok": True}, 1),
    Item("c", "hf:org/x#row=2", extra={"y": 0.1}, position=2),
]


class TestCutting:
    @given(
        seconds=st.lists(st.one_of(st.none(), st.floats(0, 50)), min_size=1, max_size=60),
        shard_seconds=st.floats(0.5, 120),
        shard_rows=st.integers(1, 9),
    )
    def test_every_row_once_in_order_and_no_shard_too_big(
        self, seconds: list[float | None], shard_seconds: float, shard_rows: int
    ) -> None:
        items = clips(seconds)
        groups = list(cut(items, shard_seconds, shard_rows))
        assert [item for group in groups for item in group] == items
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            total = sum(item_seconds(item) for item in group)
            assert len(group) == 1 or total <= shard_seconds
            assert len(group) <= shard_rows
            # No shard ends early: the next row would not have fitted.
            if following is not None:
                over = total + item_seconds(following[0]) > shard_seconds
                assert over or len(group) == shard_rows

    def test_by_seconds(self) -> None:
        plan = make_plan(ListSource(clips([4, 4, 4, 25, 4])), spec(shard_seconds=10))
        assert [[i.row_id for i in s.items] for s in plan.shards] == [
            ["clip0", "clip1"],
            ["clip2"],
            ["clip3"],
            ["clip4"],
        ]
        assert [shard.shard_id for shard in plan.shards] == ["00000", "00001", "00002", "00003"]
        assert [shard.seconds for shard in plan.shards] == [8, 4, 25, 4]

    def test_unknown_lengths_count_as_a_guess(self) -> None:
        assert item_seconds(Item("a", "a")) == UNKNOWN_SECONDS
        plan = make_plan(ListSource(clips([None] * 7)), spec(shard_seconds=3 * UNKNOWN_SECONDS))
        assert [len(shard.items) for shard in plan.shards] == [3, 3, 1]


class TestIdentity:
    def test_the_id_of_a_literal_plan_is_pinned(self) -> None:
        """A stored plan is found again by this id; see `planning.make_plan._identity`."""
        assert make_plan(ListSource(RICH), spec()).plan_id == "25449ac42fe54fe9"

    def test_equal_input_gives_an_equal_plan(self) -> None:
        assert make_plan(ListSource(RICH), spec()) == make_plan(ListSource(RICH), spec())

    @pytest.mark.parametrize(
        "change",
        [
            {"row_id": "z"},
            {"uri": "s3://b/z.flac"},
            {"start_s": 0.5},
            {"end_s": 0.5},
            {"etag": "e2"},
            {"size": 11},
            {"extra": {"x": 2}},
            {"position": 7},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_any_change_of_a_row_is_another_plan(self, change: dict[str, Any]) -> None:
        changed = [replace(RICH[0], **change), *RICH[1:]]
        plans = [make_plan(ListSource(items), spec()) for items in (RICH, changed)]
        assert plans[0].plan_id != plans[1].plan_id

    def test_the_modification_time_counts_only_without_a_tag(self) -> None:
        def plan_id(index: int) -> str:
            items = list(RICH)
            items[index] = replace(items[index], mtime=99.0)
            return make_plan(ListSource(items), spec()).plan_id

        assert plan_id(0) == make_plan(ListSource(RICH), spec()).plan_id
        assert plan_id(1) != make_plan(ListSource(RICH), spec()).plan_id

    def test_spec_and_shards_count(self) -> None:
        ids = {
            make_plan(ListSource(RICH), spec(**output)).plan_id
            for output in ({}, {"dtype": "float32"}, {"shard_rows": 1})
        }
        assert len(ids) == 3


class TestRefusals:
    def test_row_ids_that_occur_twice_are_named(self) -> None:
        items = [Item(name, "u") for name in "abcabcdde"]
        with pytest.raises(SourceError, match="more than once: 'a', 'b', 'c' and 1 more"):
            make_plan(ListSource(items), spec())

    def test_an_empty_source(self) -> None:
        with pytest.raises(SourceError, match="the source has no rows"):
            make_plan(ListSource([]), spec())

    def test_a_file_name_that_is_no_text(self) -> None:
        name = b"caf\xe9.wav".decode("utf-8", "surrogateescape")
        with pytest.raises(SourceError, match=r"the name is not UTF-8; rename the file"):
            make_plan(ListSource([Item(name, name)]), spec())


class TestStorage:
    def test_what_is_read_is_what_was_written(self, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path / "out"))
        plan = make_plan(ListSource(RICH), spec(shard_rows=2))
        path = plan.write(layout)
        assert path == plan_path(plan.plan_id)
        assert Plan.read(layout, plan.plan_id) == plan
        assert plan.rows == 3

    def test_the_schema_is_pinned(self, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path))
        path = make_plan(ListSource(RICH), spec(shard_rows=2)).write(layout)
        table = pa.parquet.read_table(io.BytesIO(layout.read_bytes(path)))
        assert {field.name: str(field.type) for field in table.schema} == {
            "shard": "string",
            "shard_position": "int32",
            "row_id": "string",
            "uri": "string",
            "start_s": "double",
            "end_s": "double",
            "etag": "string",
            "size": "int64",
            "mtime": "double",
            "seconds": "double",
            "extra_json": "string",
            "source_position": "int64",
        }
        assert table["shard"].to_pylist() == ["00000", "00000", "00001"]
        assert table["shard_position"].to_pylist() == [0, 1, 0]
        assert table["extra_json"].to_pylist()[0] == '{"x":1,"é":"ü"}'
        assert table.schema.metadata[b"spec_sha256"].decode() == spec(shard_rows=2).sha256()

    def test_a_stored_plan_is_never_rewritten(self, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path))
        plan = make_plan(ListSource(RICH), spec())
        file = tmp_path / plan.write(layout)
        before = (file.read_bytes(), file.stat().st_mtime_ns)
        plan.write(layout)
        assert (file.read_bytes(), file.stat().st_mtime_ns) == before

    def test_an_altered_plan_is_refused(self, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path))
        plan = make_plan(ListSource(RICH), spec())
        file = tmp_path / plan.write(layout)
        table = pa.parquet.read_table(file)
        pa.parquet.write_table(table.slice(1), file)
        with pytest.raises(CommitError, match=f"expected plan {plan.plan_id}, got rows of plan"):
            Plan.read(layout, plan.plan_id)
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(CommitError, match="the plan cannot be read"):
            Plan.read(layout, plan.plan_id)

    def test_row_ids_alone_are_those_of_the_plan(self, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path))
        plan = make_plan(ListSource(RICH), spec(shard_rows=2))
        plan.write(layout)
        assert list(read_row_ids(layout, plan.plan_id).items()) == [
            (shard.shard_id, [item.row_id for item in shard.items]) for shard in plan.shards
        ]

    def test_a_plan_of_another_version_is_refused_by_both_readings(self, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path))
        plan = make_plan(ListSource(RICH), spec())
        file = tmp_path / plan.write(layout)
        table = pa.parquet.read_table(file)
        metadata = {**table.schema.metadata, b"version": b"4"}
        pa.parquet.write_table(table.replace_schema_metadata(metadata), file)
        for read in (Plan.read, read_row_ids):
            with pytest.raises(CommitError, match=r"version 1, 2 or 3, got '4'; use the release"):
                read(layout, plan.plan_id)

    def test_a_plan_that_is_not_there_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(CommitError, match="cannot be read"):
            Plan.read(Layout.open(str(tmp_path)), "0" * 16)


def stream(name: str, width: int, frame_rate_hz: float) -> StreamInfo:
    return StreamInfo(
        name=name,
        model="m",
        unit="u",
        width=width,
        frame_rate_hz=frame_rate_hz,
        pool="mean",
        axes=("time", "channel"),
        channel_offsets=(0, width),
        fc_hz=(1000.0,),
        mfc_hz=(),
    )


class TestEstimate:
    streams = (stream("modulation", 248, 100.0), stream("loudness", 3, 62.5))

    def test_an_hour_of_modulation_features(self) -> None:
        plan = make_plan(ListSource(clips([10.0] * 360, size=320_000)), spec())
        result = estimate(plan, spec(), self.streams[:1])
        assert (result.rows, result.hours, result.shards) == (360, 1.0, 6)
        assert result.bytes_in == 360 * 320_000
        # 100 frames/s of 248 float16 values.
        assert result.bytes_out == {"zarr": 178_560_000, "parquet": 178_560_000}

    def test_whole_frames_of_each_row_and_the_dtype_count(self) -> None:
        plan = make_plan(ListSource(clips([0.999, 1.0, None])), spec())
        one = spec(formats=["parquet"], dtype="float32")
        result = estimate(plan, one, self.streams)
        frames = 99 + 100 + 1000, 62 + 62 + 625
        assert result.bytes_out == {"parquet": 4 * (248 * frames[0] + 3 * frames[1])}

    def test_files_that_serve_many_rows_are_counted_once(self) -> None:
        items = [Item(f"r{i}", "/one.wav", float(i), i + 1.0, size=1000) for i in range(5)]
        plan = make_plan(ListSource(items), spec())
        assert estimate(plan, spec(), self.streams).bytes_in == 1000

    def test_objects_are_those_the_sinks_write(self, tmp_path: Path) -> None:
        """Second route: write the shard and count."""
        seconds = [30.0, 41.0]
        plan = make_plan(ListSource(clips(seconds)), spec())
        rows = [
            FeatureRow(
                row_id=f"clip{i}",
                plan_row_id=f"clip{i}",
                channel=-1,
                seconds=s,
                facts={},
                extra={},
                streams={
                    info.name: np.ones((int(s * info.frame_rate_hz), info.width), np.float16)
                    for info in self.streams
                },
            )
            for i, s in enumerate(seconds)
        ]
        store = tmp_path / "s.zarr"
        write_zarr(store, rows, self.streams, Encoding())
        written = sum(1 for path in store.rglob("*") if path.is_file())
        both = estimate(plan, spec(), self.streams).objects
        parquet = estimate(plan, spec(formats=["parquet"]), self.streams).objects
        assert both - parquet == written


def test_no_rows_are_no_duplicates() -> None:
    """They were a ValueError of `max`."""
    with pytest.raises(SourceError, match="the source has no rows"):
        check_items([], spec())
