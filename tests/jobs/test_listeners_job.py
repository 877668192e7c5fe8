"""Jobs with listeners: two beside normal hearing, or one a row, and the hash of a listener."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import earmill
from earmill.pipeline.common.errors import SourceError, SpecError
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import describe_models
from earmill.pipeline.worker.device import Gpu
from earmill.pipeline.worker.models import build_extractors
from earmill.pipeline.worker.row_pipeline import RowProcessor
from tests.pipeline.again_jobs import shards_run_here
from tests.pipeline.audio_factory import encode, speech_like

MILD = {250: 10, 500: 15, 1000: 20, 2000: 35, 4000: 50, 8000: 60}
ENTRY: dict[str, Any] = {
    "model": "paulick2024",
    "fs_hz": 22050,
    "params": {"n_channels": 5},
    "streams": {"envelope": {}},
}


def heard(name: str | None, audiogram: dict[Any, float], **more: Any) -> dict[str, Any]:
    """An entry of the job with a listener."""
    return ENTRY | {"listener": {"name": name, "audiogram": audiogram, **more}}


def job(folder: Path, *extract: dict[str, Any], output: str = "out") -> dict[str, Any]:
    """A job on one clip of a second."""
    (folder / "audio").mkdir(exist_ok=True)
    (folder / "audio" / "a.wav").write_bytes(encode(speech_like(1.0, 16000), rate_hz=16000))
    return {
        "source": {"kind": "files", "uri": str(folder / "audio")},
        "extract": [*extract],
        "output": {"uri": str(folder / output), "formats": ["parquet"], "dtype": "float32"},
        "run": {"executor": "local", "workers": 1, "threads_per_worker": 1},
    }


def test_two_listeners_beside_normal_hearing(tmp_path: Path) -> None:
    carfac = {"model": "carfac", "listener": {"name": "mild", "audiogram": MILD}}
    entries = [ENTRY, heard("mild", MILD), heard("none", {1000: 0}), carfac]
    with shards_run_here():
        end = earmill.extract(job(tmp_path, *entries))
        alone = earmill.extract(job(tmp_path, ENTRY, output="alone"))
    assert (end.rows_ok, alone.rows_ok) == (1, 1)
    features = earmill.open_features(tmp_path / "out")[0].features
    assert [*features] == ["envelope", "envelope_mild", "envelope_none", "nap_mild"]
    normal = earmill.open_features(tmp_path / "alone")[0].features["envelope"]
    assert np.array_equal(features["envelope"], normal)
    assert np.array_equal(features["envelope_none"], normal)
    level_db = [20 * np.log10(each[20:].mean(0)) for each in (normal, features["envelope_mild"])]
    assert (level_db[0] - level_db[1] > [5, 5, 8, 15, 20]).all()
    assert earmill.verify_deep(tmp_path / "out", 1).equal == 1
    provenance = json.loads((tmp_path / "out" / "dataset.json").read_text())["provenance"]
    params = [record["params"] for record in provenance["models"]]
    stored = {str(hz): loss for hz, loss in MILD.items()}
    assert [each.get("audiogram") for each in params] == [None, stored, {"1000": 0}, stored]


def test_the_hash_is_of_the_listener(tmp_path: Path) -> None:
    def sha256(*extract: dict[str, Any]) -> str:
        return JobSpec.load(job(tmp_path, *extract)).sha256()

    assert sha256(ENTRY) == sha256(ENTRY | {"listener": None})
    as_text = {f"{hz}": float(loss) for hz, loss in reversed(MILD.items())}
    assert sha256(heard("mild", MILD)) == sha256(heard("mild", as_text))
    others = [
        ENTRY, heard("mild", MILD), heard("a", MILD), heard(None, MILD), heard("a", {250: 10}),
        heard("a", MILD, ohc_share=0.5),
    ]  # fmt: skip
    assert len({sha256(each) for each in others}) == len(others)
    spec = JobSpec.load(job(tmp_path, heard("mild", MILD)))
    assert JobSpec.load(spec) == spec
    changed = JobSpec.load(spec, overrides=["extract.0.listener.audiogram.250=20"])
    assert changed.sha256() == sha256(heard("mild", MILD | {250: 20}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (heard("mild", {}), "listener.audiogram: the audiogram must be dB HL by frequency in Hz"),
    (heard("mild", {0: 10}), "each above 0"),
    (heard("mild", {250: 140}), "losses between -20 and 130 dB"),
    (heard("Mild one", MILD), "listener.name: string should match pattern"),
    (heard("mild", MILD, age=70), "listener.age: unknown key"),
    (heard("mild", MILD, ohc_share=2), "listener.ohc_share: input should be less than"),
    (ENTRY | {"listener": {"name": "mild"}}, "listener.audiogram: missing"),
    (ENTRY | {"listener": "mild"}, "listener: expected a mapping"),
    (
        {"model": "dau1997", "listener": {"audiogram": MILD}},
        "extract.0: model 'dau1997' takes no listener: expected one of paulick2024, carfac",
    ),
    (
        heard("mild", MILD) | {"params": {"drnl_kwargs": {"subject": "HIx"}}},
        "expected subject NH with an audiogram",
    ),
]


@pytest.mark.parametrize(("entry", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_refusals(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        describe_models(JobSpec.load(job(tmp_path, entry)))
    assert message in str(caught.value)


def test_streams_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = job(tmp_path, heard("mild", MILD), heard("mild", {250: 10}))
    with pytest.raises(SpecError, match="stream 'envelope_mild' comes from both"):
        JobSpec.load(twice)
    by_default = {"model": "carfac", "listener": {"audiogram": MILD}}
    with pytest.raises(SpecError, match="stream 'nap' comes from both"):
        describe_models(JobSpec.load(job(tmp_path, {"model": "carfac"}, by_default)))


FLAT = {"1000": 40}
BAD = {
    "none": ("", "expected an audiogram, got nothing"),
    "empty": ("{}", "with at least one frequency"),
    "loud": ('{"1000": 500}', "losses between -20 and 130 dB"),
    "text": ("mild", "column 'audiogram': Expecting value"),
    "list": ("[20, 40]", "dB HL by frequency in Hz"),
    "deep": ("[" * 100_000, "nested too deeply"),
}
COLUMN = ENTRY | {"listener": {"name": "own", "column": "audiogram"}}


def write_rows(folder: Path, rows: dict[str, str]) -> str:
    """A manifest of one file, whose rows differ in their audiograms alone."""
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "uri", "audiogram"])
        table.writerows([row_id, "audio/a.wav", cell] for row_id, cell in rows.items())
    return str(path)


def column_job(folder: Path, rows: dict[str, str], *extract: dict[str, Any]) -> dict[str, Any]:
    """A job on rows with audiograms of their own."""
    made = job(folder, *extract)
    made["source"] = {"kind": "manifest", "uri": write_rows(folder, rows)}
    made["run"]["max_bad_fraction"] = 1.0
    return made


@pytest.fixture(scope="module")
def heard_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Features of the clip in a job with fixed listeners, by listener."""
    folder = tmp_path_factory.mktemp("fixed")
    with shards_run_here():
        earmill.extract(job(folder, heard("mild", MILD), heard("flat", FLAT)))
    features = earmill.open_features(folder / "out")[0].features
    return {name: features[f"envelope_{name}"] for name in ("mild", "flat")}


