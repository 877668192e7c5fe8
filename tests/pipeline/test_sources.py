"""Files: what is listed, what is known before reading, and what is fetched, in which order."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from earmill.pipeline.common.errors import RowError, SourceError, UnreadableError
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.sources import Item
from earmill.pipeline.sources import base as sources_base
from earmill.pipeline.sources import fetch as fetch_module
from earmill.pipeline.sources import files as files_module
from earmill.pipeline.sources.durations import guess_seconds, header_seconds
from tests.pipeline.audio_factory import clip, damaged_corpus
from tests.pipeline.source_helpers import (
    CORPUS_IDS,
    SPEECH,
    SPEECH_FILES,
    SPEECH_IDS,
    contents,
    files,
    ids,
    write_corpus,
)
from tests.pipeline.whole_clips import decode
from tests.waiting import threads_end


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


class TestFiles:
    def test_a_folder_is_listed_recursively_and_sorted(self, corpus: Path) -> None:
        assert ids(files(corpus)) == CORPUS_IDS
        assert ids(files(f"{corpus}/")) == CORPUS_IDS
        assert ids(files(f"file://{corpus}")) == CORPUS_IDS

    def test_listing_again_gives_the_same_rows_and_opens_no_file(
        self, corpus: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        items = list(files(corpus).items())
        monkeypatch.setattr(files_module, "header_seconds", None)
        for item, listed in zip(items, files(corpus).listing(), strict=True):
            assert listed.estimated and not item.estimated
            assert replace(listed, seconds=item.seconds, estimated=False) == item

    def test_a_relative_path_gives_absolute_uris(
        self, corpus: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(corpus.parent)
        items = list(files("corpus").items())
        assert [item.row_id for item in items] == CORPUS_IDS
        assert items[0].uri == str(corpus / "a.flac")

    @pytest.mark.parametrize(
        ("glob", "expected"),
        [
            ("*", ["a.flac", "b.wav", "odd [1]*.wav", "ünï.opus"]),
            ("*.wav", ["b.wav", "odd [1]*.wav"]),
            ("deep/**/*", ["deep/d.MP3", "deep/er/c.ogg"]),
            ("**/er/*", ["deep/er/c.ogg"]),
        ],
    )
    def test_globs(self, corpus: Path, glob: str, expected: list[str]) -> None:
        assert ids(files(corpus, glob=glob)) == expected

    def test_a_glob_in_the_uri(self, corpus: Path) -> None:
        assert ids(files(corpus / "*.wav")) == ["b.wav", "odd [1]*.wav"]
        assert ids(files(f"{corpus}/de*/**/*.ogg")) == ["deep/er/c.ogg"]

    def test_a_single_file_even_with_glob_characters(self, corpus: Path) -> None:
        assert ids(files(corpus / "odd [1]*.wav")) == ["odd [1]*.wav"]

    def test_extensions(self, corpus: Path) -> None:
        assert ids(files(corpus, extensions=["mp3", ".OGG"])) == ["deep/d.MP3", "deep/er/c.ogg"]

    def test_what_is_known_before_reading(self, corpus: Path) -> None:
        by_id = {item.row_id: item for item in files(corpus).items()}
        for position, name in enumerate(CORPUS_IDS):
            stat = (corpus / name).stat()
            item = by_id[name]
            assert (item.size, item.mtime, item.etag) == (stat.st_size, stat.st_mtime, None)
            assert item.position == position
            assert item.seconds == pytest.approx(0.2, abs=1e-3)  # read from the header

    def test_every_byte_arrives_in_order(self, corpus: Path) -> None:
        source = files(corpus)
        items = list(source.items())
        backwards = items[::-1]
        expected = [(corpus / name).read_bytes() for name in CORPUS_IDS]
        assert contents(source, items) == expected
        assert contents(source, backwards) == expected[::-1]

    def test_real_speech_decodes_from_fetched_streams(self) -> None:
        source = files(SPEECH)
        items = list(source.items())
        assert [item.row_id for item in items] == SPEECH_IDS
        for item, stream in source.fetch(items):
            with stream:
                facts = decode(stream, uri=item.uri).facts
            assert facts.seconds == pytest.approx(item.seconds, abs=1e-6)
            assert facts.bytes_sha256 == hashlib.sha256(Path(item.uri).read_bytes()).hexdigest()

    def test_bad_rows_are_handed_out_in_place(self, corpus: Path) -> None:
        source = files(corpus)
        items = list(source.items())
        (corpus / "b.wav").unlink()
        (corpus / "a.flac").write_bytes(b"other bytes")
        found = contents(source, items)
        assert isinstance(found[0], UnreadableError)
        assert "changed since it was planned: expected" in str(found[0])
        assert isinstance(found[1], UnreadableError)
        assert str(corpus / "b.wav") in str(found[1])
        assert [isinstance(entry, bytes) for entry in found] == [False, False] + [True] * 4

    def test_a_damaged_corpus_is_listed_whole(self, tmp_path: Path) -> None:
        cases = damaged_corpus()
        for case in cases:
            (tmp_path / case.name).write_bytes(case.data)
        source = files(tmp_path)
        items = list(source.items())
        assert len(items) == len(cases)
        assert all(item.seconds is not None and item.seconds >= 0 for item in items)
        by_name = {case.name: case for case in cases}
        for item, stream in source.fetch(items):
            with stream, pytest.raises(RowError) as caught:
                decode(stream, uri=item.uri)
            assert caught.value.error_class == by_name[item.row_id].error_class

    @pytest.mark.parametrize("uri", ["no/such/folder", "no/such/*.wav", "s4://bucket/x"])
    def test_a_missing_source(self, uri: str) -> None:
        with pytest.raises(SourceError, match=r"^source .*: (not found|cannot be read)") as caught:
            files(uri)
        assert "\n" not in str(caught.value)

    def test_an_empty_source_says_what_it_saw(self, corpus: Path) -> None:
        with pytest.raises(SourceError, match=r"8 found, 4 match '\*\.x\*'|8 found, 0 match"):
            ids(files(corpus, glob="*.x*"))
        with pytest.raises(SourceError, match=r"8 found, 8 match .* none ends in aiff"):
            ids(files(corpus, extensions=["aiff"]))

    def test_a_folder_that_may_not_be_read_is_not_skipped(self, corpus: Path) -> None:
        if os.geteuid() == 0:
            # Permissions do not bind root; a folder that vanishes while listing is the same path.
            os.symlink(corpus / "nowhere", corpus / "gone.wav")
            source = files(corpus)
            items = list(source.items())
            found = dict(zip([i.row_id for i in items], contents(source, items), strict=True))
            assert isinstance(found["gone.wav"], UnreadableError)
            return
        (corpus / "deep").chmod(0)
        try:
            with pytest.raises(SourceError, match="cannot be read"):
                ids(files(corpus))
        finally:
            (corpus / "deep").chmod(0o755)

    def test_description_holds_no_credentials(self, corpus: Path) -> None:
        source = files(corpus, storage_options={"secret": "hush"})
        assert "hush" not in json.dumps(source.describe())
        assert source.describe()["root"] == str(corpus)


class TestFetching:
    def test_neighbours_of_one_uri_share_one_copy(
        self, corpus: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, opened = files(corpus), fetch_module.open_regular
        item = next(source.items())
        paths: list[str] = []

        def counted(path: str) -> io.BufferedReader:
            paths.append(path)
            return opened(path)

        monkeypatch.setattr(fetch_module, "open_regular", counted)
        streams = [stream for _, stream in source.fetch([item, item, item])]
        assert paths == [item.uri]
        assert len({stream.read() for stream in streams}) == 1
        for stream in streams:
            stream.close()

    def test_large_files_are_opened_in_place(
        self, corpus: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch_module, "MEMORY_BYTES", 100)
        source = files(corpus)
        items = list(source.items())
        assert contents(source, items) == [(corpus / name).read_bytes() for name in CORPUS_IDS]

    def test_reading_ahead_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No more bytes wait than allowed, however many small objects there are."""
        started: list[str] = []

        def load(item: Item, *more: object) -> fetch_module.Blob:
            started.append(item.row_id)
            return fetch_module.Blob(data=b"x" * 1000)

        monkeypatch.setattr(fetch_module, "load_blob", load)
        monkeypatch.setattr(fetch_module, "READ_AHEAD_BYTES", 3500)
        items = [Item(str(i), f"/clip{i}", size=1000) for i in range(20)]
        for taken, (_, stream) in enumerate(fetch_module.fetch_all(items, lambda uri: {}), start=1):
            assert isinstance(stream, io.BytesIO)
            stream.close()
            assert len(started) <= taken + 3
        assert sorted(started, key=int) == [item.row_id for item in items]

    def test_a_consumer_that_stops_early_stops_the_threads(self, corpus: Path) -> None:
        import threading

        before = set(threading.enumerate())  # an iteration of another test may not be collected yet
        source = files(corpus)
        fetched = source.fetch(list(source.items()))
        _, stream = next(fetched)
        started = [t for t in threading.enumerate() if t.name.startswith("fetch")]
        stream.close()
        fetched.close()
        # Pieces under way end by themselves.
        fetching = [thread for thread in started if thread not in before]
        assert fetching
        threads_end(fetching)

    def test_transient_errors_are_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []

        def flaky(*load: object) -> fetch_module.Blob:
            calls.append(1)
            if len(calls) < 3:
                raise ConnectionResetError("peer")
            return fetch_module.Blob(data=b"good")

        monkeypatch.setattr(
            sources_base, "FETCH_RETRIES", RetryPolicy(60.0, sleep=lambda seconds: None)
        )
        blob = fetch_module.load_blob(Item("a", "/a"), lambda uri: {}, load=flaky)
        assert isinstance(blob, fetch_module.Blob)
        assert (blob.nbytes, len(calls)) == (4, 3)


