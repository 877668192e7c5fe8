"""WAV, RF64 and W64 built from their specifications: every sample, every size, every cut."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio.containers import Probe, probe
from earmill.pipeline.common.errors import (
    EmptyFileError,
    NotAudioError,
    RowError,
    TruncatedError,
    ZeroLengthError,
)
from tests.pipeline.container_bytes import (
    A_LAW,
    FLOAT,
    MU_LAW,
    PCM,
    UNKNOWN_32,
    Order,
    as_pcm,
    chunk,
    ds64,
    ramp,
    w64,
    w64_chunk,
    wave,
    wave_format,
)
from tests.pipeline.whole_clips import Decoded, decode
from tests.short import drawn

# Sizes that programs write before they know them.
UNKNOWN_SIZES = (
    *(UNKNOWN_32, 0xFFFFFF00, 0xFFFFFEFF, 0xFFFFF000, 0x7FFFFFFF, 0x7FFFF000, 0x80000000),
    *(0x7FFFFF00, 0x7FFFFFDB, 0x80000024, 0),
)
FRAMES = 21  # odd, so that 8-bit mono needs padding
SAMPLES = ramp(FRAMES)
RAW = as_pcm(SAMPLES, 16)
FMT = chunk(b"fmt ", wave_format())
DATA = chunk(b"data", RAW)


def probed(data: bytes) -> Probe:
    return probe(io.BytesIO(data), len(data))


def decoded(data: bytes) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", channels="each")


def mu_law(code: int) -> int:
    """ITU-T G.711 table 2: a code word to 14 bits, here in units of 1/32768."""
    code = ~code & 0xFF
    magnitude = ((2 * (code & 15) + 33) << (code >> 4 & 7)) - 33
    return 4 * (-magnitude if code & 0x80 else magnitude)


def a_law(code: int) -> int:
    """ITU-T G.711 table 1: a code word to 13 bits, here in units of 1/32768."""
    code ^= 0x55
    segment, step = code >> 4 & 7, code & 15
    magnitude = 2 * step + 1 if segment == 0 else (2 * step + 33) << (segment - 1)
    return 8 * (magnitude if code & 0x80 else -magnitude)


class TestSamples:
    """What the bytes say, in float32, computed here from the format's definition."""

    # RIFX is older than WAVE_FORMAT_EXTENSIBLE.
    @pytest.mark.parametrize(
        ("order", "extensible"), [("little", False), ("little", True), ("big", False)]
    )
    @pytest.mark.parametrize("channels", [1, 2, 3])
    @pytest.mark.parametrize("bits", [8, 16, 24, 32])
    def test_whole_numbers(self, bits: int, channels: int, order: Order, extensible: bool) -> None:
        values = ramp(FRAMES, channels, bits)
        raw = bytes((values + 128).astype(np.uint8).ravel()) if bits == 8 else b""
        raw = raw or as_pcm(values, bits, order)
        form = wave_format(PCM, channels, bits, order=order, extensible=extensible)
        data = wave(
            chunk(b"fmt ", form, order=order),
            chunk(b"data", raw, order=order),
            form=b"RIFF" if order == "little" else b"RIFX",
            order=order,
        )
        result = decoded(data)
        expected = (values / (1 << (bits - 1))).astype(np.float32)
        np.testing.assert_array_equal(result.waveform, expected.T)
        assert (result.facts.rate_hz, result.facts.frames) == (8000, FRAMES)
        found = probed(data)
        assert (found.damage, found.header_size, found.rate_hz) == (None, None, 8000)

    @pytest.mark.parametrize(("bits", "kind"), [(32, "f4"), (64, "f8")])
    @pytest.mark.parametrize("extensible", [False, True], ids=["plain", "extensible"])
    def test_floats_are_taken_as_they_are(self, bits: int, kind: str, extensible: bool) -> None:
        values = np.array([0.0, -0.0, 1.0, -1.0, 1.75, 2.0**-30, 0.1], dtype=kind)
        form = wave_format(FLOAT, 1, bits, extensible=extensible)
        raw = values.astype(f"<{kind}").tobytes()
        result = decoded(wave(chunk(b"fmt ", form), chunk(b"data", raw)))
        np.testing.assert_array_equal(result.waveform[0], values.astype(np.float32))
        assert np.signbit(result.waveform[0]).tolist() == np.signbit(values).tolist()

    @pytest.mark.parametrize(("codec", "law"), [(MU_LAW, mu_law), (A_LAW, a_law)])
    def test_every_word_of_g711(self, codec: int, law: object) -> None:
        assert callable(law)
        form = chunk(b"fmt ", wave_format(codec, 1, 8))
        result = decoded(wave(form, chunk(b"data", bytes(range(256)))))
        expected = np.array([law(code) for code in range(256)]) / 32768
        np.testing.assert_array_equal(result.waveform[0], expected.astype(np.float32))

    def test_w64_and_rf64_hold_the_same(self) -> None:
        plain = decoded(wave(FMT, DATA))
        long = wave(
            ds64(100, len(RAW), FRAMES),
            FMT,
            chunk(b"data", RAW, size=UNKNOWN_32),
            form=b"RF64",
        )
        sony = w64(w64_chunk(b"fmt ", wave_format()), w64_chunk(b"data", RAW))
        for data, container in ((long, "RF64"), (sony, "W64")):
            result = decoded(data)
            np.testing.assert_array_equal(result.waveform, plain.waveform)
            assert result.facts.pcm_sha256 == plain.facts.pcm_sha256
            assert result.facts.container == container

    @pytest.mark.parametrize("container", ["WAV", "WAVEX"])
    @pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "ULAW"])
    def test_libsndfile_agrees_on_plain_files(self, container: str, subtype: str) -> None:
        """Samples that are read without their header are those that libsndfile finds behind it."""
        clip = np.random.default_rng(1).uniform(-1, 1, (70001, 2))
        content = io.BytesIO()
        soundfile.write(content, clip, 8000, subtype, format=container)
        result = decoded(content.getvalue())
        content.seek(0)
        expected, _ = soundfile.read(content, dtype="float32")
        np.testing.assert_array_equal(result.waveform, expected.T)
        assert (result.facts.container, result.facts.codec) == (container, subtype)

    @pytest.mark.parametrize("at", [14, 18, 26])
    def test_fields_that_disagree_are_left_to_libsndfile(self, at: int) -> None:
        form = bytearray(wave_format(PCM, 1, 16, extensible=True))
        data = wave(chunk(b"fmt ", bytes(form)), DATA)
        assert probed(data).samples is not None
        form[at] ^= 1  # bits of a sample, valid bits, end of the codec's GUID
        assert probed(wave(chunk(b"fmt ", bytes(form)), DATA)).samples is None


