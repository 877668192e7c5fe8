"""Mel spectra and cepstra of torchaudio's definition, a baseline for the auditory models.

    samples, padded by half a window at both ends -> blocks of frames on a fixed grid
        -> spectra -> mel bands of torchaudio -> logarithm [-> discrete cosine transform]

All blocks have one shape, so frames do not depend on the clip's length, on other clips or on
chunks, and one compilation serves all. Frame f is centred on sample f * hop. A signal of n samples
has floor(n / hop) frames, without the frame that torchaudio centres on the end of a signal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torchaudio
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.features import ExtractStream, FrameDesign, FrameGrid, FrameModel, StreamKind
from amtcore.features.feature_model import ClipFeatures
from amtcore.features.torch_compile import Compiled

#: Frames of a block.
BLOCK_FRAMES = 128
#: Parameters that have the name and meaning of torchaudio's.
_TORCHAUDIO = ("n_fft", "win_length", "hop_length", "f_min", "f_max", "n_mels", "power", "norm",
               "mel_scale")  # fmt: skip
#: Largest values: more bands or longer windows would not fit into memory.
_MOST = {
    "n_fft": 10**6,
    "hop_length": 10**7,
    "n_mels": 10**4,
    "power": 10,
    "ref": 1e30,
    "floor": 1e30,
}
#: Slaney's scale: Hz a mel up to 1 kHz, and the logarithm of the ratio of a mel above.
_SLANEY_HZ, _SLANEY_STEP = 200.0 / 3.0, np.log(6.4) / 27.0

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class MelParams:
    """Parameters of the mel spectrogram.

    Args:
        n_fft: Length of the spectrum in samples.
        win_length: Length of the window in samples; null takes n_fft.
        hop_length: Samples from one frame to the next; fs / hop_length frames a second.
        n_mels: Number of mel bands.
        f_min: Lower edge of the lowest band in Hz.
        f_max: Upper edge of the highest band in Hz; null takes half the sampling rate.
        power: Exponent of the magnitude: 2 for power, 1 for magnitude.
        norm: "slaney" divides each band by its width in Hz; null makes every peak 1.
        mel_scale: "htk" or "slaney".
        window: "hann", "hamming" or "blackman", periodic.
        center: Whether frame f is centred on sample f * hop_length, the signal padded by half a
            window at both ends; else it begins there.
        pad_mode: "reflect" or "constant" (zeros).
        log: "db" is 10 log10 of power over ref (20 log10 of magnitude), "ln" and "log10" are of the
            value over ref; null keeps the values.
        ref: Value at 0 dB, in the unit of the values.
        floor: Least value before the logarithm.
        top_db: With "db", raise values to this many dB below the clip's maximum; needs whole clips.
            Null does not.
        compile: Run under torch.compile, compiled once in every worker.
    """

    n_fft: int = 400
    win_length: int | None = None
    hop_length: int = 160
    n_mels: int = 80
    f_min: float = 0.0
    f_max: float | None = None
    power: float = 2.0
    norm: Literal["slaney"] | None = None
    mel_scale: Literal["htk", "slaney"] = "htk"
    window: Literal["hann", "hamming", "blackman"] = "hann"
    center: bool = True
    pad_mode: Literal["reflect", "constant"] = "reflect"
    log: Literal["db", "ln", "log10"] | None = "db"
    ref: float = 1.0
    floor: float = 1e-10
    top_db: float | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ParameterError(f"{name} must be above 0 and at most {most:g}, got {value!r}")
        if self.win_length is not None and not 0 < self.win_length <= self.n_fft:
            raise ParameterError(
                f"win_length must be 1 to n_fft ({self.n_fft}), got {self.win_length}"
            )
        if self.top_db is not None and (self.log != "db" or not self.top_db > 0):
            raise ParameterError(
                f"top_db must be above 0 and goes with log 'db', got {self.top_db} and {self.log!r}"
            )


@dataclass(frozen=True)
class MfccParams(MelParams):
    """Parameters of the mel-frequency cepstral coefficients.

    Args:
        n_mfcc: Number of coefficients, the first included.
        dct_norm: "ortho" makes the transform orthogonal; null leaves it as it is.
    """

    n_mels: int = 40
    n_mfcc: int = 13
    dct_norm: Literal["ortho"] | None = "ortho"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.n_mfcc <= self.n_mels:
            raise ParameterError(f"n_mfcc must be 1 to n_mels ({self.n_mels}), got {self.n_mfcc}")
        if self.log is None:
            raise ParameterError("log must be db, ln or log10 for cepstra, got None")


def mel_centres_hz(params: MelParams, fs_hz: float) -> tuple[float, ...]:
    """Centre frequencies of the bands: evenly spaced in mel between the edges.

    The scales are torchaudio's: HTK's 2595 log10(1 + f/700), and Slaney's, linear up to 1 kHz.

    >>> [round(f) for f in mel_centres_hz(MelParams(n_mels=3), 16000)]
    [614, 1768, 3934]
    """

    def to_mel(hz: float) -> Any:
        if params.mel_scale == "htk":
            return 2595.0 * np.log10(1.0 + hz / 700.0)
        return min(hz, 1000.0) / _SLANEY_HZ + np.log(max(hz, 1000.0) / 1000.0) / _SLANEY_STEP

    def to_hz(mel: float) -> Any:
        if params.mel_scale == "htk":
            return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
        knee = 1000.0 / _SLANEY_HZ
        return min(mel, knee) * _SLANEY_HZ * np.exp(_SLANEY_STEP * max(mel - knee, 0.0))

    f_max = fs_hz / 2 if params.f_max is None else params.f_max
    mels = np.linspace(to_mel(params.f_min), to_mel(f_max), params.n_mels + 2)[1:-1]
    return tuple(float(to_hz(mel)) for mel in mels)


class MelBlocks:
    """Blocks of log-mel frames, or of cepstra with the transform `dct` (n_mels, n_mfcc)."""

    def __init__(self, params: MelParams, fs_hz: float, dct: Tensor | None) -> None:
        f_max = fs_hz / 2 if params.f_max is None else params.f_max
        if not 0 <= params.f_min < f_max:
            raise ParameterError(
                f"expected 0 <= f_min < f_max, got {params.f_min:g} and {params.f_max}"
            )
        if f_max > fs_hz / 2:
            raise ParameterError(
                f"f_max must be at most half the sampling rate ({fs_hz / 2:g} Hz), got "
                f"{f_max:g}; raise fs_hz"
            )
        if fs_hz != round(fs_hz):
            raise ParameterError(f"expected a whole sampling rate in Hz, got {fs_hz:g}")
        self.params, self.fs_hz, self.dct = params, fs_hz, dct
        shared = {name: getattr(params, name) for name in _TORCHAUDIO}
        window = getattr(torch, f"{params.window}_window")
        self.mel = torchaudio.transforms.MelSpectrogram(
            round(fs_hz), window_fn=window, center=False, **shared
        )
        self.samples = (BLOCK_FRAMES - 1) * params.hop_length + params.n_fft
        made: Tensor = self.mel.spectrogram.window
        before = (params.n_fft - len(made)) // 2
        self._window = torch.nn.functional.pad(made, (before, params.n_fft - len(made) - before))
        self._spectra = Compiled("melspectrogram", self._log_mel, enabled=params.compile)

    def _log_mel(self, samples: Tensor) -> Tensor:
        """Return (frame, band) of (sample,)."""
        params = self.params
        # Torchaudio's numbers in half the time: frames are rows, and power needs no root.
        spectra = torch.fft.rfft(samples.unfold(0, params.n_fft, params.hop_length) * self._window)
        if params.power == 2.0:
            powers = spectra.real.square().addcmul_(spectra.imag, spectra.imag)
        else:
            powers = spectra.abs().pow(params.power)
        x: Tensor = powers @ self.mel.mel_scale.fb
        if params.log is None:
            return x
        x = x.clamp(min=params.floor) / params.ref
        if params.log == "ln":
            return torch.log(x)
        # 20 log10 of magnitudes, 10 log10 of powers.
        return torch.log10(x) * (20.0 / params.power if params.log == "db" else 1.0)

    def spectra(self, samples: Rows, frames: int) -> Rows:
        """Return the first frames, at most a block, of samples followed by zeros."""
        block = np.zeros(self.samples, np.float32)
        block[: len(samples)] = samples[: self.samples]
        rows: Rows = self._spectra(torch.from_numpy(block)).numpy()
        return rows[:frames]

    def finished(self, rows: Rows) -> Rows:
        """Return log-mel spectra (frame, band), or their cepstra."""
        if self.dct is None:
            return rows
        cepstra = np.empty((len(rows), self.dct.shape[1]), np.float32)
        for at in range(0, len(rows), BLOCK_FRAMES):
            part = rows[at : at + BLOCK_FRAMES]
            block = np.zeros((BLOCK_FRAMES, rows.shape[1]), np.float32)
            block[: len(part)] = part
            cepstra[at : at + len(part)] = (torch.from_numpy(block) @ self.dct)[: len(part)]
        return cepstra


class MelStream(ExtractStream):
    """Frames of one signal, chunk by chunk; `finished` converts log-mel spectra (frame, band)."""

    def __init__(self, stream: str, blocks: MelBlocks, finished: Callable[[Rows], Rows]) -> None:
        self._name, self._blocks, self._finished = stream, blocks, finished
        self._pad = blocks.params.n_fft // 2 if blocks.params.center else 0
        self._grid = grid_of(blocks.params)
        self._samples = self._frames = 0
        self._started = False  # True once there are samples enough to be reflected
        self._waiting = np.zeros(0, np.float32)  # samples from the next frame on, padded if started
        self._last = np.zeros(0, np.float32)  # last samples, reflected at the end

    def push(self, chunk: Rows) -> ClipFeatures:
        self._samples += len(chunk)
        kept = self._pad + 1
        self._last = np.concatenate([self._last, chunk[-kept:]])[-kept:]
        self._waiting = np.concatenate([self._waiting, chunk])
        if not self._started:
            if self._samples <= self._pad:
                return self._made([])
            self._waiting, self._started = self._padded(self._waiting, self._pad, 0), True
        rows = []
        # Only frames that the signal has if it ends here.
        while len(self._waiting) >= self._blocks.samples and self._left() >= BLOCK_FRAMES:
            rows.append(self._block(BLOCK_FRAMES))
        return self._made(rows)

    def finish(self) -> ClipFeatures:
        if self._started:
            end = self._padded(self._last, 0, self._pad)[len(self._last) :]
            self._waiting = np.concatenate([self._waiting, end])
        else:
            self._waiting = self._padded(self._waiting, self._pad, self._pad)
        rows = []
        while (left := self._left()) > 0:
            rows.append(self._block(min(left, BLOCK_FRAMES)))
        return self._made(rows)

    def _block(self, frames: int) -> Rows:
        rows = self._blocks.spectra(self._waiting, frames)
        self._waiting = self._waiting[BLOCK_FRAMES * self._blocks.params.hop_length :]
        self._frames += frames
        return rows

    def _left(self) -> int:
        """Return the number of frames of the signal so far that were not returned yet."""
        return self._grid.n_frames(self._samples) - self._frames

    def _padded(self, samples: Rows, before: int, after: int) -> Rows:
        if len(samples) == 0:
            return samples
        padded: Rows = np.pad(samples, (before, after), mode=self._blocks.params.pad_mode)
        return padded

    def _made(self, rows: list[Rows]) -> ClipFeatures:
        empty = np.empty((0, self._grid.width), np.float32)
        return {self._name: self._finished(np.concatenate([empty, *rows]))}


def grid_of(params: MelParams) -> FrameGrid:
    """Return the grid of the spectra's frames."""
    unit = "input unit" if params.power == 1 else f"input unit^{params.power:g}"
    if params.log is not None:
        unit = "dB" if params.log == "db" else f"{params.log} of {unit}"
    window = None if params.center else params.n_fft
    return FrameGrid(params.n_mels, params.hop_length, window, unit=unit)


