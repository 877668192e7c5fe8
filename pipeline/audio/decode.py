"""Decode encoded bytes to float32 samples and facts, whole or in blocks, with one result.

Decoding is libsndfile's (through soundfile) and, for what libsndfile does not read, FFmpeg's
(through PyAV), from a seekable stream. Tags in front of the audio are skipped for every format. Bad
input becomes a RowError:

- certain to be found: empty, not audio, a codec that is not supported, unreadable header, no
  samples, NaN or infinity, absurd sample rate, missing channel, a span outside the file; a cut or
  damaged FLAC, WavPack or TTA (checksums, lengths in headers) and Ogg (page checksums, numbers, end
  mark); a cut WAV, RF64, BW64, W64, AIFF, CAF, AU, NIST, MP4, Matroska or ASF (sizes in the
  header); a cut MP3 that has a Xing or Info tag with its length; samples behind those that the
  header counts, such as a second file behind the first.
- not detectable: a cut WAV, or FLAC at a frame border, whose writer never knew the length
  (`AudioFacts.header_size` says which these are); an MP3 without such a tag, ADTS, AC-3 or AMR, cut
  exactly between two frames; a fragmented MP4 or live Matroska between two fragments; wrong sample
  values inside a WAV or inside intact frames of a lossy codec; damage outside the span of a row,
  except in Ogg, ADTS, AC-3 and AMR, where it moves time.

Spans are cut from the samples of the whole file: lossy streams are decoded from their start.

`BlockReader` decodes one span of one stream block by block in constant memory. It checks the
container's bookkeeping before decoding, that samples are finite during it, and the delivered
length against the promised one after it, without a second pass over the samples.
"""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from earmill.pipeline.audio.channels import AudioBlock, Channels, channel_ids, mix
from earmill.pipeline.audio.containers import Probe, probe
from earmill.pipeline.audio.decoders import (
    UNKNOWN_FRAMES,
    Decoder,
    DecoderError,
    DecoderInput,
    open_decoder,
)
from earmill.pipeline.audio.time_span import (
    END_SLACK_S,
    TimeSpan,
    ends_before,
    frame_span,
    seconds_to_frames,
)
from earmill.pipeline.common.byte_streams import digest_of
from earmill.pipeline.common.errors import (
    ChannelIndexError,
    EmptyFileError,
    NonFiniteError,
    NotAudioError,
    RowError,
    SampleRateError,
    SpanError,
    TooLongError,
    TruncatedError,
    UnreadableError,
    UnsupportedError,
    ZeroLengthError,
)
from earmill.pipeline.common.timing import HASH, doing

# 1.5 s at 44.1 kHz; long enough that Python costs nothing, small enough to stream anything.
BLOCK_FRAMES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Limits of the files that a job takes.

    Args:
        min_rate_hz: Lowest sample rate.
        max_rate_hz: Highest sample rate.
        max_seconds: Longest clip.
        span_tolerance_s: A span may end so much behind its file.
        unterminated: Take Ogg files without an end mark.
    """

    min_rate_hz: float = 1000.0
    max_rate_hz: float = 768000.0
    max_seconds: float = 86400.0
    span_tolerance_s: float = END_SLACK_S
    unterminated: bool = False


@dataclass(frozen=True)
class AudioFacts:
    """What was read.

    Args:
        container: WAV, FLAC, OGG, MP3, MP4, ...
        codec: The library's name for it: PCM_16, VORBIS, MPEG_LAYER_III, AAC, WMAV2, ...
        rate_hz: Sample rate of the file.
        channels: Channels of the file.
        frames: Samples per channel of the selected span.
        seconds: The span's duration.
        nbytes: Bytes of the whole file.
        bytes_sha256: Checksum of the whole file; empty where only a part of it is read.
        pcm_sha256: Checksum of the span before mixing: float32 little-endian, interleaved channels.
        decoder: Library that decoded.
        decoder_version: Its version.
        header_size: `ignored` where the header's size of the samples cannot be right and those that
            are there were read, `unknown` where the header says so itself, else None.
        unterminated: The stream has no end mark; None where it has one or needs none.
        span_short_s: The file ended so many seconds before the span; None where it did not.
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
    decoder: str
    decoder_version: str
    header_size: str | None = None
    unterminated: bool | None = None
    span_short_s: float | None = None


