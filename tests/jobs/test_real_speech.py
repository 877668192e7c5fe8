"""Real recordings through the real job, from a folder and from a Hugging Face dataset.

Speech in five containers and five rates goes through a job to Zarr and to Parquet. It is verified,
read back, compared with the model run on the decoded recordings, and opened by other tools.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import soundfile
import soxr
import xarray as xr
from datasets import Audio, Dataset, load_dataset

from amtcore.features.registry import build_extractor
from earmill import open_features
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.short import only

from ..compare import Tolerance, assert_close
from ..pipeline.source_helpers import SPEECH, SPEECH_IDS
from ..pipeline.workers_here import workers_here

FS_HZ = 16000
#: Half precision has 11 bits; the resampler of the second route is called in one go.
STORED = Tolerance(1e-3, "float16 storage", 1e-3)


def _files() -> list[Path]:
    return [SPEECH / name for name in SPEECH_IDS]


def _folder(tmp_path: Path) -> dict[str, Any]:
    return {"kind": "files", "uri": str(SPEECH)}


def _dataset() -> Dataset:
    rows = {
        "id": SPEECH_IDS,
        "speaker": [name.split("/")[0] for name in SPEECH_IDS],
        "audio": [{"bytes": path.read_bytes(), "path": path.name} for path in _files()],
    }
    return Dataset.from_dict(rows).cast_column("audio", Audio(decode=False))


def _hf_map_style(tmp_path: Path) -> dict[str, Any]:
    _dataset().save_to_disk(str(tmp_path / "saved"))
    return {"kind": "hf", "uri": str(tmp_path / "saved"), "id_column": "id"}


def _hf_streaming(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "parquet").mkdir()
    _dataset().to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    uri = str(tmp_path / "parquet")
    return {"kind": "hf", "uri": uri, "id_column": "id", "streaming": True}


SOURCES = {"folder": _folder, "hf_map_style": _hf_map_style, "hf_streaming": _hf_streaming}


def _extract(tmp_path: Path, kind: str) -> Path:
    output = tmp_path / "features"
    spec = JobSpec.load(
        {
            "source": SOURCES[kind](tmp_path),
            "extract": [{"model": "dau1997", "fs_hz": FS_HZ}],
            "output": {"uri": str(output), "formats": ["zarr", "parquet"], "shard_seconds": 8},
            "run": {"executor": "local", "workers": 1},
        }
    )
    with workers_here():
        end = run_job(spec)
    assert (end.exit_code, end.rows_ok, end.rows_bad) == (0, len(SPEECH_IDS), 0)
    return output


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The output of the job over each kind of source, made once."""
    return functools.cache(lambda kind: _extract(tmp_path_factory.mktemp(kind), kind))


@functools.cache
def _expected(path: Path) -> np.ndarray:
    """Features by a second route: soundfile, soxr and the extractor, called here."""
    wave, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    clip = soxr.resample(wave.mean(1), rate_hz, FS_HZ, quality="VHQ")
    return build_extractor("dau1997", fs_hz=FS_HZ).extract([clip])[0]["modulation"]


def test_the_recordings_are_of_many_kinds() -> None:
    infos = [soundfile.info(path) for path in _files()]
    assert len({info.format + info.subtype for info in infos}) >= 5
    assert len({info.samplerate for info in infos}) >= 4


@pytest.mark.parametrize(
    "kind",
    only(["folder"], SOURCES),
)
def test_extract_verify_and_read_back(kind: str, extracted: Callable[[str], Path]) -> None:
    output = extracted(kind)
    report = verify(Layout.open(str(output)))
    assert report.problems == []
    for name in ("zarr", "parquet"):
        features = open_features(output, format=name, dtype="float32")
        assert len(features) == len(SPEECH_IDS)
        for path, row_id in zip(_files(), SPEECH_IDS, strict=True):
            row = features.by_id(row_id)
            assert_close(row.features["modulation"], _expected(path), STORED, f"{name} {row_id}")
            if kind != "folder":
                assert row.extra["speaker"] == row_id.split("/")[0]


def test_other_tools_open_it(extracted: Callable[[str], Path], tmp_path: Path) -> None:
    output = extracted("folder")
    ours = open_features(output, format="parquet", dtype="float32")
    files = sorted(str(path) for path in (output / "data").glob("*.parquet"))
    by_id = {row.row_id: row.features["modulation"] for row in (ours[i] for i in range(len(ours)))}
    row_id = SPEECH_IDS[0]

    seen = {"pyarrow": {}, "polars": {}, "duckdb": {}, "datasets": {}}
    for file in files:
        for row in pq.read_table(file).to_pylist():
            seen["pyarrow"][row["row_id"]] = row["modulation"]
    frame = pl.read_parquet(files)
    seen["polars"] = dict(zip(frame["row_id"], frame["modulation"].to_list(), strict=True))
    query = "select row_id, modulation from read_parquet(?)"
    seen["duckdb"] = dict(duckdb.execute(query, [files]).fetchall())
    loaded = load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    seen["datasets"] = {row["row_id"]: row["modulation"] for row in loaded}
    for tool, rows in seen.items():
        assert set(rows) == set(SPEECH_IDS), tool
        columns = ours.streams["modulation"].width
        values = np.frombuffer(rows[row_id], "<f2").reshape(-1, columns).astype(np.float32)
        assert np.array_equal(values, by_id[row_id]), tool

    stores = sorted((output / "data").glob("*.zarr"))
    frames = 0
    for store in stores:
        with xr.open_zarr(store, group="modulation") as group:
            assert group["values"].shape[1] == 248
            assert int(group["row_size"].sum()) == group["values"].shape[0]
            frames += group["values"].shape[0]
    assert frames == sum(len(values) for values in by_id.values())
