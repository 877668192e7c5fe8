"""The catalog alone: what it promises of rows and shards, and every index it must refuse."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import earmill.pipeline.formats.parquet.format as parquet_sink
from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.snapshot import CommitRef, Current, Snapshot
from earmill.pipeline.formats.row_table import fact_names
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.reader.catalog import (
    SHOWN,
    Catalog,
    is_extra,
    load_catalog,
    read_quarantine,
)
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import (
    LOUDNESS_HZ,
    STREAMS,
    Writer,
    make_row,
    mixed_seconds,
    n_frames,
    values,
    write_set,
)
from tests.short import drawn

N_ROWS, PER_SHARD = 10, 4
SHARDS = ("00000", "00001", "00002")
SIZES = (4, 4, 2)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10 rows in 3 shards, one quarantined row, finalised."""
    path = tmp_path_factory.mktemp("closed")
    write_set(path, n_rows=N_ROWS, rows_per_shard=PER_SHARD, finalised=True)
    return path


@pytest.fixture(scope="module")
def scratch(closed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that is closed again and again with other indexes."""
    return shutil.copytree(closed, tmp_path_factory.mktemp("scratch") / "copy")


@pytest.fixture
def copy(closed: Path, tmp_path: Path) -> Path:
    """All but the features, which the catalog never opens."""
    return shutil.copytree(closed, tmp_path / "copy", ignore=shutil.ignore_patterns("data"))


def catalog_of(root: Path) -> Catalog:
    return load_catalog(Layout.open(str(root)))


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def stored(root: Path, folder: str, suffix: str, content: bytes) -> OutFile:
    """A file under the name that its content gives it, as finalise does."""
    digest = hashlib.sha256(content).hexdigest()
    rel = f"{folder}/{digest[:16]}{suffix}"
    (root / rel).write_bytes(content)
    return OutFile(rel, len(content), digest)


def close_with(
    root: Path,
    index: bytes | None = None,
    commits: Callable[[dict[str, CommitRef]], None] = lambda commits: None,
) -> None:
    """A snapshot and a current.json, both valid, that name this index and these commits."""
    current = Current.from_json((root / "current.json").read_bytes())
    snapshot = Snapshot.from_json((root / current.snapshot.path).read_bytes())
    refs = dict(snapshot.commits)
    commits(refs)
    file = snapshot.index if index is None else stored(root, "index", ".parquet", index)
    text = Snapshot(file, snapshot.plan, snapshot.dataset, refs).to_json().encode()
    named = stored(root, "snapshots", ".json", text)
    (root / "current.json").write_text(Current(named, current.cards).to_json())


def index_table(root: Path) -> pa.Table:
    return pq.read_table(only(root / "index"))


def with_index(root: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Close the set with another index, honestly hashed everywhere."""
    close_with(root, parquet(change(index_table(root))))


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def with_cells(table: pa.Table, column: str, cells: Sequence[Any], kind: Any = None) -> pa.Table:
    at = table.column_names.index(column)
    return table.set_column(at, column, pa.array(cells, kind or table.schema.field(at).type))


def column_of(table: pa.Table, column: str) -> list[Any]:
    cells: list[Any] = table.column(column).to_pylist()
    return cells


class TestRows:
    def test_one_line_a_good_row_in_order_of_shard_and_place(self, closed: Path) -> None:
        catalog = catalog_of(closed)
        places = [(shard, row) for shard, n in zip(SHARDS, SIZES, strict=True) for row in range(n)]
        found = zip(
            catalog.table.column("shard").to_pylist(), catalog.column("row").tolist(), strict=True
        )
        assert [*found] == places
        assert catalog.table.column("row_id").to_pylist() == [
            make_row(i, 1.0).row_id for i in range(N_ROWS)
        ]
        assert catalog.column("seconds").tolist() == [mixed_seconds(i) for i in range(N_ROWS)]

    def test_an_index_in_any_order_gives_the_same_table(self, copy: Path) -> None:
        before = catalog_of(copy)
        rng = np.random.default_rng(3)
        with_index(copy, lambda table: table.take(rng.permutation(len(table))))
        after = catalog_of(copy)
        assert after.table.equals(before.table)
        assert after.fingerprint == before.fingerprint

    def test_before_finalise_the_tables_of_rows_say_the_same(
        self, closed: Path, tmp_path: Path
    ) -> None:
        write_set(tmp_path / "open", n_rows=N_ROWS, rows_per_shard=PER_SHARD)
        early, late = catalog_of(tmp_path / "open"), catalog_of(closed)
        assert early.table.equals(late.table)
        assert early.fingerprint == late.fingerprint
        assert set(early.records) == set(SHARDS)
        assert (late.records, set(late.refs)) == ({}, set(SHARDS))

    def test_starts_are_the_frames_before_in_the_shard(self, closed: Path) -> None:
        catalog = catalog_of(closed)
        for info in STREAMS:
            sizes = [n_frames(i, info.frame_rate_hz) for i in range(N_ROWS)]
            assert catalog.column(f"{info.name}_n_frames").tolist() == sizes
            starts = [sum(sizes[i // PER_SHARD * PER_SHARD : i]) for i in range(N_ROWS)]
            assert catalog.column(f"{info.name}_start").tolist() == starts

    def test_columns_are_those_that_are_shown(self, closed: Path) -> None:
        names = catalog_of(closed).table.column_names
        places = [f"{i.name}_{what}" for i in STREAMS for what in ("start", "n_frames")]
        assert names == [*SHOWN, *places, "extra_label", "extra_text"]
        assert [name for name in names if is_extra(name)] == ["extra_label", "extra_text"]

    def test_facts_are_what_is_left_of_a_table_of_rows(self, closed: Path) -> None:
        catalog, layout = catalog_of(closed), Layout.open(str(closed))
        table = read_table(layout, str(catalog.record(layout, "00000").path("rows")))
        names = fact_names(table.column_names, catalog.streams.values())
        assert {"uri", "rate_hz", "pcm_sha256", "gain_db", "calibration"} <= set(names)
        assert not {"row_id", "seconds", "modulation_start", "extra_label"} & set(names)


class TestDerived:
    def test_shards_and_how_many_rows_each_has(self, closed: Path) -> None:
        names, counts = catalog_of(closed).shards
        assert (names, counts.tolist()) == (SHARDS, list(SIZES))

    def test_bytes_of_a_row_are_those_of_its_arrays(self, closed: Path) -> None:
        features = open_features(closed, format="parquet", dtype="stored")
        wanted = [sum(f.nbytes for f in row.features.values()) for row in features]
        assert catalog_of(closed).row_bytes.tolist() == wanted
        assert features.nbytes == sum(wanted)

    def test_ids_in_order(self, closed: Path) -> None:
        catalog = catalog_of(closed)
        ids = catalog.table.column("row_id").to_pylist()
        assert [ids[i] for i in catalog.id_order] == sorted(ids)

    def test_blocks_are_the_row_groups_of_the_parquet_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Second route: the footers. Scaled down, so that a shard has several."""
        monkeypatch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", (600, 1200))
        write_set(tmp_path, n_rows=N_ROWS, rows_per_shard=PER_SHARD, finalised=True)
        groups = []
        for path in sorted((tmp_path / "data").glob("*.parquet")):
            meta = pq.ParquetFile(path).metadata
            groups += [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
        blocks = catalog_of(tmp_path).block_rows.tolist()
        assert blocks == groups
        assert len(blocks) > len(SIZES)
        assert sum(blocks) == N_ROWS

    def test_the_fingerprint_tells_rows_shards_and_specs_apart(self, tmp_path: Path) -> None:
        def fingerprint(name: str, rows: list[list[int]], **options: Any) -> str:
            writer = Writer(tmp_path / name, **{"formats": ("parquet",), **options})
            for number, of_shard in enumerate(rows):
                writer.shard(number, [make_row(i, mixed_seconds(i)) for i in of_shard])
            return catalog_of(tmp_path / name).fingerprint

        one = fingerprint("one", [[0, 1], [2]])
        assert fingerprint("again", [[0, 1], [2]]) == one
        others = {
            fingerprint("moved", [[0], [1, 2]]),
            fingerprint("fewer", [[0, 1]]),
            fingerprint("longer", [[0, 3], [2]]),
            fingerprint("spec", [[0, 1], [2]], formats=("zarr",)),
        }
        assert len(others | {one}) == 5


class TestRefused:
    """A hash only says that a file is the one that was named: here every hash is right."""

    @staticmethod
    def refused(root: Path) -> str:
        with pytest.raises(CommitError) as caught:
            open_features(root)
        message = str(caught.value)
        assert "\n" not in message
        assert str(root) in message
        return message

    @pytest.mark.parametrize(
        "column", ["row_id", "shard", "row", "status", "loudness_start", "modulation_n_frames"]
    )
    def test_an_index_without_a_column(self, copy: Path, column: str) -> None:
        with_index(copy, lambda table: table.drop_columns([column]))
        assert column in self.refused(copy)

    @pytest.mark.parametrize(
        ("column", "kind"),
        [
            ("row", pa.string()),
            ("loudness_start", pa.string()),
            ("loudness_n_frames", pa.float64()),
            ("shard", pa.int64()),
            ("row_id", pa.int64()),
            ("seconds", pa.string()),
        ],
    )
    def test_a_column_of_another_type(self, copy: Path, column: str, kind: pa.DataType) -> None:
        def other(table: pa.Table) -> pa.Table:
            return with_cells(table, column, ["1" if kind == "string" else 1] * len(table), kind)

        with_index(copy, other)
        assert f"in its column '{column}'" in self.refused(copy)

    @pytest.mark.parametrize("column", ["row_id", "shard", "row", "loudness_start", "seconds"])
    def test_a_good_row_without_a_value(self, copy: Path, column: str) -> None:
        with_index(
            copy, lambda t: with_cells(t, column, [*t.column(column).to_pylist()[:-1], None])
        )
        assert column in self.refused(copy)

    @pytest.mark.parametrize("column", ["row", "loudness_start", "modulation_n_frames"])
    def test_a_place_before_the_first(self, copy: Path, column: str) -> None:
        with_index(copy, lambda t: with_cells(t, column, [*column_of(t, column)[:-1], -1]))
        assert column in self.refused(copy)

    @pytest.mark.parametrize("shard", ["../../etc", "", "1", "0000x"])
    def test_a_shard_that_is_none(self, copy: Path, shard: str) -> None:
        with_index(copy, lambda t: with_cells(t, "shard", [shard] * len(t)))
        assert "expected shard ids" in self.refused(copy)

    @pytest.mark.parametrize("content", [b"", b"PAR1", b"{}", b"PAR1" + bytes(50) + b"PAR1"])
    def test_an_index_that_is_no_parquet(self, copy: Path, content: bytes) -> None:
        close_with(copy, content)
        self.refused(copy)

    def test_a_cut_index(self, copy: Path) -> None:
        content = only(copy / "index").read_bytes()
        close_with(copy, content[:-20])
        self.refused(copy)

    def test_a_shard_that_no_commit_is_named_for(self, copy: Path) -> None:
        """The index has rows of it, the snapshot no commit: read from its first record."""
        shutil.rmtree(copy / "commits")
        close_with(copy, commits=lambda refs: refs.pop("00002") and None)
        layout = Layout.open(str(copy))
        with pytest.raises(CommitError, match=r"commits/00002\.json is missing"):
            catalog_of(copy).record(layout, "00002")

    @pytest.mark.parametrize("generation", [0, 3])
    def test_a_commit_of_another_attempt_or_generation(self, copy: Path, generation: int) -> None:
        def other(refs: dict[str, CommitRef]) -> None:
            refs["00001"] = CommitRef(generation, "f" * 8, refs["00001"].sha256)

        close_with(copy, commits=other)
        catalog, layout = catalog_of(copy), Layout.open(str(copy))
        catalog.record(layout, "00000")
        text = "expected attempt ffffffff" if generation == 0 else r"00001\.r3\.json is missing"
        with pytest.raises(CommitError, match=text):
            catalog.record(layout, "00001")

    def test_a_commit_without_a_stream_of_the_dataset(self, copy: Path) -> None:
        path = copy / "commits/00001.json"
        record = json.loads(path.read_text())
        del record["frames"]["loudness"]
        path.write_text(json.dumps(record))
        with pytest.raises(CommitError, match=r"shard '00001' does not belong .*'loudness'"):
            catalog_of(copy).record(Layout.open(str(copy)), "00001")


class TestQuarantine:
    def test_bad_rows_with_the_shard_they_belong_to(self, closed: Path) -> None:
        table = read_quarantine(Layout.open(str(closed)), catalog_of(closed))
        assert table.select(["row_id", "error_class", "shard"]).to_pylist() == [
            {"row_id": "broken.wav", "error_class": "not_audio", "shard": "00001"}
        ]

    def test_open_and_closed_sets_agree(self, closed: Path, tmp_path: Path) -> None:
        write_set(tmp_path, n_rows=N_ROWS, rows_per_shard=PER_SHARD)
        early = read_quarantine(Layout.open(str(tmp_path)), catalog_of(tmp_path))
        late = read_quarantine(Layout.open(str(closed)), catalog_of(closed))
        assert early.equals(late)

    def test_none_is_an_empty_table_of_the_same_columns(self, tmp_path: Path, closed: Path) -> None:
        writer = Writer(tmp_path)
        writer.shard(0, [make_row(0, 1.0)])
        empty = read_quarantine(Layout.open(str(tmp_path)), catalog_of(tmp_path))
        full = read_quarantine(Layout.open(str(closed)), catalog_of(closed))
        assert (len(empty), empty.column_names) == (0, full.column_names)


@given(data=st.data())
@drawn(10)
def test_one_wrong_cell_costs_no_more_than_its_row(
    closed: Path, scratch: Path, data: st.DataObject
) -> None:
    """Whatever a cell says: the set is refused, or its row is, or the values are the right ones."""
    column = data.draw(st.sampled_from(["row", "loudness_start", "loudness_n_frames", "row_id"]))
    table = index_table(closed)
    cells = column_of(table, column)
    at = data.draw(st.integers(0, len(cells) - 1))
    kind = st.text(max_size=3) if column == "row_id" else st.integers(-5, 2**40)
    cells[at] = data.draw(kind | st.sampled_from(cells))
    close_with(scratch, parquet(with_cells(table, column, cells)))
    read = 0
    try:
        features = open_features(scratch, streams=["loudness"])
        for position in range(len(features)):
            row_id = features.table.column("row_id")[position].as_py()
            try:
                found = features[position].features["loudness"]
            except CommitError:
                continue
            number = int(row_id[-8:-4])
            whole = values(number, n_frames(number, LOUDNESS_HZ), 1)
            shorter = column == "loudness_n_frames" and len(found) == cells[at]
            np.testing.assert_array_equal(found, whole[: len(found)] if shorter else whole)
            read += 1
        assert read >= N_ROWS - 1
    except CommitError as error:
        assert "\n" not in str(error)
