"""Bytes that changed and datasets that lie: refused by name, before code runs or memory goes."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError, EarmillError, OutputError
from earmill.pipeline.formats.stream_layout import EventLayout
from tests.pipeline.reader_data import make_row, write_set

FORMATS = ("zarr", "parquet")
DAMAGE = (
    r"row 'speaker 0/clip_0000\.wav', stream modulation: .* shard 00000 is missing or damaged "
    "although it is committed .*CRC checksum verification failed"
)
CRC = (
    r"row 'speaker 0/clip_0000\.wav', stream modulation: .*/0/0, (index of chunks|chunk 0): the CRC"
)
ROWS = 3


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original")
    write_set(path, n_rows=ROWS, rows_per_shard=ROWS, seconds=lambda row: 3.0)
    return path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def recommit(root: Path, path: Path) -> None:
    """Make the commit name a file as it is now, as an author who means harm would."""

    def update(record: Any) -> None:
        content = path.read_bytes()
        for file in record["files"]:
            if file["path"] == path.relative_to(root).as_posix():
                file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    edit_json(root / "commits/00000.json", update)


def store_of(root: Path) -> Path:
    return next((root / "data").glob("*.zarr"))


def file_of(root: Path) -> Path:
    return next((root / "data").glob("*.parquet"))


def first_values(root: Path, fmt: str) -> np.ndarray:
    return open_features(root, format=fmt, streams=["modulation"])[0].features["modulation"]


def flip(path: Path, position: int) -> Callable[[], None]:
    """Turn one bit over; the result turns it back."""
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[position] ^= 1 << position % 8
    path.write_bytes(damaged)
    return lambda: path.write_bytes(content) and None


def test_every_flipped_bit_of_a_zarr_object_is_found(copy: Path) -> None:
    path = store_of(copy) / "modulation/values/c/0/0"
    for position in range(0, path.stat().st_size, path.stat().st_size // 40):
        undo = flip(path, position)
        with pytest.raises(CommitError, match=CRC):
            first_values(copy, "zarr")
        undo()
    assert len(first_values(copy, "zarr")) == 300


def test_every_flipped_bit_of_a_parquet_page_is_found(copy: Path) -> None:
    path = file_of(copy)
    group = pq.ParquetFile(path).metadata.row_group(0)
    (column,) = (
        column
        for column in map(group.column, range(group.num_columns))
        if column.path_in_schema == "modulation"
    )
    end = column.data_page_offset + column.total_compressed_size
    header = 60  # before the first page's bytes; damage there has its own test
    for position in range(column.data_page_offset + header, end, (end - header) // 40):
        undo = flip(path, position)
        with pytest.raises(CommitError, match=DAMAGE):
            first_values(copy, "parquet")
        undo()
    assert len(first_values(copy, "parquet")) == 300


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_flipped_bit_anywhere_is_found_or_harmless(fmt: str, copy: Path) -> None:
    wanted = make_row(0, 3.0).streams["modulation"]
    path = file_of(copy) if fmt == "parquet" else store_of(copy) / "zarr.json"
    found = 0
    for position in range(0, path.stat().st_size, path.stat().st_size // 60):
        undo = flip(path, position)
        try:
            np.testing.assert_array_equal(first_values(copy, fmt), wanted)
        except CommitError:
            found += 1
        undo()
    assert found >= (60 if fmt == "zarr" else 5)  # a Parquet file holds other columns as well


@pytest.mark.parametrize(
    "name",
    [
        "dataset.json",
        "commits/00000.json",
        "rows/00000-00000000.parquet",
        "data/00000-00000000.parquet",
        "data/00000-00000000.zarr/zarr.json",
        "data/00000-00000000.zarr/modulation/values/c/0/0",
        "data/00000-00000000.zarr/modulation",
    ],
)
def test_no_link_leads_out_of_a_dataset(copy: Path, tmp_path: Path, name: str) -> None:
    fmt = "zarr" if ".zarr" in name else "parquet"
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EarmillError, match="a link out of the dataset"):
        first_values(copy, fmt)


def test_a_dataset_that_is_itself_a_link_or_holds_inner_links_opens(
    copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(copy)
    path = file_of(copy)
    path.rename(copy / "data/moved")
    path.symlink_to("moved")
    assert len(first_values(tmp_path / "link", "parquet")) == 300


class Harm:
    """Pickles into a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_store_of_format_2_is_not_opened_whatever_its_filters(copy: Path, tmp_path: Path) -> None:
    mark, store = tmp_path / "it ran", store_of(copy)
    shutil.rmtree(store)
    (store / "modulation/values").mkdir(parents=True)
    for group in (store, store / "modulation"):
        (group / ".zgroup").write_text('{"zarr_format": 2}')
    array = {
        "zarr_format": 2,
        "shape": [900, 7],
        "chunks": [900, 7],
        "dtype": "|O",
        "filters": [{"id": "pickle", "protocol": 5}],
        "compressor": None,
        "order": "C",
        "fill_value": None,
        "dimension_separator": "/",
    }
    (store / "modulation/values/.zarray").write_text(json.dumps(array))
    (store / "modulation/values/0").mkdir()
    (store / "modulation/values/0/0").write_bytes(pickle.dumps(Harm(mark)))
    with pytest.raises(CommitError, match="shard 00000 is missing or damaged"):
        first_values(copy, "zarr")
    assert not mark.exists()


