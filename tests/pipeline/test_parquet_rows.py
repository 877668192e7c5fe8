"""Parquet that is streamed: planned from footers, and each byte of it fetched once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earmill.pipeline.common.errors import RowError, SourceError, SourceOutage, UnreadableError
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.shards import cut
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources import base as sources_base
from earmill.pipeline.sources.durations import ByteRate
from earmill.pipeline.sources.hf_parquet import ParquetRows
from earmill.pipeline.spec.job import JobSpec
from tests.pipeline.audio_factory import clip
from tests.pipeline.counting_store import served
from tests.pipeline.hf_data import (
    clips,
    contents,
    private_cache,  # noqa: F401
    source,
    table,
    write_parquet,
)
from tests.pipeline.outages import Clock
from tests.pipeline.streamed_set import (
    AUDIO_S,
    FILES,
    GROUP_ROWS,
    fill,
    parquet,
    times_given,
    wav,
)


def job(uri: str, **output: Any) -> JobSpec:
    where = {"kind": "hf", "uri": uri, "streaming": True}
    sections = {"extract": [{"model": "dau1997"}], "output": {"uri": "o", **output}}
    return JobSpec.load({"source": where, **sections})


@pytest.mark.long
def test_200_files_are_planned_from_a_fiftieth_and_each_byte_is_fetched_once() -> None:
    with served() as (store, url):
        n_rows = fill(store)
        total = sum(map(len, store.files.values()))
        spec = job(f"{url}/*.parquet", shard_seconds=5 * AUDIO_S)
        plan = make_plan(open_source(spec.source), spec)
        assert plan.rows == n_rows
        assert store.bytes_given < 0.02 * total
        # All but the first clip are known by their bytes alone.
        items = list(plan.items())
        assert [item.seconds for item in items] == pytest.approx([AUDIO_S] * len(items), rel=0.02)
        assert items[5].extra == {"text": "sentence 5"} and items[5].estimated
        assert len(plan.shards) > FILES / 2
        assert {len(shard.items) for shard in plan.shards[:-1]} == {2 * GROUP_ROWS}

        store.forget()
        workers = [open_source(spec.source) for _ in range(2)]
        found = {
            item.row_id: data
            for n, shard in enumerate(plan.shards)
            for item, data in zip(shard.items, contents(workers[n % 2], shard.items), strict=True)
        }
        assert found == {f"{n:09d}": wav(n) for n in range(plan.rows)}
        times = times_given(store)
        assert (times == 1).all() and times.size > 0.97 * total
        # The rest: both workers may look into a footer.
        assert store.bytes_given - times.size < 0.02 * total


class TestOverTheWeb:
    def test_one_file_and_rows_in_any_order(self) -> None:
        with served() as (store, url):
            store.put("a.parquet", parquet(range(10), compression="zstd"))
            opened = source(f"{url}/a.parquet", streaming=True)
            items = list(opened.items())
            for wanted in ([3, 4, 9], [0], [7, 2, 2], []):
                found = contents(opened, [items[n] for n in wanted])
                assert found == [wav(n) for n in wanted]

    def test_a_file_that_was_replaced_gives_no_rows(self) -> None:
        with served() as (store, url):
            store.put("a.parquet", parquet(range(4)))
            opened = source(f"{url}/a.parquet", streaming=True)
            items = list(opened.items())
            store.put("a.parquet", parquet(range(4, 8)))
            for worker in (opened, source(f"{url}/a.parquet", streaming=True)):
                for found in contents(worker, items):
                    assert isinstance(found, UnreadableError)
                    assert "changed since it was planned" in str(found)

    def test_an_outage_is_waited_for_and_then_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        monkeypatch.setattr(sources_base, "FETCH_RETRIES", clock.retries())
        with served() as (store, url):
            store.put("a.parquet", parquet(range(4)))
            opened = source(f"{url}/a.parquet", streaming=True)
            items = list(opened.items())
            store.fail = 2
            assert contents(opened, items) == [wav(n) for n in range(4)]
            store.fail = 1_000_000
            with pytest.raises(SourceOutage):
                contents(opened, items)

    def test_large_row_groups_go_through_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("earmill.pipeline.sources.fetch.MEMORY_BYTES", 1000)
        monkeypatch.setattr("earmill.pipeline.sources.fetch.PIECE_BYTES", 5000)
        with served() as (store, url):
            store.put("a.parquet", parquet(range(4)))
            opened = source(f"{url}/a.parquet", streaming=True)
            items = list(opened.items())
            assert contents(opened, items[1:]) == [wav(n) for n in range(1, 4)]


def test_row_groups_that_several_shards_fetch_are_told(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.parquet").write_bytes(parquet(range(12), row_group_size=6))
    for rows, split in ((6, 0), (4, 2)):
        spec = job(str(tmp_path / "set"), shard_rows=rows)
        plan = make_plan(open_source(spec.source), spec)
        assert plan.split == split
        told = "2 of the shards begin within a row group" in "; ".join(plan.notes)
        assert told == (split > 0)


class TestDamage:
    def test_a_footer_that_is_none(self, tmp_path: Path) -> None:
        folder = write_parquet(tmp_path / "p", table())
        broken = sorted(folder.iterdir())[1]
        content = broken.read_bytes()
        opened = source(folder, streaming=True)
        for bad in (content[:-1], content[:-8] + b"\xff\xff\xff\x7fPAR1", b"x"):
            broken.write_bytes(bad)
            with pytest.raises(SourceError, match=r"train-00001.*\.parquet: ") as caught:
                list(opened.items())
            assert "\n" not in str(caught.value)
            opened = source(folder, streaming=True)

    def test_a_damaged_page_costs_rows_of_its_row_group(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        path.write_bytes(parquet(range(6), compression="snappy"))
        chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
        opened = source(path, streaming=True)
        planned = [Item(item.row_id, item.uri) for item in opened.items()]
        content = bytearray(path.read_bytes())
        content[chunk.data_page_offset : chunk.data_page_offset + 40] = b"\xff" * 40
        path.write_bytes(content)
        found = contents(source(path, streaming=True), planned)
        assert [isinstance(one, RowError) for one in found] == [False] * 2 + [True] * 2 + [
            False
        ] * 2
        assert found[1] == wav(1) and found[5] == wav(5)

    def test_a_file_with_other_columns(self, tmp_path: Path) -> None:
        folder = tmp_path / "set"
        folder.mkdir()
        pq.write_table(pa.table({"audio": [wav(0)], "a": [1]}), folder / "0.parquet")
        pq.write_table(pa.table({"audio": [wav(1)]}), folder / "1.parquet")
        items = list(source(folder, streaming=True).items())
        assert [item.extra for item in items] == [{"a": 1}, {"a": None}]
        pq.write_table(pa.table({"audio": [wav(1)], "b": [2]}), folder / "1.parquet")
        with pytest.raises(SourceError, match=r"of the other files \(audio, a\), got audio"):
            list(source(folder, streaming=True).items())


def test_rows_of_an_earlier_plan_are_fetched_as_they_were(tmp_path: Path) -> None:
    """Plans of earlier releases have sizes and no tags; the names of rows are the same."""
    folder = write_parquet(tmp_path / "parquet", table())
    opened = source(folder, streaming=True)
    named = [item.uri for item in opened.items()]
    assert named[3] == f"hf:{folder}#shard=0&row=3" and named[4] == f"hf:{folder}#shard=1&row=0"
    old = [Item(f"{n:09d}", uri, size=len(clips()[n])) for n, uri in enumerate(named)]
    assert contents(opened, old) == clips()


def test_datasets_that_are_not_plain_parquet_are_streams(tmp_path: Path) -> None:
    table().save_to_disk(tmp_path / "saved")
    assert source(tmp_path / "saved", streaming=True)._parquet is None
    folder = write_parquet(tmp_path / "parquet", table())
    assert isinstance(source(folder, streaming=True)._parquet, ParquetRows)
    assert source(folder)._parquet is None


class TestBlocks:
    def test_blocks_stay_whole_within_reason(self) -> None:
        def rows(*blocks: tuple[int | None, int]) -> list[Item]:
            numbers = [block for block, count in blocks for _ in range(count)]
            return [Item(str(n), "u", seconds=1.0, block=b) for n, b in enumerate(numbers)]

        def sizes(items: list[Item], seconds: float, most: int = 1000) -> list[int]:
            return [len(group) for group in cut(items, seconds, most)]

        assert sizes(rows((0, 4), (1, 4), (2, 4)), 8.5) == [8, 4]
        assert sizes(rows((0, 6), (1, 6), (2, 6)), 5.0) == [6, 6, 6]
        assert sizes(rows((0, 4), (1, 90), (2, 4)), 10.0) == [10] * 9 + [8]
        assert sizes(rows((0, 4), (1, 4)), 100.0, 3) == [3, 3, 2]
        assert sizes(rows((None, 5), (0, 3), (None, 4)), 4.0) == [4, 4, 4]

    def test_a_rate_is_measured_where_a_header_says_it(self) -> None:
        data = clip("wav", 2.0)
        page = bytes(30) + len(data).to_bytes(4, "little") + data
        rate = ByteRate.in_column(page[:4096], len(page))
        assert rate is not None and rate.seconds("x.wav", len(data)) == pytest.approx(2.0, rel=0.01)
        assert rate.seconds("x.mp3", 8000) == 1.0
        for nonsense in (b"", page[34:4096], bytes(30) + b"\xff\xff\xff\x7f" + data[:999]):
            assert ByteRate.in_column(nonsense, len(page)) is None
