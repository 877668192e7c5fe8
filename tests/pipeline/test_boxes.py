"""MP4 boxes, Matroska segments, ASF objects and ADTS frames by their specifications."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from earmill.pipeline.audio.containers import Probe, probe
from earmill.pipeline.audio.containers.compressed import (
    ADTS,
    MP4_FIRST,
    probe_asf,
    probe_matroska,
    probe_mp4,
)
from earmill.pipeline.common.errors import RowError, TruncatedError, UnsupportedError
from tests.pipeline.av_factory import AV_FORMATS, av_clip
from tests.pipeline.mpeg_bytes import ID3V1, id3
from tests.pipeline.whole_clips import decode
from tests.short import drawn

ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
ASF_STREAM = bytes.fromhex("9107dcb7b7a9cf118ee600c00c205365")


def box(name: bytes, payload: bytes = b"", *, long: bool = False, size: int | None = None) -> bytes:
    """ISO/IEC 14496-12 4.2: 32-bit size, name; size 1 means a 64-bit size behind the name."""
    whole = len(payload) + (16 if long else 8) if size is None else size
    if long:
        return (1).to_bytes(4, "big") + name + whole.to_bytes(8, "big") + payload
    return whole.to_bytes(4, "big") + name + payload


def ebml(ident: bytes, payload: bytes, *, width: int = 0, unknown: bool = False) -> bytes:
    """RFC 8794: an element whose size takes `width` bytes, the fewest by default."""
    fewest = next(w for w in range(1, 9) if len(payload) < (1 << 7 * w) - 1)
    width = width or fewest
    value = (1 << 7 * width) - 1 if unknown else len(payload)
    return ident + (value | 1 << 7 * width).to_bytes(width, "big") + payload


def asf(declared: int, *, live: bool = False, first: int = 0, body: bytes = b"") -> bytes:
    """A header object with `first` other objects before its file properties, then `body`."""
    fields = bytes(16) + declared.to_bytes(8, "little") + bytes(8 * 5) + bytes([live, 0, 0, 0])
    properties = ASF_FILE + (24 + len(fields) + 12).to_bytes(8, "little") + fields + bytes(12)
    other = (ASF_STREAM + (24 + 6).to_bytes(8, "little") + bytes(6)) * first
    inside = other + properties
    head = ASF_HEADER + (30 + len(inside)).to_bytes(8, "little")
    return head + (first + 1).to_bytes(4, "little") + b"\1\2" + inside + body


def adts(payload: bytes, *, crc: bool = False) -> bytes:
    """ISO/IEC 13818-7 6.2: sync, then the frame's length in 13 bits from bit 30 on."""
    size = len(payload) + 7
    bits = f"{0xFFF:012b}0{0:02b}{not crc:01b}" + "01" + "0100" + "0" + "001" + "0000"
    bits += f"{size:013b}" + "1" * 11 + "00"
    return int(bits, 2).to_bytes(7, "big") + payload


def found(walk: object, data: bytes) -> Probe | None:
    assert callable(walk)
    result = walk(io.BytesIO(data), len(data))
    assert result is None or isinstance(result, Probe)
    return result


def damage_of(walk: object, data: bytes) -> str | None:
    result = found(walk, data)
    assert result is not None
    return result.damage