def test_each_row_has_the_listener_of_its_column(
    tmp_path: Path, heard_by: dict[str, np.ndarray]
) -> None:
    mild, flat = json.dumps(MILD), json.dumps(FLAT)
    good = {"a": mild, "b": flat, "c": mild, "d": '{"1000": 0}'}
    cells = good | {row_id: cell for row_id, (cell, _) in BAD.items()}
    spec = column_job(tmp_path, cells, ENTRY, COLUMN)
    with shards_run_here():
        end = earmill.extract(spec)
    assert (end.rows_ok, end.rows_bad) == (len(good), len(BAD))
    found = earmill.open_features(tmp_path / "out")
    rows = {row.row_id: row.features for row in found}
    for row_id, name in (("a", "mild"), ("b", "flat"), ("c", "mild")):
        np.testing.assert_array_equal(rows[row_id]["envelope_own"], heard_by[name])
    for features in rows.values():
        np.testing.assert_array_equal(features["envelope"], rows["d"]["envelope_own"])
    bad = {row["row_id"]: row for row in found.quarantine.to_pylist()}
    assert bad.keys() == BAD.keys()
    for row_id, (_, text) in BAD.items():
        assert bad[row_id]["error_class"] == "bad_listener" and text in bad[row_id]["message"]
    assert earmill.verify_deep(tmp_path / "out", 4).equal == 4
    provenance = json.loads((tmp_path / "out" / "dataset.json").read_text())["provenance"]
    assert provenance["models"][1]["params"]["audiogram"] == {"column": "audiogram"}

    # One audiogram is another, two are repaired, and a new row has the bytes of the others.
    write_rows(tmp_path, cells | {"a": flat, "none": flat, "text": mild, "new": mild})
    with shards_run_here():
        earmill.extract(spec, update=True)
    rows = {row.row_id: row.features for row in earmill.open_features(tmp_path / "out")}
    assert rows.keys() == {*good, "none", "text", "new"}
    of = {"a": "flat", "b": "flat", "c": "mild", "none": "flat", "text": "mild", "new": "mild"}
    for row_id, name in of.items():
        np.testing.assert_array_equal(rows[row_id]["envelope_own"], heard_by[name], row_id)


