"""MP3 frames: every header of the standard, counting, tags, cuts; libsndfile and FFmpeg agree."""

from __future__ import annotations

import io
from dataclasses import replace

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio.containers import Probe, probe
from earmill.pipeline.audio.containers.base import audio_end, skip_tags
from earmill.pipeline.audio.containers.mpeg import (
    SEARCH_BYTES,
    SLACK_FRAMES,
    CountTag,
    FrameHeader,
    count_frames,
    count_tag_frame,
    first_frame,
    parse_header,
    read_count_tag,
)
from earmill.pipeline.common.errors import RowError, TruncatedError
from tests.pipeline.audio_factory import clip, encode, speech_like, without_count_tag
from tests.pipeline.av_factory import encode_as
from tests.pipeline.mpeg_bytes import DUAL, EVERY_KIND, ID3V1, JOINT, MONO, MPEG, STEREO, Kind, id3
from tests.pipeline.whole_clips import Decoded, decode
from tests.short import drawn, spread

# The decoder's own delay, which libsndfile leaves out where a tag marks the first frame.
DECODER_DELAY = 529
KIND = Kind()
FRAME = KIND.frame()


def probed(data: bytes) -> Probe:
    return probe(io.BytesIO(data), len(data))


def decoded(data: bytes) -> Decoded:
    return decode(io.BytesIO(data), uri="clip")


def first_of(data: bytes, start: int = 0) -> FrameHeader:
    found = first_frame(io.BytesIO(data), start)
    assert found is not None
    return found


def counted(data: bytes) -> tuple[int, str | None]:
    return count_frames(io.BytesIO(data), first_of(data), len(data))


class TestHeader:
    @pytest.mark.parametrize("padding", [0, 1])
    @pytest.mark.parametrize("version", MPEG)
    def test_every_header_of_the_standard(self, version: str, padding: int) -> None:
        kinds = [replace(kind, padding=padding) for kind in EVERY_KIND if kind.version == version]
        assert len(kinds) == 3 * 14 * 2
        for kind in kinds:
            found = parse_header(kind.header(), 100)
            assert found == FrameHeader(
                position=100,
                raw=kind.header(),
                nbytes=kind.nbytes,
                samples=kind.samples,
                side_bytes=kind.side_bytes,
                rate_hz=kind.rate_hz,
                layer=3,
            )

    def test_figures_known_by_heart(self) -> None:
        """128 kbit/s at 44.1 kHz: 417 bytes, padded 418; 64 kbit/s at 22.05 kHz: 208."""
        assert (KIND.nbytes, replace(KIND, padding=1).nbytes) == (417, 418)
        half = parse_header(Kind("2", 0, 8).header())
        assert half is not None
        assert (half.nbytes, half.samples, half.side_bytes) == (208, 576, 9)

    @pytest.mark.parametrize("mode", [STEREO, JOINT, DUAL])
    def test_only_mono_has_less_side_information(self, mode: int) -> None:
        found = parse_header(Kind(mode=mode).header())
        assert found is not None
        assert found.side_bytes == 32

    def test_two_bytes_decide_which_headers_are_refused(self) -> None:
        """All 65536 pairs behind the sync byte: exactly those with a reserved field are none."""
        accepted = 0
        for pair in range(1 << 16):
            bits = f"{pair:016b}"
            sync, version, layer = bits[0:3], bits[3:5], bits[5:7]
            bitrate, rate = bits[8:12], bits[12:14]
            valid = sync == "111" and version != "01" and layer != "00" and rate != "11"
            valid = valid and bitrate not in ("0000", "1111")
            found = parse_header(b"\xff" + pair.to_bytes(2, "big") + b"\xc0")
            assert (found is not None) == valid, bits
            accepted += valid
        # Versions 3, layers 3, checksum 2, bitrates 14, rates 3, padding 2, private bit 2.
        assert accepted == 3 * 3 * 2 * 14 * 3 * 2 * 2

    @pytest.mark.parametrize("size", range(4))
    def test_a_cut_header_is_none(self, size: int) -> None:
        assert parse_header(KIND.header()[:size]) is None

    def test_kinds_differ_by_version_layer_and_rate_only(self) -> None:
        one = parse_header(KIND.header())
        assert one is not None
        same = [
            replace(KIND, bitrate=1),
            replace(KIND, padding=1),
            replace(KIND, mode=STEREO),
        ]
        other = [replace(KIND, rate=1), Kind("2"), Kind("2.5")]
        for kinds, alike in ((same, True), (other, False)):
            for kind in kinds:
                two = parse_header(kind.header())
                assert two is not None
                assert one.same_kind(two) is alike
        checked = parse_header(KIND.header(crc=True))
        assert checked is not None
        assert one.same_kind(checked)


