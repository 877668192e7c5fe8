"""Tags in front of the audio and behind it, in any format: samples are the same without them."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from earmill.pipeline.common.errors import RowError, TruncatedError
from earmill.pipeline.sources import fetch
from earmill.pipeline.sources.durations import early_seconds, header_seconds
from tests.pipeline.audio_factory import FORMATS, clip
from tests.pipeline.av_factory import AV_FORMATS, av_clip
from tests.pipeline.mpeg_bytes import ID3V1, id3
from tests.pipeline.source_helpers import files, manifest
from tests.pipeline.web_server import web_server
from tests.pipeline.whole_clips import Decoded, decode
from tests.short import spread


def ape(payload: bytes) -> bytes:
    """An APEv2 tag with header and footer, which may stand in front: size without the header."""
    size = len(payload) + 32

    def end(flags: int) -> bytes:
        return b"APETAGEX" + struct.pack("<IIII", 2000, size, 1, flags) + bytes(8)

    return end(0xA0000000) + payload + end(0x80000000)


# The last has what the samples of a WAV, an MP3 and an AAC frame begin with.
TAGS = {
    "picture": id3(bytes(60_000)),
    "two": id3(b"x" * 77) + id3(bytes(300)),
    "footer": id3(b"x" * 77, footer=True),
    "ape": ape(b"title" * 20),
    "ape and id3": ape(b"x" * 7) + id3(b"y"),
    "look-alike": id3(b"RIFF\0\0\0\0WAVEfmt \xff\xfb\x90\xc0\xff\xf1OggSfLaC" * 50),
}


def decoded(data: bytes, **span: float) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", channels="each", **span)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "name"), spread(3, [*FORMATS, *AV_FORMATS], TAGS))
def test_every_sample_is_read(kind: str, name: str) -> None:
    make: Callable[..., bytes] = av_clip if kind in AV_FORMATS else clip
    tag, data = TAGS[name], make(kind, 1.5, channels=2)
    whole, tagged = decoded(data), decoded(tag + data)
    np.testing.assert_array_equal(tagged.waveform, whole.waveform)
    facts = (whole.facts.container, whole.facts.codec, whole.facts.pcm_sha256)
    assert (tagged.facts.container, tagged.facts.codec, tagged.facts.pcm_sha256) == facts
    assert tagged.facts.nbytes == len(tag) + len(data)
    end_s = whole.facts.seconds
    span = decoded(tag + data, start_s=end_s - 0.5, end_s=end_s)
    np.testing.assert_array_equal(
        span.waveform, decoded(data, start_s=end_s - 0.5, end_s=end_s).waveform
    )


@pytest.mark.parametrize("tag", [ID3V1, ape(b"title" * 20)], ids=["id3v1", "ape"])
@pytest.mark.parametrize("kind", [*FORMATS, *AV_FORMATS])
def test_a_tag_behind_changes_nothing(kind: str, tag: bytes) -> None:
    make: Callable[..., bytes] = av_clip if kind in AV_FORMATS else clip
    data = make(kind, 1.0)
    np.testing.assert_array_equal(decoded(data + tag).waveform, decoded(data).waveform)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cut_behind_a_tag_is_found(kind: str) -> None:
    with pytest.raises(TruncatedError):
        decoded(TAGS["picture"] + clip(kind, 2.0)[:-50])


def test_a_file_that_is_cut_within_its_tag() -> None:
    with pytest.raises(TruncatedError, match="tags of 60010 bytes before the audio"):
        decoded(TAGS["picture"][:5000])


@pytest.mark.parametrize("size", range(1, 40))
def test_nothing_but_a_tag(size: int) -> None:
    for tag in (TAGS["footer"], TAGS["ape"]):
        with pytest.raises(RowError):
            decoded(tag[:size])


@pytest.mark.parametrize(
    ("kind", "name"), spread(2, ["wav", "flac", "aiff", "caf", "w64", "rf64", "au", "sph"], TAGS)
)
def test_planning_knows_the_length(kind: str, name: str, tmp_path: Path) -> None:
    tag = TAGS[name]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(tag + clip(kind, 2.0))
    (item,) = files(tmp_path).items()
    assert (item.seconds, item.estimated) == (2.0, False)


def test_planning_by_the_first_bytes_of_a_tagged_clip_is_a_guess() -> None:
    data = TAGS["footer"] + clip("wav", 2.0)
    assert early_seconds(data[:400], len(data)) is None
    assert header_seconds(io.BytesIO(data), len(data)) == 2.0


@pytest.mark.parametrize("kind", ["wav", "aiff", "flac"])
def test_spans_of_a_large_object_are_read_by_ranges(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MEMORY_BYTES", 256 << 10)
    monkeypatch.setattr(fetch, "BLOCK_BYTES", 8 << 10)
    data = TAGS["picture"] + clip(kind, 30.0, channels=2)
    (tmp_path / f"a.{kind}").write_bytes(data)
    with web_server(tmp_path) as address:
        table = tmp_path / "spans.csv"
        table.write_text(f"id,uri,start,end\n1,{address}/a.{kind},28.5,30.0\n")
        source = manifest(table, allow=(address,))
        ((item, stream),) = source.fetch(list(source.items()))
        assert not isinstance(stream, RowError)
        with stream:
            part = decode(stream, uri="a", channels="each", start_s=item.start_s, end_s=item.end_s)
    np.testing.assert_array_equal(part.waveform, decoded(data, start_s=28.5, end_s=30.0).waveform)
    assert part.facts.bytes_sha256 == ""  # it was not read whole
