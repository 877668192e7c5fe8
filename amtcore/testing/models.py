"""Conformance tests of a feature model, as a class of pytest tests.

    class TestLevel(ModelConformance):
        model = "level"                       # registered name, FeatureModel, or class of one
        other_params = {"hop_s": 0.02}

Clips are short. Values are compared bit by bit, because a job must write the same bytes again, for
any batches of rows and any cuts of a long row.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from amtcore.features.feature_model import (
    ClipFeatures,
    Extractor,
    FeatureModel,
    Frames,
    OptionsByStream,
    StreamValues,
)
from amtcore.features.registry import get_model
from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo
from amtcore.units import Calibration

#: RMS of the noise by input unit of the model; it is 60 dB SPL.
RMS = {"pa": 0.02}
RMS_OTHER = 0.01
#: Seconds of signal in which frames are counted for their rate, and seconds before them. A frame
#: may need several seconds, such as 3 s of short-term loudness.
RATE_S, START_S = 3600, 10
#: Most effect of earlier sound, relative to the largest value; loops leave this much in float32.
FORGOTTEN = 1e-3
#: Longest grid in seconds that is tested.
LONGEST_GRID_S = 60


class ModelConformance:
    """The tests. A subclass names the model and may change the other attributes.

    Attributes:
        model: Registered name, a `FeatureModel`, or a class of one.
        params: Parameters of the model in the tests.
        other_params: Parameters that must change the hash of constants; needed if the model has
            parameters.
        streams: Streams with their options; None takes every stream without options.
        fs_hz: Sampling rate; None takes the model's default.
        seconds: Length of the longest clip; it should give some frames.
    """

    model: ClassVar[str | FeatureModel | type[FeatureModel]]
    params: ClassVar[Mapping[str, Any]] = {}
    other_params: ClassVar[Mapping[str, Any] | None] = None
    streams: ClassVar[OptionsByStream | None] = None
    fs_hz: ClassVar[float | None] = None
    seconds: ClassVar[float] = 0.12

    @pytest.fixture
    def extractor(self) -> Extractor:
        """Build the model with its streams once for all tests of the class."""
        return _built(type(self).build)

    @classmethod
    def described(cls) -> FeatureModel:
        """Return the model under test."""
        if isinstance(cls.model, str):
            return get_model(cls.model)
        return cls.model() if isinstance(cls.model, type) else cls.model

    @classmethod
    def build(
        cls, params: Mapping[str, Any] | None = None, streams: OptionsByStream | None = None
    ) -> Extractor:
        """Build a new extractor; None takes the attribute of the class."""
        model = cls.described()
        fs_hz = model.default_fs_hz if cls.fs_hz is None else cls.fs_hz
        params = cls.params if params is None else params
        streams = cls.streams if streams is None else streams
        if streams is None:
            streams = {name: {} for name in model.streams}
        return model.build(fs_hz, params, streams)

    def test_it_says_what_it_is(self) -> None:
        model = self.described()
        assert model.name and model.name == model.name.strip()
        assert model.summary and "\n" not in model.summary
        assert math.isfinite(model.default_fs_hz) and model.default_fs_hz > 0
        assert Calibration(rms1_db_spl=100.0).gain_for_rms(1.0, model.input_unit) > 0
        assert model.streams and set(model.default_streams) <= set(model.streams)
        for name, kind in model.streams.items():
            assert name.isidentifier(), f"stream {name!r} names a column: expected an identifier"
            assert kind.unit and kind.summary and len(kind.axes) == 2
            assert kind.layout in ("frames", "events")

    def test_every_parameter_has_a_type_a_default_and_a_meaning(self) -> None:
        for name, parameter in self.described().parameters.items():
            assert parameter.name == name and parameter.type_text
            assert parameter.doc, f"parameter {name!r} has no meaning in the docstring's Args"
            assert "\n" not in parameter.doc
            assert json.loads(json.dumps(parameter.to_dict(), allow_nan=False))

    def test_streams_agree_with_themselves(self, extractor: Extractor) -> None:
        model = self.described()
        assert len({info.name for info in extractor.streams}) == len(extractor.streams)
        for info in extractor.streams:
            assert info.model == model.name == extractor.model
            assert info.width >= 1 and info.frame_rate_hz >= 0
            assert info.channel_offsets[0] == 0 and info.channel_offsets[-1] == info.width
            assert all(a < b for a, b in pairwise(info.channel_offsets))
            assert len(info.fc_hz) in (0, len(info.channel_offsets) - 1)
            assert len(info.mfc_hz) in (0, info.width) and len(info.columns) in (0, info.width)
            assert all(math.isfinite(value) for value in (*info.fc_hz, *info.mfc_hz))
            assert StreamInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info

    def test_what_is_stored_of_it_is_json(self, extractor: Extractor) -> None:
        described = extractor.describe()
        assert json.loads(json.dumps(described, allow_nan=False)) == described
        assert described["model"] == extractor.model
        assert described["params"] == dict(self.params)
        assert described["buffers_sha256"] == extractor.buffers_sha256()
        model = self.described()
        again = pickle.loads(pickle.dumps(model))
        assert (again.name, again.streams) == (model.name, model.streams)
        assert pickle.loads(pickle.dumps(extractor.streams)) == extractor.streams

    def test_frames_are_as_many_as_promised(self, extractor: Extractor) -> None:
        """`n_frames` and `extract` agree for clips of all lengths, an empty one among them."""
        for clip in self.clips(extractor):
            (made,) = extractor.extract([clip])
            n_samples = clip.shape[-1]
            wanted = extractor.n_frames(n_samples)
            assert list(made) == [info.name for info in extractor.streams] == list(wanted)
            for info in extractor.streams:
                values = made[info.name]
                shape = (wanted[info.name], info.width)
                assert _dense(values).shape == shape, f"{n_samples} samples"
                if not isinstance(values, SpikeEvents):
                    assert values.dtype == extractor.dtype

    def test_frames_come_at_their_rate(self, extractor: Extractor) -> None:
        """An hour more of signal has an hour more of frames; more samples never have fewer."""
        start, hour = (round(extractor.fs_hz * seconds) for seconds in (START_S, RATE_S))
        before, after = extractor.n_frames(start), extractor.n_frames(start + hour)
        for info in extractor.streams:
            more = after[info.name] - before[info.name]
            if info.frame_rate_hz == 0:
                assert (more, after[info.name]) == (0, 1), "one row a clip"
            else:
                assert abs(more - info.frame_rate_hz * hour / extractor.fs_hz) <= 1
        counts = [extractor.n_frames(n) for n in range(0, start, max(1, start // 97))]
        for a, b in pairwise(counts):
            assert all(a[name] <= b[name] for name in a)

    def test_silence_is_finite(self, extractor: Extractor) -> None:
        (made,) = extractor.extract([np.zeros_like(self._noise(extractor, 1)[0])])
        assert all(np.isfinite(_dense(values)).all() for values in made.values())

    def test_no_clips_give_nothing(self, extractor: Extractor) -> None:
        assert extractor.extract([]) == []

    def test_a_second_time_gives_the_same(self, extractor: Extractor) -> None:
        """An earlier call, or another extractor, changes no bit."""
        clip = self.clips(extractor)[-1]
        first = extractor.extract([clip])
        _assert_same(extractor.extract([clip]), first)
        _assert_same(self.build().extract([clip]), first)

    def test_a_clip_does_not_depend_on_its_neighbours(self, extractor: Extractor) -> None:
        clips = self.clips(extractor)
        alone = [extractor.extract([clip])[0] for clip in clips]
        _assert_same(extractor.extract(clips), alone)
        _assert_same(extractor.extract(clips[::-1]), alone[::-1])

    def test_clips_are_left_as_they_are(self, extractor: Extractor) -> None:
        """Clips that are read-only, or views of other arrays, are valid and do not change."""
        clip = self.clips(extractor)[-1]
        (wanted,) = extractor.extract([clip])
        fixed, spread = clip.copy(), np.repeat(clip, 2, -1)[..., ::2]
        fixed.flags.writeable = False
        _assert_same(extractor.extract([fixed, spread]), [wanted, wanted])
        np.testing.assert_array_equal(spread, clip)

    def test_two_channels(self, extractor: Extractor) -> None:
        """A model of two ears takes both and gives as many frames."""
        clip = np.atleast_2d(self.clips(extractor)[-1])[0]
        for channels in extractor.input_channels:
            signal = clip if channels == 1 else np.stack([clip] * channels)
            (made,) = extractor.extract([signal])
            for name, frames in extractor.n_frames(len(clip)).items():
                assert len(_dense(made[name])) == frames

    def test_what_is_no_clip_is_refused(self, extractor: Extractor) -> None:
        channels = max(extractor.input_channels) + 1
        refused: Sequence[Any] = [np.zeros(6400, np.int16), np.zeros((channels, 64), np.float32)]
        for clip in refused:
            with pytest.raises(ValueError):
                extractor.extract([clip])

    def test_not_a_number_is_never_hidden(self, extractor: Extractor) -> None:
        """The model refuses a clip with NaN, or every value that the NaN changes is NaN.

        The other clip of the batch does not change.
        """
        clean, other = self._noise(extractor, 2)
        bad = clean.copy()
        bad[..., bad.shape[-1] // 2] = math.nan
        (wanted, neighbour) = extractor.extract([clean, other])
        try:
            found, beside = extractor.extract([bad, other])
        except ValueError:
            return
        _assert_same([beside], [neighbour])
        for name, values in found.items():
            got, before = _dense(values), _dense(wanted[name])
            hidden = (got != before) & np.isfinite(got)
            assert not hidden.any(), f"{name}: {hidden.sum()} values changed and look sound"

    def test_chunks_are_the_whole(self, extractor: Extractor) -> None:
        if not extractor.can_stream:
            with pytest.raises(ValueError):
                extractor.open_stream()
            return
        (clip,) = self._noise(extractor, 1)
        n = clip.shape[-1]
        cases = ([0, n], [0, 1, 1, n // 3, n // 3 + 7, n], [*range(0, n, n // 5), n], [0, 0])
        for cuts in cases:
            stream = extractor.open_stream()
            parts = [stream.push(clip[..., a:b]) for a, b in pairwise(cuts)] + [stream.finish()]
            joined: ClipFeatures = {
                name: np.concatenate([_dense(part[name]) for part in parts]) for name in parts[0]
            }
            _assert_same([joined], extractor.extract([clip[..., : cuts[-1]]]))

    def test_it_forgets_as_it_says(self, extractor: Extractor) -> None:
        """After 17 times `memory_s`, frames do not depend on earlier sound, here 30 dB louder.

        Jobs cut long recordings by this property. Models without `memory_s` are not tested.
        """
        if extractor.memory_s is None or extractor.grid_s > LONGEST_GRID_S:
            return
        grid_s = extractor.grid_s
        early_s = grid_s * math.ceil((17 * extractor.memory_s + 1) / grid_s)
        begin, kept = grid_s + early_s, 2 * grid_s
        (signal,) = self._noise(extractor, 1, begin + kept)
        first = round(grid_s * extractor.fs_hz)
        signal[..., :first] *= np.float32(10**1.5)
        (whole,), (part,) = (extractor.extract([x]) for x in (signal, signal[..., first:]))
        for info in extractor.streams:
            wanted, got = (_dense(made[info.name]) for made in (whole, part))
            ahead = wanted[round(begin * info.frame_rate_hz) :]
            after = got[round(early_s * info.frame_rate_hz) :]
            assert ahead.shape == after.shape, f"{info.name}: grid_s is wrong"
            apart = np.abs(ahead.astype(np.float64) - after).max()
            assert apart <= FORGOTTEN * np.abs(wanted).max(), f"{info.name}: memory_s is too short"

    def test_the_hash_follows_the_constants(self, extractor: Extractor) -> None:
        sha256 = extractor.buffers_sha256()
        assert len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")
        assert extractor.buffers_sha256() == self.build().buffers_sha256() == sha256
        if self.other_params is None:
            known = list(self.described().parameters)
            assert not known, f"set other_params: values of {known} that change the features"
            return
        assert self.build(params=self.other_params).buffers_sha256() != sha256

    def test_wrong_parameters_are_refused(self) -> None:
        with pytest.raises(ValueError, match="no parameter 'no_such_parameter'"):
            self.build(params={**self.params, "no_such_parameter": 1})
        for name, parameter in self.described().parameters.items():
            if parameter.type_text != "any value":
                with pytest.raises(ValueError, match=name):
                    self.build(params={**self.params, name: object()})

    def test_wrong_streams_are_refused(self, extractor: Extractor) -> None:
        for info in extractor.streams:
            options = dict((self.streams or {}).get(info.name, {}))
            with pytest.raises(ValueError, match="no_such_option"):
                self.build(streams={info.name: {**options, "no_such_option": 1}})
        with pytest.raises(ValueError, match="no_such_stream"):
            self.build(streams={"no_such_stream": {}})

    @classmethod
    def _noise(
        cls, extractor: Extractor, clips: int, seconds: float | None = None
    ) -> Sequence[Frames]:
        """Return clips of `seconds`, as long as the longest clip by default.

        A clip is (time,), or (channel, time) for a model that takes no single signal.
        """
        samples = round((cls.seconds if seconds is None else seconds) * extractor.fs_hz)
        channels = min(extractor.input_channels)
        axes = (samples,) if channels == 1 else (channels, samples)
        noise = np.random.default_rng(1).standard_normal((clips, *axes))
        return [*(RMS.get(extractor.input_unit, RMS_OTHER) * noise).astype(np.float32)]

    @classmethod
    def clips(cls, extractor: Extractor) -> Sequence[Frames]:
        """Return noise of several lengths: none, one sample, about a frame, more; longest last."""
        whole = cls._noise(extractor, 4)
        rates = [info.frame_rate_hz for info in extractor.streams if info.frame_rate_hz]
        frame = round(extractor.fs_hz / min(rates, default=extractor.fs_hz))
        n = whole[0].shape[-1]
        about = (min(n, max(0, frame + i)) for i in (-1, 0, 1))
        lengths = [*sorted({0, 1, 2, *about, n // 2 + 1}), n]
        return [whole[i % 4][..., :length] for i, length in enumerate(lengths)]


@lru_cache(maxsize=1)
def _built(build: Callable[[], Extractor]) -> Extractor:
    return build()


def _dense(values: StreamValues) -> NDArray[Any]:
    """Return frames unchanged, and events as counts."""
    return values.dense() if isinstance(values, SpikeEvents) else values


def _assert_same(found: Sequence[ClipFeatures], wanted: Sequence[ClipFeatures]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        for name in one:
            np.testing.assert_array_equal(_dense(one[name]), _dense(other[name]), err_msg=name)
