"""Formats beside the common ones: the samples that others read, and every cut found."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest

from earmill.pipeline.audio.decode import Limits
from earmill.pipeline.common.errors import (
    NotAudioError,
    RowError,
    TruncatedError,
    UnsupportedError,
)
from earmill.pipeline.sources.durations import header_seconds
from tests.pipeline.audio_factory import clip, encode, speech_like
from tests.pipeline.av_factory import encode_as
from tests.pipeline.container_bytes import caf, caf_chunk, chunk, ogg_page, wave
from tests.pipeline.mpeg_bytes import ID3V1, Kind, id3
from tests.pipeline.source_helpers import files, ids
from tests.pipeline.test_decode_damage import mutated
from tests.pipeline.test_ogg_pages import pages_of
from tests.pipeline.whole_clips import Decoded, decode

# Name -> muxer, encoder, rate in Hz, our container and codec, the encoder's sample format.
KINDS: dict[str, tuple[str, str, int, str, str, str | None]] = {
    "wv": ("wv", "wavpack", 16000, "WAVPACK", "WAVPACK", "s16p"),
    "32.wv": ("wv", "wavpack", 44100, "WAVPACK", "WAVPACK", "s32p"),
    "float.wv": ("wv", "wavpack", 16000, "WAVPACK", "WAVPACK", "fltp"),
    "tta": ("tta", "tta", 16000, "TTA", "TTA", "s16"),
    "24.tta": ("tta", "tta", 22050, "TTA", "TTA", "s32"),
    "ac3": ("ac3", "ac3", 48000, "AC3", "AC3", None),
    "44.ac3": ("ac3", "ac3", 44100, "AC3", "AC3", None),
    "32.ac3": ("ac3", "ac3", 32000, "AC3", "AC3", None),
    "eac3": ("eac3", "eac3", 48000, "EAC3", "EAC3", None),
    "amr": ("amr", "libopencore_amrnb", 8000, "AMR", "AMRNB", None),
    "mp2": ("mp2", "mp2", 44100, "MP3", "MPEG_LAYER_II", None),
    "m4b": ("ipod", "aac", 44100, "MP4", "AAC", None),
    "3gp": ("3gp", "libopencore_amrnb", 8000, "MP4", "AMRNB", None),
    "weba": ("webm", "libopus", 16000, "MATROSKA", "OPUS", None),
}
LOSSLESS = {"wv": 2**-15, "32.wv": 2**-30, "float.wv": 0, "tta": 2**-15, "24.tta": 2**-22}
EVERY = pytest.mark.parametrize("kind", KINDS)
# Nothing but the header of a frame is checked in these.
WITHOUT_CHECKSUMS = ("ac3", "44.ac3", "32.ac3", "eac3", "amr", "mp2", "m4b", "3gp", "weba")


def made(kind: str, seconds: float = 2.0, *, seed: int = 0) -> bytes:
    muxer, codec, rate_hz, _, _, sample_format = KINDS[kind]
    return encode_as(
        speech_like(seconds, rate_hz, seed=seed),
        muxer,
        codec,
        rate_hz,
        bit_rate=12200 if "amr" in codec else 128000,
        sample_format=sample_format,
    )


def decoded(data: bytes, **options: object) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", channels="each", **options)  # type: ignore[arg-type]


def by_ffmpeg(data: bytes, muxer: str | None = None) -> np.ndarray:
    """FFmpeg's samples in float, (channels, frames)."""
    to_float = av.AudioResampler("fltp")
    with av.open(io.BytesIO(data), format=muxer) as container:
        frames = [f for frame in container.decode(audio=0) for f in to_float.resample(frame)]
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=1)


def lag(one: np.ndarray, other: np.ndarray) -> int:
    """Samples by which the first signal comes later than the other."""
    n = len(one) + len(other) - 1
    found = np.fft.irfft(np.fft.rfft(one, n) * np.fft.rfft(other, n).conj(), n)
    best = int(np.argmax(found))
    return best if best < len(one) else best - n