def values_of(root: Any) -> Any:
    return root["consolidated_metadata"]["metadata"]["modulation/values"]


def inner_codecs(root: Any) -> Any:
    return values_of(root)["codecs"][0]["configuration"]["codecs"]


LIES = {
    "expected codecs out of": lambda root: inner_codecs(root).append({"name": "numcodecs.pickle"}),
    "expected codecs": lambda root: values_of(root)["codecs"].append({"name": "gzip"}),
    "got ": lambda root: values_of(root).update(storage_transformers=[{"name": "x"}]),
    "Zarr format 3": lambda root: root.update(zarr_format=2),
    r"claims \(\[1125899906842624, 7\]": lambda root: values_of(root).update(shape=[2**50, 7]),
    "expected 3 values": lambda root: root["consolidated_metadata"]["metadata"][
        "modulation/row_id"
    ].update(shape=[2**40]),
    "claims .*'float64'": lambda root: values_of(root).update(data_type="float64"),
    "its chunks are": lambda root: values_of(root)["codecs"][0]["configuration"].update(
        chunk_shape=[2**40, 7]
    ),
    "in objects of": lambda root: values_of(root)["chunk_grid"]["configuration"].update(
        chunk_shape=[2**60, 7]
    ),
    "makes no sense": lambda root: root.pop("consolidated_metadata"),
}


@pytest.mark.parametrize("message", LIES)
def test_a_store_that_claims_what_we_never_write_is_refused(copy: Path, message: str) -> None:
    path = store_of(copy) / "zarr.json"
    edit_json(path, LIES[message])
    with pytest.raises(CommitError, match="is not the one that was committed"):
        first_values(copy, "zarr")
    recommit(copy, path)
    with pytest.raises(CommitError, match=message):
        first_values(copy, "zarr")


def claim_frames(root: Path, frames: int) -> None:
    """Let commit, table of rows and store agree on frames that are not there."""

    def update(record: Any) -> None:
        record["frames"]["modulation"] = frames

    edit_json(root / "commits/00000.json", update)
    table = pq.read_table(root / "rows/00000-00000000.parquet")
    at = table.column_names.index("modulation_n_frames")
    counts = pa.array([frames, *table.column(at).to_pylist()[1:]])
    pq.write_table(
        table.set_column(at, "modulation_n_frames", counts), root / "rows/00000-00000000.parquet"
    )
    edit_json(store_of(root) / "zarr.json", lambda meta: values_of(meta).update(shape=[frames, 7]))
    recommit(root, store_of(root) / "zarr.json")


@pytest.mark.parametrize("fmt", FORMATS)
def test_frames_that_no_file_can_hold_are_refused_before_memory_is_taken(
    copy: Path, fmt: str
) -> None:
    claim_frames(copy, 2**40)
    message = {"zarr": "committed objects cannot hold", "parquet": "the index expects"}[fmt]
    with pytest.raises(CommitError, match=message):
        first_values(copy, fmt)


def test_a_column_larger_than_its_shard_is_not_read(copy: Path) -> None:
    table = pq.read_table(file_of(copy))
    at = table.column_names.index("modulation")
    huge = pa.array([bytes(14 * 40_000)] * ROWS, pa.binary())
    rewrite(copy, table.set_column(at, table.schema.field(at), huge))
    with pytest.raises(CommitError, match=r"claims 3 values of modulation in 1680\d\d\d bytes"):
        first_values(copy, "parquet")