class TestDurations:
    def test_headers_are_exact(self) -> None:
        for path in SPEECH_FILES:
            with path.open("rb") as stream:
                exact = decode(stream, uri="x").facts.seconds
            assert header_seconds(str(path), path.stat().st_size) == pytest.approx(exact)

    def test_a_header_that_promises_too_much_is_not_believed(self) -> None:
        flac = bytearray(clip("flac"))
        flac[21] |= 0x0F  # the top bits of the sample count
        assert header_seconds(io.BytesIO(bytes(flac)), len(flac)) is None
        assert header_seconds(io.BytesIO(b"nothing"), 7) is None

    def test_guesses_by_size(self) -> None:
        assert guess_seconds("x.wav", 64000) == 2.0
        assert guess_seconds(None, 8000, b"OggS") == 1.0
        assert guess_seconds("no-extension", 16000) == 1.0
        for path in SPEECH_FILES:
            size = path.stat().st_size
            guess, exact = guess_seconds(path.name, size), header_seconds(str(path), size)
            assert exact is not None
            # A factor, not a figure: rates and channels are not known from outside.
            assert exact / 4 < guess < exact * 4


def test_streams_are_binary_files() -> None:
    """What decoders may rely on: the type, and that the digest needs no second read."""
    blob = fetch_module.Blob(data=b"abc")
    stream: BinaryIO = blob.open()
    with stream:
        assert stream.read(1) == b"a"
        assert blob.digest() == hashlib.sha256(b"abc").hexdigest()
        assert stream.tell() == 1
