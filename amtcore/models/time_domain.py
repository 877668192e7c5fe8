"""Base class of the time-domain models: an ordered chain of stages, for whole signals or chunks.

    waveform -> front end -> filterbank -> stages of each channel -> modulation filters

A model names its stages once, as `chain_stages`. Signals, chunks and gradients go through them one
by one; the fused kernel for features gets the operations from the filterbank on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from amtcore.errors import ParameterError, StateError, nearest_hint
from amtcore.kernels.chain import ChainStep, FilterBank, identity_bank
from amtcore.models.composition import Model, require_fusable, require_streamable
from amtcore.stages.envelope_means import EnvelopeFilters
from amtcore.stages.stage import Stage, StreamChunk, accepts_chunks
from amtcore.torch_internals import has_any_hooks

Kwargs = Mapping[str, Any] | None
State = dict[str, Any]
#: A function of a stage's name, the stage, and its input.
Step = Callable[[str, nn.Module, Tensor], Any]
_STATES = (
    "expected the state that stream of this model returned with the previous chunk, or None at the "
    "start"
)


def check_range(fs: float, flow: float, fhigh: float) -> None:
    """Raise if the limits of the centre frequencies are no range below fs/2."""
    if not flow < fhigh <= fs / 2:
        raise ParameterError(
            f"expected 0 <= flow < fhigh <= half the sampling rate ({fs / 2:g} Hz), got flow "
            f"{flow:g} Hz and fhigh {fhigh:g} Hz; raise fs or change the limits"
        )


@dataclass(frozen=True)
class ChainStage:
    """One stage of a model's chain.

    Args:
        name: Attribute that holds the stage, or None to pass signals on unchanged.
        returned: Name in `return_stages` of the signal after the stage; "" for none.
        stream: Feature stream that ends with the stage; "" for none.

    If several stages have the same `returned` or `stream`, the last of them counts.
    """

    name: str
    returned: str = ""
    stream: str = ""


class StreamContext:
    """One pass of a chunk through a model: gives each stage its state and collects new states.

    A signal ends with the chunk that is `last`.
    """

    def __init__(self, state: State | None, last: bool) -> None:
        if not (state is None or isinstance(state, dict)):
            raise StateError(f"{_STATES}, got {type(state).__name__}")
        self._before, self._last = state, last
        self._alone = state is None and last
        self.state: State = {}

    def __call__(self, name: str, stage: nn.Module, x: Tensor) -> Any:
        """Return the output of a stage for this chunk."""
        if self._alone and not getattr(stage, "can_stream", True):
            return stage(x)
        require_streamable(name, stage)
        if self._before is not None and name not in self._before:
            raise StateError(f"{_STATES}, got one without the stage {name!r}")
        ending = {"last": self._last} if getattr(stage, "looks_ahead", False) else {}
        chunk = StreamChunk((self._before or {}).get(name), ending)
        if has_any_hooks(stage):
            y = stage(x, chunk=chunk)
        else:
            y, chunk.state = stage.stream(x, chunk.state, **chunk.ending)  # type: ignore[operator]
        self.state[name] = chunk.state
        return y

    def check_left(self) -> None:
        """Raise if the state has stages that this pass did not call."""
        if left := sorted(set(self._before or ()) - set(self.state)):
            raise StateError(f"{_STATES}, got one with the stages {', '.join(left)} of another")


def _summed_s(stages: Iterable[nn.Module]) -> float | None:
    """Return the sum of the stages' time constants; None if a stage does not state one."""
    memories_s: list[Any] = [getattr(stage, "memory_s", None) for stage in stages]
    return None if None in memories_s else sum(memories_s, 0.0)


class StageSequence(nn.Sequential):
    """Stages one after another as one stage, of signals or of chunks."""

    can_stream = looks_ahead = True

    @property
    def memory_s(self) -> float | None:
        """Sum of the stages' time constants in s; None if a stage does not state one."""
        return _summed_s(self.children())

    def stream(self, x: Tensor, state: State | None = None, last: bool = False) -> Any:
        """Process the next chunk; see `FirStage.stream`."""
        step = StreamContext(state, last)
        for name, stage in self.named_children():
            x = step(name, stage, x)
        step.check_left()
        return x, step.state

    #: Calls take chunks too, like calls of a stage.
    forward = accepts_chunks(nn.Sequential.forward)


@dataclass(frozen=True)
class WholeSignalBands:
    """Modulation bands that need the whole signal: `count` bands at the rate `fs_hz`.

    - `bands` takes (batch, channel, time) and the length of each signal. It returns a list for each
      band, with (1, channel, time') of each signal.
    - `rates` is (up, down) from the model's rate.
    - `filters` has the filters. It is None if more than filters and Hilbert envelopes is needed.
    """

    bands: Callable[[Tensor, Sequence[int]], Iterator[list[Tensor]]]
    count: int
    fs_hz: float
    rates: tuple[int, int] = (1, 1)
    filters: EnvelopeFilters | None = None


