"""The player of a report: what its source still has, at its level, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from earmill.jobs.report.examples import Player, Sound, as_mp3
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.spec.job import JobSpec

RATE_HZ, LEVEL = 17000, 0.1  # MP3 has no such rate


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three seconds of a tone, whose left channel is silent."""
    path = tmp_path / "corpus" / "tone.wav"
    path.parent.mkdir()
    tone = LEVEL * np.sin(2 * np.pi * 440 * np.arange(3 * RATE_HZ) / RATE_HZ)
    soundfile.write(path, np.stack([np.zeros_like(tone), tone], axis=1), RATE_HZ)
    return path


def job(file: Path, **audio: object) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": str(file.parent)},
            "audio": audio,
            "extract": [{"model": "dau1997"}],
            "output": {"uri": str(file.parent / "out")},
        }
    )


def heard(file: Path, seconds: float = 2.0, channel: int = -1, **audio: object) -> Sound:
    spec = job(file, **audio)
    facts = {"bytes_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    (item,) = open_source(spec.source).items()
    return Player(spec, seconds).sound(item, channel, facts)


def samples(sound: Sound) -> tuple[np.ndarray, int]:
    kind, _, data = sound.data.partition(",")
    assert kind == "data:audio/mpeg;base64"
    return soundfile.read(io.BytesIO(base64.b64decode(data)), always_2d=True)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def test_the_beginning_is_heard_as_the_models_hear_it(file: Path) -> None:
    sound = heard(file)
    found, rate_hz = samples(sound)
    assert rate_hz == 22050 and found.shape[1] == 1
    assert len(found) / rate_hz == pytest.approx(2.0, abs=0.1)
    # The mean of tone and silence is half the tone.
    assert rms(found) == pytest.approx(LEVEL / 2 / np.sqrt(2), rel=0.03)
    assert sound.level == f"{100 + 20 * np.log10(LEVEL / 2 / np.sqrt(2)):.1f} dB SPL"


@pytest.mark.parametrize(("channel", "level"), [(0, 0.0), (1, LEVEL / np.sqrt(2))])
def test_a_channel_of_its_own_is_heard_alone(file: Path, channel: int, level: float) -> None:
    found, _ = samples(heard(file, channel=channel, channels="each"))
    assert rms(found) == pytest.approx(level, rel=0.03, abs=1e-4)


def test_both_ears_are_heard(file: Path) -> None:
    found, _ = samples(heard(file, channels="binaural"))
    assert rms(found[:, 0]) < 1e-4 < rms(found[:, 1])


def test_a_file_that_is_another_one_now_has_no_player(file: Path) -> None:
    spec = job(file)
    (item,) = open_source(spec.source).items()
    sound = Player(spec, 2.0).sound(item, -1, {"bytes_sha256": "0" * 64})
    assert not sound.data and "has changed" in sound.why


def test_a_file_that_is_gone_or_huge_has_no_player(file: Path) -> None:
    spec = job(file)
    player = Player(spec, 2.0)
    (item,) = open_source(spec.source).items()
    huge = player.sound(replace(item, size=2**40), -1, {})
    assert not huge.data and "too large" in huge.why
    gone = player.sound(Item("gone.wav", str(file.parent / "gone.wav")), -1, {})
    assert not gone.data and "cannot be read" in gone.why


def test_what_would_clip_is_made_softer() -> None:
    loud = np.tile(np.float32([[2.0], [-2.0]]), (8000, 1))
    assert samples(Sound(as_mp3(loud, 16000)))[0].max() <= 1.0
