"""WebDataset in and out of one job: tars by the package's writer, features by its reader."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import numpy as np
import webdataset

from earmill import open_features
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.webdataset import row_id_of
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.again_jobs import shards_run_here
from tests.pipeline.audio_factory import clip
from tests.pipeline.source_helpers import SPEECH, SPEECH_IDS

PER_TAR = 3


def write_tars(folder: Path) -> list[str]:
    """Real speech in tars, and a damaged clip; the row ids of the good ones."""
    folder.mkdir()
    ids = []
    for tar in range(2):
        with webdataset.TarWriter(str(folder / f"speech-{tar}.tar")) as sink:
            for number in range(tar * PER_TAR, (tar + 1) * PER_TAR):
                name = SPEECH_IDS[number]
                key, _, suffix = name.partition(".")
                sample = {suffix: (SPEECH / name).read_bytes(), "cls": number, "txt": f"t{number}"}
                sink.write({"__key__": key, **sample, "json": {"speaker": key.split("/")[0]}})
                ids.append(f"speech-{tar}.tar/{key}")
    with webdataset.TarWriter(str(folder / "speech-2.tar")) as sink:
        sink.write({"__key__": "bad/short", "wav": clip("wav")[:30], "cls": 7})
        sink.write({"__key__": "bad/none", "txt": "no audio"})
    return ids


def test_from_tars_to_tars(tmp_path: Path) -> None:
    ids = write_tars(tmp_path / "in")
    job = {
        "source": {"kind": "webdataset", "uri": f"{tmp_path}/in/speech-{{0..2}}.tar"},
        "extract": [{"model": "dau1997", "fs_hz": 16000}],
        "output": {
            "uri": str(tmp_path / "out"),
            "formats": ["webdataset", "zarr"],
            "shard_rows": 4,
        },
        "run": {"max_bad_fraction": 0.5},
    }
    with shards_run_here():
        end = run_job(JobSpec.load(job))
    assert (end.rows_ok, end.rows_bad, end.exit_code) == (6, 2, 0)
    assert verify(Layout.open(tmp_path / "out")).problems == []
    zarr = open_features(tmp_path / "out", format="zarr")
    bad = {row["row_id"]: row["error_class"] for row in zarr.quarantine.to_pylist()}
    assert bad["speech-2.tar/bad/none"] == "unreadable"
    assert bad["speech-2.tar/bad/short"] in ("truncated", "not_audio")
    tars = [str(path) for path in sorted((tmp_path / "out" / "data").glob("*.tar"))]
    assert len(tars) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files to the collector
        samples = [*webdataset.WebDataset(tars, shardshuffle=False).decode()]
        gc.collect()
    assert [row_id_of(sample["__key__"]) for sample in samples] == ids
    for number, (sample, row) in enumerate(zip(samples, zarr, strict=True)):
        assert row.row_id == ids[number]
        values = sample["modulation.npy"].astype(np.float32)
        scale = sample["json"].get("scale_factor", {}).get("modulation", 1.0)
        np.testing.assert_array_equal(values * scale, row.features["modulation"])
        facts = sample["json"]
        assert (facts["extra_cls"], facts["extra_txt"]) == (number, f"t{number}")
        assert facts["extra_speaker"] == SPEECH_IDS[number].split("/")[0]
        assert facts["pcm_sha256"] == zarr.provenance(number)["pcm_sha256"]
        assert f"#sample={SPEECH_IDS[number].partition('.')[0]}" in facts["uri"]
