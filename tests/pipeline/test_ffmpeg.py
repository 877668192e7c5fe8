"""What FFmpeg decodes: the samples it gives, in blocks of any size, and every cut found."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import av
import numpy as np
import pytest

from earmill.pipeline.audio.decode import BlockReader
from earmill.pipeline.common.errors import (
    NotAudioError,
    RowError,
    SpanError,
    TruncatedError,
    UnreadableError,
)
from earmill.pipeline.sources.durations import header_seconds
from tests.pipeline.audio_factory import speech_like
from tests.pipeline.av_factory import (
    AV_FORMATS,
    AV_LOSSLESS,
    av_clip,
    encode_as,
    encode_av,
    video_only,
)
from tests.pipeline.source_helpers import files, ids
from tests.pipeline.test_decode_damage import FailingDisk, mutated
from tests.pipeline.whole_clips import Decoded, decode

KINDS = pytest.mark.parametrize("kind", AV_FORMATS)


def decoded(data: bytes, **options: object) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", **options)  # type: ignore[arg-type]


def by_hand(data: bytes) -> np.ndarray:
    """The second route: samples scaled by numpy to float, (channels, frames)."""
    with av.open(io.BytesIO(data)) as container:
        frames = [scaled(frame) for frame in container.decode(audio=0)]
    return np.concatenate(frames, axis=1)


def scaled(frame: av.AudioFrame) -> np.ndarray:
    samples, form = frame.to_ndarray(), frame.format
    if not form.is_planar:
        samples = samples.reshape(frame.samples, -1).T
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    offset = 128.0 if samples.dtype == np.uint8 else 0.0
    return ((samples - offset) / 2.0 ** (8 * form.bytes - 1)).astype(np.float32)


@KINDS
def test_samples_and_facts_are_those_of_the_file(kind: str) -> None:
    data = av_clip(kind, 1.3, channels=2)
    result = decoded(data, channels="each")
    np.testing.assert_allclose(result.waveform, by_hand(data), rtol=0, atol=2**-24)
    _, _, rate_hz, container, codec, _ = AV_FORMATS[kind]
    facts = result.facts
    assert (facts.container, facts.codec, facts.rate_hz) == (container, codec, rate_hz)
    assert facts.channels == 2
    assert facts.bytes_sha256 == hashlib.sha256(data).hexdigest()
    assert (facts.decoder, facts.decoder_version) == ("ffmpeg", av.ffmpeg_version_info)
    # Encoders pad the end, and ADTS cannot mark what they put in front; WMA's drops its last frame.
    dropped = 2048 if kind == "wma" else 0
    assert -dropped <= facts.frames - 1.3 * rate_hz <= 4096


@pytest.mark.parametrize("kind", AV_LOSSLESS)
def test_lossless_codecs_return_what_was_written(kind: str) -> None:
    samples = speech_like(0.7, AV_FORMATS[kind][2])
    waveform = decoded(encode_av(samples, kind)).waveform
    np.testing.assert_allclose(waveform[0], samples[:, 0], rtol=0, atol=2**-15)


@pytest.mark.parametrize("kind", ["m4a", "mp4", "webm"])
def test_encoder_delay_is_left_out_where_it_is_marked(kind: str) -> None:
    """The clip starts where it started: a click keeps its sample."""
    rate_hz = AV_FORMATS[kind][2]
    samples = np.zeros((rate_hz, 1), dtype=np.float32)
    samples[rate_hz // 2] = 0.9
    waveform = decoded(encode_av(samples, kind)).waveform[0]
    assert abs(int(np.abs(waveform).argmax()) - rate_hz // 2) <= 1


@KINDS
@pytest.mark.parametrize("span", [(None, None), (0.31, None), (0.25, 1.0000113)])
def test_blocks_equal_the_whole(kind: str, span: tuple[float | None, float | None]) -> None:
    data = av_clip(kind, 1.3, channels=2)
    options = {"uri": "clip", "start_s": span[0], "end_s": span[1], "channels": "each"}
    whole = decode(io.BytesIO(data), **options)  # type: ignore[arg-type]
    for block in (777, 20000):
        with BlockReader(io.BytesIO(data), block_frames=block, **options) as reader:  # type: ignore[arg-type]
            blocks = list(reader)
            assert reader.facts == whole.facts
        assert max(part.shape[1] for part in blocks) <= block
        np.testing.assert_array_equal(np.concatenate(blocks, axis=1), whole.waveform)


@KINDS
@pytest.mark.parametrize("fraction", [0.03, 0.2, 0.5, 0.77, 0.97])
def test_a_cut_anywhere_is_found(kind: str, fraction: float) -> None:
    data = av_clip(kind, 3.0, seed=2)
    with pytest.raises(TruncatedError):
        decoded(data[: int(len(data) * fraction)])


@KINDS
def test_the_last_bytes_count(kind: str) -> None:
    with pytest.raises(TruncatedError):
        decoded(av_clip(kind, 3.0, seed=2)[:-3])


@KINDS
def test_no_bytes_lead_to_any_other_error(kind: str) -> None:
    rng = np.random.default_rng(11)
    data = av_clip(kind, 0.4, channels=2)
    refused = 0
    for _ in range(25):
        try:
            result = decoded(mutated(data, rng), channels="each")
        except RowError:
            refused += 1
        else:
            assert np.isfinite(result.waveform).all()
            assert result.facts.frames == result.waveform.shape[1] > 0
    assert refused > 0


def test_a_hole_in_the_middle_is_found() -> None:
    for kind in ("m4a", "aac", "webm", "wma"):
        data = av_clip(kind, 3.0, seed=2)
        with pytest.raises(TruncatedError):
            decoded(data[: len(data) * 45 // 100] + data[len(data) * 55 // 100 :])


def test_spans_outside_the_file() -> None:
    for kind in ("m4a", "webm", "aac"):
        with pytest.raises(SpanError, match="file ends at"):
            decoded(av_clip(kind, 1.3, channels=2), start_s=0.5, end_s=9.0)


def test_a_film_without_sound_is_no_audio() -> None:
    with pytest.raises(NotAudioError, match="a file without sound"):
        decoded(video_only())


def test_a_read_error_is_unreadable_not_truncated() -> None:
    data = av_clip("mka", 8.0)
    with pytest.raises(UnreadableError, match="read failed"):
        decode(FailingDisk(data, 70_000), uri="clip")


def test_adts_with_tags_around_it() -> None:
    data = av_clip("aac", 1.0)
    tags = b"ID3\4\0\0\0\0\0\12" + bytes(10)
    np.testing.assert_array_equal(decoded(tags + data).waveform, decoded(data).waveform)
    np.testing.assert_array_equal(
        decoded(data + b"TAG" + bytes(125)).waveform, decoded(data).waveform
    )


@pytest.mark.parametrize("codec", ["aac", "wavpack", "flac"])
@pytest.mark.parametrize("channels", [7, 8])
def test_many_channels(codec: str, channels: int) -> None:
    """PyAV itself crashes where eight channels have planes."""
    samples = speech_like(1.0, 24000, channels=channels)
    form = "s16p" if codec == "wavpack" else None
    data = encode_as(samples, "matroska", codec, 24000, bit_rate=512000, sample_format=form)
    result = decoded(data, channels="each")
    assert result.facts.channels == len(result.waveform) == channels
    if codec != "aac":
        np.testing.assert_allclose(result.waveform, samples.T, rtol=0, atol=2**-15)


def test_a_playlist_is_not_followed(tmp_path: Path) -> None:
    """FFmpeg would open what an HLS or concat list names; here only known containers come to it."""
    (tmp_path / "a.m4a").write_bytes(av_clip("m4a", 0.5))
    for text in ("#EXTM3U\n#EXTINF:1,\na.m4a\n", f"ffconcat version 1.0\nfile {tmp_path}/a.m4a\n"):
        with pytest.raises(NotAudioError):
            decoded(text.encode() * 20)


@pytest.mark.parametrize(
    ("codec", "form"),
    [
        *[(f"pcm_{name}", None) for name in ("u8", "s16le", "s32le", "f32le", "f64le")],
        *[("wavpack", form) for form in ("u8p", "s16p", "s32p", "fltp")],
    ],
)
def test_every_sample_format_is_scaled_alike(codec: str, form: str | None) -> None:
    samples = speech_like(0.5, 16000, channels=2)
    data = encode_as(samples, "matroska", codec, 16000, sample_format=form)
    found = decoded(data, channels="each").waveform
    assert found.dtype == np.float32
    is_coarse = "u8" in f"{codec} {form}"
    np.testing.assert_allclose(found, samples.T, rtol=0, atol=1 / 64 if is_coarse else 2**-15)
    np.testing.assert_array_equal(found, by_hand(data))


def test_they_are_found_and_estimated_by_default(tmp_path: Path) -> None:
    for kind in AV_FORMATS:
        (tmp_path / f"x.{kind}").write_bytes(av_clip(kind, 2.0))
    source = files(tmp_path)
    assert ids(source) == sorted(f"x.{kind}" for kind in AV_FORMATS)
    for item in source.items():
        data = (tmp_path / item.row_id).read_bytes()
        exact = header_seconds(io.BytesIO(data), len(data))
        if item.row_id == "x.aac":
            assert exact is None  # nothing in it says; by its size
            assert item.seconds is not None and 0.5 < item.seconds < 8
        else:
            assert item.seconds == exact == pytest.approx(2.0, abs=0.05)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "long.mka"
    path.write_bytes(encode_av(np.tile(speech_like(5.0, 16000), (24, 1)), "mka"))
    tracemalloc.start()
    with path.open("rb") as stream, BlockReader(stream, uri="long") as reader:
        frames = sum(block.shape[1] for block in reader)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert frames == 120 * 16000
    assert peak < 4 << 20