class TestEvery:
    @EVERY
    def test_samples_and_facts(self, kind: str) -> None:
        data = made(kind)
        result = decoded(data)
        # AMR is decoded by the reference decoder, in whole numbers of 13 bits.
        near = 2**-8 if kind == "amr" else 2**-14
        np.testing.assert_allclose(result.waveform, by_ffmpeg(data), rtol=0, atol=near)
        _, _, rate_hz, container, codec, _ = KINDS[kind]
        assert (result.facts.container, result.facts.codec) == (container, codec)
        assert result.facts.rate_hz == (48000 if codec == "OPUS" else rate_hz)
        if kind in LOSSLESS:
            written = speech_like(2.0, rate_hz).T
            np.testing.assert_allclose(result.waveform, written, rtol=0, atol=LOSSLESS[kind])

    @EVERY
    def test_spans_are_slices_of_the_whole(self, kind: str) -> None:
        data = made(kind)
        whole = decoded(data)
        first, last = whole.facts.rate_hz // 2, 3 * whole.facts.rate_hz // 2
        part = decoded(data, start_s=0.5, end_s=1.5)
        np.testing.assert_array_equal(part.waveform, whole.waveform[:, first:last])

    @EVERY
    @pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
    def test_a_cut_is_found(self, kind: str, fraction: float) -> None:
        data = made(kind)
        with pytest.raises(TruncatedError):
            decoded(data[: int(len(data) * fraction) + 1])

    @EVERY
    def test_a_hole_is_found(self, kind: str) -> None:
        data = made(kind)
        with pytest.raises(TruncatedError):
            decoded(data[: len(data) * 45 // 100] + data[len(data) * 55 // 100 :])

    @EVERY
    @pytest.mark.parametrize("front", [b"", id3(bytes(70_000))], ids=["bare", "tag"])
    def test_tags_around_it(self, kind: str, front: bytes) -> None:
        data = made(kind)
        behind = b"" if KINDS[kind][3] in ("MP4", "MATROSKA") else ID3V1
        np.testing.assert_array_equal(
            decoded(front + data + behind).waveform, decoded(data).waveform
        )

    @EVERY
    def test_two_in_one_file_are_read_or_refused(self, kind: str) -> None:
        """Never the first one alone."""
        one, two = made(kind, seed=1), made(kind, 1.0, seed=2)
        frames = sum(decoded(data).facts.frames for data in (one, two))
        try:
            assert decoded(one + two).facts.frames == frames
        except TruncatedError:
            return

    @pytest.mark.parametrize("kind", sorted(KINDS.keys() - set(WITHOUT_CHECKSUMS)))
    def test_a_flipped_bit_is_found(self, kind: str) -> None:
        data = made(kind)
        for fraction in (0.2, 0.5, 0.8):
            at = int(len(data) * fraction)
            with pytest.raises(TruncatedError):
                decoded(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])

    @EVERY
    def test_no_bytes_lead_to_any_other_error(self, kind: str) -> None:
        rng = np.random.default_rng(11)
        data, refused = made(kind, 0.5), 0
        for _ in range(25):
            try:
                result = decoded(mutated(data, rng), limits=Limits(unterminated=True))
            except RowError:
                refused += 1
            else:
                assert np.isfinite(result.waveform).all()
        assert refused > 0


def test_they_are_listed_by_default(tmp_path: Path) -> None:
    names = ("3ga 3gp ac3 aifc amr awb bw64 bwf eac3 ec3 m4b m4r mp2 mpga spx tta weba wv").split()
    for name in names:
        (tmp_path / f"x.{name}").write_bytes(b"x")
    (tmp_path / "film.avi").write_bytes(b"x")
    assert ids(files(tmp_path)) == [f"x.{name}" for name in names]


@pytest.mark.parametrize("kind", ["wv", "24.tta", "m4b", "3gp"])
def test_planning_knows_their_length(kind: str) -> None:
    data = made(kind)
    assert header_seconds(io.BytesIO(data), len(data)) == pytest.approx(2.0, abs=0.05)


class TestAmr:
    """RFC 4867 5: a frame is 20 ms, and says by its type how long it is."""

    @pytest.mark.parametrize(
        ("magic", "rate_hz", "sizes"),
        [
            (b"#!AMR\n", 8000, (13, 14, 16, 18, 20, 21, 27, 32)),
            (b"#!AMR-WB\n", 16000, (18, 24, 33, 37, 41, 47, 51, 59, 61)),
        ],
    )
    def test_every_rate_of_the_codec(
        self, magic: bytes, rate_hz: int, sizes: tuple[int, ...]
    ) -> None:
        frames = [bytes([kind << 3 | 4]).ljust(size, b"\0") for kind, size in enumerate(sizes)]
        silence = bytes([len(sizes) << 3 | 4]).ljust(6, b"\0")
        nothing = bytes([15 << 3 | 4])
        data = magic + silence + b"".join(frames) * 3 + nothing
        result = decoded(data)
        assert result.facts.rate_hz == rate_hz
        assert result.facts.frames == (3 * len(sizes) + 2) * rate_hz // 50
        last = len(frames[-1]) + len(nothing)
        with pytest.raises(TruncatedError, match=f"expected {sizes[-1]} bytes"):
            decoded(data[: -last + 5])

    def test_what_is_no_frame(self) -> None:
        with pytest.raises(TruncatedError, match="AMR frames break at byte 19"):
            decoded(b"#!AMR\n" + bytes([4]).ljust(13, b"\0") + b"\xff" * 40)


class TestWavOfOtherCodecs:
    @pytest.mark.parametrize(
        ("codec", "rate_hz", "bit_rate"),
        [
            ("ac3", 48000, 128000),
            ("g726", 8000, 32000),
            ("g722", 16000, 64000),
            ("wmav2", 44100, 128000),
            ("g723_1", 8000, 6300),
            ("adpcm_yamaha", 16000, 64000),
        ],
    )
    def test_ffmpeg_reads_what_libsndfile_does_not_know(
        self, codec: str, rate_hz: int, bit_rate: int
    ) -> None:
        data = encode_as(speech_like(2.0, rate_hz), "wav", codec, rate_hz, bit_rate=bit_rate)
        result = decoded(data)
        np.testing.assert_array_equal(result.waveform, by_ffmpeg(data, "wav"))
        assert (result.facts.container, result.facts.decoder) == ("WAV", "ffmpeg")
        with pytest.raises(TruncatedError, match="bytes of samples"):
            decoded(data[:-300])

    @pytest.mark.parametrize("codec", [0x1234, 0x674F, 0x0000])
    def test_a_codec_that_nobody_knows_is_unsupported(self, codec: int) -> None:
        wav = clip("wav")
        data = wav[:20] + struct.pack("<H", codec) + wav[22:]
        with pytest.raises(UnsupportedError, match=f"WAV codec {codec:#06x}") as caught:
            decoded(data)
        assert caught.value.error_class == "unsupported"

    @pytest.mark.parametrize("codec", [0x2000, 0x00FF, 0x0160])
    def test_a_codec_that_the_bytes_are_not_of_is_unsupported(self, codec: int) -> None:
        wav = clip("wav")
        with pytest.raises(UnsupportedError, match=f"WAV codec {codec:#06x}"):
            decoded(wav[:20] + struct.pack("<H", codec) + wav[22:])

    def test_so_it_is_in_other_containers(self) -> None:
        aiff = clip("aiff")
        aifc = bytearray(aiff[:8] + b"AIFC" + aiff[12:])
        aifc[16:20] = (24).to_bytes(4, "big")
        aifc[38:38] = b"QDM9\0\0"
        desc = struct.pack(">d4s5I", 8000, b"none", 0, 0, 0, 1, 0)
        au = clip("au")
        for data in (
            bytes(aifc),
            caf(caf_chunk(b"desc", desc), caf_chunk(b"data", bytes(400))),
            au[:12] + (99).to_bytes(4, "big") + au[16:],
        ):
            with pytest.raises(UnsupportedError, match="which is not supported"):
                decoded(data)

    def test_a_film_in_ogg_without_sound_is_no_audio(self) -> None:
        film = encode_film("ogg")
        with pytest.raises(NotAudioError, match="a file without sound"):
            decoded(film)


def encode_film(muxer: str) -> bytes:
    sink = io.BytesIO()
    with av.open(sink, "w", format=muxer) as container:
        track = container.add_stream("libvpx", rate=10)
        track.width, track.height, track.pix_fmt = 32, 32, "yuv420p"
        picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), dtype=np.uint8))
        container.mux(track.encode(picture))
        container.mux(track.encode(None))
    return sink.getvalue()