class TestId3:
    @given(sizes=st.lists(st.integers(0, 300), max_size=5), footer=st.booleans())
    @drawn(50)
    def test_any_tags_in_front_are_skipped(self, sizes: list[int], footer: bool) -> None:
        tags = b"".join(
            id3(b"ID3\xff\xfb\x90\xc0".ljust(size, b"\1")[:size], footer=footer) for size in sizes
        )
        data = tags + FRAME * 3
        assert skip_tags(io.BytesIO(data)) == len(tags)
        assert probed(data).start == len(tags)

    def test_groups_of_seven_bits(self) -> None:
        """2^21 + 2^14 + 2^7 + 1 is one bit a group."""
        size = (1 << 21) + (1 << 14) + (1 << 7) + 1
        head = b"ID3\x04\0\0" + bytes([1, 1, 1, 1])
        assert id3(bytes(size))[:10] == head
        assert skip_tags(io.BytesIO(head)) == 10 + size

    @pytest.mark.parametrize("size", range(10))
    def test_a_cut_tag_is_not_skipped(self, size: int) -> None:
        data = id3(b"")[:size]
        assert skip_tags(io.BytesIO(data)) == 0

    def test_tags_without_end_are_given_up(self) -> None:
        many = id3(b"") * 5000
        assert skip_tags(io.BytesIO(many)) == 10 * 4096

    def test_the_tag_at_the_end(self) -> None:
        for size in (0, 1, 127, 128, 129, 500):
            body = b"\1" * size
            assert audio_end(io.BytesIO(body), size) == size
            assert audio_end(io.BytesIO(body + ID3V1), size + 128) == size
        assert audio_end(io.BytesIO(b"TAG"), 3) == 3


class TestFirstFrame:
    @given(junk=st.binary(max_size=400))
    @drawn(80)
    def test_found_behind_junk(self, junk: bytes) -> None:
        data = junk + FRAME * 3
        found = first_of(data)
        # Junk can end in what makes a header with what follows; it is never beyond the true one.
        assert found.position <= len(junk)
        if b"\xff" not in junk:
            assert found.position == len(junk)

    def test_a_header_that_no_header_follows_is_junk(self) -> None:
        data = KIND.header() + bytes(50) + FRAME * 2
        assert first_of(data).position == 54

    def test_a_follower_of_another_kind_does_not_count(self) -> None:
        other = Kind(rate=1)
        data = other.frame() + FRAME * 2
        assert first_of(data).position == other.nbytes

    def test_a_lone_frame_counts_at_the_start_only(self) -> None:
        assert first_of(FRAME).position == 0
        assert first_of(FRAME[:-9]).position == 0
        assert first_frame(io.BytesIO(b"\0" + FRAME), 0) is None

    def test_it_is_looked_for_in_a_window(self) -> None:
        near, far = SEARCH_BYTES - 4, SEARCH_BYTES - 3
        assert first_of(bytes(near) + FRAME * 2).position == near
        assert first_frame(io.BytesIO(bytes(far) + FRAME * 2), 0) is None

    def test_text_is_no_mpeg(self) -> None:
        assert probed(b"\xff\xfenot a frame" * 300).kind == "other"


