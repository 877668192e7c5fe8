"""The decoding libraries behind one interface: open, read forward, describe the file.

libsndfile reads what it can. FFmpeg, through PyAV, reads the rest. dr_flac, through miniaudio,
decodes short FLACs that are read whole. All deliver (frames, channels) float32 in pieces of any
size with equal samples. Encoder delay and padding are left out where the container marks them.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import soundfile

from earmill.pipeline.audio.channels import AudioBlock
from earmill.pipeline.audio.containers import Probe, lossless, mpeg, ogg
from earmill.pipeline.audio.containers.base import BareSamples, open_window
from earmill.pipeline.common.text import one_line

if TYPE_CHECKING:
    import av


class DecoderError(Exception):
    """A library does not know the bytes (`not_audio`) or the codec (`unsupported`), or fails."""

    def __init__(self, reason: str, *, not_audio: bool = False, unsupported: bool = False) -> None:
        super().__init__(reason)
        self.not_audio, self.unsupported = not_audio, unsupported


# Pictures and seek tables in a header take a few MB; a walk over chunks takes a few reads each.
HEADER_BYTES = 64 << 20
HEADER_READS = 200_000


class DecoderInput:
    """A stream as decoding libraries read it. The first exception, which their callbacks lose, is
    kept. Until `opened` is called, a header that makes a library read on meets the file's end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._failures: list[OSError] = []
        self._bytes_left, self._reads_left = HEADER_BYTES, HEADER_READS
        self._bounded = True

    @property
    def error(self) -> OSError | None:
        """Return the first failure of the stream, or of a window on it."""
        return self._failures[0] if self._failures else None

    def window(self, start: int, stop: int | None, prefix: bytes = b"") -> DecoderInput:
        """Return the input for a part of the stream, at its start; see `open_window`."""
        part = DecoderInput(open_window(self._stream, start, stop, prefix))
        part._failures = self._failures
        return part

    def opened(self) -> None:
        """End the bound: the header is read, and samples of any length follow."""
        self._bounded = False

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        chunk = self.read(len(view))
        view[: len(chunk)] = chunk
        return len(chunk)

    def read(self, size: int = -1) -> bytes:
        self._reads_left -= 1
        if self._bounded and (self._reads_left < 0 or self._bytes_left <= 0):
            return b""
        try:
            chunk = self._stream.read(size)
        except OSError as error:
            self._failures.append(error)
            return b""
        self._bytes_left -= len(chunk)
        return chunk

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Return the new position. An impossible offset, as of a damaged header, moves nothing."""
        try:
            return self._stream.seek(offset, whence)
        except (ValueError, OverflowError, OSError):
            return self._stream.tell()

    def tell(self) -> int:
        return self._stream.tell()


UNKNOWN_FRAMES = 1 << 62  # libsndfile answers SF_COUNT_MAX where the header holds no length.


class Decoder:
    """Base class of open files. `frames` are declared; a file that delivers fewer frames than
    `least_frames` is cut."""

    format: str  # Name of the container.
    subtype: str  # Name of the codec.
    samplerate: int
    channels: int
    frames = UNKNOWN_FRAMES
    least_frames = 0
    exact_seek = False  # `seek` lands on the exact sample
    name: str  # Name of the library.
    version: str

    def seek(self, frame: int) -> int:
        """Go to a frame, and return the frame that was reached."""
        raise NotImplementedError(f"{self.name} decodes this file from its start")

    def read(self, frames: int) -> AudioBlock:
        """Return the next frames; fewer at the end."""
        raise NotImplementedError

    def goes_on(self) -> str | None:
        """Return what follows the last declared frame once it was read; None for nothing."""
        return None

    def close(self) -> None:
        return


def open_decoder(source: DecoderInput, probe: Probe, *, whole: bool = False) -> Decoder:
    """Open a stream with the library for it; `whole`: the whole stream will be read."""
    if probe.parts:
        return JoinedFile([partial(open_decoder, source, part) for part in probe.parts])

    def part() -> DecoderInput:
        return source.window(probe.start, probe.stop, probe.prefix)

    if probe.samples is not None:
        return PlainSamples(source, probe, probe.samples)
    if whole and probe.kind == "flac" and (flac := whole_flac(part())) is not None:
        return flac
    if probe.kind in FFMPEG or probe.by_ffmpeg:
        return AvFile(part(), probe)
    try:
        file = SndFile(part(), probe)
        # libsndfile guesses where MPEG audio ends, and may stop too early.
        if probe.kind != "mpeg" or file.frames >= (probe.declared_frames or 0):
            return file
        file.close()
    except DecoderError:
        if not probe.codec or probe.kind not in BOTH:
            raise
    try:
        return AvFile(part(), probe)
    except DecoderError as error:
        if error.unsupported or error.not_audio or not probe.codec:
            raise
        why = f"{probe.codec}, which is not supported ({error})"
        raise DecoderError(why, unsupported=True) from error


MOST_BYTES = 1 << 24  # A quarter of an hour of speech.
MOST_SAMPLES = 1 << 23  # 16 MB of 16 bits.
# Name of a codec by the bits of a sample. libsndfile decodes FLACs of other widths.
SUBTYPES = {8: "PCM_S8", 16: "PCM_16", 24: "PCM_24"}


class WholeFlac(Decoder):
    """A FLAC that dr_flac has decoded to (frames, channels), int16 or float32."""

    name = "dr_flac"
    format = "FLAC"
    exact_seek = True

    def __init__(self, info: lossless.StreamInfo, samples: npt.NDArray[Any], version: str) -> None:
        self.version = version
        self.subtype = SUBTYPES[info.bits]
        self.samplerate, self.channels, self.frames = info.rate_hz, info.channels, info.frames
        self._samples, self._at = samples, 0

    def seek(self, frame: int) -> int:
        self._at = frame
        return frame

    def read(self, frames: int) -> AudioBlock:
        part = self._samples[self._at : self._at + frames]
        self._at += len(part)
        scaled: AudioBlock = part if part.dtype == np.float32 else part * np.float32(2.0**-15)
        return scaled


def whole_flac(source: DecoderInput) -> WholeFlac | None:
    """Decode a short FLAC with dr_flac, in two thirds of the time of libsndfile. dr_flac leaves out
    frames whose checksum is wrong. So other numbers of samples than declared give None, and
    libsndfile, which reports the faults, decodes the file."""
    try:
        import miniaudio
    except ImportError:  # there is no wheel for every machine
        return None
    is_short = source.seek(0, io.SEEK_END) <= MOST_BYTES
    source.seek(0)
    info = lossless.StreamInfo.of(source.read(lossless.FLAC_HEAD_BYTES)) if is_short else None
    if info is None or info.bits not in SUBTYPES:
        return None
    if not 0 < info.frames * info.channels <= MOST_SAMPLES:
        return None
    source.seek(0)
    data = source.read()
    # dr_flac would search for the next frame, and so skip a damaged first one.
    at, is_last = 4, False
    while not is_last and at < len(data):
        is_last = bool(data[at] & 0x80)
        at += 4 + int.from_bytes(data[at + 1 : at + 4], "big")
    is_joined = any(data.find(mark, at) >= 0 for mark in lossless.FLAC_BEGINS)
    if is_joined or not lossless.FRAME_SYNC.match(data, at):
        return None
    # The header declares one frame more to dr_flac, which then also reads frames that follow.
    place = lossless.FLAC_COUNT
    count = int.from_bytes(data[place], "big") + 1
    data = data[: place.start] + count.to_bytes(8, "big") + data[place.stop :]
    fits_16 = info.bits <= 16
    try:
        decoded = (miniaudio.flac_read_s16 if fits_16 else miniaudio.flac_read_f32)(data)
    except miniaudio.DecodeError:
        return None
    facts = decoded.nchannels, decoded.sample_rate, decoded.num_frames
    if facts != (info.channels, info.rate_hz, info.frames):
        return None
    samples = np.frombuffer(decoded.samples, np.int16 if fits_16 else np.float32)
    return WholeFlac(info, samples.reshape(-1, info.channels), miniaudio.__version__)


# Containers that hold audio in practice. libsndfile also opens MATLAB files and sampler patches,
# which random data can resemble.
CONTAINERS = frozenset(
    {"WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "NIST"}
)
# Seeking lands on the exact sample in these codecs; all others are read from their start.
SEEKABLE_CODECS = frozenset(
    {"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}
)
# libsndfile: "Format not recognised", "unsupported encoding", "unimplemented format".
NOT_AUDIO_CODES = frozenset({1, 4, 18})


class _ForwardFile(soundfile.SoundFile):
    """A SoundFile that does not seek after each read, which costs time and moves MP3 samples."""

    def seekable(self) -> bool:
        return False


class SndFile(Decoder):
    """A file that libsndfile reads."""

    name = "libsndfile"
    version: str = soundfile.__libsndfile_version__.removeprefix("libsndfile-")

    def __init__(self, source: DecoderInput, probe: Probe) -> None:
        self._source = source
        with _sndfile_errors():
            self._file = _ForwardFile(source)
        if self._file.format not in CONTAINERS:
            self._file.close()
            raise DecoderError(f"a {self._file.format} container", not_audio=True)
        self.format = probe.container or str(self._file.format)
        self.subtype = str(self._file.subtype)
        self.samplerate, self.channels = int(self._file.samplerate), int(self._file.channels)
        self.frames = int(self._file.frames)
        self.exact_seek = self.subtype in SEEKABLE_CODECS and self.format != "OGG"
        source.opened()

    def seek(self, frame: int) -> int:
        with _sndfile_errors():
            return int(self._file.seek(frame))

    def read(self, frames: int) -> AudioBlock:
        with _sndfile_errors():
            block: AudioBlock = self._file.read(frames, dtype="float32", always_2d=True)
        return block

    def goes_on(self) -> str | None:
        # libsndfile stops behind the samples that a FLAC or MP3 counts.
        stream, position = cast(BinaryIO, self._source), self._source.tell()
        nbytes = self._source.seek(0, io.SEEK_END)
        if self._file.format == "FLAC":
            return lossless.flac_goes_on(stream, position - lossless.BEFORE_END, nbytes)
        return mpeg.mpeg_goes_on(stream, position, nbytes) if self._file.format == "MP3" else None

    def close(self) -> None:
        self._file.close()


class PlainSamples(Decoder):
    """Samples whose form is known; libsndfile converts them, and does not read their header."""

    name, version = SndFile.name, SndFile.version
    exact_seek = True

    def __init__(self, source: DecoderInput, probe: Probe, samples: BareSamples) -> None:
        self._source, self._start, self._samples = source, probe.start, samples
        self.format, self.subtype = str(probe.container), samples.subtype
        self.samplerate, self.channels = samples.rate_hz, samples.channels
        stop = source.seek(0, io.SEEK_END) if probe.stop is None else probe.stop
        self.frames = (stop - probe.start) // samples.frame_bytes
        source.opened()
        self.seek(0)

    def seek(self, frame: int) -> int:
        self._left, at = self.frames - frame, self._start + frame * self._samples.frame_bytes
        if self._source.seek(at) != at:
            raise DecoderError(f"expected samples at byte {at:,}, got a failure to go there")
        return frame

    def read(self, frames: int) -> AudioBlock:
        nbytes = min(frames, self._left) * self._samples.frame_bytes
        encoded = self._source.read(nbytes)
        while len(encoded) < nbytes and (more := self._source.read(nbytes - len(encoded))):
            encoded += more  # some streams give less than they have
        with _sndfile_errors():
            block = _converter(self._samples, threading.get_ident()).converted(encoded)
        self._left -= len(block)
        return block


class _Converter:
    """An endless file of samples without a header, which libsndfile reads as they are set."""

    def __init__(self, samples: BareSamples) -> None:
        self._encoded, self._frame_bytes = memoryview(b""), samples.frame_bytes
        form = (samples.rate_hz, samples.channels, samples.subtype, samples.order.upper())
        self._file = _ForwardFile(self, "r", *form, format="RAW")

    def converted(self, encoded: bytes) -> AudioBlock:
        self._encoded = memoryview(encoded)
        frames = len(encoded) // self._frame_bytes
        block = np.empty((frames, self._file.channels), np.float32)
        return block[: self._file.buffer_read_into(block, "float32")]

    def readinto(self, buffer: Any) -> int:
        part, self._encoded = self._encoded[: len(buffer)], self._encoded[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.tell()

    def tell(self) -> int:
        return UNKNOWN_FRAMES


@lru_cache(maxsize=256)
def _converter(samples: BareSamples, thread: int) -> _Converter:
    """Return a thread's converter; opening one costs as much as converting 10 000 samples."""
    return _Converter(samples)


