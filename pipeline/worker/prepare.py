"""Prepare a row for the models: decode it, pick channels, resample, calibrate.

A clip of up to two minutes is held whole: the decoded length decides, so that a file always takes
the same path. A longer clip is read block by block, twice if its level has to be known first.
Around a planned span more is read, and its frames are dropped again:

    read      |--- lead ---|======= span =======|- tail -|
    frames    | dropped    | kept, from 0 on    | dropped

A variant is made of the decoded channels, before they are resampled: all models hear the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.audio.channels import EARS, as_model_input, clips_of_channels
from earmill.pipeline.audio.decode import AudioFacts, BlockReader, Blocks
from earmill.pipeline.audio.resample import ResampleStream, resample
from earmill.pipeline.audio.time_span import resampled_length
from earmill.pipeline.common.errors import ChannelIndexError, PairLengthError, TooLongError
from earmill.pipeline.common.monitoring import doing
from earmill.pipeline.formats.row_table import VARIANT_FACTS
from earmill.pipeline.formats.rows import Scalar
from earmill.pipeline.sources.base import Item
from earmill.pipeline.sources.fetch import check_arrived
from earmill.pipeline.spec.job import AudioSpec
from earmill.pipeline.spec.spans import TAIL_S
from earmill.pipeline.worker.pairs import PairStream, ReferenceAudio, aligned, reference_errors
from earmill.pipeline.worker.variants import VariantMaker

# Provenance columns of a row that are fields of its item, and of its decoded audio.
OF_ITEM = ("uri", "start_s", "end_s", "etag", "size", "mtime")
OF_AUDIO = (
    *("container", "codec", "channels", "frames", "nbytes", "pcm_sha256", "decoder"),
    *("decoder_version", "header_size", "unterminated", "span_short_s"),
)
Signal = npt.NDArray[np.float32]
ModelOutput = Mapping[str, Any]  # Stream name -> frames, or the events of a stretch.


@dataclass(frozen=True)
class SpanContext:
    lead_s: int = 0  # Whole seconds before the span.
    tail_s: int = 0  # Whole seconds after the span.
    own_s: int | None = None  # Seconds of the span; None for a span up to the end.


def span_context(item: Item, warm_up_s: int) -> SpanContext | None:
    """Return the context of a planned span, with `warm_up_s` before it; None for any other row."""
    if item.part_of is None or item.start_s is None:
        return None
    whole_start_s, whole_end_s = item.part_of
    lead_s = min(warm_up_s, round(item.start_s - whole_start_s))
    if item.end_s is None or item.end_s == whole_end_s:
        return SpanContext(lead_s)
    return SpanContext(lead_s, TAIL_S, round(item.end_s - item.start_s))


class FrameTrim:
    """Drops the frames of a span's context, stretch by stretch."""

    def __init__(self, margins: SpanContext, streams: Iterable[StreamInfo]) -> None:
        self._ends: dict[str, tuple[int, int | None]] = {}
        for info in streams:
            first, stop = round(margins.lead_s * info.frame_rate_hz), None
            if margins.own_s is not None:
                stop = round((margins.lead_s + margins.own_s) * info.frame_rate_hz)
            self._ends[info.name] = first, stop
        self._seen = dict.fromkeys(self._ends, 0)

    def take(self, made: ModelOutput) -> dict[str, Any]:
        """Return the span's frames in the next stretch of some streams; errors pass unchanged."""
        return {name: self._own(name, values) for name, values in made.items()}

    def check(self) -> None:
        for name, (_, stop) in self._ends.items():
            if stop is not None and self._seen[name] < stop:
                raise RuntimeError(
                    f"stream {name}: expected {stop} frames of a span and its warm-up, got "
                    f"{self._seen[name]}: the model looks ahead by more than {TAIL_S} s and must "
                    "not state memory_s"
                )

    def _own(self, name: str, values: Any) -> Any:
        first, stop = self._ends[name]
        seen = self._seen[name]
        if isinstance(values, np.ndarray):
            self._seen[name] += len(values)
            end = None if stop is None else max(0, stop - seen)
            return values[max(0, first - seen) : end]
        if isinstance(values, Exception):
            self._seen[name] = first if stop is None else stop
            return values
        self._seen[name] += values.n_frames
        return _events_between(values, first, stop)


