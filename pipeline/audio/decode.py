"""Decode encoded bytes to float32 samples, block by block, and to facts about them.

libsndfile decodes from a seekable stream, and FFmpeg decodes what libsndfile cannot read. Tags in
front of the audio are skipped. Spans are cut from the samples of the whole file: lossy streams are
decoded from their start.

`BlockReader` decodes one span of one stream block by block in constant memory, in one pass. It
checks the container's bookkeeping before decoding, that samples are finite during decoding, and the
delivered length against the declared length afterwards. Bad input becomes a RowError.
docs/howto/audio-files.md lists the damage that cannot be found.
"""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
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
    EmptyFileError,
    NonFiniteError,
    NotAudioError,
    RowError,
    SampleRateError,
    TooLongError,
    TruncatedError,
    UnreadableError,
    UnsupportedError,
    ZeroLengthError,
)
from earmill.pipeline.common.monitoring import HASH, doing

# 1.5 s at 44.1 kHz: long enough that the cost of Python is small, short enough to stream.
BLOCK_FRAMES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Limits of the files that a job accepts.

    Args:
        min_rate_hz: Lowest sample rate.
        max_rate_hz: Highest sample rate.
        max_seconds: Longest clip.
        span_tolerance_s: Seconds by which a span may end behind its file.
        unterminated: Accept Ogg files without an end mark.
    """

    min_rate_hz: float = 1000.0
    max_rate_hz: float = 768000.0
    max_seconds: float = 86400.0
    span_tolerance_s: float = END_SLACK_S
    unterminated: bool = False


@dataclass(frozen=True)
class AudioFacts:
    """Facts about a file and the span that was read from it.

    Args:
        container: WAV, FLAC, OGG, MP3, MP4, ...
        codec: The library's name of the codec: PCM_16, VORBIS, MPEG_LAYER_III, AAC, WMAV2, ...
        rate_hz: Sample rate of the file.
        channels: Channels of the file.
        frames: Samples per channel of the selected span.
        seconds: Duration of the span.
        nbytes: Bytes of the whole file.
        bytes_sha256: Checksum of the whole file; empty if only a part of the file is read.
        pcm_sha256: Checksum of the span before mixing: float32 little-endian, interleaved channels.
        decoder: Library that decoded.
        decoder_version: Version of that library.
        header_size: `ignored` if the header's size of the samples cannot be right and all samples
            were read, `unknown` if the header states that it does not know the size, else None.
        unterminated: The stream has no end mark; None if it has one or needs none.
        span_short_s: Seconds by which the file ended before the span; None if it did not.
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
    """Blocks of one span, read once, decoded in this process or in another.

    Attributes:
        rate_hz: Sample rate of the file.
        channel_ids: Channels of a block, see `channels.channel_ids`.
    """

    rate_hz: int
    channel_ids: tuple[int, ...]
    _facts: AudioFacts | None = None

    @property
    def facts(self) -> AudioFacts:
        """Facts about the span; ValueError before the last block was read."""
        if self._facts is None:
            raise ValueError("facts are complete only after the last block was read")
        return self._facts

    @abstractmethod
    def __iter__(self) -> Iterator[AudioBlock]:
        """Yield the blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release the file."""

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
    """Mixed blocks of one span; `facts` are complete after the last block.

    Args:
        stream: Seekable bytes; the caller closes them.
        uri: Name of the stream in messages.
        span: Start and end in seconds, None for the ends of the file.
        channels: Channel policy.
        limits: Limits of the file.
        block_frames: Frames in a block.
        margins_s: Whole seconds before and after the span that blocks contain as well, within the
            file; `facts` are about the span alone.

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
        with self._named_errors():
            if self._nbytes == 0:
                raise EmptyFileError("expected audio, got an empty file")
            self._probe = self._probed(stream)
            # A failure here is the disk's, not the file's: it stays an OSError.
            with doing(HASH):
                self._bytes_sha256 = digest_of(stream)
            self._input = DecoderInput(stream)
            self._file = self._opened()
            self.rate_hz = int(self._file.samplerate)
            try:
                self._check_rate()
                self.channel_ids = channel_ids(channels, self._file.channels)
                self._declared = self._declared_frames()
                self._check_damage()
                tolerance_s = limits.span_tolerance_s
                self._start, self._stop = frame_span(
                    span, self.rate_hz, self._declared, tolerance_s
                )
                self._from, self._to = self._with_margins(*margins_s)
                self._check_length(self._frames_of_span())
            except RowError:
                self.close()
                raise
        self._pcm_sha256 = hashlib.sha256()
        self._frames = 0

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[AudioBlock]:
        with self._named_errors():
            self._position = 0
            self._position = self._skip_to_start()
            while self._to is None or self._position < self._to:
                wanted = self._block_frames if self._to is None else self._to - self._position
                block = self._read(min(wanted, self._block_frames))
                if len(block) == 0:
                    break
                self._check_finite(block, self._position)
                inside = self._without_margins(block)
                with doing(HASH):
                    self._pcm_sha256.update(np.ascontiguousarray(inside, dtype="<f4").data)
                self._position += len(block)
                self._frames += len(inside)
                self._check_length(self._frames)
                yield mix(block, self.channel_ids)
            self._finish(self._position)

    def _without_margins(self, block: AudioBlock) -> AudioBlock:
        """Return the part of a block at the current position that lies in the span."""
        stop = None if self._stop is None else max(0, self._stop - self._position)
        return block[max(0, self._start - self._position) : stop]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Put the stream's name in front of the message of a RowError."""
        try:
            yield
        except RowError as error:
            raise type(error)(f"{self._uri}: {error}") from error.__cause__

    # Opening.

    def _probed(self, stream: BinaryIO) -> Probe:
        try:
            return probe(stream, self._nbytes)
        except OSError as error:
            raise UnreadableError(f"read failed: {error}") from error

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
            return SampleRateError("expected a sample rate above 0 Hz, got 0")
        if (refused := self._refused()) is not None:
            return refused
        if error.unsupported:
            return self._unsupported(error)
        if error.not_audio or not known:
            return NotAudioError(
                "expected audio (wav, flac, ogg, mp3, opus, m4a, ...), got bytes of no supported "
                f"format ({error})"
            )
        return TruncatedError(f"the {self._probe.kind} header is broken: {error}")

    def _unsupported(self, error: DecoderError) -> UnsupportedError:
        return UnsupportedError(
            f"expected one stream in a supported codec, got {error}; convert it"
        )

    def _check_input(self) -> None:
        if self._input.error is not None:
            error = self._input.error
            raise UnreadableError(f"read failed: {error}") from error

    def _check_rate(self) -> None:
        low, high = self._limits.min_rate_hz, self._limits.max_rate_hz
        if not low <= self.rate_hz <= high:
            raise SampleRateError(
                f"expected a sample rate of {low:g} to {high:g} Hz, got {self.rate_hz}"
            )

    def _declared_frames(self) -> int | None:
        """Return the frames that the file declares; None if it does not declare them."""
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
        """Return the error for damage that the probe found and the job does not accept."""
        if self._probe.damage is not None:
            return TruncatedError(f"cut or damaged: {self._probe.damage}")
        if self._probe.unterminated and not self._limits.unterminated:
            return TruncatedError(
                "cut, or written without an end: the last Ogg page has no end-of-stream mark; "
                "audio.unterminated: accept takes such files"
            )
        return None

    def _frames_of_span(self) -> int:
        """Return the declared frames of the span; 0 if the file does not declare them."""
        stop = self._declared if self._stop is None else self._stop
        return 0 if stop is None else stop - self._start

    def _check_length(self, frames: int) -> None:
        limit = self._limits.max_seconds
        if frames > limit * self.rate_hz:
            raise TooLongError(
                f"expected at most {limit:g} s of audio (audio.max_seconds), got "
                f"{frames / self.rate_hz:.6g} s or more; raise it, or cut the file into spans with "
                "a manifest"
            )

    def _with_margins(self, before_s: int, after_s: int) -> tuple[int, int | None]:
        """Return the first frame to read, and the frame behind the last."""
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
            frame = min(self._from, self._file.frames)
            try:
                return self._file.seek(frame)
            except DecoderError as error:
                raise self._broken(error, frame) from error
        while self._position < self._from:
            block = self._read(min(self._block_frames, self._from - self._position))
            if len(block) == 0:
                break
            self._position += len(block)
        return self._position

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
        return TruncatedError(f"decoding breaks after sample {frame}: {error}")

    def _check_finite(self, block: AudioBlock, position: int) -> None:
        if np.isfinite(block).all():
            return
        frame, channel = np.argwhere(~np.isfinite(block))[0]
        raise NonFiniteError(
            f"expected finite samples, got {block[frame, channel]} at sample {position + frame} "
            f"of channel {channel}"
        )

    def _finish(self, position: int) -> None:
        self._check_complete(position)
        if self._frames == 0:
            raise ZeroLengthError("expected samples, got a header without any")
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
        """Compare the delivered frames with the declared frames, once reading has stopped."""
        if self._stop is None and position < self._file.least_frames:
            raise TruncatedError(
                f"cut or damaged: expected about {self._file.least_frames} samples or more, got "
                f"{position}"
            )
        if self._declared is None:
            self._check_open_end(position)
            return
        expected = self._declared if self._to is None else self._to
        if position + self._probe.slack_frames < expected:
            raise TruncatedError(f"cut or damaged: expected {expected} samples, got {position}")
        if expected == self._declared:
            self._check_end()

    def _check_open_end(self, position: int) -> None:
        """Check the end of a file that did not declare its length."""
        missing = 0 if self._stop is None else self._stop - position
        tolerance = seconds_to_frames(self._limits.span_tolerance_s, self.rate_hz)
        if self._frames and missing <= tolerance:
            return
        if (refused := self._refused()) is not None:
            raise refused
        if self._span != (None, None):
            raise ends_before(self._span, position, self.rate_hz, self._limits.span_tolerance_s)

    def _check_end(self) -> None:
        """Refuse a file that goes on behind the samples that it declares."""
        more = self._file.goes_on()
        self._check_input()
        if more is not None:
            raise TruncatedError(f"goes on behind the end that it states: {more}")


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
    """Open a span of a stream, or the whole stream, as blocks in constant memory.

    Damage may show only after good blocks. The results of these blocks are then invalid. For the
    other arguments see `BlockReader`.

    Args:
        stream: Seekable bytes. If it has a method `digest()`, bytes_sha256 is its result.
        start_s: Start in seconds; None is the beginning.
        end_s: End in seconds; None is the end.
        channels: mean, left, right, each, binaural, or an index.
        limits: Limits of the file; None for the defaults.
    Raises:
        RowError: The stream cannot be decoded; the subclass names the reason.
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
