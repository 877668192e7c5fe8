"""Auditory-nerve rates and spikes of a simplified ear with a limit of phase locking.

    Gammatone filters -> rectifier -> low-pass, fs_out -> rates by level, three kinds of fibres.

Source: Saddler and McDermott (2024), Nat. Commun. 15:10590, as in phaselocknet_torch (commit
4c52ad8); gammatone filters of Slaney (1993), Apple TR 35. The low-pass keeps the program's errors,
which trained networks expect. So the "phase-locking limit" is a name, not the -3 dB point: that is
182 Hz for 320 Hz, and 3786 Hz for 3000 Hz, at 20 kHz. The filter that the program means is
`lowpass="onepole"`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.arguments import RATE, Flag, Number, Numbers, Text, checked_arguments, whole
from amtcore.errors import ParameterError, ShapeError
from amtcore.filter_design import gammatone_polynomials
from amtcore.kernels.operations.envelope import quadrature_of
from amtcore.kernels.operations.fir import FIR
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import rows_of
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal
from amtcore.models.nerve_rates import fibre_rates, pressure
from amtcore.models.time_domain import StageSequence
from amtcore.scales import erb_space
from amtcore.stages.butterworth import ButterworthFilter
from amtcore.units import REFERENCE_PA, db_to_pa

FIBRES = ("high_sr", "medium_sr", "low_sr")
FILTER_S = 0.05
LOWPASS_ORDER = 7
#: Share of the rates that the dynamic range covers.
INTERVAL = 0.95
#: Slaney's constants; the scale of centre frequencies has 9.2645.
_EAR_Q, _MIN_BANDWIDTH_HZ, _BANDWIDTHS = 9.2644, 24.7, 1.019
_QUADRATURE_CHANNELS = 8
#: Most taps of a low-pass that takes less time at every sample than at every output.
_FEW_TAPS = 128
#: Share of a response that its last taps may have to be left out.
NEGLIGIBLE = 1e-14

_fir = operator(FIR)


def gammatone_taps(cf_hz: Any, fs: float) -> Any:
    """Return truncated impulse responses (cf, tap) of four-section gammatone filters."""
    from scipy.signal import sosfilt  # half a second, which few processes need

    fc_hz = torch.from_numpy(np.asarray(cf_hz, np.float64))
    width_hz = _BANDWIDTHS * (fc_hz / _EAR_Q + _MIN_BANDWIDTH_HZ)
    numerators, denominator = gammatone_polynomials(fc_hz, width_hz, fs)
    sections = torch.cat((numerators, denominator.expand_as(numerators)), -1)
    impulse = np.zeros(math.floor(FILTER_S * fs))
    impulse[0] = 1.0
    return np.stack(
        [sosfilt(each, impulse) for each in sections.transpose(0, 1).contiguous().numpy()]
    )


def lowpass_taps(limit_hz: float, fs: float) -> Any:
    """Return the program's low-pass for a phase-locking limit.

    The program means seven bilinear one-pole filters. Its pole has a corner at twice the limit,
    the zeros at fs/2 are missing, and a Hann window covers a response that starts at 0.
    """
    from scipy.signal import lfilter  # half a second, which few processes need

    count = math.floor(FILTER_S * fs) // 2 * 2 + 1
    w = math.pi * limit_hz
    c1, c2 = (fs - 2 * w) / (fs + 2 * w), w / (fs + 2 * w)
    taps = np.zeros(count)
    taps[0] = c2
    taps = lfilter([1.0], [1.0, -c1], taps)
    for _ in range(LOWPASS_ORDER - 1):
        taps[0] /= 2
        taps = lfilter([2 * c2], [1.0, -c1], taps)
    taps = taps * np.hanning(count)
    return taps / taps.sum()


@dataclass(frozen=True)
class _State:
    """Progress of a stream.

    `waiting` are samples (row, time) of the next block, `heard` the samples before it, `poles` the
    states of one-pole filters.
    """

    waiting: Tensor
    heard: Tensor
    poles: Any = None
    blocks: int = 0


class AuditoryNerve(FrameModule):
    """Simplified auditory nerve: instantaneous rates and spike counts of three kinds of fibres.

    The Hilbert envelope of `envelope_mode` needs the whole clip. Without it the model streams, in
    blocks of a fixed number of samples. Gradients exist but for `spikes`. The options "onepole",
    `compression`, `power_law` and spontaneous rates above 0 have no reference data.

    Args:
        fs: Sampling rate in Hz, a whole multiple of `fs_out`.
        fs_out: Rate of the frames in Hz.
        min_cf: Lowest centre frequency in Hz.
        max_cf: Highest centre frequency in Hz, below fs/2.
        num_cf: Number of centre frequencies, evenly spaced on the ERB scale.
        phase_locking_limit: Nominal limit in Hz of the low-pass.
        lowpass: "phaselocknet" as the program, or "onepole": seven one-pole filters at the limit.
        envelope_mode: Whether the level is the level of the Hilbert envelope.
        rate_spont: Spontaneous rate of each kind of fibre (high, medium, low) in spikes/s.
        rate_max: Saturated rate of each kind in spikes/s.
        threshold: Threshold of each kind in dB SPL.
        dynamic_range: Dynamic range of each kind in dB.
        compression: Exponent of subbands between the two levels, one or one per centre frequency;
            None does not compress.
        compression_db_min: Level in dB SPL below which subbands are linear; None is no such level.
        compression_db_max: Level in dB SPL above which subbands are unchanged, with a jump; None is
            no such level.
        power_law: Exponent of the pressure before the level, one or one per centre frequency; None
            is no power law.
        power_law_default: Exponent that thresholds and dynamic ranges follow; None leaves them.
        n_ears: Ears of the input, 1 or 2.
        spikes: Draws of the stream `spikes`: "approx" (rounded normal) or "exact" (binomial).
        fibres: Number of fibres of each kind per centre frequency.
        seed: Seed of the spikes. Every clip draws the same random numbers.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., time), or (.., 2, time) with two ears -> `subbands` (.., time, ear cf) in Pa; `ihc` and
        `envelope` (.., frame, ear cf) in Pa; `rates` (.., frame, ear fibre cf) in spikes/s and
        `spikes` in counts. Frame k is sample k fs / fs_out.

    Invariants:
        Rates lie between `rate_spont` and `rate_max` where the low-passed signal is not negative.
        Without `envelope_mode` outputs of `stream` over any split equal `outputs`.

    >>> model = AuditoryNerve(fs=20000)
    >>> model.outputs(torch.zeros(2000), ("rates",))["rates"].shape
    torch.Size([1000, 150])
    """

    shown = "fs fs_out fc num_cf phase_locking_limit lowpass envelope_mode n_ears spikes"
    fc: Tensor
    gammatone_spectrum: Tensor
    lowpass_taps: Tensor
    law: Tensor
    fibres: Tensor
    compression: Tensor
    power_law: Tensor
    whole_clips_reason = "the Hilbert envelope needs the whole clip; set envelope_mode to false"

    @checked_arguments(
        min_cf=RATE,
        max_cf=RATE,
        num_cf=whole(2),
        phase_locking_limit=RATE,
        lowpass=Text(("phaselocknet", "onepole")),
        envelope_mode=Flag(),
        rate_spont=Numbers(Number(" spikes/s", least=0.0), single=False),
        rate_max=Numbers(Number(" spikes/s", above=0.0), single=False),
        threshold=Numbers(Number(" dB SPL", least=-200.0, most=300.0), single=False),
        dynamic_range=Numbers(Number(" dB", above=0.0, most=300.0), single=False),
        compression=Numbers(Number(above=0.0, most=10.0), optional=True),
        compression_db_min=Number(" dB SPL", least=-200.0, most=300.0, optional=True),
        compression_db_max=Number(" dB SPL", least=-200.0, most=300.0, optional=True),
        power_law=Numbers(Number(above=0.0, most=10.0), optional=True),
        power_law_default=Number(above=0.0, most=10.0, optional=True),
        n_ears=whole(1, 2),
        spikes=Text(("approx", "exact")),
        fibres=Numbers(whole(1), single=False),
        seed=whole(0, 2**63 - 1),
    )
    def __init__(
        self,
        fs: float = 20000.0,
        fs_out: float = 10000.0,
        min_cf: float = 60.0,
        max_cf: float = 8000.0,
        num_cf: int = 50,
        phase_locking_limit: float = 3000.0,
        lowpass: str = "phaselocknet",
        envelope_mode: bool = True,
        rate_spont: tuple[float, float, float] = (0.0, 0.0, 0.0),
        rate_max: tuple[float, float, float] = (250.0, 250.0, 250.0),
        threshold: tuple[float, float, float] = (0.0, 12.0, 28.0),
        dynamic_range: tuple[float, float, float] = (20.0, 40.0, 80.0),
        compression: float | list[float] | None = None,
        compression_db_min: float | None = None,
        compression_db_max: float | None = None,
        power_law: float | list[float] | None = None,
        power_law_default: float | None = 0.3,
        n_ears: int = 1,
        spikes: str = "approx",
        fibres: tuple[int, int, int] = (384, 160, 96),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.fs_out, self.dtype = float(fs), float(fs_out), dtype
        if self.fs % self.fs_out:
            raise ParameterError(
                f"expected fs a whole multiple of fs_out, got {fs:g} and {fs_out:g} Hz; resample "
                "the audio, to 20000 Hz for example"
            )
        if not min_cf < max_cf < self.fs / 2 or not phase_locking_limit < self.fs / 2:
            raise ParameterError(
                f"expected min_cf < max_cf, and max_cf and phase_locking_limit below fs/2 "
                f"({self.fs / 2:g} Hz), got {min_cf:g}, {max_cf:g} and {phase_locking_limit:g} Hz"
            )
        self.step, self.num_cf, self.n_ears = int(self.fs // self.fs_out), num_cf, n_ears
        self.phase_locking_limit, self.lowpass = phase_locking_limit, lowpass
        self.envelope_mode, self.can_stream = envelope_mode, not envelope_mode
        self.spikes, self.seed, self.input_channels = spikes, seed, (n_ears,)
        fc_hz = erb_space(min_cf, max_cf, num_cf)
        self.register_buffer("fc", torch.from_numpy(fc_hz).to(dtype))
        self._add_filters(fc_hz)
        levels = rate_spont, rate_max, threshold, dynamic_range
        self._add_fibres(levels, fibres, None if power_law is None else power_law_default)
        self.compresses = compression is not None
        self.limits_pa = [
            default if db is None else db_to_pa(db)
            for db, default in ((compression_db_min, 0.0), (compression_db_max, math.inf))
        ]
        self._add_exponent("compression", compression)
        self._add_exponent("power_law", power_law)
        self.grids = self._grids(tuple(fc_hz.tolist()) * n_ears)

    def _grids(self, fc_hz: tuple[float, ...]) -> dict[str, FrameGrid]:
        """Return the grids of the outputs, for the centre frequencies of all ears."""
        ears, numbers = range(self.n_ears), range(self.num_cf)
        columns = tuple(f"ear{i}_{kind}_{k}" for i in ears for kind in FIBRES for k in numbers)
        subbands = FrameGrid(len(fc_hz), 1, 1, fc_hz=fc_hz)
        slow = replace(subbands, hop_length=self.step)
        fibre = replace(slow, width=len(columns), fc_hz=fc_hz * len(FIBRES), columns=columns)
        of_fibres = dict.fromkeys(("rates", "spikes"), fibre)
        return of_fibres | {"envelope": slow, "ihc": slow, "subbands": subbands}

    def _add_exponent(self, name: str, exponent: Any) -> None:
        """Add an exponent of each centre frequency; None is 1."""
        values = torch.as_tensor(1.0 if exponent is None else exponent, dtype=self.dtype)
        if values.ndim and len(values) != self.num_cf:
            raise ParameterError(f"expected 1 or {self.num_cf} values of {name}, got {len(values)}")
        self.register_buffer(name, values.expand(self.num_cf).contiguous())

    def _add_filters(self, fc_hz: Any) -> None:
        """Add the filters, and the size of the blocks in which they are applied."""
        limit_hz = self.phase_locking_limit
        gammatone, slow = gammatone_taps(fc_hz, self.fs), lowpass_taps(limit_hz, self.fs)
        # The taps of a high limit end in rounding noise: 3000 Hz needs 16 taps of 1001.
        heard = np.cumsum(np.abs(slow[::-1]))[::-1] > NEGLIGIBLE * np.abs(slow).sum()
        slow = slow[: int(heard.sum())]
        past = gammatone.shape[1] + len(slow) - 2  # samples before a block that change its frames
        #: Samples of a transform; its last samples are a block.
        self.n_fft = 2 ** math.ceil(math.log2(8 * past))
        self.block = (self.n_fft - past) // self.step * self.step
        self.register_buffer("lowpass_taps", torch.from_numpy(slow).to(self.dtype))
        spectrum = torch.fft.rfft(torch.from_numpy(gammatone), self.n_fft)
        self.register_buffer("gammatone_spectrum", spectrum.to(self.dtype.to_complex()))
        count = LOWPASS_ORDER if self.lowpass == "onepole" else 0
        one_poles = (ButterworthFilter(self.fs, limit_hz, dtype=self.dtype) for _ in range(count))
        self.one_poles = StageSequence(*one_poles)

    def _add_fibres(
        self, levels: tuple[Any, ...], fibres: tuple[int, ...], exponent: float | None
    ) -> None:
        """Add the law of the rates; thresholds and ranges follow an exponent of the pressure."""
        spont, most, threshold_db, range_db = (
            torch.as_tensor(each, dtype=torch.float64) for each in levels
        )
        kinds = [len(each) for each in (*levels, fibres)]
        if kinds != [len(FIBRES)] * 5 or not bool((spont <= most).all()):
            raise ParameterError(
                f"expected rate_spont <= rate_max, and 3 values ({', '.join(FIBRES)}) of rates, "
                f"threshold, dynamic_range and fibres, got {kinds} values, rates "
                f"{spont.tolist()} and {most.tolist()}"
            )
        if not float(most.max()) <= self.fs_out:
            raise ParameterError(
                f"rate_max must be at most fs_out, {self.fs_out:g} Hz, got {most.tolist()}: a "
                "fibre has at most one spike a frame"
            )
        if exponent is not None:
            shift_db = 20 * math.log10(REFERENCE_PA ** (exponent - 1))
            threshold_db, range_db = threshold_db * exponent + shift_db, range_db * exponent
        slope = 2 * math.log(2 / (1 - INTERVAL) - 1) / range_db
        # The sigmoid's argument is gain ln(p) + bias.
        gain = slope * 20 / math.log(10)
        bias = -gain * math.log(REFERENCE_PA) - slope * (threshold_db + range_db / 2)
        law = torch.stack((spont, most - spont, gain, bias))
        self.register_buffer("law", law.to(self.dtype))
        counts = torch.tensor(fibres, dtype=self.dtype).repeat_interleave(self.num_cf)
        self.register_buffer("fibres", counts)

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        """Return streams of whole signals, see `FrameModule.outputs`.

        Raises:
            ParameterError: `spikes` of a low-pass whose output is negative.
        """
        names, most_hz = self.wanted(names), self.fs / (2 * math.pi)
        negative = self.lowpass == "phaselocknet" and self.phase_locking_limit > most_hz
        if self.envelope_mode and negative and "spikes" in names:
            raise ParameterError(
                f"expected a phase_locking_limit of at most fs / (2 pi), {most_hz:g} Hz, for "
                f"spikes, got {self.phase_locking_limit:g} Hz: above it the program's low-pass "
                "has negative rates; raise fs, or set lowpass to onepole"
            )
        return self._streams(signal, None, True, names)[0]

    def stream(
        self,
        chunk: Tensor,
        state: Any = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        """Return the frames of the blocks that a chunk completes, see `FrameModule.stream`."""
        if self.envelope_mode:
            return super().stream(chunk, state, last, names)
        return self._streams(chunk, state, last, self.wanted(names))

    def _streams(
        self, chunk: Tensor, state: _State | None, last: bool, names: tuple[str, ...]
    ) -> tuple[Outputs, _State]:
        """Return the streams of complete blocks (.., frame, ear column), and the state."""
        if self.n_ears > 1 and (chunk.ndim < 2 or chunk.shape[-2] != self.n_ears):
            raise ShapeError(
                f"expected a signal (.., {self.n_ears}, time), got {tuple(chunk.shape)}"
            )
        rows = rows_of(finite_signal(chunk, self.dtype))
        if state is None:
            state = _State(rows[:, :0], rows.new_zeros(len(rows), self.n_fft - self.block))
        waiting, first = torch.cat((state.waiting, rows), -1), state.blocks
        needed = {"subbands" if name == "subbands" else "ihc" for name in names}
        # Transforms refuse an empty batch.
        samples = waiting.shape[-1] if last and not len(rows) else 0
        parts = {
            name: [rows.new_empty(len(rows), self.num_cf, self.grids[name].n_frames(samples))]
            for name in needed
        }
        while len(rows) and waiting.shape[-1] >= (1 if last else self.block):
            samples = min(waiting.shape[-1], self.block)
            block = torch.nn.functional.pad(waiting[:, : self.block], (0, self.block - samples))
            made, state = self._block(block, state, "ihc" in needed)
            for name in needed:
                parts[name].append(made[name][..., : self.grids[name].n_frames(samples)])
            waiting = waiting[:, samples:]
        found = {name: torch.cat(each, -1).mT for name, each in parts.items()}
        if {*names} - {"subbands", "ihc"}:
            found |= self._fibres_of(found["ihc"].mT, names, first)
        arranged = {name: self._arranged(found[name], chunk) for name in names}
        return arranged, replace(state, waiting=waiting)

    def _block(self, block: Tensor, state: _State, slow: bool) -> tuple[Outputs, _State]:
        """Return `subbands` and, if `slow`, `ihc` (row, cf, frame) of a block, and the state."""
        begin = self.n_fft - self.block
        heard = torch.cat((state.heard, block), -1)
        spectrum = torch.fft.rfft(heard)[:, None, :] * self.gammatone_spectrum
        # The first samples are wrapped round: as many as a gammatone filter has taps, less one.
        subbands = torch.fft.irfft(spectrum, self.n_fft)
        made, poles = {"subbands": subbands[..., begin:]}, state.poles
        if slow:
            made["ihc"], poles = self._lowpassed(self._transduced(subbands), begin, poles)
        return made, _State(block[:, :0], heard[:, self.block :], poles, state.blocks + 1)

    def _lowpassed(self, driven: Tensor, begin: int, poles: Any) -> tuple[Tensor, Any]:
        """Return the low-passed signal from sample `begin` on at fs_out, and filter states."""
        if self.lowpass == "phaselocknet":
            first = begin + 1 - len(self.lowpass_taps)
            frames = self.block // self.step
            if len(self.lowpass_taps) > _FEW_TAPS:
                return _fir(driven, self.lowpass_taps, self.step, first, frames), poles
            # One long row, as no window of a frame of the block reaches back to another channel.
            row = _fir(driven.flatten(1), self.lowpass_taps, 1, first - begin, driven[0].numel())
            return row.view_as(driven)[..., begin : begin + self.block : self.step], poles
        slow, poles = self.one_poles.stream(driven[..., begin:], poles)
        return slow[..., :: self.step], poles

    def _transduced(self, subbands: Tensor) -> Tensor:
        """Compress and rectify subbands (row, cf, time)."""
        x = subbands.clamp(min=0.0)
        if not self.compresses:
            return x
        c, (low, high) = self.compression.unsqueeze(-1), self.limits_pa
        # A negative power of 0 has no slope, so the floor of the middle range is above 0.
        middle = x.clamp(min=max(low, torch.finfo(x.dtype).tiny)) ** c
        soft = torch.where(x < low, x * low ** (c - 1), middle) if low else middle * (x > 0)
        return torch.where(x >= high, x, soft)

    def _quadrature(self, x: Tensor) -> Tensor:
        """Return the imaginary part of the analytic signal of whole signals (row, cf, frame)."""
        if not x.numel():
            return x
        # Some channels at a time, whose memory is used again.
        return torch.cat([quadrature_of(each) for each in x.split(_QUADRATURE_CHANNELS, 1)], 1)

    def _fibres_of(self, x: Tensor, names: tuple[str, ...], block: int) -> Outputs:
        """Return `envelope`, `rates` and `spikes` (row, frame, column).

        Args:
            x: Low-passed signals (row, cf, frame).
            names: Outputs that are wanted.
            block: Number of the first block, for random numbers.
        """
        y, made = self._quadrature(x) if self.envelope_mode else None, {}
        if "envelope" in names:
            made["envelope"] = pressure(x, y).mT
        if "rates" in names or "spikes" in names:
            made["rates"] = fibre_rates(x, y, self.law, self.power_law)
        if "spikes" in names:
            parts = made["rates"].detach().split(self.block // self.step, 1)
            made["spikes"] = torch.cat(
                [self._spikes(each, block + i) for i, each in enumerate(parts)], 1
            )
        return made

    def _spikes(self, rates: Tensor, block: int) -> Tensor:
        """Return spike counts of rates (row, frame, column).

        Random numbers depend on the seed and the block, not on other clips or chunks.
        """
        counts, first = torch.empty_like(rates), block * self.block // self.step
        n = self.fibres.expand(rates.shape[1:])
        seed = int(np.random.SeedSequence((self.seed, first)).generate_state(1, np.uint64)[0])
        for begin in range(0, len(rates), self.n_ears):
            generator = torch.Generator(rates.device).manual_seed(seed >> 1)
            for row in range(begin, begin + self.n_ears):
                # The rounding of transforms leaves rates a little below 0.
                share = (rates[row] / self.fs_out).clamp(0.0, 1.0)
                if self.spikes == "exact":
                    counts[row] = torch.binomial(n, share, generator)
                else:
                    normal = torch.empty_like(share).normal_(generator=generator)
                    spread = (n * share * (1.0 - share)).sqrt()
                    counts[row] = (n * share + spread * normal).clamp(min=0.0).round()
        return counts

    def _arranged(self, values: Tensor, signal: Tensor) -> Tensor:
        """Return values (row, frame, column) as (.., frame, ear column)."""
        values = values.reshape(*signal.shape[:-1], *values.shape[1:])
        return values if self.n_ears == 1 else values.movedim(-3, -2).flatten(-2)