class Blocks(ABC):
    """Blocks of one span, read once, wherever they are decoded."""

    #: Sample rate of the file, and channels of a block.
    rate_hz: int
    channel_ids: tuple[int, ...]
    _facts: AudioFacts | None = None

    @property
    def facts(self) -> AudioFacts:
        """What was read; ValueError before the last block was."""
        if self._facts is None:
            raise ValueError("facts are complete only after the last block was read")
        return self._facts

    @abstractmethod
    def __iter__(self) -> Iterator[AudioBlock]:
        """The blocks."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlockReader(Blocks):
    """Iterates over mixed blocks of one span; `facts` are complete after the last block.

    Args:
        stream: Seekable bytes; the caller closes them.
        uri: What messages call it.
        span: Start and end in seconds, None for the ends of the file.
        channels: Channel policy.
        limits: Sample rates to accept.
        block_frames: Frames in a block.
        margins_s: Whole seconds before and after the span that blocks hold as well, as far as the
            file goes; `facts` are of the span alone.

    Shape:
        - blocks: (len(channel_ids), <= block_frames) float32
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        uri: str,
        span: TimeSpan,
        channels: Channels,
        limits: Limits,
        block_frames: int,
        margins_s: tuple[int, int] = (0, 0),
    ) -> None:
        self._uri, self._span, self._limits = uri, span, limits
        self._block_frames = block_frames
        self._nbytes = stream.seek(0, io.SEEK_END)
        if self._nbytes == 0:
            raise EmptyFileError(f"{uri}: expected audio, got an empty file")
        self._probe = self._probed(stream)
        # A failure here is the disk's, not the file's: it stays an OSError.
        with doing(HASH):
            self._bytes_sha256 = digest_of(stream)
        self._input = DecoderInput(stream)
        self._file = self._opened()
        self.rate_hz = int(self._file.samplerate)
        try:
            self._check_rate()
            self.channel_ids = self._channel_ids(channels)
            self._declared = self._declared_frames()
            self._check_damage()
            self._start, self._stop = self._frame_span()
            self._from, self._to = self._with_margins(*margins_s)
            self._check_length(self._promised_frames())
        except RowError:
            self.close()
            raise
        self._pcm_sha256 = hashlib.sha256()
        self._frames = 0

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[AudioBlock]:
        self._position = 0
        self._position = self._skip_to_start()
        while self._to is None or self._position < self._to:
            wanted = self._block_frames if self._to is None else self._to - self._position
            block = self._read(min(wanted, self._block_frames))
            if len(block) == 0:
                break
            self._check_finite(block, self._position)
            own = self._own(block)
            with doing(HASH):
                self._pcm_sha256.update(np.ascontiguousarray(own, dtype="<f4").data)
            self._position += len(block)
            self._frames += len(own)
            self._check_length(self._frames)
            yield mix(block, self.channel_ids)
        self._finish(self._position)

    def _own(self, block: AudioBlock) -> AudioBlock:
        """What of the next block is the span's."""
        stop = None if self._stop is None else max(0, self._stop - self._position)
        return block[max(0, self._start - self._position) : stop]

    # Opening.

    def _probed(self, stream: BinaryIO) -> Probe:
        try:
            return probe(stream, self._nbytes)
        except OSError as error:
            raise UnreadableError(f"{self._uri}: read failed: {error}") from error

    def _opened(self) -> Decoder:
        try:
            whole = self._span == (None, None)
            return open_decoder(self._input, self._probe, whole=whole)
        except DecoderError as error:
            raise self._open_error(error) from error

    def _open_error(self, error: DecoderError) -> RowError:
        self._check_input()
        known = self._probe.kind != "other"
        if self._probe.rate_hz == 0:
            return SampleRateError(f"{self._uri}: expected a sample rate above 0 Hz, got 0")
        if (refused := self._refused()) is not None:
            return refused
        if error.unsupported:
            return self._unsupported(error)
        if error.not_audio or not known:
            return NotAudioError(
                f"{self._uri}: expected audio (wav, flac, ogg, mp3, opus, m4a, ...), got bytes of "
                f"no supported format ({error})"
            )
        return TruncatedError(f"{self._uri}: the {self._probe.kind} header is broken: {error}")

    def _unsupported(self, error: DecoderError) -> UnsupportedError:
        return UnsupportedError(
            f"{self._uri}: expected one stream in a supported codec, got {error}; convert it"
        )

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
        if (whole or self._probe.shifts_time or self._probe.unterminated) and (
            refused := self._refused()
        ) is not None:
            raise refused

    def _refused(self) -> TruncatedError | None:
        """The error for what the probe found and the job does not take."""
        if self._probe.damage is not None:
            return TruncatedError(f"{self._uri}: cut or damaged: {self._probe.damage}")
        if self._probe.unterminated and not self._limits.unterminated:
            return TruncatedError(
                f"{self._uri}: cut, or written without an end: the last Ogg page has no "
                "end-of-stream mark; audio.unterminated: accept takes such files"
            )
        return None

    def _promised_frames(self) -> int:
        """Frames of the span as far as the file says; 0 where it does not."""
        stop = self._declared if self._stop is None else self._stop
        return 0 if stop is None else stop - self._start

    def _check_length(self, frames: int) -> None:
        limit = self._limits.max_seconds
        if frames > limit * self.rate_hz:
            raise TooLongError(
                f"{self._uri}: expected at most {limit:g} s of audio (audio.max_seconds), got "
                f"{frames / self.rate_hz:.6g} s or more; raise it, or cut the file into spans with "
                "a manifest"
            )

    def _frame_span(self) -> tuple[int, int | None]:
        try:
            tolerance_s = self._limits.span_tolerance_s
            return frame_span(self._span, self.rate_hz, self._declared, tolerance_s)
        except SpanError as error:
            raise SpanError(f"{self._uri}: {error}") from error

    def _with_margins(self, before_s: int, after_s: int) -> tuple[int, int | None]:
        """First frame to read, and the frame behind the last."""
        first = max(0, self._start - before_s * self.rate_hz)
        if self._stop is None:
            return first, None
        last = self._stop + after_s * self.rate_hz
        return first, last if self._declared is None else min(last, self._declared)

    # Reading.

    def _skip_to_start(self) -> int:
        if self._from == 0:
            return 0
        if self._file.exact_seek and self._declared is not None:
            return self._sought(min(self._from, self._file.frames))
        while self._position < self._from:
            block = self._read(min(self._block_frames, self._from - self._position))
            if len(block) == 0:
                break
            self._position += len(block)
        return self._position

    def _sought(self, frame: int) -> int:
        try:
            return self._file.seek(frame)
        except DecoderError as error:
            raise self._broken(error, frame) from error

    def _read(self, frames: int) -> AudioBlock:
        try:
            block = self._file.read(frames)
        except DecoderError as error:
            self._check_input()
            raise self._broken(error, self._position) from error
        self._check_input()
        return block

    def _broken(self, error: DecoderError, frame: int) -> RowError:
        if error.unsupported:
            return self._unsupported(error)
        return TruncatedError(f"{self._uri}: decoding breaks after sample {frame}: {error}")

    def _check_finite(self, block: AudioBlock, position: int) -> None:
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
            decoder=self._file.name,
            decoder_version=self._file.version,
            header_size=self._probe.header_size,
            unterminated=self._probe.unterminated or None,
            span_short_s=self._span_short_s(),
        )

    def _span_short_s(self) -> float | None:
        if self._span[1] is None:
            return None
        missing = seconds_to_frames(self._span[1], self.rate_hz) - self._start - self._frames
        return missing / self.rate_hz if missing > 0 else None

    def _check_complete(self, position: int) -> None:
        """Compare what was delivered with what was promised, once reading has stopped."""
        if self._stop is None and position < self._file.least_frames:
            raise TruncatedError(
                f"{self._uri}: cut or damaged: expected about {self._file.least_frames} samples or "
                f"more, got {position}"
            )
        if self._declared is None:
            self._check_open_end(position)
            return
        expected = self._declared if self._to is None else self._to
        if position + self._probe.slack_frames < expected:
            raise TruncatedError(
                f"{self._uri}: cut or damaged: expected {expected} samples, got {position}"
            )
        if expected == self._declared:
            self._check_end()

    def _check_open_end(self, position: int) -> None:
        """The file did not say where it ends."""
        missing = 0 if self._stop is None else self._stop - position
        tolerance = seconds_to_frames(self._limits.span_tolerance_s, self.rate_hz)
        if self._frames and missing <= tolerance:
            return
        if (refused := self._refused()) is not None:
            raise refused
        if self._span != (None, None):
            short = ends_before(self._span, position, self.rate_hz, self._limits.span_tolerance_s)
            raise SpanError(f"{self._uri}: {short}")

    def _check_end(self) -> None:
        """Refuse a file that goes on behind the samples that it promises."""
        more = self._file.goes_on()
        self._check_input()
        if more is not None:
            raise TruncatedError(f"{self._uri}: goes on behind the end that it states: {more}")