class TestMpegInWav:
    """Codec 0x55: what stands in the data chunk is an MP3."""

    @staticmethod
    def wrapped(mp3: bytes, *, codec: int = 0x55, size: int | None = None) -> bytes:
        form = struct.pack("<HHIIHHH", codec, 1, 44100, 16000, 1, 0, 12)
        more = struct.pack("<HIHHH", 1, 2, 417, 1, 1393)
        return wave(chunk(b"fmt ", form + more), chunk(b"data", mp3, size=size))

    def test_samples_are_those_of_the_frames(self) -> None:
        data = encode_as(speech_like(2.0, 44100), "wav", "libmp3lame", 44100)
        result = decoded(data)
        np.testing.assert_allclose(result.waveform, by_ffmpeg(data, "wav"), rtol=0, atol=2**-15)
        assert result.facts.container == "WAV"

    def test_the_encoder_s_tag_counts_in_it_too(self) -> None:
        mp3 = clip("mp3", 2.0)
        for data in (self.wrapped(mp3), self.wrapped(mp3, size=0), id3(b"x") + self.wrapped(mp3)):
            np.testing.assert_array_equal(decoded(data).waveform, decoded(mp3).waveform)

    def test_of_a_variable_rate_nothing_is_lost(self) -> None:
        loud, quiet = Kind(bitrate=14).frame(), Kind(bitrate=1).frame()
        data = self.wrapped(loud * 5 + quiet * 300)
        assert decoded(data).facts.frames == 305 * 1152

    def test_layer_two(self) -> None:
        data = encode_as(speech_like(2.0, 44100), "wav", "mp2", 44100)
        result = decoded(data)
        np.testing.assert_allclose(result.waveform, by_ffmpeg(data, "wav"), rtol=0, atol=2**-14)

    def test_damage_is_found(self) -> None:
        mp3 = clip("mp3", 2.0)
        for data, text in (
            (self.wrapped(mp3)[:-300], "bytes of samples"),
            (self.wrapped(mp3[:-300]), "bytes of MPEG frames"),
            (self.wrapped(b"\1" * 5000), "no MPEG frames"),
            (self.wrapped(mp3 + encode(speech_like(1.0, 48000), "mp3", 48000)), "MPEG frames"),
        ):
            with pytest.raises(TruncatedError, match=text):
                decoded(data)


