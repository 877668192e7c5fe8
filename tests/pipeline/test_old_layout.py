"""A dataset of layout version 1, made by the release that wrote it, reads and verifies still."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from earmill import open_features
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.publish import commits
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import LAYOUT_VERSION
from tests.data.layout1.make import N_FRAMES, NAMES, values
from tests.pipeline.outputs import small_dataset

STORED = Path(__file__).parents[1] / "data" / "layout1" / "dataset"


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
