"""CARFAC v2: cascade of asymmetric resonators with fast-acting compression (Lyon 2017, 2024).

A cascade of resonators, inner hair cells, and a gain control whose feedback sets the damping of the
resonators. Equations: R. F. Lyon, Human and Machine Hearing (Cambridge 2017), chapters 15 to 19, in
the second version of the program google/carfac. Differences from that program are in
docs/science/carfac.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.arguments import RATE, Flag, Number, Numbers, Rule, Text, checked_arguments, whole
from amtcore.errors import ParameterError, ShapeError, StateError, check_known
from amtcore.kernels.operations import carfac as kernel
from amtcore.kernels.vector.threads import parallel_for
from amtcore.listener import OHC_SHARE, Audiogram, losses_db
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs
from amtcore.models.time_domain import Kwargs
from amtcore.stages.stage import check_floating

Array = NDArray[Any]

_POSITIVE, _SHARE, _ANY = Number(above=0.0), Number(above=0.0, most=1.0), Number()
_SECONDS = Number(" s", above=0.0, most=10.0, hint="times are in seconds")
#: Default and rule of each argument of the resonators, hair cells and gain control.
_CAR: dict[str, tuple[Any, Rule]] = {
    "velocity_scale": (0.1, Number(least=0.0)),
    "v_offset": (0.04, _ANY),
    "min_zeta": (0.1, _SHARE),
    "max_zeta": (0.35, _SHARE),
    "first_pole_theta": (0.85 * math.pi, Number(" rad", above=0.0, below=math.pi)),
    "zero_ratio": (math.sqrt(2.0), Number(above=1.0)),
    "high_f_damping_compression": (0.5, Number(least=0.0, most=1.0)),
    "erb_per_step": (0.5, _POSITIVE),
    "min_pole_hz": (30.0, RATE),
    "erb_break_freq": (165.3, RATE),
    "erb_q": (1000.0 / (24.7 * 4.37), _POSITIVE),
    "ac_corner_hz": (20.0, Number(" Hz", least=0.0)),
}
#: Default time constants in s of each hair cell, in the order of the kernel's numbers.
_IHC: dict[str, dict[str, float]] = {
    "two_cap": {
        "tau_lpf": 80e-6, "tau1_out": 5e-4, "tau1_in": 2e-4, "tau2_out": 1e-3, "tau2_in": 1e-2
    },
    "one_cap": {"tau_lpf": 80e-6, "tau_out": 5e-4, "tau_in": 1e-2},
    "just_hwr": {},
}  # fmt: skip
_AGC: dict[str, tuple[Any, Rule]] = {
    "time_constants": ([0.002 * 4**s for s in range(4)], Numbers(_SECONDS, single=False)),
    "decimation": ([8, 2, 2, 2], Numbers(whole(1), single=False)),
    "agc1_scales": ([2 ** (s / 2) for s in range(4)], Numbers(_POSITIVE, single=False)),
    "agc2_scales": ([1.65 * 2 ** (s / 2) for s in range(4)], Numbers(_POSITIVE, single=False)),
    "stage_gain": (2.0, Number(least=0.0)),
    "agc_mix_coeff": (0.5, Number(least=0.0)),
}
#: The numbers of iterations of a smoothing filter that are tried.
_MOST_ITERATIONS = 16
#: Fewest channels, so that a filter of five taps has an inside.
_LEAST_CHANNELS = 4
#: Values of health whose gain is computed, and corrections of the health that follows from them.
_HEALTH_STEPS, _HEALTH_PASSES = 65, 5
#: Outputs over frames, and of every sample, in the order of the kernel.
_POOLED, _SAMPLED = ("nap", "bm", "agc"), ("bm", "nap", "agc_zb", "ohc_za")


def _chosen(name: str, given: Kwargs, known: Mapping[str, tuple[Any, Rule]]) -> dict[str, Any]:
    check_known(f"{name} has no argument", given or {}, known)
    return {k: rule(k, (given or {}).get(k, value)) for k, (value, rule) in known.items()}


def _health(name: str, value: Any) -> Array | None:
    """Check the health of outer hair cells: a number, one a channel, or (ear, channel)."""
    if value is None:
        return None
    try:
        health = np.asarray(value)
    except (TypeError, ValueError):  # lists of different lengths, tensors of a GPU
        health = np.asarray(None)
    is_number = health.dtype.kind in "iuf"
    if not is_number or health.ndim > 2 or not ((health >= 0) & (health <= 1)).all():
        raise ParameterError(
            f"{name} must be numbers between 0 and 1: one, one a channel, or (ear, channel); got "
            f"{value!r}"
        )
    return health.astype(np.float64)


class CarfacState(NamedTuple):
    """State between two chunks.

    Args:
        rows: (clip, ear, number), see `kernels.operations.carfac`.
        samples: Samples before the next chunk.
    """

    rows: Array
    samples: int


class CARFAC(FrameModule):
    """Cascade of asymmetric resonators with fast-acting compression, one ear or several.

    Args:
        fs: Sampling rate in Hz.
        n_ears: Ears, whose gain controls are coupled.
        ihc: Inner hair cell: "two_cap" (version 2), "one_cap", or "just_hwr" (rectifier).
        linear: Switch off the instantaneous nonlinearity of the outer hair cells.
        open_loop: Keep the gain control from acting on the resonators.
        delay_per_stage: Delay each channel by one sample behind the channel before.
        ohc_health: Health of the outer hair cells, 0 to 1: one number, one a channel, or a list of
            these for each ear. None is 1.
        health_start: "healthy" starts with full undamping, as the program does, and reaches
            `ohc_health` after 16 samples. "ohc_health" starts there. None is "ohc_health" with
            `open_loop`, where the feedback never sets the damping, else "healthy".
        frame_rate_hz: Frames per second of the pooled outputs.
        car_kwargs: Constants of the resonators, such as erb_per_step and min_pole_hz.
        agc_kwargs: Constants of the gain control, such as time_constants and decimation.
        ihc_kwargs: Time constants of the hair cell in s.
        dtype: torch.float32 or torch.float64.
        audiogram: Hearing loss of the listener in dB HL by frequency in Hz, for all ears; None is
            normal hearing. It sets `ohc_health`: for quiet sound, each channel's gain at its own
            frequency falls by the share of outer hair cells, as far as a health of 0 lowers it. The
            rest of the loss attenuates the motion before the inner hair cells.
        ohc_share: Share of outer hair cells in the loss in dB, 0 to 1.

    Shape:
        (..., time) with one ear, (..., ear, time) with several; (time,) is the same sound in all
        ears. Channels descend in frequency. `forward` returns every sample, see `stages`.
        `outputs` and `stream` return frames (..., frame, ear * channel): `nap`, mean firing rate
        (0 at rest, about 1 at saturation); `bm`, RMS of the membrane's motion in the input's unit;
        `agc`, mean of the gain control's first memory, which lowers the undamping.

    Raises:
        ParameterError: An argument is out of range, or the rate is too low for 4 channels.
        ShapeError: The signal has another number of ears.

    Invariants:
        Chunks of any length give the bits of the whole. Two equal ears are one ear.

    The kernel runs on the CPU, without gradients. Signals on another device are copied there, and
    the outputs back. Unverified by reference data: three or more ears, other health in each ear,
    health_start="ohc_health", decimations and time constants other than the defaults. The level of
    104 dB SPL for an RMS of 1 is read from a test of the program; its authors state no calibration.

    >>> CARFAC(16000)(torch.zeros(2, 800))["nap"].shape
    torch.Size([2, 65, 800])
    """

    input_unit = "rms1=104dB"
    shown = "fs n_ears n_channels ihc linear open_loop health_start frame_rate_hz"
    fc: Tensor
    coef: Tensor
    start: Tensor
    numbers: Tensor
    agc: Tensor
    counts: Tensor

    @checked_arguments(
        n_ears=whole(1),
        ihc=Text(tuple(_IHC)),
        linear=Flag(),
        open_loop=Flag(),
        delay_per_stage=Flag(),
        ohc_health=_health,
        health_start=Text(("healthy", "ohc_health"), optional=True),
    )
    def __init__(
        self,
        fs: float = 22050.0,
        n_ears: int = 1,
        ihc: str = "two_cap",
        linear: bool = False,
        open_loop: bool = False,
        delay_per_stage: bool = False,
        ohc_health: float | list[float] | list[list[float]] | None = None,
        health_start: str | None = None,
        frame_rate_hz: float = 100.0,
        car_kwargs: Kwargs = None,
        agc_kwargs: Kwargs = None,
        ihc_kwargs: Kwargs = None,
        dtype: torch.dtype = torch.float32,
        audiogram: Audiogram | None = None,
        ohc_share: float = OHC_SHARE,
    ) -> None:
        super().__init__()
        if frame_rate_hz > fs:
            raise ParameterError(f"frame_rate_hz must be at most fs, {fs:g} Hz")
        car, agc = _chosen("car_kwargs", car_kwargs, _CAR), _chosen("agc_kwargs", agc_kwargs, _AGC)
        known = {name: (tau, _SECONDS) for name, tau in _IHC[ihc].items()}
        taus = _chosen("ihc_kwargs", ihc_kwargs, known)
        self.fs, self.dtype, self.n_ears, self.ihc, self.linear = fs, dtype, n_ears, ihc, linear
        self.open_loop, self.delay_per_stage = open_loop, delay_per_stage
        self.health_start = health_start or ("ohc_health" if open_loop else "healthy")
        self.frame_rate_hz = frame_rate_hz
        self.input_channels = (1,) if n_ears == 1 else (1, n_ears)
        resonators = _design_resonators(fs, car)
        self.n_channels = len(resonators["fc"])
        shape = n_ears, self.n_channels
        try:
            health = np.broadcast_to(1.0 if ohc_health is None else ohc_health, shape)
        except ValueError:
            raise ParameterError(
                f"ohc_health must fit {shape}, the ears and channels at fs {fs:g} Hz, got "
                f"{ohc_health!r}"
            ) from None
        resonators["cell_gain"] = np.ones(self.n_channels)
        if audiogram is not None:
            if ohc_health is not None or (open_loop and self.health_start == "healthy"):
                raise ParameterError(
                    "expected no ohc_health, and no health_start 'healthy' with open_loop, beside "
                    "an audiogram, which sets the health; leave them out"
                )
            undamping = 1.0 if linear else 1.0 / (1.0 + car["v_offset"] ** 2)
            loss_db = losses_db(audiogram, resonators["fc"])
            found, gain = _impaired(fs, resonators, undamping, loss_db, ohc_share)
            health, resonators["cell_gain"] = np.broadcast_to(found, shape), gain
        self._register(resonators, health, car, _hair_cell(ihc, fs, taus), _stages(fs, agc))
        hop = Fraction(str(fs)) / Fraction(str(frame_rate_hz))
        fc_hz = tuple(float(f) for f in resonators["fc"]) * n_ears
        self.grids = {name: FrameGrid(len(fc_hz), hop, fc_hz=fc_hz) for name in _POOLED}

    def _register(
        self, car: dict[str, Array], health: Array, numbers: dict[str, Any], cell: tuple[Any, Any],
        agc: tuple[Array, Array, float],
    ) -> None:  # fmt: skip
        """Lay the constants out as the kernel reads them."""
        stages, counts, gain = agc
        padding = ((0, 0), (0, -self.n_channels % kernel.STEP))
        rows = [car[name] for name in ("a", "c", "h", "r1", "zr", "ga", "gb", "gc", "cell_gain")]
        coef = np.pad(np.stack([*rows, *health]), padding)
        start = np.zeros((self.n_ears, kernel.MEMORIES + 2 * len(counts), coef.shape[1]))
        first = np.ones_like(health) if self.health_start == "healthy" else health
        parabola = (car["ga"] * first + car["gb"]) * first + car["gc"]
        channels = slice(self.n_channels)
        start[:, kernel.G, channels] = car["g"] if self.health_start == "healthy" else parabola
        start[:, kernel.ZB, channels] = car["zr"] * first
        cell_numbers, rest = cell
        start[:, kernel.CAP1 : kernel.LOWPASS + 1] = np.array(rest)[:, None]
        # Rows of channels become groups of STEP channels, (.., group, row, channel).
        coef, start = (
            each.reshape(*each.shape[:-1], -1, kernel.STEP).swapaxes(-2, -3)
            for each in (coef, start)
        )
        listed = [0.0, 0.0] if self.linear else [numbers["velocity_scale"], numbers["v_offset"]]
        listed += [2.0 * math.pi * numbers["ac_corner_hz"] / self.fs]
        listed += [1.0 / sum(gain**s for s in range(len(counts))), gain, *cell_numbers]
        listed += [0.0] * (kernel.NUMBERS - len(listed))
        floats = {"coef": coef, "start": start, "numbers": listed, "agc": stages}
        for name, values in floats.items():
            self.register_buffer(name, torch.tensor(np.array(values), dtype=self.dtype))
        self.register_buffer("counts", torch.tensor(counts))
        self.register_buffer("fc", torch.tensor(car["fc"]))

    def _run(
        self, signal: Tensor, state: CarfacState | None, every: bool
    ) -> tuple[Array, Array, Array, CarfacState]:
        """Run clips (clip, ear, time); outputs are as in `kernel.run_clip`, a clip each."""
        coef, start, numbers, agc = (
            buffer.detach().to("cpu", self.dtype).numpy()
            for buffer in (self.coef, self.start, self.numbers, self.agc)
        )
        counts = self.counts.cpu().numpy()
        x = signal.detach().to("cpu", self.dtype).contiguous().numpy()
        clips, ears, n = x.shape
        shape = clips, ears, start[0].size
        state = state or CarfacState(np.broadcast_to(start.reshape(ears, -1), shape), 0)
        rows, position = state.rows.copy(), state.samples
        if rows.shape != shape or rows.dtype != x.dtype:
            raise StateError(
                f"expected the state of the chunk before, {shape} of {x.dtype}, got {rows.shape} "
                f"of {rows.dtype}"
            )
        if self.open_loop:  # a loop that was closed may have left ramps
            rows.reshape(clips, *start.shape)[..., kernel.DZB : kernel.DG + 1, :] = 0.0
        grid, row = self.grids["nap"], len(coef) * kernel.STEP
        n_frames = grid.n_frames(position + n) - grid.n_frames(position)
        updates = (position + n) // int(counts[0, 0]) - position // int(counts[0, 0])
        frames = np.empty((clips, n_frames, ears, 3, row), x.dtype)
        samples = np.empty((clips, n * every, ears, kernel.SAMPLE_ROWS, row), x.dtype)
        memories = np.empty((clips, updates * every, ears, len(counts), row), x.dtype)
        hop = np.array(Fraction(grid.hop_length or 1).as_integer_ratio())

        def one(i: int) -> None:
            kernel.run_clip(
                x[i], position, rows[i], self.n_channels, coef.ravel(), numbers, agc.ravel(),
                counts.ravel(), list(_IHC).index(self.ihc), self.delay_per_stage,
                not self.open_loop, every, hop, frames[i].ravel(), samples[i].ravel(),
                memories[i].ravel(),
            )  # fmt: skip

        parallel_for(one, clips)
        return frames, samples, memories, CarfacState(rows, position + n)

    def _as_clips(self, signal: Tensor) -> tuple[Tensor, torch.Size]:
        """Return the signal as (clip, ear, time), and the axes before ears and time."""
        check_floating(signal, "(..., time)", 1)
        if self.n_ears == 1:
            signal = signal.unsqueeze(-2)
        elif signal.ndim == 1:
            signal = signal.expand(self.n_ears, -1)
        if signal.shape[-2] != self.n_ears:
            raise ShapeError(
                f"expected a signal (time,) or (..., {self.n_ears}, time), got a tensor of shape "
                f"{tuple(signal.shape)}"
            )
        lead = signal.shape[:-2]
        return signal.reshape(lead.numel(), *signal.shape[-2:]), lead

    def stages(
        self,
        signal: Tensor,
        state: CarfacState | None = None,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, CarfacState]:
        """Return every sample of the stages, and the state for the next samples.

        Args:
            signal: As in the class.
            state: State of the chunk before, also of a model with another `open_loop`; None starts.
            names: Stages that are wanted; None is all.
        Returns:
            `bm`, `nap`, `agc_zb` (ramped undamping times its range of radius) and `ohc_za` (second
            state of the resonators), each (..., [ear,] channel, time); `agc_memory`
            (..., [ear,] stage, channel, update), after each update of the first stage. The axis of
            ears is there if `n_ears` is above 1.
        """
        clips, lead = self._as_clips(signal)
        _, samples, memories, state = self._run(clips, state, True)
        channels, ears = slice(self.n_channels), () if self.n_ears == 1 else (self.n_ears,)

        def arranged(values: Array) -> Tensor:
            # values: (clip, time, ear, .., channel), to time last.
            moved = torch.from_numpy(values[..., channels]).movedim(1, -1).to(signal.device)
            return moved.reshape(*lead, *ears, *moved.shape[2:]).contiguous()

        arrays = {name: samples[..., i, :] for i, name in enumerate(_SAMPLED)}
        arrays["agc_memory"] = memories
        check_known("CARFAC has no stage", names or (), arrays)
        return {name: arranged(arrays[name]) for name in names or arrays}, state

    def forward(self, signal: Tensor) -> Outputs:
        """Return every sample of the stages, see `stages`."""
        return self.stages(signal)[0]

    def stream(
        self,
        chunk: Tensor,
        state: CarfacState | None = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, CarfacState]:
        """Return the frames that the next samples complete, and the state for the next call."""
        names = self.wanted(names)
        clips, lead = self._as_clips(chunk)
        frames, _, _, state = self._run(clips, state, False)
        made = torch.from_numpy(frames[..., : self.n_channels]).to(chunk.device)
        columns = (*lead, made.shape[1], self.grids["nap"].width)
        which = {name: made[..., i, :].reshape(columns) for i, name in enumerate(_POOLED)}
        return {name: which[name] for name in names}, state


def _design_resonators(fs: float, car: dict[str, Any]) -> dict[str, Array]:
    """Design the channels, base to apex (Human and Machine Hearing, chapter 16)."""

    def erb(f: Any) -> Any:
        return (f + car["erb_break_freq"]) / car["erb_q"]

    poles, f = list[float](), car["first_pole_theta"] * fs / (2.0 * math.pi)
    while f > car["min_pole_hz"]:
        poles.append(f)
        f -= car["erb_per_step"] * erb(f)
    if len(poles) < _LEAST_CHANNELS:
        raise ParameterError(
            f"expected {_LEAST_CHANNELS} channels or more, got {len(poles)} at fs {fs:g} Hz; raise "
            "fs, or lower min_pole_hz or erb_per_step"
        )
    fc = np.array(poles)
    theta = 2.0 * np.pi * fc / fs
    a, c, y = np.cos(theta), np.sin(theta), theta / np.pi
    h = c * (car["zero_ratio"] ** 2 - 1.0)
    q = np.pi * (y - car["high_f_damping_compression"] * y**3)
    r1 = 1.0 - q * car["max_zeta"]
    least = car["min_zeta"] + 0.25 * (erb(fc) / fc - car["min_zeta"])
    zr = q * (car["max_zeta"] - least)

    def gain(u: float) -> Array:
        """Return the gain that makes a stage's gain at 0 Hz one."""
        r = r1 + zr * u
        whole_turn = 1.0 - 2.0 * r * a + r * r
        return np.asarray(whole_turn / (whole_turn + h * r * c))

    g0, g_half, g1 = gain(0.0), gain(0.5), gain(1.0)
    ga, gb = 2.0 * (g0 + g1 - 2.0 * g_half), 4.0 * g_half - 3.0 * g0 - g1
    found = {"fc": fc, "a": a, "c": c, "h": h, "r1": r1, "zr": zr}
    return {**found, "g": g1, "ga": ga, "gb": gb, "gc": g0}


