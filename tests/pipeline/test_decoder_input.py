"""Windows, bounds and kept errors between a file and a decoding library."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio import decoders
from earmill.pipeline.audio.containers import open_window
from earmill.pipeline.audio.decoders import DecoderInput
from tests.short import drawn

BODY = bytes(range(100, 160))
Step = tuple[str, int, int]


def steps() -> st.SearchStrategy[list[Step]]:
    """Reads of any size and seeks from any place."""
    read = st.tuples(st.just("read"), st.integers(0, 80), st.just(0))
    seek = st.tuples(st.just("seek"), st.integers(-90, 130), st.sampled_from([0, 1, 2]))
    return st.lists(read | seek, max_size=12)


class TestWindow:
    @given(
        prefix=st.binary(max_size=20),
        start=st.integers(0, len(BODY)),
        stop=st.none() | st.integers(0, len(BODY) + 9),
        steps=steps(),
    )
    @drawn(150)
    def test_it_is_the_joined_bytes(
        self, prefix: bytes, start: int, stop: int | None, steps: list[Step]
    ) -> None:
        """Any reads and seeks give what the same calls give on prefix + body[start:stop]."""
        ours = open_window(io.BytesIO(BODY), start, stop, prefix)
        plain = io.BytesIO(prefix + BODY[start:stop])
        for what, number, whence in steps:
            if what == "read":
                assert ours.read(number) == plain.read(number)
                continue
            size = len(plain.getvalue())
            target = number + {0: 0, 1: plain.tell(), 2: size}[whence]
            if target < 0:
                continue  # an error in one, the start in the other; nobody asks for it
            assert ours.seek(number, whence) == plain.seek(target) == target
            assert ours.tell() == target

    def test_all_of_a_stream_is_the_stream_itself(self) -> None:
        """At its start, whoever has read before; no copy, no second buffer."""
        stream = io.BytesIO(BODY)
        stream.read(7)
        assert open_window(stream) is stream
        assert stream.tell() == 0

    def test_another_reader_of_the_stream_does_not_move_it(self) -> None:
        """The decoder's place is its own: the stream may be sought in between."""
        stream = io.BytesIO(BODY)
        ours = open_window(stream, 10, None, b"abc").detach()  # type: ignore[attr-defined]
        assert ours.read(5) == b"abc"
        stream.seek(50)
        assert ours.read(4) == BODY[10:14]
        stream.seek(0)
        assert ours.read(4) == BODY[14:18]

    def test_a_read_over_the_border_stops_there_and_goes_on(self) -> None:
        raw = open_window(io.BytesIO(BODY), 4, None, b"abc").detach()  # type: ignore[attr-defined]
        buffer = bytearray(10)
        assert raw.readinto(buffer) == 3
        assert raw.readinto(buffer) == 10
        assert bytes(buffer) == BODY[4:14]

    def test_seeking_before_the_start_is_the_start(self) -> None:
        raw = open_window(io.BytesIO(BODY), prefix=b"abc").detach()  # type: ignore[attr-defined]
        assert raw.seek(-5) == 0
        assert raw.seek(-500, io.SEEK_END) == 0
        assert raw.read(1) == b"a"

    def test_behind_the_end_there_is_nothing(self) -> None:
        ours = open_window(io.BytesIO(BODY), prefix=b"abc")
        assert ours.seek(1000) == 1000
        assert ours.read(10) == b""

    def test_windows_keep_the_failures_of_their_stream(self) -> None:
        failure = OSError(5, "Input/output error")
        source = DecoderInput(Broken(failure))
        parts = [source.window(2, 9), source.window(9, None)]
        assert parts[1].read(4) == b""
        assert source.error is parts[0].error is failure


class Broken(io.BytesIO):
    """A stream whose reads or seeks fail."""

    def __init__(self, error: Exception, *, seeks: bool = False) -> None:
        super().__init__(BODY)
        self.failure, self.seeks = error, seeks

    def read(self, size: int | None = -1) -> bytes:
        if self.seeks:
            return super().read(size)
        raise self.failure

    def seek(self, offset: int, whence: int = 0) -> int:
        if self.seeks:
            raise self.failure
        return super().seek(offset, whence)


class TestDecoderInput:
    def test_reads_are_those_of_the_stream(self) -> None:
        source = DecoderInput(io.BytesIO(BODY))
        buffer = bytearray(8)
        assert source.readinto(buffer) == 8
        assert bytes(buffer) == BODY[:8]
        assert source.read(4) == BODY[8:12]
        assert source.seek(-3, io.SEEK_END) == len(BODY) - 3 == source.tell()
        assert source.readinto(buffer) == 3
        assert bytes(buffer[:3]) == BODY[-3:]
        assert source.error is None

    def test_a_failure_is_kept_and_ends_the_stream(self) -> None:
        """A library reads through a callback, in which an exception is lost."""
        failure = OSError(5, "Input/output error")
        source = DecoderInput(Broken(failure))
        assert source.read(4) == b""
        assert source.error is failure

    def test_what_is_no_failure_of_the_disk_is_not_hidden(self) -> None:
        source = DecoderInput(Broken(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            source.read(4)

    @pytest.mark.parametrize(
        "failure", [ValueError("negative"), OverflowError("too far"), OSError(22, "invalid")]
    )
    def test_a_seek_to_nonsense_moves_nothing(self, failure: Exception) -> None:
        source = DecoderInput(Broken(failure, seeks=True))
        source.read(5)
        assert source.seek(-99) == 5
        assert source.error is None

    @pytest.mark.parametrize("offset", [-1, 1 << 70])
    def test_so_it_is_with_a_real_stream(self, offset: int) -> None:
        source = DecoderInput(io.BytesIO(BODY))
        source.read(5)
        assert source.seek(offset) == 5
        assert source.read(1) == BODY[5:6]

    def test_a_header_may_read_so_many_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoders, "HEADER_BYTES", 20)
        source = DecoderInput(io.BytesIO(BODY))
        assert len(source.read(12)) == 12
        assert len(source.read(12)) == 12  # checked before a read, whose size is not known yet
        assert source.read(1) == b""
        source.seek(0)
        assert source.read(1) == b""
        source.opened()
        assert source.read(3) == BODY[:3]
        assert len(source.read()) == len(BODY) - 3

    def test_a_header_may_read_so_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoders, "HEADER_READS", 3)
        source = DecoderInput(io.BytesIO(BODY))
        assert [len(source.read(1)) for _ in range(5)] == [1, 1, 1, 0, 0]
        source.opened()
        assert len(source.read(1)) == 1

    def test_each_input_has_its_own_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoders, "HEADER_READS", 1)
        for _ in range(3):
            assert DecoderInput(io.BytesIO(BODY)).read(2) == BODY[:2]
