"""Zwicker's loudness, ISO 532-1:2017, stationary and over time.

28 third-octave levels become 20 critical bands of core loudness. Slopes over the Bark scale add
masking, and the area below them is the loudness. Over time the core loudness decays nonlinearly,
and two low-passes smooth the loudness. The filters run in float64 in any working type.

Loudness is not rounded. Levels above 120 dB up to 250 Hz lie outside the standard, and take the
corrections of the last range. For two ears, or partly masked sounds, take `Moore2016`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from amtcore.arguments import Number, Text, checked_arguments
from amtcore.errors import ShapeError
from amtcore.filter_design import section_rows
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.compression import SQUARE
from amtcore.kernels.operations.sections import FIRST_ORDER, STATE_VARIABLE
from amtcore.kernels.operations.zwicker import (
    BAND_STATES,
    BANDS,
    BEFORE,
    DECAY,
    DECAY_STATES,
    GRID_POINTS,
    NUMERATOR,
    SLOPES,
    STRIDE,
)
from amtcore.kernels.operators import operator, rest_state, run_ops
from amtcore.kernels.torch_state import rows_of, wants_derivative
from amtcore.kernels.vector.simd import LANES
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal
from amtcore.models.sharpness import WEIGHTINGS, divided, weights
from amtcore.stages.fir import Resampler
from amtcore.stages.stage import product
from amtcore.tables import load_table

FS = 48000
#: Intensity at 0 dB, and the floor of all intensities, in Pa^2.
REFERENCE_PA2, FLOOR_PA2 = 4e-10, 1e-12
#: Frames of core loudness in one output frame, in a block, and in a product with `smoothing`.
PER_FRAME, BLOCK_FRAMES, SMOOTH_FRAMES = 4, 3840, 480
#: Time constants of the decay and of the loudness, and weights of the latter.
SHORT_S, LONG_S, VARIABLE_S = 0.005, 0.015, 0.075
SMOOTHING_S, SMOOTHING_WEIGHTS = (0.0035, 0.07), (0.47, 0.53)
#: Bands whose levels are corrected, and the bands of the three lowest critical bands.
LOW_BANDS, LOWEST = 11, ((0, 6), (6, 9), (9, 11))
#: Levels this close count as equal, since two powers of 10 differ by rounding.
EQUAL = 1.0 + 1e-12
HIGHEST = 1e12  # 120 dB
#: State of a band that holds the sum of squares of a stationary signal.
SUM_ROW = 6
SHARES = {"n1": 0.99, "n5": 0.95, "n10": 0.9, "n50": 0.5}

_bands, _decay, _slopes = operator(BANDS), operator(DECAY), operator(SLOPES)


@dataclass(frozen=True)
class ZwickerState:
    """Progress of a stream; tensors have the signals on their first axis.

    Args:
        resampled: State of the resampler.
        waiting: Samples at 48 kHz that fill no block yet.
        bands: State of the filters.
        decay: State of the decay.
        smooth: State of the low-passes of the loudness.
        trace: Loudness so far, for the statistics of the clip.
    """

    resampled: Any
    waiting: Tensor
    bands: Any = None
    decay: Tensor | None = None
    smooth: Tensor | None = None
    trace: tuple[Tensor, ...] = ()


def loudness_level(sone: Tensor) -> Tensor:
    """Return the loudness level in phon of a loudness in sone.

    >>> loudness_level(torch.tensor([0.0, 1.0, 4.0]))
    tensor([ 3., 40., 60.])
    """
    above = 40.0 + 10.0 * torch.log2(sone.clamp(min=1.0))
    below = (40.0 * (sone.clamp(max=1.0) + 0.0005) ** 0.35).clamp(min=3.0)
    return torch.where(sone >= 1.0, above, below)


def _of_db(level_db: Tensor) -> Tensor:
    """Return the power of a level in dB."""
    return 10.0 ** (level_db / 10.0)


def _keep(tau_s: Tensor | tuple[float, ...]) -> Tensor:
    """Return the weight of the old value in low-passes with these time constants in s."""
    return torch.exp(-1.0 / (FS * torch.as_tensor(tau_s, dtype=torch.float64)))


def _decay_coefficients() -> Tensor:
    """Return B0 .. B5 of the decay: a circuit of two capacitors, solved over one sample."""
    p = (VARIABLE_S + LONG_S) / (VARIABLE_S * SHORT_S)
    root = math.sqrt(p * p / 4 - 1.0 / (SHORT_S * VARIABLE_S))
    l1, l2 = -p / 2 + root, -p / 2 - root
    e1, e2 = math.exp(l1 / FS), math.exp(l2 / FS)
    a1, a2, den = VARIABLE_S * l1 + 1, VARIABLE_S * l2 + 1, VARIABLE_S * (l1 - l2)
    rows = [e1 - e2, a2 * e1 - a1 * e2, a1 * e1 - a2 * e2, a1 * a2 * (e1 - e2)]
    slow = [math.exp(-1.0 / (FS * tau)) for tau in (LONG_S, VARIABLE_S)]
    return torch.tensor([row / den for row in rows] + slow, dtype=torch.float64)


def _smoothing() -> tuple[Tensor, Tensor]:
    """Return the low-passes of the loudness over SMOOTH_FRAMES frames as a matrix, and their start.

    First-order low-passes at 48 kHz smooth values that are interpolated linearly between frames at
    2 kHz. From frame to frame this is y = b0 n + z, z' = b1 n + p^24 y.
    Rows are the frames and the two z before
    it; columns are every fourth output, weighted and added, and the two z after it. The start is z
    before the first frame, as a factor of the first n: no ramp leads from 0 to it.
    """
    p, k = _keep(SMOOTHING_S).unsqueeze(1), torch.arange(1, STRIDE, dtype=torch.float64)
    weight, share = (1.0 - p) * p ** (STRIDE - k), k / STRIDE
    b0, b1 = 1.0 - p[:, 0] + weight @ share, weight @ (1.0 - share)
    inputs = torch.eye(SMOOTH_FRAMES + 2, dtype=torch.float64)
    z, columns = inputs[:, SMOOTH_FRAMES:], []
    for f in range(SMOOTH_FRAMES):
        y = inputs[:, f : f + 1] * b0 + z
        z = inputs[:, f : f + 1] * b1 + y * p[:, 0] ** STRIDE
        if f % PER_FRAME == 0:
            columns.append(y @ torch.tensor(SMOOTHING_WEIGHTS, dtype=torch.float64))
    return torch.cat((torch.stack(columns, 1), z), 1), -(weight @ share)


def _like(frames: Tensor, signal: Tensor) -> Tensor:
    """Return (signal, frame, column) with the first axes of a signal (.., time)."""
    return frames.reshape(*signal.shape[:-1], *frames.shape[1:])


class ZwickerLoudness(FrameModule):
    """Loudness and specific loudness of one signal.

    Outputs over time have a frame every 2 ms, the first at sample 0. A stream computes them in
    blocks of 1.92 s. With `method="stationary"` outputs are one row a clip, without `n_inst` and
    `statistics`.

    - `n`: Loudness in sone.
    - `n_spec`: Specific loudness in sone/Bark at 0.1, 0.2, .. 24 Bark.
    - `n_inst`: Loudness before its low-passes, in sone.
    - `level`: Loudness level in phon.
    - `sharpness`: Sharpness in acum, see `Sharpness`; a column for each weighting.
    - `statistics`: One row a clip: maximum of `n`, and `n` exceeded in 1, 5, 10, 50 % of frames.

    Args:
        fs: Sampling rate in Hz. Signals of other rates are resampled to 48 kHz; below 48 kHz the
            upper bands are missing.
        method: "time_varying" or "stationary".
        field: Sound field, "free" or "diffuse".
        skip: Seconds at the beginning of a stationary signal that its levels leave out, while the
            filters build up. A signal of up to twice this length is used as a whole.
        denominator: Loudness by which the sharpness is divided, "weighted" (`n`) or
            "instantaneous" (`n_inst`), without an overshoot at the onset of a sound.
        dtype: Working type of what follows the filters, torch.float32 or torch.float64.

    Shape:
        (.., time) in Pa -> (.., frame, column) of each output.

    Invariants:
        A 1 kHz tone of 40 dB has 1 sone and 40 phon. Chunks give the bits of the whole signal.

    Gradients exist with respect to the signal, except where a level crosses a limit of a table.
    They run in plain loops, which take about 1000 times as long.

    >>> model = ZwickerLoudness()
    >>> model(torch.zeros(4800))["n_spec"].shape
    torch.Size([50, 240])
    """

    shown = "fs method field skip"
    memory_s = 0.1
    band_coef: Tensor
    band_sections: Tensor
    band_low_pass: Tensor
    band_power: Tensor
    smoothed_power: Tensor
    sharpness: Tensor
    edges: Tensor
    slope_limits: Tensor
    slopes: Tensor
    range_limit: Tensor
    range_gain: Tensor
    quiet: Tensor
    excess: Tensor
    scale: Tensor
    decay_coef: Tensor
    smoothing: Tensor
    smoothing_start: Tensor

    @checked_arguments(
        method=Text(("time_varying", "stationary")),
        field=Text(("free", "diffuse")),
        skip=Number(" s", least=0.0, most=60.0),
        denominator=Text(("weighted", "instantaneous")),
    )
    def __init__(
        self,
        fs: float = FS,
        method: Literal["time_varying", "stationary"] = "time_varying",
        field: Literal["free", "diffuse"] = "free",
        skip: float = 0.2,
        denominator: Literal["weighted", "instantaneous"] = "weighted",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.method, self.field, self.skip, self.dtype = fs, method, field, skip, dtype
        self.denominator = denominator
        self.can_stream = method == "time_varying"
        self.whole_clips_reason = "" if self.can_stream else "a stationary level is a mean"
        self.resampler = None if fs == FS else Resampler(fs, FS, torch.float64)
        clip = FrameGrid(1, None, min_samples=math.ceil(fs / FS))
        step = Fraction(str(float(fs))) / FS
        over_time = FrameGrid(1, step * STRIDE * PER_FRAME, window_length=step)
        grid = over_time if self.can_stream else clip
        spectrum = replace(grid, width=GRID_POINTS)
        sharpness = replace(grid, width=len(WEIGHTINGS), columns=WEIGHTINGS)
        self.grids = {"n": grid, "n_spec": spectrum, "level": grid, "sharpness": sharpness}
        if self.can_stream:
            columns = "n_max", *SHARES
            statistics = replace(clip, width=len(columns), columns=columns)
            self.grids |= {"n_inst": grid, "statistics": statistics}
        for name, value in self._tables().items():
            self.register_buffer(name, value)

    def _tables(self) -> dict[str, Tensor]:
        """Return the constants by name: filters and slopes in float64, others as powers."""
        table = {k: torch.tensor(v) for k, v in load_table("zwicker_iso532_1").items()}
        a = table["section_a"] - pad(table["band_a_difference"], (1, 0))  # (band, section, 3)
        exact_hz = 1000.0 * 10.0 ** ((torch.arange(len(a)).double() - 16) / 10)
        tau_s = 2.0 / (3.0 * exact_hz.clamp(max=1000.0))
        keep = _keep(tau_s).unsqueeze(0)
        smooth = [keep] * 3
        if self.method == "stationary":  # the first filter adds the squares
            smooth = [torch.ones_like(keep), 0.0 * keep, 0.0 * keep]
        poles = a[..., 1:].flatten(1).T  # a1, a2 of each section
        sections = section_rows(table["section_b"].unsqueeze(1), a.transpose(0, 1))
        corrections = table["range_correction_db"]
        offset_db = table["ear_db"] - (table["diffuse_db"] if self.field == "diffuse" else 0.0)
        quiet_db, bandwidth_db = table["threshold_db"], table["bandwidth_db"]
        ranges = (table["range_level_db"][:, None] - corrections)[:-1]
        smoothing, start = _smoothing()
        power = {
            "range_limit": _of_db(ranges).T.contiguous() * EQUAL,
            "range_gain": _of_db(corrections).T.contiguous(),
            "quiet": _of_db(quiet_db + offset_db).unsqueeze(-1) * EQUAL,
            "excess": 0.25 * _of_db(-(quiet_db + offset_db + bandwidth_db)).unsqueeze(-1),
            "scale": (0.0635 * 10.0 ** (0.025 * quiet_db)).unsqueeze(-1),
            "decay_coef": _decay_coefficients(),
            "smoothing": smoothing,
            "smoothing_start": start,
        }
        return {
            "band_coef": pad(torch.cat((poles, *smooth)), (0, LANES - len(a))),
            "band_sections": sections,
            "band_low_pass": torch.stack((1.0 - keep[0], 0 * keep[0], -keep[0]), 1),
            "band_power": table["band_gain"].square(),
            "smoothed_power": table["band_gain"].square() * (1.0 - keep[0]) ** 3,
            "sharpness": torch.stack([weights(each) for each in WEIGHTINGS], 1).to(self.dtype),
            "edges": table["edge_bark"],
            "slope_limits": table["slope_limit_sone_per_bark"],
            "slopes": table["slope_sone_per_bark2"],
            **{name: value.to(self.dtype) for name, value in power.items()},
        }

    # --- stages ---

    def band_powers(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return smoothed powers of the bands in Pa^2, (signal, frame, 28), every 24th sample.

        Args:
            x: (signal, time), float64 at 48 kHz.
            state: State after the previous samples; None is the start.
        """
        if wants_derivative(x):
            powers, after = run_ops(x.unsqueeze(1), *self._chain(x, state))
            return powers[..., ::STRIDE].transpose(1, 2) * self.band_power, after
        if state is None:
            state = x.new_zeros(len(x), NUMERATOR), x.new_zeros(len(x), BAND_STATES, LANES)
        x = torch.cat((state[0], x), 1)
        powers, filters = _bands(x, self.band_coef, state[1])
        bands = len(self.band_power)
        return powers[..., :bands] * self.smoothed_power, (x[:, -NUMERATOR:], filters)

    def _chain(self, x: Tensor, state: Tensor | None) -> tuple[list[ChainStep], Tensor]:
        """Return the bands as operations with gradients, and their state; slower."""
        bands = len(self.band_power)
        none, one = x.new_zeros(bands, 0), x.new_ones(bands, 1)
        ops = [ChainStep(STATE_VARIABLE, 0, c, x.new_zeros(bands, 2)) for c in self.band_sections]
        ops.append(ChainStep(SQUARE, 0, one, none))
        if self.method != "stationary":
            ops += [ChainStep(FIRST_ORDER, 0, self.band_low_pass, x.new_zeros(bands, 1))] * 3
        return ops, rest_state(ops, len(x)) if state is None else state

    def band_levels(self, powers: Tensor) -> Tensor:
        """Return levels in dB of powers in Pa^2, of the same shape."""
        return 10.0 * torch.log10((powers + FLOOR_PA2) / REFERENCE_PA2)

    def core_loudness(self, intensity: Tensor) -> Tensor:
        """Return core loudness (.., 21) in sone/Bark of intensities (.., 28), 1 at 0 dB (A.3)."""
        # Rows of frames: short rows of bands would take three times as long.
        rows = intensity.reshape(-1, intensity.shape[-1]).T.contiguous()
        low = rows[:LOW_BANDS]
        if low.device.type == "cpu" and bool((low > HIGHEST).any()):
            warnings.warn("levels above 120 dB up to 250 Hz are outside ISO 532-1", stacklevel=2)
        low = low * self.range_gain.gather(1, torch.searchsorted(self.range_limit, low))
        critical = torch.cat(
            (*(low[a:b].sum(0, keepdim=True) for a, b in LOWEST), rows[LOW_BANDS:])
        )
        core = self.scale * ((0.75 + self.excess * critical).sqrt().sqrt() - 1.0).clamp(min=0.0)
        core = torch.where(critical > self.quiet, core, 0.0)
        first = core[:1] * (0.4 + 0.32 * core[:1].clamp(min=1e-30) ** 0.2).clamp(max=1.0)
        core = torch.cat((first, core[1:], 0.0 * first)).T
        return core.reshape(*intensity.shape[:-1], core.shape[-1])

    def decayed(self, core: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the core loudness (signal, frame, 21) after its decay, and the state."""
        width = core.shape[-1]
        if state is None:
            state = core.new_zeros(len(core), DECAY_STATES, LANES)
            state[:, 0] = BEFORE
        core, state = _decay(pad(core, (0, LANES - width)), self.decay_coef, state)
        return core[..., :width], state

    def summed(self, core: Tensor, every: int = 1) -> tuple[Tensor, Tensor]:
        """Return loudness (.., frame), and specific loudness (.., frame / every, 240)."""
        rows = core.reshape(-1, core.shape[-1])
        n, specific = _slopes(rows, self.edges, self.slope_limits, self.slopes, every)
        return n.reshape(core.shape[:-1]), specific.reshape(
            *core.shape[:-2], -(-core.shape[-2] // every), GRID_POINTS
        )

    def smoothed(self, n: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return every fourth loudness of (signal, frame) after its low-passes, and the state."""
        state, parts = n[:, :1] * self.smoothing_start if state is None else state, []
        for part in n.split(SMOOTH_FRAMES, 1):
            rows = torch.cat((pad(part, (0, SMOOTH_FRAMES - part.shape[1])), state), 1)
            y = product(rows, self.smoothing)
            parts.append(y[:, : -(-part.shape[1] // PER_FRAME)])
            state = y[:, -2:]
        return torch.cat(parts, 1), state

    def of_levels(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stationary loudness of third-octave levels.

        Args:
            levels: (.., 28) in dB, 25 Hz to 12.5 kHz; -60 for an empty band.
        Returns:
            Loudness in sone (..), and specific loudness in sone/Bark (.., 240).
        """
        if levels.shape[-1:] != self.band_power.shape:
            raise ShapeError(f"expected 28 levels (.., 28) in dB, got {tuple(levels.shape)}")
        core = self.core_loudness(_of_db(levels.double()).to(self.dtype)).unsqueeze(-2)
        n, specific = self.summed(core)
        return n.squeeze(-1), specific.squeeze(-2)

    # --- signals ---

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        if self.can_stream:
            return super().outputs(signal, names)
        names, x = self.wanted(names), self._as_rows(signal)
        found = self._stationary(x if self.resampler is None else self.resampler(x), names)
        return {k: _like(found[k], signal) for k in names}

    def stream(
        self,
        chunk: Tensor,
        state: ZwickerState | None = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, ZwickerState]:
        if not self.can_stream:
            super().stream(chunk, state, last, names)
        names, x = self.wanted(names), self._as_rows(chunk)
        state = ZwickerState(None, x[:, :0]) if state is None else state
        if self.resampler is not None:
            x, resampled = self.resampler.stream(x, state.resampled, last)
            state = replace(state, resampled=resampled)
        found, state = self._over_time(x, state, last, names)
        return {k: _like(found[k], chunk) for k in names}, state

    def _as_rows(self, x: Tensor) -> Tensor:
        """Return a signal (.., time) as (signal, time) in float64."""
        finite_signal(x, self.dtype)
        return rows_of(x.to(torch.float64))

    def _over_time(
        self, x: Tensor, state: ZwickerState, last: bool, names: tuple[str, ...]
    ) -> tuple[Outputs, ZwickerState]:
        """Return the outputs of (signal, time); the grid of blocks is fixed, for equal bits."""
        x, size = torch.cat((state.waiting, x), -1), BLOCK_FRAMES * STRIDE
        ends = x.shape[-1] // size * size
        empty = x.new_zeros(len(x), 0, dtype=self.dtype)
        parts = [{k: empty.unsqueeze(-1).expand(-1, -1, self.grids[k].width) for k in names}]
        blocks = [x[:, at : at + size] for at in range(0, ends, size)]
        blocks += [x[:, ends:]] if last and x.shape[1] > ends else []
        for block in blocks:
            made, state = self._block(block, state, names)
            parts.append(made)
        found = {k: torch.cat([part[k] for part in parts], 1) for k in names if k != "statistics"}
        if "statistics" in names:
            trace = (*state.trace, *(part["n"].squeeze(-1) for part in parts[1:]))
            state = replace(state, trace=trace)
            found["statistics"] = self._statistics(torch.cat((empty, *trace), 1), last)
        return found, replace(state, waiting=x[:, ends:])

    def _block(
        self, x: Tensor, state: ZwickerState, names: tuple[str, ...]
    ) -> tuple[Outputs, ZwickerState]:
        """Return the frames of a block (signal, BLOCK_FRAMES * STRIDE or less), and the state."""
        powers, bands = self.band_powers(x, state.bands)
        core = self.core_loudness(((powers + FLOOR_PA2) / REFERENCE_PA2).to(self.dtype))
        core, decay = self.decayed(core, state.decay)
        has_spectra = "n_spec" in names or "sharpness" in names
        n_inst, specific = self.summed(core, PER_FRAME if has_spectra else BLOCK_FRAMES)
        n, smooth = self.smoothed(n_inst, state.smooth)
        made = self._named(n, n_inst[:, ::PER_FRAME], specific, names)
        return made, replace(state, bands=bands, decay=decay, smooth=smooth)

    def _named(
        self, n: Tensor, n_inst: Tensor, specific: Tensor, names: tuple[str, ...]
    ) -> Outputs:
        """Return frames of the outputs, (signal, frame, column)."""
        n, n_inst = n.unsqueeze(-1), n_inst.unsqueeze(-1)
        made = {"n": n, "n_spec": specific, "n_inst": n_inst}
        if "level" in names:
            made["level"] = loudness_level(n)
        if "sharpness" in names:
            own = n_inst if self.denominator == "instantaneous" else n
            totals = product(specific, self.sharpness).split(1, -1)
            columns = zip(totals, WEIGHTINGS, strict=True)
            made["sharpness"] = torch.cat([divided(total, own, w) for total, w in columns], -1)
        return made

    def _statistics(self, n: Tensor, last: bool) -> Tensor:
        """Return the statistics of (signal, frame) at the end, (signal, 1, statistic)."""
        if not last or not n.numel():
            return n.new_zeros(len(n), int(last and n.shape[1] > 0), 1 + len(SHARES))
        # `torch.quantile` takes 16 million numbers, which are nine hours.
        ordered = n.sort(1).values
        ranks = n.new_tensor(list(SHARES.values())) * (n.shape[1] - 1)
        below, above = (ordered[:, at.long()] for at in (ranks.floor(), ranks.ceil()))
        return torch.cat((ordered[:, -1:], below.lerp(above, ranks.frac())), 1).unsqueeze(1)

    def mean_powers(self, x: Tensor) -> Tensor:
        """Return the mean powers in Pa^2, (signal, 28), of (signal, time), float64 at 48 kHz."""
        skip = round(self.skip * FS)
        skip = skip if x.shape[-1] > 2 * skip else 0
        if wants_derivative(x):
            squares, _ = run_ops(x.unsqueeze(1), *self._chain(x, None))
            return squares[..., skip:].mean(-1) * self.band_power
        _, before = self.band_powers(x[:, :skip])
        before[1][:, SUM_ROW] = 0.0
        _, (_, after) = self.band_powers(x[:, skip:], before)
        sums = after[:, SUM_ROW, : len(self.band_power)]
        return sums * self.band_power / max(x.shape[-1] - skip, 1)

    def _stationary(self, x: Tensor, names: tuple[str, ...]) -> Outputs:
        """Return the stationary outputs of (signal, time)."""
        intensity = ((self.mean_powers(x) + FLOOR_PA2) / REFERENCE_PA2).to(self.dtype)
        n, specific = self.summed(self.core_loudness(intensity).unsqueeze(1))
        frames = min(x.shape[-1], 1)
        return self._named(n[:, :frames], n[:, :frames], specific[:, :frames], names)