class TestMp4:
    FILE = box(b"ftyp", b"M4A ") + box(b"moov", bytes(30)) + box(b"mdat", bytes(50))

    @given(
        boxes=st.lists(
            st.tuples(
                st.sampled_from([b"free", b"mdat", b"uuid"]), st.integers(0, 40), st.booleans()
            ),
            max_size=8,
        ),
        at=st.integers(0, 8),
    )
    @drawn(60)
    def test_any_boxes_with_short_and_long_sizes(
        self, boxes: list[tuple[bytes, int, bool]], at: int
    ) -> None:
        parts = [box(name, b"moov" * 10 + bytes(size), long=long) for name, size, long in boxes]
        without = box(b"ftyp") + b"".join(parts)
        text = f"no moov box in {len(without)} bytes"
        assert found(probe_mp4, without) == Probe("mp4", damage=text)
        parts.insert(at, box(b"moov", bytes(5)))
        assert found(probe_mp4, box(b"ftyp") + b"".join(parts)) == Probe("mp4")

    def test_cut_at_every_byte(self) -> None:
        """`mdat` is last here: whatever is cut off, a size promises more."""
        moov = self.FILE.index(b"moov") - 4
        mdat = self.FILE.index(b"mdat") - 4
        assert damage_of(probe_mp4, self.FILE) is None
        for cut in range(8, len(self.FILE)):
            damage = damage_of(probe_mp4, self.FILE[:cut])
            if mdat <= cut < mdat + 8:  # less than a box header is left: as good as none
                assert damage is None
            elif cut < moov + 8:
                assert damage is not None
            else:
                start = moov if cut < mdat else mdat
                size = mdat - moov if cut < mdat else len(self.FILE) - mdat
                name = b"moov" if cut < mdat else b"mdat"
                assert damage == f"box {name!a}: expected {size} bytes, got {cut - start}"

    def test_size_zero_reaches_to_the_end(self) -> None:
        """A last box written to a pipe; whatever follows belongs to it."""
        data = box(b"ftyp") + box(b"moov") + box(b"mdat", bytes(30), size=0)
        assert damage_of(probe_mp4, data) is None
        hidden = box(b"ftyp") + box(b"mdat", box(b"moov"), size=0)
        assert damage_of(probe_mp4, hidden) == f"no moov box in {len(hidden)} bytes"
        assert damage_of(probe_mp4, box(b"ftyp") + box(b"moov", size=0)) is None

    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_a_size_smaller_than_its_header(self, size: int) -> None:
        data = box(b"ftyp") + box(b"moov", bytes(12), size=size)
        assert damage_of(probe_mp4, data) == f"box b'moov': expected {size} bytes, got 20"

    @pytest.mark.parametrize("size", [0, 7, 1 << 62, (1 << 64) - 1])
    def test_long_sizes_that_make_no_sense(self, size: int) -> None:
        data = box(b"ftyp") + box(b"moov") + box(b"mdat", bytes(30), long=True, size=size)
        damage = damage_of(probe_mp4, data)
        assert damage == (None if size == 0 else f"box b'mdat': expected {size} bytes, got 46")

    def test_names_are_shown_as_ascii(self) -> None:
        data = box(b"ftyp") + box(b"\xff\n\x1b\0", size=99)
        damage = damage_of(probe_mp4, data)
        assert damage is not None
        assert damage.isascii()
        assert damage.isprintable()

    def test_which_first_boxes_make_an_mp4(self) -> None:
        for name in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp"):
            assert name in MP4_FIRST
            assert probe(io.BytesIO(box(name, bytes(8))), 16, header_only=True).kind == "mp4"
        assert probe(io.BytesIO(box(b"uuid", bytes(8))), 16, header_only=True).kind == "other"


class TestMatroska:
    HEAD = bytes.fromhex("1a45dfa3")
    SEGMENT = bytes.fromhex("18538067")

    @pytest.mark.parametrize("width", range(1, 9))
    @pytest.mark.parametrize("size", [0, 1, 100])
    def test_sizes_of_every_width(self, width: int, size: int) -> None:
        data = ebml(self.HEAD, b"doctype", width=width) + ebml(
            self.SEGMENT, bytes(size), width=width
        )
        assert found(probe_matroska, data) == Probe("matroska")
        for cut in range(len(data) - size, len(data)):
            damage = damage_of(probe_matroska, data[:cut])
            got = cut - (len(data) - size)
            assert damage == f"expected {size} bytes of segment, got {got}"

    @pytest.mark.parametrize("width", range(1, 9))
    def test_a_live_stream_promises_nothing(self, width: int) -> None:
        head = ebml(self.HEAD, b"doctype")
        data = head + ebml(self.SEGMENT, bytes(20), width=width, unknown=True)
        for cut in range(len(data) - 20, len(data)):
            assert damage_of(probe_matroska, data[:cut]) is None

    def test_all_ones_but_one_is_a_size(self) -> None:
        """127 of 7 bits is unknown, 126 is not."""
        data = ebml(self.HEAD, b"") + self.SEGMENT + bytes([0x80 | 126]) + bytes(125)
        assert damage_of(probe_matroska, data) == "expected 126 bytes of segment, got 125"

    def test_no_segment(self) -> None:
        head = ebml(self.HEAD, b"doctype")
        for cut in range(4, len(head) + 4):
            damage = damage_of(probe_matroska, (head + self.SEGMENT)[:cut])
            assert damage == "no segment behind the header"
        other = head + ebml(b"\x12\x34\x56\x78", bytes(9))
        assert damage_of(probe_matroska, other) == "no segment behind the header"

    def test_a_size_that_starts_with_zero_is_none(self) -> None:
        """More than 8 bytes wide: EBML has no such size. Nothing is promised, nothing loops."""
        assert damage_of(probe_matroska, ebml(self.HEAD, b"") + self.SEGMENT + bytes(30)) is None
        assert damage_of(probe_matroska, self.HEAD + bytes(30)) is not None


