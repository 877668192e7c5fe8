"""Where a Hugging Face dataset may be and what its cells may name; what is not there is told."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet
import pytest

from earmill.pipeline.common.errors import (
    AbsentError,
    OutsideError,
    SourceError,
    SourceOutage,
    UnreadableError,
)
from earmill.pipeline.sources import base as sources_base
from tests.pipeline.audio_factory import clip
from tests.pipeline.hf_data import (
    BOTH,
    clips,
    contents,
    private_cache,  # noqa: F401
    source,
    table,
    write_parquet,
)
from tests.pipeline.outages import Clock
from tests.pipeline.outputs import s3_server


@contextmanager
def counting_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub on this machine that knows no dataset; the paths it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for module in (datasets.config, huggingface_hub.constants):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


class TestRefusals:
    @BOTH
    def test_columns_that_are_not_there(self, streaming: bool, tmp_path: Path) -> None:
        folder = write_parquet(tmp_path / "parquet", table())
        cases = {
            "audio_column": ("audoi", r"no column 'audoi'; did you mean 'audio'\? \(columns: aud"),
            "id_column": ("keyy", r"no column 'keyy'; did you mean 'key'\?"),
            "duration_column": ("zzz", r"no column 'zzz' \(columns: "),
        }
        for option, (name, expected) in cases.items():
            with pytest.raises(SourceError, match=expected):
                source(folder, streaming=streaming, **{option: name})

    @BOTH
    def test_places_that_are_not_there(self, streaming: bool, tmp_path: Path) -> None:
        for uri in (tmp_path / "no" / "folder", tmp_path / "*.parquet"):
            with pytest.raises(SourceError, match="not found"):
                source(uri, streaming=streaming)
        # The hub cannot be asked here; that, too, is one clear line.
        with pytest.raises(SourceOutage, match=r"^source no-one/nothing: ") as caught:
            source("no-one/nothing", streaming=streaming)
        assert "\n" not in str(caught.value)

    def test_a_missing_folder_below_an_existing_one_is_no_hub_id(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "data").mkdir()
        monkeypatch.chdir(tmp_path)
        with counting_hub(monkeypatch) as asked:
            for uri in ("data/speech", "./speech", "../nowhere", "data/speech/", "a/b/c"):
                with pytest.raises(SourceError, match="not found"):
                    source(uri)
        assert asked == []

    @pytest.mark.parametrize("uri", ["speech", "corpus/speech"])
    def test_what_may_be_a_hub_id_costs_one_request(
        self, uri: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = "no such file or folder in .*, and no dataset of that name on the hub"
        with counting_hub(monkeypatch) as asked, pytest.raises(SourceError, match=expected):
            source(uri)
        # The client may ask for news of its own beside it.
        assert [path for path in asked if uri in path] == [f"/api/datasets/{uri}"]

    def test_a_hub_out_of_reach_is_told_after_one_try(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with counting_hub(monkeypatch):
            pass  # the port is closed again
        with pytest.raises(SourceError, match="no such file or folder"):
            source("corpus/speech")

    @BOTH
    def test_no_rows(self, streaming: bool, tmp_path: Path) -> None:
        table([]).to_parquet(str(tmp_path / "a.parquet"))
        with pytest.raises(SourceError, match=r"the split has no rows|corresponds to no data"):
            list(source(tmp_path / "a.parquet", streaming=streaming).items())

    @BOTH
    def test_an_id_that_is_null(self, streaming: bool, tmp_path: Path) -> None:
        data = pa.table({"audio": [clip("wav")] * 2, "key": ["a", None]})
        pa.parquet.write_table(data, tmp_path / "a.parquet")
        with pytest.raises(SourceError, match="row 1 has no value in id_column 'key'"):
            list(source(tmp_path / "a.parquet", id_column="key", streaming=streaming).items())


def test_description_holds_no_credentials(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "parquet", table())
    described = source(folder, storage_options={"token": "hush"}).describe()
    assert "hush" not in json.dumps(described)
    assert described["uri"] == str(folder)


@BOTH
def test_parquet_in_a_bucket(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `datasets` counts any remote file as the hub when it is told to stay offline.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with s3_server("rows") as options:
        fs = fsspec.filesystem("s3", **options)
        folder = tmp_path / "parquet"
        uri = "s3://rows/set" if streaming else "s3://rows/set/*.parquet"
        # The second time the files are replaced: nothing may come from a cache of the first.
        for data in (clips(), clips()[::-1]):
            write_parquet(folder, table(data))
            fs.put(f"{folder}/", "rows/set/", recursive=True)
            opened = source(uri, streaming=streaming, storage_options=options)
            items = list(opened.items())
            assert items[0].uri.startswith("hf:s3://rows/set")
            assert contents(opened, items) == data


OUTSIDE = [
    "/etc/hostname",
    "file:///etc/hostname",
    "../secret.wav",
    "http://127.0.0.1/x",
    "s3://b/x",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_cell_cannot_lead_out_of_the_dataset(path: str, tmp_path: Path) -> None:
    cells = [{"bytes": None, "path": path}]
    folder = tmp_path / "set"
    folder.mkdir()
    columns = {"audio": cells, "seconds": [1.0]}
    pa.parquet.write_table(pa.table(columns), folder / "d.parquet")
    with pytest.raises(SourceError, match=r"row 0: .*set source\.allow: \["):
        list(source(folder / "d.parquet").items())
    # Where the plan need not look into the cells, the worker does.
    planned = source(folder / "d.parquet", duration_column="seconds")
    found = contents(planned, list(planned.items()))
    assert isinstance(found[0], OutsideError)


def test_a_cell_names_files_beside_the_dataset_or_allowed_ones(tmp_path: Path) -> None:
    folder, other = tmp_path / "set", tmp_path / "other"
    for name in (folder, other):
        name.mkdir()
        (name / "a.wav").write_bytes(clip("wav", 0.2))
    cells = [
        {"bytes": None, "path": p} for p in ("a.wav", str(folder / "a.wav"), str(other / "a.wav"))
    ]
    pa.parquet.write_table(pa.table({"audio": cells}), folder / "d.parquet")
    opened = source(folder / "d.parquet", allow=[str(other)])
    items = list(opened.items())
    assert [item.seconds for item in items] == pytest.approx([0.2] * 3, abs=1e-4)
    assert contents(opened, items) == [clip("wav", 0.2)] * 3


@BOTH
def test_files_of_a_dataset_that_are_away_are_no_property_of_a_row(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(sources_base, "FETCH_RETRIES", clock.retries())
    table().save_to_disk(tmp_path / "saved")  # streamed row by row
    opened = source(tmp_path / "saved", streaming=streaming)
    items = list(opened.items())
    row_at = opened._row_at

    def flaky(place: Any) -> Any:
        if clock() < 20.0:
            raise RuntimeError("cannot read") from ConnectionResetError("peer")
        return row_at(place)

    monkeypatch.setattr(opened, "_row_at", flaky)
    assert all(isinstance(data, bytes) for data in contents(opened, items))
    for error in (OSError(errno.EIO, "bad sector"), FileNotFoundError("the table is gone")):

        def broken(place: Any, error: OSError = error) -> Any:
            raise error

        monkeypatch.setattr(opened, "_row_at", broken)
        with pytest.raises(SourceOutage, match="row=0: cannot be read"):
            contents(opened, items)

    def damaged(place: Any) -> Any:
        raise OSError("Corrupt snappy compressed data")

    monkeypatch.setattr(opened, "_row_at", damaged)
    found = contents(opened, items[:1])
    assert isinstance(found[0], UnreadableError) and not isinstance(found[0], AbsentError)
