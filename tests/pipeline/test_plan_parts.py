"""Plans of many rows: listed, stored and read in parts, with the id that they would have in one."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earmill.pipeline.common.arrow_types import Columns
from earmill.pipeline.common.errors import CommitError, SourceError
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.planning import make_plan as plan_module
from earmill.pipeline.planning import shards as parts_module
from earmill.pipeline.planning.estimate import estimate
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan, plan_of, read_row_ids
from earmill.pipeline.planning.shards import Shard, StoredShard
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.messages import ShardOrder
from earmill.pipeline.worker.shard_runner import ShardRunner
from tests.chaos.jobs import write_corpus
from tests.pipeline.only_plan import only_plan
from tests.pipeline.test_plan import spec
from tests.pipeline.workers_here import worker_job

ROWS = 25


class Listed:
    """A source of given rows."""

    def __init__(self, rows: int, columns: Columns | None = None, **fields: Any) -> None:
        self._rows, self._fields, self._columns = rows, fields, columns or Columns()

    def items(self) -> Iterator[Item]:
        for n in range(self._rows):
            extra = {"text": f"sentence {n}", "n": n if n % 3 else None}
            item = Item(f"row{n:07d}", f"/a/{n:07d}.wav", seconds=2.0, size=n, position=n)
            yield replace(item, **{"extra": extra, **self._fields})

    def columns(self) -> Columns:
        return self._columns

    def skipped(self) -> dict[str, int]:
        return {".txt": 3}


def in_parts(monkeypatch: pytest.MonkeyPatch, rows: int = 6) -> None:
    """From now on plans of more rows are in parts, and nothing that was read is remembered."""
    monkeypatch.setattr(parts_module, "PART_ROWS", rows)
    parts_module._table.cache_clear()
    parts_module._items.cache_clear()


@pytest.fixture
def whole() -> Plan:
    return make_plan(Listed(ROWS), spec(shard_rows=4))  # type: ignore[arg-type]


@pytest.fixture
def plan(whole: Plan, monkeypatch: pytest.MonkeyPatch) -> Plan:
    in_parts(monkeypatch)
    return make_plan(Listed(ROWS), spec(shard_rows=4))  # type: ignore[arg-type]


def rows_of(plan: Plan) -> list[tuple[str, tuple[Item, ...]]]:
    return [(shard.shard_id, shard.items) for shard in plan.shards]


def test_a_plan_in_parts_is_the_plan(whole: Plan, plan: Plan, tmp_path: Path) -> None:
    assert plan.parts and not whole.parts
    assert plan.plan_id == whole.plan_id
    assert rows_of(plan) == rows_of(whole)
    assert (plan.rows, plan.notes, plan.extra_types) == (ROWS, whole.notes, whole.extra_types)
    assert [s.seconds for s in plan.shards] == [s.seconds for s in whole.shards]
    layout = Layout.open(str(tmp_path))
    path = plan.write(layout)
    parts = [f"{path[:-8]}/0000{n}.parquet" for n in range(6)]
    assert layout.list("plan") == [path, *parts]
    of_whole = estimate(whole, spec(), [])
    assert estimate(plan, spec(), []) == replace(of_whole, objects=of_whole.objects + len(parts))
    again = only_plan(layout)
    assert again == plan == Plan.read(layout, plan.plan_id)
    assert rows_of(again) == rows_of(whole)
    found = read_row_ids(layout, plan.plan_id)
    assert [*found] == [shard.shard_id for shard in whole.shards]
    assert found["00001"] == [item.row_id for item in whole.shards[1].items]


def test_what_travels_to_a_worker_has_no_rows(plan: Plan, tmp_path: Path) -> None:
    plan.write(Layout.open(str(tmp_path)))
    order = ShardOrder(plan.shards[2], "a" * 8)
    sent = pickle.dumps(order)
    assert len(sent) < 1000 and b"sentence" not in sent
    before = plan.shards[2].items
    parts_module._table.cache_clear()
    parts_module._items.cache_clear()
    received = pickle.loads(sent).shard
    assert received == plan.shards[2] and received.items == before
    assert str(tmp_path) in received.part.home.store.root  # and not this process's folder


def test_typed_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = pa.list_(pa.float32())
    source = Listed(ROWS, Columns({"tags": kind}), extra={"tags": [0.5, 1.0]})
    in_parts(monkeypatch)
    plan = make_plan(source, spec(shard_rows=4))  # type: ignore[arg-type]
    plan.write(Layout.open(str(tmp_path)))
    read = only_plan(Layout.open(str(tmp_path)))
    assert all(item.extra == {"tags": [0.5, 1.0]} for item in read.items())


def test_a_changed_plan_of_stored_and_new_shards(plan: Plan, tmp_path: Path) -> None:
    layout = Layout.open(str(tmp_path))
    plan.write(layout)
    new = Shard("00100", (Item("new", "/a/new.wav", extra={"text": "x", "n": 1}),))
    changed = plan_of([*plan.shards[2:], new], plan.spec_sha256, extra_types=plan.extra_types)
    changed.write(layout)
    again = Plan.read(layout, changed.plan_id)
    assert rows_of(again) == [*rows_of(plan)[2:], ("00100", new.items)]
    # What is left of it fits into one file.
    few = plan_of([plan.shards[1], new], plan.spec_sha256)
    assert not few.parts and few.rows == 5


class TestDamage:
    def test_a_part_that_changed(self, plan: Plan, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path))
        path = plan.write(layout).removesuffix(".parquet")
        part = tmp_path / path / "00003.parquet"
        pq.write_table(pq.read_table(part).slice(1), part)
        again = only_plan(layout)
        assert again.shards[0].items
        for read in (lambda: list(again.items()), lambda: read_row_ids(layout, plan.plan_id)):
            with pytest.raises(CommitError, match=r"00003\.parquet: content changed"):
                read()
        part.unlink()
        with pytest.raises(CommitError, match=r"00003\.parquet: missing"):
            list(again.items())

    def test_an_index_that_was_altered(self, plan: Plan, tmp_path: Path) -> None:
        layout = Layout.open(str(tmp_path))
        file = tmp_path / plan.write(layout)
        table = pq.read_table(file)
        pq.write_table(table.slice(1), file)
        with pytest.raises(CommitError, match="the index of the plan was altered"):
            only_plan(layout)
        pq.write_table(table, file)
        file.rename(file.with_name("0123456789abcdef.parquet"))
        with pytest.raises(CommitError, match="expected plan 0123456789abcdef"):
            only_plan(layout)

    def test_storing_that_was_cut_off_goes_on(
        self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layout = Layout.open(str(tmp_path))
        path = plan.write(layout)
        folder = tmp_path / path.removesuffix(".parquet")
        kept = (folder / "00000.parquet").stat().st_mtime_ns
        (tmp_path / path).unlink()
        (folder / "00004.parquet").unlink()
        (folder / "00005.parquet").write_bytes(b"half")
        again = make_plan(Listed(ROWS), spec(shard_rows=4))  # type: ignore[arg-type]
        assert again.write(layout) == path
        assert rows_of(only_plan(layout)) == rows_of(plan)
        assert (folder / "00000.parquet").stat().st_mtime_ns == kept


class TestListing:
    def test_rows_that_cannot_be_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        in_parts(monkeypatch)

        class Twice(Listed):
            def items(self) -> Iterator[Item]:
                yield from super().items()
                yield Item("row0000003", "/b.wav")

        with pytest.raises(SourceError, match=r"more than once: 'row0000003'$"):
            make_plan(Twice(ROWS), spec())  # type: ignore[arg-type]

    def test_a_channel_that_is_another_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        in_parts(monkeypatch)

        class Channel(Listed):
            def items(self) -> Iterator[Item]:
                yield Item("row0000003#ch1", "/b.wav")
                yield from super().items()

        each = JobSpec.load({**spec().model_dump(), "audio": {"channels": "each"}})
        with pytest.raises(SourceError, match="gives a channel of row 'row0000003'"):
            make_plan(Channel(ROWS), each)  # type: ignore[arg-type]

    def test_it_says_how_far_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan_module, "PROGRESS_S", 0.0)
        told: list[int] = []
        make_plan(Listed(3), spec(), told.append)  # type: ignore[arg-type]
        assert told == [1, 2, 3]

    def test_memory_does_not_grow_with_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is left of a row is its share of a shard and two hashes: some 60 bytes."""
        in_parts(monkeypatch, 50)

        def peak(rows: int) -> int:
            gc.collect()
            tracemalloc.start()
            plan = make_plan(Listed(rows), spec(shard_rows=25))  # type: ignore[arg-type]
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert plan.rows == rows
            return found

        peak(100)
        assert (peak(900) - peak(300)) / 600 < 100


def test_a_job_of_a_plan_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards run from orders without rows, and the dataset adds up."""
    monkeypatch.chdir(Path.cwd())
    corpus = write_corpus(tmp_path / "corpus", 7, seconds=0.2)
    job = JobSpec.load(
        {
            "source": {"kind": "files", "uri": str(corpus)},
            "extract": [{"model": "melspectrogram"}],
            "output": {"uri": str(tmp_path / "out"), "formats": ["parquet"], "shard_rows": 2},
        }
    )
    in_parts(monkeypatch, 3)
    plan = make_plan(open_source(job.source), job)
    assert all(isinstance(shard, StoredShard) for shard in plan.shards)
    layout = Layout.open(str(tmp_path / "out"))
    plan.write(layout)
    work = worker_job(job, plan, 1, tmp_path)
    runner = ShardRunner(work)
    runner.warm_up()
    open_dataset(layout, work.dataset)
    for number, shard in enumerate(plan.shards):
        runner.run(pickle.loads(pickle.dumps(ShardOrder(shard, f"{number:08x}"))))
    closed = finalise(layout)
    assert (closed.entry.rows_ok, closed.entry.rows_bad) == (7, 0)
    report = verify(layout)
    assert report.ok and report.plan_rows == 7 and report.orphans == []