class TestAsf:
    @pytest.mark.parametrize("first", [0, 1, 7])
    def test_the_file_s_size_is_found_behind_other_objects(self, first: int) -> None:
        size = len(asf(0, first=first, body=bytes(100)))
        data = asf(size, first=first, body=bytes(100))
        assert found(probe_asf, data) == Probe("asf")
        for missing in (1, 50, 100):
            damage = damage_of(probe_asf, data[:-missing])
            assert damage == f"expected a file of {size} bytes, got {size - missing}"

    def test_a_live_file_promises_nothing(self) -> None:
        assert damage_of(probe_asf, asf(1 << 40, live=True, body=bytes(9))) is None
        assert damage_of(probe_asf, asf(1 << 40, body=bytes(9))) is not None

    def test_objects_without_end_are_given_up(self) -> None:
        assert damage_of(probe_asf, asf(0, first=255)) is None
        data = asf(0, first=256)
        assert damage_of(probe_asf, data) == f"no file properties in {len(data)} bytes"

    def test_an_object_of_size_zero_is_walked_past(self) -> None:
        data = ASF_HEADER + bytes(14) + bytes(24) * 3
        assert damage_of(probe_asf, data) == f"no file properties in {len(data)} bytes"

    def test_properties_that_are_cut(self) -> None:
        data = asf(200)
        whole = data.index(ASF_FILE) + 92
        for cut in range(30, whole):
            assert damage_of(probe_asf, data[:cut]) is not None


