"""From bytes to what a model hears: levels in dB SPL, rates, ears, whole clips and long ones."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio.channels import MIXED
from earmill.pipeline.common.errors import RowError, TruncatedError
from earmill.pipeline.sources.base import Item
from earmill.pipeline.spec.job import AudioSpec
from earmill.pipeline.worker.prepare import Clip, LongClip, Preparer, Signal, Target
from tests.pipeline.audio_factory import Samples, encode, speech_like, with_bad_sample
from tests.short import drawn

RATE_HZ = 16000
PA, MODEL_UNIT = "pa", "rms1=100dB"
PLAIN = Target(RATE_HZ, MODEL_UNIT)


class Watched(io.BytesIO):
    """A stream that remembers that it was closed."""


def preparer(*targets: Target, long_s: float = 120.0, **audio: object) -> Preparer:
    return Preparer(AudioSpec.model_validate(audio), targets or (PLAIN,), long_s)


def whole(made: Preparer, data: bytes, **item: object) -> list[Clip]:
    stream = Watched(data)
    clips = made.open(Item("row", "clip.wav", **item), stream)  # type: ignore[arg-type]
    assert isinstance(clips, list)
    assert stream.closed
    return clips


def streamed(made: Preparer, data: bytes, **item: object) -> tuple[LongClip, list[list[Signal]]]:
    """The long clip, read to its end, and its signals by channel and target."""
    stream = Watched(data)
    clip = made.open(Item("row", "clip.wav", **item), stream)  # type: ignore[arg-type]
    assert isinstance(clip, LongClip)
    assert not stream.closed
    pieces = list(clip.pieces())
    assert stream.closed
    signals = [
        [
            np.concatenate([piece[channel][target] for piece in pieces], axis=-1)
            for target in range(len(made.targets))
        ]
        for channel in range(len(clip.channels))
    ]
    return clip, signals


def tone(
    level: float, seconds: float = 1.0, rate_hz: int = RATE_HZ, f_hz: float = 1000.0
) -> Samples:
    """A sine of an RMS, (frames, 1)."""
    times = np.arange(round(seconds * rate_hz)) / rate_hz
    return (level * math.sqrt(2) * np.sin(2 * np.pi * f_hz * times)).astype(np.float32)[:, None]


def level_db_spl(signal: Signal, unit: str) -> float:
    """By definition: the RMS in Pa against 20 uPa; an RMS of one model unit is 100 dB SPL."""
    rms = math.sqrt(float(np.mean(np.square(signal, dtype=np.float64))))
    pascals = rms if unit == PA else rms * 20e-6 * 10**5
    return 20 * math.log10(pascals / 20e-6)


class TestLevels:
    @pytest.mark.parametrize("unit", [PA, MODEL_UNIT])
    @pytest.mark.parametrize("full_scale", [60.0, 100.0, 120.0])
    def test_full_scale_calibration(self, unit: str, full_scale: float) -> None:
        """An RMS of 0.1 is 20 dB below what an RMS of 1 stands for, in either unit."""
        made = preparer(Target(RATE_HZ, unit), calibration={"rms1_db_spl": full_scale})
        (clip,) = whole(made, encode(tone(0.1), "wav-float"))
        assert level_db_spl(clip.signals[0], unit) == pytest.approx(full_scale - 20, abs=1e-4)

    @pytest.mark.parametrize("unit", [PA, MODEL_UNIT])
    @pytest.mark.parametrize("digital", [1e-4, 0.05, 0.7])
    def test_a_normalised_level_is_reached_from_any_other(self, unit: str, digital: float) -> None:
        made = preparer(Target(RATE_HZ, unit), calibration={"level_db_spl": 65.0})
        data = encode(tone(digital), "wav-float")
        (clip,) = whole(made, data)
        assert level_db_spl(clip.signals[0], unit) == pytest.approx(65.0, abs=1e-4)
        gain_db = clip.facts["gain_db"]
        assert isinstance(gain_db, float)
        reference = 0.0 if unit == PA else 20 * math.log10(2.0)
        wanted = 65.0 + 20 * math.log10(20e-6 / digital) - reference
        assert gain_db == pytest.approx(wanted, abs=1e-3)

    def test_two_units_of_one_clip_are_one_sound(self) -> None:
        made = preparer(Target(RATE_HZ, PA), PLAIN)
        (clip,) = whole(made, encode(tone(0.2), "wav-float"))
        np.testing.assert_allclose(clip.signals[0], 2.0 * clip.signals[1], rtol=1e-6)

    def test_silence_has_no_level_and_no_gain(self) -> None:
        silent = encode(np.zeros((800, 1), np.float32), "wav-float")
        for made in (
            preparer(calibration={"level_db_spl": 65.0}),
            preparer(calibration={"level_db_spl": 65.0}, long_s=0.01),
        ):
            if made.long_s < 1:
                clip, ((signal,),) = streamed(made, silent)
                facts = clip.facts(0)
            else:
                (row,) = whole(made, silent)
                signal, facts = row.signals[0], row.facts
            assert not signal.any()
            assert facts["gain_db"] is None

    def test_channels_are_normalised_each_by_itself_ears_together(self) -> None:
        """Else a sound from the left would come from the middle."""
        stereo = np.concatenate([tone(0.2), tone(0.02)], axis=1)
        data = encode(stereo, "wav-float")
        each = whole(preparer(channels="each", calibration={"level_db_spl": 60.0}), data)
        assert [clip.channel for clip in each] == [0, 1]
        for clip in each:
            assert level_db_spl(clip.signals[0], MODEL_UNIT) == pytest.approx(60.0, abs=1e-4)
        ears = preparer(
            Target(RATE_HZ, MODEL_UNIT, 2), channels="binaural", calibration={"level_db_spl": 60.0}
        )
        (both,) = whole(ears, data)
        left, right = (level_db_spl(ear, MODEL_UNIT) for ear in both.signals[0])
        assert left - right == pytest.approx(20.0, abs=1e-3)
        assert level_db_spl(both.signals[0], MODEL_UNIT) == pytest.approx(60.0, abs=1e-4)

    def test_a_gain_of_one_copies_nothing(self) -> None:
        one, two = preparer(), preparer(Target(RATE_HZ, PA), PLAIN)
        ears = np.ones((1, 3), np.float32)
        assert np.shares_memory(one.ready({RATE_HZ: ears}, [1.0])[0], ears)
        half, whole = two.ready({RATE_HZ: ears}, [0.5, 1.0])
        assert half.dtype == np.float32 and half.tolist() == [0.5] * 3
        assert np.shares_memory(whole, ears) and ears.tolist() == [[1.0] * 3]
        one.ready({RATE_HZ: ears}, [0.5])
        assert ears.tolist() == [[0.5] * 3]

    @pytest.mark.parametrize("to_hz", [RATE_HZ, 22050.0])
    def test_targets_that_are_equal_are_scaled_once(self, to_hz: float) -> None:
        data, target = encode(tone(0.2), "wav-float"), Target(to_hz, MODEL_UNIT)
        calibration = {"rms1_db_spl": 94.0}
        (alone,) = whole(preparer(target, calibration=calibration), data)
        (both,) = whole(preparer(target, target, calibration=calibration), data)
        assert len(both.signals) == 2
        for signal in both.signals:
            np.testing.assert_array_equal(signal, alone.signals[0])


class TestRates:
    @pytest.mark.parametrize("to_hz", [8000.0, 22050.0, 44100.0])
    def test_a_tone_keeps_its_frequency_and_level(self, to_hz: float) -> None:
        (clip,) = whole(preparer(Target(to_hz, PA)), encode(tone(0.1), "wav-float"))
        signal = clip.signals[0]
        assert len(signal) == to_hz
        spectrum = np.abs(np.fft.rfft(signal * np.hanning(len(signal))))
        assert int(spectrum.argmax()) == 1000
        middle = signal[len(signal) // 4 : -len(signal) // 4]
        assert level_db_spl(middle, PA) == pytest.approx(80.0, abs=0.02)
        assert (clip.facts["resampler"], clip.facts["resampled_from_hz"]) == ("soxr_vhq", RATE_HZ)

    def test_the_file_s_own_rate_passes_untouched(self) -> None:
        samples = speech_like(0.5, RATE_HZ)
        (clip,) = whole(preparer(), encode(samples, "wav-float"))
        np.testing.assert_array_equal(clip.signals[0], samples[:, 0])
        assert (clip.facts["resampler"], clip.facts["resampled_from_hz"]) == (None, None)

    def test_each_target_has_its_rate_and_equal_ones_share_an_array(self) -> None:
        targets = (PLAIN, Target(8000.0, MODEL_UNIT), PLAIN, Target(8000.0, PA))
        (clip,) = whole(preparer(*targets), encode(tone(0.1), "wav-float"))
        assert [len(signal) for signal in clip.signals] == [16000, 8000, 16000, 8000]
        assert clip.signals[0] is clip.signals[2]
        assert clip.nbytes == 4 * (16000 + 8000 + 8000)


class TestEars:
    data = encode(speech_like(0.2, RATE_HZ, channels=2), "wav-float")

    def test_a_model_of_one_ear_hears_the_mean(self) -> None:
        made = preparer(PLAIN, Target(RATE_HZ, MODEL_UNIT, 2), channels="binaural")
        (clip,) = whole(made, self.data)
        one, two = clip.signals
        assert (clip.channel, one.shape, two.shape) == (MIXED, (3200,), (2, 3200))
        np.testing.assert_allclose(one, two.mean(axis=0), rtol=0, atol=1e-8)

    def test_a_mono_file_is_one_signal_for_both(self) -> None:
        mono = encode(speech_like(0.2, RATE_HZ), "wav-float")
        made = preparer(Target(RATE_HZ, MODEL_UNIT, 2), channels="binaural")
        (clip,) = whole(made, mono)
        assert clip.signals[0].shape == (3200,)


class TestLongClips:
    TARGETS = (PLAIN, Target(22050.0, PA), Target(8000.0, MODEL_UNIT, 2))

    @pytest.mark.parametrize("channels", ["mean", "each", "binaural", 1])
    @pytest.mark.parametrize("calibration", [{"rms1_db_spl": 94.0}, {"level_db_spl": 65.0}])
    def test_are_the_same_as_whole_ones(
        self, channels: str | int, calibration: dict[str, float]
    ) -> None:
        """Bit for bit with a fixed gain; a level is measured in another order of summing."""
        data = encode(speech_like(9.0, RATE_HZ, channels=2), "wav-float")
        options = {"channels": channels, "calibration": calibration}
        clips = whole(preparer(*self.TARGETS, **options), data)
        long, signals = streamed(preparer(*self.TARGETS, long_s=2.0, **options), data)
        assert long.channels == tuple(clip.channel for clip in clips)
        for position, (clip, by_target) in enumerate(zip(clips, signals, strict=True)):
            for ours, expected in zip(by_target, clip.signals, strict=True):
                assert ours.shape == expected.shape
                if "level_db_spl" in calibration:
                    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-9)
                else:
                    np.testing.assert_array_equal(ours, expected)
            facts = long.facts(position)
            assert facts.keys() == clip.facts.keys()
            assert facts["gain_db"] == pytest.approx(clip.facts["gain_db"], abs=1e-9)
            assert facts["pcm_sha256"] == clip.facts["pcm_sha256"]
            assert long.seconds == clip.seconds == 9.0

    @given(frames=st.integers(15990, 16010))
    @drawn(15)
    def test_the_decoded_length_alone_decides(self, frames: int) -> None:
        data = encode(speech_like(frames / RATE_HZ, RATE_HZ), "wav-float")
        clip = preparer(long_s=1.0).open(Item("row", "clip.wav"), Watched(data))
        assert isinstance(clip, LongClip) == (frames > RATE_HZ)
        if isinstance(clip, LongClip):
            clip.close()

    def test_a_span_of_a_long_file_is_as_long_as_the_span(self) -> None:
        data = encode(speech_like(9.0, RATE_HZ), "wav-float")
        (short,) = whole(preparer(long_s=2.0), data, start_s=3.0, end_s=4.5)
        assert short.seconds == 1.5
        assert (short.facts["start_s"], short.facts["end_s"]) == (3.0, 4.5)
        long, ((signal,),) = streamed(preparer(long_s=1.0), data, start_s=3.0, end_s=4.5)
        np.testing.assert_array_equal(signal, short.signals[0])
        assert long.seconds == 1.5

    def test_blocks_are_let_go_once_handed_out(self) -> None:
        data = encode(speech_like(20.0, RATE_HZ), "wav-float")
        clip = preparer(long_s=9.0).open(Item("row", "clip.wav"), Watched(data))
        assert isinstance(clip, LongClip)
        before = clip.nbytes
        assert before > 4 * 9 * RATE_HZ
        pieces = clip.pieces()
        held = [clip.nbytes for _ in pieces]
        assert held[0] < before
        assert held[-1] == 0

    def test_leaving_early_closes_the_stream(self) -> None:
        stream = Watched(encode(speech_like(9.0, RATE_HZ), "wav-float"))
        clip = preparer(long_s=1.0).open(Item("row", "clip.wav"), stream)
        assert isinstance(clip, LongClip)
        pieces = clip.pieces()
        next(pieces)
        pieces.close()
        assert stream.closed
        clip.close()


class TestBadInput:
    @pytest.mark.parametrize("long_s", [120.0, 0.2])
    def test_every_way_out_closes_the_stream(self, long_s: float) -> None:
        whole_wav = encode(speech_like(1.0, RATE_HZ), "wav-float")
        for data in (b"", b"no sound", whole_wav[: len(whole_wav) // 2], with_bad_sample(np.nan)):
            stream = Watched(data)
            with pytest.raises(RowError):
                opened = preparer(long_s=long_s).open(Item("row", "clip.wav"), stream)
                assert isinstance(opened, LongClip), "a short clip must have been refused"
                list(opened.pieces())
            assert stream.closed

    def test_the_job_s_limits_hold(self) -> None:
        data = encode(speech_like(1.0, RATE_HZ), "wav-float")
        for limits in ({"max_seconds": 0.5}, {"max_rate_hz": 8000}, {"min_rate_hz": 44100}):
            with pytest.raises(RowError):
                whole(preparer(**limits), data)

    def test_damage_late_in_a_long_clip_comes_where_it_is(self) -> None:
        """Good pieces first: what was made of them must be thrown away by the caller."""
        flac = encode(speech_like(20.0, RATE_HZ), "flac")
        stream = Watched(flac[: len(flac) * 3 // 4])
        clip = preparer(long_s=1.0).open(Item("row", "clip.flac"), stream)
        assert isinstance(clip, LongClip)
        good = 0
        with pytest.raises(TruncatedError):
            for piece in clip.pieces():
                good += piece[0][0].shape[-1]
        assert RATE_HZ < good < 16 * RATE_HZ
        assert stream.closed
