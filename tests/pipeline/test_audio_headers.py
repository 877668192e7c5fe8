"""AIFF, CAF, AU and NIST SPHERE built from their specifications: samples, promises, every cut."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio.containers import Probe, probe
from earmill.pipeline.common.errors import EmptyFileError, NotAudioError, RowError, TruncatedError
from tests.pipeline.container_bytes import (
    aiff,
    as_pcm,
    au,
    caf,
    caf_chunk,
    caf_desc,
    chunk,
    comm,
    ramp,
    sphere,
    ssnd,
)
from tests.pipeline.whole_clips import Decoded, decode
from tests.short import drawn

FRAMES = 20
SAMPLES = ramp(FRAMES)
BIG, LITTLE = as_pcm(SAMPLES, 16, "big"), as_pcm(SAMPLES, 16)


def probed(data: bytes) -> Probe:
    return probe(io.BytesIO(data), len(data))


def damage_of(data: bytes) -> str | None:
    return probed(data).damage


def decoded(data: bytes) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", channels="each")


# Name -> a whole file of SAMPLES, and where its last sample ends.
WHOLE = {
    "aiff": aiff(comm(FRAMES), chunk(b"NAME", b"odd", order="big"), ssnd(BIG)),
    "aifc": aiff(comm(FRAMES, kind=b"NONE"), ssnd(BIG), kind=b"AIFC"),
    "sowt": aiff(comm(FRAMES, kind=b"sowt"), ssnd(LITTLE), kind=b"AIFC"),
    "caf": caf(caf_desc(), caf_chunk(b"free", bytes(5)), caf_chunk(b"data", bytes(4) + BIG)),
    "au": au(BIG),
    "au-annotated": au(BIG, offset=40),
    "au-little": au(LITTLE, order="little"),
    "nist": sphere(LITTLE, FRAMES),
    "nist-big": sphere(BIG, FRAMES, sample_byte_format="-s2 10"),
}


def end_of_samples(data: bytes) -> int:
    return max(data.rfind(BIG), data.rfind(LITTLE)) + len(BIG)


class TestWhole:
    @pytest.mark.parametrize("kind", WHOLE)
    def test_samples_are_those_of_the_bytes(self, kind: str) -> None:
        result = decoded(WHOLE[kind])
        np.testing.assert_array_equal(result.waveform[0] * 32768, SAMPLES[:, 0])
        assert (result.facts.rate_hz, result.facts.channels) == (8000, 1)
        assert damage_of(WHOLE[kind]) is None

    @pytest.mark.parametrize("bits", [8, 16, 24, 32])
    @pytest.mark.parametrize("channels", [1, 2, 5])
    def test_every_width_of_aiff_and_caf(self, bits: int, channels: int) -> None:
        values = ramp(11, channels, bits)
        raw = as_pcm(values, bits, "big")
        expected = (values / (1 << (bits - 1))).astype(np.float32).T
        files = [
            aiff(comm(11, channels, bits), ssnd(raw)),
            caf(caf_desc(channels, bits), caf_chunk(b"data", bytes(4) + raw)),
            au(raw, {8: 2, 16: 3, 24: 4, 32: 5}[bits], channels),
        ]
        for data in files:
            np.testing.assert_array_equal(decoded(data).waveform, expected)
            frame = channels * bits // 8
            cut = probed(data[: data.index(raw) + len(raw) - 1])
            assert cut.damage == f"expected {11 * frame} bytes of samples, got {11 * frame - 1}"
            assert cut.declared_frames == 11

    @pytest.mark.parametrize("kind", WHOLE)
    @pytest.mark.parametrize("size", [2, 7, 400])
    def test_what_stands_behind_the_samples_is_no_sound(self, kind: str, size: int) -> None:
        """Chunks of the format itself, the tag that some tool appended, a sector filled up."""
        chunks = [chunk(b"(c) ", b"\x40" * size, order="big")] if WHOLE[kind][:4] == b"FORM" else []
        chunks += [caf_chunk(b"free", b"\x40" * size)] if kind == "caf" else []
        for behind in [*chunks, b"TAG" + b"\x40" * 125, bytes(size)]:
            result = decoded(WHOLE[kind] + behind)
            np.testing.assert_array_equal(result.waveform[0] * 32768, SAMPLES[:, 0])

    @pytest.mark.parametrize("kind", WHOLE)
    @pytest.mark.parametrize("size", [2, 7, 400])
    def test_what_is_no_chunk_behind_the_samples_could_be_samples(
        self, kind: str, size: int
    ) -> None:
        with pytest.raises(TruncatedError, match=rf"got {size} more that are no chunks"):
            decoded(WHOLE[kind] + b"\x80\x7f" * (size // 2) + b"\x80" * (size % 2))


@pytest.mark.parametrize("kind", WHOLE)
def test_cut_at_every_byte(kind: str) -> None:
    """No cut gives fewer samples without a word: each is refused, early ones as no audio."""
    data = WHOLE[kind]
    end = end_of_samples(data)
    assert end == len(data)
    names = {TruncatedError: 0, NotAudioError: 0, EmptyFileError: 0}
    for cut in range(len(data)):
        with pytest.raises(RowError) as caught:
            decoded(data[:cut])
        names[type(caught.value)] += 1  # a KeyError is another error than these three
        in_samples = cut > end - len(BIG)
        assert not in_samples or isinstance(caught.value, TruncatedError)
    assert names[EmptyFileError] == 1
    assert names[NotAudioError] <= 12
    assert names[TruncatedError] >= len(BIG)


class TestAiff:
    def test_samples_before_their_format(self) -> None:
        """The order of chunks is free: without COMM the bytes alone are compared."""
        data = aiff(ssnd(BIG), comm(FRAMES))
        assert damage_of(data) is None
        cut = probed(data[: data.index(BIG) + 10])
        assert (cut.damage, cut.declared_frames) == ("expected 40 bytes of samples, got 10", None)

    def test_less_than_a_frame_missing_is_no_damage(self) -> None:
        raw = as_pcm(ramp(10, 3, 24), 24, "big")
        data = aiff(comm(10, 3, 24), ssnd(raw, size=8 + len(raw) + 8))
        assert damage_of(data) is None
        assert damage_of(data[:-1]) is not None

    @pytest.mark.parametrize(("bits", "width"), [(1, 1), (12, 2), (20, 3), (27, 4)])
    def test_odd_widths_take_whole_bytes(self, bits: int, width: int) -> None:
        whole = aiff(comm(9, 2, bits), ssnd(bytes(9 * 2 * width)))
        assert damage_of(whole) is None
        assert probed(whole[:-1]).declared_frames == 9

    def test_a_compressed_kind_promises_bytes_not_frames(self) -> None:
        data = aiff(comm(64, kind=b"ima4"), ssnd(bytes(34)), kind=b"AIFC")
        found = probed(data[:-1])
        assert (found.damage, found.declared_frames) == (
            "expected 34 bytes of samples, got 33",
            None,
        )

    @pytest.mark.parametrize("size", [0, 4, 7, 8])
    def test_an_ssnd_chunk_too_small_for_its_words(self, size: int) -> None:
        """It promises nothing: its own words are not counted as a negative number of samples."""
        result = decoded(aiff(comm(0), ssnd(BIG, size=size)))
        np.testing.assert_array_equal(result.waveform[0] * 32768, SAMPLES[:, 0])
        assert result.facts.header_size == "ignored"

    def test_no_samples_at_all(self) -> None:
        data = aiff(comm(FRAMES), chunk(b"MARK", bytes(2), order="big"))
        assert damage_of(data) == f"no SSND chunk in {len(data)} bytes"

    def test_a_form_of_something_else_is_no_aiff(self) -> None:
        data = aiff(comm(FRAMES), ssnd(BIG), kind=b"8SVX")
        assert probed(data).kind == "other"
        with pytest.raises(NotAudioError):
            decoded(data)

    def test_rates_are_extended_floats(self) -> None:
        for rate_hz in (8000, 11025, 22050, 44100, 96000, 192000):
            data = aiff(comm(FRAMES, rate_hz=rate_hz), ssnd(BIG))
            assert decoded(data).facts.rate_hz == rate_hz


class TestCaf:
    def test_minus_one_means_to_the_end(self) -> None:
        """Nothing is promised then. libsndfile refuses such a file, and reads its samples."""
        data = caf(caf_desc(), caf_chunk(b"data", bytes(4) + BIG, size=-1))
        result = decoded(data)
        np.testing.assert_array_equal(result.waveform[0] * 32768, SAMPLES[:, 0])
        assert (result.facts.container, result.facts.header_size) == ("CAF", "unknown")

    @pytest.mark.parametrize("size", [-2, -(1 << 63)])
    def test_other_negative_sizes_end_the_walk(self, size: int) -> None:
        data = caf(
            caf_desc(), caf_chunk(b"free", b"", size=size), caf_chunk(b"data", bytes(4) + BIG)
        )
        assert damage_of(data) == f"no data chunk in {len(data)} bytes"

    def test_a_size_near_the_end_of_the_world(self) -> None:
        """2^63 - 1 is a chunk that no file holds; the look behind it is no OverflowError."""
        huge = (1 << 63) - 1
        data = caf(caf_desc(), caf_chunk(b"free", b"", size=huge), caf_chunk(b"data", bytes(4)))
        assert damage_of(data) == f"no data chunk in {len(data)} bytes"
        data = caf(caf_desc(), caf_chunk(b"data", bytes(4) + BIG, size=huge))
        result = decoded(data)
        np.testing.assert_array_equal(result.waveform[0] * 32768, SAMPLES[:, 0])
        assert result.facts.header_size == "ignored"

    def test_packets_of_more_than_a_frame_promise_bytes(self) -> None:
        desc = bytearray(caf_desc())
        desc[-12:-8] = (64).to_bytes(4, "big")  # frames in a packet
        found = probed(caf(bytes(desc), caf_chunk(b"data", bytes(4) + BIG, size=4 + 41)))
        assert (found.damage, found.declared_frames) == (
            "expected 41 bytes of samples, got 40",
            None,
        )


class TestAu:
    @pytest.mark.parametrize(
        ("encoding", "size"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (6, 4), (7, 8), (27, 1)]
    )
    def test_bytes_of_a_sample_by_encoding(self, encoding: int, size: int) -> None:
        frame = 2 * size
        data = au(bytes(5 * frame), encoding, 2, size=6 * frame)
        found = probed(data)
        assert found.damage == f"expected {6 * frame} bytes of samples, got {5 * frame}"
        assert found.declared_frames == 6
        # A whole frame minus one byte is missing: all the whole frames are there.
        assert damage_of(au(bytes(5 * frame), encoding, 2, size=6 * frame - 1)) is None

    def test_an_encoding_without_fixed_samples(self) -> None:
        found = probed(au(bytes(9), 23, size=10))  # G.721 ADPCM
        assert (found.damage, found.declared_frames) == (
            "expected 10 bytes of samples, got 9",
            None,
        )

    def test_unknown_size_reads_to_the_end(self) -> None:
        data = au(BIG, size=0xFFFFFFFF)
        np.testing.assert_array_equal(decoded(data).waveform[0] * 32768, SAMPLES[:, 0])

    def test_samples_that_start_behind_the_end(self) -> None:
        data = au(BIG)
        data = data[:4] + (1 << 20).to_bytes(4, "big") + data[8:]
        assert damage_of(data) == "expected 40 bytes of samples, got 0"
        with pytest.raises(TruncatedError):
            decoded(data)

    def test_both_byte_orders_say_the_same(self) -> None:
        for size in (len(BIG), len(BIG) + 2):
            big, little = au(BIG, size=size), au(LITTLE, size=size, order="little")
            assert probed(big) == probed(little)


class TestNist:
    @pytest.mark.parametrize(("channels", "width"), [(1, 1), (1, 2), (2, 2), (3, 4)])
    def test_the_count_is_of_frames(self, channels: int, width: int) -> None:
        fields = {"channel_count": f"-i {channels}", "sample_n_bytes": f"-i {width}"}
        frame = channels * width
        data = sphere(bytes(7 * frame), 7, **fields)
        assert damage_of(data) is None
        found = probed(data[:-1])
        assert found.damage == f"expected {7 * frame} bytes of samples, got {7 * frame - 1}"
        assert found.declared_frames == 7

    @pytest.mark.parametrize("coding", ["-s16 pcm,embedded-shor", "-s4 wvpk", "-s8 pcm,shpk"])
    def test_compressed_codings_promise_nothing(self, coding: str) -> None:
        data = sphere(b"", 1000, sample_coding=coding)
        assert probed(data) == Probe("nist")

    @pytest.mark.parametrize("coding", ["-s4 ulaw", "-s6 mu-law", "-s4 alaw", "-s3 pcm", ""])
    def test_plain_codings_do(self, coding: str) -> None:
        assert damage_of(sphere(LITTLE, FRAMES + 1, sample_coding=coding)) is not None

    def test_defaults_are_one_channel_of_two_bytes(self) -> None:
        data = sphere(LITTLE, FRAMES, channel_count="", sample_n_bytes="")
        assert damage_of(data) is None
        assert damage_of(data[:-1]) == "expected 40 bytes of samples, got 39"

    def test_a_larger_header(self) -> None:
        """The second line says how long it is; samples start behind it."""
        data = sphere(LITTLE, FRAMES, header=2048)
        np.testing.assert_array_equal(decoded(data).waveform[0] * 32768, SAMPLES[:, 0])
        assert damage_of(data[:-2]) == "expected 40 bytes of samples, got 38"

    def test_fields_behind_the_end_mark_do_not_count(self) -> None:
        data = sphere(LITTLE, FRAMES)
        late = data.replace(b"end_head\n", b"end_head\nsample_count -i 999\n")
        found = probed(late[:1024] + LITTLE)
        assert (found.damage, found.declared_frames) == (None, FRAMES)

    @pytest.mark.parametrize("second", [b"   junk\n", b"      0\n", b"9999999\n", b"     -1\n"])
    def test_a_size_line_that_makes_no_sense(self, second: bytes) -> None:
        """No promise can be read, or one that the file cannot keep; never an exception."""
        data = sphere(LITTLE, FRAMES)
        found = probed(data[:8] + second + data[16:])
        assert found.kind == "nist"

    def test_a_count_that_is_no_number_promises_nothing(self) -> None:
        data = sphere(LITTLE, FRAMES, sample_count="-i many")
        assert probed(data) == Probe("nist", header_size="unknown")
        assert decoded(data).facts.frames == FRAMES


@given(data=st.data())
@drawn(200)
def test_no_edit_of_a_header_hangs_or_escapes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(WHOLE)))
    whole = bytearray(WHOLE[kind])
    start = end_of_samples(bytes(whole)) - len(BIG)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, start - 1))
        new = data.draw(st.binary(min_size=1, max_size=8))
        whole[at : at + len(new)] = new
    found = probed(bytes(whole))
    assert found.damage is None or "\n" not in found.damage
    try:
        result = decoded(bytes(whole))
    except RowError as error:
        assert str(error).startswith("clip: ")
        return
    assert np.isfinite(result.waveform).all()
