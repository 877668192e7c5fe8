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
from amtcore.kernels.vector.memory import aligned
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
#: Outputs of a clip that come from the blocks of an output.
SUMMARIES = {"momentary": "integrated", "short_term": "lra"}
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
    """Raise peak[0] to the largest magnitude of all phases, in whole vectors of outputs.

    Output n is the sum over k of taps[phase, k] x[n + K - 1 - k] with K taps.
    """
    order, best = taps.shape[1] - 1, vsplat(x, peak[0])
    for n in range(0, x.shape[0] - order - LANES + 1, LANES):
        for phase in range(taps.shape[0]):
            total = vsplat(x, 0.0)
            for k in range(order + 1):
                total = fma(vsplat(x, taps[phase, k]), vload(x, n + order - k), total)
            best = vmax(best, vabs(total))
    lanes = aligned(LANES, x)
    vstore(lanes, 0, best)
    for lane in range(LANES):
        peak[0] = max(peak[0], lanes[lane])


class LoudnessState(NamedTuple):
    """State between chunks; a row is a channel of a signal."""

    filters: Tensor  #: (row, 4) states of the K-weighting.
    squares: Tensor  #: (row, time) squares of weighted samples of an incomplete step.
    steps: Tensor  #: (row, step) sums of the squares of each step.
    first: int  #: Number of the first step in `steps`.
    blocks: tuple[int, int]  #: Momentary and short-term blocks that were returned.
    received: int  #: Samples so far.
    waiting: Tensor  #: (row, time) samples that the next true-peak outputs need.
    peaks: Tensor  #: (row,) largest magnitude so far.


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
            name: FrameGrid(1, self._step, self._start(steps) - ragged, least=LEAST_LEVEL)
            for name, steps in STEPS.items()
        }
        self.grids |= {
            "integrated": FrameGrid(1, None, columns=("integrated",), least=LEAST_LEVEL),
            "lra": FrameGrid(1, None, columns=("lra",), least=0.0),
            "true_peak": FrameGrid(len(columns), None, columns=columns, least=LEAST_LEVEL),
        }

    def extra_repr(self) -> str:
        """Return the text of `print(meter)`."""
        return f"fs={self.fs:g}, layout={self.layout!r}, lra_pad={self.lra_pad:g}, {self.dtype}"

    def _start(self, step: int) -> int:
        """Return the first sample of a step."""
        return step * self._step.numerator // self._step.denominator

    def _rows(self, signal: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return (row, time) in the working type, and the axes (.., channel) of the rows."""
        signal = finite_signal(signal, self.dtype)
        channels = len(self.weights)
        x = signal.unsqueeze(-2) if channels == 1 or signal.ndim == 1 else signal
        if x.shape[-2] not in self.input_channels:
            raise ShapeError(
                f"expected (.., channel, time) with 1 or {channels} channels of the layout "
                f"{self.layout!r}, got {tuple(signal.shape)}"
            )
        return rows_of(x), tuple(x.shape[:-1])

    def k_weighted(self, signal: Tensor) -> Tensor:
        """Return the K-weighted signal in float64: (.., time) -> (.., channel, time)."""
        rows, axes = self._rows(signal)
        return self._weighted(rows, self._rest(rows).filters, 1)[0].unflatten(0, axes)

    def _weighted(self, rows: Tensor, state: Tensor, power: int) -> tuple[Tensor, Tensor]:
        """Filter (row, time); return a power of the result, 1 or 2, and the next state (row, 4)."""
        if can_run(rows):
            y, state = torch.empty(rows.shape, dtype=torch.float64), state.clone()
            signals, coef = rows.detach().contiguous().numpy(), self.sections.numpy()
            states, made = state.numpy(), y.numpy()
            parallel_for(
                lambda i: filter_row(signals[i], coef, states[i], power, made[i]), len(signals)
            )
            return y, state
        by_row = self.sections.unsqueeze(1).expand(-1, len(rows), -1)
        ops = [ChainStep(STATE_VARIABLE, 0, each, state[:, :2]) for each in by_row]
        y, state = run_ops(rows.double().unsqueeze(0), ops, state.unsqueeze(0))
        return y[0] ** power, state[0]

    def _sum_steps(self, squares: Tensor, first: int, count: int) -> Tensor:
        """Sum the squares of steps, see `LoudnessState`; steps may differ by a sample."""
        least, starts = int(self._step), [self._start(first + i) for i in range(count + 1)]
        if self._step.denominator == 1:
            return squares[:, : count * least].unflatten(1, (count, least)).sum(-1)
        edges = torch.tensor(starts, device=squares.device) - starts[0]
        places = edges[:-1, None] + torch.arange(least, device=squares.device)
        sums = squares.index_select(1, places.flatten()).unflatten(1, places.shape).sum(-1)
        return torch.where(edges.diff() > least, sums + squares[:, edges[1:] - 1], sums)

    def _powers(
        self, state: LoudnessState, begin: int, end: int, count: int, axes: tuple[int, ...]
    ) -> Tensor:
        """Return the weighted mean power (.., block) of blocks begin..end-1 of `count` steps."""
        level, blocks = state.steps[:, begin - state.first :], end - begin
        total, size, at = level.new_zeros(len(level), blocks), 1, 0
        while size <= count:  # `level` is the sum of `size` steps
            if count & size:
                total, at = total + level[:, at : at + blocks], at + size
            level, size = level[:, :-size] + level[:, size:], 2 * size
        power = total.new_zeros(())
        channels = (total / self._start(count)).unflatten(0, axes).unbind(-2)
        for weight, channel in zip(self.weights, channels, strict=False):
            power = power + weight * channel
        return power

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
        names = self.wanted(names)
        rows, axes = self._rows(chunk)
        state = state or self._rest(rows)
        state = state._replace(received=state.received + rows.shape[-1])
        made: Outputs = {}
        if {*names} - {"true_peak"}:
            state, made = self._blocks(rows, axes, state, last, names)
        if "true_peak" in names:
            state, made["true_peak"] = self._true_peak(rows, axes, state, last)
        return {name: made[name].to(self.dtype) for name in names}, state

    def _rest(self, rows: Tensor) -> LoudnessState:
        """Return the state before the first sample."""
        none, filters = (rows.new_zeros(len(rows), n, dtype=torch.float64) for n in (0, 4))
        waiting = rows.new_zeros(len(rows), self.phases.shape[1] - 1)
        return LoudnessState(filters, none, none, 0, (0, 0), 0, waiting, rows.new_zeros(len(rows)))

    def _true_peak(
        self, rows: Tensor, axes: tuple[int, ...], state: LoudnessState, last: bool
    ) -> tuple[LoudnessState, Tensor]:
        """Return the state and the true peak (.., 1 or 0, channel) in dBTP."""
        order = self.phases.shape[1] - 1
        after = rows.new_zeros(len(rows), order + LANES if last else 0)
        window = torch.cat((state.waiting, rows, after), -1)
        ready = max(window.shape[-1] - order, 0) // LANES * LANES
        ends = [state.peaks, *((rows.amax(-1), -rows.amin(-1)) if rows.shape[-1] else ())]
        peaks = torch.stack(ends).amax(0)
        if can_run(rows):
            signals, taps, found = window.numpy(), self.phases.numpy(), peaks.numpy()
            parallel_for(lambda i: find_peak(signals[i], taps, found[i : i + 1]), len(signals))
        elif ready:
            between = [_fir(window, taps, 1, 0, ready).abs().amax(-1) for taps in self.phases]
            peaks = torch.stack([peaks, *between]).amax(0)
        by_channel = peaks.double().unflatten(0, axes).unsqueeze(-2)
        absent = len(self.weights) - axes[-1]
        power = torch.nn.functional.pad(by_channel, (0, absent)).square()
        frames = self.grids["true_peak"].n_frames(state.received) if last else 0
        state = state._replace(waiting=window[:, ready:].clone(), peaks=peaks)
        return state, (loudness(power) - OFFSET_LUFS)[..., :frames, :]

    def _blocks(
        self, rows: Tensor, axes: tuple[int, ...], state: LoudnessState, last: bool,
        names: tuple[str, ...],
    ) -> tuple[LoudnessState, Outputs]:  # fmt: skip
        """Return the state and the outputs that come from blocks."""
        silence = round(self.lra_pad * self.fs) if last and "lra" in names else 0
        rows = torch.nn.functional.pad(rows, (0, silence)) if silence else rows
        state = self._stepped(rows, state)
        made: Outputs = {name: rows.new_zeros(*axes[:-1], 0, 1) for name in names}
        ends = []
        for (name, of_clip), before in zip(SUMMARIES.items(), state.blocks, strict=True):
            grid, count = self.grids[name], STEPS[name]
            known = max(state.first + state.steps.shape[1] - count + 1, before)
            ends.append(grid.n_frames(state.received) if last else known)
            if name in names:
                power = self._powers(state, before, ends[-1], count, axes)
                made[name] = loudness(power).unsqueeze(-1)
            if last and state.received and of_clip in names:
                samples = state.received + (silence if of_clip == "lra" else 0)
                power = self._powers(state, 0, grid.n_frames(samples), count, axes)
                found = integrated_loudness if of_clip == "integrated" else loudness_range
                made[of_clip] = found(power).unsqueeze(-1)
        drop = 0 if {*names} & {*SUMMARIES.values()} else min(ends) - state.first
        state = state._replace(
            steps=state.steps[:, drop:], first=state.first + drop, blocks=(ends[0], ends[1])
        )
        return state, made

    def _stepped(self, rows: Tensor, state: LoudnessState) -> LoudnessState:
        """Return the state with the steps that the next samples (row, time) complete."""
        squares, filters = self._weighted(rows, state.filters, 2)
        if state.squares.shape[-1]:
            squares = torch.cat((state.squares, squares), -1)
        steps, done = state.steps, state.first + state.steps.shape[1]
        known = self._start(done) + squares.shape[-1]
        ready = -(-(known + 1) // self._step) - 1 - done
        if ready > 0:
            steps = torch.cat((steps, self._sum_steps(squares, done, ready)), 1)
            squares = squares[:, self._start(done + ready) - self._start(done) :]
        return state._replace(filters=filters, squares=squares.clone(), steps=steps)
