"""Decoding: exact samples, the same in blocks, and the right reason for every bad input."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio.channels import MIXED, channel_ids, mix
from earmill.pipeline.audio.decode import BlockReader, Limits
from earmill.pipeline.audio.time_span import seconds_to_frames
from earmill.pipeline.common.errors import (
    ChannelIndexError,
    NonFiniteError,
    SampleRateError,
    SpanError,
    TruncatedError,
)
from tests.pipeline import audio_factory as factory
from tests.pipeline.audio_factory import FORMATS, LOSSLESS, clip, encode
from tests.pipeline.source_helpers import SPEECH_FILES
from tests.pipeline.whole_clips import Decoded, decode
from tests.short import drawn

LIBSNDFILE = ("libsndfile", soundfile.__libsndfile_version__.removeprefix("libsndfile-"))
# Where it has a wheel.
DECODER_OF_FLAC = (
    ("dr_flac", metadata.version("miniaudio")) if find_spec("miniaudio") else LIBSNDFILE
)


def decoded(data: bytes, **options: object) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", **options)  # type: ignore[arg-type]


def whole_by_soundfile(data: bytes) -> np.ndarray:
    """The second route: soundfile's own one-call read, (frames, channels)."""
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return np.asarray(samples)


@pytest.mark.parametrize("kind", FORMATS)
def test_samples_and_facts_are_those_of_the_file(kind: str) -> None:
    data = clip(kind, seconds=2.5, channels=2)
    result = decoded(data, channels="each")
    expected = whole_by_soundfile(data)
    # MP3 one-call reads may differ in the last bit: soundfile seeks back after reading.
    np.testing.assert_allclose(result.waveform, expected.T, rtol=0, atol=2**-23)
    facts = result.facts
    container, codec, rate_hz = FORMATS[kind]
    assert (facts.container, facts.codec, facts.rate_hz) == (container, codec, rate_hz)
    assert (facts.channels, facts.frames, facts.seconds) == (2, round(2.5 * rate_hz), 2.5)
    assert facts.nbytes == len(data)
    assert facts.bytes_sha256 == hashlib.sha256(data).hexdigest()
    interleaved = np.ascontiguousarray(result.waveform.T, dtype="<f4")
    assert facts.pcm_sha256 == hashlib.sha256(interleaved.tobytes()).hexdigest()
    library = DECODER_OF_FLAC if kind == "flac" else LIBSNDFILE
    assert (facts.decoder, facts.decoder_version) == library


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_return_what_was_written(kind: str) -> None:
    samples = factory.speech_like(0.7, FORMATS[kind][2])
    result = decoded(encode(samples, kind))
    step = 0 if kind == "wav-float" else 2**-15
    np.testing.assert_allclose(result.waveform[0], samples[:, 0], rtol=0, atol=step)


@pytest.mark.parametrize("path", SPEECH_FILES, ids=lambda path: path.name)
def test_real_speech_decodes_as_soundfile_does(path: Path) -> None:
    with path.open("rb") as stream:
        result = decode(stream, uri=str(path))
    expected = whole_by_soundfile(path.read_bytes()).mean(axis=1)
    np.testing.assert_allclose(result.waveform[0], expected, rtol=0, atol=2**-22)
    assert 2.0 < result.facts.seconds < 4.0
    assert np.sqrt(np.mean(result.waveform**2)) > 0.02


@pytest.mark.parametrize("kind", FORMATS)
@drawn(8)
@given(
    block=st.integers(1500, 60000),
    span=st.sampled_from([(None, None), (0.31, None), (None, 0.9), (0.25, 1.0000113)]),
)
def test_blocks_equal_the_whole(
    kind: str, block: int, span: tuple[float | None, float | None]
) -> None:
    data = clip(kind, seconds=1.3, channels=2, seed=3)
    options = {"uri": "clip", "start_s": span[0], "end_s": span[1], "channels": "each"}
    whole = decode(io.BytesIO(data), **options)  # type: ignore[arg-type]
    with BlockReader(io.BytesIO(data), block_frames=block, **options) as reader:  # type: ignore[arg-type]
        blocks = list(reader)
        assert reader.facts == whole.facts
    assert max(part.shape[1] for part in blocks) <= block
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), whole.waveform)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_span_is_a_slice_of_the_whole(kind: str) -> None:
    data = clip(kind, seconds=2.0)
    rate_hz = FORMATS[kind][2]
    whole = decoded(data).waveform[0]
    first, last = seconds_to_frames(0.5, rate_hz), seconds_to_frames(1.25, rate_hz)
    part = decoded(data, start_s=0.5, end_s=1.25)
    np.testing.assert_array_equal(part.waveform[0], whole[first:last])
    assert part.facts.seconds == pytest.approx(0.75, abs=1 / rate_hz)
    pcm = hashlib.sha256(whole[first:last].astype("<f4").tobytes()).hexdigest()
    assert part.facts.pcm_sha256 == pcm
    assert part.facts.bytes_sha256 == hashlib.sha256(data).hexdigest()