def damage_of(data: bytes) -> str | None:
    return probed(data).damage


class TestChunks:
    @given(
        sizes=st.lists(st.integers(0, 9), max_size=6),
        behind=st.lists(st.integers(0, 9), max_size=3),
    )
    @drawn(60)
    def test_any_chunks_around_the_samples(self, sizes: list[int], behind: list[int]) -> None:
        """Odd payloads are padded; what a chunk holds is never taken for the next chunk."""
        others = [chunk(b"LIST", b"data" * 3 + bytes(size)) for size in sizes]
        trailing = [chunk(b"id3 ", b"fmt " + bytes(size)) for size in behind]
        data = wave(*others[:2], FMT, *others[2:], DATA, *trailing)
        found = probed(data)
        assert (found.damage, found.header_size, found.rate_hz) == (None, None, 8000)
        assert damage_of(data[: data.index(RAW) + len(RAW) - 1]) is not None

    def test_odd_data_is_followed_by_a_pad_byte(self) -> None:
        """21 bytes of 8 bits, a pad, a chunk: the pad is no sample."""
        form = chunk(b"fmt ", wave_format(PCM, 1, 8))
        data = wave(form, chunk(b"data", bytes(range(21))), chunk(b"LIST", b"INFO"))
        result = decoded(data)
        assert result.facts.frames == 21
        np.testing.assert_array_equal(result.waveform[0] * 128 + 128, np.arange(21))

    def test_w64_pads_to_eight(self) -> None:
        for extra in range(9):
            other = w64_chunk(b"list", b"data" + bytes(extra))
            data = w64(other, w64_chunk(b"fmt ", wave_format()), other, w64_chunk(b"data", RAW))
            assert damage_of(data) is None
            last = data.rindex(RAW) + len(RAW)
            assert damage_of(data[: last - 1]) == "expected 42 bytes of samples, got 41"

    def test_a_w64_chunk_of_another_guid_is_not_data(self) -> None:
        """Names are whole GUIDs: four letters alone are no `data`."""
        strange = b"data" + bytes(12) + (24 + 8).to_bytes(8, "little") + bytes(8)
        data = w64(w64_chunk(b"fmt ", wave_format()), strange, w64_chunk(b"data", RAW))
        assert probed(data) == Probe("w64", declared_frames=FRAMES)
        assert damage_of(data[:-20]) is not None

    @pytest.mark.parametrize("size", [0, 1, 23])
    def test_a_w64_chunk_smaller_than_its_header_ends(self, size: int) -> None:
        """Walked as an empty chunk, never on the spot for ever."""
        small = w64_chunk(b"junk", b"", size=size)
        data = w64(small, w64_chunk(b"fmt ", wave_format()), w64_chunk(b"data", RAW))
        assert probed(data) == Probe("w64", declared_frames=FRAMES)

    def test_a_header_of_chunks_without_end_is_given_up(self) -> None:
        data = wave(*[chunk(b"junk", b"")] * 5000, FMT, DATA)
        assert damage_of(data) == f"no data chunk in {len(data)} bytes"
        few = wave(*[chunk(b"junk", b"")] * 4000, FMT, DATA)
        assert damage_of(few) is None

    def test_a_chunk_that_claims_more_than_the_file(self) -> None:
        data = wave(chunk(b"LIST", b"INFO", size=0xFFFFFFF0), FMT, DATA)
        assert damage_of(data) == f"no data chunk in {len(data)} bytes"
        with pytest.raises(TruncatedError, match="no data chunk"):
            decoded(data)


