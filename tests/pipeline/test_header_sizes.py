"""Sizes in headers that cannot be right: the samples that are there are read, or nothing is."""

from __future__ import annotations

import io
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile

from earmill.pipeline.common.errors import TruncatedError, ZeroLengthError
from earmill.pipeline.sources.durations import header_seconds
from tests.pipeline.audio_factory import clip, speech_like
from tests.pipeline.container_bytes import chunk, w64_chunk
from tests.pipeline.mpeg_bytes import ID3V1
from tests.pipeline.source_helpers import files
from tests.pipeline.whole_clips import Decoded, decode

RATE_HZ, SECONDS = 8000, 2.0
SOUND = speech_like(SECONDS, RATE_HZ, channels=2)
FOUR_GIB = 1 << 32


@dataclass(frozen=True)
class Sized:
    """A container with a size of its samples that can be set.

    Args:
        form: libsndfile's name.
        mark: What stands in front of the size.
        pack: How the size is written.
        extra: Bytes that the size counts besides the samples.
        unknown: Sizes that no file of this length has, and the header does not call unknown.
    """

    form: str
    mark: bytes
    pack: str
    extra: int
    unknown: tuple[int, ...]

    def file(self, subtype: str = "PCM_16", sound: np.ndarray = SOUND) -> bytes:
        sink = io.BytesIO()
        soundfile.write(sink, sound, RATE_HZ, format=self.form, subtype=subtype)
        return sink.getvalue()

    def with_size(self, data: bytes, size: int) -> bytes:
        at = data.index(self.mark) + len(self.mark)
        return data[:at] + struct.pack(self.pack, size) + data[at + struct.calcsize(self.pack) :]

    def start(self, data: bytes) -> int:
        """First byte of the samples."""
        if self.form == "AU":
            return int.from_bytes(data[4:8], "big")
        if self.form == "RF64":
            return data.index(b"data") + 8
        inside = {"AIFF": 8, "CAF": 4}.get(self.form, 0)
        return data.index(self.mark) + len(self.mark) + struct.calcsize(self.pack) + inside


