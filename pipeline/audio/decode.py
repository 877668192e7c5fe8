"""Decode encoded bytes to float32 samples, block by block, and to facts about them.

`BlockReader` checks the container's bookkeeping before decoding, that samples are finite during
decoding, and the delivered length against the declared length afterwards. Lossy streams are decoded
from their start. docs/howto/audio-files.md lists the damage that cannot be found.
"""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Self

import numpy as np

from earmill.pipeline.audio.channels import AudioBlock, Channels, channel_ids, mix
from earmill.pipeline.audio.containers import probe
from earmill.pipeline.audio.decoders import UNKNOWN_FRAMES, DecoderError, DecoderInput, open_decoder
from earmill.pipeline.audio.time_span import END_SLACK_S, ends_before, frame_span, seconds_to_frames
from earmill.pipeline.common import errors
from earmill.pipeline.common.byte_streams import digest_of
from earmill.pipeline.common.errors import RowError
from earmill.pipeline.common.monitoring import doing

# 1.5 s at 44.1 kHz: long enough that the cost of Python is small, short enough to stream.
BLOCK_FRAMES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Limits of the files that a job accepts."""

    min_rate_hz: float = 1000.0
    max_rate_hz: float = 768000.0
    max_seconds: float = 86400.0
    span_tolerance_s: float = END_SLACK_S  # Seconds that a span may end behind its file.
    unterminated: bool = False  # Ogg files without an end mark are accepted.


@dataclass(frozen=True)
class AudioFacts:
    """Facts about a file and the span that was read from it."""

    container: str  # WAV, FLAC, OGG, MP3, MP4, ...
    codec: str  # The library's name: PCM_16, VORBIS, MPEG_LAYER_III, AAC, WMAV2, ...
    rate_hz: int
    channels: int
    frames: int  # Samples per channel of the span.
    seconds: float  # Duration of the span.
    nbytes: int  # Bytes of the whole file.
    bytes_sha256: str  # Checksum of the whole file; empty if only a part of the file is read.
    # Checksum of the span before mixing: float32 little-endian, interleaved channels.
    pcm_sha256: str
    decoder: str  # Library that decoded.
    decoder_version: str
    # Is `ignored` if the header's size of the samples cannot be right and all samples were read.
    # Is `unknown` if the header states that it does not know the size.
    header_size: str | None = None
    unterminated: bool | None = None  # The stream lacks its end mark; None if it needs none.
    span_short_s: float | None = None  # Seconds by which the file ended before the span.


class Blocks(ABC):
    """Blocks of one span, read once, decoded in this process or in another. Facts are complete
    after the last block."""

    rate_hz: int
    channel_ids: tuple[int, ...]
    _facts: AudioFacts | None = None

    @property
    def facts(self) -> AudioFacts:
        if self._facts is None:
            raise ValueError("facts are complete only after the last block was read")
        return self._facts

    @abstractmethod
    def __iter__(self) -> Iterator[AudioBlock]: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BlockReader(Blocks):
    """Mixed blocks of one span in constant memory: (len(channel_ids), <= block_frames) float32.

    Damage may show only after good blocks, whose results are then invalid. The caller closes the
    seekable stream. Without `digest`, its sha256 is the result of the stream's method `digest()`,
    or is computed. Blocks also contain `margins_s` whole seconds before and after the span, within
    the file. The facts are about the span alone.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        uri: str,
        digest: str | None = None,
        start_s: float | None = None,
        end_s: float | None = None,
        channels: Channels = "mean",
        limits: Limits | None = None,
        block_frames: int = BLOCK_FRAMES,
        margins_s: tuple[int, int] = (0, 0),
    ) -> None:
        self._uri, self._span, self._limits = uri, (start_s, end_s), limits or Limits()
        self._whole = self._span == (None, None)
        self._block_frames = block_frames
        self._nbytes = stream.seek(0, io.SEEK_END)
        self._pcm_sha256 = hashlib.sha256()
        self._frames = 0
        with self._named_errors():
            if self._nbytes == 0:
                raise errors.EmptyFileError("expected audio, got an empty file")
            try:
                self._probe = probe(stream, self._nbytes)
            except OSError as error:
                raise errors.UnreadableError(f"read failed: {error}") from error
            # A failure here is the disk's, not the file's: it stays an OSError.
            with doing("hash"):
                self._bytes_sha256 = digest_of(stream) if digest is None else digest
            self._input = DecoderInput(stream)
            try:
                self._file = open_decoder(self._input, self._probe, whole=self._whole)
            except DecoderError as error:
                raise self._open_error(error) from error
            try:
                self._check_header(channels, *margins_s)
            except RowError:
                self.close()
                raise

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Put the stream's name in front of the message of a RowError."""
        try:
            yield
        except RowError as error:
            raise type(error)(f"{self._uri}: {error}") from error.__cause__

    def _check_input(self) -> None:
        """Raise the error of a failed read, which decoders take for the end of the file."""
        if (error := self._input.error) is not None:
            raise errors.UnreadableError(f"read failed: {error}") from error

    def _open_error(self, error: DecoderError) -> RowError:
        self._check_input()
        if self._probe.rate_hz == 0:
            return errors.SampleRateError("expected a sample rate above 0 Hz, got 0")
        if refused := self._refused():
            return refused
        if error.unsupported:
            return _broken(error, 0)
        if error.not_audio or self._probe.kind == "other":
            return errors.NotAudioError(
                "expected audio (wav, flac, ogg, mp3, opus, m4a, ...), got bytes of no supported "
                f"format ({error})"
            )
        return errors.TruncatedError(f"the {self._probe.kind} header is broken: {error}")

    def _refused(self) -> errors.TruncatedError | None:
        """Return the error for damage that the probe found and the job does not accept."""
        if self._probe.damage is not None:
            return errors.TruncatedError(f"cut or damaged: {self._probe.damage}")
        if self._probe.unterminated and not self._limits.unterminated:
            return errors.TruncatedError(
                "cut, or written without an end: the last Ogg page has no end-of-stream mark; "
                "audio.unterminated: accept takes such files"
            )
        return None

    def _check_header(self, channels: Channels, before_s: int, after_s: int) -> None:
        """Compare the header with the limits, and find the frames to read."""
        self.rate_hz = int(self._file.samplerate)
        low, high = self._limits.min_rate_hz, self._limits.max_rate_hz
        if not low <= self.rate_hz <= high:
            raise errors.SampleRateError(
                f"expected a sample rate of {low:g} to {high:g} Hz, got {self.rate_hz}"
            )
        self.channel_ids = channel_ids(channels, self._file.channels)
        declared = self._probe.declared_frames
        declared = self._file.frames if declared is None else declared
        self._declared = None if declared >= UNKNOWN_FRAMES else declared
        matters = self._whole or self._probe.shifts_time or self._probe.unterminated
        if matters and (refused := self._refused()):
            raise refused
        self._start, stop = frame_span(
            self._span, self.rate_hz, self._declared, self._limits.span_tolerance_s
        )
        self._is_open = stop is None
        self._stop = UNKNOWN_FRAMES if stop is None else stop
        self._check_length(0 if self._is_open else self._stop - self._start)
        # Frames to read: the span and its margins.
        self._from = max(0, self._start - before_s * self.rate_hz)
        self._to = min(self._stop + after_s * self.rate_hz, declared)

    def _check_length(self, frames: int) -> None:
        limit = self._limits.max_seconds
        if frames > limit * self.rate_hz:
            raise errors.TooLongError(
                f"expected at most {limit:g} s of audio (audio.max_seconds), got "
                f"{frames / self.rate_hz:.6g} s or more; raise it, or cut the file into spans with "
                "a manifest"
            )

    def __iter__(self) -> Iterator[AudioBlock]:
        with self._named_errors():
            self._position = 0
            if self._from and self._file.exact_seek and self._declared is not None:
                frame = min(self._from, self._file.frames)
                try:
                    self._position = self._file.seek(frame)
                except DecoderError as error:
                    raise _broken(error, frame) from error
            while self._position < self._from:
                block = self._read(min(self._block_frames, self._from - self._position))
                if len(block) == 0:
                    break
                self._position += len(block)
            while self._position < self._to:
                block = self._read(min(self._to - self._position, self._block_frames))
                if len(block) == 0:
                    break
                if not np.isfinite(block).all():
                    frame, channel = np.argwhere(~np.isfinite(block))[0]
                    raise errors.NonFiniteError(
                        f"expected finite samples, got {block[frame, channel]} at sample "
                        f"{self._position + frame} of channel {channel}"
                    )
                inside = block[
                    max(0, self._start - self._position) : max(0, self._stop - self._position)
                ]
                with doing("hash"):
                    self._pcm_sha256.update(np.ascontiguousarray(inside, dtype="<f4").data)
                self._position += len(block)
                self._frames += len(inside)
                self._check_length(self._frames)
                yield mix(block, self.channel_ids)
            self._check_complete()
            end_s, missing = self._span[1], 0
            if end_s is not None:
                missing = seconds_to_frames(end_s, self.rate_hz) - self._start - self._frames
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
                decoder=self._file.name,
                decoder_version=self._file.version,
                header_size=self._probe.header_size,
                unterminated=self._probe.unterminated or None,
                span_short_s=missing / self.rate_hz if missing > 0 else None,
            )

    def _read(self, frames: int) -> AudioBlock:
        try:
            block = self._file.read(frames)
        except DecoderError as error:
            self._check_input()
            raise _broken(error, self._position) from error
        self._check_input()
        return block

    def _check_complete(self) -> None:
        """Compare the delivered frames with the declared frames, once reading has stopped."""
        position, least = self._position, self._file.least_frames
        if self._is_open and position < least:
            raise errors.TruncatedError(
                f"cut or damaged: expected about {least} samples or more, got {position}"
            )
        if self._declared is None:
            tolerance_s = self._limits.span_tolerance_s
            missing = 0 if self._is_open else self._stop - position
            if not self._frames or missing > seconds_to_frames(tolerance_s, self.rate_hz):
                if refused := self._refused():
                    raise refused
                if not self._whole:
                    raise ends_before(self._span, position, self.rate_hz, tolerance_s)
        elif position + self._probe.slack_frames < self._to:
            raise errors.TruncatedError(
                f"cut or damaged: expected {self._to} samples, got {position}"
            )
        elif self._to == self._declared:
            more = self._file.goes_on()
            self._check_input()
            if more is not None:
                raise errors.TruncatedError(f"goes on behind the end that it states: {more}")
        if self._frames == 0:
            raise errors.ZeroLengthError("expected samples, got a header without any")


def _broken(error: DecoderError, frame: int) -> RowError:
    if error.unsupported:
        return errors.UnsupportedError(
            f"expected one stream in a supported codec, got {error}; convert it"
        )
    return errors.TruncatedError(f"decoding breaks after sample {frame}: {error}")
