"""Damaged input: every kind is found, named by its reason, and nothing else is raised."""

from __future__ import annotations

import io

import numpy as np
import pytest

from earmill.pipeline.common.errors import RowError, TruncatedError, UnreadableError
from tests.pipeline import audio_factory as factory
from tests.pipeline.audio_factory import FORMATS, Damaged, clip
from tests.pipeline.whole_clips import Decoded, decode

DAMAGED = factory.damaged_corpus()


def decoded(data: bytes, **options: object) -> Decoded:
    return decode(io.BytesIO(data), uri="clip", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", DAMAGED, ids=lambda case: case.name)
def test_damage_is_named(case: Damaged) -> None:
    with pytest.raises(RowError) as caught:
        decode(io.BytesIO(case.data), uri=case.name)
    assert caught.value.error_class == case.error_class
    assert caught.value.stage == "decode"
    message = str(caught.value)
    assert message.startswith(case.name)
    assert "\n" not in message


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("fraction", [0.03, 0.2, 0.77, 0.97])
def test_a_cut_anywhere_is_found(kind: str, fraction: float) -> None:
    data = clip(kind, seconds=3.0, seed=2)
    with pytest.raises(TruncatedError):
        decoded(data[: int(len(data) * fraction)])


@pytest.mark.parametrize("kind", ["flac", "ogg", "opus"])
def test_one_flipped_byte_is_found(kind: str) -> None:
    data = clip(kind, seconds=2.0)
    for fraction in (0.3, 0.6, 0.99):
        with pytest.raises(TruncatedError):
            decoded(factory.flipped(data, fraction, count=1))


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """A file with one to five random edits, half of them in its header."""
    edited = bytearray(data)
    for _ in range(rng.integers(1, 6)):
        at = int(rng.integers(0, len(edited) if rng.random() < 0.5 else min(len(edited), 200)))
        drop, insert = int(rng.integers(0, 40)), rng.bytes(int(rng.integers(0, 40)))
        edited[at : at + drop] = insert
    return bytes(edited) or b"x"


@pytest.mark.parametrize("kind", FORMATS)
def test_no_bytes_lead_to_any_other_error(kind: str) -> None:
    """Whatever a file holds: either finite samples, or a RowError."""
    rng = np.random.default_rng(11)
    data = clip(kind, seconds=0.4, channels=2)
    refused = 0
    for _ in range(40):
        try:
            result = decoded(mutated(data, rng), channels="each")
        except RowError:
            refused += 1
        else:
            assert np.isfinite(result.waveform).all()
            assert result.facts.frames == result.waveform.shape[1] > 0
    assert refused > 0


def test_mp3_without_a_frame_count_cut_inside_a_frame() -> None:
    bare = factory.without_count_tag(factory.loud_then_quiet_mp3(4.0))
    with pytest.raises(TruncatedError, match="last MPEG frame"):
        decoded(bare[:-17])


def test_a_span_before_the_damage_is_good_except_in_ogg() -> None:
    for kind in ("wav", "flac", "mp3"):
        data = clip(kind, 4.0)
        part = decoded(data[: len(data) * 3 // 4], start_s=0.5, end_s=1.0)
        np.testing.assert_array_equal(part.waveform, decoded(data, start_s=0.5, end_s=1.0).waveform)
        with pytest.raises(TruncatedError):
            decoded(data[: len(data) // 2], start_s=2.5, end_s=3.0)
    data = clip("opus", 4.0)
    with pytest.raises(TruncatedError):
        decoded(data[: len(data) * 3 // 4], start_s=0.5, end_s=1.0)


class FailingDisk(io.BytesIO):
    """A stream whose reads fail behind some offset, as a bad sector does."""

    def __init__(self, data: bytes, good_bytes: int) -> None:
        super().__init__(data)
        self.good_bytes = good_bytes

    def digest(self) -> str:
        return "0" * 64

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() >= self.good_bytes:
            raise OSError(5, "Input/output error")
        return super().read(size)


def test_a_read_error_is_unreadable_not_truncated() -> None:
    data = clip("wav", 8.0)
    with pytest.raises(UnreadableError, match="read failed") as caught:
        decode(FailingDisk(data, 100_000), uri="clip")
    assert caught.value.stage == "fetch"


def test_a_digest_of_the_stream_is_used() -> None:
    stream = FailingDisk(clip("wav"), 1 << 30)
    assert decode(stream, uri="clip").facts.bytes_sha256 == "0" * 64
