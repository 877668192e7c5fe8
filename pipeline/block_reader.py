"""One span of one encoded stream, decoded block by block in constant memory.

Every check of bad input that `pipeline.decode` promises is made here, on the way and without a
second pass over the samples: container bookkeeping before decoding, finite samples during, promised
against delivered length after. Blocks of any size hold the same samples.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import soundfile

from pipeline.channels import Block, Channels, channel_ids, mix
from pipeline.containers import Probe, open_prefixed, probe
from pipeline.errors import (
    ChannelIndexError,
    EmptyFileError,
    NonFiniteError,
    NotAudioError,
    RowError,
    SampleRateError,
    SpanError,
    TruncatedError,
    UnreadableError,
    ZeroLengthError,
)
from pipeline.hashing import sha256_of
from pipeline.spans import Span, ends_before, frame_span

DECODER = "libsndfile"
DECODER_VERSION: str = soundfile.__libsndfile_version__.removeprefix("libsndfile-")

# 1.5 s at 44.1 kHz; long enough that Python costs nothing, small enough to stream anything.
BLOCK_FRAMES = 1 << 16

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


@dataclass(frozen=True)
class Limits:
    """Sample rates taken for real, in Hz."""

    min_rate_hz: float = 1000.0
    max_rate_hz: float = 768000.0


@dataclass(frozen=True)
class AudioFacts:
    """What was read.

    Args:
        container: WAV, FLAC, OGG, MP3, ...
        codec: libsndfile's subtype: PCM_16, VORBIS, OPUS, MPEG_LAYER_III, ...
        rate_hz: Sample rate of the file.
        channels: Channels of the file.
        frames: Samples per channel of the selected span.
        seconds: The span's duration.
        nbytes: Bytes of the whole file.
        bytes_sha256: Checksum of the whole file.
        pcm_sha256: Checksum of the span before mixing: float32 little-endian, interleaved channels.
        decoder: Library that decoded.
        decoder_version: Its version.
    """

    container: str
    codec: str
    rate_hz: int
    channels: int
    frames: int
    seconds: float
    nbytes: int
    bytes_sha256: str
    pcm_sha256: str
    decoder: str = DECODER
    decoder_version: str = DECODER_VERSION


class _Input:
    """A stream as libsndfile wants it: no name, and a read error is kept, not lost in a callback.

    Args:
        stream: Seekable bytes.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        chunk = self.read(len(view))
        view[: len(chunk)] = chunk
        return len(chunk)

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except OSError as error:
            self.error = error
            return b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


class _ForwardFile(soundfile.SoundFile):
    """A SoundFile that does not seek after each read, which costs time and moves MP3 samples."""

    def seekable(self) -> bool:
        return False


