"""Base class of the loudness models: frames from chunks of samples, loudness level, streaming.

A frame needs half a window and half a filter of samples after its instant. So a stream holds the
last 0.1 s back until the signal ends. The method `forward` is the stream of one chunk.

Without gradients and `return_stages`, `rows_of_blocks` computes specific loudness by one kernel:

    rows    | left ear's channels | right ear's channels | zeros |      one row a frame

Rows are padded to whole vectors of channels, the layout of the gain controls. The values equal the
values of the stages bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.operations.loudness_frames import LoudnessKernel
from amtcore.kernels.torch_state import can_compute, is_exporting, is_transformed, wants_derivative
from amtcore.kernels.vector.simd import LANES
from amtcore.models.composition import is_replaced, require_fusable, share_type
from amtcore.models.frame_blocks import (
    BLOCK_FRAMES,
    FrameBlocks,
    FrameState,
    Segment,
    can_share,
    inside,
    map_blocks,
)
from amtcore.scales import PhonTable, phon_by, tones
from amtcore.stages.component_nodes import ComponentStage
from amtcore.stages.constants import Converted
from amtcore.stages.ears import LoudnessEar
from amtcore.stages.excitation import RoexFilters
from amtcore.stages.specific_loudness import CompressiveLaw
from amtcore.stages.spectrum import WindowedSpectrum
from amtcore.stages.stage import Stage, check_state
from amtcore.torch_internals import has_any_hooks


@dataclass(frozen=True)
class Rows:
    """Specific loudness of some frames: (batch, frame, width), ears, and channels of an ear."""

    values: Tensor
    ears: int
    channels: int

    @property
    def specific(self) -> Tensor:
        """View of the rows as (batch, ear, frame, channel)."""
        used = self.values[..., : self.ears * self.channels]
        return used.unflatten(-1, (self.ears, self.channels)).transpose(1, 2)


def loudness_kernel(
    spectrum: WindowedSpectrum,
    limits: tuple[float, float, float],
    levels: ComponentStage,
    level_weights: tuple[str, ...],
    filters: RoexFilters,
    law: CompressiveLaw,
) -> LoudnessKernel | None:
    """Return the kernel for specific loudness, or None if the stages cannot use it.

    Args:
        spectrum: Stage of the spectra.
        limits: `FAINTEST` or `INAUDIBLE`, the threshold of components.
        levels: Stage with the nodes and the weights of the levels per ERB.
        level_weights: Name of the weights, and the constants they depend on.
        filters: Stage of the excitation pattern.
        law: Stage of specific loudness.
    """
    if not spectrum.has_factors() or filters.backend is not None or len(filters.fc) < LANES:
        return None
    name, *of = level_weights
    blocks, places = levels.derived(f"{name}_blocks", *of), levels.derived(name, *of).shape[1]
    return LoudnessKernel(
        spectrum.factors(), torch.tensor(limits), *levels.groups(), blocks, places,
        filters.filters(), law.constants_by_channel(), (law.high_divisor, law.high_exponent),
    )  # fmt: skip


def rows_of_blocks(
    together: Sequence[Sequence[Segment | None]],
    heard: Callable[[Sequence[Segment | None]], Sequence[Tensor]],
    specific: Callable[[Tensor], Tensor],
    kernel: LoudnessKernel,
) -> Rows:
    """Compute all blocks of some signals, side by side on the kernels' threads.

    Args:
        together: Groups of blocks that go through the ear at once, in order; None is silence.
        heard: Filters a group by the ear, (batch, ear, sample) for each block.
        specific: Computes (ear, frame, channel) by the stages, for a non-finite signal.
        kernel: Kernel for finite signals.
    """
    segments = [s for some in together for s in some if s is not None]
    batch, ears = segments[0].x.shape[:2]
    used = ears * kernel.channels
    *begins, count = accumulate((segment.frames for segment in segments), initial=0)
    places = {s.first: slice(at, at + s.frames) for s, at in zip(segments, begins, strict=True)}
    values = segments[0].x.new_empty(batch, count, used + -used % LANES)
    rows = Rows(values, ears, kernel.channels)

    def make(some: Sequence[Segment | None]) -> None:
        for segment, signals in zip(some, heard(some), strict=True):
            if segment is None:
                continue
            part = places[segment.first]
            values[:, part, used:] = 0.0
            for b, signal in enumerate(signals):
                if not kernel.specific(signal, values[b, part]):
                    rows.specific[b, :, part] = specific(signal)[:, : segment.frames]

    map_blocks(make, together, values)
    return rows


#: Largest sample that counts as 0 (-306 dB SPL): its power would be denormal, hence slow.
SILENT_PA = 1e-20

#: (frames (batch, frame, ..), state or None) -> (frames of the same shape, next state).
Recurrence = Callable[[Tensor, Any], tuple[Tensor, Any]]


class OverTime:
    """Recurrences over some frames, with states by name `before` and `after` these frames."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._before = before
        self.after: dict[str, Any] = {}

    def __call__(self, name: str, recurrence: Recurrence, x: Tensor) -> Tensor:
        """Run a recurrence over the frames, and keep its state."""
        y, self.after[name] = recurrence(x, self._before.get(name))
        return y