@contextmanager
def _sndfile_errors() -> Iterator[None]:
    try:
        yield
    except (soundfile.LibsndfileError, ValueError) as error:
        code = getattr(error, "code", 0)
        text = getattr(error, "error_string", str(error)).rstrip(".")
        reason = text or f"libsndfile error {code or ''}"
        raise DecoderError(reason, not_audio=code in NOT_AUDIO_CODES) from error


# Kinds of container that FFmpeg alone reads.
FFMPEG = frozenset("mp4 matroska asf adts ac3 eac3 amr wavpack tta".split())
# Containers that libsndfile reads; FFmpeg decodes codecs in them that libsndfile does not know.
BOTH = frozenset("riff w64 aiff caf au ogg mpeg".split())
# FFmpeg's demuxer of a kind, and our name, if they are not the kind. The demuxer is forced, so that
# no file can ask for one that opens further files.
DEMUXERS = {"mp4": "mov", "adts": "aac", "wavpack": "wv", "riff": "wav", "mpeg": "mp3"}
NAMES = {"riff": "WAV", "mpeg": "MP3"}
# Containers whose length FFmpeg guesses by bit rates.
GUESSED = frozenset({"adts", "ac3", "eac3", "amr", "ogg", "mpeg"})
# Containers where only the length of the track tells that the file is cut.
TIMED = frozenset({"mp4", "matroska", "asf"})
# A container's duration is rounded, and counts delay and padding of the encoder.
DURATION_SLACK_S = 0.25
# Codecs whose packets have checksums, which FFmpeg compares only if asked.
CHECKED_CODECS = frozenset({"flac", "wavpack", "tta"})
# FFmpeg's own decoders of AMR do not know frames of silence; the reference decoder does.
AMR_DECODERS = {"amrnb": "libopencore_amrnb", "amrwb": "libopencore_amrwb"}
# Channels of Vorbis and Opus in Ogg: libsndfile keeps the file's order, FFmpeg has another.
OGG_ORDER = {
    3: (0, 2, 1),
    5: (0, 2, 1, 3, 4),
    6: (0, 2, 1, 4, 5, 3),
    7: (0, 2, 1, 5, 6, 4, 3),
    8: (0, 2, 1, 6, 7, 4, 5, 3),
}