def _events_between(events: Any, first: int, stop: int | None) -> Any:
    """Return events of steps from `first` up to `stop`, counted from `first`."""
    begin, last = max(first, events.first_frame), events.first_frame + events.n_frames
    if stop is not None:
        begin, last = min(begin, stop), min(last, stop)
    last = max(begin, last)
    low, high = np.searchsorted(events.frame, (begin, last))
    return replace(
        events,
        frame=events.frame[low:high] - first,
        channel=events.channel[low:high],
        count=events.count[low:high],
        first_frame=begin - first,
        n_frames=last - begin,
    )


LONG_S = 120.0  # Longer clips are streamed: 21 MB of samples at 44.1 kHz.


@dataclass(frozen=True, slots=True)
class Target:
    fs_hz: float
    unit: str
    ears: int = 1
    least_ears: int = 1  # Two for a model that compares two recordings.


@dataclass(frozen=True, slots=True, eq=False)
class Unresampled:
    """A signal (ear, time) at the file's rate that a device will resample, then scale by `gain`."""

    ears: Signal
    from_hz: float
    to_hz: float
    ears_of_model: int
    gain: float

    @property
    def shape(self) -> tuple[int, ...]:
        time = (resampled_length(self.ears.shape[-1], self.from_hz, self.to_hz),)
        return (len(self.ears), *time) if len(self.ears) == self.ears_of_model == EARS else time

    @property
    def nbytes(self) -> int:
        return max(self.ears.nbytes, len(self.ears) * self.shape[-1] * self.ears.itemsize)


@dataclass(frozen=True, slots=True)
class Clip:
    """One clip of one row, whole. Channel -1 means mixed channels or both ears. Each target has a
    signal, (time,) or (2, time); equal targets share one array."""

    item: Item
    channel: int
    seconds: float
    signals: tuple[Signal | Unresampled, ...]
    facts: dict[str, Scalar] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum({id(signal): signal.nbytes for signal in self.signals}.values())