class TimeDomainModel(Model):
    """A model from a waveform to the outputs of its modulation filters.

    Attributes:
        chain_stages: The stages in order. The stages before `auditory_filters` are the front end.

    Invariants:
        `model(x)` equals the chunks of `model.stream` over any split of x, one after another.
    """

    chain_stages: ClassVar[tuple[ChainStage, ...]]
    input_unit: str
    output_unit = "model units"
    #: Advice on parameters with which the model streams, for messages.
    streaming_advice = ""
    filterbank: Any
    modulation: Any
    shown = "fs flow fhigh num_channels learnable dtype"

    @property
    def auditory_filters(self) -> Any:
        """The stage that splits the waveform into channels."""
        return self.filterbank

    @property
    def fc(self) -> Tensor:
        """Centre frequencies in Hz, (channel,)."""
        return self.auditory_filters.fc

    @property
    def num_channels(self) -> int:
        """Number of auditory channels."""
        return self.auditory_filters.num_channels

    def forward_chunk(self, x: Tensor, step: Step) -> tuple[Any, dict[str, Tensor]]:
        """Return the output and the returned stages of one chunk; `step` calls each stage."""
        returned: dict[str, Tensor] = {}
        for link in self.chain_stages:
            stage = getattr(self, link.name)
            if stage is not None:
                x = step(link.name, stage, x)
            if link.returned:
                returned[link.returned] = x
        return self.arranged(x), returned

    def arranged(self, out: Any) -> Any:
        """Arrange the axes of the last stage's output as the model returns them."""
        return out

    def stream(
        self, x: Tensor, state: State | None = None, last: bool = False
    ) -> tuple[Any, State]:
        """Process the next chunk.

        Args:
            x: (batch, time) or (time,).
            state: State after the previous chunk; None at the start.
            last: Whether the signal ends here; models that look ahead return their last outputs.
        Returns:
            The output of `forward` for this chunk, and the state to pass with the next chunk.
        """
        step = StreamContext(state, last)
        out, stages = self.forward_chunk(x, step)
        step.check_left()
        return ((out, stages) if self.return_stages else out), step.state

    def forward(self, x: Tensor) -> Any:
        """The whole signal at once; every stage is called as a module, with its hooks."""
        out, stages = self.forward_chunk(x, lambda name, stage, x: stage(x))
        return (out, stages) if self.return_stages else out

    @property
    def memory_s(self) -> float | None:
        """Sum of the stages' time constants in s; None if a stage does not state one."""
        return _summed_s(self._present(self.chain_stages).values())

    def _present(self, links: Sequence[ChainStage]) -> dict[str, Any]:
        """Return the stages of the links by name, without links that have no stage."""
        stages = {link.name: getattr(self, link.name) for link in links}
        return {name: stage for name, stage in stages.items() if stage is not None}

    def front_end(self) -> list[Stage]:
        """Return the stages before the filterbank: waveform in, waveform out."""
        ear: dict[str, Any] = {}
        for name, stage in self._present(self.chain_stages).items():
            if stage is self.auditory_filters:
                break
            ear |= stage.named_children() if isinstance(stage, StageSequence) else {name: stage}
        for name, stage in ear.items():
            require_streamable(name, stage)
        return list(ear.values())

    def chain(self, stream: str) -> tuple[list[ChainStep], FilterBank]:
        """Return the steps and the filters of a feature stream, for the fused kernel."""
        require_fusable(self, self.named_children(), "block_ops", "bank")
        ends = {link.stream: i + 1 for i, link in enumerate(self.chain_stages) if link.stream}
        if stream not in ends:
            raise ParameterError(
                f"{type(self).__name__} has no stream {stream!r}{nearest_hint(stream, ends)}"
            )
        stages = list(self._present(self.chain_stages[: ends[stream]]).values())
        stages = stages[stages.index(self.auditory_filters) :]
        ops = [op for stage in stages for op in stage.block_ops(self.num_channels)]
        if self.whole_bands(stream) is not None:
            return ops, identity_bank(self.num_channels, self.fc)
        return ops, stages[-1].bank(self.num_channels)

    def whole_bands(self, stream: str) -> WholeSignalBands | None:
        """Return the bands of a feature stream that needs whole signals, or None.

        `chain` then returns the steps up to the bands' input, and an identity bank.
        """
        return None

    def mfc_by_column(self) -> Tensor:
        """Modulation centre frequency in Hz of each column of the modulation stream."""
        return self.modulation.mfc_hz

    def distribute_gradients(self) -> None:
        """Does nothing: no filters share coefficients, so every gradient is already in place."""