class TestBw64:
    """ITU-R BS.2088: RF64 under another name."""

    WHOLE = clip("rf64", 2.0)

    @pytest.mark.parametrize("span", [{}, {"start_s": 0.5, "end_s": 1.5}, {"start_s": 1.9}])
    def test_it_is_what_rf64_is(self, span: dict[str, float]) -> None:
        for whole in (self.WHOLE, clip("wav", 2.0)):
            data = b"BW64" + whole[4:]
            np.testing.assert_array_equal(
                decoded(data, **span).waveform, decoded(whole, **span).waveform
            )
        axml = b"BW64" + self.WHOLE[4:] + chunk(b"axml", b"<adm/>")
        result = decoded(axml, **span)
        np.testing.assert_array_equal(result.waveform, decoded(self.WHOLE, **span).waveform)
        assert (result.facts.container, result.facts.header_size) == ("BW64", None)
        assert header_seconds(io.BytesIO(axml), len(axml)) == 2.0

    def test_a_cut_is_found(self) -> None:
        with pytest.raises(TruncatedError):
            decoded(b"BW64" + self.WHOLE[4:-500])


class TestCaf:
    def test_alac_of_ffmpeg(self) -> None:
        """FFmpeg itself drops the last part of it."""
        samples = speech_like(2.0, 16000, channels=2)
        data = encode_as(samples, "caf", "alac", 16000)
        result = decoded(data)
        np.testing.assert_allclose(result.waveform, samples.T, rtol=0, atol=2**-15)
        assert (result.facts.container, result.facts.codec) == ("CAF", "ALAC")
        last = decoded(data, start_s=1.5)
        np.testing.assert_array_equal(last.waveform, result.waveform[:, 24000:])
        with pytest.raises(TruncatedError):
            decoded(data[:-500])

    @pytest.mark.parametrize("rate_hz", [48000, 16000])
    @pytest.mark.parametrize("table_first", [True, False])
    def test_opus(self, rate_hz: int, table_first: bool) -> None:
        """Apple's layout: packets, their sizes, how many samples are delay, whatever the rate."""
        ogg = clip("opus", 2.0)
        packets = opus_packets(ogg)
        frames = 960 * rate_hz // 48000
        desc = struct.pack(">d4s5I", rate_hz, b"opus", 0, 0, frames, 1, 0)
        skip, valid = 312 * rate_hz // 48000, 2 * rate_hz
        rest = len(packets) * frames - valid - skip
        sizes = b"".join(variable(len(packet)) for packet in packets)
        pakt = caf_chunk(b"pakt", struct.pack(">qqii", len(packets), valid, skip, rest) + sizes)
        sound = caf_chunk(b"data", bytes(4) + b"".join(packets))
        parts = (pakt, sound) if table_first else (sound, pakt)
        result = decoded(caf(caf_chunk(b"desc", desc), *parts))
        whole = decoded(ogg)
        assert result.facts.frames == whole.facts.frames
        np.testing.assert_allclose(result.waveform, whole.waveform, rtol=0, atol=2**-15)
        assert lag(result.waveform[0], whole.waveform[0]) == 0