class AvFile(Decoder):
    """A file that FFmpeg reads: its first audio track."""

    name = "ffmpeg"

    def __init__(self, source: DecoderInput, probe: Probe) -> None:
        import av  # takes 0.2 s, for the few files that need it

        self.version = str(av.ffmpeg_version_info)
        self._av = av
        demuxer = DEMUXERS.get(probe.kind, probe.kind)
        self.format = probe.container or NAMES.get(probe.kind, probe.kind.upper())
        try:
            self._container = av.open(source, format=demuxer, metadata_errors="ignore")
        except (av.FFmpegError, ValueError) as error:
            raise DecoderError(_words(error)) from error
        with ExitStack() as undo:
            undo.callback(self._container.close)
            self._open_track(probe)
            undo.pop_all()
        source.opened()

    def _open_track(self, probe: Probe) -> None:
        track = next(iter(self._container.streams.audio), None)
        if track is None:
            raise DecoderError("a file without sound", not_audio=True)
        codec = track.codec_context
        if codec is None:
            what = probe.codec or "its codec"
            raise DecoderError(f"{what}, which is not supported, or protected", unsupported=True)
        codec.thread_count = 1  # samples must not depend on timing
        self.subtype = codec.name.upper()
        self.samplerate, self.channels = int(codec.sample_rate or 0), int(codec.channels or 0)
        self.samplerate = ogg.OPUS_HZ if codec.name == "opus" else self.samplerate
        if self.samplerate <= 0 or self.channels <= 0:
            raise DecoderError("a sound track without rate or channels")
        options = {"err_detect": "crccheck+explode"} if codec.name in CHECKED_CODECS else {}
        self._to_skip, self._left = 0, UNKNOWN_FRAMES
        if (trim := probe.trim) is not None:
            # FFmpeg cuts the padding off a last packet that has none.
            options["flags2"] = "+skip_manual"
            scale = self.samplerate / trim.rate_hz
            self._to_skip = math.floor(trim.skip * scale + 0.5)
            self.frames = self._left = math.floor(trim.frames * scale + 0.5)
        codec.options = options
        is_ogg = probe.kind == "ogg" and codec.name in ("opus", "vorbis")
        self._order = OGG_ORDER.get(self.channels) if is_ogg else None
        self._codec = codec
        if probe.kind == "amr":
            self._codec = self._av.CodecContext.create(AMR_DECODERS[codec.name], "r")
            self._codec.sample_rate, self._codec.layout = codec.sample_rate, codec.layout
        # Seconds of the track by the container; 0 where it guesses or does not say.
        self.seconds = 0.0
        if probe.kind not in GUESSED and track.duration:
            self.seconds = float(track.duration * track.time_base)
        elif probe.kind not in GUESSED and len(self._container.streams) == 1:
            self.seconds = (self._container.duration or 0) / 1e6
        least_s = self.seconds - DURATION_SLACK_S if probe.kind in TIMED else 0.0
        self.least_frames = math.floor(least_s * self.samplerate)
        self._packets = self._container.demux(track)
        # Makes interleaved floats of every sample format: PyAV crashes at an eighth plane.
        self._as_float = self._av.AudioResampler("flt")
        self._rare_codec, self._has_begun = probe.codec, False
        self._ready = self._av.AudioFifo()  # Frames that were decoded and not read.

    def read(self, frames: int) -> AudioBlock:
        frames = min(frames, self._left)
        try:
            while self._ready.samples < frames:
                packet = next(self._packets, None)
                if packet is None:
                    break
                self._decode(packet)
        except (self._av.FFmpegError, ValueError) as error:
            if self._rare_codec and not self._has_begun:
                why = f"{self._rare_codec}, which cannot be decoded ({_words(error)})"
                raise DecoderError(why, unsupported=True) from error
            raise DecoderError(_words(error)) from error
        part = self._ready.read(frames, partial=True) if frames else None
        if part is None:
            return np.zeros((0, self.channels), dtype=np.float32)
        block: AudioBlock = part.to_ndarray().reshape(part.samples, self.channels)
        self._left -= len(block)
        return block if self._order is None else block[:, self._order]

    def _decode(self, packet: av.Packet[Any]) -> None:
        if packet.is_corrupt:
            raise DecoderError("a damaged packet")
        for frame in self._codec.decode(packet):
            if frame.is_corrupt:
                raise DecoderError("a damaged frame")
            if (frame.sample_rate, len(frame.layout.channels)) != (self.samplerate, self.channels):
                raise DecoderError("rate or channels change within the file")
            for part in self._as_float.resample(frame):
                part.pts, self._has_begun = None, True
                self._ready.write(part)
        # Leave out the container's delay.
        skipped = min(self._to_skip, self._ready.samples)
        if skipped:
            self._ready.read(skipped)
            self._to_skip -= skipped

    def close(self) -> None:
        self._container.close()