@given(
    edges=st.lists(st.floats(0, 3600, allow_nan=False), min_size=3, max_size=6, unique=True),
    rate_hz=st.sampled_from([8000, 11025, 22050, 44100, 48000]),
)
def test_spans_that_share_a_time_share_no_sample(edges: list[float], rate_hz: int) -> None:
    frames = [seconds_to_frames(edge, rate_hz) for edge in sorted(edges)]
    lengths = np.diff(frames)
    assert lengths.sum() == frames[-1] - frames[0]
    exact = np.diff(np.sort(edges)) * rate_hz
    assert np.all(np.abs(lengths - exact) <= 1)


def test_seconds_round_to_the_nearest_sample() -> None:
    assert seconds_to_frames(0.1, 44100) == 4410
    assert seconds_to_frames(0.5 / 16000, 16000) == 1  # halves up
    assert seconds_to_frames(0.49 / 16000, 16000) == 0
    assert seconds_to_frames(3 * 3600 + 1 / 44100, 44100) == 3 * 3600 * 44100 + 1


def test_every_speech_file_survives_trailing_tags() -> None:
    """An ID3v1 tag at the end is not damage, in any format some tagger may have touched."""
    for path in SPEECH_FILES:
        data = path.read_bytes()
        tagged = decoded(data + b"TAG" + bytes(125))
        np.testing.assert_array_equal(tagged.waveform, decoded(data).waveform)


def test_id3v2_with_a_picture_is_skipped() -> None:
    data = clip("mp3")
    picture = b"ID3\x03\x00\x00" + bytes([0, 1, 0, 0]) + bytes(1 << 14)
    np.testing.assert_array_equal(decoded(picture + data).waveform, decoded(data).waveform)


def test_mp3_without_a_frame_count_keeps_its_tail() -> None:
    tagged = factory.loud_then_quiet_mp3(8.0)
    bare = factory.without_count_tag(tagged)
    guessed = soundfile.info(io.BytesIO(bare)).frames
    assert guessed < 0.5 * 8 * 44100  # what libsndfile alone would stop at
    frames = decoded(bare).facts.frames
    assert 0 <= frames - 8 * 44100 < 3 * 1152  # encoder delay and padding are no longer trimmed


def test_concatenated_mp3_is_read_to_its_end() -> None:
    one, two = clip("mp3", 2.0, seed=1), clip("mp3", 3.0, seed=2)
    both = decoded(one + two).waveform[0]
    assert 5 * 44100 <= len(both) < 5 * 44100 + 6 * 1152
    second = decoded(two).waveform[0]
    # The last second of the second file is there, somewhere near the end.
    tail = second[-44100:-4410]
    found = np.correlate(both[-60000:], tail, mode="valid").max() / np.dot(tail, tail)
    assert found == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000])
def test_wav_from_a_pipe_has_no_length_and_is_no_damage(size: int) -> None:
    data = clip("wav")
    piped = decoded(factory.with_data_size(data, size))
    np.testing.assert_array_equal(piped.waveform, decoded(data).waveform)


def test_wav_with_less_data_than_half_a_frame_missing_is_no_damage() -> None:
    data = clip("wav", channels=2)
    sloppy = factory.with_data_size(data, len(data) - 44 + 3)
    np.testing.assert_array_equal(decoded(sloppy).waveform, decoded(data).waveform)


def test_wav_with_chunks_around_the_samples() -> None:
    data = clip("wav")
    extra = b"LIST" + (6).to_bytes(4, "little") + b"INFO\0\0"
    chunky = data[:36] + extra + data[36:] + extra
    np.testing.assert_array_equal(decoded(chunky).waveform, decoded(data).waveform)
    with pytest.raises(TruncatedError, match="bytes of samples"):
        decoded((data[:36] + extra + data[36:])[:-100])


def test_flac_without_a_length_decodes_whole() -> None:
    data = clip("flac", 2.0)
    open_ended = factory.flac_without_length(data)
    np.testing.assert_array_equal(decoded(open_ended).waveform, decoded(data).waveform)
    part = decoded(open_ended, start_s=0.5, end_s=1.5)
    np.testing.assert_array_equal(part.waveform, decoded(data).waveform[:, 8000:24000])
    for span in ((0.5, 2.5), (3.0, None)):
        with pytest.raises(SpanError, match=r"file ends at 2\.000 s"):
            decoded(open_ended, start_s=span[0], end_s=span[1])


@pytest.mark.parametrize(
    "span",
    [(-0.1, 0.5), (0.5, 0.5), (0.6, 0.5), (1.0, None), (2.0, 3.0), (0.0, 1.2), (np.nan, 0.5)],
    ids=str,
)
def test_spans_outside_the_file(span: tuple[float, float | None]) -> None:
    with pytest.raises(SpanError, match="clip: span"):
        decoded(clip("wav", 1.0), start_s=span[0], end_s=span[1])


