"""Datasets of earlier layout versions, made by the releases that wrote them, read and verify."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import LAYOUT_VERSION
from tests.data.layout1.make import N_FRAMES, NAMES, values
from tests.data.layout2 import make as layout2
from tests.pipeline.outputs import small_dataset

STORED = Path(__file__).parents[1] / "data" / "layout1" / "dataset"
STORED_2 = Path(__file__).parents[1] / "data" / "layout2" / "dataset"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the stored dataset."""
    return shutil.copytree(STORED, tmp_path / "old")


def test_the_stored_dataset_is_of_version_1_and_new_ones_are_not(tmp_path: Path) -> None:
    written = [STORED / "dataset.json", *(STORED / "commits").iterdir()]
    assert [json.loads(path.read_text())["layout_version"] for path in written] == [1, 1, 1]
    layout = small_dataset(tmp_path)
    dataset = read_dataset(layout)
    versions = [record.layout_version for record in commits(layout).values()]
    assert dataset is not None and [dataset.layout_version, *versions] == [LAYOUT_VERSION] * 4


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
@pytest.mark.parametrize("finalised", [True, False])
def test_version_1_reads_with_the_right_values(old: Path, fmt: str, finalised: bool) -> None:
    if not finalised:
        shutil.rmtree(old / "index")
    ds = open_features(old, format=fmt)
    assert [row.row_id for row in ds] == list(N_FRAMES)
    for row in ds:
        number = NAMES.index(row.row_id)
        assert row.extra == {"take": number}
        assert row.seconds == N_FRAMES[row.row_id] / 100
        np.testing.assert_array_equal(
            row.features["modulation"], values(number, N_FRAMES[row.row_id])
        )
        assert ds.provenance(row.index)["pcm_sha256"] == f"{number:064x}"


def test_version_1_verifies_and_damage_to_it_is_found(old: Path) -> None:
    layout = Layout.open(old)
    report = verify(layout)
    assert report.problems == [] and report.orphans == []
    assert (report.shards, report.rows_ok, report.rows_bad, report.plan_rows) == (2, 3, 1, 4)
    (bad,) = pq.read_table(old / "quarantine/00000-000000a0.parquet").to_pylist()
    assert (bad["row_id"], bad["error_class"]) == ("bad.wav", "not_audio")
    part = old / "data/00001-000000a1.zarr/modulation/values/c/0/0"
    part.write_bytes(part.read_bytes()[::-1])
    assert [line.split(":")[0] for line in verify(layout).problems] == [
        "data/00001-000000a1.zarr/modulation/values/c/0/0"
    ]


def test_version_2_is_stored_as_it_was() -> None:
    written = [STORED_2 / "dataset.json", *(STORED_2 / "commits").iterdir()]
    assert [json.loads(path.read_text())["layout_version"] for path in written] == [2, 2, 2]
    values = STORED_2 / "data/00000-000000a0.zarr/modulation/values"
    codecs = json.loads((values / "zarr.json").read_text())["codecs"][0]["configuration"]["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes", "zstd", "crc32c"]
    schema = pq.read_schema(STORED_2 / "data/00000-000000a0.parquet")
    assert str(schema.field("modulation").type).startswith("list<element: fixed_size_list<")


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_version_2_reads_with_the_right_values(fmt: str) -> None:
    """Several chunks, objects and row groups, events, and a row that Parquet divides."""
    ds = open_features(STORED_2, format=fmt)
    assert [row.row_id for row in ds] == [*layout2.SECONDS]
    for row in ds:
        np.testing.assert_array_equal(row.features["modulation"], layout2.frames(row.row_id))
        np.testing.assert_array_equal(row.features["spikes"].dense(), layout2.counts(row.row_id))
        assert row.extra == {"take": layout2.NAMES.index(row.row_id)}
    part = ds.slice(ds.index_of("long.wav"), 0.31, 0.72).features
    np.testing.assert_array_equal(part["modulation"], layout2.frames("long.wav")[31:72])
    np.testing.assert_array_equal(part["spikes"].dense(), layout2.counts("long.wav")[62:144])


def test_version_2_verifies_and_damage_to_it_is_found(tmp_path: Path) -> None:
    two = shutil.copytree(STORED_2, tmp_path / "two")
    layout = Layout.open(two)
    report = verify(layout)
    assert report.problems == [] and report.orphans == []
    assert (report.shards, report.rows_ok, report.rows_bad, report.plan_rows) == (2, 4, 1, 5)
    part = two / "data/00000-000000a0.zarr/modulation/values/c/1/0"
    content = bytearray(part.read_bytes())
    content[10] ^= 4
    part.write_bytes(content)
    assert [line.split(":")[0] for line in verify(layout).problems] == [
        "data/00000-000000a0.zarr/modulation/values/c/1/0"
    ]
    with pytest.raises(CommitError, match=r"values/c/1/0, chunk 0: the CRC-32C of a chunk"):
        open_features(two, format="zarr").by_id("long.wav")