class JoinedFile(Decoder):
    """Complete streams in a row: the links of a chained Ogg, or files that were joined."""

    def __init__(self, openers: list[Callable[[], Decoder]]) -> None:
        self._openers = openers
        # Frames of the open stream that were read, and frames of the streams before it.
        self._count = self._before = 0
        self._open_next()
        self.format, self.subtype = self._file.format, self._file.subtype
        self.name, self.version = self._file.name, self._file.version
        self.samplerate, self.channels = self._file.samplerate, self._file.channels

    def read(self, frames: int) -> AudioBlock:
        block = self._file.read(frames)
        while not len(block) and self._openers:
            if self._count < self._least:
                raise DecoderError(f"expected {self._least} samples of a part, got {self._count}")
            self._file.close()
            self._before += self._count
            self._open_next()
            now, first = ((file.samplerate, file.channels) for file in (self._file, self))
            if now != first:
                raise DecoderError(
                    f"{now[0]} Hz and {now[1]} channel(s) behind {first[0]} Hz and {first[1]}, as "
                    "in joined files",
                    unsupported=True,
                )
            block = self._file.read(frames)
        self._count += len(block)
        return block

    def _open_next(self) -> None:
        self._file, self._count = self._openers.pop(0)(), 0
        declared = self._file.frames if self._file.frames < UNKNOWN_FRAMES else 0
        self._least = max(declared, self._file.least_frames)
        self.least_frames = self._before + self._least

    def close(self) -> None:
        self._file.close()


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(text)
