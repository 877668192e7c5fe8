"""A FLAC of a clip's length decoded in one go by dr_flac, which takes half of libFLAC's time.

dr_flac (of the library miniaudio) leaves out frames whose checksum is wrong, and goes on. So what
it gives counts only where it is as many samples as the header says, and no more follow; whatever
else it is (damaged, cut, of unknown length, longer) is left to libsndfile, whose word decides.
Samples are the same: both hand on the integers that were encoded.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from earmill.pipeline.audio.channels import AudioBlock
from earmill.pipeline.audio.containers.lossless import (
    FLAC_BEGINS,
    FLAC_HEAD_BYTES,
    FRAME_SYNC,
    StreamInfo,
)

if TYPE_CHECKING:
    from earmill.pipeline.audio.decoder_input import DecoderInput

# A quarter of an hour of speech; decoded, 16 MB of 16 bits.
MOST_BYTES = 1 << 24
MOST_SAMPLES = 1 << 23
# Bits of a sample, libsndfile's name for them. What has others is left to it.
SUBTYPES = {8: "PCM_S8", 16: "PCM_16", 24: "PCM_24"}


class WholeFlac:
    """A `Decoder` of samples that are all there.

    Args:
        info: Of the file.
        samples: (frames, channels), int16 or float32.
        version: Of miniaudio.
    """

    name = "dr_flac"
    format = "FLAC"
    exact_seek = True
    least_frames = 0

    def __init__(self, info: StreamInfo, samples: npt.NDArray[Any], version: str) -> None:
        self.version = version
        self.subtype = SUBTYPES[info.bits]
        self.samplerate, self.channels, self.frames = info.rate_hz, info.channels, info.frames
        self._samples, self._at = samples, 0

    def seek(self, frame: int) -> int:
        self._at = frame
        return frame

    def read(self, frames: int) -> AudioBlock:
        """The next frames; fewer at the end."""
        part = self._samples[self._at : self._at + frames]
        self._at += len(part)
        if part.dtype == np.float32:
            return part
        made: AudioBlock = part * np.float32(2.0**-15)
        return made

    def goes_on(self) -> str | None:
        """Nothing: `whole_flac` has looked."""
        return None

    def close(self) -> None:
        self._samples = self._samples[:0]


def whole_flac(source: DecoderInput) -> WholeFlac | None:
    """The file, decoded; None where libsndfile is to look at it, from wherever it stands."""
    try:
        import miniaudio
    except ImportError:  # there is no wheel for every machine
        return None
    nbytes = source.seek(0, io.SEEK_END)
    source.seek(0)
    info = StreamInfo.of(source.read(FLAC_HEAD_BYTES)) if nbytes <= MOST_BYTES else None
    if info is None or info.bits not in SUBTYPES:
        return None
    if not 0 < info.frames * info.channels <= MOST_SAMPLES:
        return None
    source.seek(0)
    data = source.read()
    begin = _first_frame(data)
    alone = begin is not None and not any(data.find(mark, begin) >= 0 for mark in FLAC_BEGINS)
    samples = _decoded(miniaudio, data, info) if alone else None
    return None if samples is None else WholeFlac(info, samples, miniaudio.__version__)


def _first_frame(data: bytes) -> int | None:
    """Where the blocks of the header end; None if no frame begins there, which dr_flac would look
    for."""
    at, last = 4, False
    while not last and at < len(data):
        last = bool(data[at] & 0x80)
        at += 4 + int.from_bytes(data[at + 1 : at + 4], "big")
    return at if FRAME_SYNC.match(data, at) else None


def _decoded(miniaudio: Any, data: bytes, info: StreamInfo) -> npt.NDArray[Any] | None:
    """The samples, if they are as the header says."""
    ffi, lib = miniaudio.ffi, miniaudio.lib
    flac = lib.ma_dr_flac_open_memory(data, len(data), ffi.NULL)
    if not flac:
        return None
    try:
        if (flac.channels, flac.sampleRate) != (info.channels, info.rate_hz):
            return None
        # Room for one more frame: what follows the last one shows.
        shape = (info.frames + 1, info.channels)
        if info.bits <= 16:
            samples: npt.NDArray[Any] = np.empty(shape, np.int16)
            into, read = (
                ffi.from_buffer("short[]", samples, True),
                lib.ma_dr_flac_read_pcm_frames_s16,
            )
        else:
            samples = np.empty(shape, np.float32)
            into, read = (
                ffi.from_buffer("float[]", samples, True),
                lib.ma_dr_flac_read_pcm_frames_f32,
            )
        return samples[:-1] if read(flac, len(samples), into) == info.frames else None
    finally:
        lib.ma_dr_flac_close(flac)