@dataclass(frozen=True)
class LoudnessState:
    """State between two chunks.

    Args:
        blocks: Progress of the blocks.
        integration: States of the gain controls.
        batched: Whether the caller's tensors have a batch axis.
    """

    blocks: FrameState
    integration: dict[str, Tensor]
    batched: bool


@dataclass(frozen=True)
class Loudness:
    """Loudness of some frames.

    Args:
        short: Short-term loudness in sone, (batch, frame).
        long: Long-term loudness in sone, (batch, frame).
        specific: Specific loudness of both ears in sone per Cam, (batch, frame, channel).
        stages: Tensors of `return_stages`, by name.
        state: States of the gain controls after the last frame.
    """

    short: Tensor
    long: Tensor
    specific: Tensor
    stages: dict[str, Tensor]
    state: dict[str, Tensor]


def _of_items(segments: Sequence[Segment | None], items: slice) -> list[Segment | None]:
    return [each and replace(each, x=each.x[items]) for each in segments]


class LoudnessModel(Converted):
    """A model of loudness from spectra.

    A model names its ear filter and its spectrum, analyses filtered samples into stages up to
    specific loudness, and integrates that over time.

    Invariants:
        Outputs of `stream` over any split of a signal, concatenated, equal the output of
        `forward`.
    """

    input_unit = "pa"
    output_unit = "sone"
    #: Ears that an input may have.
    input_channels: tuple[int, ...] = (1,)
    fs: float
    learnable: bool
    return_stages: bool
    _hop_length: int

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(share_type)

    outer_middle_ear: LoudnessEar

    @property
    def ear(self) -> LoudnessEar:
        """The ear filter."""
        return self.outer_middle_ear

    @property
    def running_spectrum(self) -> WindowedSpectrum:
        """The spectrum stage."""
        raise NotImplementedError

    @property
    def fc(self) -> Tensor:
        """Centre frequencies of the channels in Hz."""
        raise NotImplementedError

    def _analyse(self, filtered: Tensor) -> dict[str, Tensor]:
        """Return the stages (batch, ear, frame, ..), among them "specific"."""
        raise NotImplementedError

    def _kernel(self) -> LoudnessKernel | None:
        """Return the kernel for specific loudness, or None."""
        return None

    def _integrate_rows(self, rows: Rows, over_time: OverTime) -> Loudness:
        """Integrate rows over time; may change the rows."""
        return self._integrate({"specific": rows.specific}, over_time)

    def _integrate(self, analysed: dict[str, Tensor], over_time: OverTime) -> Loudness:
        """Integrate specific loudness (batch, ear, frame, channel) over time."""
        raise NotImplementedError

    def _as_batch(self, x: Tensor) -> tuple[Tensor, bool]:
        """Return (batch, ear, time) in the working type, and True if there was a batch axis."""
        raise NotImplementedError

    def _by_modules(self, signal: Tensor) -> Loudness:
        """Return the loudness of a whole signal (batch, ear, time) by calls of all stages."""
        raise NotImplementedError

    def _result(self, loudness: Loudness, batched: bool) -> Any:
        """Return the output for the caller."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Working type."""
        return self._stage().dtype

    @property
    def hop_length(self) -> int:
        """Samples between frames."""
        return self._hop_length

    @property
    def memories_s(self) -> tuple[float, float]:
        """Slowest time constants in s of short-term and long-term loudness."""
        raise NotImplementedError

    @property
    def frame_rate_hz(self) -> float:
        """Frames per second."""
        return self.fs / self.hop_length

    def n_frames(self, samples: int) -> int:
        """Frames of a signal: one centred on sample 0 and on every hop up to its end."""
        return self.running_spectrum.n_frames(samples)

    def stream(
        self, x: Tensor, state: LoudnessState | None = None, last: bool = False
    ) -> tuple[Any, LoudnessState]:
        """Process the next chunk.

        Args:
            x: As for `forward`; may be empty.
            state: State after the previous chunk; None at the start.
            last: Whether the signal ends here; then the frames that were held back come too.
        Returns:
            The output of `forward` for the frames that are ready, in blocks of 128, and the state
            to pass with the next chunk.
        """
        loudness, state = self.stream_loudness(x, state, last)
        return self._result(loudness, state.batched), state

    def forward(self, audio: Tensor) -> Any:
        """The whole signal at once.

        If a stage has hooks or was replaced, every stage is called once with the whole signal, as
        in `torch.export`. Otherwise blocks go through the stages one by one, in less memory.
        """
        if not (is_exporting() or self._needs_calls()):
            return self.stream(audio, None, True)[0]
        signal, batched = self._as_batch(audio)
        signal = torch.nn.functional.hardshrink(signal, SILENT_PA)
        return self._result(self._by_modules(signal), batched)

    def _needs_calls(self) -> bool:
        """Return True if blocks would skip a hook or a replaced stage."""
        return any(has_any_hooks(stage) or is_replaced(stage) for stage in self.children())

    def _stage(self) -> Stage:
        """Return any stage of this package; all have the same working type."""
        ours = [stage for stage in self.children() if isinstance(stage, Stage)]
        if not ours:
            raise ParameterError(f"{type(self).__name__} has no stage of its own left")
        return ours[0]

    def stream_loudness(
        self, x: Tensor, state: LoudnessState | None = None, last: bool = False
    ) -> tuple[Loudness, LoudnessState]:
        """Process the next chunk like `stream`, and return all `Loudness` of its frames."""
        require_fusable(self, self.named_children())
        if state is not None:
            check_state(self, state, LoudnessState)
        signal, batched = self._as_batch(x)
        signal = torch.nn.functional.hardshrink(signal, SILENT_PA)
        grid = self.grid()
        before = grid.start(signal) if state is None else state.blocks
        if before.tail.shape[:-1] != signal.shape[:-1]:
            raise ShapeError(
                f"expected a chunk of batch and ears {tuple(before.tail.shape[:-1])} as before, "
                f"got {tuple(signal.shape[:-1])}"
            )
        segments, blocks = grid.split(signal, before)
        if last:
            segments += grid.remaining(blocks)
        loudness = self._run(segments, blocks, state.integration if state else None)
        return loudness, LoudnessState(blocks, loudness.state, batched)

    def grid(self) -> FrameBlocks:
        """Return the grid of blocks."""
        reach = (self.running_spectrum.windows[0] + self.ear.order) // 2
        return FrameBlocks(self.hop_length, reach)

    def _run(
        self, segments: list[Segment], blocks: FrameState, state: dict[str, Tensor] | None
    ) -> Loudness:
        """Return the loudness of blocks."""
        shown = segments or [self._nothing(blocks.tail)]
        response = self.ear.response(self.ear.taps(), shown[0].x.shape[-1])
        kernel = self._kernel() if self._wants_numbers(blocks.tail) else None
        batch, ears = blocks.tail.shape[:2]
        alone = batch == 1 or (batch > 1 and self._takes_items_alone(blocks.tail))
        if can_share(blocks.tail) and ears == 1 and alone:
            together = self._pairs(shown)
        else:
            together = [[segment] for segment in shown]
        if kernel is not None and segments:
            heard = partial(self._heard, response=response, samples=blocks.samples)
            rows = rows_of_blocks(together, heard, self._specific, kernel)
            return self._integrate_rows(rows, OverTime(state or {}))
        items = [slice(b, b + 1) for b in range(batch)] if alone else [slice(None)]
        stages = self._stages_of(together, items, response, blocks)
        return self._integrate(stages, OverTime(state or {}))

    def _stages_of(
        self,
        together: Sequence[Sequence[Segment | None]],
        items: Sequence[slice],
        response: Tensor,
        blocks: FrameState,
    ) -> dict[str, Tensor]:
        """Return the stages of all blocks, computed for these items of the batch at a time."""
        parts = map_blocks(
            lambda some: self._blocks(some, response, blocks.samples),
            [_of_items(some, item) for item in items for some in together],
            blocks.tail,
        )
        of_item = [
            [stages for part in parts[at : at + len(together)] for stages in part]
            for at in range(0, len(parts), len(together))
        ]
        return {
            name: torch.cat([torch.cat([part[name] for part in each], 2) for each in of_item])
            for name in of_item[0][0]
        }

    def _takes_items_alone(self, x: Tensor) -> bool:
        """Return True if the items of a batch go through the stages one by one.

        The rounding of a matrix product depends on its shape, so separate items have the same bits
        in any batch. Kernels take frames separately and need no such care. Learning takes a whole
        batch, because each pass computes the tables again.
        """
        if torch.compiler.is_compiling() or is_transformed(x) or x.device.type != "cpu":
            return False
        by_kernels = can_compute(x) and self.running_spectrum.has_factors()
        return not (by_kernels or wants_derivative(*self.parameters()))

    def _wants_numbers(self, x: Tensor) -> bool:
        """Return True if only loudness without gradients is needed."""
        return not self.return_stages and can_share(x) and can_compute(x)

    def _heard(
        self, segments: Sequence[Segment | None], response: Tensor, samples: int
    ) -> list[Tensor]:
        """Filter blocks of equal shape by the ear; None is silence."""
        like, half = next(s.x for s in segments if s is not None), self.ear.order // 2
        x = [torch.zeros_like(like) if segment is None else segment.x for segment in segments]
        filtered = self.ear.filter_by(torch.cat(x), response).split(len(like))
        return [
            values if segment is None else inside(values, segment.first + half, samples)
            for values, segment in zip(filtered, segments, strict=True)
        ]

    def _specific(self, filtered: Tensor) -> Tensor:
        """Return (ear, frame, channel) of (ear, time), by the stages."""
        return self._analyse(filtered.unsqueeze(0))["specific"][0]

    def run_blocks(self, x: Tensor, inside: Tensor, taps: Tensor, over_time: OverTime) -> Loudness:
        """Return the loudness of blocks of any signals at once.

        Args:
            x: (block, ear, samples) in Pa in the working type, see `FrameBlocks`.
            inside: (block, 1, samples), True inside a signal.
            taps: Taps of the ear filter.
            over_time: Runs recurrences over the frames of each signal, block after block.
        """
        half = self.ear.order // 2
        silenced = torch.where(inside, torch.nn.functional.hardshrink(x, SILENT_PA), 0.0)
        filtered = self.ear.filter_valid(silenced, taps)
        heard = torch.where(inside[..., half : half + filtered.shape[-1]], filtered, 0.0)
        return self._integrate(self._analyse(heard), over_time)

    def _nothing(self, tail: Tensor) -> Segment:
        """Return a block without frames, for chunks that complete none."""
        silence = tail.new_zeros(*tail.shape[:-1], 2 * self.grid().reach)
        # The empty sum connects the output to the input, so that its gradient is 0, not missing.
        return Segment(silence + tail[..., :0].sum(-1, keepdim=True), 0, 0)

    def _pairs(self, segments: list[Segment]) -> list[list[Segment | None]]:
        """Group the blocks of one signal in pairs, which makes products faster.

        The number of a block in the signal decides its pair and place. A missing block is silence,
        so that the products have one shape, and the same bits for any chunks.
        """
        pairs: dict[int, list[Segment | None]] = {}
        for segment in segments:
            number = (segment.first + self.grid().reach) // (BLOCK_FRAMES * self.hop_length)
            pairs.setdefault(number // 2, [None, None])[number % 2] = segment
        return list(pairs.values())

    def _blocks(
        self, segments: Sequence[Segment | None], response: Tensor, samples: int
    ) -> list[dict[str, Tensor]]:
        """Return the stages of blocks of equal shape; None is silence and returns no stages."""
        half, window = self.ear.order // 2, self.running_spectrum.windows[0]
        heard = self._heard(segments, response, samples)
        analysed = self._analyse(torch.cat(heard))
        made = []
        for i, segment in enumerate(segments):
            if segment is None:
                continue
            rows = slice(i * len(heard[i]), (i + 1) * len(heard[i]))
            stages = {name: values[rows, :, : segment.frames] for name, values in analysed.items()}
            if self.return_stages:
                core = heard[i][..., window // 2 :][..., : segment.frames * self.hop_length]
                left = samples - (segment.first + half + window // 2)
                stages["filtered"] = core[..., : max(left, 0)]
            made.append(stages)
        return made

    def phon_table(self) -> PhonTable:
        """Return the model's loudness of steady 1 kHz tones at both ears."""
        levels, x = tones(self.fs, 2 * self.grid().reach)
        with torch.no_grad():
            x = x.to(self.ear.gain_db, non_blocking=True)
            filtered = self.ear.filter_valid(x.unsqueeze(1), self.ear.taps())
            sone = self.steady_loudness(self._analyse(filtered)["specific"]).flatten()
        return PhonTable(levels.to(sone.device, non_blocking=True), sone)

    def steady_loudness(self, specific: Tensor) -> Tensor:
        """Return the steady loudness in sone, (batch, frame), of (batch, 1, frame, channel)."""
        raise NotImplementedError

    def compute_loudness_level(self, ltl: Tensor, method: str = "table") -> Tensor:
        """Return the loudness level in phon, of the same shape.

        Args:
            ltl: Loudness in sone.
            method: "table" inverts the model's own loudness of 1 kHz tones, -10 to 130 phon;
                "power" is 40 + 10 log2 N.
        """
        return phon_by(method, self.phon_table(), ltl)

    def get_erb_frequencies(self) -> Tensor:
        """Centre frequencies of the channels in Hz, (channel,)."""
        return self.fc

    def get_parameters(self) -> dict[str, Any]:
        """Return the rate and the switches of the model."""
        return {name: getattr(self, name) for name in ("fs", "learnable", "return_stages")}

    def reset_state(self) -> None:
        """Does nothing: a model keeps no state between calls; `stream` returns it."""