class TestCount:
    @given(
        frames=st.lists(st.tuples(st.integers(1, 14), st.integers(0, 1)), min_size=2, max_size=30),
        behind=st.sampled_from([b"", ID3V1, b"APETAGEX" + bytes(40), bytes(700)]),
        mode=st.sampled_from([STEREO, MONO]),
    )
    @drawn(60)
    def test_variable_rates_and_any_tags_behind(
        self, frames: list[tuple[int, int]], behind: bytes, mode: int
    ) -> None:
        kinds = [replace(KIND, bitrate=b, padding=p, mode=mode) for b, p in frames]
        data = b"".join(kind.frame() for kind in kinds) + behind
        assert counted(data) == (len(frames), None)

    @pytest.mark.parametrize("tag", [b"", ID3V1], ids=["bare", "tagged"])
    def test_cut_at_every_byte_of_the_last_frame(self, tag: bytes) -> None:
        for size in range(1, len(FRAME)):
            data = FRAME * 3 + FRAME[:size] + tag
            count, damage = counted(data)
            assert count == 3
            if size < 4:  # not even a header: nothing tells it from a tag
                assert damage is None or damage.startswith("last MPEG frame")
            else:
                assert damage == f"last MPEG frame: expected {len(FRAME)} bytes, got {size}"

    def test_a_hole_that_frames_go_on_behind(self) -> None:
        data = FRAME * 3 + bytes(100) + FRAME * 3
        where = 3 * len(FRAME)
        assert counted(data) == (
            3,
            f"MPEG frames break at byte {where} and go on at byte {where + 100}",
        )
        with pytest.raises(TruncatedError, match="break at byte"):
            decoded(data)

    def test_frames_of_another_kind_behind_are_another_thing(self) -> None:
        assert counted(FRAME * 3 + bytes(100) + Kind("2").frame() * 3) == (3, None)


class TestTag:
    @pytest.mark.parametrize("name", [b"Xing", b"Info"])
    @pytest.mark.parametrize("mode", [STEREO, MONO])
    @pytest.mark.parametrize("version", MPEG)
    def test_read_where_the_side_information_ends(
        self, version: str, mode: int, name: bytes
    ) -> None:
        kind = Kind(version, mode=mode)
        found = read_count_tag(
            io.BytesIO(kind.tag_frame(name, 1234, 56789)), first_of(kind.frame())
        )
        assert found == CountTag(1234, 56789)
        moved = kind.tag_frame(name, 1234, at=kind.side_bytes + 5)
        assert read_count_tag(io.BytesIO(moved), first_of(kind.frame())) is None

    @pytest.mark.parametrize(
        ("frames", "nbytes", "expected"),
        [
            (7, None, CountTag(7, None)),
            (None, 900, CountTag(0, 900)),
            (None, None, CountTag(0, None)),
            (7, 0, CountTag(7, None)),
        ],
    )
    def test_flags_say_what_is_there(
        self, frames: int | None, nbytes: int | None, expected: CountTag | None
    ) -> None:
        data = KIND.tag_frame(b"Xing", frames, nbytes)
        assert read_count_tag(io.BytesIO(data), first_of(data)) == expected

    def test_other_names_are_no_tag(self) -> None:
        data = KIND.tag_frame(b"Sing", 7)
        assert read_count_tag(io.BytesIO(data), first_of(data)) is None

    @pytest.mark.parametrize("nbytes", [None, 0, 6 * len(FRAME)])
    @pytest.mark.parametrize("frames", [0, 2, 5, 9])
    def test_a_tag_that_counts_other_frames_than_there_are(
        self, frames: int, nbytes: int | None
    ) -> None:
        """Believed only where the bytes fit; else the frames are counted."""
        data = KIND.tag_frame(b"Info", frames, nbytes) + FRAME * 5
        found = probed(data)
        if frames == 5 or (nbytes and frames):
            assert found == Probe("mpeg", slack_frames=SLACK_FRAMES)
        else:
            assert found.prefix == count_tag_frame(first_of(FRAME * 2), 5)
            assert found.start == len(FRAME)

    def test_a_tag_that_counts_its_own_frame_is_right(self) -> None:
        data = KIND.tag_frame(b"Info", 6) + FRAME * 5
        assert probed(data) == Probe("mpeg", slack_frames=SLACK_FRAMES)

    def test_a_tag_whose_bytes_end_a_little_before_the_frames(self) -> None:
        """A jingle behind an hour is less than tags take."""
        first = KIND.tag_frame(b"Info", 500, 501 * len(FRAME)) + FRAME * 500
        assert probed(first + ID3V1) == Probe("mpeg", slack_frames=SLACK_FRAMES)
        assert probed(first + FRAME * 4).prefix == count_tag_frame(first_of(FRAME * 2), 504)

    def test_a_file_shorter_than_its_tag_says(self) -> None:
        body = KIND.tag_frame(b"Xing", 5, 6 * len(FRAME)) + FRAME * 5
        assert probed(body) == Probe("mpeg", slack_frames=SLACK_FRAMES)
        cut = probed(body[:-1])
        assert cut.damage == f"expected {len(body)} bytes of MPEG frames, got {len(body) - 1}"
        assert cut.slack_frames == 0

    def test_a_file_longer_than_its_tag_says_is_counted(self) -> None:
        part = KIND.tag_frame(b"Xing", 5, 6 * len(FRAME)) + FRAME * 5
        found = probed(part + part)
        assert found.start == len(FRAME)
        assert found.prefix == count_tag_frame(first_of(FRAME), 5 + 6)
        assert decoded(part + part).facts.frames > 10 * KIND.samples

    @pytest.mark.parametrize("kind", EVERY_KIND[::5], ids=str)
    def test_our_own_tag_frame_is_of_the_stream_s_kind(self, kind: Kind) -> None:
        """It is read back here and by libsndfile, at every version, rate and channel count."""
        first = first_of(kind.frame() * 2)
        frame = count_tag_frame(first, 321)
        own = first_of(frame)
        assert own.same_kind(first)
        assert own.nbytes == len(frame)
        assert read_count_tag(io.BytesIO(frame), own) == CountTag(321, None)
        told = soundfile.info(io.BytesIO(frame + kind.frame() * 321))
        assert told.frames == 321 * kind.samples - DECODER_DELAY
        assert (told.samplerate, told.channels) == (kind.rate_hz, 2 - (kind.mode == MONO))