def _impaired(
    fs: float, car: dict[str, Array], undamping: float, loss_db: Array, ohc_share: float
) -> tuple[Array, Array]:
    """Return the health, and the gain before the hair cells, of each channel for a loss in dB.

    For quiet sound a channel's gain is the product of the gains of its own stage and of the stages
    before. A uniform health lowers the gain by a known loss, so each channel first takes the health
    that would lower its gain enough if all had it. Corrections follow, because they have not.
    """
    n = len(car["fc"])
    z = np.exp(2j * np.pi * car["fc"] / fs)[:, None]

    def gain_db(health: Array) -> Array:
        """Return each channel's gain in dB at its own frequency; health (.., channel)."""
        u = health[..., None, :]  # (.., channel, stage)
        r = car["r1"] + car["zr"] * u * undamping
        g = (car["ga"] * u + car["gb"]) * u + car["gc"]
        rc = r * car["c"]
        stages = g * (1.0 + car["h"] * rc * z / ((z - r * car["a"]) ** 2 + rc**2))
        total: Array = (20.0 * np.log10(np.abs(stages)) * np.tri(n)).sum(-1)
        return total

    grid, healthy = np.linspace(0.0, 1.0, _HEALTH_STEPS), gain_db(np.ones(n))
    table = healthy - gain_db(np.tile(grid[:, None], n))
    table = np.minimum.accumulate(np.maximum(table, 0.0))  # the first two channels rise and fall
    wanted = np.clip(loss_db * ohc_share, 0.0, table[0])
    health, lost, aim = np.ones(n), np.zeros(n), wanted
    for _ in range(_HEALTH_PASSES):
        health = np.array([np.interp(-aim[k], -table[:, k], grid) for k in range(n)])
        lost = healthy - gain_db(health)
        aim = np.clip(aim + wanted - lost, 0.0, table[0])
    rest_db = np.maximum(loss_db - lost, np.minimum(loss_db, 0.0))  # a loss never amplifies
    return health, 10.0 ** (-rest_db / 20.0)