class TestSizes:
    @pytest.mark.parametrize("size", UNKNOWN_SIZES)
    def test_a_size_that_says_unknown_reads_to_the_end(self, size: int) -> None:
        data = wave(FMT, chunk(b"data", RAW, size=size))
        assert decoded(data).facts.header_size == "ignored"
        np.testing.assert_array_equal(decoded(data).waveform[0] * 32768, SAMPLES[:, 0])

    @pytest.mark.parametrize("size", [0xFFFFEFFF, 0x7FFFEFFF, 0x80001001, len(RAW) + 2])
    def test_any_other_size_is_a_promise(self, size: int) -> None:
        data = wave(FMT, chunk(b"data", RAW, size=size))
        found = probed(data)
        assert found.damage == f"expected {size} bytes of samples, got {len(RAW)}"
        assert found.declared_frames == size // 2
        with pytest.raises(TruncatedError, match=f"expected {size} bytes"):
            decoded(data)

    @pytest.mark.parametrize("form", ["riff", "w64"])
    def test_a_data_chunk_of_size_zero(self, form: str) -> None:
        """RIFF means it; in W64 less than its own header is what a pipe leaves behind."""
        if form == "riff":
            with pytest.raises(ZeroLengthError):
                decoded(wave(FMT, chunk(b"data", b"")))
            return
        piped = w64(w64_chunk(b"fmt ", wave_format()), w64_chunk(b"data", RAW, size=0))
        assert decoded(piped).facts.frames == 24  # what pads the chunk to 48 bytes cannot be told

    def test_all_ones_in_w64_is_unknown(self) -> None:
        raw = RAW + RAW[:6]  # no padding
        piped = w64(w64_chunk(b"fmt ", wave_format()), w64_chunk(b"data", raw, size=(1 << 64) - 1))
        assert decoded(piped).facts.frames == len(raw) // 2

    @pytest.mark.parametrize(("channels", "bits"), [(1, 16), (2, 16), (2, 24), (3, 32)])
    def test_less_than_a_frame_missing_is_no_damage(self, channels: int, bits: int) -> None:
        frame = channels * bits // 8
        raw = as_pcm(ramp(10, channels, bits), bits)
        for missing in range(2 * frame + 1):
            form = chunk(b"fmt ", wave_format(PCM, channels, bits))
            data = wave(form, chunk(b"data", raw, size=len(raw) + missing))
            end = data.index(raw) + len(raw)
            assert (damage_of(data[:end]) is None) == (missing < frame)

    def test_an_adpcm_block_has_no_fixed_frame(self) -> None:
        """Microsoft ADPCM (2): bytes are compared, frames are not promised."""
        form = chunk(b"fmt ", wave_format(2, 1, 4) + bytes(2))
        found = probed(wave(form, chunk(b"data", RAW, size=len(RAW) + 1)))
        assert found.damage == "expected 43 bytes of samples, got 42"
        assert found.declared_frames is None

    def test_the_size_of_a_block_may_be_zero(self) -> None:
        """A broken encoder's block size of 0 is no division by zero."""
        form = bytearray(wave_format())
        form[12:14] = bytes(2)
        data = wave(chunk(b"fmt ", bytes(form)), chunk(b"data", RAW, size=99))
        assert probed(data).declared_frames is None
        with pytest.raises(RowError):
            decoded(data)