@dataclass(frozen=True)
class Decoded:
    """A decoded clip.

    Shape:
        - waveform: (len(channel_ids), facts.frames) float32
    """

    waveform: AudioBlock
    channel_ids: tuple[int, ...]
    facts: AudioFacts


def decode(
    stream: BinaryIO,
    *,
    uri: str,
    start_s: float | None = None,
    end_s: float | None = None,
    channels: Channels = "mean",
    limits: Limits | None = None,
) -> Decoded:
    """Decode a span of a stream, or all of it; a RowError subclass says what is wrong with it.

    Args:
        stream: Seekable bytes; a `digest()` method on it replaces reading them for bytes_sha256.
        uri: What messages call it.
        start_s: Start in seconds; None is the beginning.
        end_s: End in seconds; None is the end.
        channels: mean, left, right, each, or an index.
        limits: What is taken of files.
    """
    with open_blocks(
        stream, uri=uri, start_s=start_s, end_s=end_s, channels=channels, limits=limits
    ) as reader:
        waveform = np.concatenate(list(reader), axis=1)
        return Decoded(waveform, reader.channel_ids, reader.facts)


def open_blocks(
    stream: BinaryIO,
    *,
    uri: str,
    start_s: float | None = None,
    end_s: float | None = None,
    channels: Channels = "mean",
    limits: Limits | None = None,
    block_frames: int = BLOCK_FRAMES,
    margins_s: tuple[int, int] = (0, 0),
) -> BlockReader:
    """The same samples as `decode`, block by block in constant memory; arguments as there and of
    `BlockReader`.

    Damage may show only after good blocks: what was made of them must then be thrown away.
    """
    return BlockReader(
        stream,
        uri=uri,
        span=(start_s, end_s),
        channels=channels,
        limits=limits or Limits(),
        block_frames=block_frames,
        margins_s=margins_s,
    )
