"""STOI and ESTOI: how intelligible a processed clip of speech is, given the clean clip.

STOI of Taal, Hendriks, Heusdens and Jensen (2011), IEEE TASLP 19(7), 2125-2136; ESTOI of Jensen and
Taal (2016), IEEE/ACM TASLP 24(11), 2009-2022. Both remove the frames in which the clean clip is
silent. Then they compare band envelopes of both clips in segments of 30 frames (384 ms).

    Pair -> 10 kHz -> frames without silence -> 15 one-third-octave bands -> segments.

A pair that has no segment scores NaN, where other programs report 1e-5 with a warning. ESTOI adds
no noise to its envelopes, so a constant band counts 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from amtcore.arguments import SAMPLING_RATE, checked_arguments
from amtcore.errors import ParameterError, ShapeError
from amtcore.filter_design import resample_taps
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs
from amtcore.stages.stage import check_floating, product
from amtcore.units import DIGITAL

# Constants of Taal et al. (2011), section II.
RATE_HZ = 10_000
FRAME, HOP, N_FFT = 256, 128, 512
SILENCE_DB = 40.0  # frames this far below the loudest clean frame are silent
LOWEST_HZ, BANDS = 150.0, 15
SEGMENT = 30  # frames
CLIP_DB = 15.0  # lower bound of the signal-to-distortion ratio
EPSILON = 2.0**-52  # keeps norms of silence above 0

_LARGEST_RATIO = 4096
_STOP_DB, _BLOCK = 60.0, 64  # of the resampler: stop band, outputs of a product


class STOI(FrameModule):
    """Short-time objective intelligibility of pairs of clips, and its extended form.

    Scores lie between -1 and 1, speech mostly between 0 and 1, and identical clips score 1. Gains
    of the clips do not matter. The clips must be aligned in time. Levels and silent frames are
    computed in float64 for any `dtype`, because one frame more or less moves all later frames.

    Args:
        fs: Sampling rate in Hz, a whole number; rates other than 10 kHz are resampled.
        dtype: torch.float32 or torch.float64.

    Shape:
        `forward`: two of (batch, time), or of (time,), to a dict, see there.
        `outputs`: (.., 2, time), clean before processed, to the grids of one row a clip.

    Invariants:
        `model(x, x)["stoi"]` is 1. `model(a * x, b * y)` equals `model(x, y)` for a, b above 0.
        Gradients flow to both clips; the choice of silent frames is constant for them.

    >>> model, speech = STOI(fs=10000), torch.sin(torch.arange(8000.0) ** 1.5)
    >>> found = model(speech, speech)
    >>> round(float(found["stoi"]), 6), tuple(found["stoi_segments"].shape)
    (1.0, (31, 15))
    """

    input_unit = DIGITAL
    input_channels = (2,)
    can_stream = False
    whole_clips_reason = "the loudest frame of the clean clip decides which frames are silent"
    taps: Tensor
    window: Tensor
    bands: Tensor

    @checked_arguments(
        fs=replace(SAMPLING_RATE, whole=True, phrase="a whole number as sampling rate in Hz")
    )
    def __init__(self, fs: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        ratio = Fraction(RATE_HZ, int(fs))
        self.fs, self.dtype = float(fs), dtype
        self.up, self.down = ratio.numerator, ratio.denominator
        if max(self.up, self.down) > _LARGEST_RATIO:
            raise ParameterError(
                f"fs: expected a rate with a ratio of small whole numbers to {RATE_HZ} Hz, got "
                f"{fs:g} Hz ({self.up}/{self.down}); resample the clips to a rounder rate"
            )
        taps, self.reach = _taps(self.up, self.down)
        self.register_buffer("taps", taps)
        n = torch.arange(1, FRAME + 1, dtype=torch.float64)
        self.register_buffer("window", 0.5 - 0.5 * torch.cos(2 * math.pi * n / (FRAME + 1)))
        self.register_buffer("bands", _band_matrix().to(dtype))
        # Frames other than the last begin before the end of the clip at 10 kHz.
        first = Fraction(FRAME * self.down + 1, self.up)
        hop = Fraction(HOP * self.down, self.up)
        score = FrameGrid(1, None, min_samples=math.ceil(first + SEGMENT * hop))
        kept = FrameGrid(1, hop, window_length=first)
        self.grids = {"stoi": score, "estoi": score, "kept": kept}

    def extra_repr(self) -> str:
        return f"fs={self.fs:g}, dtype={self.dtype}"

    def forward(self, clean: Tensor, processed: Tensor) -> Outputs:  # type: ignore[override]
        """Compare pairs of clips.

        Args:
            clean: Reference speech (batch, time) or (time,), in any unit.
            processed: Speech to judge, of the same shape, and aligned in time.
        Returns:
            `stoi` and `estoi` (batch,), NaN without segments: fewer than 30 frames that are not
            silent, or a silent clean clip. `stoi_segments` (batch, segment, 15) and
            `estoi_segments` (batch, segment), with NaN behind the last segment of shorter pairs.
            `kept` (batch, frame): frames of 25.6 ms every 12.8 ms that are not silent; segment i
            is made of the kept frames i to i + 30. Without a batch, no first axis.
        Raises:
            ShapeError: The shapes differ, or the tensors are not floating-point.
        """
        for clip in (clean, processed):
            check_floating(clip, "(batch, time) or (time,)")
        if clean.shape != processed.shape or clean.ndim not in (1, 2):
            raise ShapeError(
                "expected clean and processed clips of one shape, (batch, time) or (time,), got "
                f"{tuple(clean.shape)} and {tuple(processed.shape)}; cut them to equal lengths"
            )
        made = self._compare(torch.stack((clean, processed), -2), ("stoi", "estoi"))
        return made if clean.ndim == 2 else {name: each[0] for name, each in made.items()}

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        names = self.wanted(names)
        made, frames_by_name = self._compare(signal, names), {}
        for name in names:
            each, frames = made[name], self.grids[name].n_frames(signal.shape[-1])
            axes = (*signal.shape[:-2], each.shape[1] if each.ndim > 1 else 1, 1)
            frames_by_name[name] = each.to(self.dtype).reshape(axes)[..., :frames, :]
        return frames_by_name

    def _compare(self, pairs: Tensor, names: tuple[str, ...]) -> Outputs:
        """Return scores, segments and kept frames of (.., 2, time), with one batch axis."""
        check_floating(pairs, "(.., 2, time)")
        if pairs.ndim < 2 or pairs.shape[-2] != 2:
            raise ShapeError(
                "expected pairs (.., 2, time), clean before processed, got a tensor of shape "
                f"{tuple(pairs.shape)}"
            )
        pairs = pairs.reshape(pairs.shape[:-2].numel(), *pairs.shape[-2:]).double()
        frames = self.frames(self.resampled(pairs))
        made: Outputs = {"kept": self.kept(self.levels_db(frames[:, 0]))}
        if names == ("kept",):
            return made
        envelopes = [
            self.envelopes(self.joined(each[:, keep]))
            for each, keep in zip(frames, made["kept"], strict=True)
        ] or [frames.new_empty(2, 0, BANDS, dtype=self.dtype)]
        for name, compare in (("stoi", stoi_segments), ("estoi", estoi_segments)):
            if name in names:
                rows = [compare(*_segments(each)) for each in envelopes]
                together = pad_sequence(rows, batch_first=True, padding_value=math.nan)
                made[f"{name}_segments"] = together[: len(pairs)]
                made[name] = torch.stack([row.mean() for row in rows])[: len(pairs)]
        return made

    def resampled(self, x: Tensor) -> Tensor:
        """Return (.., time) at 10 kHz, ceil(time * 10000 / fs) samples.

        Output a of block b is the sum of taps[i, a] x[step b + i - before] over i.
        """
        if self.up == self.down:
            return x
        samples = -(-x.shape[-1] * self.up // self.down)
        window, size = self.taps.shape
        blocks, step, before = (
            -(-samples // size),
            size // self.up * self.down,
            self.reach // self.up,
        )
        behind = max((max(blocks, 1) - 1) * step + window - before - x.shape[-1], 0)
        blocks_of_x = pad(x, (before, behind)).unfold(-1, window, step)[..., :blocks, :]
        return (blocks_of_x @ self.taps).flatten(-2)[..., :samples]

    def frames(self, x: Tensor) -> Tensor:
        """Return windowed frames (.., frame, 256) that begin before the last 256 samples."""
        count = max(-(-(x.shape[-1] - FRAME) // HOP), 0)
        if not count:
            return x.new_empty(*x.shape[:-1], 0, FRAME)
        return x.unfold(-1, FRAME, HOP)[..., :count, :] * self.window

    def levels_db(self, frames: Tensor) -> Tensor:
        """Return the level of each windowed frame in dB re a norm of 1, (.., frame)."""
        return 20.0 * torch.log10(vector_norm(frames, dim=-1) + EPSILON)

    def kept(self, levels_db: Tensor) -> Tensor:
        """Return True for each frame that is not silent; a silent clip keeps no frame."""
        if not levels_db.shape[-1]:
            return levels_db > 0
        loudest = levels_db.amax(-1, keepdim=True)
        return (levels_db > loudest - SILENCE_DB) & (loudest > 20.0 * math.log10(EPSILON))

    def joined(self, frames: Tensor) -> Tensor:
        """Overlap and add windowed frames (.., frame, 256) to a signal (.., time)."""
        first, second = pad(frames, (0, 0, 0, 1)).split(HOP, -1)
        signal = (first + second.roll(1, -2)).flatten(-2)
        return signal if frames.shape[-2] else signal[..., :0]

    def envelopes(self, x: Tensor) -> Tensor:
        """Return band envelopes (.., frame, 15) of a signal (.., time) at 10 kHz."""
        frames = self.frames(x).to(self.dtype)
        if not frames.numel():  # MKL has no transforms of nothing
            return frames.new_empty(*frames.shape[:-1], BANDS)
        parts = torch.view_as_real(torch.fft.rfft(frames, N_FFT)).flatten(-2)
        return _root(product(parts.square(), self.bands))


def stoi_segments(clean: Tensor, processed: Tensor) -> Tensor:
    """Return the correlation of each segment and band (segment, 15) of (segment, 15, 30)."""
    norm, other = _norm(clean, -1), _norm(processed, -1)
    limit = clean * (1.0 + 10.0 ** (CLIP_DB / 20.0))
    clipped = torch.minimum(processed * (norm / (other + EPSILON)), limit)
    u, v = (x - x.mean(-1, keepdim=True) for x in (clean, clipped))
    norms = (_norm(u, -1) + EPSILON) * (_norm(v, -1) + EPSILON)
    return (u * v).sum(-1) / norms.squeeze(-1)


def estoi_segments(clean: Tensor, processed: Tensor) -> Tensor:
    """Return the correlation of each segment (segment,) of (segment, 15, 30)."""
    u, v = (_normalized(_normalized(x, -1), -2) for x in (clean, processed))
    return (u * v).sum((-2, -1)) / SEGMENT


def _normalized(x: Tensor, axis: int) -> Tensor:
    """Return vectors along an axis with mean 0 and norm 1; constant vectors become 0.

    Differences from the first value make a constant vector exactly 0, for any rounding of means.
    """
    x = x - x.narrow(axis, 0, 1)
    x = x - x.mean(axis, keepdim=True)
    norm = _norm(x, axis)
    return x / torch.where(norm == 0, 1.0, norm)


def _norm(x: Tensor, axis: int) -> Tensor:
    return _root(x.square().sum(axis, keepdim=True))


def _root(power: Tensor) -> Tensor:
    """Return the square root, with gradient 0 at 0, where its slope is infinite."""
    some = power != 0
    return torch.where(some, power, 1.0).sqrt() * some


def _segments(envelopes: Tensor) -> Tensor:
    """Return the segments (clip, segment, 15, 30) of band envelopes (clip, frame, 15)."""
    if envelopes.shape[1] < SEGMENT:
        return envelopes.new_empty(2, 0, BANDS, SEGMENT)
    return envelopes.unfold(1, SEGMENT, 1).contiguous()


def _band_matrix() -> Tensor:
    """Return the bins of each one-third-octave band; edges lie at the nearest bins.

    Rows are (bin, real and imaginary part) of 257 bins, so that squares need no sum of pairs.
    """
    step_hz = RATE_HZ / N_FFT
    edges_hz = LOWEST_HZ * 2.0 ** ((2.0 * torch.arange(BANDS + 1, dtype=torch.float64) - 1.0) / 6.0)
    edges, bins = (edges_hz / step_hz).round(), torch.arange(N_FFT // 2 + 1)[:, None]
    return ((bins >= edges[:-1]) & (bins < edges[1:])).double().repeat_interleave(2, 0)


def _taps(up: int, down: int) -> tuple[Tensor, int]:
    """Return the taps of each output of a block, (window, up), and the taps on each side.

    Kaiser's formulas give length and beta, for a transition of a tenth of the cutoff. A block is a
    multiple of `up` outputs: products of few columns are slow.
    """
    cutoff = 1.0 / (2.0 * max(up, down))
    reach = math.ceil((_STOP_DB - 8.0) / (28.714 * cutoff / 10.0))
    taps = resample_taps(up, down, reach, 0.1102 * (_STOP_DB - 8.7))
    block = up * max(1, _BLOCK // up)
    first, last = -(reach // up), ((block - 1) * down + reach) // up
    inputs, outputs = torch.arange(first, last + 1)[:, None], torch.arange(block)
    at = outputs * down - inputs * up + reach
    inside = (at >= 0) & (at < len(taps))
    return torch.where(inside, taps[at.clamp(0, len(taps) - 1)], 0.0), reach
