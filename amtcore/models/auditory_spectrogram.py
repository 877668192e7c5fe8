"""Auditory spectrogram: constant-Q filters, hair cell, lateral inhibition, leaky integration.

The early stage of the cortical model of Chi, Ru and Shamma (2005), J. Acoust. Soc. Am. 118(2),
887-906, after Yang, Wang and Shamma (1992), IEEE Trans. Inf. Theory 38(2), 824-839. The filters are
complex gammatones of order 4 with an ERB of fc/Q.

    Filter j -> max(y, 0), low-pass (0.5 ms) -> max(y_j - y_(j+1), 0) -> low-pass (8 ms) -> frames.

Both low-passes have gain 1 at 0 Hz. Other programs leave this gain out, so their values are
1/((1 - B)(1 - a)) times larger. Frames are computed in blocks of 16, so any cuts of a signal give
the same bits. A frame is the last value of the leaky integrator, so the integrator is a weighted
sum over each frame and a recurrence from frame to frame.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from amtcore.arguments import RATE, Number, Text, checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.one_pole import ONE_POLE_CASCADE
from amtcore.kernels.operations.sections import FIRST_ORDER
from amtcore.kernels.operators import rest_state, run_ops
from amtcore.kernels.torch_state import can_compute
from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.simd import LANES, fma, vload, vsplat, vsum, where_greater_or_nan
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal
from amtcore.stages.stage import product
from amtcore.units import DIGITAL

F0_HZ = 440.0 * 2.0 ** (-31 / 24)
HIGHEST = 0.46  # of fs: filters above are left out
ORDER, BANDWIDTH = 4, 1.0185916357881302  # ERB of a gammatone of order 4 over its b
FRAME_S, HAIR_CELL_S, INTEGRATION_S = 0.008, 0.0005, 0.008
HAIR_CELLS, COMPRESSIONS = ("halfwave", "linear"), ("none", "cuberoot")
BLOCK, CALL = 16, 16  # frames of a product, and products of a call of the kernel


class AuditorySpectrogram(FrameModule):
    """Spectrogram of an early auditory model, a frame every 8 ms.

    Args:
        fs: Sampling rate in Hz.
        f_min: Centre frequency of the lowest filter in Hz.
        channels_per_octave: Filters per octave.
        n_filters: Number of filters; filters above 0.46 fs are left out. One channel fewer is
            returned, and each channel has the centre frequency of its lower filter.
        q_erb: Centre frequency over equivalent rectangular bandwidth.
        hair_cell: "halfwave" rectifies and low-passes at 0.5 ms, "linear" does neither.
        compression: "none" or "cuberoot" of every value.
        dtype: torch.float32 or torch.float64.

    Shape:
        (batch, time) -> dict with `spectrogram` (batch, frame, channel), ceil(time / hop) frames;
        (time,) -> (frame, channel). Frame p holds the value at sample (p + 1) hop - 1, and the end
        of the signal is padded with zeros.

    Invariants:
        Values scale with the input. `stream` over any split equals the whole signal bit by bit.
        Gradients flow, but the cube root has none at 0.

    >>> AuditorySpectrogram(fs=16000)(torch.zeros(2, 1601))["spectrogram"].shape
    torch.Size([2, 13, 128])
    """

    input_unit = DIGITAL
    fc: Tensor
    gammatone: Tensor
    low_pass: Tensor
    integrator: Tensor
    leak: Tensor

    @checked_arguments(
        f_min=RATE,
        channels_per_octave=whole(1, 1000),
        n_filters=whole(2, 10_000),
        q_erb=Number(above=0.1, most=1000.0),
        hair_cell=Text(HAIR_CELLS),
        compression=Text(COMPRESSIONS),
    )
    def __init__(
        self,
        fs: float,
        f_min: float = F0_HZ,
        channels_per_octave: int = 24,
        n_filters: int = 129,
        q_erb: float = 4.0,
        hair_cell: str = "halfwave",
        compression: str = "none",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.dtype, self.hair_cell, self.compression = fs, dtype, hair_cell, compression
        self.channels_per_octave = channels_per_octave
        steps = torch.arange(n_filters, dtype=torch.float64) / channels_per_octave
        fc_hz = f_min * 2.0**steps
        fc_hz = fc_hz[fc_hz <= HIGHEST * fs]
        #: Samples between frames.
        self.hop_length = math.floor(FRAME_S * fs + 0.5)
        if len(fc_hz) < 2 or self.hop_length < 1:
            raise ParameterError(
                f"expected two filters or more below {HIGHEST} fs ({HIGHEST * fs:g} Hz), got "
                f"f_min {f_min:g} Hz; raise fs or lower f_min"
            )
        self._add_constants(fc_hz, q_erb)
        slowest_s = q_erb / (2 * math.pi * BANDWIDTH * f_min)
        self.memory_s = slowest_s + INTEGRATION_S + HAIR_CELL_S
        of_channels = tuple(fc_hz[:-1].tolist())
        grid = FrameGrid(len(of_channels), self.hop_length, window_length=1, fc_hz=of_channels)
        self.grids = {"spectrogram": grid}

    def _add_constants(self, fc_hz: Tensor, q_erb: float) -> None:
        step = 2.0 * math.pi / self.fs
        decay = torch.exp(-step * BANDWIDTH * fc_hz / q_erb)
        pole = torch.polar(decay, -step * fc_hz)
        gain = 2.0 * (1.0 - decay) ** ORDER
        smooth = math.exp(-1.0 / (HAIR_CELL_S * self.fs))
        leak = math.exp(-1.0 / (INTEGRATION_S * self.fs))
        behind = torch.arange(self.hop_length - 1, -1, -1, dtype=torch.float64)
        n, frame = len(fc_hz), torch.arange(-1, BLOCK, dtype=torch.float64)
        later = frame[1:] - frame[:, None]  # frames after an input of the integrator
        for name, values in {
            "fc": fc_hz,
            "gammatone": torch.stack((pole.real, pole.imag, gain), -1),
            "low_pass": _row(1.0 - smooth, -smooth, n),
            "integrator": (1.0 - leak) * leak**behind,
            "leak": torch.where(later >= 0, leak ** (self.hop_length * later), 0.0),
        }.items():
            self.register_buffer(name, values.to(self.dtype).contiguous())

    def extra_repr(self) -> str:
        return (
            f"fs={self.fs:g}, channels={len(self.fc) - 1}, hop_length={self.hop_length}, "
            f"hair_cell={self.hair_cell}, compression={self.compression}, dtype={self.dtype}"
        )

    @property
    def frame_rate_hz(self) -> float:
        """Frames per second."""
        return self.fs / self.hop_length

    def ear(self) -> list[ChainStep]:
        """Return filters and hair cell as steps of a chain, (batch, 1, time) to channels."""
        rest, n = self.gammatone.new_zeros(len(self.fc), 2 * ORDER), len(self.fc)
        steps = [ChainStep(ONE_POLE_CASCADE, ORDER, self.gammatone, rest)]
        if self.hair_cell == "halfwave":
            steps.append(ChainStep(FIRST_ORDER, 1, self.low_pass, rest.new_zeros(n, 1)))
        return steps

    def ear_outputs(self, signal: Tensor, count: int = 2) -> Tensor:
        """Return the first `count` of filters and hair cell, (channel, time) of (time,)."""
        x, steps = finite_signal(signal, self.dtype), self.ear()[:count]
        return run_ops(x[None, None], steps)[0][0]

    def stream(
        self,
        chunk: Tensor,
        state: Any = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        x = finite_signal(chunk, self.dtype)
        batch = x.shape[:-1]
        x = x.reshape(batch.numel(), x.shape[-1])
        if state is None:
            ear, leak = rest_state(self.ear(), len(x)), x.new_zeros(len(x), len(self.fc) - 1, 1)
            state = x[:, :0], ear, leak
        waiting, ear, leak = state
        x, size = torch.cat((waiting, x), -1), BLOCK * self.hop_length
        blocks, rest = divmod(x.shape[-1], size)
        made, frames = [x.new_zeros(len(x), 0, len(self.fc) - 1)], blocks * BLOCK
        if last and rest:
            frames += -(-rest // self.hop_length)
            x, blocks = pad(x, (0, size - rest)), blocks + 1
        # A call of the kernel costs as much as 30 frames, and its bits do not depend on the length.
        for several in x[:, : blocks * size].split(CALL * size, -1) if blocks else ():
            y, ear = run_ops(several.unsqueeze(1), self.ear(), ear)
            each, leak = self._integrated(y, leak)
            made.append(each)
        values = torch.cat(made, 1)[:, :frames]
        wanted = {name: values.reshape(*batch, *values.shape[1:]) for name in self.wanted(names)}
        return wanted, (x[:, blocks * size :], ear, leak)

    def _integrated(self, y: Tensor, leak: Tensor) -> tuple[Tensor, Tensor]:
        """Return frames of hair cells (batch, filter, time), whole blocks, and the last state."""
        if can_compute(y, leak, self.integrator):
            frames = y.new_empty(len(y), y.shape[-1] // self.hop_length, len(self.fc) - 1)
            leak, tables = leak.clone(), (self.integrator.numpy(), float(self.leak[0, 0]))
            for each, state, out in zip(y, leak, frames, strict=True):
                run_inhibition(each.numpy(), *tables, state.numpy(), out.numpy())
        else:
            blocks = []
            for block in y.split(BLOCK * self.hop_length, -1):
                inhibited = (block[:, :-1] - block[:, 1:]).clamp_(min=0.0)
                inhibited = inhibited.unflatten(-1, (BLOCK, self.hop_length))
                sums = product(inhibited, self.integrator)
                blocks.append(product(torch.cat((leak, sums), -1), self.leak))
                leak = blocks[-1][..., -1:]
            frames = torch.cat(blocks, -1).transpose(1, 2)
        return (frames.pow(1.0 / 3.0) if self.compression == "cuberoot" else frames), leak


@kernel
def run_inhibition(y: Any, weights: Any, leak: float, state: Any, out: Any) -> None:
    """Write frames of one signal: lateral inhibition, weighted sums, and a leaky recurrence.

    Shapes: y (filter, time), weights (hop,), state (channel, 1), out (frame, channel).
    """
    hop, zero = weights.shape[0], vsplat(y[0], 0.0)
    whole = hop - hop % LANES
    for j in range(out.shape[1]):
        low, high, value = y[j], y[j + 1], state[j, 0]
        for p in range(out.shape[0]):
            total, at = zero, p * hop
            for t in range(0, whole, LANES):
                apart = vload(low, at + t) - vload(high, at + t)
                apart = where_greater_or_nan(apart, zero, apart, zero)
                total = fma(vload(weights, t), apart, total)
            value = leak * value + vsum(total)
            for t in range(whole, hop):
                apart_t = low[at + t] - high[at + t]
                value += weights[t] * (0.0 if apart_t < 0.0 else apart_t)
            out[p, j] = value
            value = out[p, j]  # rounded as the state between calls
        state[j, 0] = value


def _row(b0: float, a1: float, channels: int) -> Tensor:
    """Return rows of the first-order section y[t] = b0 x[t] - a1 y[t-1]."""
    return torch.tensor([[b0, 0.0, a1]], dtype=torch.float64).expand(channels, -1)
