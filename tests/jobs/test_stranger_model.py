"""A model that one file of another distribution adds: it passes the tests, and a job runs it.

The file is copied to a place of its own, beside the metadata that pip would have written. A job by
processes that find that place in PYTHONPATH is in tests/pipeline/test_strangers.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import yaml

from amtcore.features.registry import build_extractor
from earmill import open_features
from earmill.jobs.cli import run
from earmill.testing import ModelConformance

from ..compare import Tolerance, assert_close
from ..pipeline.again_jobs import shards_run_here
from ..pipeline.source_helpers import SPEECH, SPEECH_IDS
from ..pipeline.strangers import install
from .stranger_level import Level

HERE = Path(__file__).parent
FILE = HERE / "stranger_level.py"
FS_HZ = 16000
STORED = Tolerance(1e-3, "resampled in one call", 2e-2)


class TestLevel(ModelConformance):
    model = Level
    other_params = {"hop_s": 0.02}  # noqa: RUF012


def test_the_file_is_short() -> None:
    assert len(FILE.read_text().splitlines()) < 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed distributions."""
    points = {"amtcore.models": {"level": "loud_things:Level", "lost": "nowhere:Model"}}
    folder = tmp_path_factory.mktemp("site")
    return install(folder, "loud-things", points, {"loud_things": FILE.read_text()})


def test_it_runs_beside_dau1997_and_melspectrogram_on_speech(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {
        "source": {"kind": "files", "uri": str(SPEECH)},
        "extract": [
            {"model": "dau1997", "fs_hz": FS_HZ},
            {"model": "melspectrogram"},
            {"model": "level", "params": {"hop_s": 0.02}, "streams": {"level": {}, "peak": {}}},
        ],
        "output": {"uri": str(place / "out"), "dtype": "float32"},
    }
    (place / "job.yaml").write_text(yaml.safe_dump(job))
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    with shards_run_here():
        assert run(["extract", "job.yaml"]) == 0
    assert run(["verify", str(place / "out")]) == 0
    features = open_features(place / "out")
    infos = features.streams
    assert {name: info.model for name, info in infos.items()} == {
        "modulation": "dau1997", "mel": "melspectrogram", "level": "level", "peak": "level"
    }  # fmt: skip
    assert (infos["level"].frame_rate_hz, infos["mel"].frame_rate_hz) == (50.0, 100.0)
    assert len(infos["mel"].fc_hz) == 80
    extractors = [build_extractor("dau1997", fs_hz=FS_HZ), build_extractor("melspectrogram")]
    extractors.append(Level().build(FS_HZ, {"hop_s": 0.02}, {"level": {}, "peak": {}}))
    for row_id in (SPEECH_IDS[0], SPEECH_IDS[-1]):
        row = features.by_id(row_id)
        wave, rate_hz = soundfile.read(SPEECH / row_id, dtype="float32", always_2d=True)
        clip = soxr.resample(wave.mean(1), rate_hz, FS_HZ, quality="VHQ")
        for extractor in extractors:
            for stream, values in extractor.extract([clip])[0].items():
                assert_close(row.features[stream], values, STORED, f"{row_id} {stream}")
        assert len(row.features["mel"]) == len(row.features["modulation"])
        assert np.ptp(row.features["level"]) > 20, "speech has pauses"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("{hops: 1}", "extract.0: model 'level' has no parameter 'hops': did you mean 'hop_s'?"),
        ("{hop_s: fast}", "extract.0: model 'level': parameter 'hop_s': expected number, got"),
    ],
)
def test_its_parameters_are_checked_before_work(
    place: Path,
    params: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    (place / "wrong.yaml").write_text(
        f"source: {{kind: files, uri: {SPEECH}}}\noutput: {{uri: nowhere}}\n"
        f"extract: [{{model: level, params: {params}}}]\n"
    )
    assert run(["extract", "wrong.yaml"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (place / "nowhere").exists()


def test_one_that_cannot_be_imported_is_told_when_it_is_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    assert run(["models"]) == 0
    listed = capsys.readouterr().out
    assert "loud-things 1.0" in listed and "Levels below count as this" in listed
    assert "ModuleNotFoundError" in listed and "paulick2024" in listed
    (place / "lost.yaml").write_text(
        f"source: {{kind: files, uri: {SPEECH}}}\noutput: {{uri: nowhere}}\n"
        "extract: [{model: lost}]\n"
    )
    assert run(["extract", "lost.yaml"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "model 'lost' of loud-things 1.0 (nowhere:Model): cannot be loaded" in told
