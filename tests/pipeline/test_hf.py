"""Hugging Face datasets: every place one may be, map-style and streaming, read as bytes."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator, Sequence
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
from datasets import Audio, Dataset, DatasetDict

from earmill.pipeline.audio.decode import decode
from earmill.pipeline.common.errors import (
    AbsentError,
    OutsideError,
    RowError,
    SourceError,
    SourceOutage,
    UnreadableError,
)
from earmill.pipeline.planning.plan import make_plan
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources import fetch as fetch_module
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.source import HfSpec
from tests.pipeline.audio_factory import FORMATS, clip, damaged_corpus
from tests.pipeline.outages import Clock
from tests.pipeline.outputs import s3_server

SPEECH = Path(__file__).parents[1] / "data" / "speech"
ROWS = 10
KINDS = list(FORMATS)
BOTH = pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepared datasets go into the test's own folder; no progress bars in the output."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield
    if shown:
        datasets.enable_progress_bars()


def clips(n: int = ROWS) -> list[bytes]:
    return [clip(KINDS[i % len(KINDS)], 0.2 + 0.05 * i, seed=i) for i in range(n)]


def table(data: Sequence[bytes | None] | None = None) -> Dataset:
    """A dataset with audio bytes, scalars of every type, and a column that is no scalar."""
    cells = clips() if data is None else data
    n = len(cells)
    columns = {
        "audio": [{"bytes": cell, "path": f"{i}.x"} for i, cell in enumerate(cells)],
        "text": [f"sentence {i}" for i in range(n)],
        "key": [f"utt-{i:03d}" for i in range(n)],
        "n": list(range(n)),
        "snr": [0.5 * i for i in range(n)],
        "clean": [i % 2 == 0 for i in range(n)],
        "embedding": [[1.0, 2.0]] * n,
    }
    return Dataset.from_dict(columns).cast_column("audio", Audio(decode=False))


def write_parquet(folder: Path, dataset: Dataset, files: int = 3, split: str = "train") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        part = dataset.shard(files, index, contiguous=True)
        part.to_parquet(str(folder / f"{split}-{index:05d}-of-{files:05d}.parquet"))
    return folder


def source(uri: Path | str, **options: Any) -> Any:
    return open_source(HfSpec(kind="hf", uri=str(uri), **options))


def contents(opened: Any, items: Sequence[Item]) -> list[bytes | RowError]:
    found: list[bytes | RowError] = []
    for item, (fetched, stream) in zip(items, opened.fetch(items), strict=True):
        assert fetched is item
        if isinstance(stream, RowError):
            found.append(stream)
        else:
            with stream:
                found.append(stream.read())
    return found


def kinds_of_uri(tmp_path: Path) -> dict[str, Path]:
    """The same rows in every place a dataset may be."""
    dataset = table()
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": dataset}).save_to_disk(tmp_path / "saved_dict")
    folder = write_parquet(tmp_path / "parquet", dataset)
    dataset.to_parquet(str(tmp_path / "one.parquet"))
    return {
        "saved": tmp_path / "saved",
        "saved dict": tmp_path / "saved_dict",
        "parquet folder": folder,
        "parquet glob": folder / "*.parquet",
        "parquet file": tmp_path / "one.parquet",
    }


@BOTH
@pytest.mark.parametrize(
    "kind", ["saved", "saved dict", "parquet folder", "parquet glob", "parquet file"]
)
def test_every_place_gives_the_same_rows(kind: str, streaming: bool, tmp_path: Path) -> None:
    opened = source(kinds_of_uri(tmp_path)[kind], streaming=streaming)
    items = list(opened.items())
    assert [item.row_id for item in items] == [f"{i:09d}" for i in range(ROWS)]
    assert [item.position for item in items] == list(range(ROWS))
    assert len({item.uri for item in items}) == ROWS
    data = clips()
    assert [item.size for item in items] == [len(cell) for cell in data]
    seconds = [0.2 + 0.05 * i for i in range(ROWS)]
    assert [item.seconds for item in items] == pytest.approx(seconds, abs=1e-4)
    for i, item in enumerate(items):
        # Every column, in its type.
        expected = {"text": f"sentence {i}", "key": f"utt-{i:03d}", "n": i, "snr": 0.5 * i}
        assert item.extra == expected | {"clean": i % 2 == 0, "embedding": [1.0, 2.0]}
    assert contents(opened, items) == data


@BOTH
def test_rows_in_any_order_and_from_a_fresh_process(streaming: bool, tmp_path: Path) -> None:
    """A worker opens the source without listing it, fetches a shard, then an earlier one."""
    folder = write_parquet(tmp_path / "parquet", table())
    items = list(source(folder, streaming=streaming).items())
    data = clips()
    worker = source(folder, streaming=streaming)
    for wanted in ([5, 6, 9], [0, 1], [8], [8], [2, 7], []):
        assert contents(worker, [items[i] for i in wanted]) == [data[i] for i in wanted]


def test_two_threads_keep_their_own_place_in_a_stream(tmp_path: Path) -> None:
    opened = source(write_parquet(tmp_path / "parquet", table()), streaming=True)
    items, data = list(opened.items()), clips()
    results: dict[int, list[bytes | RowError]] = {}

    def run(part: int) -> None:
        results[part] = contents(opened, items[part::2])

    threads = [threading.Thread(target=run, args=(part,)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {part: data[part::2] for part in (0, 1)}


@BOTH
def test_real_speech_and_damaged_clips(streaming: bool, tmp_path: Path) -> None:
    speech = sorted(SPEECH.glob("*/*.*"))
    damaged = damaged_corpus()
    data = [path.read_bytes() for path in speech] + [case.data for case in damaged]
    opened = source(write_parquet(tmp_path / "pq", table(data), files=2), streaming=streaming)
    items = list(opened.items())
    outcomes: list[str] = []
    for item, stream in opened.fetch(items):
        with stream:
            try:
                outcomes.append(decode(stream, uri=item.uri).facts.container)
            except RowError as error:
                outcomes.append(error.error_class)
    assert outcomes[: len(speech)] == ["FLAC", "OGG", "WAV", "FLAC", "MP3", "OGG"]
    assert outcomes[len(speech) :] == [case.error_class for case in damaged]


@BOTH
def test_bytes_may_be_missing(streaming: bool, tmp_path: Path) -> None:
    """Null bytes with a path: open the path. No path, or nothing there: one bad row."""
    (tmp_path / "good.wav").write_bytes(clip("wav"))
    cells = [
        {"bytes": None, "path": str(tmp_path / "good.wav")},
        {"bytes": None, "path": str(tmp_path / "gone.wav")},
        {"bytes": None, "path": None},
        None,
        {"bytes": clip("flac"), "path": None},
        {"bytes": b"", "path": "empty.wav"},
    ]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pa.parquet.write_table(pa.table({"audio": pa.array(cells, kind)}), tmp_path / "a.parquet")
    opened = source(tmp_path / "a.parquet", streaming=streaming)
    items = list(opened.items())
    assert [item.seconds is None for item in items] == [False, True, True, True, False, False]
    found = contents(opened, items)
    assert (found[0], found[4], found[5]) == (clip("wav"), clip("flac"), b"")
    messages = [str(entry) for entry in found if isinstance(entry, UnreadableError)]
    assert len(messages) == 3
    assert "gone.wav: cannot be fetched: FileNotFoundError" in messages[0]
    assert "neither audio bytes nor a path" in messages[1]
    assert all(message.startswith("hf:") and "\n" not in message for message in messages)


@pytest.mark.parametrize("column", ["raw", "path"])
@BOTH
def test_audio_without_the_audio_type(streaming: bool, column: str, tmp_path: Path) -> None:
    """Plain binary and plain paths count as audio when they are named."""
    (tmp_path / "x.wav").write_bytes(clip("wav"))
    plain = pa.table({"raw": [clip("wav")], "path": [str(tmp_path / "x.wav")], "n": [1]})
    pa.parquet.write_table(plain, tmp_path / "a.parquet")
    opened = source(tmp_path / "a.parquet", audio_column=column, streaming=streaming)
    items = list(opened.items())
    assert items[0].seconds == pytest.approx(1.0)
    assert set(items[0].extra) == ({"n", "path"} if column == "raw" else {"n"})
    assert contents(opened, items) == [clip("wav")]


@BOTH
def test_id_column(streaming: bool, tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "parquet", table())
    opened = source(folder, id_column="key", streaming=streaming)
    items = list(opened.items())
    assert [item.row_id for item in items] == [f"utt-{i:03d}" for i in range(ROWS)]
    assert "key" not in items[0].extra
    # Another row at that place means the dataset moved on.
    moved = [Item("utt-007", items[2].uri, size=items[2].size)]
    found = contents(opened, moved)
    assert "changed since it was planned: row id is 'utt-002'" in str(found[0])


@BOTH
def test_a_row_with_other_bytes_than_planned(streaming: bool, tmp_path: Path) -> None:
    opened = source(write_parquet(tmp_path / "parquet", table()), streaming=streaming)
    item = next(opened.items())
    found = contents(opened, [Item(item.row_id, item.uri, size=5), item])
    assert "changed since it was planned: expected 5 bytes" in str(found[0])
    assert found[1] == clips()[0]


@BOTH
def test_a_row_behind_the_end_costs_only_itself(streaming: bool, tmp_path: Path) -> None:
    opened = source(write_parquet(tmp_path / "parquet", table()), streaming=streaming)
    items = list(opened.items())
    beyond = Item("x", items[-1].uri.rsplit("=", 1)[0] + "=999")
    broken = Item("y", "hf:somewhere")
    found = contents(opened, [items[0], beyond, items[-1], broken, items[1]])
    data = clips()
    assert [found[0], found[2], found[4]] == [data[0], data[-1], data[1]]
    assert isinstance(found[1], UnreadableError)
    assert "cannot be read: IndexError" in str(found[1])
    assert "expected a uri ending in #row=N" in str(found[3])


@BOTH
def test_a_duration_column_spares_the_headers(streaming: bool, tmp_path: Path) -> None:
    opened = source(
        write_parquet(tmp_path / "parquet", table()), duration_column="snr", streaming=streaming
    )
    items = list(opened.items())
    assert [item.seconds for item in items] == [0.5 * i for i in range(ROWS)]
    assert {item.size for item in items} == {None}  # the audio was not touched
    assert contents(opened, items) == clips()


@BOTH
def test_splits(streaming: bool, tmp_path: Path) -> None:
    data = clips()
    folder = write_parquet(tmp_path / "repo" / "data", table(data[:6]), files=1)
    write_parquet(folder, table(data[6:]), files=1, split="test")
    saved = tmp_path / "saved"
    DatasetDict({"train": table(data[:6]), "test": table(data[6:])}).save_to_disk(saved)
    for uri in (tmp_path / "repo", saved):
        opened = source(uri, split="test", streaming=streaming)
        items = list(opened.items())
        assert contents(opened, items) == data[6:]
        assert "split=test" in items[0].uri
        with pytest.raises(SourceError, match=r"set source\.split to one of t\w+, t\w+"):
            source(uri, streaming=streaming)
        with pytest.raises(SourceError, match="tset"):
            source(uri, split="tset", streaming=streaming)


@BOTH
def test_a_local_copy_of_a_hub_repository_with_configurations(
    streaming: bool, tmp_path: Path
) -> None:
    """The same loading path as a hub id: the card's configurations decide what is read."""
    data = clips(4)
    for index, name in enumerate(("en", "de")):
        write_parquet(tmp_path / name, table(data[2 * index : 2 * index + 2]), files=1)
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in ("en", "de")
    )
    (tmp_path / "README.md").write_text(card + "---\n# corpus\n")
    opened = source(tmp_path, config="de", split="train", streaming=streaming)
    items = list(opened.items())
    assert contents(opened, items) == data[2:]
    assert "config=de" in items[0].uri
    with pytest.raises(SourceError, match=r"cannot be read: .*[Cc]onfig"):
        source(tmp_path, split="train", streaming=streaming)


def test_plans_of_both_modes_hold_the_same_rows(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "parquet", table())
    sections = {"extract": [{"model": "dau1997"}], "output": {"uri": "o", "shard_seconds": 1.0}}
    shards = []
    for streaming in (False, True):
        where = {"kind": "hf", "uri": str(folder), "streaming": streaming}
        spec = JobSpec.load({"source": where, **sections})
        again = [make_plan(open_source(spec.source), spec) for _ in range(2)]
        assert again[0] == again[1]
        shards.append([[item.row_id for item in shard.items] for shard in again[0].shards])
    assert shards[0] == shards[1]
    assert len(shards[0]) > 2


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
        del options["skip_instance_cache"]  # a session takes a second to build
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
    monkeypatch.setattr(fetch_module, "RETRIES", clock.retries())
    opened = source(write_parquet(tmp_path / "parquet", table()), streaming=streaming)
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