class TestJoined:
    """Two files in one: FFmpeg reads the first alone, or the second with its delay."""

    @pytest.mark.parametrize("kind", AV_FORMATS)
    def test_files_in_a_row_are_read_one_after_the_other(self, kind: str) -> None:
        files = [av_clip(kind, seconds, seed=n) for n, seconds in enumerate((1.0, 0.6, 1.3))]
        alone = [decode(io.BytesIO(data), uri="clip") for data in files]
        joined = decode(io.BytesIO(b"".join(files)), uri="clip")
        if kind == "aac":  # one stream, whose frames overlap
            assert joined.facts.frames == sum(one.facts.frames for one in alone)
            return
        samples = np.concatenate([one.waveform for one in alone], axis=1)
        np.testing.assert_array_equal(joined.waveform, samples)
        half = joined.facts.seconds / 2
        part = decode(io.BytesIO(b"".join(files)), uri="clip", start_s=half)
        np.testing.assert_array_equal(part.waveform, samples[:, -part.facts.frames :])

    @pytest.mark.parametrize("kind", ["m4a", "alac.m4a", "mka", "webm", "wma"])
    def test_a_cut_of_any_of_them_is_found(self, kind: str) -> None:
        one, two = av_clip(kind, 1.0, seed=1), av_clip(kind, 1.0, seed=2)
        for data in ((one + two)[:-300], one + two[: len(two) // 2], one + two[:200]):
            with pytest.raises(TruncatedError):
                decode(io.BytesIO(data), uri="clip")

    def test_other_rates_are_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="as in joined files"):
            decode(io.BytesIO(av_clip("m4a", 1.0) + av_clip("mp4", 1.0)), uri="clip")


class TestAdts:
    FRAME = adts(bytes(60))

    # 13 bits of length, header included: each of them decides in some frame here.
    @given(
        sizes=st.lists(st.integers(0, 400) | st.integers(0, 8184), min_size=3, max_size=12),
        crc=st.booleans(),
    )
    @example(sizes=[(1 << bit) - 7 for bit in range(3, 13)] + [8184, 0], crc=False)
    @drawn(40)
    def test_a_chain_of_any_sizes(self, sizes: list[int], crc: bool) -> None:
        data = b"".join(adts(bytes(size), crc=crc) for size in sizes)
        assert found(ADTS.probe, data) == Probe("adts")
        tag = id3(b"cover")
        assert probe(io.BytesIO(tag + data + ID3V1), len(tag + data + ID3V1)) == Probe(
            "adts", start=len(tag), stop=len(tag + data)
        )

    def test_two_frames_are_no_chain(self) -> None:
        assert found(ADTS.probe, self.FRAME * 2) is None
        assert found(ADTS.probe, self.FRAME * 2 + self.FRAME[:30]) is None
        assert found(ADTS.probe, self.FRAME * 3) == Probe("adts")

    def test_cut_at_every_byte_of_the_last_frame(self) -> None:
        for size in range(1, len(self.FRAME)):
            damage = damage_of(ADTS.probe, self.FRAME * 4 + self.FRAME[:size])
            if size < 7:
                at = 4 * len(self.FRAME)
                assert damage == f"an AAC frame header is cut at byte {at}"
            else:
                assert damage == f"last AAC frame: expected {len(self.FRAME)} bytes, got {size}"

    def test_a_hole_that_frames_go_on_behind(self) -> None:
        result = found(ADTS.probe, self.FRAME * 3 + bytes(50) + self.FRAME * 3)
        assert result is not None
        assert result.damage == f"AAC frames break at byte {3 * len(self.FRAME)}"
        assert result.shifts_time

    def test_a_tag_behind_is_no_damage(self) -> None:
        for tag in (bytes(50), b"APETAGEX" + bytes(40), self.FRAME[:7] + bytes(3)):
            assert damage_of(ADTS.probe, self.FRAME * 3 + ID3V1[:7] + tag) is None

    def test_layer_bits_tell_aac_from_mp3(self) -> None:
        mp3 = b"\xff\xfb" + self.FRAME[2:]
        assert found(ADTS.probe, mp3 * 5) is None

    @pytest.mark.parametrize("size", range(7))
    def test_a_frame_shorter_than_its_header_is_none(self, size: int) -> None:
        raw = bytearray(adts(b""))
        raw[3] &= 0xFC
        raw[4], raw[5] = size >> 3, (size & 7) << 5 | 0x1F
        assert found(ADTS.probe, bytes(raw) * 10) is None


@pytest.mark.parametrize("kind", AV_FORMATS)
def test_an_encoder_s_file_is_whole_and_its_halves_are_not(kind: str) -> None:
    """The second route: FFmpeg's muxers. Where FFmpeg itself decodes a half without a word."""
    data = av_clip(kind, 1.0)
    whole = probe(io.BytesIO(data), len(data))
    assert whole.damage is None
    half = data[: len(data) // 2]
    with pytest.raises(TruncatedError):
        decode(io.BytesIO(half), uri="clip")


@given(data=st.data())
@drawn(120)
def test_no_header_hangs_or_escapes(data: st.DataObject) -> None:
    """Any bytes where sizes stand: a probe comes back with at most one line of words."""
    starts = [
        TestMp4.FILE,
        ebml(TestMatroska.HEAD, b"x") + ebml(TestMatroska.SEGMENT, bytes(20)),
        asf(200, first=2),
        TestAdts.FRAME * 4,
    ]
    raw = bytearray(data.draw(st.sampled_from(starts)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        new = data.draw(st.binary(min_size=1, max_size=9))
        raw[at : at + len(new)] = new
    result = probe(io.BytesIO(bytes(raw)), len(raw))
    assert result.damage is None or result.damage.isprintable()
    with pytest.raises(RowError) as caught:  # none of them holds a sound
        decode(io.BytesIO(bytes(raw)), uri="clip")
    assert "\n" not in str(caught.value)