class TestRf64:
    """EBU Tech 3306: a 32-bit size of -1 says that `ds64` holds the size; any other is itself."""

    @staticmethod
    def file(long: int, short: int = UNKNOWN_32) -> bytes:
        return wave(ds64(0, long, long // 2), FMT, chunk(b"data", RAW, size=short), form=b"RF64")

    def test_the_long_size_counts(self) -> None:
        assert probed(self.file(len(RAW))) == Probe("riff", rate_hz=8000)
        found = probed(self.file(len(RAW) + 2))
        assert (found.damage, found.declared_frames) == (
            "expected 44 bytes of samples, got 42",
            22,
        )

    def test_a_short_size_of_its_own_is_believed(self) -> None:
        """A writer that stayed below 4 GB may leave a stale or empty `ds64` behind."""
        for stale in (0, len(RAW) + 100, 1 << 40):
            data = self.file(stale, short=len(RAW))
            assert damage_of(data) is None
            assert damage_of(data[:-4]) == "expected 42 bytes of samples, got 38"

    def test_without_ds64_minus_one_is_unknown(self) -> None:
        data = wave(FMT, chunk(b"data", RAW, size=UNKNOWN_32), form=b"RF64")
        assert damage_of(data) is None

    @pytest.mark.parametrize("missing", [0, 2, 1 << 20])
    def test_sizes_above_four_gigabytes(self, tmp_path: Path, missing: int) -> None:
        """A sparse file of 5 GB: real offsets, no disk."""
        declared = 5 << 30
        head = wave(ds64(0, declared, 0), FMT, b"data" + bytes([255] * 4), form=b"RF64")
        path = tmp_path / "long.wav"
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + declared - missing)
        with path.open("rb") as file:
            found = probe(file, path.stat().st_size)
        if missing:
            got = declared - missing
            assert found.damage == f"expected {declared} bytes of samples, got {got}"
            assert found.declared_frames == declared // 2
        else:
            assert found == Probe("riff", rate_hz=8000)


WHOLE = {
    "riff": wave(chunk(b"LIST", b"INFOx"), FMT, DATA, chunk(b"LIST", b"INFO")),
    "rf64": wave(
        ds64(0, len(RAW), FRAMES), FMT, chunk(b"data", RAW, size=UNKNOWN_32), form=b"RF64"
    ),
    "w64": w64(
        w64_chunk(b"junk", b"12345"), w64_chunk(b"fmt ", wave_format()), w64_chunk(b"data", RAW)
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_cut_at_every_byte(kind: str) -> None:
    """With every sample there the clip is whole; without, it is refused by the right name."""
    data = WHOLE[kind]
    whole = decoded(data)
    end = data.index(RAW) + len(RAW)
    for cut in range(len(data)):
        if cut >= end:
            np.testing.assert_array_equal(decoded(data[:cut]).waveform, whole.waveform)
            continue
        expected = EmptyFileError if cut == 0 else NotAudioError if cut < 12 else TruncatedError
        if kind == "w64" and cut < 16:  # its first name is a GUID
            expected = EmptyFileError if cut == 0 else NotAudioError
        with pytest.raises(expected):
            decoded(data[:cut])


@pytest.mark.parametrize("kind", WHOLE)
def test_the_probe_agrees_with_soundfile_on_whole_files(kind: str) -> None:
    """The second route: libsndfile counts as many frames as the header of a cut file promises."""
    data = WHOLE[kind]
    info = soundfile.info(io.BytesIO(data))
    found = probed(data[: data.index(RAW) + 10])
    assert found.declared_frames == FRAMES
    assert info.frames == (24 if kind == "w64" else FRAMES)  # W64: with the padding


def whole_by_ffmpeg(data: bytes) -> np.ndarray:
    """FFmpeg's samples of a mono 16-bit file."""
    with av.open(io.BytesIO(data)) as container:
        return np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 21])
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_what_stands_behind_the_samples_of_w64_is_no_sound(frames: int, behind: int) -> None:
    """libsndfile would hand on padding and chunks (Sound Forge's summary) as samples."""
    values = ramp(frames)
    data = w64(
        w64_chunk(b"fmt ", wave_format()),
        w64_chunk(b"data", as_pcm(values, 16)),
        *[w64_chunk(b"summ", b"\x40" * 40)] * behind,
    )
    result = decoded(data)
    np.testing.assert_array_equal(result.waveform[0] * 32768, values[:, 0])
    np.testing.assert_array_equal(whole_by_ffmpeg(data), values[:, 0])
    heard = soundfile.info(io.BytesIO(data)).frames
    assert (heard > frames) == (behind > 0 or frames % 4 != 0)


@given(data=st.data())
@drawn(150)
def test_no_edit_of_a_header_hangs_or_escapes(data: st.DataObject) -> None:
    """Any four bytes anywhere in the header: a probe comes back, and decoding only refuses."""
    kind = data.draw(st.sampled_from(sorted(WHOLE)))
    whole = bytearray(WHOLE[kind])
    at = data.draw(st.integers(0, whole.index(RAW)))
    whole[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, UNKNOWN_32)))
    found = probed(bytes(whole))
    assert found.damage is None or "\n" not in found.damage
    try:
        result = decoded(bytes(whole))
    except RowError:
        return
    assert np.isfinite(result.waveform).all()
