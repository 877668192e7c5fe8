"""Spans of large recordings: they fetch what they need, and are what the whole file gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from earmill.pipeline.common.errors import RowError, SourceOutage
from earmill.pipeline.sources import fetch, open_source
from earmill.pipeline.sources.fetch import check_arrived
from earmill.pipeline.spec.source import ManifestSpec
from tests.pipeline import audio_factory, web_server
from tests.pipeline.source_helpers import contents
from tests.pipeline.whole_clips import Decoded, decode

SPANS = ((3.0, 4.0), (20.5, 21.0), (21.0, 22.0), (58.25, 60.0))


class Counting(web_server._Ranges):
    """Counts the bytes of files that it hands out, and says what a file's content is called."""

    served: dict[str, int]
    tag: dict[str, str]
    has_ranges = True

    def do_GET(self) -> None:
        if not self.has_ranges:
            del self.headers["Range"]
        super().do_GET()

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{self.tag["now"]}"')
        super().end_headers()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length" and self.command == "GET":
            self.served[self.path] = self.served.get(self.path, 0) + int(value)
        super().send_header(keyword, value)


@contextmanager
def counting(folder: Path) -> Iterator[tuple[str, dict[str, int], dict[str, str]]]:
    served: dict[str, int] = {}
    tag = {"now": "one"}
    handler = type("H", (Counting,), {"folder": folder, "served": served, "tag": tag})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", served, tag
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A minute of audio, which counts as large, and a table of spans of it."""
    monkeypatch.setattr(fetch, "MEMORY_BYTES", 256 << 10)
    monkeypatch.setattr(fetch, "BLOCK_BYTES", 8 << 10)
    for kind in ("wav", "flac", "ogg"):
        (tmp_path / f"a.{kind}").write_bytes(audio_factory.clip(kind, 60.0, channels=2))
    return tmp_path


def rows_of(folder: Path, at: str, kind: str) -> tuple[Any, list[Any]]:
    """A source of the spans, and its items."""
    lines = [
        {"id": str(n), "uri": f"{at}/a.{kind}", "start": start, "end": end}
        for n, (start, end) in enumerate(SPANS)
    ]
    table = folder / f"{kind}.jsonl"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = open_source(ManifestSpec(kind="manifest", uri=str(table), allow=(at,)))
    return source, list(source.items())


def decoded(source: Any, items: list[Any]) -> list[Decoded]:
    found = []
    for item, stream in source.fetch(items):
        assert not isinstance(stream, RowError), stream
        span = {"start_s": item.start_s, "end_s": item.end_s}
        with stream:
            found.append(decode(stream, uri=item.uri, channels="each", **span))
        check_arrived(stream, item.uri)
    return found


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_a_span_fetches_a_small_part_and_is_what_the_whole_file_gives(
    folder: Path, kind: str
) -> None:
    whole = (folder / f"a.{kind}").read_bytes()
    with counting(folder) as (address, served, _):
        source, items = rows_of(folder, address, kind)
        served.clear()  # planning reads the header
        found = decoded(source, items)
    share = sum(end - start for start, end in SPANS) / 60.0
    assert served[f"/a.{kind}"] < (share + 0.25) * len(whole)
    for span, one in zip(SPANS, found, strict=True):
        with (folder / f"a.{kind}").open("rb") as stream:
            wanted = decode(stream, uri="x", start_s=span[0], end_s=span[1], channels="each")
        np.testing.assert_array_equal(one.waveform, wanted.waveform)
        assert one.facts.pcm_sha256 == wanted.facts.pcm_sha256
        assert (one.facts.bytes_sha256, one.facts.nbytes) == ("", len(whole))


def test_what_cannot_be_sought_in_is_fetched_once(folder: Path) -> None:
    with counting(folder) as (address, served, _):
        source, items = rows_of(folder, address, "ogg")
        served.clear()
        found = decoded(source, items)
    assert served["/a.ogg"] == (folder / "a.ogg").stat().st_size
    assert len({one.facts.bytes_sha256 for one in found} - {""}) == 1


def test_a_server_without_ranges_gives_the_whole_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counting(folder) as (address, _, _):
        source, items = rows_of(folder, address, "wav")
        monkeypatch.setattr(Counting, "has_ranges", False)
        found = decoded(source, items)
    assert {len(one.facts.bytes_sha256) for one in found} == {64}
    assert [one.facts.frames for one in found] == [22050, 11025, 22050, 38587]


def test_a_local_file_is_not_hashed_for_a_span(folder: Path) -> None:
    found = decoded(*rows_of(folder, str(folder), "wav"))
    assert [one.facts.bytes_sha256 for one in found] == [""] * 4
    assert [one.facts.frames for one in found] == [22050, 11025, 22050, 38587]


def test_an_object_replaced_between_plan_and_fetch_is_a_bad_row(folder: Path) -> None:
    with counting(folder) as (address, _, tag):
        source, items = rows_of(folder, address, "wav")
        assert {item.etag for item in items} == {"one"}
        tag["now"] = "two"
        streams = [stream for _, stream in source.fetch(items)]
    assert all(isinstance(stream, RowError) for stream in streams)
    assert "changed since it was planned: expected tag one, got two" in str(streams[0])


def test_a_span_asks_for_the_tag_of_a_small_object_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read whole, when its worker comes to it; a row of its own takes what is there."""
    monkeypatch.setattr(fetch, "MEMORY_BYTES", 1 << 30)
    with counting(folder) as (address, _, tag):
        source, items = rows_of(folder, address, "wav")
        tag["now"] = "two"
        (alone,) = contents(source, items[:1])
        assert not isinstance(alone, RowError)
        spans = [replace(item, part_of=(0.0, None)) for item in items[:2]]
        streams = [stream for _, stream in source.fetch(spans)]
        assert all("expected tag one, got two" in str(stream) for stream in streams)
        tag["now"] = "one"
        assert not [one for one in contents(source, spans) if isinstance(one, RowError)]


def test_an_object_replaced_while_it_is_read_blames_no_row(folder: Path) -> None:
    with counting(folder) as (address, _, tag):
        source, items = rows_of(folder, address, "wav")
        for item, stream in source.fetch(items[:1]):
            with stream:
                decode(stream, uri=item.uri, start_s=item.start_s, end_s=item.end_s)
            tag["now"] = "two"
            with pytest.raises(SourceOutage, match="replaced while it was read"):
                check_arrived(stream, item.uri)