class TestSilence:
    """Frames of zeros are silence of a known length: the whole way, at every rate."""

    @pytest.mark.parametrize("version", MPEG)
    @pytest.mark.parametrize("mode", [STEREO, MONO])
    def test_every_rate_and_bitrate(self, version: str, mode: int) -> None:
        for kind in EVERY_KIND:
            if (kind.version, kind.mode) != (version, mode) or kind.nbytes < 4 + kind.side_bytes:
                continue
            result = decoded(kind.frame() * 12)
            assert result.facts.rate_hz == kind.rate_hz
            missing = 12 * kind.samples - result.facts.frames
            assert 0 <= missing <= SLACK_FRAMES, kind
            assert not result.waveform.any()

    def test_fraunhofer_s_tag_is_no_sound(self) -> None:
        """VBRI: FFmpeg and this reader leave the frame out; its neighbour starts the clip."""
        mp3 = without_count_tag(clip("mp3", 1.0))
        first = first_of(mp3)
        kind = Kind(rate=first.raw[2] >> 2 & 3, bitrate=first.raw[2] >> 4)
        assert first.samples == kind.samples
        tagged = kind.vbri_frame(40, len(mp3) + kind.nbytes) + mp3
        assert probed(tagged).start == kind.nbytes
        np.testing.assert_array_equal(decoded(tagged).waveform, decoded(mp3).waveform)
        assert samples_by_ffmpeg(tagged) == samples_by_ffmpeg(mp3)

    def test_free_format_is_decoded_or_refused(self) -> None:
        """Bitrate index 0: the frame's size is nowhere in its header."""
        free = bytearray(FRAME)
        free[2] &= 0x0F
        assert parse_header(bytes(free)) is None
        assert probed(bytes(free) * 8).kind == "other"
        try:
            result = decoded(bytes(free) * 8)
        except RowError as error:
            assert error.error_class in ("not_audio", "truncated", "zero_length")
        else:
            assert result.facts.frames >= 6 * KIND.samples


