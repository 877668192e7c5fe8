"""Every model through the real job on real speech: verified, read back, compared, drawn.

The second route is soundfile, soxr and the extractor, called here on each recording alone.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from matplotlib import image

from amtcore.features.registry import build_extractor, list_models
from amtcore.units import Calibration
from earmill import open_features
from earmill.jobs.cli import run
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.reader.features import Features
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.short import but

from ..compare import Tolerance, assert_close
from ..pipeline.again_jobs import shards_run_here
from ..pipeline.source_helpers import SPEECH, SPEECH_IDS
from ..pipeline.workers_here import workers_here

#: The resampler of the second route is called in one go.
RESAMPLED = Tolerance(1e-3, "resampled in one call", 1e-6)
#: A library may order sums by the number of its threads.
ROUNDED = Tolerance(1e-6, "single-precision transforms", 1e-9)
#: Jobs of several models in one pass over the audio; together they run every registered model.
JOBS: Mapping[str, list[dict[str, Any]]] = {
    "melspectrogram": [
        {"model": "dau1997", "fs_hz": 16000},
        {"model": "auditory_spectrogram"},
        {"model": "modulation_spectrum", "params": {"win_s": 0.25, "hop_s": 0.1}},
        {"model": "rate_scale", "streams": {"rate_scale_mean": {}}},
        {"model": "melspectrogram"},
        {"model": "mfcc", "params": {"hop_length": 200}},
        {"model": "programme_loudness", "streams": {"momentary": {}, "true_peak": {}}},
        {"model": "srmr", "params": {"fast": True}, "streams": {"score": {}}},
        {"model": "roughness"},
        {"model": "zwicker", "streams": {"n": {}, "sharpness": {}, "statistics": {}}},
        {
            "model": "torch_module",
            "params": {
                "module": "torchaudio.transforms:Spectrogram",
                "kwargs": {"n_fft": 64, "hop_length": 80, "center": False},
                "compile": False,
            },
            "streams": {
                "spectra": {"width": 33, "hop_length": 80, "window_length": 64, "frames_axis": 2}
            },
        },
    ],
    "osses2021": [{"model": "osses2021", "streams": {"modulation": {}, "envelope": {}}}],
    "king2019": [{"model": "king2019", "fs_hz": 16000, "streams": {"modulation": {"pool": "rms"}}}],
    "paulick2024": [
        {"model": "paulick2024", "streams": {"modulation": {}, "velocity": {"pool": "rms"}}}
    ],
    "glasberg2002": [
        {"model": "dau1997", "fs_hz": 16000},
        {"model": "glasberg2002", "streams": {"short_term_loudness": {"frame_rate_hz": 100}}},
    ],
    "cochlea": [
        {"model": "carfac", "fs_hz": 16000, "streams": {"nap": {}, "bm": {}, "agc": {}}},
        {"model": "auditory_nerve", "streams": {"rates": {}}},
        {"model": "cochleagram"},
        {
            "model": "sai",
            "fs_hz": 16000,
            "params": {
                "sai_width": 50,
                "future_lags": 20,
                "carfac_kwargs": {"car_kwargs": {"erb_per_step": 4}},
            },
        },
    ],
}


#: Recordings that jobs of every model extract, in two shards.
HEARD = (SPEECH_IDS[0], SPEECH_IDS[-1])


def _extract(folder: Path, name: str) -> Path:
    for row_id in HEARD:
        (folder / "audio" / row_id).parent.mkdir(parents=True)
        shutil.copy(SPEECH / row_id, folder / "audio" / row_id)
    spec = JobSpec.load(
        {
            "source": {"kind": "files", "uri": str(folder / "audio")},
            "extract": JOBS[name],
            "output": {"uri": str(folder / "out"), "dtype": "float32", "shard_rows": 1},
            "run": {"executor": "local"},
        }
    )
    with workers_here():
        end = run_job(spec)
    assert (end.exit_code, end.rows_ok, end.rows_bad, end.shards) == (0, 2, 0, 2)
    return folder / "out"


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The output of each job, made once."""
    return functools.cache(lambda name: _extract(tmp_path_factory.mktemp(name), name))


