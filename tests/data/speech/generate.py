"""Writes the speech recordings of this folder; see README.md.

Needs espeak-ng on the PATH (any 1.5x). The voice is synthetic, so the recordings are free of rights
and of people; formats, rates and channel counts are those a real corpus mixes.
"""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import numpy as np
import soundfile
import soxr

HERE = Path(__file__).parent
SPEED_WORDS_PER_MINUTE = 150

# file, voice, container, codec, rate in Hz, channels, sentence.
RECORDINGS = (
    (
        "alpha/wav_22k.wav",
        "en-gb",
        "WAV",
        "PCM_16",
        22050,
        1,
        "The ship was torn apart on the reef.",
    ),
    ("alpha/flac_16k.flac", "en-us", "FLAC", "PCM_16", 16000, 1, "Rice is often served in bowls."),
    (
        "alpha/vorbis_44k.ogg",
        "en-gb",
        "OGG",
        "VORBIS",
        44100,
        2,
        "Kick the ball straight and follow.",
    ),
    (
        "beta/mp3_44k.mp3",
        "de",
        "MP3",
        "MPEG_LAYER_III",
        44100,
        1,
        "Heute ist schönes Frühlingswetter.",
    ),
    (
        "beta/opus_48k.opus",
        "fr-fr",
        "OGG",
        "OPUS",
        48000,
        1,
        "Il se garantira du froid avec ce bon capuchon.",
    ),
    (
        "beta/flac_48k_stereo.flac",
        "en-us",
        "FLAC",
        "PCM_16",
        48000,
        2,
        "Glue the sheet to the dark blue background.",
    ),
)


def speak(text: str, voice: str) -> tuple[np.ndarray, int]:
    """One sentence as float32 samples and their rate."""
    command = ["espeak-ng", "--stdout", "-v", voice, "-s", str(SPEED_WORDS_PER_MINUTE), text]
    raw = subprocess.run(command, check=True, capture_output=True).stdout
    samples, rate_hz = soundfile.read(io.BytesIO(raw), dtype="float32")
    return samples, rate_hz


def write(path: Path, samples: np.ndarray, rate_hz: int, container: str, codec: str) -> None:
    """Encode in small pieces: libsndfile's Vorbis encoder overflows its stack on long ones."""
    path.parent.mkdir(exist_ok=True)
    with soundfile.SoundFile(
        path, "w", rate_hz, samples.shape[1], format=container, subtype=codec
    ) as file:
        for start in range(0, len(samples), 4096):
            file.write(samples[start : start + 4096])


def main() -> None:
    for name, voice, container, codec, rate_hz, channels, text in RECORDINGS:
        samples, spoken_hz = speak(text, voice)
        samples = soxr.resample(samples, spoken_hz, rate_hz, quality="VHQ")
        # The second channel is quieter, so that channel policies differ.
        both = np.stack([samples, 0.5 * samples], axis=1)
        write(HERE / name, both[:, :channels], rate_hz, container, codec)


if __name__ == "__main__":
    main()
