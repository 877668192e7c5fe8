"""The demo's sound is what it claims to be, and its report shows what the dataset holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from earmill.jobs import demo_audio
from earmill.jobs.cli import run
from earmill.jobs.commands.demo import NAME, markdown_table
from earmill.jobs.demo_audio import CLIPS, DAMAGED, RMS, _filtered, music, speech, write_corpus
from earmill.pipeline.dataset.description import DatasetFile
from tests.pipeline.workers_here import workers_here

SPEC = {"extract": [], "output": {"formats": ["zarr"], "dtype": "float16"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_corpus(folder)
    return folder


def test_two_minutes_in_many_rates_and_formats(corpus: Path) -> None:
    infos = [soundfile.info(corpus / clip.name) for clip in CLIPS]
    assert sum(info.duration for info in infos) == pytest.approx(120.0, abs=0.5)
    assert len({info.samplerate for info in infos}) >= 6
    assert {info.format for info in infos} == {"WAV", "FLAC", "OGG", "MP3"}
    assert {"VORBIS", "OPUS", "PCM_24", "FLOAT"} <= {info.subtype for info in infos}
    for clip in CLIPS:
        samples, _ = soundfile.read(corpus / clip.name)
        assert np.sqrt(np.mean(samples**2)) == pytest.approx(RMS, rel=0.05)
        assert np.abs(samples).max() < 1.0


def test_damaged_files_cannot_be_read_to_their_end(corpus: Path) -> None:
    for name in DAMAGED:
        with pytest.raises(soundfile.LibsndfileError):
            with soundfile.SoundFile(corpus / name) as file:
                frames = len(file.read())
                if frames < file.frames:
                    raise soundfile.LibsndfileError(0, "short: ")


def test_the_same_seed_gives_the_same_sound(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_audio, "CLIPS", CLIPS[:4])
    write_corpus(tmp_path)
    for clip in CLIPS[:4]:
        again, _ = soundfile.read(tmp_path / clip.name)
        np.testing.assert_array_equal(again, soundfile.read(corpus / clip.name)[0], clip.name)


def modulation_peak_hz(wave: np.ndarray, rate_hz: int) -> float:
    """Strongest modulation of the envelope between 1 and 16 Hz."""
    envelope = np.abs(wave)
    envelope = envelope[: len(envelope) // 100 * 100].reshape(-1, 100).mean(axis=1)
    spectrum = np.abs(np.fft.rfft((envelope - envelope.mean()) * np.hanning(len(envelope))))
    hz = np.fft.rfftfreq(len(envelope), 100 / rate_hz)
    band = (hz >= 1) & (hz <= 16)
    return float(hz[band][spectrum[band].argmax()])


def test_speech_moves_at_the_rate_of_syllables_and_music_at_its_beat() -> None:
    rate_hz = 16000
    peaks = [modulation_peak_hz(speech(np.random.default_rng(s), rate_hz, 20.0), rate_hz)
             for s in range(3)]  # fmt: skip
    assert all(2.0 <= peak <= 6.0 for peak in peaks)
    beat = modulation_peak_hz(music(np.random.default_rng(0), rate_hz, 20.0), rate_hz)
    assert beat == pytest.approx(2.0, abs=0.1)


def test_filtering_equals_the_difference_equation() -> None:
    x = np.random.default_rng(0).standard_normal(800)
    a1, a2 = -1.6, 0.8
    expected = np.zeros_like(x)
    for n in range(len(x)):
        expected[n] = x[n] - a1 * expected[n - 1] * (n > 0) - a2 * expected[n - 2] * (n > 1)
    np.testing.assert_allclose(_filtered(x, [1.0], [1.0, a1, a2]), expected, atol=1e-9)


def test_a_table_lines_up() -> None:
    table = markdown_table(["file", "s"], [["a.wav", "1.0"], ["longer.flac", "12.0"]])
    assert table.splitlines() == [
        "| file        | s    |",
        "|-------------|------|",
        "| a.wav       | 1.0  |",
        "| longer.flac | 12.0 |",
    ]


def test_the_demo_leaves_other_peoples_data_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = tmp_path / "features"
    features.mkdir()
    other = DatasetFile("speech", SPEC, "0", "p", (), {}, {}, "now")
    for stored in (None, other):
        if stored is not None:
            (features / "dataset.json").write_text(stored.to_json())
        (features / "precious").write_text("x")
        assert run(["demo", "--out", str(tmp_path)]) == 2
        assert "not an earlier demo" in capsys.readouterr().err
        assert (features / "precious").exists()
    assert other.name != NAME


def test_the_whole_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its files, each a third as long: 40 s of sound are two shards."""
    short = [replace(clip, seconds=clip.seconds / 3) for clip in CLIPS]
    monkeypatch.setattr(demo_audio, "CLIPS", short)
    with workers_here():
        assert run(["demo", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "demo passed: 13 clips extracted, 2 damaged files in quarantine" in said
    table = (tmp_path / "summary.md").read_text()
    assert all(name in table for name in (*DAMAGED, *(clip.name for clip in CLIPS)))
    assert table in said
    image = read_png(tmp_path / "report.png")
    assert image.shape[0] > 800 and image.shape[1] > 1000
    # Something is drawn in each quarter of the page, in more than one colour.
    for part in np.array_split(image, 4):
        assert len(np.unique(part.reshape(-1, part.shape[-1])[::97], axis=0)) > 20


def read_png(path: Path) -> np.ndarray:
    """The image as (rows, columns, colours)."""
    from matplotlib import image

    return image.imread(path)
