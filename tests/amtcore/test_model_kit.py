"""The conformance tests of models find what they are for: each flaw fails the test made for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from amtcore.errors import ShapeError
from amtcore.features import FrameDesign, FrameGrid, FrameModel, StreamKind
from amtcore.features.feature_model import ClipFeatures, Extractor, ExtractStream, Frames
from amtcore.features.frame_model import FrameExtractor
from amtcore.kernels.devices import get_backend
from amtcore.testing.models import ModelConformance

HOP = 160


@dataclass(frozen=True)
class SumParams:
    """Parameters.

    Args:
        gain: Factor of every value.
    """

    gain: float = 1.0


class SumModel(FrameModel[SumParams]):
    """Sum of the magnitudes of each hop."""

    name, summary, default_fs_hz = "sums", "Sum of the magnitudes of each hop", 16000.0
    streams = {"sums": StreamKind("input unit", ("time", "channel"), "sum of a hop")}  # noqa: RUF012
    params_class = SumParams

    def design(self, fs_hz: float, params: SumParams) -> FrameDesign:
        """The sums."""
        return FrameDesign(
            {"sums": FrameGrid(1, HOP)}, lambda signal: {"sums": self.sums(signal) * params.gain}
        )

    def sums(self, signal: Frames) -> Frames:
        """(frame, 1)."""
        frames = len(signal) // HOP
        return np.abs(signal[: frames * HOP]).reshape(frames, HOP).sum(1, keepdims=True)


class TestSums(ModelConformance):
    """Without a flaw it passes everything, given as an object."""

    model = SumModel()
    other_params = {"gain": 2.0}  # noqa: RUF012


class Remembers(SumModel):
    calls = 0

    def sums(self, signal: Frames) -> Frames:
        self.calls += 1
        return super().sums(signal) + np.float32(self.calls)


class Writes(SumModel):
    def design(self, fs_hz: float, params: SumParams) -> FrameDesign:
        return FrameDesign(super().design(fs_hz, params).grids, self._double)

    def _double(self, signal: Frames) -> dict[str, Frames]:
        signal *= 2
        return {"sums": self.sums(signal)}


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("device", ["cpu", "interpreted"])
def test_only_what_says_that_it_reads_only_gets_the_clips_themselves(
    in_batches: bool, device: str
) -> None:
    seen: list[Any] = []

    def compute(signal: Any) -> dict[str, Frames]:
        seen.append(signal)
        if not reads_only and device == "cpu":
            signal *= 2
        return {"sums": np.zeros((len(signal) // HOP, 1), np.float32)}

    batch = (lambda signals: [compute(each) for each in signals]) if in_batches else None
    clip = np.ones(HOP, np.float32)
    for reads_only in (True, False):
        design = FrameDesign(
            {"sums": FrameGrid(1, HOP)}, compute, compute_batch=batch, reads_only=reads_only,
            place=lambda backend: None,
        )  # fmt: skip
        extractor = FrameExtractor(SumModel(), 16000.0, design, ["sums"], {}, {})
        extractor.place(get_backend(device))
        extractor.extract([clip])
        assert clip.sum() == HOP
    if device == "cpu":
        assert [each is clip for each in seen] == [True, False]


class SilenceIsNaN(SumModel):
    def sums(self, signal: Frames) -> Frames:
        with np.errstate(all="ignore"):
            return np.log(super().sums(signal)) * np.float32(0)


class IgnoresGain(SumModel):
    def build(self, *args: Any, **kwargs: Any) -> FrameExtractor:
        built = super().build(*args, **kwargs)
        built._all_params = {}
        return built


class TakesAnything(SumModel):
    def build(self, fs_hz: float, params: Any, streams: Any, dtype: str = "float32") -> Any:
        known = {key: params[key] for key in params if key in self.parameters}
        known = {key: each for key, each in known.items() if isinstance(each, float)}
        return super().build(fs_hz, known, {name: {} for name in streams}, dtype)


class _Wrapped(FrameExtractor):
    """An extractor of the model above with something else in it."""

    def __init__(self, whole: FrameExtractor) -> None:
        vars(self).update(vars(whole))


class OneFrameMore(_Wrapped):
    def n_frames(self, n_samples: int) -> dict[str, int]:
        return {"sums": n_samples // HOP + 1}


class Doubles(_Wrapped):
    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        return [{"sums": made["sums"].astype(np.float64)} for made in super().extract(clips)]


class HidesNaN(_Wrapped):
    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        return super().extract([np.nan_to_num(clip) for clip in clips])


class Normalises(_Wrapped):
    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        made = super().extract(clips)
        top = max((each["sums"].max(initial=0) for each in made), default=1) or 1
        return [{"sums": each["sums"] / top} for each in made]


class SaysTooLittle(SumModel):
    """Adds up for ever, and says that it forgets at once."""

    def design(self, fs_hz: float, params: SumParams) -> FrameDesign:
        return replace(super().design(fs_hz, params), memory_s=0.0)

    def sums(self, signal: Frames) -> Frames:
        return np.cumsum(super().sums(signal), axis=0)


class WrongGrid(_Wrapped):
    """Frames of 3 s that are said to begin with every second."""

    def __init__(self, whole: FrameExtractor) -> None:
        super().__init__(whole)
        self.memory_s, self.streams = (
            0.0,
            tuple(replace(info, frame_rate_hz=1 / 3) for info in self.streams),
        )

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        made = super().extract(clips)
        return [{"sums": each["sums"][::300][: len(each["sums"]) // 300]} for each in made]


class Cuts(_Wrapped):
    """Claims to stream, but drops what a chunk leaves over."""

    def __init__(self, whole: FrameExtractor) -> None:
        super().__init__(whole)
        self.can_stream = True

    def open_stream(self) -> Any:
        extractor = self

        class Stream(ExtractStream):
            def push(self, chunk: Frames) -> ClipFeatures:
                return extractor.extract([chunk])[0]

            def finish(self) -> ClipFeatures:
                return extractor.extract([np.zeros(0, np.float32)])[0]

        return Stream()


class WrongRate(_Wrapped):
    def __init__(self, whole: FrameExtractor) -> None:
        super().__init__(whole)
        self.streams = tuple(replace(info, frame_rate_hz=90.0) for info in self.streams)


class WrongWidths(_Wrapped):
    def __init__(self, whole: FrameExtractor) -> None:
        super().__init__(whole)
        self.streams = tuple(replace(info, channel_offsets=(0, 2)) for info in self.streams)


class Chameleon(_Wrapped):
    """A hash that is another every time."""

    def settings(self) -> str:
        self.calls = getattr(self, "calls", 0) + 1
        return str(self.calls)


class NotJson(_Wrapped):
    def describe(self) -> dict[str, Any]:
        return super().describe() | {"dtype": self.dtype}


FLAWS: dict[type, str] = {
    HidesNaN: "test_not_a_number_is_never_hidden",
    Remembers: "test_a_second_time_gives_the_same",
    SilenceIsNaN: "test_silence_is_finite",
    IgnoresGain: "test_the_hash_follows_the_constants",
    OneFrameMore: "test_frames_are_as_many_as_promised",
    Doubles: "test_frames_are_as_many_as_promised",
    Normalises: "test_a_clip_does_not_depend_on_its_neighbours",
    Cuts: "test_chunks_are_the_whole",
    SaysTooLittle: "test_it_forgets_as_it_says",
    WrongGrid: "test_it_forgets_as_it_says",
    WrongRate: "test_frames_come_at_their_rate",
    WrongWidths: "test_streams_agree_with_themselves",
    Chameleon: "test_the_hash_follows_the_constants",
    NotJson: "test_what_is_stored_of_it_is_json",
}


def _suite(flaw: type) -> ModelConformance:
    class Suite(ModelConformance):
        model = flaw() if issubclass(flaw, SumModel) else SumModel()
        other_params = {"gain": 2.0}  # noqa: RUF012

        @classmethod
        def build(cls, *args: Any, **kwargs: Any) -> Extractor:
            whole = super().build(*args, **kwargs)
            return flaw(whole) if issubclass(flaw, _Wrapped) else whole

    return Suite()


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.__name__)
def test_a_flaw_is_found(flaw: type) -> None:
    suite = _suite(flaw)
    with pytest.raises((AssertionError, TypeError, ShapeError)):
        getattr(suite, FLAWS[flaw])(suite.build())


def test_a_model_that_takes_anything_is_found() -> None:
    suite = _suite(TakesAnything)
    with pytest.raises(pytest.fail.Exception):
        suite.test_wrong_parameters_are_refused()
    with pytest.raises(pytest.fail.Exception):
        suite.test_wrong_streams_are_refused(suite.build())


def test_a_model_that_writes_into_clips_is_found() -> None:
    """`FrameExtractor` hands every model a copy; an extractor of one's own may forget to."""
    suite = _suite(Writes)
    suite.test_clips_are_left_as_they_are(suite.build())

    class InPlace(_Wrapped):
        def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
            for clip in clips:
                np.multiply(clip, 2, out=clip)
            return super().extract(clips)

    careless = _suite(InPlace)
    with pytest.raises((AssertionError, ValueError)):
        careless.test_clips_are_left_as_they_are(careless.build())


def test_parameters_need_a_request_that_changes_the_hash() -> None:
    class Silent(ModelConformance):
        model = SumModel

    with pytest.raises(AssertionError, match="set other_params"):
        Silent().test_the_hash_follows_the_constants(Silent.build())