def _expected(entry: Mapping[str, Any], path: Path) -> dict[str, np.ndarray]:
    wave, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    extractor = build_extractor(**{"streams": None, **entry})
    clip = soxr.resample(wave.mean(1), rate_hz, extractor.fs_hz, quality="VHQ")
    gain = Calibration(100.0).gain_for_rms(1.0, extractor.input_unit)
    return extractor.extract([clip * np.float32(gain)])[0]


def test_every_model_is_run_by_a_job() -> None:
    run_here = {entry["model"] for job in JOBS.values() for entry in job} | {"moore2016", "stoi"}
    assert run_here == {model.name for model in list_models()}


#: Of these, what goes through a job as others do.
ALIKE = ("osses2021", "king2019", "paulick2024", "glasberg2002", "melspectrogram")


@pytest.mark.parametrize("name", but(ALIKE, JOBS))
def test_speech_through_the_job_equals_the_model(
    name: str, extracted: Callable[[str], Path]
) -> None:
    report = verify(Layout.open(str(extracted(name))))
    assert report.problems == [] and report.rows_ok == len(HEARD)
    formats = {fmt: open_features(extracted(name), format=fmt) for fmt in ("zarr", "parquet")}
    for row_id in HEARD:
        expected: dict[str, np.ndarray] = {}
        for entry in JOBS[name]:
            expected |= _expected(entry, SPEECH / row_id)
        for fmt, features in formats.items():
            row = features.by_id(row_id)
            assert set(row.features) == set(expected)
            for stream, values in expected.items():
                assert_close(row.features[stream], values, RESAMPLED, f"{fmt} {stream}")


def test_a_module_of_torch_alone_runs_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = [each for each in JOBS["melspectrogram"] if each["model"] == "torch_module"]
    made = []
    for device, on in (("cpu", "cpu"), ("cuda", "interpreted")):
        monkeypatch.setenv("AMTCORE_GPU", "interpreted")
        out = tmp_path / device
        spec = JobSpec.load(
            {
                "source": {"kind": "files", "uri": str(SPEECH)},
                "extract": [entry],
                "output": {"uri": str(out), "dtype": "float32"},
                "run": {"executor": "local", "device": device},
            }
        )
        with workers_here():
            assert run_job(spec).rows_ok == len(SPEECH_IDS)
        (record,) = commits(Layout.open(str(out))).values()
        assert record.info["device"].get("backends", {}).get("torch_module", "cpu") == on
        made.append(open_features(out))
    for here, there in zip(*made, strict=True):
        assert_close(there.features["spectra"], here.features["spectra"], ROUNDED)


@pytest.fixture(scope="module")
def stereo(tmp_path_factory: pytest.TempPathFactory) -> Features:
    """The example job on speech that comes from the left, the right, and from both sides."""
    folder = tmp_path_factory.mktemp("stereo")
    (folder / "audio").mkdir()
    wave, rate_hz = soundfile.read(SPEECH / SPEECH_IDS[0], dtype="float32", always_2d=True)
    wave = wave[: round(1.2 * rate_hz)]
    for name, gains in {"left": (1.0, 0.2), "right": (0.2, 1.0), "front": (1.0, 1.0)}.items():
        ears = wave.mean(1, keepdims=True) * np.array([gains], np.float32)
        soundfile.write(folder / "audio" / f"{name}.flac", ears, rate_hz)
    job = Path(__file__).parents[2] / "jobs" / "loudness.yaml"
    overrides = [f"source.uri={folder / 'audio'}", f"output.uri={folder / 'out'}"]
    with shards_run_here():
        end = run_job(JobSpec.load(job, overrides=overrides))
    assert (end.exit_code, end.rows_ok) == (0, 3)
    assert verify(Layout.open(str(folder / "out"))).problems == []
    return open_features(folder / "out")