def test_a_repaired_audiogram_is_retried(tmp_path: Path, heard_by: dict[str, np.ndarray]) -> None:
    spec = column_job(tmp_path, {"a": json.dumps(FLAT), "b": ""}, COLUMN)
    with shards_run_here():
        earmill.extract(spec)
        write_rows(tmp_path, {"a": json.dumps(FLAT), "b": json.dumps(MILD)})
        earmill.retry(tmp_path / "out")
    rows = {row.row_id: row.features for row in earmill.open_features(tmp_path / "out")}
    np.testing.assert_array_equal(rows["b"]["envelope_own"], heard_by["mild"])


def test_features_added_for_another_audiogram_are_left_out(
    tmp_path: Path, heard_by: dict[str, np.ndarray]
) -> None:
    mild, flat = json.dumps(MILD), json.dumps(FLAT)
    mel = {"model": "melspectrogram", "fs_hz": 16000}
    spec, out = column_job(tmp_path, {"a": mild, "b": mild}, mel), tmp_path / "out"
    added = {"name": "own", "extract": [COLUMN]}
    with shards_run_here():
        earmill.extract(spec)
        earmill.add_features(out, added)
        write_rows(tmp_path, {"a": mild, "b": flat})
        earmill.extract(spec, update=True)
        assert earmill.diff(out).changed == ("b",)
        with pytest.warns(UserWarning, match="earlier rows are left out: own"):
            assert [*earmill.open_features(out, additions=True).streams] == ["mel"]
        earmill.add_features(out, added)
    rows = {row.row_id: row.features for row in earmill.open_features(out, additions=True)}
    for row_id, name in {"a": "mild", "b": "flat"}.items():
        np.testing.assert_array_equal(rows[row_id]["envelope_own"], heard_by[name])


def test_a_long_row_has_its_listener(tmp_path: Path) -> None:
    made = {}
    for name, entry in (("own", COLUMN), ("flat", heard("own", FLAT))):
        spec = JobSpec.load(column_job(tmp_path, {"a": json.dumps(FLAT)}, entry))
        source = open_source(spec.source)
        rows = RowProcessor(spec, source, build_extractors(spec, 1), decode_threads=1, long_s=0.3)
        (row,) = rows.process(list(source.items())).good
        made[name] = np.asarray(row.streams["envelope_own"])
        rows.close()
    assert made["own"].any()
    np.testing.assert_array_equal(made["own"], made["flat"])


