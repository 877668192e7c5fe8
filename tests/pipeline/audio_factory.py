"""Good and damaged audio from code, as bytes: what the decoding and source tests feed on.

Every sample comes from a seeded generator. Damage is done to whole encoded files the way it
happens: a transfer that stops, a sector that flips, a page that answers with HTML.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import soundfile

Samples = npt.NDArray[np.float32]

# Name -> (libsndfile container, codec, rate in Hz). One of each kind the project takes.
FORMATS = {
    "wav": ("WAV", "PCM_16", 22050),
    "wav-float": ("WAV", "FLOAT", 16000),
    "flac": ("FLAC", "PCM_16", 16000),
    "ogg": ("OGG", "VORBIS", 44100),
    "opus": ("OGG", "OPUS", 48000),
    "mp3": ("MP3", "MPEG_LAYER_III", 44100),
    "aiff": ("AIFF", "PCM_16", 22050),
    "au": ("AU", "PCM_16", 16000),
    "caf": ("CAF", "PCM_16", 32000),
    "w64": ("W64", "PCM_16", 16000),
    "rf64": ("RF64", "PCM_16", 22050),
    "sph": ("NIST", "PCM_16", 16000),
}
LOSSLESS = ("wav", "wav-float", "flac", "aiff", "au", "caf", "w64", "rf64", "sph")
LOSSY = ("ogg", "opus", "mp3")

# libsndfile's Vorbis encoder overflows its stack on long writes.
WRITE_FRAMES = 4096


def speech_like(seconds: float, rate_hz: int, *, channels: int = 1, seed: int = 0) -> Samples:
    """Noise with a syllable rhythm, (frames, channels) float32; channels differ."""
    rng = np.random.default_rng(seed)
    frames = round(seconds * rate_hz)
    rhythm = 0.5 + 0.5 * np.sin(2 * np.pi * 4.0 * np.arange(frames) / rate_hz)
    return (0.1 * rng.standard_normal((frames, channels)) * rhythm[:, None]).astype(np.float32)


def encode(samples: Samples, kind: str = "wav", rate_hz: int | None = None) -> bytes:
    """(frames, channels) samples in one of FORMATS."""
    container, codec, usual_hz = FORMATS[kind]
    sink = io.BytesIO()
    with soundfile.SoundFile(
        sink, "w", rate_hz or usual_hz, samples.shape[1], format=container, subtype=codec
    ) as file:
        for start in range(0, len(samples), WRITE_FRAMES):
            file.write(samples[start : start + WRITE_FRAMES])
    return sink.getvalue()


@lru_cache(maxsize=512)
def clip(kind: str = "wav", seconds: float = 1.0, *, channels: int = 1, seed: int = 0) -> bytes:
    """An encoded speech-like clip.

    Cached, so that equal arguments give equal bytes: libsndfile writes the time into float WAVs and
    random serial numbers into Ogg.
    """
    return encode(speech_like(seconds, FORMATS[kind][2], channels=channels, seed=seed), kind)


def with_rate(wav: bytes, rate_hz: int) -> bytes:
    """A WAV whose header claims another sample rate."""
    return wav[:24] + struct.pack("<I", rate_hz) + wav[28:]


def with_data_size(wav: bytes, size: int) -> bytes:
    """A PCM WAV whose data chunk claims another size."""
    return wav[:40] + struct.pack("<I", size) + wav[44:]


def with_bad_sample(value: float, seconds: float = 1.0, at: int = 700) -> bytes:
    """A float WAV with one NaN or infinite sample."""
    samples = speech_like(seconds, 16000)
    samples[at, 0] = value
    return encode(samples, "wav-float")


def flipped(data: bytes, fraction: float, count: int = 40) -> bytes:
    """`count` bytes changed from the given fraction of the file on."""
    start = int(len(data) * fraction)
    changed = bytes(byte ^ 0x5A for byte in data[start : start + count])
    return data[:start] + changed + data[start + count :]


def with_hole(data: bytes) -> bytes:
    """A tenth of the file lost in its middle."""
    return data[: len(data) * 45 // 100] + data[len(data) * 55 // 100 :]


def without_count_tag(mp3: bytes) -> bytes:
    """An MP3 as a stream recorder writes it: the first frame, which holds the Xing tag, is gone."""
    header = mp3[:4]
    kbits = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)[header[2] >> 4]
    rate_hz = (44100, 48000, 32000)[header[2] >> 2 & 3]
    return mp3[144 * kbits * 1000 // rate_hz + (header[2] >> 1 & 1) :]


def loud_then_quiet_mp3(seconds: float = 8.0) -> bytes:
    """A variable-bit-rate MP3, a quarter noise, then silence: the worst case for guessing."""
    rate_hz = 44100
    samples = speech_like(seconds, rate_hz, seed=5)
    samples[len(samples) // 4 :] = 0
    sink = io.BytesIO()
    with soundfile.SoundFile(
        sink,
        "w",
        rate_hz,
        1,
        format="MP3",
        subtype="MPEG_LAYER_III",
        bitrate_mode="VARIABLE",
        compression_level=0.3,
    ) as file:
        for start in range(0, len(samples), WRITE_FRAMES):
            file.write(samples[start : start + WRITE_FRAMES])
    return sink.getvalue()


def flac_without_length(flac: bytes) -> bytes:
    """A FLAC from a pipe: the 36-bit sample count of STREAMINFO is zero."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


