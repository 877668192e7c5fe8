"""Programme loudness and true peak of a recording, in LUFS, LU and dBTP.

ITU-R BS.1770-5, Annexes 1 and 2; EBU R 128; EBU Tech 3341 (momentary and short-term loudness) and
Tech 3342 (loudness range). The K-weighting at other rates than 48 kHz is designed from the analogue
filters, with the gain that the high-pass has at 48 kHz. Programs that leave this gain out read
0.004 LU more at 44.1 kHz and 0.09 LU more at 16 kHz. For loudness in sone take `Moore2016`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from amtcore.arguments import SAMPLING_RATE, Number, Numbers, Text, checked_arguments
from amtcore.errors import ParameterError, ShapeError
from amtcore.filter_design import state_variable_rows
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.fir import FIR
from amtcore.kernels.operations.sections import STATE_VARIABLE
from amtcore.kernels.operators import operator, run_ops
from amtcore.kernels.torch_state import can_run, rows_of
from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.simd import LANES, fma, vabs, vload, vmax, vsplat, vstore
from amtcore.kernels.vector.threads import parallel_for
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal
from amtcore.stages.stage import check_floating
from amtcore.tables import load_table

#: Annex 1, Table 1 as an analogue filter: frequency in Hz, gain in dB, Q, exponent of its band.
SHELF_HZ, SHELF_DB, SHELF_Q, SHELF_EXPONENT = (
    1681.974450955533, 3.999843853973347, 0.7071752369554196, 0.4996667741545416
)  # fmt: skip
#: Annex 1, Table 2: frequency in Hz and Q. The table's numerator is [1, -2, 1] at 48 kHz.
HIGHPASS_HZ, HIGHPASS_Q, TABLE_FS = 38.13547087602444, 0.5003270373238773, 48000.0
#: Annex 1, Table 4: weight of each channel's power.
LAYOUTS = {
    "mono": {"M": 1.0},
    "stereo": {"L": 1.0, "R": 1.0},
    "5.0": {"L": 1.0, "R": 1.0, "C": 1.0, "Ls": 1.41, "Rs": 1.41},
    "5.1": {"L": 1.0, "R": 1.0, "C": 1.0, "LFE": 0.0, "Ls": 1.41, "Rs": 1.41},
}
#: Loudness of a weighted mean power of 1 in LUFS.
OFFSET_LUFS = -0.691
#: Steps between blocks per second, and steps of a block.
STEPS_PER_S, STEPS = 10, {"momentary": 4, "short_term": 30}
#: Power of the absolute gate, -70 LUFS; relative gates of integrated loudness and of its range.
ABSOLUTE_GATE, RELATIVE_GATE, RANGE_GATE = 10.0 ** ((-70.0 - OFFSET_LUFS) / 10.0), 0.1, 0.01
#: Percentiles of the loudness range.
RANGE_PERCENT = (10, 95)
#: The true peak is measured at 4 times a rate below the first of these, 2 times below the second.
OVERSAMPLED_BELOW_HZ = (96000.0, 192000.0)
#: Seconds that `outputs` computes at a time, which limits memory.
PIECE_S = 30
#: Least level that a job stores, in LUFS and dBTP: digital silence has minus infinity.
LEAST_LEVEL = -120.0

_fir = operator(FIR)


@kernel
def filter_row(x: Any, coef: Any, state: Any, power: int, y: Any) -> None:
    """Run two state-variable sections over one row in float64; y is a power, 1 or 2, of the result.

    The recurrence of `operations.sections`, with the integrators' updates multiplied out. The chain
    of STATE_VARIABLE computes 32 rows at a time, and takes 15 times as long for one row.
    """
    p1, p2, p3, p_in, p_band, p_low = coef[0]
    q1, q2, q3, q_in, q_band, q_low = coef[1]
    i1, i2, j1, j2 = state
    for t in range(x.shape[0]):
        value = float(x[t])
        v = value - i2
        band, low = p1 * i1 + p2 * v, i2 + p2 * i1 + p3 * v
        i2 = (i2 + 2.0 * p2 * i1) + 2.0 * p3 * v
        i1 = (2.0 * p1 - 1.0) * i1 + 2.0 * p2 * v
        value = p_in * value + p_band * band + p_low * low
        v = value - j2
        band, low = q1 * j1 + q2 * v, j2 + q2 * j1 + q3 * v
        j2 = (j2 + 2.0 * q2 * j1) + 2.0 * q3 * v
        j1 = (2.0 * q1 - 1.0) * j1 + 2.0 * q2 * v
        value = q_in * value + q_band * band + q_low * low
        y[t] = value * value if power == 2 else value
    state[0], state[1], state[2], state[3] = i1, i2, j1, j2


@kernel
def find_peak(x: Any, taps: Any, peak: Any) -> None:
    """Raise `peak` (LANES) to the largest magnitudes of all phases, in whole vectors of outputs.

    Output n is the sum over k of taps[phase, k] x[n + K - 1 - k] with K taps.
    """
    order, best = taps.shape[1] - 1, vload(peak, 0)
    for n in range(0, x.shape[0] - order - LANES + 1, LANES):
        for phase in range(taps.shape[0]):
            total = vsplat(x, 0.0)
            for k in range(order + 1):
                total = fma(vsplat(x, taps[phase, k]), vload(x, n + order - k), total)
            best = vmax(best, vabs(total))
    vstore(peak, 0, best)


class LoudnessState(NamedTuple):
    """State between chunks."""

    filters: Tensor  #: States of the K-weighting (.., channel, 4).
    squares: Tensor  #: Squares of weighted samples of an incomplete step (.., channel, time).
    steps: Tensor  #: Sums of the squares of the last whole steps (.., channel, step).
    whole: int  #: Whole steps so far.
    received: int  #: Samples so far.
    waiting: Tensor  #: Samples that the next true-peak outputs need (.., channel, time).
    peaks: Tensor  #: Largest magnitude so far (.., channel).


def loudness(power: Tensor) -> Tensor:
    """Return the loudness in LUFS of a weighted mean power; minus infinity for 0."""
    sounding = power > 0
    level = OFFSET_LUFS + 10.0 * torch.log10(torch.where(sounding, power, 1.0))
    return torch.where(sounding, level, -math.inf)


def gated_mean(power: Tensor, gate: Tensor) -> Tensor:
    """Return the mean (.., 1) of the blocks that pass a gate; 0 if no block passes."""
    total = torch.where(gate, power, 0.0).sum(-1, keepdim=True)
    return total / gate.sum(-1, keepdim=True).clamp(min=1)


def integrated_loudness(power: Tensor) -> Tensor:
    """Return the gated loudness (.., 1) in LUFS of momentary blocks (.., block)."""
    gate = power > ABSOLUTE_GATE
    gate = gate & (power > RELATIVE_GATE * gated_mean(power, gate))
    return loudness(gated_mean(power, gate))


def loudness_range(power: Tensor) -> Tensor:
    """Return the loudness range (.., 1) in LU of short-term blocks; NaN without a block."""
    gate = power >= ABSOLUTE_GATE
    gate = gate & (power >= RANGE_GATE * gated_mean(power, gate))
    count = gate.sum(-1, keepdim=True)
    ordered = torch.where(gate, loudness(power), math.inf).sort(-1).values
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=math.inf)
    places = [(percent * (count - 1) + 50) // 100 for percent in RANGE_PERCENT]
    low, high = (ordered.gather(-1, place.clamp(min=0)) for place in places)
    return torch.where(count > 0, high - low, math.nan)


def k_weighting_rows(fs: float) -> Tensor:
    """Return the shelf and the high-pass (2, 6) in state-variable form.

    The shelf is (Vh s^2 + Vb k s + 1) / (s^2 + k s + 1) with k = 1/Q. The high-pass is
    G s^2 / (s^2 + k s + 1). G is the denominator 1 + k g + g^2 with g = tan(pi f / 48 kHz), which
    makes the numerator at 48 kHz [1, -2, 1].
    """
    shelf_k, high_k = 1.0 / SHELF_Q, 1.0 / HIGHPASS_Q
    high = 10.0 ** (SHELF_DB / 20.0)
    band = high**SHELF_EXPONENT
    g = math.tan(math.pi * HIGHPASS_HZ / TABLE_FS)
    gain = 1.0 + high_k * g + g * g
    rows = [
        (SHELF_HZ, shelf_k, high, shelf_k * (band - high), 1.0 - high),
        (HIGHPASS_HZ, high_k, gain, -high_k * gain, -gain),
    ]
    hz, *columns = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    return state_variable_rows(torch.tan(math.pi * hz / fs), *columns)


def _layout(name: str, value: Any) -> str | tuple[float, ...]:
    """Return the name of a layout, or weights."""
    if isinstance(value, str):
        return Text(LAYOUTS)(name, value)
    weights = Numbers(Number(least=0.0, most=10.0), single=False)(name, value)
    return tuple(weights.tolist())


class ProgrammeLoudness(FrameModule):
    """Momentary, short-term and integrated loudness, loudness range, and true peak.

    A clip of one channel is the first channel of the layout, the others are silent: mono is never
    counted twice. Blocks begin every 100 ms, at sample floor(block fs / 10); only whole blocks
    count. Filters and powers are float64, whatever `dtype` is.

    Args:
        fs: Sampling rate in Hz, a multiple of 5 from 8000 on. At low rates the bilinear transform
            bends the shelf: 1 kHz reads 0.05 LU low at 16 kHz, and 0.2 LU low at 8 kHz.
        layout: Channels in their order: "mono", "stereo" (L R), "5.0" (L R C Ls Rs), "5.1" (L R C
            LFE Ls Rs), or a weight of each channel's power.
        lra_pad: Seconds of silence that the loudness range appends to a clip.
        dtype: torch.float32 or torch.float64, the type of the outputs and of the true-peak filter.

    Shape:
        (time,), (.., channel, time), or with one channel (.., time), digital with full scale 1.
        momentary: (.., floor((time - 0.4 fs) / (0.1 fs)) + 1, 1), LUFS. Blocks of 0.4 s.
        short_term: (.., floor((time - 3 fs) / (0.1 fs)) + 1, 1), LUFS. Blocks of 3 s.
        integrated: (.., 1, 1), LUFS. Minus infinity if no block passes the gates.
        lra: (.., 1, 1), LU. NaN if no short-term block is as loud as -70 LUFS.
        true_peak: (.., 1, channel), dBTP. Minus infinity for a silent channel.

    Invariants:
        A gain of g dB changes all levels by g, and the loudness range not at all, unless a block
        crosses -70 LUFS. Gradients exist; they do not see that a block may cross a gate.

    Raises:
        NonFiniteError: NaN or infinity in a signal.

    >>> meter = ProgrammeLoudness(fs=48000, dtype=torch.float64)
    >>> tone = torch.sin(2 * torch.pi * 997 / 48000 * torch.arange(48000, dtype=torch.float64))
    >>> {name: round(float(values[..., -1, 0]), 1) for name, values in meter(tone).items()
    ...  if name in ("momentary", "integrated", "true_peak")}
    {'momentary': -3.0, 'integrated': -3.0, 'true_peak': 0.0}
    """

    input_unit = "digital"
    weights: Tensor
    sections: Tensor
    phases: Tensor

    @checked_arguments(
        fs=replace(SAMPLING_RATE, least=8000.0),
        layout=_layout,
        lra_pad=Number(" s", least=0.0, most=60.0),
    )
    def __init__(
        self,
        fs: float,
        layout: str | tuple[float, ...] = "mono",
        lra_pad: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if fs % 5:
            raise ParameterError(f"fs must be a multiple of 5 Hz, got {fs!r}: resample the signal")
        self.fs, self.layout, self.lra_pad, self.dtype = float(fs), layout, lra_pad, dtype
        weights = LAYOUTS[layout] if isinstance(layout, str) else dict(enumerate(layout, 1))
        columns = tuple(map(str, weights))
        self.input_channels = (1,) if len(weights) == 1 else (1, len(weights))
        self._step = Fraction(str(self.fs)) / STEPS_PER_S
        self.register_buffer("weights", torch.tensor([*weights.values()], dtype=torch.float64))
        self.register_buffer("sections", k_weighting_rows(self.fs))
        table = np.array([*load_table("bs1770_true_peak").values()])
        doublings = sum(self.fs < limit for limit in OVERSAMPLED_BELOW_HZ)
        taps = torch.from_numpy(table[:: 4 // 2**doublings][: 2**doublings * (doublings > 0)])
        self.register_buffer("phases", taps.to(dtype))
        ragged = Fraction(self._step.denominator - 1, self._step.denominator)
        self.grids = {
            name: FrameGrid(1, self._step, steps * self._step - ragged, least=LEAST_LEVEL)
            for name, steps in STEPS.items()
        } | {
            "integrated": FrameGrid(1, None, columns=("integrated",), least=LEAST_LEVEL),
            "lra": FrameGrid(1, None, columns=("lra",), least=0.0),
            "true_peak": FrameGrid(len(columns), None, columns=columns, least=LEAST_LEVEL),
        }

    def extra_repr(self) -> str:
        """Return the text of `print(meter)`."""
        return f"fs={self.fs:g}, layout={self.layout!r}, lra_pad={self.lra_pad:g}, {self.dtype}"

    def _channels(self, signal: Tensor) -> Tensor:
        """Return a signal (.., channel, time) in the working type."""
        signal = finite_signal(signal, self.dtype)
        channels = len(self.weights)
        x = signal.unsqueeze(-2) if channels == 1 or signal.ndim == 1 else signal
        if x.shape[-2] not in self.input_channels:
            raise ShapeError(
                f"expected (.., channel, time) with 1 or {channels} channels of the layout "
                f"{self.layout!r}, got {tuple(signal.shape)}"
            )
        return x

    def k_weighted(self, signal: Tensor) -> Tensor:
        """Return the K-weighted signal in float64: (.., time) -> (.., channel, time)."""
        x = self._channels(signal)
        return self._weighted(x, self._rest(x).filters, 1)[0]

    def _weighted(self, x: Tensor, state: Tensor, power: int) -> tuple[Tensor, Tensor]:
        """Filter (.., time); return a power of the result, 1 or 2, and the next state (.., 4)."""
        if can_run(x) and can_run(state):
            y, after = torch.empty(x.shape, dtype=torch.float64), state.clone()
            tensors = rows_of(x.detach()).contiguous(), self.sections, rows_of(after), rows_of(y)
            rows, coef, states, made = (each.numpy() for each in tensors)
            parallel_for(lambda i: filter_row(rows[i], coef, states[i], power, made[i]), len(rows))
            return y, after
        signals, before = rows_of(x).double(), rows_of(state)
        by_row = self.sections.unsqueeze(1).expand(-1, len(signals), -1)
        ops = [ChainStep(STATE_VARIABLE, 0, each, before[:, :2]) for each in by_row]
        y, after = run_ops(signals.unsqueeze(0), ops, before.unsqueeze(0))
        return y.view(x.shape) ** power, after.view(state.shape)

    def _stepped(self, x: Tensor, state: LoudnessState) -> LoudnessState:
        """Return the state with the steps that the next samples (.., channel, time) complete."""
        squares, filters = self._weighted(x, state.filters, 2)
        if state.squares.shape[-1]:
            squares = torch.cat((state.squares, squares), -1)
        least, begin = int(self._step), int(state.whole * self._step)
        received = begin + squares.shape[-1]
        whole = -(-(received + 1) // self._step) - 1
        edges = [int(step * self._step) - begin for step in range(state.whole, whole + 1)]
        if self._step.denominator == 1:
            sums = squares[..., : edges[-1]].unflatten(-1, (len(edges) - 1, least)).sum(-1)
        else:  # a step may have a sample more than the step before
            ends = torch.tensor(edges, device=squares.device)
            places = ends[:-1, None] + torch.arange(least, device=squares.device)
            sums = squares.index_select(-1, places.flatten()).unflatten(-1, places.shape).sum(-1)
            sums = torch.where(ends.diff() > least, sums + squares[..., ends[1:] - 1], sums)
        steps, squares = torch.cat((state.steps, sums), -1), squares[..., edges[-1] :].clone()
        return LoudnessState(filters, squares, steps, whole, received, state.waiting, state.peaks)

    def _powers(self, state: LoudnessState, name: str, before: int) -> Tensor:
        """Return the weighted mean power (.., block) of blocks since `before` samples."""
        n_frames, count, steps = self.grids[name].n_frames, STEPS[name], state.steps
        blocks = n_frames(state.received) - n_frames(before)
        total, size, at = steps.new_zeros(*steps.shape[:-1], blocks), 1, 0
        level = steps[..., max(steps.shape[-1] - blocks - count + 1, 0) :]
        while size <= count:  # `level` is the sum of `size` steps
            if count & size:
                total, at = total + level[..., at : at + blocks], at + size
            level, size = level[..., :-size] + level[..., size:], 2 * size
        power, channels = total.new_zeros(()), (total / int(count * self._step)).unbind(-2)
        for weight, channel in zip(self.weights, channels, strict=False):
            power = power + weight * channel
        return power

    def _peaked(self, x: Tensor, state: LoudnessState, last: bool) -> LoudnessState:
        """Return the state with the peaks of the next samples (.., channel, time)."""
        order = self.phases.shape[1] - 1
        after = x.new_zeros(*x.shape[:-1], order + LANES if last else 0)
        window = torch.cat((state.waiting, x, after), -1)
        ready = max(window.shape[-1] - order, 0) // LANES * LANES
        peaks = torch.stack((state.peaks, window.amax(-1), -window.amin(-1))).amax(0)
        if can_run(peaks):
            lanes = peaks.unsqueeze(-1).repeat_interleave(LANES, -1)
            rows, taps, best = (t.numpy() for t in (rows_of(window), self.phases, rows_of(lanes)))
            parallel_for(lambda i: find_peak(rows[i], taps, best[i]), len(rows))
            peaks = lanes.amax(-1)
        elif ready:
            between = [_fir(window, taps, 1, 0, ready).abs().amax(-1) for taps in self.phases]
            peaks = torch.stack([peaks, *between]).amax(0)
        return state._replace(waiting=window[..., ready:].clone(), peaks=peaks)

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        """Return outputs of whole signals, see the class."""
        check_floating(signal, "(.., time)", 1)
        state, parts, pieces = None, [], signal.split(round(PIECE_S * self.fs), -1)
        for i, piece in enumerate(pieces):
            part, state = self.stream(piece, state, i + 1 == len(pieces), names)
            parts.append(part)
        return {name: torch.cat([part[name] for part in parts], -2) for name in parts[0]}

    def stream(
        self,
        chunk: Tensor,
        state: LoudnessState | None = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, LoudnessState]:
        """Return the next frames; outputs of one row a clip come with `last`.

        The state of integrated loudness and loudness range grows by 80 bytes a second and channel.
        """
        names, x = self.wanted(names), self._channels(chunk)
        before = state or self._rest(x)
        state = before._replace(received=before.received + x.shape[-1])
        made = {k: x.new_zeros(*x.shape[:-2], 0, self.grids[k].width) for k in names}
        if "true_peak" in names:
            state = self._peaked(x, state, last)
        if {*names} - {"true_peak"}:
            state = self._stepped(x, state)
        for name in STEPS.keys() & {*names}:
            made[name] = loudness(self._powers(state, name, before.received)).unsqueeze(-1)
        if last and state.received:
            made |= self._of_clip(x, state, names)
        if not {"integrated", "lra"} & {*names}:  # later blocks need the last steps alone
            state = state._replace(steps=state.steps[..., 1 - STEPS["short_term"] :])
        return {name: made[name].to(self.dtype) for name in names}, state

    def _of_clip(self, x: Tensor, state: LoudnessState, names: tuple[str, ...]) -> Outputs:
        """Return the outputs (.., 1, column) of a whole clip."""
        made: Outputs = {}
        if "integrated" in names:
            made["integrated"] = integrated_loudness(self._powers(state, "momentary", 0))
        if "lra" in names:
            silence = x.new_zeros(*x.shape[:-1], round(self.lra_pad * self.fs))
            padded = self._stepped(silence, state)
            made["lra"] = loudness_range(self._powers(padded, "short_term", 0))
        if "true_peak" in names:
            absent = len(self.weights) - x.shape[-2]
            power = torch.nn.functional.pad(state.peaks.double(), (0, absent)).square()
            made["true_peak"] = loudness(power) - OFFSET_LUFS
        return {name: values.unsqueeze(-2) for name, values in made.items()}

    def _rest(self, x: Tensor) -> LoudnessState:
        """Return the state before the first sample."""
        axes, order = x.shape[:-1], self.phases.shape[1] - 1
        filters, none = (x.new_zeros(*axes, n, dtype=torch.float64) for n in (4, 0))
        waiting, peaks = x.new_zeros(*axes, order), x.new_zeros(axes)
        return LoudnessState(filters, none, none, 0, 0, waiting, peaks)