def test_rows_of_a_launch_have_their_listeners(tmp_path: Path) -> None:
    """One launch has rows of two listeners; `carfac` stays on the CPU there."""
    cells = {"a": json.dumps(FLAT), "b": json.dumps(MILD), "c": json.dumps(FLAT), "d": "no"}
    entry = {"model": "carfac", "listener": {"name": "own", "column": "audiogram"}}
    spec = JobSpec.load(column_job(tmp_path, cells, entry))
    source, made = open_source(spec.source), list[dict[str, np.ndarray]]()
    for gpu in (None, Gpu("interpreted", torch.device("cpu"))):
        models = build_extractors(spec, 1, "cpu" if gpu is None else gpu.backend)
        rows = RowProcessor(spec, source, models, decode_threads=1, gpu=gpu)
        done = rows.process(list(source.items()))
        assert [row.row_id for row in done.bad] == ["d"]
        made.append({row.row_id: np.asarray(row.streams["nap_own"]) for row in done.good})
        rows.close()
    here, there = made
    for row_id, frames in here.items():
        np.testing.assert_array_equal(there[row_id], frames)
    assert np.array_equal(here["a"], here["c"]) and not np.array_equal(here["a"], here["b"])


def test_clips_of_a_batch_have_their_listeners(
    tmp_path: Path, heard_by: dict[str, np.ndarray]
) -> None:
    extractor = earmill.BatchExtractor({"extract": [COLUMN]}, audio="bytes")
    clip = tmp_path / "a.wav"
    clip.write_bytes(encode(speech_like(1.0, 16000), rate_hz=16000))
    made = extractor(
        {"bytes": [clip.read_bytes()] * 3, "audiogram": [MILD, FLAT | {"8000": None}, None]}
    )
    assert made["error"][:2] == ["", ""] and "bad_listener" in made["error"][2]
    for frames, name in zip(made["envelope_own"][:2], ("mild", "flat"), strict=True):
        np.testing.assert_array_equal(frames, heard_by[name])


def test_a_column_is_no_audiogram_and_has_no_equal_files(tmp_path: Path) -> None:
    both = ENTRY | {"listener": {"column": "audiogram", "audiogram": MILD}}
    with pytest.raises(SpecError, match="expected an audiogram or a column, got both"):
        JobSpec.load(job(tmp_path, both))
    with pytest.raises(SpecError, match=r"expected no output\.equal_files_once"):
        JobSpec.load(job(tmp_path, COLUMN), overrides=["output.equal_files_once=true"])


def test_a_column_that_no_row_has_ends_the_job_before_work(tmp_path: Path) -> None:
    entry = ENTRY | {"listener": {"column": "audiograms"}}
    with pytest.raises(SourceError, match="no row of the source has a column 'audiograms'"):
        earmill.extract(job(tmp_path, entry))
    assert not list((tmp_path / "out").glob("data/*"))
    with shards_run_here():
        earmill.extract(job(tmp_path, {"model": "melspectrogram", "fs_hz": 16000}))
    with pytest.raises(SourceError, match="no row of the source has a column 'audiograms'"):
        earmill.add_features(tmp_path / "out", {"extract": [entry]})
    assert not list((tmp_path / "out").glob("additions/*/data/*"))
    spec = column_job(tmp_path, {"a": json.dumps(FLAT)}, COLUMN)
    spec["output"] = {"uri": str(tmp_path / "own"), "formats": ["parquet"]}
    with shards_run_here():
        earmill.extract(spec)
        (tmp_path / "rows.csv").write_text("id,uri\na,audio/a.wav\n")
        with pytest.raises(SourceError, match="no row of the source has a column 'audiogram'"):
            earmill.extract(spec, update=True)
