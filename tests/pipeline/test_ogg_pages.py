"""Ogg pages by RFC 3533: checksums by the definition, lacing, numbers, ends, chains, every cut;
Opus in them by RFC 7845."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio.containers import Probe, probe
from earmill.pipeline.audio.containers.ogg import MAX_EMPTY_PAGES, ogg_crc
from earmill.pipeline.audio.decode import Limits
from earmill.pipeline.common.errors import (
    NotAudioError,
    RowError,
    SpanError,
    TruncatedError,
    UnsupportedError,
)
from tests.pipeline.audio_factory import FORMATS, clip, encode, speech_like
from tests.pipeline.av_factory import encode_as, ogg_film
from tests.pipeline.container_bytes import crc_bit_by_bit, ogg_page
from tests.pipeline.whole_clips import Decoded, decode
from tests.short import drawn

BOS, EOS, CONTINUED = 2, 4, 1


def decoded(data: bytes, **options: Any) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", channels="each", **options)


def probed(data: bytes) -> Probe:
    return probe(io.BytesIO(data), len(data))


NO_END = "no end mark"


def damage_of(data: bytes) -> str | None:
    found = probed(data)
    return NO_END if found.damage is None and found.unterminated else found.damage


def logical(payloads: list[bytes], *, serial: int = 7, ended: bool = True) -> list[bytes]:
    """The pages of one logical stream."""
    last = len(payloads) - 1
    return [
        ogg_page(
            payload,
            number=number,
            serial=serial,
            flags=(BOS if number == 0 else 0) | (EOS if ended and number == last else 0),
        )
        for number, payload in enumerate(payloads)
    ]


def pages_of(data: bytes) -> list[bytes]:
    """A file cut into its pages, by the page header alone."""
    pages, position = [], 0
    while position < len(data):
        lacing = data[position + 27 : position + 27 + data[position + 26]]
        size = 27 + len(lacing) + sum(lacing)
        pages.append(data[position : position + size])
        position += size
    return pages


def renumbered(page: bytes, *, serial: int | None = None, number: int | None = None) -> bytes:
    """The page in another stream or at another place, with the checksum that belongs there."""
    changed = bytearray(page)
    if serial is not None:
        changed[14:18] = serial.to_bytes(4, "little")
    if number is not None:
        changed[18:22] = number.to_bytes(4, "little")
    changed[22:26] = bytes(4)
    changed[22:26] = crc_bit_by_bit(bytes(changed)).to_bytes(4, "little")
    return bytes(changed)


class TestChecksum:
    @given(st.binary(min_size=27, max_size=300))
    @drawn(100)
    def test_bit_by_bit(self, page: bytes) -> None:
        zeroed = page[:22] + bytes(4) + page[26:]
        assert ogg_crc(page) == crc_bit_by_bit(zeroed)

    @pytest.mark.parametrize("kind", ["ogg", "opus"])
    def test_pages_of_an_encoder(self, kind: str) -> None:
        """libogg's own checksums, page by page."""
        pages = pages_of(clip(kind, 2.0))
        assert len(pages) > 3
        for page in pages:
            assert ogg_crc(page) == int.from_bytes(page[22:26], "little")
            assert renumbered(page) == page

    def test_every_single_bit_counts(self) -> None:
        """Of a page in the middle: header, lacing and payload; also each bit of the checksum."""
        pages = logical([b"first", b"payload", b"last"])
        start = len(pages[0])
        whole = b"".join(pages)
        assert damage_of(whole) is None
        for bit in range(8 * len(pages[1])):
            changed = bytearray(whole)
            changed[start + bit // 8] ^= 1 << bit % 8
            found = probed(bytes(changed))
            assert found.damage is not None, f"bit {bit}"
            assert found.shifts_time


class TestPages:
    @given(
        sizes=st.lists(
            st.sampled_from([0, 1, 254, 255, 256, 509, 510, 3000]), min_size=1, max_size=8
        )
    )
    @drawn(40)
    def test_any_lacing(self, sizes: list[int]) -> None:
        """Packets of every length round the multiples of 255, a page each."""
        pages = logical([bytes([number]) * size for number, size in enumerate(sizes)])
        assert probed(b"".join(pages)) == Probe("ogg", by_ffmpeg=True)

    def test_a_packet_over_many_pages(self) -> None:
        """65025 bytes fill a page's 255 lacing values; the packet goes on in the next."""
        full = ogg_page(b"x" * 65025, number=1, lacing=b"\xff" * 255)
        rest = ogg_page(b"x" * 10, number=2, flags=CONTINUED | EOS)
        data = ogg_page(b"head", number=0, flags=BOS) + full + rest
        assert len(full) == 27 + 255 + 65025
        assert damage_of(data) is None
        assert damage_of(data[: len(data) - 1]) is not None

    def test_a_missing_repeated_or_swapped_page(self) -> None:
        pages = logical([bytes([n]) * 50 for n in range(6)])
        size = len(pages[0])
        cases = {
            "missing": (pages[:2] + pages[3:], 2 * size, "expected page 2, got page 3"),
            "repeated": (pages[:3] + pages[2:], 3 * size, "expected page 3, got page 2"),
            "swapped": (
                [*pages[:2], pages[3], pages[2], *pages[4:]],
                2 * size,
                "expected page 2, got page 3",
            ),
        }
        for name, (order, at, text) in cases.items():
            found = probed(b"".join(order))
            assert found.damage == f"Ogg page at byte {at}: {text}", name

    def test_numbers_may_start_anywhere(self) -> None:
        """A recorder that joins a live stream keeps its numbers."""
        pages = [renumbered(p, number=1000 + n) for n, p in enumerate(logical([b"a", b"b", b"c"]))]
        assert damage_of(b"".join(pages)) is None

    def test_a_stream_without_a_first_page(self) -> None:
        data = b"".join(logical([b"a", b"b", b"c"])[1:])
        assert damage_of(data) == "Ogg page at byte 0: stream 7 has no first page"

    def test_empty_pages_are_bounded(self) -> None:
        first, last = logical([b"a", b"z"])[0], b"z"
        for count, fine in ((MAX_EMPTY_PAGES, True), (MAX_EMPTY_PAGES + 1, False)):
            empty = [ogg_page(b"", number=n + 1, lacing=b"") for n in range(count)]
            end = ogg_page(last, number=count + 1, flags=EOS)
            damage = damage_of(first + b"".join(empty) + end)
            assert (damage is None) == fine
            assert fine or damage == f"more than {MAX_EMPTY_PAGES} Ogg pages without a payload"


class TestStreams:
    def test_two_at_once_are_one_file(self) -> None:
        """Multiplexed, as a film or a skeleton has them: numbers are counted per stream."""
        one, two = logical([b"a"] * 4, serial=1), logical([b"b"] * 3, serial=2)
        mixed = [one[0], two[0], one[1], one[2], two[1], one[3], two[2]]
        assert damage_of(b"".join(mixed)) is None
        assert damage_of(b"".join(mixed[:-1])) == NO_END

    @pytest.mark.parametrize("serial", [7, 8])
    @pytest.mark.parametrize("ended", [True, False])
    def test_a_chain_is_read_link_by_link_whatever_its_serials(
        self, serial: int, ended: bool
    ) -> None:
        """A recorder that was cut off and started again leaves no end mark, and may use the same
        serial number."""
        first = b"".join(logical([b"a", b"b"], ended=ended))
        second = b"".join(logical([b"c", b"d"], serial=serial))
        found = probed(first + second)
        assert [(part.start, part.stop) for part in found.parts] == [
            (0, len(first)),
            (len(first), len(first + second)),
        ]
        assert (found.damage, found.unterminated) == (None, not ended)

    @pytest.mark.parametrize("kind", ["ogg", "opus"])
    def test_links_give_the_samples_of_the_files_that_were_joined(self, kind: str) -> None:
        files = [clip(kind, seconds, seed=n) for n, seconds in enumerate((1.0, 0.4, 1.5))]
        alone = np.concatenate([decoded(one).waveform for one in files], axis=1)
        result = decoded(b"".join(files))
        np.testing.assert_array_equal(result.waveform, alone)
        rate_hz = result.facts.rate_hz
        part = decoded(b"".join(files), start_s=0.5, end_s=2.0)
        np.testing.assert_array_equal(part.waveform, alone[:, rate_hz // 2 : 2 * rate_hz])
        with pytest.raises(SpanError, match=r"file ends at 2\.900 s"):
            decoded(b"".join(files), start_s=0.5, end_s=3.5)

    def test_links_of_other_rates_or_channels_are_refused(self) -> None:
        first = clip("ogg", 1.0)
        for second in (encode(speech_like(1.0, 22050), "ogg", 22050), clip("opus", 1.0)):
            with pytest.raises(UnsupportedError, match="as in joined files"):
                decoded(first + second)
        with pytest.raises(UnsupportedError, match="2 channel"):
            decoded(first + clip("ogg", 1.0, channels=2))

    @pytest.mark.parametrize("kind", ["ogg", "opus"])
    def test_a_real_recording_cut_off_and_begun_again(self, kind: str) -> None:
        first = pages_of(clip(kind, 2.0))
        serial = int.from_bytes(first[0][14:18], "little")
        second = [renumbered(page, serial=serial) for page in pages_of(clip(kind, 1.0, seed=1))]
        data = b"".join(first[:-1] + second)
        with pytest.raises(TruncatedError, match=r"audio\.unterminated: accept"):
            decoded(data)
        result = decoded(data, limits=Limits(unterminated=True))
        whole = decoded(clip(kind, 1.0, seed=1)).waveform
        np.testing.assert_allclose(result.waveform[:, -whole.shape[1] :], whole, atol=2**-15)
        assert result.facts.unterminated is True

    def test_a_page_behind_the_end_of_its_stream(self) -> None:
        pages = logical([b"a", b"b"])
        late = ogg_page(b"c", number=2)
        where = len(b"".join(pages))
        assert damage_of(b"".join([*pages, late])) == (
            f"Ogg page at byte {where}: stream 7 goes on behind its end"
        )

    def test_a_page_behind_a_break_is_no_tag(self) -> None:
        first, second = b"".join(logical([b"a", b"b"])), b"".join(logical([b"c", b"d"]))
        assert damage_of(first + second[1:]) == (
            f"no Ogg page at byte {len(first)} of {len(first + second) - 1}"
        )

    @pytest.mark.parametrize("tag", [b"TAG" + bytes(125), b"APETAGEX", b"\0", b"Ogg"])
    def test_a_tag_behind_the_end_is_no_damage(self, tag: bytes) -> None:
        pages = logical([b"a", b"b"])
        assert damage_of(b"".join(pages) + tag) is None
        at = len(pages[0])
        assert damage_of(pages[0] + tag) == f"no Ogg page at byte {at} of {at + len(tag)}"


def test_cut_at_every_byte() -> None:
    """Only the whole file is whole; the words say where and how much."""
    pages = logical([b"abc", b"x" * 300, b"", b"end"])
    data = b"".join(pages)
    borders = {0, *(len(b"".join(pages[: n + 1])) for n in range(len(pages)))}
    for cut in range(4, len(data)):
        damage = damage_of(data[:cut])
        assert damage is not None
        if cut in borders:
            assert damage == NO_END
        else:
            start = max(border for border in borders if border < cut)
            assert f"byte {start}" in damage


class TestOpus:
    """RFC 7845: what the header says beside the sound decides no rate, and delay is left out."""

    WHOLE = clip("opus", 2.0)

    @staticmethod
    def with_head(data: bytes, *, rate_hz: int) -> bytes:
        pages = pages_of(data)
        head = pages[0][: 28 + 12] + rate_hz.to_bytes(4, "little") + pages[0][28 + 16 :]
        return renumbered(head) + b"".join(pages[1:])

    @staticmethod
    def shifted(data: bytes, by: int) -> bytes:
        """Return the file of a recorder that joined the stream under way."""
        pages = pages_of(data)
        for number, page in enumerate(pages):
            granule = int.from_bytes(page[6:14], "little", signed=True)
            if granule > 0:
                moved = (granule + by).to_bytes(8, "little", signed=True)
                pages[number] = renumbered(page[:6] + moved + page[14:])
        return b"".join(pages)

    @pytest.mark.parametrize("rate_hz", [0, 8000, 12000, 16000, 24000, 44100, 48000, 192000])
    def test_the_rate_of_what_was_encoded_is_information_only(self, rate_hz: int) -> None:
        result, whole = decoded(self.with_head(self.WHOLE, rate_hz=rate_hz)), decoded(self.WHOLE)
        assert (result.facts.rate_hz, result.facts.decoder) == (48000, "libsndfile")
        np.testing.assert_array_equal(result.waveform, whole.waveform)
        both = decoded(self.WHOLE + self.with_head(self.WHOLE, rate_hz=rate_hz))
        np.testing.assert_array_equal(both.waveform, np.tile(whole.waveform, (1, 2)))

    @pytest.mark.parametrize("by", [1, 100, 480_000, 1 << 40])
    @pytest.mark.parametrize("span", [(None, None), (0.5, 1.0)])
    def test_positions_that_begin_later_keep_no_delay(
        self, by: int, span: tuple[float | None, float | None]
    ) -> None:
        options = {"start_s": span[0], "end_s": span[1]}
        result, whole = (
            decoded(self.shifted(self.WHOLE, by), **options),
            decoded(self.WHOLE, **options),
        )
        np.testing.assert_allclose(result.waveform, whole.waveform, rtol=0, atol=2**-20)

    @pytest.mark.parametrize("kind", ["ogg", "opus"])
    @pytest.mark.parametrize("channels", range(1, 9))
    def test_channels_have_one_order_whoever_decodes(self, kind: str, channels: int) -> None:
        """A tone for each channel; the last one may be for low frequencies only."""
        hz, rate_hz = 40 + 20 * np.arange(channels), FORMATS[kind][2]
        tones = 0.2 * np.sin(2 * np.pi * hz * np.arange(rate_hz)[:, None] / rate_hz)
        data = encode(tones.astype(np.float32), kind)
        plain = decoded(data)
        page = pages_of(data)[-1]
        last = renumbered(page[:5] + bytes([page[5] & ~EOS]) + page[6:])
        other = decoded(data[: -len(page)] + last, limits=Limits(unterminated=True))
        assert (plain.facts.decoder, other.facts.decoder) == ("libsndfile", "ffmpeg")
        # The decoders may differ in how the last packet fades.
        inside = slice(0, plain.facts.frames - 960)
        np.testing.assert_allclose(
            other.waveform[:, inside], plain.waveform[:, inside], rtol=0, atol=2**-12
        )

    def test_a_usual_file_is_libsndfile_s(self) -> None:
        assert decoded(self.WHOLE).facts.decoder == "libsndfile"
        assert probed(self.WHOLE) == Probe("ogg")

    def test_vorbis_may_begin_anywhere(self) -> None:
        whole = clip("ogg", 2.0)
        result = decoded(self.shifted(whole, 441_000))
        np.testing.assert_array_equal(result.waveform, decoded(whole).waveform)


def test_flac_in_ogg() -> None:
    samples = speech_like(1.0, 16000, channels=2)
    result = decoded(encode_as(samples, "ogg", "flac", 16000))
    np.testing.assert_allclose(result.waveform, samples.T, rtol=0, atol=2**-15)
    assert (result.facts.container, result.facts.codec) == ("OGG", "FLAC")


def test_sound_beside_a_film() -> None:
    sound, film = speech_like(2.0, 48000), ogg_film(speech_like(2.0, 48000))
    alone = decoded(encode_as(sound, "ogg", "libopus", 48000))
    result = decoded(film)
    np.testing.assert_allclose(result.waveform, alone.waveform, rtol=0, atol=2**-15)


@pytest.mark.parametrize("kind", ["ogg", "opus"])
def test_a_file_without_an_end_mark(kind: str) -> None:
    """A recorder that writes as it goes, as for voice notes: every page is whole."""
    whole = clip(kind, 2.0)
    pages = pages_of(whole)
    last = renumbered(pages[-1][:5] + bytes([pages[-1][5] & ~EOS]) + pages[-1][6:])
    data = b"".join(pages[:-1]) + last
    with pytest.raises(TruncatedError, match=r"no end-of-stream mark; audio\.unterminated: accept"):
        decoded(data)
    result = decoded(data, limits=Limits(unterminated=True))
    expected = decoded(whole)
    assert 0 <= result.facts.frames - expected.facts.frames < 1024
    frames = expected.facts.frames
    np.testing.assert_allclose(result.waveform[:, :frames], expected.waveform, atol=2**-15)
    assert (result.facts.unterminated, expected.facts.unterminated) == (True, None)
    for cut in (len(data) - 1, len(data) - len(last) + 30):
        with pytest.raises(TruncatedError, match="Ogg page at byte"):
            decoded(data[:cut], limits=Limits(unterminated=True))


@pytest.mark.parametrize("kind", ["ogg", "opus"])
def test_a_real_file_cut_at_page_borders_and_beside_them(kind: str) -> None:
    """A transfer that stops between two pages leaves nothing but good pages."""
    data = clip(kind, 3.0)
    border = 0
    for page in pages_of(data)[:-1]:
        border += len(page)
        for cut in (border - 1, border, border + 1):
            with pytest.raises((TruncatedError, NotAudioError)):
                decode(io.BytesIO(data[:cut]), uri="clip")


@given(data=st.data())
@drawn(120)
def test_no_pages_hang_or_escape(data: st.DataObject) -> None:
    """Any pages in any order, with junk between them."""
    page = st.builds(
        ogg_page,
        st.binary(max_size=40),
        number=st.integers(0, 3),
        serial=st.integers(0, 2),
        flags=st.integers(0, 7),
    )
    parts = data.draw(st.lists(page | st.binary(max_size=30), max_size=10))
    raw = b"OggS" + b"".join(parts) if data.draw(st.booleans()) else b"".join(parts)
    found = probed(raw)
    assert found.damage is None or "\n" not in found.damage
    with pytest.raises(RowError) as caught:  # there is no codec header in it
        decode(io.BytesIO(raw), uri="clip")
    assert "\n" not in str(caught.value)
