"""The block reader alone: any cut into blocks, every promise of a header, every error's order."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import earmill.pipeline.audio.decode as block_reader
from earmill.pipeline.audio.channels import AudioBlock, Channels
from earmill.pipeline.audio.containers import Probe
from earmill.pipeline.audio.decode import AudioFacts, BlockReader, Limits
from earmill.pipeline.audio.decoders import UNKNOWN_FRAMES, DecoderError, DecoderInput
from earmill.pipeline.audio.time_span import TimeSpan
from earmill.pipeline.common.errors import (
    ChannelIndexError,
    EmptyFileError,
    NonFiniteError,
    NotAudioError,
    RowError,
    SampleRateError,
    SpanError,
    TooLongError,
    TruncatedError,
    UnreadableError,
    UnsupportedError,
    ZeroLengthError,
    is_machine_fault,
)
from tests.pipeline.audio_factory import FORMATS, clip
from tests.pipeline.av_factory import AV_FORMATS, av_clip
from tests.pipeline.container_bytes import as_pcm, chunk, ramp, wave, wave_format
from tests.pipeline.scripted_decoder import RATE_HZ, Scripted
from tests.pipeline.whole_clips import decode
from tests.short import drawn, spread

WHOLE: TimeSpan = (None, None)


def opened(
    data: bytes,
    span: TimeSpan = WHOLE,
    *,
    channels: Channels = "each",
    block_frames: int = 1 << 16,
    limits: Limits | None = None,
) -> BlockReader:
    return BlockReader(
        io.BytesIO(data),
        uri="clip",
        start_s=span[0],
        end_s=span[1],
        channels=channels,
        limits=limits or Limits(),
        block_frames=block_frames,
    )


def wav(frames: int, channels: int = 1) -> bytes:
    """A WAV whose sample `i` of channel `c` is one step of a ramp: no two neighbours alike."""
    form = chunk(b"fmt ", wave_format(channels=channels, rate_hz=RATE_HZ))
    return wave(form, chunk(b"data", as_pcm(ramp(frames, channels), 16)))


@lru_cache(maxsize=32)
def any_clip(kind: str) -> bytes:
    """0.3 s of two channels in any format."""
    if kind in AV_FORMATS:
        return av_clip(kind, 0.3, channels=2)
    return clip(kind, seconds=0.3, channels=2)


@lru_cache(maxsize=32)
def whole_clip(kind: str) -> tuple[AudioBlock, AudioFacts]:
    """Its samples in one block, and its facts."""
    with opened(any_clip(kind)) as reader:
        (block,) = reader
        return block, reader.facts


class TestBlocks:
    @pytest.mark.parametrize(
        ("kind", "block_frames"), spread(2, [*FORMATS, *AV_FORMATS], [1, 997, 1 << 20])
    )
    def test_of_any_format(self, kind: str, block_frames: int) -> None:
        if block_frames == 1 and kind not in ("wav", "flac", "mp3", "aac"):
            block_frames = 311  # one by one costs a call each
        whole, facts = whole_clip(kind)
        with opened(any_clip(kind), block_frames=block_frames) as reader:
            blocks = list(reader)
            assert reader.facts == facts
        assert [block.shape[1] for block in blocks[:-1]] == [block_frames] * (len(blocks) - 1)
        np.testing.assert_array_equal(np.concatenate(blocks, axis=1), whole)
        assert all(block.flags.c_contiguous and block.dtype == np.float32 for block in blocks)

    @given(
        frames=st.integers(1, 300),
        block_frames=st.integers(1, 320),
        cut=st.tuples(st.integers(0, 299), st.integers(1, 300)),
        channels=st.integers(1, 3),
    )
    @drawn(120)
    def test_any_span_in_any_blocks(
        self, frames: int, block_frames: int, cut: tuple[int, int], channels: int
    ) -> None:
        """Frames [start, stop) of the ramp, and the hash of exactly them."""
        start, stop = min(cut[0], frames - 1), min(cut[0] + cut[1], frames)
        stop = max(stop, start + 1)
        span = (start / RATE_HZ, stop / RATE_HZ)
        expected = (ramp(frames, channels)[start:stop] / 32768).astype("<f4")
        with opened(wav(frames, channels), span, block_frames=block_frames) as reader:
            blocks = list(reader)
            facts = reader.facts
        np.testing.assert_array_equal(np.concatenate(blocks, axis=1), expected.T)
        assert len(blocks) == -(-(stop - start) // block_frames)
        assert (facts.frames, facts.seconds) == (stop - start, (stop - start) / RATE_HZ)
        assert facts.pcm_sha256 == hashlib.sha256(expected.tobytes()).hexdigest()
        assert facts.channels == channels

    @pytest.mark.parametrize("kind", ["flac", "ogg", "opus", "mp3", "m4a", "webm"])
    def test_a_span_of_a_format_that_is_read_from_its_start(self, kind: str) -> None:
        whole, facts = whole_clip(kind)
        start, stop = 1234, 4321
        span = (start / facts.rate_hz, stop / facts.rate_hz)
        for block_frames in (500, 1 << 16):
            with opened(any_clip(kind), span, block_frames=block_frames) as reader:
                got = np.concatenate(list(reader), axis=1)
            np.testing.assert_array_equal(got, whole[:, start:stop])

    def test_facts_of_the_file_do_not_depend_on_the_span(self) -> None:
        data = wav(200)
        for span in (WHOLE, (0.0, 0.01), (0.02, None)):
            with opened(data, span) as reader:
                list(reader)
                facts = reader.facts
            assert facts.nbytes == len(data)
            assert facts.bytes_sha256 == hashlib.sha256(data).hexdigest()
            assert (facts.container, facts.codec, facts.rate_hz) == ("WAV", "PCM_16", RATE_HZ)


class TestPromises:
    """Containers are scripted: what is promised, what is delivered, in what order it is checked."""

    @pytest.fixture(autouse=True)
    def _script(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.probe = Probe("riff", rate_hz=RATE_HZ)
        self.file: Scripted | DecoderError = Scripted()

        def open_decoder(source: DecoderInput, probe: Probe, *, whole: bool) -> Scripted:
            assert probe is self.probe
            if isinstance(self.file, DecoderError):
                raise self.file
            return self.file

        monkeypatch.setattr(block_reader, "open_decoder", open_decoder)
        monkeypatch.setattr(block_reader, "probe", lambda stream, nbytes: self.probe)
        yield

    def read(self, span: TimeSpan = WHOLE, *, block_frames: int = 30, **limits: float) -> int:
        """Frames delivered; the decoder must be closed whatever happens."""
        try:
            with opened(b"x", span, block_frames=block_frames, limits=Limits(**limits)) as reader:
                return sum(block.shape[1] for block in reader)
        finally:
            assert isinstance(self.file, DecoderError) or self.file.closed

    @staticmethod
    def at(*frames: int | None) -> TimeSpan:
        first, last = (None if frame is None else frame / RATE_HZ for frame in frames)
        return first, last

    def test_as_many_as_promised(self) -> None:
        assert self.read() == 100
        assert isinstance(self.file, Scripted)
        assert self.file.asked == [30, 30, 30, 10]

    def test_more_than_promised_is_not_read(self) -> None:
        self.file = Scripted(frames=100, there=130)
        assert self.read() == 100

    @pytest.mark.parametrize("span", [(None, None), (50, None), (50, 100)])
    def test_what_goes_on_behind_its_end_is_refused(
        self, span: tuple[int | None, int | None]
    ) -> None:
        """Nobody knows which is right, the count or the samples."""
        self.file = Scripted(more="another file")
        with pytest.raises(TruncatedError, match="behind the end that it states: another file"):
            self.read(self.at(*span))

    def test_what_goes_on_behind_the_end_is_nothing_to_a_span_before_it(self) -> None:
        self.file = Scripted(more="another file")
        assert self.read(self.at(50, 99)) == 49

    def test_fewer_than_promised_is_cut(self) -> None:
        self.file = Scripted(frames=100, there=99)
        with pytest.raises(TruncatedError, match="expected 100 samples, got 99"):
            self.read()

    def test_the_header_s_number_goes_before_the_library_s(self) -> None:
        """libsndfile shortens a cut file without a word, or counts what is no sample."""
        self.probe = Probe("riff", declared_frames=90)
        assert self.read() == 90
        self.probe = Probe("riff", declared_frames=110)
        self.file = Scripted(frames=100, there=100)
        with pytest.raises(TruncatedError, match="expected 110 samples, got 100"):
            self.read()

    @pytest.mark.parametrize(("there", "fine"), [(95, True), (94, False)])
    def test_slack_is_what_a_decoder_may_swallow(self, there: int, fine: bool) -> None:
        self.probe = Probe("mpeg", slack_frames=5)
        self.file = Scripted(frames=100, there=there)
        if fine:
            assert self.read() == there
        else:
            with pytest.raises(TruncatedError):
                self.read()

    def test_an_unknown_length_ends_where_the_samples_end(self) -> None:
        self.file = Scripted(frames=UNKNOWN_FRAMES, there=77)
        assert self.read() == 77
        self.file = Scripted(frames=UNKNOWN_FRAMES, there=77, least_frames=78)
        with pytest.raises(TruncatedError, match="expected about 78 samples or more, got 77"):
            self.read()

    @pytest.mark.parametrize(
        ("span", "frames"), [((10, 20), 10), ((10, None), 67), ((None, 77), 77), ((76, 77), 1)]
    )
    def test_spans_of_an_unknown_length(
        self, span: tuple[int | None, int | None], frames: int
    ) -> None:
        self.file = Scripted(frames=UNKNOWN_FRAMES, there=77)
        assert self.read(self.at(*span)) == frames

    @pytest.mark.parametrize("span", [(10, 78), (77, None), (80, 90)])
    def test_spans_behind_an_unknown_length(self, span: tuple[int, int | None]) -> None:
        self.file = Scripted(frames=UNKNOWN_FRAMES, there=77)
        with pytest.raises(SpanError, match=r"clip: span .* the file ends at 0\.010 s"):
            self.read(self.at(*span), span_tolerance_s=0.0)
        self.probe = Probe("mp4", damage="cut somewhere")
        self.file = Scripted(frames=UNKNOWN_FRAMES, there=77)
        with pytest.raises(TruncatedError, match="cut somewhere"):
            self.read(self.at(*span), span_tolerance_s=0.0)

    @pytest.mark.parametrize("frames", [100, UNKNOWN_FRAMES])
    @pytest.mark.parametrize(("tolerance", "fine"), [(20, True), (19, False)])
    def test_a_span_may_end_behind_the_file_by_the_tolerance(
        self, frames: int, tolerance: int, fine: bool
    ) -> None:
        """A known length and an unknown one are alike; a fact says how much is missing."""
        self.file = Scripted(frames=frames)
        limits = Limits(span_tolerance_s=tolerance / RATE_HZ)
        if fine:
            with opened(b"x", self.at(50, 120), limits=limits) as reader:
                assert sum(block.shape[1] for block in reader) == 50
                assert reader.facts.span_short_s == 20 / RATE_HZ
            return
        with pytest.raises(SpanError, match=r"0\.00. s before the span; audio\.span_tolerance_s"):
            self.read(self.at(50, 120), span_tolerance_s=tolerance / RATE_HZ)

    def test_a_span_that_the_file_holds_is_not_short(self) -> None:
        with opened(b"x", self.at(50, 100)) as reader:
            list(reader)
            assert reader.facts.span_short_s is None

    def test_a_stream_without_an_end_mark_is_taken_where_the_job_says_so(self) -> None:
        self.probe = Probe("ogg", unterminated=True)
        for span in (WHOLE, self.at(10, 20)):
            self.file = Scripted()
            with pytest.raises(TruncatedError, match=r"audio\.unterminated: accept"):
                self.read(span)
        self.file = Scripted()
        with opened(b"x", limits=Limits(unterminated=True)) as reader:
            list(reader)
            assert reader.facts.unterminated is True

    def test_nothing_at_all_is_no_clip(self) -> None:
        for frames in (0, UNKNOWN_FRAMES):
            self.file = Scripted(frames=frames, there=0)
            with pytest.raises(ZeroLengthError):
                self.read()

    def test_damage_stops_a_whole_file_before_it_is_decoded(self) -> None:
        self.probe = Probe("riff", damage="half is gone")
        with pytest.raises(TruncatedError, match="clip: cut or damaged: half is gone"):
            self.read()
        assert isinstance(self.file, Scripted)
        assert self.file.asked == []

    def test_damage_elsewhere_does_not_stop_a_span(self) -> None:
        self.probe = Probe("riff", damage="the end is gone", declared_frames=200)
        assert self.read(self.at(20, 60)) == 40
        self.file = Scripted()
        with pytest.raises(TruncatedError, match="expected 150 samples, got 100"):
            self.read(self.at(50, 150))
        self.probe = Probe("ogg", damage="a page is gone", shifts_time=True)
        self.file = Scripted()
        with pytest.raises(TruncatedError, match="a page is gone"):
            self.read(self.at(20, 60))

    def test_a_span_is_sought_where_that_is_exact(self) -> None:
        self.file = Scripted(exact_seek=True)
        assert self.read(self.at(50, 90)) == 40
        assert (self.file.sought, self.file.asked) == ([50], [30, 10])
        self.file = Scripted()
        assert self.read(self.at(50, 90)) == 40
        assert (self.file.sought, self.file.asked) == ([], [30, 20, 30, 10])

    def test_a_broken_seek_names_its_frame(self) -> None:
        self.file = Scripted(exact_seek=True, fails_at=50)
        with pytest.raises(TruncatedError, match="decoding breaks after sample 50: lost sync"):
            self.read(self.at(50, 90))

    def test_a_broken_read_names_the_last_good_sample(self) -> None:
        self.file = Scripted(fails_at=70)
        with pytest.raises(TruncatedError, match="clip: decoding breaks after sample 60: lost"):
            self.read()

    def test_a_bad_sample_is_named_by_its_place_in_the_file(self) -> None:
        self.file = Scripted(bad=64)
        with pytest.raises(NonFiniteError, match="got nan at sample 64 of channel 0"):
            self.read(self.at(50, 90))
        self.file = Scripted(bad=64)
        assert self.read(self.at(0, 64)) == 64
        self.file = Scripted(bad=64)
        assert self.read(self.at(65, None)) == 35

    @pytest.mark.parametrize("frames", [100, UNKNOWN_FRAMES])
    def test_the_longest_clip_is_inclusive(self, frames: int) -> None:
        """A promise is refused before decoding, an unknown length on the way."""
        self.file = Scripted(frames=frames)
        assert self.read(max_seconds=100 / RATE_HZ) == 100
        self.file = Scripted(frames=frames)
        with pytest.raises(TooLongError, match=r"expected at most 0\.0123.* s of audio"):
            self.read(max_seconds=99 / RATE_HZ)
        assert (self.file.asked == []) == (frames == 100)

    def test_the_limit_is_on_the_span_not_on_the_file(self) -> None:
        assert self.read(self.at(20, 60), max_seconds=40 / RATE_HZ) == 40

    @pytest.mark.parametrize(("rate_hz", "fine"), [(999, False), (1000, True), (2001, False)])
    def test_rates(self, rate_hz: int, fine: bool) -> None:
        self.file = Scripted(samplerate=rate_hz)
        if fine:
            assert self.read(max_rate_hz=2000) == 100
        else:
            with pytest.raises(SampleRateError, match=f"1000 to 2000 Hz, got {rate_hz}"):
                self.read(max_rate_hz=2000)

    @pytest.mark.parametrize(
        ("probe", "error", "expected"),
        [
            (Probe("riff", rate_hz=0, damage="d"), DecoderError("w"), SampleRateError),
            (Probe("riff", damage="d"), DecoderError("w", not_audio=True), TruncatedError),
            (Probe("riff"), DecoderError("w", not_audio=True), NotAudioError),
            (Probe("riff"), DecoderError("w"), TruncatedError),
            (Probe("other"), DecoderError("w"), NotAudioError),
            (Probe("riff"), DecoderError("w", unsupported=True), UnsupportedError),
            (Probe("ogg", unterminated=True), DecoderError("w"), TruncatedError),
        ],
    )
    def test_why_a_file_does_not_open(
        self, probe: Probe, error: DecoderError, expected: type[RowError]
    ) -> None:
        self.probe, self.file = probe, error
        with pytest.raises(expected) as caught:
            self.read()
        assert type(caught.value) is expected

    def test_a_missing_channel_closes_the_file(self) -> None:
        with pytest.raises(ChannelIndexError, match="clip: expected a channel 3"):
            opened(b"x", channels=3)
        assert isinstance(self.file, Scripted)
        assert self.file.closed

    def test_a_probe_that_cannot_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(stream: object, nbytes: int) -> Probe:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(block_reader, "probe", failing)
        with pytest.raises(UnreadableError, match=r"clip: read failed: .*Input/output error"):
            opened(b"x")

    def test_an_empty_file_is_not_even_probed(self) -> None:
        with pytest.raises(EmptyFileError, match="clip: expected audio, got an empty file"):
            opened(b"")


class BadSector(io.FileIO):
    """A file of which all behind the first 4096 bytes cannot be read."""

    def readinto(self, buffer: Any) -> int | None:
        if self.tell() >= 4096:
            raise OSError(5, "Input/output error")
        return super().readinto(memoryview(buffer)[:4096])


def test_a_disk_that_fails_while_the_checksum_is_taken(tmp_path: Path) -> None:
    """It is no property of the row: what was read again may be whole."""
    path = tmp_path / "clip.wav"
    path.write_bytes(wav(20000))
    with io.BufferedReader(BadSector(path), 512) as stream:
        with pytest.raises(OSError, match="Input/output error") as caught:
            decode(stream, uri="clip")
    assert not isinstance(caught.value, RowError) and is_machine_fault(caught.value)
