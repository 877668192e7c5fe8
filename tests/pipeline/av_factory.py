"""Audio in the containers that libsndfile does not write, encoded by PyAV: no program is needed."""

from __future__ import annotations

import os
import tempfile
from fractions import Fraction
from functools import lru_cache
from typing import Any

import av
import numpy as np

from tests.pipeline.audio_factory import Samples, speech_like

# Name -> (muxer, encoder, rate in Hz, our container, our codec, muxer options).
AV_FORMATS: dict[str, tuple[str, str, int, str, str, dict[str, str]]] = {
    "m4a": ("ipod", "aac", 44100, "MP4", "AAC", {}),
    "mp4": ("mp4", "aac", 32000, "MP4", "AAC", {"movflags": "faststart"}),
    "fragmented.mp4": ("mp4", "aac", 44100, "MP4", "AAC", {"movflags": "empty_moov+frag_keyframe"}),
    "alac.m4a": ("ipod", "alac", 44100, "MP4", "ALAC", {}),
    "aac": ("adts", "aac", 44100, "ADTS", "AAC", {}),
    "webm": ("webm", "libopus", 48000, "MATROSKA", "OPUS", {}),
    "mka": ("matroska", "flac", 16000, "MATROSKA", "FLAC", {}),
    "wma": ("asf", "wmav2", 44100, "ASF", "WMAV2", {}),
}
LAYOUTS = {1: "mono", 2: "stereo", 7: "6.1", 8: "7.1"}
AV_LOSSLESS = ("alac.m4a", "mka")


def encode_av(samples: Samples, kind: str) -> bytes:
    """(frames, channels) samples in one of AV_FORMATS."""
    muxer, codec, rate_hz, _, _, options = AV_FORMATS[kind]
    return encode_as(samples, muxer, codec, rate_hz, options=options)


def encode_as(
    samples: Samples,
    muxer: str,
    codec: str,
    rate_hz: int,
    *,
    bit_rate: int = 128000,
    sample_format: str | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """(frames, channels) samples by any muxer and encoder of FFmpeg."""
    layout = LAYOUTS[samples.shape[1]]
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    try:
        # Into a file: some muxers open it again to move their header to the front.
        with av.open(path, "w", format=muxer, options=options or {}) as container:
            track = container.add_stream(codec, rate=rate_hz, layout=layout)
            track.codec_context.bit_rate = bit_rate
            if sample_format is not None:
                track.codec_context.format = av.AudioFormat(sample_format)
            track.codec_context.open()
            for piece in [*_frames(samples, rate_hz, layout, track), None]:
                container.mux(track.encode(piece))
        with open(path, "rb") as file:
            return file.read()
    finally:
        os.unlink(path)


def _frames(samples: Samples, rate_hz: int, layout: str, track: av.AudioStream) -> list[Any]:
    """The samples in the frames that an open encoder takes."""
    codec = track.codec_context
    cut = av.AudioResampler(codec.format, layout, rate_hz, frame_size=codec.frame_size or 1024)
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(samples).reshape(1, -1), format="flt", layout=layout
    )
    frame.sample_rate, frame.pts, frame.time_base = rate_hz, 0, Fraction(1, rate_hz)
    return [*cut.resample(frame), *cut.resample(None)]


@lru_cache(maxsize=64)
def av_clip(kind: str, seconds: float = 1.0, *, channels: int = 1, seed: int = 0) -> bytes:
    """An encoded speech-like clip."""
    return encode_av(speech_like(seconds, AV_FORMATS[kind][2], channels=channels, seed=seed), kind)


def video_only() -> bytes:
    """An MP4 without sound."""
    descriptor, path = tempfile.mkstemp(suffix=".mp4")
    os.close(descriptor)
    try:
        with av.open(path, "w", format="mp4") as container:
            track = container.add_stream("mpeg4", rate=10)
            track.width, track.height, track.pix_fmt = 32, 32, "yuv420p"
            for _ in range(3):
                picture = np.zeros((32, 32, 3), dtype=np.uint8)
                container.mux(track.encode(av.VideoFrame.from_ndarray(picture)))
            container.mux(track.encode(None))
        with open(path, "rb") as file:
            return file.read()
    finally:
        os.unlink(path)


def ogg_film(samples: Samples, rate_hz: int = 48000) -> bytes:
    """An Ogg of a film with these samples, (frames, channels), as its sound in Opus."""
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    try:
        with av.open(path, "w", format="ogg") as container:
            film = container.add_stream("libvpx", rate=10)
            film.width, film.height, film.pix_fmt = 32, 32, "yuv420p"
            track = container.add_stream("libopus", rate=rate_hz, layout="mono")
            track.codec_context.bit_rate = 128000
            track.codec_context.open()
            sound = _frames(samples, rate_hz, "mono", track)
            for number in range(10 * len(samples) // rate_hz):
                picture = np.full((32, 32, 3), number, dtype=np.uint8)
                container.mux(film.encode(av.VideoFrame.from_ndarray(picture)))
                while sound and sound[0].pts < (number + 1) * rate_hz / 10:
                    container.mux(track.encode(sound.pop(0)))
            container.mux(film.encode(None))
            container.mux(track.encode(None))
        with open(path, "rb") as file:
            return file.read()
    finally:
        os.unlink(path)