def rewrite(root: Path, table: pa.Table) -> None:
    """Put another table into the place of the Parquet file, and into the commit."""
    pq.write_table(table, file_of(root), compression="none", use_dictionary=False)
    recommit(root, file_of(root))


def test_every_flipped_bit_of_a_parquet_footer_is_found(copy: Path) -> None:
    """Arrow would end the process at some of them."""
    path = file_of(copy)
    end = path.stat().st_size
    size = int.from_bytes(path.read_bytes()[-8:-4], "little") + 8
    for position in [*range(end - size, end - 8, size // 30), *range(end - 8, end)]:
        undo = flip(path, position)
        with pytest.raises(CommitError, match=r"CRC-32C of the footer|the end is not|damaged"):
            first_values(copy, "parquet")
        undo()
    assert len(first_values(copy, "parquet")) == 300


@pytest.mark.parametrize("cell", [bytes(15), None])
def test_cells_of_no_whole_frames_are_refused(copy: Path, cell: bytes | None) -> None:
    table = pq.read_table(file_of(copy))
    at = table.column_names.index("modulation")
    cells = pa.array([cell] * ROWS, pa.binary())
    rewrite(copy, table.set_column(at, table.schema.field(at), cells))
    with pytest.raises(CommitError, match="expected whole frames of 14 bytes in every cell"):
        first_values(copy, "parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slice(1), "expected 3 rows, its footer claims 2"),
        (
            lambda t: t.drop_columns(["modulation"]),
            "for modulation, 7 columns of float16, its footer claims nothing",
        ),
        (
            lambda t: t.set_column(
                t.column_names.index("modulation"),
                "modulation",
                pa.array([[[1.0] * 5]] * ROWS, pa.list_(pa.list_(pa.float16(), 5))),
            ),
            r"expected list<.*\[7\]> for modulation, .* claims list<.*\[5\]>",
        ),
        (
            lambda t: t.set_column(
                t.column_names.index("modulation"), "modulation", pa.array([b""] * ROWS)
            ),
            "expected a binary column modulation that says its columns",
        ),
    ],
)
def test_a_parquet_file_of_another_shape_is_refused(
    copy: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    rewrite(copy, change(pq.read_table(file_of(copy))))
    with pytest.raises(CommitError, match=message):
        first_values(copy, "parquet")


@pytest.mark.parametrize("attempt", ["../../etc/passwd", "/etc/passwd", "", "0000000A"])
def test_a_commit_cannot_name_files_elsewhere(copy: Path, attempt: str) -> None:
    edit_json(copy / "commits/00000.json", lambda record: record.update(attempt=attempt))
    with pytest.raises(CommitError, match="eight lower-case hex digits"):
        open_features(copy)


@pytest.mark.parametrize(
    ("column", "value"), [("shard", "../../../etc"), ("row", -1), ("modulation_start", -5)]
)
def test_an_index_cannot_point_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: Any
) -> None:
    """The name of an index is its own hash, so it says nothing about who wrote it."""
    from earmill.pipeline.dataset import finalise

    real = finalise.pq.write_table

    def lie(table: pa.Table, sink: Any, **options: Any) -> None:
        if "status" not in table.column_names:  # not the index
            return real(table, sink, **options)
        at = table.column_names.index(column)
        cells = pa.array([value, *table.column(at).to_pylist()[1:]], table.schema.field(at).type)
        real(table.set_column(at, column, cells), sink, **options)

    monkeypatch.setattr(finalise.pq, "write_table", lie)
    write_set(tmp_path, n_rows=ROWS, rows_per_shard=ROWS, finalised=True)
    with pytest.raises((CommitError, OutputError), match="expected shard ids and places from 0"):
        open_features(tmp_path)


@pytest.mark.parametrize("event", [(9, 0, 1), (-1, 0, 1), (1, 4, 1), (1, -1, 1)])
def test_events_outside_their_clip_are_refused(event: tuple[int, int, int]) -> None:
    stored = np.array([event], np.int32)
    with pytest.raises(CommitError, match="expected events of steps 0 to 8 in 4 channels"):
        EventLayout("spikes", width=4).read(
            lambda first, last: [(0, stored[first:last])],
            n_stored=1,
            n_frames=9,
            span=(0, 9),
            dtype=np.dtype(np.float32),
            copy=True,
        )