def mel_design(stream: str, blocks: MelBlocks, grid: FrameGrid) -> FrameDesign:
    """Return the design of a model with one stream; with `top_db` it needs whole clips."""
    top_db = blocks.params.top_db

    def compute(signal: Rows) -> dict[str, Rows]:
        spectra = MelStream(stream, blocks, lambda rows: rows)
        rows = np.concatenate([spectra.push(signal)[stream], spectra.finish()[stream]])
        if top_db is not None:
            rows = np.maximum(rows, rows.max() - np.float32(top_db))
        return {stream: blocks.finished(rows)}

    constants = {"window": blocks.mel.spectrogram.window, "fb": blocks.mel.mel_scale.fb}
    if blocks.dct is not None:
        constants["dct"] = blocks.dct
    design = FrameDesign({stream: grid}, compute, constants, on_threads=True, reads_only=True)
    if top_db:
        return design
    # A frame depends on its window alone, which must be shorter than the margin of one second.
    memory_s = 0.0 if blocks.params.n_fft <= blocks.fs_hz else None
    open_stream = partial(MelStream, stream, blocks, blocks.finished)
    return replace(design, open_stream=open_stream, memory_s=memory_s)


class MelSpectrogram(FrameModel[MelParams]):
    """Log-mel spectra."""

    name, summary, default_fs_hz = "melspectrogram", "Mel spectrogram of torchaudio", 16000.0
    streams = {  # noqa: RUF012
        "mel": StreamKind("dB", ("time", "channel"), "mel bands, in dB unless log says otherwise")
    }
    params_class = MelParams

    def design(self, fs_hz: float, params: MelParams) -> FrameDesign:
        blocks = MelBlocks(params, fs_hz, None)
        grid = replace(grid_of(params), fc_hz=mel_centres_hz(params, fs_hz))
        return mel_design("mel", blocks, grid)


class Mfcc(FrameModel[MfccParams]):
    """Mel-frequency cepstral coefficients."""

    name, summary, default_fs_hz = "mfcc", "Mel-frequency cepstral coefficients", 16000.0
    streams = {  # noqa: RUF012
        "mfcc": StreamKind("dB", ("time", "coefficient"), "cepstral coefficients, the first is c0")
    }
    params_class = MfccParams

    def design(self, fs_hz: float, params: MfccParams) -> FrameDesign:
        dct = torchaudio.functional.create_dct(params.n_mfcc, params.n_mels, params.dct_norm)
        names = tuple(f"c{i}" for i in range(params.n_mfcc))
        grid = replace(grid_of(params), width=params.n_mfcc, columns=names)
        return mel_design("mfcc", MelBlocks(params, fs_hz, dct), grid)
