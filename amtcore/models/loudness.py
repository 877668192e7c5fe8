"""Base class of the loudness models: frames from chunks of samples, loudness level, streaming.

A frame needs half a window and half a filter of samples after its instant. So a stream holds the
last 0.1 s back until the signal ends. The method `forward` is the stream of one chunk.

Without gradients and `return_stages`, one kernel computes specific loudness:

    rows    | left ear's channels | right ear's channels | zeros |      one row a frame

Rows are padded to whole vectors of channels, the layout of the gain controls. The values equal the
values of the stages bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.operations.loudness_frames import LoudnessKernel
from amtcore.kernels.torch_state import can_compute, is_exporting, is_transformed, wants_derivative
from amtcore.kernels.vector.simd import LANES
from amtcore.models.composition import COMPUTING, Model, defines, require_fusable
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
from amtcore.stages.ears import LoudnessEar
from amtcore.stages.excitation import ComponentStage, RoexFilters
from amtcore.stages.loudness import CompressiveLaw
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
    level_weights: str,
    filters: RoexFilters,
    law: CompressiveLaw,
) -> LoudnessKernel | None:
    """Return the kernel for specific loudness, or None if the stages cannot use it.

    Args:
        limits: `FAINTEST` or `INAUDIBLE`, the threshold of components.
        level_weights: Name of the weights of the levels per ERB, a table of `levels`.
        The others are the stages.
    """
    if not spectrum.has_factors() or filters.backend is not None or len(filters.fc) < LANES:
        return None
    blocks = levels.derived(f"{level_weights}_blocks")
    places = levels.derived(level_weights).shape[1]
    return LoudnessKernel(
        spectrum.factors(), torch.tensor(limits), *levels.groups(), blocks, places,
        filters.filters(), law.derived("law"), (law.high_divisor, law.high_exponent),
    )  # fmt: skip


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
    """State between two chunks: of blocks, of gain controls, and whether there is a batch axis."""

    blocks: FrameState
    integration: dict[str, Tensor]
    batched: bool


@dataclass(frozen=True)
class Loudness:
    """Short- and long-term loudness of some frames in sone, (batch, frame).

    `specific` is of both ears in sone per Cam, (batch, frame, channel); `state` of gain controls.
    """

    short: Tensor
    long: Tensor
    specific: Tensor
    stages: dict[str, Tensor]
    state: dict[str, Tensor]


class LoudnessModel(Model):
    """A model of loudness from spectra, which integrates specific loudness over time.

    Invariants:
        Outputs of `stream` over any split of a signal, concatenated, equal the output of
        `forward`.
    """

    input_unit = "pa"
    output_unit = "sone"
    #: Ears that an input may have.
    input_channels: tuple[int, ...] = (1,)
    shown = "fs hop_length learnable return_stages dtype"
    outer_middle_ear: LoudnessEar
    #: Samples between frames.
    hop_length: int

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
        called = any(has_any_hooks(each) or defines(each, COMPUTING) for each in self.children())
        if not (is_exporting() or called):
            return self.stream(audio, None, True)[0]
        signal, batched = self._as_batch(audio)
        signal = torch.nn.functional.hardshrink(signal, SILENT_PA)
        return self._result(self._by_modules(signal), batched)

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
            check_state(self, state, LoudnessState, x)
        signal, batched = self._as_batch(x)
        signal, grid = torch.nn.functional.hardshrink(signal, SILENT_PA), self.grid()
        silence = signal.new_zeros(*signal.shape[:-1], grid.reach)  # before the first sample
        before = FrameState(silence, 0, 0) if state is None else state.blocks
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
        over_time = OverTime(state or {})
        shown, tail = segments, blocks.tail
        if not segments:
            # A block without frames. The empty sum connects the output to the input, so that its
            # gradient is 0, not missing.
            silence = tail.new_zeros(*tail.shape[:-1], 2 * self.grid().reach)
            shown = [Segment(silence + tail[..., :0].sum(-1, keepdim=True), 0, 0)]
        response = self.ear.response(self.ear.taps(), shown[0].x.shape[-1])

        def heard(segments: Sequence[Segment]) -> list[Tensor]:
            """Filter blocks by the ear."""
            x = [segment.x for segment in segments]
            filtered = self.ear.filter_by(torch.cat(x) if len(x) > 1 else x[0], response)
            starts = (segment.first + self.ear.order // 2 for segment in segments)
            parts = zip(starts, filtered.split(len(x[0])), strict=True)
            return [inside(part, start, blocks.samples) for start, part in parts]

        numbers_alone = not self.return_stages and can_share(tail) and can_compute(tail)
        kernel = self._kernel() if numbers_alone else None
        if kernel is not None and segments:
            return self._integrate_rows(self._rows_of(segments, heard, kernel), over_time)
        items = [slice(None)]
        if len(tail) > 1 and self._takes_items_alone(tail):
            items = [slice(b, b + 1) for b in range(len(tail))]
        parts = map_blocks(
            lambda segment: self._stages_of(segment, heard([segment])[0], blocks.samples),
            [replace(segment, x=segment.x[item]) for item in items for segment in shown],
            blocks.tail,
        )
        by_item = [parts[at : at + len(shown)] for at in range(0, len(parts), len(shown))]
        stages = {
            name: torch.cat([torch.cat([part[name] for part in each], 2) for each in by_item])
            for name in parts[0]
        }
        return self._integrate(stages, over_time)

    def _rows_of(
        self, segments: list[Segment], heard: Callable[..., list[Tensor]], kernel: LoudnessKernel
    ) -> Rows:
        """Compute all blocks of some signals, side by side on the kernels' threads.

        Blocks of one mono signal go through the ear in pairs, which takes 15 % less time. The
        number of a block decides its pair, so that any chunks give the same bits. A signal that is
        not finite goes through the stages.
        """
        batch, ears = segments[0].x.shape[:2]
        used, counts = ears * kernel.channels, [segment.frames for segment in segments]
        values = segments[0].x.new_empty(batch, sum(counts), used + -used % LANES)
        together, reach = 2 if batch * ears == 1 else 1, self.grid().reach
        samples = together * BLOCK_FRAMES * self.hop_length
        places = zip(segments, values.split(counts, 1), strict=True)
        groups = groupby(places, lambda place: (place[0].first + reach) // samples)

        def fill(group: Sequence[tuple[Segment, Tensor]]) -> None:
            signals = heard([segment for segment, _ in group])
            for (segment, rows), batch in zip(group, signals, strict=True):
                rows[..., used:] = 0.0
                for signal, row in zip(batch, rows.split(1), strict=True):
                    if not kernel.specific(signal, row[0]):
                        specific = self._analyse(signal.unsqueeze(0))["specific"]
                        view = Rows(row, ears, kernel.channels).specific
                        view.copy_(specific[:, :, : segment.frames])

        map_blocks(fill, [list(group) for _, group in groups], values)
        return Rows(values, ears, kernel.channels)

    def _takes_items_alone(self, x: Tensor) -> bool:
        """Return True if items of a batch go through the stages alone, for equal bits in any batch.

        Kernels take frames separately anyway; learning computes the tables once for a batch.
        """
        if torch.compiler.is_compiling() or is_transformed(x) or x.device.type != "cpu":
            return False
        by_kernels = can_compute(x) and self.running_spectrum.has_factors()
        return not (by_kernels or wants_derivative(*self.parameters()))

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

    def _stages_of(self, segment: Segment, heard: Tensor, samples: int) -> dict[str, Tensor]:
        """Return the stages of a block that the ear has filtered."""
        stages = {name: y[:, :, : segment.frames] for name, y in self._analyse(heard).items()}
        if self.return_stages:
            half, window = self.ear.order // 2, self.running_spectrum.windows[0]
            left = samples - (segment.first + half + window // 2)
            count = min(segment.frames * self.hop_length, max(left, 0))
            stages["filtered"] = heard[..., window // 2 :][..., :count]
        return stages

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
