"""Running spectra of the loudness models: long windows for low frequencies, short for high ones.

Six Hann windows, each half as long as the one before, all centred on the frame's instant (Glasberg
and Moore 2002); each serves one range of frequencies. The transform is a matrix product with the
few bins a window serves, which takes less time than whole FFTs of all six. Only the power of a bin
counts, and all windows are symmetric about one instant, so frames are folded there:

    e[m] = x[c + m] + x[c - 1 - m],   o[m] = x[c + m] - x[c - 1 - m],   c = windows[0] / 2
    power = (sum_m e[m] h[m] cos((m + 1/2) w))^2 + (sum_m o[m] h[m] sin((m + 1/2) w))^2

This halves the products, and all windows share e and o. In float32 without gradients, a kernel
computes fewer products by low-rank factors.

The function `factors_of` finds the low-rank factors of the windowed transforms. Windows share
hop-sized blocks, and neighbouring components share sums over blocks; an SVD finds both. The factors
drop at most a share of `LEFT_OUT` of each transform, half of the last digit of float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.operations.running_spectrum import RUNNING_POWERS, SIDE, Factors
from amtcore.kernels.operations.specific_loudness import audible
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import by_item, can_compute, rows_of
from amtcore.stages.stage import Stage, product
from amtcore.units import REFERENCE_PA

Array = NDArray[np.float64]

#: Half of the last digit of float32.
LEFT_OUT = 2.0**-25
#: Components that share their sums.
_TOGETHER = 40


def can_factor(windows: Sequence[int], hop: int) -> bool:
    """Return True if half of every window is whole blocks of a hop."""
    return all(length // 2 % hop == 0 for length in windows)


def _few(unit: Array) -> Array:
    """Return orthonormal (function, column) that span all rows up to `LEFT_OUT` of each row.

    Args:
        unit: (row, part, column), each row of length 1 at most over parts and columns.
    """
    rows = unit.reshape(-1, unit.shape[-1])
    if len(rows) > rows.shape[1]:
        _, rows = np.linalg.qr(rows)  # has the same singular values and functions
    _, _, every = np.linalg.svd(rows, full_matrices=False)
    shares = np.square(unit @ every.T).sum(1)
    left = np.flip(np.cumsum(np.flip(shares, 1), 1), 1).max(0)  # share of this function and later
    return every[: int((left > LEFT_OUT**2).sum())]


def _reduced(p: Array, q: Array) -> tuple[int, list[Array]]:
    """Return the rank and the matrices V, W, P, Q; rank 0 with P and Q if factors do not pay."""
    v, w = (_few((m / np.linalg.norm(m, axis=1)[:, None])[:, None]) for m in (p, q))
    rank = max(len(v), len(w))
    size = p.shape[1]
    if (rank + -rank % SIDE) * size + len(p) * rank >= len(p) * size:
        return 0, [p, q]
    v, w = (np.pad(m, ((0, rank - len(m)), (0, 0))) for m in (v, w))
    return rank, [v, w, p @ v.T, q @ w.T]


def factors_of(transforms: Sequence[tuple[Array, Array]], hop: int) -> Factors:
    """Return the factors of all windows.

    Args:
        transforms: Cosines and sines of every window, (component, sample from the instant on).
        hop: Samples of a block; half a window has a whole number of blocks.
    """
    functions, values, plan = [np.zeros((0, hop))], [np.zeros(0)], []
    first = component = at = 0
    for cosines, sines in transforms:
        if not len(cosines):
            continue
        both = np.concatenate((cosines, sines))
        blocks = (both / np.linalg.norm(both, axis=1)[:, None]).reshape(len(both), -1, hop)
        even, odd = (_few((blocks + sign * blocks[..., ::-1]) / 2) for sign in (1.0, -1.0))
        basis = np.concatenate((even, odd))
        reach, size = cosines.shape[1] // hop, cosines.shape[1] // hop * len(basis)
        p, q = ((m.reshape(-1, hop) @ basis.T).reshape(-1, size) for m in (cosines, sines))
        for group in np.array_split(np.arange(len(p)), -(-len(p) // _TOGETHER)):
            rank, parts = _reduced(p[group], q[group])
            plan.append((reach, first, len(even), len(odd), rank, at, component, len(group)))
            for pair in zip(parts[::2], parts[1::2], strict=True):
                # The flat layout of `Factors`: side by side, in groups of SIDE rows.
                both = np.pad(np.stack(pair), ((0, 0), (0, -len(pair[0]) % SIDE), (0, 0)))
                flat = both.reshape(2, -1, SIDE, both.shape[2]).transpose(1, 3, 0, 2).ravel()
                values, at = [*values, flat], at + len(flat)
            component += len(group)
        functions, first = [*functions, basis], first + len(basis)
    every = np.concatenate(functions)
    padded = np.pad(every, ((0, -len(every) % SIDE), (0, 0)))
    return Factors(
        torch.from_numpy(padded), torch.from_numpy(np.concatenate(values)), torch.tensor(plan)
    )


#: Edges in Hz of the ranges served by windows of 64, 32, 16, 8, 4 and 2 ms.
WINDOW_LIMITS_HZ = (20.0, 80.0, 500.0, 1250.0, 2540.0, 4050.0, 15000.0)
#: Level of a sine of 1 Pa peak relative to its bin's |2 Y / N|^2 in Pa^2.
PEAK_PA_DB = 10.0 * math.log10(0.5 / REFERENCE_PA**2)
#: Gain that compensates for the windows. The value of Moore2016 is published. With the value of
#: Glasberg2002 a 1 kHz tone of 40 dB SPL is within 2 % of 1 sone. All other loudness is within 8 %
#: of the reference program. The power of a windowed tone alone would give 0.426.
MOORE2016_WINDOW_LOG10 = 0.332
GLASBERG2002_WINDOW_LOG10 = 0.364
#: Level in dB SPL that stands for "not there".
NOTHING_DB = -100.0
#: `faintest` and `inaudible` as kernels take them: (strongest a, at least b) c. In Moore2016 the
#: components 60 dB below the strongest, or below a strongest of 30 dB, count as not there.
FAINTEST = (1.0, 10.0 ** (30.0 / 10.0), 10.0 ** (-60.0 / 10.0))
INAUDIBLE = (0.0, 10.0 ** (NOTHING_DB / 10.0), 1.0)

_running_powers = operator(RUNNING_POWERS)


def default_hop(fs: float) -> int:
    """1 ms in whole samples."""
    return max(1, round(fs / 1000.0))


def window_samples(fs: float, count: int) -> list[int]:
    """Lengths of the windows, each half as long as the one before, all even."""
    longest = 2 * round(0.064 * fs / 2)
    return [max(2, 2 * round(longest / 2 ** (i + 1))) for i in range(count)]


def level_db(intensity: Tensor) -> Tensor:
    """Intensity relative to (20 uPa)^2 in dB SPL, never below `NOTHING_DB`."""
    return 10.0 * torch.log10(intensity.clamp(min=10.0 ** (NOTHING_DB / 10.0)))


def inaudible(intensity: Tensor) -> Tensor:
    """Return the threshold at `NOTHING_DB`, (1,): weaker powers become denormal, hence slow."""
    return intensity.new_full((1,), INAUDIBLE[1])


def faintest(intensity: Tensor) -> Tensor:
    """Return the threshold of components in Moore2016, relative to the strongest of both ears.

    Intensities (batch, ear, frame, component) give (batch, 1, frame, 1).
    """
    strongest = intensity.detach().amax(3, keepdim=True).amax(1, keepdim=True)
    return strongest.clamp(min=FAINTEST[1]) * FAINTEST[2]


class WindowedSpectrum(Stage):
    """Intensities of the components of every frame; has no constants to learn.

    Component k lies at `frequencies[k]`, a whole multiple of fs / windows[0]. Frame i depends on
    samples i hop - windows[0]/2 up to i hop + windows[0]/2 - 1 only.

    Args:
        windows: Lengths of the Hann windows in samples, longest first, at most six.
        window_log10: Gain that makes up for the windows, as a power of ten.
        Others as for `Moore2016Spectrum`.
    """

    shown = "fs hop_length windows learnable"

    def __init__(
        self,
        fs: float,
        hop_length: int | None,
        windows: Sequence[int],
        window_log10: float,
        learnable: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(fs, learnable, dtype)
        self.windows, most = tuple(windows), len(WINDOW_LIMITS_HZ) - 1
        fine = all(isinstance(n, int) and n >= 2 and n % 2 == 0 for n in self.windows)
        count = len(self.windows)
        if not (1 <= count <= most and fine and self.windows[0] == max(self.windows)):
            raise ParameterError(
                f"expected 1 to {most} even window lengths in samples, longest first, got "
                f"{self.windows}"
            )
        self.hop_length = hop_length or default_hop(self.fs)
        self.bin_hz, self._window_log10 = self.fs / self.windows[0], window_log10
        limits_hz = (*WINDOW_LIMITS_HZ[:count], WINDOW_LIMITS_HZ[-1])
        edges = [min(math.floor(f / self.bin_hz) + 1, self.windows[0] // 2) for f in limits_hz]
        if edges[0] == edges[-1]:
            raise ParameterError(f"fs {self.fs:g} Hz leaves no frequency above 20 Hz to analyse")
        self._bins = tuple(pairwise(edges))

    def tables(self) -> dict[str, Tensor]:
        tables, gain = {}, 10.0 ** (self._window_log10 / 2)
        for i, (cosines, sines) in enumerate(_transforms(self.windows, self._bins)):
            tables[f"cosines_{i}"] = (gain * cosines).to(self.dtype)
            tables[f"sines_{i}"] = (gain * sines).to(self.dtype)
        if self.has_factors():
            made = _factors(self.windows, self._bins, self.hop_length)
            tables |= {
                "factor_basis": (gain * made.basis).float(),
                "factor_values": made.values.float(),
                "factor_plan": made.plan.clone(),
            }
        every = torch.cat([torch.arange(first, last) for first, last in self._bins])
        return {**tables, "frequencies": (every * self.bin_hz).to(self.dtype)}

    @property
    def n_windows(self) -> int:
        """Number of windows."""
        return len(self.windows)

    def n_frames(self, samples: int) -> int:
        """Frames of a signal that is not empty: one centred on sample 0 and on every hop."""
        return samples // self.hop_length + 1 if samples else 0

    def intensities(self, x: Tensor) -> Tensor:
        """Frames whose windows lie wholly in x.

        Args:
            x: (.., time) in Pa; the first frame is centred on sample windows[0]/2.
        Returns:
            (.., frame, component), relative to (20 uPa)^2.
        """
        if self.has_factors() and x.numel() and can_compute(x):
            count = (x.shape[-1] - self.windows[0]) // self.hop_length + 1
            return _running_powers(x, list(self.factors()), len(self.frequencies), count)
        half = self.windows[0] // 2
        after = x[..., half:].unfold(-1, half, self.hop_length)
        before = x[..., : x.shape[-1] - half].unfold(-1, half, self.hop_length).flip(-1)
        even, odd, frames = after + before, after - before, after.shape[:-1]
        # (frame, sample) of all signals; a component's frames lie together, as products are best.
        even, odd = rows_of(even).mT, rows_of(odd).mT
        parts = []
        for i, length in enumerate(self.windows):
            real = product(self.get_buffer(f"cosines_{i}"), even[: length // 2])
            imaginary = product(self.get_buffer(f"sines_{i}"), odd[: length // 2])
            parts.append(torch.addcmul(real.square(), imaginary, imaginary))
        return torch.cat(parts).unflatten(1, frames).movedim(0, -1)

    def has_factors(self) -> bool:
        """Return True if a kernel may take few sums instead of the products."""
        return self.dtype == torch.float32 and can_factor(self.windows, self.hop_length)

    def factors(self) -> Factors:
        """Factors of these sums."""
        return Factors(*(self.get_buffer(f"factor_{name}") for name in Factors._fields))

    def spectra(self, x: Tensor) -> Tensor:
        """(batch, .., time) of whole signals -> (batch, .., frame, component)."""
        made = by_item(self.intensities, self.padded(x))
        return made[..., : self.n_frames(x.shape[-1]), :]

    def padded(self, x: Tensor) -> Tensor:
        """(.., time) with the zeros around it that centre the first frame on sample 0."""
        half = self.windows[0] // 2
        return torch.nn.functional.pad(x, (half, half))


#: First bin, and the bin after the last, of every window.
_Bins = tuple[tuple[int, int], ...]


def _transforms(windows: tuple[int, ...], ranges: _Bins) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for every window (bin, half a window): cosines and sines times the Hann window.

    They are scaled to intensity. In a window 2^i times shorter, a tone has 2^-2i of the power in
    each of 2^i times as many bins. The factor 2^i makes the sums equal.
    """
    longest = windows[0]
    for length, (first, last) in zip(windows, ranges, strict=True):
        place = torch.arange(length // 2, dtype=torch.float64) + 0.5
        hann = 0.5 + 0.5 * torch.cos(2.0 * math.pi * place / (length - 1))
        bins = torch.arange(first, last, dtype=torch.float64)
        angle = torch.outer(bins, place) * (2 * math.pi / longest)
        peak = 2.0 / longest * 10.0 ** (PEAK_PA_DB / 20.0) * math.sqrt(longest / length)
        yield angle.cos() * hann * peak, angle.sin() * hann * peak


@functools.cache
def _factors(windows: tuple[int, ...], bins: _Bins, hop: int) -> Factors:
    """Return the factors for the kernel; cached, as they take as long as the rest of a model."""
    return factors_of([(c.numpy(), s.numpy()) for c, s in _transforms(windows, bins)], hop)


class Moore2016Spectrum(WindowedSpectrum):
    """Spectra of Moore2016: windows of 2048, 1024 .. 64 samples, faint components dropped.

    The page's default hop of 512 samples is 1 ms here, as published.

    Args:
        fs: Sampling rate in Hz, 32000 in the model.
        hop_length: Samples between frames; None is 1 ms.
        n_windows: How many of the six windows to use; the last one serves all that is above.
        learnable: Accepted for uniformity; there is nothing to learn.
        dtype: torch.float32 or torch.float64.

    Shape:
        (batch, ear, time) in Pa -> (batch, ear, frame, component), frame = time // hop + 1.

    Invariants:
        A component is 0 when it is 60 dB or more below the strongest one of both ears.

    >>> Moore2016Spectrum()(torch.zeros(1, 2, 320)).shape
    torch.Size([1, 2, 11, 959])
    """

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        hop_length: int | None = None,
        n_windows: int = 6,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        windows = window_samples(float(fs), n_windows)
        super().__init__(fs, hop_length, windows, MOORE2016_WINDOW_LOG10, learnable, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once."""
        x = self.as_input(x, (3,), "(batch, ear, time)")
        spectra = self.spectra(x)
        return audible(spectra, faintest(spectra))


class MultiResolutionFFT(WindowedSpectrum):
    """Power spectra of Glasberg2002: Hann windows of 64, 32 .. 2 ms.

    Args:
        fs: Sampling rate in Hz.
        hop_length: Samples between frames; None is 1 ms in whole samples.
        n_ffts: Window lengths in samples, longest first; None is 64, 32 .. 2 ms.
        learnable: Accepted for uniformity; there is nothing to learn.
        dtype: torch.float32 or torch.float64.

    Shape:
        (batch, time) in Pa -> (batch, frame, component) in Pa^2/Hz, and the frequencies in Hz.

    Invariants:
        The density summed over a tone's bins times the bin width is its mean square, times a fixed
        10^(0.364 - 0.426).

    >>> psd, f_hz = MultiResolutionFFT(fs=32000)(torch.zeros(1, 320))
    >>> psd.shape, f_hz.shape
    (torch.Size([1, 11, 959]), torch.Size([959]))
    """

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        hop_length: int | None = None,
        n_ffts: Sequence[int] | None = None,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        windows = window_samples(float(fs), 6) if n_ffts is None else n_ffts
        super().__init__(fs, hop_length, windows, GLASBERG2002_WINDOW_LOG10, learnable, dtype)

    def density(self, intensity: Tensor) -> Tensor:
        """Intensity of a component relative to (20 uPa)^2 -> Pa^2/Hz."""
        return intensity * (REFERENCE_PA**2 / self.bin_hz)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The whole signal at once."""
        x = self.as_input(x, (2,), "(batch, time)")
        return self.density(self.spectra(x)), self.frequencies