def test_an_end_rounded_to_hundredths_means_the_end() -> None:
    data = clip("wav", 1.0)
    part = decoded(data, start_s=0.5, end_s=1.009)
    np.testing.assert_array_equal(part.waveform, decoded(data, start_s=0.5).waveform)


def test_non_finite_samples_outside_the_span_do_not_matter() -> None:
    data = factory.with_bad_sample(np.nan, at=700)
    assert decoded(data, start_s=0.5).facts.frames == 8000
    with pytest.raises(NonFiniteError, match="got nan at sample 700 of channel 0"):
        decoded(data, start_s=0.01)


def test_non_finite_is_found_in_a_channel_that_is_not_used() -> None:
    samples = factory.speech_like(0.2, 16000, channels=2)
    samples[100, 1] = np.inf
    with pytest.raises(NonFiniteError, match="got inf at sample 100 of channel 1"):
        decoded(encode(samples, "wav-float"), channels="left")


def test_rate_limits_are_inclusive() -> None:
    data = clip("wav")
    assert decoded(data, limits=Limits(22050, 22050)).facts.rate_hz == 22050
    with pytest.raises(SampleRateError, match="expected a sample rate of 1000 to 22049 Hz"):
        decoded(data, limits=Limits(1000, 22049))


class TestChannels:
    samples = factory.speech_like(0.3, 16000, channels=3)
    data = encode(samples, "wav-float")

    @pytest.mark.parametrize(
        ("policy", "ids"),
        [("left", (0,)), ("right", (1,)), (2, (2,)), ("each", (0, 1, 2))],
    )
    def test_picked(self, policy: str | int, ids: tuple[int, ...]) -> None:
        result = decoded(self.data, channels=policy)
        assert result.channel_ids == ids
        np.testing.assert_array_equal(result.waveform, self.samples.T[list(ids)])

    def test_mean(self) -> None:
        result = decoded(self.data, channels="mean")
        assert result.channel_ids == (MIXED,)
        expected = self.samples.astype(np.float64).mean(axis=1)
        np.testing.assert_allclose(result.waveform[0], expected, rtol=0, atol=2**-26)

    def test_the_hash_does_not_depend_on_the_policy(self) -> None:
        hashes = {decoded(self.data, channels=p).facts.pcm_sha256 for p in ("mean", "each", 1)}
        assert len(hashes) == 1

    def test_mean_of_mono_is_the_channel_itself(self) -> None:
        data = clip("wav-float")
        np.testing.assert_array_equal(decoded(data).waveform, whole_by_soundfile(data).T)

    @pytest.mark.parametrize("policy", ["right", 1, 7])
    def test_missing(self, policy: str | int) -> None:
        with pytest.raises(ChannelIndexError, match=r"clip: expected a channel \d, got 1") as e:
            decoded(clip("wav"), channels=policy)
        assert e.value.stage == "channels"

    @pytest.mark.parametrize("policy", ["middle", -1])
    def test_unknown_policy_is_a_programming_error(self, policy: str | int) -> None:
        with pytest.raises(ValueError, match="expected mean, left, right, each"):
            channel_ids(policy, 2)

    def test_mean_of_a_frame_does_not_depend_on_its_block(self) -> None:
        block = factory.speech_like(0.1, 16000, channels=11)
        whole = mix(block, (MIXED,))
        one_by_one = [mix(block[i : i + 1], (MIXED,)) for i in range(len(block))]
        np.testing.assert_array_equal(np.concatenate(one_by_one, axis=1), whole)


@pytest.fixture
def long_wav(tmp_path: Path) -> Iterator[Path]:
    """Six minutes at 48 kHz, 35 MB, written in pieces."""
    path = tmp_path / "long.wav"
    minute = factory.speech_like(60.0, 48000)
    with soundfile.SoundFile(path, "w", 48000, 1, format="WAV", subtype="PCM_16") as file:
        for _ in range(6):
            file.write(minute)
    yield path
    path.unlink()


def test_blocks_of_a_long_file_hold_constant_memory(long_wav: Path) -> None:
    import tracemalloc

    tracemalloc.start()
    with long_wav.open("rb") as stream, BlockReader(stream, uri="long") as reader:
        frames = sum(block.shape[1] for block in reader)
        seconds = reader.facts.seconds
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert frames == 6 * 60 * 48000
    assert seconds == 360.0
    assert peak < 8 << 20


def test_facts_are_refused_before_the_end() -> None:
    with BlockReader(io.BytesIO(clip("wav")), uri="clip") as reader:
        next(iter(reader))
        with pytest.raises(ValueError, match="after the last block"):
            _ = reader.facts