class Preparer:
    """Decodes rows into clips for `targets`; clips above `long_s` are streamed. `on_device` leaves
    the resampling of whole clips to a device. `opened` decodes a stream, as `BlockReader`."""

    def __init__(
        self,
        audio: AudioSpec,
        targets: tuple[Target, ...],
        long_s: float = LONG_S,
        on_device: bool = False,
        opened: Callable[..., Blocks] = BlockReader,
        warm_up_s: int = 0,
    ) -> None:
        from amtcore.units import Calibration  # loads torch, which only workers need

        self.targets, self.long_s, self.warm_up_s = targets, long_s, warm_up_s
        self.channels, self.resampler = audio.channels, audio.resampler
        self.calibration = Calibration.from_dict(audio.calibration.to_dict())
        self._limits, self._on_device = audio.limits(), on_device
        self._fixed_gains = self.gains(1.0)  # For calibrations that do not look at the clip.
        self._open, variants = opened, audio.variants
        self._variants = None if variants is None else VariantMaker(variants, opened)

    def open(self, item: Item, stream: BinaryIO | PairStream) -> list[Clip] | LongClip:
        """Decode a row: return a clip for each channel, or a long clip, which owns the stream of
        the row itself."""
        pair = stream if isinstance(stream, PairStream) else None
        own: Any = stream if pair is None else pair.own
        with ExitStack() as closing:
            closing.callback(stream.close)
            reader = closing.enter_context(self.read(item, own))
            blocks, frames = [], 0
            remaining = iter(reader)
            for block in remaining:
                blocks.append(block)
                frames += block.shape[1]
                if frames > self.long_s * reader.rate_hz:
                    if item.variant is not None:
                        raise TooLongError(
                            f"{item.uri}: expected at most {self.long_s:g} s for a variant, which "
                            "needs the whole clip, got more; cut it into clips with a manifest"
                        )
                    closing.pop_all()
                    if pair is not None:
                        pair.reference.close()
                    return LongClip(self, item, own, reader, blocks, remaining)
            reference = None if pair is None else self._decoded_reference(pair)
        waveform = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
        audio, clips = reader.facts, []
        make = self._for_device if self._on_device else self._resampled
        for channel, rows in clips_of_channels(self.channels, reader.channel_ids):
            ears, gains, varied = waveform[rows], self._fixed_gains, dict[str, Scalar]()
            if self._variants is not None and item.variant is not None:
                ears, varied = self._variants.make(item, item.variant, ears, audio.rate_hz)
            if self.calibration.needs_whole_clip:
                squares = float(np.square(ears, dtype=np.float64).sum())
                gains = self.gains(math.sqrt(squares / ears.size))
            signals = make(ears, audio.rate_hz, gains)
            facts = self.facts(item, audio, gains) | varied
            if reference is None:
                if len(ears) < (least := max(target.least_ears for target in self.targets)):
                    raise ChannelIndexError(f"expected {least} channels, got {len(ears)}")
            else:
                if (got := ears.shape[1]) != (expected := waveform.shape[1]):
                    # A small change of speed is within the tolerance of `aligned`.
                    raise PairLengthError(
                        f"{item.uri}: expected {expected} samples, as in the clean row, of a "
                        f"variant that is compared with a reference recording, got {got}; leave "
                        "out its speed"
                    )
                signals = self._paired(item, signals, reference, rows, gains)
                facts |= reference.facts()
            seconds = ears.shape[1] / audio.rate_hz if varied else audio.seconds
            clips.append(Clip(item, channel, seconds, signals, facts))
        return clips

    def _decoded_reference(self, pair: PairStream) -> ReferenceAudio:
        """Decode the reference recording of a row, as the row is decoded."""
        with reference_errors(pair.item):
            try:
                with self.read(pair.item, pair.reference) as reader:
                    blocks, frames = [], 0
                    for block in reader:
                        blocks.append(block)
                        frames += block.shape[1]
                        if frames > self.long_s * reader.rate_hz:
                            raise TooLongError(f"expected at most {self.long_s:g} s, got more")
                    return ReferenceAudio(pair.item, np.concatenate(blocks, axis=1), reader.facts)
            finally:
                check_arrived(pair.reference, pair.item.uri)

    def _paired(
        self,
        item: Item,
        signals: Sequence[Any],
        reference: ReferenceAudio,
        rows: slice,
        gains: Sequence[float],
    ) -> tuple[Any, ...]:
        """Return the signals of a row, with its reference recording for models of pairs. Both have
        the row's gain, because such models compare levels."""
        made: dict[Target, Signal] = {}
        for target, own, gain in zip(self.targets, signals, gains, strict=True):
            if target.least_ears == EARS and target not in made:
                with reference_errors(reference.item):
                    ears, rate_hz = reference.ears(rows), reference.audio.rate_hz
                    other = self._at_rate(ears, rate_hz, target.fs_hz)[0] * np.float32(gain)
                made[target] = aligned(item, own, reference.item, other, target.fs_hz)
        pairs = zip(self.targets, signals, strict=True)
        return tuple(made.get(target, own) for target, own in pairs)

    def frame_trim(self, item: Item, streams: Iterable[StreamInfo]) -> FrameTrim | None:
        """Return the trim of one channel of a planned span; None for any other row."""
        margins = span_context(item, self.warm_up_s)
        return None if margins is None else FrameTrim(margins, streams)

    def gains(self, rms: float) -> tuple[float, ...]:
        return tuple(self.calibration.gain_for_rms(rms, each.unit) for each in self.targets)

    def facts(self, item: Item, audio: AudioFacts, gains: Sequence[float]) -> dict[str, Scalar]:
        """Return a row's provenance; `gain_db` is the gain into the first model's unit."""
        resampled = any(target.fs_hz != audio.rate_hz for target in self.targets)
        return {
            **{name: getattr(item, name) for name in OF_ITEM},
            **{name: getattr(audio, name) for name in OF_AUDIO},
            "rate_hz": float(audio.rate_hz),
            "bytes_sha256": audio.bytes_sha256 or None,
            "resampler": self.resampler if resampled else None,
            "resampled_from_hz": float(audio.rate_hz) if resampled else None,
            # Digital silence at a normalised level has no gain.
            "gain_db": 20 * math.log10(gains[0]) if gains[0] > 0 else None,
            **({} if self._variants is None else dict.fromkeys(VARIANT_FACTS)),
        }

    def read(self, item: Item, stream: BinaryIO) -> Blocks:
        margins = span_context(item, self.warm_up_s) or SpanContext()
        return self._open(
            stream,
            uri=item.uri,
            start_s=item.start_s,
            end_s=item.end_s,
            channels=self.channels,
            limits=self._limits,
            margins_s=(margins.lead_s, margins.tail_s),
        )

    def ready(self, by_rate: Mapping[float, Signal], gains: Sequence[float]) -> tuple[Signal, ...]:
        """Return each target's signal from (ear, time); equal targets share one array."""
        made: dict[Target, Signal] = {}
        for target, gain in zip(self.targets, gains, strict=True):
            signal = as_model_input(by_rate[target.fs_hz], target.ears)
            if gain != 1.0:
                out = signal if len(self.targets) == 1 else None
                signal = np.multiply(signal, np.float32(gain), out=out)
            made[target] = signal
        return tuple(made[target] for target in self.targets)

    def _resampled(
        self, ears: Signal, rate_hz: float, gains: Sequence[float]
    ) -> tuple[Signal, ...]:
        rates = {target.fs_hz for target in self.targets}
        by_rate = {fs_hz: self._at_rate(ears, rate_hz, fs_hz) for fs_hz in rates}
        return self.ready(by_rate, gains)

    def _at_rate(self, ears: Signal, rate_hz: float, fs_hz: float) -> Signal:
        """Return (ear, time) at another rate; the same array if the rates are equal."""
        if fs_hz == rate_hz:
            return ears
        with doing("resample"):
            length = resampled_length(ears.shape[1], rate_hz, fs_hz)
            resampled = np.empty((len(ears), length), np.float32)
            for ear, into in zip(ears, resampled, strict=True):
                resample(ear, rate_hz, fs_hz, self.resampler, into)
            return resampled

    def _for_device(
        self, ears: Signal, rate_hz: float, gains: Sequence[float]
    ) -> tuple[Unresampled, ...]:
        for fs_hz in {target.fs_hz for target in self.targets}:
            # Refuses rates that the device cannot convert.
            ResampleStream(rate_hz, fs_hz, self.resampler)
        return tuple(
            Unresampled(ears, float(rate_hz), target.fs_hz, target.ears, gain)
            for target, gain in zip(self.targets, gains, strict=True)
        )