def _conductance(x: float) -> float:
    z = max(0.0, x + kernel.DETECT_OFFSET)
    return z**3 / (z**3 + z**2 + kernel.DETECT_CONSTANT)


def _hair_cell(kind: str, fs: float, tau: dict[str, float]) -> tuple[list[float], list[float]]:
    """Return the numbers of a hair cell, and both capacitors and the low-pass at rest."""
    if kind == "just_hwr":
        return [], [0.0, 0.0, 0.0]
    full, rest = _conductance(10.0), _conductance(0.0)
    rates, resting, stage = list[float](), list[float](), "1" if kind == "two_cap" else ""
    if stage:
        # The first capacitor's voltage drives the second as the conductance drives the first.
        ratio = tau["tau1_in"] / (tau["tau1_out"] * full)
        rates += [1.0 / (full * tau["tau1_out"] * fs), 1.0 / (tau["tau1_in"] * fs)]
        full, rest = ratio / (1.0 / full + ratio), ratio / (ratio + 1.0 / rest)
        resting, stage = [1.0 - rest], "2"
    out, into = tau[f"tau{stage}_out"], tau[f"tau{stage}_in"]
    ratio = into / (out * full)
    saturated, current = 1.0 / (2.0 / full + ratio), 1.0 / (ratio + 1.0 / rest)
    gain = 1.0 / (saturated - current)
    rates += [1.0 / (full * out * fs), 1.0 / (into * fs)]
    resting += [1.0 - current * ratio, *[current * gain] * (3 - len(resting) - 1)]
    return [1.0 - math.exp(-1.0 / (tau["tau_lpf"] * fs)), gain, current * gain, *rates], resting


