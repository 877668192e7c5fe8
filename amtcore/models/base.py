"""What the time-domain models share: chunks through their stages, and their place in extraction.

    waveform -> front end (waveform to waveform) -> channels, stage by stage -> modulation filters

A model names its stages once, in `forward_chunk`, for signals and gradients, and once, in
`block_stages`, for the fused kernel that pools features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, StateError
from amtcore.kernels.fused.program import Bank, BlockOp, identity_bank
from amtcore.models.loading import share_type
from amtcore.models.swapped import any_hooks, check_fuses, check_streams
from amtcore.stages.base import Chunk, Stage, check_fs, taking_chunks
from amtcore.stages.constants import Converted

Kwargs = Mapping[str, Any] | None
State = dict[str, Any]
_STATES = (
    "expected the state that stream of this model returned with the previous chunk, or None at the "
    "start"
)


def check_range(fs: float, flow: float, fhigh: float) -> None:
    """Raises where the limits of the centre frequencies are no range below fs/2."""
    if not flow < fhigh <= fs / 2:
        raise ParameterError(
            f"expected 0 <= flow < fhigh <= half the sampling rate ({fs / 2:g} Hz), got flow "
            f"{flow:g} Hz and fhigh {fhigh:g} Hz; raise fs or change the limits"
        )


class Passage:
    """One chunk on its way through a model: hands each stage its state and keeps the new one.

    Args:
        state: What the previous chunk left; None at the start.
        last: Whether the signal ends with this chunk.
        whole: Whether the chunk is the signal: every stage is then called as any module is.
    """

    def __init__(self, state: State | None, last: bool, whole: bool = False) -> None:
        if not (state is None or isinstance(state, dict)):
            raise StateError(f"{_STATES}, got {type(state).__name__}")
        self._before, self._last, self._whole = state, last, whole
        self._alone = state is None and last
        self.state: State = {}

    def __call__(self, name: str, stage: nn.Module, x: Tensor) -> Any:
        """The output of a stage for this chunk; a stage that cannot stream needs the whole."""
        if self._whole or (self._alone and not getattr(stage, "can_stream", True)):
            return stage(x)
        check_streams(name, stage)
        if self._before is not None and name not in self._before:
            raise StateError(f"{_STATES}, got one without the stage {name!r}")
        chunk = Chunk(
            None if self._before is None else self._before[name],
            {"last": self._last} if getattr(stage, "looks_ahead", False) else {},
        )
        if any_hooks(stage):
            y = stage(x, chunk=chunk)
        else:
            y, chunk.state = stage.stream(x, chunk.state, **chunk.ending)  # type: ignore[operator]
        self.state[name] = chunk.state
        return y

    def check_left(self) -> None:
        """Raise where a state has stages that were not asked for."""
        left = sorted(set(self._before or ()) - set(self.state))
        if left:
            raise StateError(f"{_STATES}, got one with the stages {', '.join(left)} of another")


class StageSequence(nn.Sequential):
    """Stages one after another as one stage, of signals or of chunks."""

    can_stream = looks_ahead = True

    def stream(self, x: Tensor, state: State | None = None, last: bool = False) -> Any:
        """Process the next chunk; see `FirStage.stream`."""
        step = Passage(state, last)
        for name, stage in self.named_children():
            x = step(name, stage, x)
        step.check_left()
        return x, step.state

    #: Calls take chunks too, as those of a stage.
    forward = taking_chunks(nn.Sequential.forward)


@dataclass(frozen=True)
class WholeBands:
    """Modulation bands that need the whole signal.

    Args:
        bands: (1, channel, time) -> every band in turn, (1, channel, time').
        count: How many there are.
        fs_hz: Their sampling rate.
        rates: (up, down) from the model's rate to theirs.
    """

    bands: Callable[[Tensor], Iterator[Tensor]]
    count: int
    fs_hz: float
    rates: tuple[int, int] = (1, 1)


class TimeDomainModel(Converted):
    """A model from a waveform to what its modulation filters make of it.

    Args:
        fs: Sampling rate in Hz.
        learnable: Whether the constants of all stages are parameters.
        return_stages: Whether outputs come with a dict of what the stages made.

    Invariants:
        `model(x)` equals the chunks of `model.stream` over any split of x, one after another.
    """

    input_unit: str
    output_unit = "model units"
    filterbank: Any
    modulation: Any

    def __init__(self, fs: float, learnable: bool, return_stages: bool) -> None:
        super().__init__()
        self.fs, self.learnable, self.return_stages = check_fs(fs), learnable, return_stages
        self.register_load_state_dict_post_hook(share_type)

    @property
    def auditory_filters(self) -> Any:
        """The stage that splits the waveform into channels."""
        return self.filterbank

    @property
    def dtype(self) -> torch.dtype:
        """Working type."""
        stages = (stage for stage in self.children() if isinstance(stage, Stage))
        return next((stage.dtype for stage in stages), torch.get_default_dtype())

    @property
    def fc(self) -> Tensor:
        """Centre frequencies in Hz, (channel,)."""
        return self.auditory_filters.fc

    @property
    def num_channels(self) -> int:
        """Number of auditory channels."""
        return self.auditory_filters.num_channels

    def forward_chunk(self, x: Tensor, step: Passage) -> tuple[Any, dict[str, Tensor]]:
        """Output and stages of one chunk."""
        raise NotImplementedError

    def stream(
        self, x: Tensor, state: State | None = None, last: bool = False
    ) -> tuple[Any, State]:
        """Process the next chunk.

        Args:
            x: (batch, time) or (time,).
            state: What the previous chunk returned; None at the start.
            last: Whether the signal ends here. Only models that look ahead need to know: they
                return what they held back.
        Returns:
            What `forward` returns for this chunk, and the state to pass with the next one.
        """
        step = Passage(state, last)
        out, stages = self.forward_chunk(x, step)
        step.check_left()
        return ((out, stages) if self.return_stages else out), step.state

    def forward(self, x: Tensor) -> Any:
        """The whole signal at once; every stage is called as a module, with its hooks."""
        out, stages = self.forward_chunk(x, Passage(None, True, whole=True))
        return (out, stages) if self.return_stages else out

    def front_end(self) -> list[Stage]:
        """The stages before the channels split: waveform in, waveform out."""
        return []

    def block_stages(self) -> Iterator[tuple[str, list[BlockOp]]]:
        """The stages for the fused kernel in order, each under the name of the feature stream that
        ends with it ("" for none)."""
        raise NotImplementedError

    def final_bank(self) -> Bank:
        """The modulation filters, for the fused kernel."""
        return self.modulation.bank()

    def chain(self, stream: str) -> tuple[list[BlockOp], Bank]:
        """The operations and the final bank of a feature stream, for the fused kernel.

        Args:
            stream: A name from `block_stages`, or "modulation".
        """
        check_fuses(self, self.named_children(), "block_ops", "bank")
        ops: list[BlockOp] = []
        for name, block_ops in self.block_stages():
            ops += block_ops
            if name == stream:
                return ops, identity_bank(self.num_channels, self.fc)
        return ops, self.final_bank()

    def whole_bands(self, stream: str) -> WholeBands | None:
        """How a feature stream is made that the fused kernel cannot make; None where it can.

        `chain` then gives the operations up to the bands' input, and no bank to speak of.
        """
        return None

    def mfc_by_column(self) -> Tensor:
        """Modulation centre frequency in Hz of each column of the modulation stream."""
        return self.modulation.mfc_hz

    def distribute_gradients(self) -> None:
        """Does nothing: no filters share coefficients, so every gradient is already in place."""

    def extra_repr(self) -> str:
        """Rate, range and size."""
        channels = ""
        if isinstance(self.auditory_filters, Stage):
            ends = f"{self.fc[0].item():.1f}..{self.fc[-1].item():.1f} Hz"
            channels = f"fc={ends}, num_channels={self.num_channels}, "
        return f"fs={self.fs:g}, {channels}learnable={self.learnable}, dtype={self.dtype}"