class LongClip:
    """A row too long to hold: read it once with `pieces`, then ask for `seconds` and `facts`.
    `blocks` were decoded before the length was known; `remaining` continues there."""

    def __init__(
        self,
        preparer: Preparer,
        item: Item,
        stream: BinaryIO,
        reader: Blocks,
        blocks: list[Signal],
        remaining: Iterator[Signal],
    ) -> None:
        self.item = item
        self._clips = clips_of_channels(preparer.channels, reader.channel_ids)
        self.channels = tuple(channel for channel, _ in self._clips)
        self.preparer, self.stream, self._reader = preparer, stream, reader
        self._blocks, self._remaining = blocks, remaining
        self._gains: list[tuple[float, ...]] = [preparer.gains(1.0) for _ in self._clips]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    @property
    def seconds(self) -> float:
        """Duration; known after the last piece."""
        return self._reader.facts.seconds

    def facts(self, position: int) -> dict[str, Scalar]:
        """Return the provenance of one of `channels`; known after the last piece."""
        gains = self._gains[position]
        return self.preparer.facts(self.item, self._reader.facts, gains)

    def pieces(self) -> Iterator[list[tuple[Signal, ...]]]:
        """Yield the clip piece by piece: per entry of `channels`, one signal per target, perhaps
        empty. Closes the stream at the end."""
        try:
            if self.preparer.calibration.needs_whole_clip:
                self._measure()
            rates = {target.fs_hz for target in self.preparer.targets}
            from_hz, quality = self._reader.rate_hz, self.preparer.resampler
            channels = self._reader.channel_ids
            streams = {hz: [ResampleStream(from_hz, hz, quality) for _ in channels] for hz in rates}
            for block in chain(self._undelivered(), [None]):
                by_rate = {}
                with doing("resample"):
                    for hz, of_ears in streams.items():
                        if block is None:  # the end of the clip
                            made = [stream.finish() for stream in of_ears]
                        else:
                            pairs = zip(of_ears, block, strict=True)
                            made = [stream.push(ear) for stream, ear in pairs]
                        by_rate[hz] = np.stack(made)
                yield [
                    self.preparer.ready({hz: ears[rows] for hz, ears in by_rate.items()}, gains)
                    for (_, rows), gains in zip(self._clips, self._gains, strict=True)
                ]
        finally:
            self.close()

    def close(self) -> None:
        self._reader.close()
        self.stream.close()

    def _undelivered(self) -> Iterator[Signal]:
        # Each block is let go once it was handed out.
        while self._blocks:
            yield self._blocks.pop(0)
        yield from self._remaining

    def _measure(self) -> None:
        squares, frames = np.zeros(len(self._reader.channel_ids)), 0
        for block in self._undelivered():
            squares += np.square(block, dtype=np.float64).sum(axis=1)
            frames += block.shape[1]
        self._gains = [
            self.preparer.gains(math.sqrt(squares[rows].mean() / frames)) for _, rows in self._clips
        ]
        self._reader.close()
        self._reader = self.preparer.read(self.item, self.stream)
        self._remaining = iter(self._reader)