def opus_packets(ogg: bytes) -> list[bytes]:
    """The packets of sound in a file of one stream."""
    packets, packet = [], b""
    for page in pages_of(ogg)[2:]:
        position = 27 + page[26]
        for size in page[27 : 27 + page[26]]:
            packet += page[position : position + size]
            position += size
            if size < 255:
                packets.append(packet)
                packet = b""
    return packets


def variable(number: int) -> bytes:
    """A number of CAF: seven bits a byte, all but the last with their highest bit set."""
    groups = [number >> shift & 0x7F for shift in range(28, -1, -7)]
    while len(groups) > 1 and not groups[0]:
        groups.pop(0)
    return bytes(group | 0x80 for group in groups[:-1]) + bytes([groups[-1]])


@pytest.mark.parametrize("rate_hz", [8000, 16000])
def test_speex_in_ogg(rate_hz: int) -> None:
    """Frames of silence (submode 0 of the Speex manual 9), 20 ms each: the length is known."""
    head = b"Speex   " + b"1.2".ljust(20, b"\0")
    head += struct.pack(
        "<13i", 1, 80, rate_hz, rate_hz // 16000, 4, 1, -1, rate_hz // 50, 0, 1, 0, 0, 0
    )
    comment = struct.pack("<I4sI", 4, b"test", 0)
    pages = [ogg_page(head, number=0, flags=2), ogg_page(comment, number=1)]
    for number in range(50):
        pages.append(
            ogg_page(
                bytes([0b00000011, 0b11000000]),
                number=number + 2,
                granule=(number + 1) * rate_hz // 50,
                flags=4 if number == 49 else 0,
            )
        )
    facts = decoded(b"".join(pages)).facts
    assert (facts.container, facts.codec) == ("OGG", "SPEEX")
    assert (facts.rate_hz, facts.frames) == (rate_hz, rate_hz)


def test_opus_in_other_containers_is_decoded_at_its_own_rate() -> None:
    samples = speech_like(2.0, 16000)
    ogg = decoded(encode_as(samples, "ogg", "libopus", 16000))
    webm = decoded(encode_as(samples, "webm", "libopus", 16000))
    np.testing.assert_allclose(webm.waveform, ogg.waveform, rtol=0, atol=2**-15)
    assert (ogg.facts.rate_hz, webm.facts.rate_hz) == (48000, 48000)
