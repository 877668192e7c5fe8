"""The libraries that decode, behind one face: open, read forward, say what the file is.

libsndfile reads what it can; MP4, Matroska, ASF and ADTS are FFmpeg's, through PyAV, whose wheels
bring it along; a FLAC that is read whole is dr_flac's, see `whole_flac`. All deliver (frames,
channels) float32 in pieces of any size with equal samples: decoding goes forward in one thread, and
a piece is cut from what was decoded. Encoder delay and padding are left out where the container
marks them, as FFmpeg does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import soundfile

from earmill.pipeline.audio.channels import AudioBlock
from earmill.pipeline.audio.decoder_input import DecoderInput
from earmill.pipeline.audio.whole_flac import whole_flac
from earmill.pipeline.common.one_line import one_line

if TYPE_CHECKING:
    import av

# Containers that hold audio in practice. libsndfile also opens MATLAB files and sampler patches,
# which random data can resemble.
CONTAINERS = frozenset(
    {"WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "NIST"}
)
# Seeking lands on the exact sample in these; everything else is read from its start.
SEEKABLE_CODECS = frozenset(
    {"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}
)
# libsndfile: "Format not recognised", "unsupported encoding", "unimplemented format".
NOT_AUDIO_CODES = frozenset({1, 4, 18})
# libsndfile answers SF_COUNT_MAX where the header holds no length.
UNKNOWN_FRAMES = 1 << 62

# FFmpeg's demuxer and our name of each container that is its business; the demuxer is forced, so
# that no file can ask for one that opens further files.
FFMPEG = {
    "mp4": ("mov", "MP4"),
    "matroska": ("matroska", "MATROSKA"),
    "asf": ("asf", "ASF"),
    "adts": ("aac", "ADTS"),
}
# A container's duration is rounded, and counts delay and padding of the encoder.
DURATION_SLACK_S = 0.25
FULL_SCALE = {"u8": 128.0, "s16": 32768.0, "s32": 2147483648.0}


class DecoderError(Exception):
    """A library cannot open the bytes, or breaks while decoding.

    Args:
        reason: Its own words. not_audio: The bytes are nothing that it knows.
    """

    def __init__(self, reason: str, *, not_audio: bool = False) -> None:
        super().__init__(reason)
        self.not_audio = not_audio


class Decoder(Protocol):
    """An open file.

    Attributes:
        format, subtype: Container and codec. frames: Promised, `UNKNOWN_FRAMES` where nothing is.
        least_frames: Fewer than this many in the whole file mean that it is cut.
        name, version: The library.
    """

    format: str
    subtype: str
    samplerate: int
    channels: int
    frames: int
    least_frames: int
    name: str
    version: str

    @property
    def exact_seek(self) -> bool: ...

    def seek(self, frame: int) -> int: ...

    def read(self, frames: int) -> AudioBlock: ...

    def close(self) -> None: ...


def open_decoder(source: DecoderInput, kind: str, *, whole: bool = False) -> Decoder:
    """Open a stream with the library for its kind of container; DecoderError if it cannot.

    Args:
        whole: All of it is to be read.
    """
    if whole and kind == "flac" and (flac := whole_flac(source)) is not None:
        return flac
    source.seek(0)
    return AvFile(source, kind) if kind in FFMPEG else SndFile(source)


class _ForwardFile(soundfile.SoundFile):
    """A SoundFile that does not seek after each read, which costs time and moves MP3 samples."""

    def seekable(self) -> bool:
        return False


class SndFile:
    """A file that libsndfile reads."""

    name = "libsndfile"
    version: str = soundfile.__libsndfile_version__.removeprefix("libsndfile-")
    least_frames = 0

    def __init__(self, source: DecoderInput) -> None:
        try:
            self._file = _ForwardFile(source)
        except soundfile.LibsndfileError as error:
            raise DecoderError(_reason(error), not_audio=error.code in NOT_AUDIO_CODES) from error
        if self._file.format not in CONTAINERS:
            self._file.close()
            raise DecoderError(f"a {self._file.format} container", not_audio=True)
        self.format, self.subtype = str(self._file.format), str(self._file.subtype)
        self.samplerate, self.channels = int(self._file.samplerate), int(self._file.channels)
        self.frames = int(self._file.frames)

    @property
    def exact_seek(self) -> bool:
        return self.subtype in SEEKABLE_CODECS and self.format != "OGG"

    def seek(self, frame: int) -> int:
        try:
            return int(self._file.seek(frame))
        except soundfile.LibsndfileError as error:
            raise DecoderError(_reason(error)) from error

    def read(self, frames: int) -> AudioBlock:
        try:
            block: AudioBlock = self._file.read(frames, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise DecoderError(_reason(error)) from error
        return block

    def close(self) -> None:
        self._file.close()


def _reason(error: soundfile.LibsndfileError) -> str:
    return error.error_string.rstrip(".") or f"libsndfile error {error.code}"


class AvFile:
    """A file that FFmpeg reads: its first audio track."""

    name = "ffmpeg"
    frames = UNKNOWN_FRAMES
    exact_seek = False

    def __init__(self, source: DecoderInput, kind: str) -> None:
        import av  # a fifth of a second, for the files that need it

        self.version = str(av.ffmpeg_version_info)
        self._av = av
        demuxer, self.format = FFMPEG[kind]
        try:
            self._container = av.open(source, format=demuxer, metadata_errors="ignore")
        except (av.FFmpegError, ValueError) as error:
            raise DecoderError(_words(error)) from error
        try:
            self._open_track(kind)
        except DecoderError:
            self._container.close()
            raise

    def _open_track(self, kind: str) -> None:
        track = next(iter(self._container.streams.audio), None)
        if track is None:
            raise DecoderError("a file without sound", not_audio=True)
        codec = track.codec_context
        if codec is None:
            raise DecoderError("a codec that is not known or protected", not_audio=True)
        codec.thread_count = 1  # samples must not depend on timing
        self.subtype = codec.name.upper()
        self.samplerate, self.channels = int(codec.sample_rate or 0), int(codec.channels or 0)
        if self.samplerate <= 0 or self.channels <= 0:
            raise DecoderError("a sound track without rate or channels")
        self.seconds = self._duration(track, kind)
        self.least_frames = math.floor((self.seconds - DURATION_SLACK_S) * self.samplerate)
        self._packets = self._container.demux(track)
        self._pieces: list[AudioBlock] = []
        self._ready = 0

    def _duration(self, track: Any, kind: str) -> float:
        """Seconds of the track as far as the container says; 0 where it guesses or does not."""
        if kind == "adts":
            return 0.0
        if track.duration:
            return float(track.duration * track.time_base)
        alone = len(self._container.streams) == 1
        return (self._container.duration or 0) / 1e6 if alone else 0.0

    def seek(self, frame: int) -> int:
        raise NotImplementedError("what FFmpeg reads is decoded from its start")

    def read(self, frames: int) -> AudioBlock:
        """The next frames; fewer at the end."""
        try:
            while self._ready < frames:
                packet = next(self._packets, None)
                if packet is None:
                    break
                for piece in self._decoded(packet):
                    self._pieces.append(piece)
                    self._ready += len(piece)
        except (self._av.FFmpegError, ValueError) as error:
            raise DecoderError(_words(error)) from error
        return self._taken(min(frames, self._ready))

    def _decoded(self, packet: av.Packet[Any]) -> Iterator[AudioBlock]:
        if packet.is_corrupt:
            raise DecoderError("a damaged packet")
        for frame in packet.decode():
            if frame.is_corrupt:
                raise DecoderError("a damaged frame")
            if (frame.sample_rate, len(frame.layout.channels)) != (self.samplerate, self.channels):
                raise DecoderError("rate or channels change within the file")
            yield as_float(frame)

    def _taken(self, frames: int) -> AudioBlock:
        nothing = np.zeros((0, self.channels), dtype=np.float32)
        whole: AudioBlock = np.concatenate([nothing, *self._pieces])
        self._pieces = [whole[frames:]] if len(whole) > frames else []
        self._ready -= frames
        return whole[:frames]

    def close(self) -> None:
        self._container.close()


def as_float(frame: av.AudioFrame) -> AudioBlock:
    """(frames, channels) in -1 to 1, whatever the codec's sample format."""
    samples = frame.to_ndarray()
    name = frame.format.name
    by_frame = samples.T if frame.format.is_planar else samples.reshape(frame.samples, -1)
    scale = FULL_SCALE.get(name.removesuffix("p"))
    if scale is None:  # float or double
        return by_frame.astype(np.float32)
    offset = 128.0 if name.startswith("u8") else 0.0
    return ((by_frame.astype(np.float64) - offset) / scale).astype(np.float32)


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(text)
