"""Dau, Kollmeier and Kohlrausch (1997): from a waveform to modulation channels.

Gammatone filters, half-wave rectification with a 1 kHz low-pass, adaptation loops, modulation
filters. Input in units of RMS 1 = 100 dB SPL (so x = p / 2 Pa); output in model units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..recurrence.chain.program import Bank, BlockOp, identity_bank
from ..scales import erb_space_bw
from ..stages import AdaptLoop, GammatoneFilterbank, IHCEnvelope, ModulationFilterbank
from ..stages.base import check_fs

Kwargs = Mapping[str, Any] | None


class Dau1997(nn.Module):
    """Auditory model of modulation detection and masking.

    Args:
        fs: Sampling rate in Hz; every centre frequency must lie below fs/2.
        flow: Lowest centre frequency limit in Hz.
        fhigh: Highest centre frequency limit in Hz.
        basef: A frequency in Hz that must be a centre frequency; None centres the filters in the
            range (31 channels by default; 1000 gives 30).
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        dtype: torch.float32 or torch.float64.
        filterbank_kwargs: Passed to `GammatoneFilterbank`.
        ihc_kwargs: Passed to `IHCEnvelope`.
        adaptation_kwargs: Passed to `AdaptLoop`.
        modulation_kwargs: Passed to `ModulationFilterbank`.

    Shape:
        (batch, time) -> list over channels of (batch, M_i, time); (time,) -> list of (M_i, time).
        With `return_stages`, a pair of that and a dict of filterbank, ihc and adaptation, each
        (batch, channel, time).

    Invariants:
        `model(x)` equals the chunks of `model.stream` over any split of x, one after another.

    >>> model = Dau1997(fs=16000)
    >>> model.num_channels
    31
    >>> [tuple(y.shape) for y in model(torch.zeros(2, 160))][0]
    (2, 8, 160)
    """

    input_unit = "rms1=100dB"
    output_unit = "model units"

    def __init__(
        self,
        fs: float,
        flow: float = 80.0,
        fhigh: float = 8000.0,
        learnable: bool = False,
        return_stages: bool = False,
        dtype: torch.dtype = torch.float32,
        filterbank_kwargs: Kwargs = None,
        ihc_kwargs: Kwargs = None,
        adaptation_kwargs: Kwargs = None,
        modulation_kwargs: Kwargs = None,
        basef: float | None = None,
    ) -> None:
        super().__init__()
        self.fs, self.flow, self.fhigh, self.basef = check_fs(fs), flow, fhigh, basef
        self.learnable, self.return_stages = learnable, return_stages
        common: dict[str, Any] = {"learnable": learnable, "dtype": dtype}
        fc_hz = erb_space_bw(flow, fhigh, 1.0, basef).tolist()
        self.filterbank = GammatoneFilterbank(fc_hz, fs, **common, **(filterbank_kwargs or {}))
        self.ihc = IHCEnvelope(fs, **{"method": "dau1996", **common, **(ihc_kwargs or {})})
        self.adaptation = AdaptLoop(
            fs, **{"preset": "dau1997", **common, **(adaptation_kwargs or {})}
        )
        self.modulation = ModulationFilterbank(
            fs, fc_hz, **{"preset": "dau1997", **common, **(modulation_kwargs or {})}
        )

    @property
    def dtype(self) -> torch.dtype:
        """Working type."""
        return self.filterbank.dtype

    @property
    def fc(self) -> Tensor:
        """Centre frequencies in Hz, (channel,)."""
        return self.filterbank.fc

    @property
    def num_channels(self) -> int:
        """Number of auditory channels."""
        return self.filterbank.num_channels

    def stream(self, x: Tensor, state: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Process the next chunk.

        Args:
            x: (batch, time) or (time,).
            state: What the previous chunk returned; None at the start.
        Returns:
            What `forward` returns for this chunk, and the state to pass with the next one.
        """
        before = state or {}
        after: dict[str, Any] = {}
        bands, after["filterbank"] = self.filterbank.stream(x, before.get("filterbank"))
        if self.ihc.can_stream:
            envelope, after["ihc"] = self.ihc.stream(bands, before.get("ihc"))
        elif state is None:
            envelope = self.ihc(bands)
        else:
            envelope, _ = self.ihc.stream(bands)
        adapted, after["adaptation"] = self.adaptation.stream(envelope, before.get("adaptation"))
        out, after["modulation"] = self.modulation.stream(adapted, before.get("modulation"))
        if self.return_stages:
            stages = {"filterbank": bands, "ihc": envelope, "adaptation": adapted}
            return (out, stages), after
        return out, after

    def forward(self, x: Tensor) -> Any:
        """The whole signal at once."""
        return self.stream(x)[0]

    def chain(self, stream: str) -> tuple[list[BlockOp], Bank]:
        """The operations and the final bank of a feature stream, for the fused kernel.

        Args:
            stream: "modulation", "adaptation" or "envelope".
        """
        channels = self.num_channels
        ops = self.filterbank.block_ops() + self.ihc.block_ops(channels)
        if stream == "envelope":
            return ops, identity_bank(channels, self.fc)
        ops += self.adaptation.block_ops(channels)
        if stream == "adaptation":
            return ops, identity_bank(channels, self.fc)
        return ops + self.modulation.block_ops(), self.modulation.bank()

    def distribute_gradients(self) -> None:
        """Does nothing: no filters share coefficients, so every gradient is already in place."""

    def extra_repr(self) -> str:
        """Rate, range and size."""
        return (
            f"fs={self.fs:g}, flow={self.flow:g}, fhigh={self.fhigh:g}, "
            f"num_channels={self.num_channels}, learnable={self.learnable}, dtype={self.dtype}"
        )