@dataclass(frozen=True)
class Damaged:
    """A damaged file and what must be said of it.

    Args:
        name: File name with extension.
        data: Its bytes.
        error_class: `RowError.error_class` it must lead to.
    """

    name: str
    data: bytes
    error_class: str


def damaged_corpus() -> list[Damaged]:
    """Every kind of damage that must be found, each in the formats it occurs in."""
    cases = [Damaged("empty.wav", b"", "empty_file")]
    cases += [
        Damaged("page.mp3", b"<html><body>404 Not Found</body></html>" * 40, "not_audio"),
        Damaged("random.flac", np.random.default_rng(9).bytes(20000), "not_audio"),
        Damaged("zeros.wav", bytes(5000), "not_audio"),
        Damaged("picture.ogg", b"\x89PNG\r\n\x1a\n" + bytes(3000), "not_audio"),
    ]
    for kind in FORMATS:
        whole, suffix = clip(kind, seconds=2.0), kind.split("-")[0]
        name = kind.replace("-", "_")
        cases.append(Damaged(f"half_{name}.{suffix}", whole[: len(whole) // 2], "truncated"))
        cases.append(Damaged(f"tail_{name}.{suffix}", whole[:-50], "truncated"))
    for kind in ("flac", "ogg", "opus"):
        cases.append(Damaged(f"flip_{kind}.{kind}", flipped(clip(kind, 2.0), 0.5), "truncated"))
    for kind in ("flac", "ogg", "opus", "mp3"):
        cases.append(Damaged(f"hole_{kind}.{kind}", with_hole(clip(kind, 2.0)), "truncated"))
    wav = clip("wav")
    cases += [
        Damaged("header_only.wav", wav[:44], "truncated"),
        Damaged("no_samples.wav", encode(speech_like(0, 22050)), "zero_length"),
        Damaged("no_samples.ogg", encode(speech_like(0, 44100), "ogg"), "zero_length"),
        Damaged("nan.wav", with_bad_sample(np.nan), "non_finite"),
        Damaged("inf.wav", with_bad_sample(-np.inf), "non_finite"),
        Damaged("rate_zero.wav", with_rate(wav, 0), "sample_rate"),
        Damaged("rate_low.wav", with_rate(wav, 7), "sample_rate"),
        Damaged("rate_high.wav", with_rate(wav, 2_000_000), "sample_rate"),
    ]
    return cases