def with_count(mp3: bytes, frames: int, nbytes: int | None = None) -> bytes:
    """The MP3 with another count of frames, and of bytes, in its tag."""
    at = mp3.index(b"Info") if b"Info" in mp3 else mp3.index(b"Xing")
    counts = frames.to_bytes(4, "big") + (mp3[at + 12 : at + 16] if nbytes is None else bytes(4))
    return mp3[: at + 8] + counts + mp3[at + 16 :]


class TestWrongCounts:
    """Tags that an encoder could not go back to, or that a tool left as they were."""

    WHOLE = clip("mp3", 2.0)

    @pytest.mark.parametrize("nbytes", [None, 0])
    @pytest.mark.parametrize("span", [(None, None), (0.5, 1.0)])
    def test_a_tag_that_counts_nothing_still_says_the_delay(
        self, nbytes: int | None, span: tuple[float | None, float | None]
    ) -> None:
        data, options = with_count(self.WHOLE, 0, nbytes), {"start_s": span[0], "end_s": span[1]}
        result = decode(io.BytesIO(data), uri="clip", **options)  # type: ignore[arg-type]
        wanted = decode(io.BytesIO(self.WHOLE), uri="clip", **options)  # type: ignore[arg-type]
        np.testing.assert_array_equal(result.waveform, wanted.waveform)

    def test_a_tag_without_a_count_still_says_the_delay(self) -> None:
        """Its flags announce what follows: nothing here but the encoder's part."""
        at = self.WHOLE.index(b"Info") if b"Info" in self.WHOLE else self.WHOLE.index(b"Xing")
        encoder = self.WHOLE[at + 120 : at + 156]
        size = first_of(self.WHOLE).nbytes
        tag = self.WHOLE[: at + 4] + bytes(4) + encoder
        data = tag.ljust(size, b"\0") + self.WHOLE[size:]
        np.testing.assert_array_equal(decoded(data).waveform, decoded(self.WHOLE).waveform)

    def test_a_tag_that_counts_too_few_does_not_shorten_the_file(self) -> None:
        with pytest.raises(TruncatedError, match="more MPEG frames than the 20 that"):
            decoded(with_count(self.WHOLE, 20))
        part = decode(io.BytesIO(with_count(self.WHOLE, 20)), uri="clip", end_s=0.3)
        wanted = decode(io.BytesIO(self.WHOLE), uri="clip", end_s=0.3)
        np.testing.assert_array_equal(part.waveform, wanted.waveform)

    def test_joined_files_start_where_the_first_one_does(self) -> None:
        """Its tag counts the first part alone, and says the delay of both."""
        first, both = decoded(self.WHOLE).waveform[0], decoded(self.WHOLE * 2).waveform[0]
        np.testing.assert_allclose(both[:80000], first[:80000], rtol=0, atol=2**-20)

    @pytest.mark.parametrize(
        ("rate_hz", "tags"), spread(2, [44100, 48000], [b"", ID3V1 + id3(bytes(100_000))])
    )
    def test_a_second_stream_is_never_lost(self, rate_hz: int, tags: bytes) -> None:
        """A second stream of one kind without tags between is read on; any other is refused."""
        long = clip("mp3", 60.0)
        short = encode(speech_like(0.3, rate_hz, seed=1), "mp3", rate_hz)
        for one in (self.WHOLE, long):
            if rate_hz == 44100 and not tags:
                frames = decoded(one + short).facts.frames - decoded(one).facts.frames
                assert 0.3 * rate_hz <= frames < 0.3 * rate_hz + 5 * 1152
                continue
            with pytest.raises(TruncatedError, match="MPEG frames"):
                decoded(one + tags + short)


def layer_frame(layer: int, *, bitrate: int = 9, rate: int = 0, padding: int = 0) -> bytes:
    """A silent frame of layer I or II, mono (11172-3 2.4.3.1): size by bitrate, slots of 4 or 1."""
    kbits = {1: 32 * bitrate, 2: (32, 48, 56, 64, 80, 96, 112, 128, 160)[bitrate - 1]}[layer]
    rate_hz = (44100, 48000, 32000)[rate]
    slots = (12 if layer == 1 else 144) * kbits * 1000 // rate_hz + padding
    header = bytes([0xFF, 0xF9 | (4 - layer) << 1, bitrate << 4 | rate << 2 | padding << 1, 0xC0])
    return header.ljust(slots * (4 if layer == 1 else 1), b"\0")