def test_modulation_and_loudness_in_one_pass(stereo: Features) -> None:
    rows = {name: stereo.by_id(f"{name}.flac") for name in ("left", "right", "front")}
    for row in rows.values():
        n5 = row.features["loudness_summary"][0]
        short = row.features["short_term_loudness"]
        assert len(short) == len(row.features["modulation"]) == int(row.seconds * 100)
        assert short.max() <= n5[0] * 1.001 and np.isfinite(short).all()
        # Specific loudness is that of both ears on a grid of a quarter Cam.
        total = row.features["specific_loudness"].sum(axis=1) * 0.25
        assert_close(total.mean(), short.mean(), Tolerance(0.01, "last half frame"), row.row_id)
    louder = {name: row.features["loudness_summary"][0, 0] for name, row in rows.items()}
    assert louder["left"] == pytest.approx(louder["right"], rel=1e-3)
    assert louder["front"] > 1.1 * louder["left"]
    # Dau1997 hears the mean of both ears, which is the same for speech from left and right.
    left, right = (rows[name].features["modulation"] for name in ("left", "right"))
    np.testing.assert_allclose(left, right, atol=0.05)


def test_numbers_of_a_clip_are_in_every_slice(stereo: Features) -> None:
    part = stereo.slice(0, 0.5, 0.75)
    assert part.features["loudness_summary"].shape == (1, 5)
    assert len(part.features["short_term_loudness"]) == 25
    assert len(part.features["specific_loudness"]) == 13
    assert stereo.streams["loudness_summary"].columns[:2] == ("stl_max", "ltl_max")


def test_intelligibility_of_a_pair(tmp_path: Path) -> None:
    wave, rate_hz = soundfile.read(SPEECH / SPEECH_IDS[0], dtype="float32", always_2d=True)
    clean = wave.mean(1)
    noise = np.random.default_rng(0).standard_normal(clean.shape).astype(np.float32)
    for name, gain in {"clear": 0.001, "noisy": 0.1}.items():
        pair = np.stack((clean, clean + gain * noise), 1)
        soundfile.write(tmp_path / f"{name}.wav", pair, rate_hz, subtype="FLOAT")
    spec = JobSpec.load(
        {
            "source": {"kind": "files", "uri": str(tmp_path)},
            "audio": {"channels": "binaural"},
            "extract": [{"model": "stoi", "fs_hz": rate_hz, "streams": {"stoi": {}, "estoi": {}}}],
            "output": {"uri": str(tmp_path / "out"), "dtype": "float32"},
        }
    )
    with shards_run_here():
        assert run_job(spec).rows_ok == 2
    features = open_features(tmp_path / "out")
    rows = {name: features.by_id(f"{name}.wav").features for name in ("clear", "noisy")}
    pair, _ = soundfile.read(tmp_path / "noisy.wav", dtype="float32", always_2d=True)
    streams: dict[str, Any] = {"stoi": {}, "estoi": {}}
    (expected,) = build_extractor("stoi", fs_hz=rate_hz, streams=streams).extract([pair.T])
    for score in ("stoi", "estoi"):
        assert rows["noisy"][score] == expected[score]
        assert rows["noisy"][score][0, 0] < rows["clear"][score][0, 0] <= 1.0


def test_a_row_is_drawn_with_all_its_streams(
    stereo: Features, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "left.png"
    uri = stereo._uri
    assert run(["plot", uri, "--row", "left.flac", "--out", str(out)]) == 0
    assert f"{out}: left.flac" in capsys.readouterr().out
    picture = image.imread(out)
    for part in np.array_split(picture, 4):
        assert len(np.unique(part.reshape(-1, part.shape[-1])[::97], axis=0)) > 20
    assert run(["plot", uri, "--row", "nobody.flac", "--out", str(out)]) == 2
    assert "no row 'nobody.flac'" in capsys.readouterr().err
