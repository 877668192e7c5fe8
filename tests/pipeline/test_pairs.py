"""Rows with a reference recording: what models of pairs get, and which rows are quarantined.

The second route is the plain one: soundfile reads, the resampler takes each recording whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import yaml

import earmill
from earmill.jobs.cli import run
from earmill.pipeline.audio.resample import resample
from earmill.pipeline.common.errors import SourceError, SourceOutage, SpecError
from earmill.pipeline.planning.estimate import job_cost
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.sources import base as sources_base
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import assert_equal_datasets
from tests.pipeline.again_jobs import Killed, run_here, shards_run_here  # noqa: F401
from tests.pipeline.audio_factory import clip, encode, speech_like
from tests.pipeline.hf_data import private_cache  # noqa: F401
from tests.pipeline.outages import Clock, s3_error, s3_store
from tests.pipeline.stranger_pair import HOP
from tests.pipeline.strangers import install
from tests.pipeline.test_row_pipeline import Job

FS_HZ = 16000
PAIR = {"model": "pair", "streams": {"peaks": None}}
MEL = {"model": "melspectrogram", "fs_hz": FS_HZ}
Rows = Mapping[str, tuple[str, str]]


@pytest.fixture(scope="module", autouse=True)
def _pair_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The model of pairs, installed as another distribution; jobs run in this process."""
    text = Path(__file__).with_name("stranger_pair.py").read_text()
    points = {"amtcore.models": {"pair": "pair_things:PEAKS"}}
    folder = install(tmp_path_factory.mktemp("site"), "pair-things", points, {"pair_things": text})
    with shards_run_here(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def write(path: Path, seconds: float = 0.5, rate_hz: int = FS_HZ, **options: Any) -> Path:
    """A recording in the kind of its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = speech_like(seconds, rate_hz, **options)
    path.write_bytes(encode(samples, path.suffix[1:], rate_hz))
    return path


def table_of(folder: Path, rows: Rows) -> Path:
    """A table of ids, noisy files and clean files."""
    lines = [f"{name},{noisy},{clean}" for name, (noisy, clean) in rows.items()]
    path = folder / "pairs.csv"
    path.write_text("\n".join(["id,uri,clean", *lines]) + "\n")
    return path


def job(folder: Path, *models: Mapping[str, Any], **source: Any) -> dict[str, Any]:
    return {
        "source": {
            "kind": "manifest", "uri": str(folder / "pairs.csv"), "reference_column": "clean",
            **source,
        },
        "extract": list(models or [PAIR]),
        "output": {
            "uri": str(folder / "out"), "dtype": "float32", "shard_rows": 2,
            "formats": ["parquet"],
        },
        "run": {"max_bad_fraction": 1},
    }  # fmt: skip


def pairs(folder: Path, count: int = 3) -> Path:
    """A folder of `count` pairs of wav files."""
    rows = {}
    for index in range(count):
        rows[f"row{index}"] = (f"noisy/{index}.wav", f"clean/{index}.wav")
        write(folder / f"noisy/{index}.wav", seed=index)
        write(folder / f"clean/{index}.wav", seed=100 + index)
    table_of(folder, rows)
    return folder


def heard(path: Path, channel: int | None = None) -> np.ndarray:
    """The mean of the channels, or one channel, at the model's rate."""
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono = samples.mean(1, dtype=np.float64) if channel is None else samples[:, channel]
    return resample(np.ascontiguousarray(mono, np.float32), rate_hz, FS_HZ)


def peaks(reference: np.ndarray, own: np.ndarray, gain: float = 1.0) -> np.ndarray:
    frames = min(len(reference), len(own)) // HOP
    both = [each[: frames * HOP].reshape(frames, HOP) for each in (reference, own)]
    return np.stack([np.abs(each).max(1) for each in both], 1) * np.float32(gain)


def bad(out: Path) -> dict[str, tuple[str, str, str]]:
    """Quarantined rows: stage, error class and message."""
    return {
        row["row_id"]: (row["stage"], row["error_class"], row["message"])
        for row in earmill.open_features(out).quarantine.to_pylist()
    }


def test_a_model_of_pairs_gets_both_and_others_the_row_alone(tmp_path: Path) -> None:
    write(tmp_path / "noisy/a.flac", 0.8, 22050, channels=2, seed=1)
    write(tmp_path / "clean/a.wav", 0.8, 48000, seed=2)
    write(tmp_path / "noisy/b.wav", 0.6, seed=3)
    write(tmp_path / "clean/b.ogg", 0.6, 44100, channels=2, seed=4)
    rows = {"a": ("noisy/a.flac", "clean/a.wav"), "b": ("noisy/b.wav", "clean/b.ogg")}
    table_of(tmp_path, rows)
    assert earmill.extract(job(tmp_path, PAIR, MEL)).rows_ok == 2
    ds = earmill.open_features(tmp_path / "out")
    for name, (noisy, clean) in rows.items():
        wanted = peaks(heard(tmp_path / clean), heard(tmp_path / noisy))
        row = ds.by_id(name)
        np.testing.assert_array_equal(row.features["peaks"], wanted)
        facts = ds.provenance(row.index)
        assert facts["reference_uri"] == str(tmp_path / clean)
        assert len(facts["reference_pcm_sha256"]) == 64 != facts["pcm_sha256"]
    assert "extra_clean" not in ds.table.column_names
    alone = job(tmp_path, MEL, reference_column=None)
    alone["output"]["uri"] = str(tmp_path / "alone")
    earmill.extract(alone)
    for row in earmill.open_features(tmp_path / "alone"):
        np.testing.assert_array_equal(row.features["mel"], ds.by_id(row.row_id).features["mel"])
    report = earmill.verify_deep(tmp_path / "out", 2)
    assert report.ok and report.equal == 2


@pytest.mark.parametrize("reference_s", [0.46, 0.549, 0.551, 0.44])
def test_lengths_are_cut_within_the_tolerance(tmp_path: Path, reference_s: float) -> None:
    noisy = write(tmp_path / "a.wav", 0.5, seed=1)
    clean = write(tmp_path / "b.wav", reference_s, 8000, seed=2)
    table_of(tmp_path, {"a": ("a.wav", "b.wav")})
    earmill.extract(job(tmp_path))
    if abs(reference_s - 0.5) <= 0.05:
        (row,) = earmill.open_features(tmp_path / "out")
        np.testing.assert_array_equal(row.features["peaks"], peaks(heard(clean), heard(noisy)))
    else:
        stage, error_class, message = bad(tmp_path / "out")["a"]
        assert (stage, error_class) == ("resample", "pair_length")
        assert f"{clean}, which has {reference_s:.3f} s, got 0.500 s" in message


def test_a_reference_that_cannot_be_used_costs_its_row_alone(tmp_path: Path) -> None:
    pairs(tmp_path, 2)
    damaged = clip("flac", 0.5)
    (tmp_path / "half.flac").write_bytes(damaged[: len(damaged) // 2])
    write(tmp_path / "ultra.wav", 0.5, 800)
    rows = {
        "gone": ("noisy/0.wav", "clean/none.wav"),
        "row0": ("noisy/0.wav", "clean/0.wav"),
        "half": ("noisy/0.wav", "half.flac"),
        "empty": ("noisy/0.wav", ""),
        "row1": ("noisy/1.wav", "clean/1.wav"),
        "slow": ("noisy/0.wav", "ultra.wav"),
        "both": ("noisy/none.wav", "clean/0.wav"),
    }
    table_of(tmp_path, rows)
    end = earmill.extract(job(tmp_path) | {"output": {"uri": str(tmp_path / "out")}})
    assert (end.rows_ok, end.rows_bad) == (2, 5)
    found = bad(tmp_path / "out")
    assert {name: each[:2] for name, each in found.items()} == {
        "gone": ("fetch", "missing_reference"),
        "half": ("decode", "bad_reference"),
        "empty": ("fetch", "missing_reference"),
        "slow": ("decode", "bad_reference"),
        "both": ("fetch", "unreadable"),
    }
    assert f"reference recording {tmp_path}/clean/none.wav: unreadable: cannot" in found["gone"][2]
    assert f"reference recording {tmp_path}/half.flac: truncated: " in found["half"][2]
    assert "nothing in column 'clean'" in found["empty"][2]
    assert f"reference recording {tmp_path}/ultra.wav: sample_rate: " in found["slow"][2]
    write(tmp_path / "clean/none.wav", seed=7)
    allow = ["run.max_bad_fraction=1"]
    again = earmill.retry(tmp_path / "out", error="missing_reference", overrides=allow)
    assert again is not None and (again.rows_ok, again.rows_bad) == (3, 4)


def test_a_shard_without_good_rows_is_read_with_the_others(tmp_path: Path) -> None:
    pairs(tmp_path)
    (tmp_path / "clean/1.wav").unlink()
    spec = job(tmp_path)
    spec["output"]["shard_rows"] = 1
    earmill.extract(spec)
    ds = earmill.open_features(tmp_path / "out")
    assert [row.row_id for row in ds] == ["row0", "row2"] and earmill.verify(tmp_path / "out").ok
    assert bad(tmp_path / "out")["row1"][1] == "missing_reference"


def test_both_recordings_have_the_gain_of_the_row(tmp_path: Path) -> None:
    pairs(tmp_path, 1)
    spec = job(tmp_path) | {"audio": {"calibration": {"level_db_spl": 80}}}
    earmill.extract(spec)
    (row,) = earmill.open_features(tmp_path / "out")
    own = heard(tmp_path / "noisy/0.wav")
    gain = 0.1 / float(np.sqrt(np.square(own, dtype=np.float64).mean()))
    wanted = peaks(heard(tmp_path / "clean/0.wav"), own, gain)
    np.testing.assert_allclose(row.features["peaks"], wanted, rtol=1e-6)


def test_channels_pair_by_number_or_with_a_mono_reference(tmp_path: Path) -> None:
    noisy = write(tmp_path / "a.wav", channels=2, seed=1)
    stereo = write(tmp_path / "stereo.wav", channels=2, seed=2)
    mono = write(tmp_path / "mono.wav", seed=3)
    write(tmp_path / "three.wav", channels=3, seed=4)
    names = ("stereo", "mono")
    table_of(tmp_path, {name: ("a.wav", f"{name}.wav") for name in names} | {
        "swapped": ("three.wav", "stereo.wav")})  # fmt: skip
    earmill.extract(job(tmp_path) | {"audio": {"channels": "each"}})
    ds = earmill.open_features(tmp_path / "out")
    for channel in (0, 1):
        for clean, heard_channel in ((stereo, channel), (mono, 0)):
            row = ds.by_id(f"{clean.stem}#ch{channel}")
            wanted = peaks(heard(clean, heard_channel), heard(noisy, channel))
            np.testing.assert_array_equal(row.features["peaks"], wanted)
    assert len(ds) == 4
    _, error_class, message = bad(tmp_path / "out")["swapped"]
    assert error_class == "bad_reference" and "channel_index: expected a channel 2" in message


def test_a_span_is_taken_from_both_files(tmp_path: Path) -> None:
    noisy, clean = (write(tmp_path / f"{k}.wav", 2.0, seed=k) for k in (1, 2))
    (tmp_path / "pairs.csv").write_text("uri,start,end,clean\n1.wav,0.5,1.25,2.wav\n")
    earmill.extract(job(tmp_path))
    (row,) = earmill.open_features(tmp_path / "out")
    span = slice(8000, 20000)
    wanted = peaks(heard(clean)[span], heard(noisy)[span])
    np.testing.assert_array_equal(row.features["peaks"], wanted)


def test_long_rows_are_refused_as_for_models_of_whole_clips(tmp_path: Path) -> None:
    table = pairs(tmp_path, 2) / "pairs.csv"
    write(tmp_path / "clean/1.wav", 0.7, seed=9)
    table_of(tmp_path, {"long": ("noisy/0.wav", "clean/0.wav")})
    spec = JobSpec.load(job(tmp_path))
    (row,) = Job(spec, long_s=0.4)().bad
    assert row.error_class == "too_long" and "for pair, whose streams need whole" in row.message
    table.write_text("id,uri,clean\nshort,noisy/1.wav,clean/1.wav\n")
    (row,) = Job(spec, long_s=0.6)().bad
    assert row.error_class == "bad_reference" and "too_long: expected at most 0.6 s" in row.message


def test_a_killed_job_goes_on_to_equal_bytes(tmp_path: Path, go: Any) -> None:
    pairs(tmp_path, 5)
    whole = job(tmp_path)
    whole["output"] |= {"uri": str(tmp_path / "whole"), "formats": ["parquet", "zarr"]}
    killed = {**whole, "output": {**whole["output"], "uri": str(tmp_path / "killed")}}
    with pytest.raises(Killed):
        go(JobSpec.load(killed), kill_after=1)
    go(JobSpec.load(killed))
    go(JobSpec.load(whole))
    assert_equal_datasets(tmp_path / "killed", tmp_path / "whole")


def test_the_plan_holds_the_references(tmp_path: Path) -> None:
    pairs(tmp_path)
    spec = JobSpec.load(job(tmp_path))
    plan = make_plan(open_source(spec.source), spec)
    layout = Layout.open(str(tmp_path / "out"))
    plan.write(layout)
    stored = Plan.read(layout, plan.plan_id)
    assert [*stored.items()] == [*plan.items()]
    first = next(stored.items()).reference
    assert first is not None and first.uri == str(tmp_path / "clean/0.wav")
    assert (first.size, first.etag) == ((tmp_path / "clean/0.wav").stat().st_size, None)
    write(tmp_path / "clean/0.wav", 0.51, seed=100)
    assert make_plan(open_source(spec.source), spec).plan_id != plan.plan_id


def test_an_update_computes_rows_whose_reference_has_changed(tmp_path: Path) -> None:
    pairs(tmp_path, 4)
    spec = job(tmp_path)
    earmill.extract(spec)
    before = {row.row_id: row.features["peaks"] for row in earmill.open_features(tmp_path / "out")}
    write(tmp_path / "clean/1.wav", seed=55)
    os.utime(tmp_path / "clean/1.wav", (1e9, 1e9))
    rows = {f"row{k}": (f"noisy/{k}.wav", f"clean/{k}.wav") for k in (0, 1, 3)}
    # A copy of a noisy file with another reference, and another reference for a known row.
    (tmp_path / "noisy/copy.wav").write_bytes((tmp_path / "noisy/0.wav").read_bytes())
    table_of(tmp_path, {
        **rows, "row2": ("noisy/2.wav", "clean/3.wav"), "copy": ("noisy/copy.wav", "clean/1.wav")
    })  # fmt: skip
    earmill.extract(spec, update=True)
    now = {row.row_id: row.features["peaks"] for row in earmill.open_features(tmp_path / "out")}
    clean = {"row1": "1", "row2": "3", "copy": "1"}
    for name, values in now.items():
        if name not in clean:
            np.testing.assert_array_equal(values, before[name])
            continue
        noisy = name.removeprefix("row")
        reference = heard(tmp_path / f"clean/{clean[name]}.wav")
        wanted = peaks(reference, heard(tmp_path / f"noisy/{noisy}.wav"))
        np.testing.assert_array_equal(values, wanted)
    assert len(now) == 5
    # Features that were added before would be of the earlier references.
    found = earmill.diff(tmp_path / "out")
    assert (found.added, found.changed) == (("copy",), ("row1", "row2"))


def test_features_of_another_model_are_added_to_pairs(tmp_path: Path) -> None:
    pairs(tmp_path)
    earmill.extract(job(tmp_path))
    end = earmill.add_features(tmp_path / "out", {"extract": [MEL], "name": "mel"})
    assert end.rows_ok == 3
    both = earmill.open_features(tmp_path / "out", additions=True)
    assert set(both.streams) == {"peaks", "mel"} and len(both) == 3


def test_files_whose_channels_are_the_pair(tmp_path: Path) -> None:
    path = write(tmp_path / "in/two.wav", channels=2, seed=1)
    write(tmp_path / "in/mono.wav", seed=1)
    spec = job(tmp_path) | {"audio": {"channels": "binaural"}}
    spec["source"] = {"kind": "files", "uri": str(tmp_path / "in")}
    earmill.extract(spec)
    (row,) = earmill.open_features(tmp_path / "out")
    np.testing.assert_array_equal(row.features["peaks"], peaks(heard(path, 0), heard(path, 1)))
    assert bad(tmp_path / "out")["mono.wav"][1] == "channel_index"


@pytest.mark.parametrize(
    ("models", "source", "more", "message"),
    [
        ([MEL, PAIR], {"reference_column": None}, {},
         r"source.reference_column: expected the column .* for pair, which compares two"),
        ([MEL], {}, {}, r"expected a model that compares two .* got melspectrogram; leave"),
        ([{"model": "moore2016"}], {}, {"audio": {"channels": "mean"}}, "got moore2016; leave"),
        ([PAIR], {}, {"audio": {"channels": "binaural"}}, "expected no audio.channels: binaural"),
        ([PAIR], {}, {"audio": {"spans": {"seconds": 60}}}, "expected no audio.spans in a job"),
        ([PAIR], {"reference_column": None},
         {"audio": {"channels": "binaural", "variants": {"of": [{"name": "a", "gain_db": 1}]}}},
         "audio.variants: expected source.reference_column for pair"),
        ([PAIR], {"reference_column": "uri"}, {}, "got 'uri', which has another role"),
        ([PAIR], {"columns": {"uri": "clean"}}, {}, "got 'clean', which has another role"),
    ],
)  # fmt: skip
def test_jobs_that_are_refused(
    tmp_path: Path, models: list[Any], source: Any, more: Any, message: str
) -> None:
    pairs(tmp_path)
    spec = job(tmp_path, *models, **source) | more
    for check in (earmill.extract, lambda job: job_cost(JobSpec.load(job))):
        with pytest.raises(SpecError, match=message):
            check(spec)
    assert not (tmp_path / "out").exists()


def test_a_copy_of_equal_files_is_refused(tmp_path: Path) -> None:
    spec = job(tmp_path)
    spec["output"]["equal_files_once"] = True
    with pytest.raises(SpecError, match=r"expected no output\.equal_files_once"):
        JobSpec.load(spec)


def test_other_kinds_of_source_have_no_reference_column(tmp_path: Path) -> None:
    spec = job(tmp_path)
    spec["source"] = {"kind": "files", "uri": str(tmp_path), "reference_column": "clean"}
    with pytest.raises(SpecError, match="unknown key"):
        JobSpec.load(spec)
    assert validate_models(JobSpec.load(job(tmp_path)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("noisy/0.wav,../x.wav", "outside of what the source may read"),
        ("noisy/0.wav,/etc/x.wav", "outside of what the source may read"),
        (None, "source.reference_column: the table has no column 'clean'"),
    ],
)
def test_references_are_confined_as_rows_are(tmp_path: Path, row: str | None, message: str) -> None:
    pairs(tmp_path)
    text = "uri,clear\nnoisy/0.wav,a.wav\n" if row is None else f"uri,clean\n{row}\n"
    (tmp_path / "pairs.csv").write_text(text)
    with pytest.raises(SourceError, match=message):
        list(open_source(JobSpec.load(job(tmp_path)).source).items())


def test_missing_references_are_counted_by_the_plan(tmp_path: Path) -> None:
    pairs(tmp_path)
    (tmp_path / "clean/1.wav").unlink()
    spec = JobSpec.load(job(tmp_path))
    plan = make_plan(open_source(spec.source), spec)
    assert (plan.missing, plan.first_missing) == (1, str(tmp_path / "clean/1.wav"))


def test_secrets_in_references_are_looked_up_and_not_stored(tmp_path: Path) -> None:
    rows = (
        "uri,clean\nhttps://host.invalid/a.wav?token=hush1,https://host.invalid/b.wav?token=hush2\n"
    )
    (tmp_path / "pairs.csv").write_text(rows)
    source: Any = open_source(JobSpec.load(job(tmp_path, allow=["https://host.invalid/"])).source)
    (item,) = source.items()
    assert "hush" not in repr(item)
    asked: list[str] = []

    def fetched(items: Any, _options: Any) -> Any:
        asked.extend(item.uri for item in items)
        return ((item, SourceError("x")) for item in items)

    from earmill.pipeline.sources import manifest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "fetch_rows", fetched)
        list(source.fetch([item, sources_base.reference_item(item)]))
    assert [uri.rpartition("=")[2] for uri in asked] == ["hush1", "hush2"]


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("form", ["bytes", "paths", "arrays"])
def test_a_column_of_a_hugging_face_dataset(tmp_path: Path, form: str, streaming: bool) -> None:
    pairs(tmp_path)
    noisy, clean = (
        [tmp_path / f"{folder}/{k}.wav" for k in range(3)] for folder in ("noisy", "clean")
    )
    cells: Any = [str(path) for path in clean]
    if form == "bytes":
        cells = [{"bytes": path.read_bytes(), "path": None} for path in clean]
    if form == "arrays":
        read = [soundfile.read(path, dtype="float32") for path in clean]
        cells = [{"array": samples, "sampling_rate": rate} for samples, rate in read]
    cells[2] = None
    table = pa.table({
        "audio": [{"bytes": path.read_bytes(), "path": path.name} for path in noisy],
        "clean": pa.array(cells), "speaker": ["x", "y", "z"], "length": [0.5] * 3,
    })  # fmt: skip
    pq.write_table(table, tmp_path / "pairs.parquet")
    spec = job(tmp_path)
    spec["source"] = {
        "kind": "hf", "uri": str(tmp_path / "pairs.parquet"), "reference_column": "clean",
        "streaming": streaming, "allow": [str(tmp_path)],
        "duration_column": "length" if form == "bytes" else None,
    }  # fmt: skip
    end = earmill.extract(spec)
    assert (end.rows_ok, end.rows_bad) == (2, 1)
    ds = earmill.open_features(tmp_path / "out")
    for index, row in enumerate(ds):
        wanted = peaks(heard(clean[index]), heard(noisy[index]))
        np.testing.assert_array_equal(row.features["peaks"], wanted)
        assert "column=clean" in ds.provenance(index)["reference_uri"]
    assert ds.table["extra_speaker"].to_pylist() == ["x", "y"]
    (found,) = bad(tmp_path / "out").values()
    assert found[1] == "missing_reference" and "column=clean" in found[2]


def test_a_column_that_a_dataset_lacks(tmp_path: Path) -> None:
    audio = [{"bytes": clip("wav", 0.2), "path": "a"}]
    datasets.Dataset.from_dict({"audio": audio}).to_parquet(tmp_path / "x.parquet")
    spec = job(tmp_path)
    spec["source"] = {"kind": "hf", "uri": str(tmp_path / "x.parquet"), "reference_column": "cl"}
    with pytest.raises(SourceError, match="no column 'cl'"):
        open_source(JobSpec.load(spec).source)


def test_an_outage_of_the_references_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(sources_base, "FETCH_RETRIES", clock.retries())
    pairs(tmp_path)
    with s3_store() as (store, options):
        fs = fsspec.filesystem("s3", **options)
        fs.put(str(tmp_path / "clean"), "corpus/clean", recursive=True)
        fs.put(str(tmp_path / "noisy"), "corpus/noisy", recursive=True)
        fs.put(str(tmp_path / "pairs.csv"), "corpus/pairs.csv")
        source = {"uri": "s3://corpus/pairs.csv", "storage_options": options}
        rows = Job(JobSpec.load(job(tmp_path, **source)))
        assert len(rows().good) == 3
        assert rows.items[0].reference.etag is not None
        for answer in (
            s3_error("503 Service Unavailable", "ServiceUnavailable"),
            s3_error("403 Forbidden", "AccessDenied"),
        ):
            store.fault = lambda path, answer=answer: answer if "clean/" in path else None
            with pytest.raises(SourceOutage, match=r"s3://corpus/clean/|503"):
                rows()
        store.fault = lambda path: None
        fs.rm("corpus/clean/1.wav")
        made = rows()
        assert [row.row_id for row in made.good] == ["row0", "row2"]
        (row,) = made.bad
        assert row.error_class == "missing_reference" and "s3://corpus/clean/1.wav" in row.message


def test_the_command_line_refuses_and_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(tmp_path, reference_column=None)))
    assert run(["extract", str(tmp_path / "job.yaml")]) == 2
    assert "source.reference_column: expected the column" in capsys.readouterr().err
    assert run(["explain", "missing_reference"]) == 0