class BlockReader:
    """Iterates over mixed blocks of one span; `facts` are complete after the last block.

    Args:
        stream: Seekable bytes; the caller closes them.
        uri: What messages call it.
        span: Start and end in seconds, None for the ends of the file.
        channels: Channel policy.
        limits: Sample rates to accept.
        block_frames: Frames in a block.

    Shape:
        - blocks: (len(channel_ids), <= block_frames) float32
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        uri: str,
        span: Span,
        channels: Channels,
        limits: Limits,
        block_frames: int,
    ) -> None:
        self._uri, self._span, self._limits = uri, span, limits
        self._block_frames = block_frames
        self._nbytes = stream.seek(0, io.SEEK_END)
        if self._nbytes == 0:
            raise EmptyFileError(f"{uri}: expected audio, got an empty file")
        self._probe = self._probed(stream)
        self._bytes_sha256 = _digest(stream)
        self._input = _Input(open_prefixed(stream, self._probe.prefix, self._probe.offset))
        self._file = self._opened()
        try:
            self._check_rate()
            self.channel_ids = self._channel_ids(channels)
            self._declared = self._declared_frames()
            self._check_damage()
            self._start, self._stop = self._frame_span()
        except RowError:
            self.close()
            raise
        self._pcm_sha256 = hashlib.sha256()
        self._frames = 0
        self._facts: AudioFacts | None = None

    @property
    def rate_hz(self) -> int:
        return int(self._file.samplerate)

    @property
    def facts(self) -> AudioFacts:
        if self._facts is None:
            raise ValueError("facts are complete only after the last block was read")
        return self._facts

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Block]:
        position = self._skip_to_start()
        while self._stop is None or position < self._stop:
            wanted = self._block_frames if self._stop is None else self._stop - position
            block = self._read(min(wanted, self._block_frames))
            if len(block) == 0:
                break
            self._check_finite(block, position)
            self._pcm_sha256.update(np.ascontiguousarray(block, dtype="<f4").data)
            position += len(block)
            self._frames += len(block)
            yield mix(block, self.channel_ids)
        self._finish(position)

    # Opening.

    def _probed(self, stream: BinaryIO) -> Probe:
        try:
            return probe(stream, self._nbytes)
        except OSError as error:
            raise UnreadableError(f"{self._uri}: read failed: {error}") from error

    def _opened(self) -> _ForwardFile:
        try:
            file = _ForwardFile(self._input)
        except soundfile.LibsndfileError as error:
            raise self._open_error(error) from error
        if file.format not in CONTAINERS:
            file.close()
            raise NotAudioError(f"{self._uri}: expected audio, got a {file.format} container")
        return file

    def _open_error(self, error: soundfile.LibsndfileError) -> RowError:
        self._check_input()
        reason = error.error_string.rstrip(".")
        known = self._probe.kind != "other"
        if self._probe.rate_hz == 0:
            return SampleRateError(f"{self._uri}: expected a sample rate above 0 Hz, got 0")
        if self._probe.damage is not None:
            return TruncatedError(f"{self._uri}: cut or damaged: {self._probe.damage}")
        if error.code in NOT_AUDIO_CODES or not known:
            return NotAudioError(
                f"{self._uri}: expected audio (wav, flac, ogg, mp3, opus), got bytes of no "
                f"supported format ({reason})"
            )
        return TruncatedError(f"{self._uri}: the {self._probe.kind} header is broken: {reason}")

    def _check_input(self) -> None:
        if self._input.error is not None:
            error = self._input.error
            raise UnreadableError(f"{self._uri}: read failed: {error}") from error

    def _check_rate(self) -> None:
        low, high = self._limits.min_rate_hz, self._limits.max_rate_hz
        if not low <= self.rate_hz <= high:
            raise SampleRateError(
                f"{self._uri}: expected a sample rate of {low:g} to {high:g} Hz, got {self.rate_hz}"
            )

    def _channel_ids(self, channels: Channels) -> tuple[int, ...]:
        try:
            return channel_ids(channels, self._file.channels)
        except ChannelIndexError as error:
            raise ChannelIndexError(f"{self._uri}: {error}") from error

    def _declared_frames(self) -> int | None:
        """Frames the file says it has, or None where it does not say."""
        frames = self._probe.declared_frames
        frames = self._file.frames if frames is None else frames
        return None if frames >= UNKNOWN_FRAMES else frames

    def _check_damage(self) -> None:
        whole = self._span == (None, None)
        if self._probe.damage is not None and (whole or self._probe.shifts_time):
            raise TruncatedError(f"{self._uri}: cut or damaged: {self._probe.damage}")

    def _frame_span(self) -> tuple[int, int | None]:
        try:
            return frame_span(self._span, self.rate_hz, self._declared)
        except SpanError as error:
            raise SpanError(f"{self._uri}: {error}") from error

    # Reading.

    def _skip_to_start(self) -> int:
        exact = self._file.subtype in SEEKABLE_CODECS and self._file.format != "OGG"
        if self._start == 0:
            return 0
        if exact and self._declared is not None:
            return self._sought(min(self._start, self._file.frames))
        position = 0
        while position < self._start:
            block = self._read(min(self._block_frames, self._start - position))
            if len(block) == 0:
                break
            position += len(block)
        return position

    def _sought(self, frame: int) -> int:
        try:
            return int(self._file.seek(frame))
        except soundfile.LibsndfileError as error:
            raise self._broken(error, frame) from error

    def _read(self, frames: int) -> Block:
        try:
            block: Block = self._file.read(frames, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            self._check_input()
            raise self._broken(error, self._start + self._frames) from error
        self._check_input()
        return block

    def _broken(self, error: soundfile.LibsndfileError, frame: int) -> TruncatedError:
        reason = error.error_string.rstrip(".") or f"libsndfile error {error.code}"
        return TruncatedError(f"{self._uri}: decoding breaks after sample {frame}: {reason}")

    def _check_finite(self, block: Block, position: int) -> None:
        if np.isfinite(block).all():
            return
        frame, channel = np.argwhere(~np.isfinite(block))[0]
        raise NonFiniteError(
            f"{self._uri}: expected finite samples, got {block[frame, channel]} at sample "
            f"{position + frame} of channel {channel}"
        )

    def _finish(self, position: int) -> None:
        self._check_complete(position)
        if self._frames == 0:
            raise ZeroLengthError(f"{self._uri}: expected samples, got a header without any")
        self._facts = AudioFacts(
            container=self._file.format,
            codec=self._file.subtype,
            rate_hz=self.rate_hz,
            channels=self._file.channels,
            frames=self._frames,
            seconds=self._frames / self.rate_hz,
            nbytes=self._nbytes,
            bytes_sha256=self._bytes_sha256,
            pcm_sha256=self._pcm_sha256.hexdigest(),
        )

    def _check_complete(self, position: int) -> None:
        """Compare what was delivered with what was promised, once reading has stopped."""
        if self._declared is None:
            if self._span != (None, None) and (self._frames == 0 or position < (self._stop or 0)):
                raise SpanError(f"{self._uri}: {ends_before(self._span, position, self.rate_hz)}")
            return
        expected = self._declared if self._stop is None else self._stop
        if position + self._probe.slack_frames < expected:
            raise TruncatedError(
                f"{self._uri}: cut or damaged: expected {expected} samples, got {position}"
            )


def _digest(stream: BinaryIO) -> str:
    """sha256 of the stream's bytes, from its own cache if it has one."""
    cached = getattr(stream, "digest", None)
    if callable(cached):
        return str(cached())
    return sha256_of(stream)