SIZES_32 = (0, 0x80000000, 0x7FFFFF00, 0x7FFFFFDB, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFF000, 0xFFFFFFFE)
SIZES_64 = (0, 1 << 63, (1 << 63) - 1, (1 << 62) + 5)
W64_DATA = b"data" + bytes.fromhex("f3acd3118cd100c04f8edb8a")
CONTAINERS = {
    "wav": Sized("WAV", b"data", "<I", 0, (*SIZES_32, 0xFFFFFFFF)),
    "wavex": Sized("WAVEX", b"data", "<I", 0, (*SIZES_32, 0xFFFFFFFF)),
    "aiff": Sized("AIFF", b"SSND", ">I", 8, (*SIZES_32, 8, 0xFFFFFFFF)),
    "au": Sized("AU", b".snd\0\0\0\x18", ">I", 0, SIZES_32),
    "w64": Sized("W64", W64_DATA, "<Q", 24, (*SIZES_64, 24, (1 << 64) - 1)),
    "rf64": Sized("RF64", b"ds64\x1c\0\0\0" + bytes(8), "<Q", 0, (*SIZES_64, (1 << 64) - 1)),
    "caf": Sized("CAF", b"data", ">q", 4, (0, 4, -2, (1 << 63) - 1)),
}
SUBTYPES = {
    "wav": ("PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    "aiff": ("PCM_S8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    "au": ("PCM_S8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    "w64": ("PCM_U8", "PCM_24", "FLOAT", "ULAW"),
    "rf64": ("PCM_U8", "PCM_24", "FLOAT", "ULAW"),
    "caf": ("PCM_S8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
}
EVERY = pytest.mark.parametrize("kind", CONTAINERS)


def sized_rf64(data: bytes) -> bytes:
    """An RF64 whose `ds64` counts what the mark of CONTAINERS has in front: no size of the file."""
    at = data.index(b"ds64") + 8
    return data[:at] + bytes(8) + data[at + 8 :]


def whole_file(kind: str, subtype: str = "PCM_16") -> bytes:
    data = CONTAINERS[kind].file(subtype)
    return sized_rf64(data) if kind == "rf64" else data


def decoded(data: bytes, **span: float) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", channels="each", **span)  # type: ignore[arg-type]


def by_soundfile(data: bytes) -> np.ndarray:
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return np.asarray(samples).T


class TestNotBelieved:
    @pytest.mark.parametrize(
        ("kind", "size"),
        [(kind, size) for kind, sized in CONTAINERS.items() for size in sized.unknown],
    )
    def test_the_samples_that_are_there_are_read(self, kind: str, size: int) -> None:
        whole = whole_file(kind)
        data = CONTAINERS[kind].with_size(whole, size)
        result = decoded(data)
        np.testing.assert_array_equal(result.waveform, by_soundfile(whole))
        assert result.facts.header_size == "ignored"
        assert result.facts.container == decoded(whole).facts.container
        last = decoded(data, start_s=1.75)
        np.testing.assert_array_equal(last.waveform, result.waveform[:, 14000:])
        assert header_seconds(io.BytesIO(data), len(data)) == SECONDS

    @pytest.mark.parametrize(
        ("kind", "subtype"), [(kind, name) for kind, names in SUBTYPES.items() for name in names]
    )
    def test_in_every_sample_format(self, kind: str, subtype: str) -> None:
        whole = whole_file(kind, subtype)
        data = CONTAINERS[kind].with_size(whole, CONTAINERS[kind].unknown[1])
        # Some floats are followed by a chunk with their peaks.
        end = CONTAINERS[kind].start(whole) + 2 * 16000 * decoded_bytes(subtype)
        result = decoded(data[:end])
        np.testing.assert_array_equal(result.waveform, by_soundfile(whole))
        assert (result.facts.codec, result.facts.header_size) == (subtype, "ignored")

    @EVERY
    def test_a_size_that_is_right_is_no_news(self, kind: str) -> None:
        assert decoded(whole_file(kind)).facts.header_size is None

    @pytest.mark.parametrize(("kind", "size"), [("au", 0xFFFFFFFF), ("caf", -1)])
    def test_a_header_that_says_it_does_not_know(self, kind: str, size: int) -> None:
        whole = whole_file(kind)
        result = decoded(CONTAINERS[kind].with_size(whole, size))
        np.testing.assert_array_equal(result.waveform, by_soundfile(whole))
        assert result.facts.header_size == "unknown"

    @EVERY
    def test_no_size_and_no_samples(self, kind: str) -> None:
        empty = CONTAINERS[kind].file(sound=SOUND[:0])
        empty = sized_rf64(empty) if kind == "rf64" else empty
        empty = empty[: CONTAINERS[kind].start(empty)]
        with pytest.raises((ZeroLengthError, TruncatedError)):
            decoded(CONTAINERS[kind].with_size(empty, CONTAINERS[kind].unknown[0]))

    @pytest.mark.parametrize("subtype", ["IMA_ADPCM", "MS_ADPCM", "GSM610"])
    @pytest.mark.parametrize("size", [0, 0x80000000, 0xFFFFFFFF])
    def test_blocks_of_samples(self, subtype: str, size: int) -> None:
        whole = CONTAINERS["wav"].file(subtype, SOUND[:, :1])
        result = decoded(CONTAINERS["wav"].with_size(whole, size))
        np.testing.assert_array_equal(result.waveform, by_soundfile(whole))
        assert result.facts.header_size == "ignored"

    def test_a_long_size_that_the_short_one_hides(self) -> None:
        """RF64 whose 32-bit size is not -1: by the standard it counts, and is wrong here."""
        whole = whole_file("rf64")
        at = whole.rindex(b"data") + 4
        data = whole[:at] + struct.pack("<I", 1000) + whole[at + 4 :]
        result = decoded(data)
        np.testing.assert_array_equal(result.waveform, by_soundfile(whole))
        assert result.facts.header_size == "ignored"

    def test_a_size_that_the_count_of_frames_corrects(self) -> None:
        data = CONTAINERS["aiff"].with_size(whole_file("aiff"), 10_008)
        result = decoded(data)
        np.testing.assert_array_equal(result.waveform, by_soundfile(whole_file("aiff")))
        assert result.facts.header_size == "ignored"


def decoded_bytes(subtype: str) -> int:
    widths = {"PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8}
    return widths.get(subtype, 1)


class TestAmbiguous:
    """Fewer samples than there are bytes, and nothing says which is right."""

    @EVERY
    @pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
    def test_a_size_that_points_into_the_samples(self, kind: str, share: float) -> None:
        whole, sized = whole_file(kind), CONTAINERS[kind]
        size = sized.extra + round(share * 16000) * 4
        data = sized.with_size(whole, size)
        if kind == "aiff":  # its count of frames says the same
            at = data.index(b"COMM") + 10
            data = data[:at] + struct.pack(">I", round(share * 16000)) + data[at + 4 :]
        with pytest.raises(TruncatedError, match="more that are no chunks"):
            decoded(data)
        assert header_seconds(io.BytesIO(data), len(data)) is None
        # The bytes within the size are samples in any case.
        part = decoded(data, start_s=0.0, end_s=0.1)
        np.testing.assert_array_equal(part.waveform, by_soundfile(whole)[:, :800])

    @EVERY
    def test_silence_is_no_padding(self, kind: str) -> None:
        """A size that leaves out digital silence shortens the row all the same."""
        sized, sound = CONTAINERS[kind], SOUND.copy()
        sound[8000:] = 0
        data = sized.file(sound=sound)
        data = sized.with_size(sized_rf64(data) if kind == "rf64" else data, sized.extra + 32000)
        if kind == "aiff":
            at = data.index(b"COMM") + 10
            data = data[:at] + struct.pack(">I", 8000) + data[at + 4 :]
        with pytest.raises(TruncatedError, match="more that are no chunks"):
            decoded(data)

    def test_chunks_without_padding(self) -> None:
        whole = whole_file("wav")
        odd = b"LIST" + struct.pack("<I", 7) + b"INFOabc"
        for behind in (odd + odd, odd + chunk(b"cue ", b"xyz") + odd, odd + bytes(9)):
            np.testing.assert_array_equal(decoded(whole + behind).waveform, by_soundfile(whole))
        with pytest.raises(TruncatedError, match="more samples, or another file"):
            decoded(whole + odd + whole)

    @EVERY
    def test_two_files_in_one(self, kind: str) -> None:
        whole = whole_file(kind)
        with pytest.raises(TruncatedError, match="another file"):
            decoded(whole + whole)

    def test_a_second_chunk_of_samples(self) -> None:
        with pytest.raises(TruncatedError, match="more samples"):
            decoded(whole_file("wav") + chunk(b"data", bytes(400)))

    @EVERY
    def test_what_is_known_to_be_no_sound(self, kind: str) -> None:
        whole = whole_file(kind)
        chunks = {
            "wav": chunk(b"LIST", b"INFOx"),
            "rf64": chunk(b"axml", b"<x/>"),
            "aiff": chunk(b"ANNO", b"abc", order="big"),
            "w64": w64_chunk(b"list", b"x" * 9),
            "caf": b"free" + (5).to_bytes(8, "big") + bytes(5),
        }
        for behind in (ID3V1, bytes(512), chunks.get(kind, b"") + ID3V1):
            np.testing.assert_array_equal(decoded(whole + behind).waveform, by_soundfile(whole))


class TestBeyondFourGib:
    """Sparse files: real offsets, no disk."""

    @staticmethod
    def write(path: Path, head: bytes, samples_bytes: int, behind: bytes = b"") -> np.ndarray:
        """A file of silence whose last second is sound; the sound."""
        sound = clip("wav", 1.0)[44:]
        with path.open("wb") as file:
            file.write(head)
            file.seek(len(head) + samples_bytes - len(sound))
            file.write(sound + behind)
        return np.frombuffer(sound, "<i2").astype(np.float32) / 32768

    @staticmethod
    def wav_head(size: int, form: bytes = b"RIFF") -> bytes:
        return (
            form
            + struct.pack("<I", (size + 36) % FOUR_GIB)
            + clip("wav", 1.0)[8:40]
            + (struct.pack("<I", size % FOUR_GIB))
        )

    @pytest.mark.parametrize("behind", [b"", chunk(b"LIST", b"INFO"), ID3V1])
    @pytest.mark.parametrize("size", [FOUR_GIB + 22050 * 2 * 3, 2 * FOUR_GIB + 44100])
    def test_a_wrapped_size_is_found_again(self, size: int, behind: bytes, tmp_path: Path) -> None:
        path, seconds = tmp_path / "long.wav", size / 44100
        sound = self.write(path, self.wav_head(size), size, behind)
        self.check_end(path, seconds, sound)
        (item,) = files(path).items()
        assert (item.seconds, item.estimated) == (seconds, False)

    @pytest.mark.parametrize("claimed", [0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
    def test_a_size_that_was_never_written(self, claimed: int, tmp_path: Path) -> None:
        size, path = FOUR_GIB + 441_000, tmp_path / "long.wav"
        sound = self.write(path, self.wav_head(claimed), size)
        self.check_end(path, size / 44100, sound)

    def test_a_wrapped_size_of_a_file_that_is_cut(self, tmp_path: Path) -> None:
        size, path = FOUR_GIB + 441_000, tmp_path / "cut.wav"
        self.write(path, self.wav_head(size), size - 88_200)
        with path.open("rb") as stream, pytest.raises(TruncatedError, match="no chunks"):
            decode(KnownDigest(stream), uri="long")
        assert header_seconds(str(path), path.stat().st_size) is None

    @pytest.mark.parametrize("kind", ["aiff", "au", "w64", "rf64", "caf"])
    def test_other_containers(self, kind: str, tmp_path: Path) -> None:
        """32 bits wrap, 64 bits hold the size; the end is where it is."""
        sized, size, path = CONTAINERS[kind], FOUR_GIB + 441_000, tmp_path / f"long.{kind}"
        sink = io.BytesIO()
        with soundfile.SoundFile(
            sink, "w", 22050, 1, format=sized.form, subtype="PCM_16", endian="FILE"
        ) as file:
            file.write(np.zeros(100))
        data = sink.getvalue()
        data = sized_rf64(data) if kind == "rf64" else data
        wraps = kind in ("aiff", "au")
        data = sized.with_size(data, (size + sized.extra) % (FOUR_GIB if wraps else 1 << 63))
        if kind == "rf64":
            at = data.rindex(b"data") + 4
            data = data[:at] + b"\xff" * 4 + data[at + 4 :]
        order = "<i2" if kind in ("w64", "rf64") else ">i2"
        head = data[: sized.start(data) if kind != "rf64" else data.rindex(b"data") + 8]
        sound = self.write(path, head, size)
        if order == ">i2":
            sound = np.frombuffer((sound * 32768).astype("<i2").tobytes(), ">i2").astype(
                np.float32
            ) / np.float32(32768)
        self.check_end(path, size / 44100, sound, "ignored" if wraps else None)

    @staticmethod
    def check_end(
        path: Path, seconds: float, sound: np.ndarray, fact: str | None = "ignored"
    ) -> None:
        assert header_seconds(str(path), path.stat().st_size) == pytest.approx(seconds, abs=1e-9)
        with path.open("rb") as stream:
            last = decode(KnownDigest(stream), uri="long", start_s=seconds - 1.0)
        np.testing.assert_array_equal(last.waveform[0], sound)
        assert last.facts.header_size == fact


class KnownDigest:
    """A stream that is not read for its checksum."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.read, self.seek, self.tell = stream.read, stream.seek, stream.tell

    def digest(self) -> str:
        return ""


class TestFlac:
    """The count in the header of a FLAC is a size too."""

    @staticmethod
    def with_total(data: bytes, frames: int) -> bytes:
        packed = int.from_bytes(data[18:26], "big")
        return data[:18] + (packed >> 36 << 36 | frames).to_bytes(8, "big") + data[26:]

    @pytest.fixture(params=["dr_flac", "libsndfile"])
    def decoder(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "libsndfile":
            monkeypatch.setitem(sys.modules, "miniaudio", None)
        return str(request.param)

    @pytest.mark.usefixtures("decoder")
    @pytest.mark.parametrize("missing", [1, 999, 4096, 20_000])
    @pytest.mark.parametrize("channels", [1, 2])
    def test_a_count_that_is_too_small_does_not_shorten_the_file(
        self, missing: int, channels: int
    ) -> None:
        data = self.with_total(clip("flac", 2.0, channels=channels), 32_000 - missing)
        for span in ({}, {"start_s": 0.5}):
            with pytest.raises(TruncatedError, match=f"holds sample {32_000 - missing}"):
                decoded(data, **span)
        part = decoded(data, start_s=0.1, end_s=0.4)
        whole = decoded(clip("flac", 2.0, channels=channels))
        np.testing.assert_array_equal(part.waveform, whole.waveform[:, 1600:6400])

    @pytest.mark.usefixtures("decoder")
    @pytest.mark.parametrize("tags", [b"", ID3V1 + b"ID3\4\0\0\0\3\0\0" + bytes(3 << 14)])
    @pytest.mark.parametrize("channels", [1, 2])
    def test_two_files_in_one(self, channels: int, tags: bytes) -> None:
        first, second = clip("flac", 2.0), clip("flac", 0.2, channels=channels, seed=1)
        where = len(first) + len(tags)
        for span in ({}, *([{"start_s": 1.0}] if not tags else [])):
            with pytest.raises(TruncatedError, match=f"another FLAC starts at byte {where}"):
                decoded(first + tags + second, **span)

    @pytest.mark.usefixtures("decoder")
    def test_what_is_no_frame_behind_the_last_is_no_sound(self) -> None:
        whole = clip("flac", 2.0)
        for behind in (ID3V1, bytes(20_000), b"junk \xff\xf8\xc9\x18" * 400, whole[-3000:-1500]):
            np.testing.assert_array_equal(decoded(whole + behind).waveform, decoded(whole).waveform)

    @pytest.mark.parametrize("behind", ["id3", "ape", "both"])
    def test_without_a_count_it_ends_where_its_tags_begin(self, behind: str) -> None:
        footer = b"APETAGEX" + struct.pack("<IIII", 2000, 332, 1, 0) + bytes(8)
        ape = b"x" * 300 + footer
        tail = {"id3": ID3V1, "ape": ape, "both": ape + ID3V1}[behind]
        whole = clip("flac", 2.0)
        for data in (self.with_total(whole, 0), self.with_total(whole, 0) + tail):
            np.testing.assert_array_equal(decoded(data).waveform, decoded(whole).waveform)
