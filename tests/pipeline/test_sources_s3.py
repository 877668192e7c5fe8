"""Files and manifests in a bucket: a real S3 server on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from earmill.pipeline.common.errors import SourceError, SourceOutage, UnreadableError
from earmill.pipeline.sources import fetch as fetch_module
from earmill.pipeline.sources.durations import guess_seconds
from tests.pipeline.audio_factory import clip
from tests.pipeline.outputs import s3_server
from tests.pipeline.source_helpers import (
    SPEECH,
    SPEECH_IDS,
    contents,
    files,
    ids,
    manifest,
)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Storage options of an S3 server on loopback, with the speech corpus in bucket `corpus`."""
    with s3_server("corpus") as options:
        fs = fsspec.filesystem("s3", **options)
        for name in SPEECH_IDS:
            fs.pipe_file(f"corpus/speech/{name}", (SPEECH / name).read_bytes())
        fs.pipe_file("corpus/speech/readme.txt", b"not audio")
        yield options


class TestS3:
    def test_a_bucket_prefix_is_the_folder(self, s3: dict[str, Any]) -> None:
        source = files("s3://corpus/speech", storage_options=s3)
        items = list(source.items())
        assert [item.row_id for item in items] == SPEECH_IDS
        assert items[0].uri == f"s3://corpus/speech/{SPEECH_IDS[0]}"
        local = {item.row_id: item for item in files(SPEECH).items()}
        for item in items:
            data = (SPEECH / item.row_id).read_bytes()
            assert item.size == local[item.row_id].size == len(data)
            assert item.etag == hashlib.md5(data, usedforsecurity=False).hexdigest()
            assert item.mtime is not None
            assert item.seconds == guess_seconds(item.row_id, len(data))
        assert contents(source, items) == [(SPEECH / name).read_bytes() for name in SPEECH_IDS]
        assert s3["secret"] not in json.dumps(source.describe())

    def test_a_glob_in_the_uri(self, s3: dict[str, Any]) -> None:
        source = files("s3://corpus/speech/**/*.flac", storage_options=s3)
        assert ids(source) == ["alpha/flac_16k.flac", "beta/flac_48k_stereo.flac"]

    def test_large_objects_go_through_a_temporary_file(
        self, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(fetch_module, "MEMORY_BYTES", 1000)
        monkeypatch.setattr(fetch_module, "own_folder", lambda: str(tmp_path))
        source = files("s3://corpus/speech", storage_options=s3)
        items = list(source.items())
        assert contents(source, items) == [(SPEECH / name).read_bytes() for name in SPEECH_IDS]
        assert list(tmp_path.iterdir()) == []  # each file goes with its last stream

    def test_a_vanished_object_is_one_bad_row(self, s3: dict[str, Any]) -> None:
        fs = fsspec.filesystem("s3", **s3)
        fs.pipe_file("corpus/fleeting/a.wav", clip("wav"))
        fs.pipe_file("corpus/fleeting/b.wav", clip("wav", seed=1))
        source = files("s3://corpus/fleeting", storage_options=s3)
        items = list(source.items())
        fs.rm("corpus/fleeting/a.wav")
        found = contents(source, items)
        assert isinstance(found[0], UnreadableError)
        assert "\n" not in str(found[0])
        assert found[1] == clip("wav", seed=1)

    def test_a_bucket_that_is_not_there(self, s3: dict[str, Any]) -> None:
        with pytest.raises(SourceError, match="source s3://nobody/x: not found"):
            files("s3://nobody/x", storage_options=s3)

    def test_a_server_that_is_not_there_is_one_line(self) -> None:
        options = {
            "key": "a",
            "secret": "hush",
            "endpoint_url": "http://127.0.0.1:9",
            "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
        }
        with pytest.raises(SourceOutage, match="source s3://b/x: cannot be read") as caught:
            files("s3://b/x", storage_options=options)
        assert caught.value.exit_code == 1  # no mistake of the user's, as far as one can tell
        assert "\n" not in str(caught.value)
        assert "hush" not in str(caught.value)

    def test_a_manifest_beside_its_files(self, s3: dict[str, Any]) -> None:
        fs = fsspec.filesystem("s3", **s3)
        rows = "uri,start,end,speaker\nbeta/mp3_44k.mp3,0.5,1.5,007\nalpha/gone.wav,,,008\n"
        fs.pipe_file("corpus/speech/clips.csv", rows.encode())
        source = manifest("s3://corpus/speech/clips.csv", storage_options=s3)
        items = list(source.items())
        assert [item.uri for item in items] == [
            "s3://corpus/speech/beta/mp3_44k.mp3",
            "s3://corpus/speech/alpha/gone.wav",
        ]
        assert (items[0].start_s, items[0].end_s, items[0].seconds) == (0.5, 1.5, 1.0)
        assert items[0].etag is not None
        assert [item.extra for item in items] == [{"speaker": "007"}, {"speaker": "008"}]
        found = contents(source, items)
        assert found[0] == (SPEECH / "beta/mp3_44k.mp3").read_bytes()
        assert isinstance(found[1], UnreadableError)

    def test_a_local_manifest_of_remote_files(self, s3: dict[str, Any], tmp_path: Path) -> None:
        rows = f"uri\ns3://corpus/speech/{SPEECH_IDS[0]}\n{SPEECH / SPEECH_IDS[1]}\n"
        (tmp_path / "m.csv").write_text(rows)
        refused = manifest(tmp_path / "m.csv", storage_options=s3)
        with pytest.raises(
            SourceError, match=r"2 rows do so; .* source\.allow: \[/.*, s3://corpus/"
        ):
            list(refused.items())
        allow = ["s3://corpus/", str(SPEECH)]
        source = manifest(tmp_path / "m.csv", storage_options=s3, allow=allow)
        items = list(source.items())
        assert contents(source, items) == [(SPEECH / n).read_bytes() for n in SPEECH_IDS[:2]]