class TestLayers:
    @pytest.mark.parametrize("layer", [1, 2])
    @pytest.mark.parametrize("rate", range(3))
    @pytest.mark.parametrize("padding", [0, 1])
    def test_frames_are_counted(self, layer: int, rate: int, padding: int) -> None:
        frame = layer_frame(layer, rate=rate, padding=padding)
        header = first_of(frame * 5)
        assert (header.layer, header.nbytes) == (layer, len(frame))
        assert header.samples == {1: 384, 2: 1152}[layer]
        assert probed(frame * 5).declared_frames == 5 * header.samples
        cut = probed(frame * 5 + frame[:-3])
        expected = f"expected {len(frame)} bytes, got {len(frame) - 3}"
        assert cut.damage == f"last MPEG frame: {expected}"

    def test_three_frames_may_be_chance(self) -> None:
        assert probed(layer_frame(2) * 3).kind == "other"

    @pytest.mark.parametrize("rate_hz", [32000, 44100, 48000])
    def test_layer_two_is_read_to_its_end(self, rate_hz: int) -> None:
        data = encode_as(speech_like(2.0, rate_hz), "mp2", "mp2", rate_hz)
        result = decoded(id3(bytes(300)) + data)
        by_ffmpeg = waveform_by_ffmpeg(data)
        np.testing.assert_allclose(result.waveform, by_ffmpeg, rtol=0, atol=2**-14)
        assert (result.facts.container, result.facts.codec) == ("MP3", "MPEG_LAYER_II")
        with pytest.raises(TruncatedError):
            decoded(data[:-5])

    def test_of_a_variable_rate_nothing_is_lost(self) -> None:
        """libsndfile reckons the length by the first frame, and would stop there."""
        data = layer_frame(2, bitrate=9) * 5 + layer_frame(2, bitrate=1) * 200
        assert soundfile.info(io.BytesIO(data)).frames < 100 * 1152
        assert decoded(data).facts.frames >= 204 * 1152


def waveform_by_ffmpeg(data: bytes, muxer: str = "mp3") -> np.ndarray:
    """FFmpeg's samples in float, (channels, frames)."""
    to_float = av.AudioResampler("fltp")
    with av.open(io.BytesIO(data), format=muxer) as container:
        frames = [f for frame in container.decode(audio=0) for f in to_float.resample(frame)]
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=1)


def samples_by_ffmpeg(data: bytes) -> int:
    with av.open(io.BytesIO(data), format="mp3") as container:
        return sum(frame.samples for frame in container.decode(audio=0))


def test_a_counted_file_is_as_long_as_ffmpeg_says() -> None:
    """The second route for real speech-like audio: no tag, variable rate, ID3 on both sides."""
    mp3 = without_count_tag(clip("mp3", 2.0, channels=2))
    data = id3(bytes(700)) + mp3 + ID3V1
    frames = decoded(data).facts.frames
    assert abs(frames - samples_by_ffmpeg(data)) <= SLACK_FRAMES
    count, damage = count_frames(io.BytesIO(data), first_of(data, 710), len(data))
    assert (count * 1152, damage) == (samples_by_ffmpeg(mp3), None)


@given(data=st.data())
@drawn(150)
def test_no_bytes_hang_or_escape(data: st.DataObject) -> None:
    parts = st.sampled_from([FRAME, FRAME[:50], Kind("2").frame(), ID3V1, id3(b"x"), b"\xff\xfb"])
    raw = b"\xff" + b"".join(data.draw(st.lists(parts | st.binary(max_size=30), max_size=12)))
    found = probed(raw)
    # Four bytes and "skip" are how a box of four gigabytes begins: hypothesis reads our sources.
    assert found.kind in ("mpeg", "other", "adts", "mp4")
    assert 0 <= found.start <= len(raw)
    try:
        decoded(raw)
    except RowError as error:
        assert "\n" not in str(error)
