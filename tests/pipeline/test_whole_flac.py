"""A FLAC decoded whole has libsndfile's samples, and whatever is odd about it is libsndfile's."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio import decoders as module
from earmill.pipeline.audio.containers import Probe
from earmill.pipeline.audio.containers.lossless import StreamInfo
from earmill.pipeline.audio.decoders import (
    DecoderInput,
    SndFile,
    WholeFlac,
    open_decoder,
    whole_flac,
)
from earmill.pipeline.common.errors import RowError
from tests.pipeline.whole_clips import decode
from tests.short import drawn

pytest.importorskip("miniaudio", reason="no wheel for this machine: FLAC is libsndfile's")
RATE_HZ = 16000


def encoded(frames: int, channels: int = 1, bits: int = 16, rate_hz: int = RATE_HZ) -> bytes:
    waves = 0.4 * np.random.default_rng(frames).standard_normal((frames, channels))
    into = io.BytesIO()
    subtype = module.SUBTYPES[bits]
    soundfile.write(into, np.clip(waves, -1, 1), rate_hz, format="FLAC", subtype=subtype)
    return into.getvalue()


def with_total(data: bytes, frames: int) -> bytes:
    """The same file, whose header says that it has so many frames."""
    packed = int.from_bytes(data[18:26], "big")
    return data[:18] + (packed >> 36 << 36 | frames).to_bytes(8, "big") + data[26:]


def opened(data: bytes) -> object:
    return open_decoder(DecoderInput(io.BytesIO(data)), Probe("flac"), whole=True)


def outcome(data: bytes) -> tuple[str, str] | bytes:
    """What a row of these bytes becomes: its error, or its samples."""
    try:
        return decode(io.BytesIO(data), uri="clip.flac", channels="each").waveform.tobytes()
    except RowError as error:
        return type(error).__name__, str(error)


def outcome_of_libsndfile(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str] | bytes:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "miniaudio", None)
        return outcome(data)


@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("frames", [1, 4095, 70_001])
def test_samples_are_those_of_libsndfile(bits: int, channels: int, frames: int) -> None:
    data = encoded(frames, channels, bits, rate_hz=44100)
    ours, theirs = opened(data), SndFile(DecoderInput(io.BytesIO(data)), Probe("flac"))
    assert isinstance(ours, WholeFlac)
    for field in ("format", "subtype", "samplerate", "channels", "frames", "exact_seek"):
        assert getattr(ours, field) == getattr(theirs, field)
    for wanted in (1, 1000, frames, 1):
        got, expected = ours.read(wanted), theirs.read(wanted)
        assert got.dtype == np.float32
        assert np.array_equal(got, expected)
    assert ours.seek(frames // 2) == theirs.seek(frames // 2)
    assert np.array_equal(ours.read(7), theirs.read(7))


def test_a_row_says_who_decoded() -> None:
    data = encoded(5000)
    assert decode(io.BytesIO(data), uri="a.flac").facts.decoder == "dr_flac"
    part = decode(io.BytesIO(data), uri="a.flac", start_s=0.1, end_s=0.2)
    assert part.facts.decoder == "libsndfile"
    assert part.waveform.shape == (1, 1600)


@drawn(150)
@given(st.data())
def test_damage_never_passes(data: st.DataObject) -> None:
    """Cut, overwritten, bits turned, bytes lost: only the true samples are ever taken."""
    clean = encoded(9000, channels=2)
    at = data.draw(st.integers(4, len(clean) - 1))
    kind = data.draw(st.sampled_from(["cut", "overwrite", "flip", "lose"]))
    length = data.draw(st.integers(1, 2000))
    if kind == "cut":
        damaged = clean[:at]
    elif kind == "overwrite":
        noise = np.random.default_rng(length).bytes(length)
        damaged = clean[:at] + noise[: len(clean) - at] + clean[at + length :]
    elif kind == "flip":
        damaged = clean[:at] + bytes([clean[at] ^ 1 << length % 8]) + clean[at + 1 :]
    else:
        damaged = clean[:at] + clean[at + length :]
    found = whole_flac(DecoderInput(io.BytesIO(damaged)))
    if found is not None:
        assert np.array_equal(found.read(10_000), opened(clean).read(10_000))


@pytest.mark.parametrize("frames", [0, 1, 2999, 3001, 2**23 + 1, 2**36 - 1])
def test_a_header_that_is_wrong_about_the_length(
    frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_total(encoded(3000), frames)
    assert whole_flac(DecoderInput(io.BytesIO(data))) is None
    assert outcome(data) == outcome_of_libsndfile(data, monkeypatch)


def test_every_bit_of_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is turned, the row is the one that it is without dr_flac."""
    clean = encoded(3000)
    for bit in range(8 * 42):
        data = bytearray(clean)
        data[bit // 8] ^= 1 << bit % 8
        ours, theirs = outcome(bytes(data)), outcome_of_libsndfile(bytes(data), monkeypatch)
        assert ours == theirs, f"bit {bit % 8} of byte {bit // 8}"


def test_bytes_behind_the_last_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = encoded(3000)
    for behind in (b"TAG" + bytes(125), bytes(5000), clean):
        assert outcome(clean + behind) == outcome_of_libsndfile(clean + behind, monkeypatch)


def test_what_is_too_large_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(3000)
    for limit, most in (("MOST_BYTES", len(data) - 1), ("MOST_SAMPLES", 2999)):
        with monkeypatch.context() as patched:
            patched.setattr(module, limit, most)
            assert isinstance(opened(data), SndFile)
    assert isinstance(opened(data), WholeFlac)


def test_what_is_no_flac() -> None:
    assert StreamInfo.of(b"") is None
    assert StreamInfo.of(b"RIFF" + bytes(40)) is None
    assert StreamInfo.of(b"fLaC\x04" + bytes(40)) is None
    assert StreamInfo.of(encoded(3000, 2, 24)) == StreamInfo(RATE_HZ, 2, 24, 3000, 4096)