def _stages(fs: float, agc: dict[str, Any]) -> tuple[Array, Array, float]:
    """Return numbers and counts of each stage of the gain control, and the stages' gain."""
    lists = [agc[k] for k in ("decimation", "time_constants", "agc1_scales", "agc2_scales")]
    if len({len(each) for each in lists}) != 1:
        raise ParameterError(
            "expected decimation, time_constants, agc1_scales and agc2_scales of one length, got "
            f"{[len(each) for each in lists]}"
        )
    numbers, counts, period = list[list[float]](), list[list[int]](), 1
    for decimation, tau, scale1, scale2 in zip(*map(list, lists), strict=True):
        period *= decimation
        steps = float(tau) * fs / period
        taps, iterations = _smoothing(float(scale1), float(scale2), steps)
        mix = agc["agc_mix_coeff"] / steps if numbers else 0.0
        numbers.append([1.0 - math.exp(-1.0 / steps), *taps, mix])
        counts.append([decimation, period, iterations])
    return np.array(numbers), np.array(counts), agc["stage_gain"]


def _smoothing(scale1: float, scale2: float, steps: float) -> tuple[list[float], int]:
    """Return the five taps of the smoothing over channels, and how often to apply them.

    In `steps` updates, the smoothing has the mean and the variance of both scales.
    """
    mean, variance = (scale2 - scale1) / steps, (scale1**2 + scale2**2) / steps
    for taps, iterations in ((3, 1), *((5, n) for n in range(1, _MOST_ITERATIONS + 1))):
        m, square = mean / iterations, variance / iterations + (mean / iterations) ** 2
        spread, shift = (square, m) if taps == 3 else (0.4 * square, 2.0 * m / 3.0)
        low, high = (spread - shift) / 2.0, (spread + shift) / 2.0
        middle = 1.0 - low - high
        if taps == 3 and middle >= 0.25:
            return [0.0, low, middle, high, 0.0], 1
        if taps == 5 and middle >= 0.15:
            return [low / 2.0, low / 2.0, middle, high / 2.0, high / 2.0], iterations
    raise ParameterError(
        f"the gain control's smoothing over channels needs more than {_MOST_ITERATIONS} passes; "
        "raise fs or time_constants, or lower agc1_scales and agc2_scales"
    )
