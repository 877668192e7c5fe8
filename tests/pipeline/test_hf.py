"""Rows of Hugging Face datasets: every kind, map-style and streaming, read as bytes."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import DatasetDict, IterableDataset, load_dataset_builder

from earmill.pipeline.common.errors import RowError, SourceError, UnreadableError
from earmill.pipeline.operations.open_job import compare
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources.base import listing
from earmill.pipeline.sources.hf import features_of
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.source import HfSpec
from tests.pipeline.audio_factory import clip, damaged_corpus
from tests.pipeline.hf_data import (
    BOTH,
    ROWS,
    clips,
    contents,
    private_cache,  # noqa: F401
    source,
    table,
    write_parquet,
)
from tests.pipeline.source_helpers import SPEECH_FILES
from tests.pipeline.whole_clips import decode


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
    seconds = [0.2 + 0.05 * i for i in range(ROWS)]
    if streaming and kind.startswith("parquet"):  # planned without reading
        assert all(item.estimated and item.size is None for item in items)
        assert [item.seconds for item in items] == pytest.approx(seconds, rel=5.0)
    else:
        assert [item.size for item in items] == [len(cell) for cell in data]
        assert [item.seconds for item in items] == pytest.approx(seconds, abs=1e-4)
        assert not any(item.estimated for item in items)
    for i, item in enumerate(items):
        # Every column, in its type.
        expected = {"text": f"sentence {i}", "key": f"utt-{i:03d}", "n": i, "snr": 0.5 * i}
        assert item.extra == expected | {"clean": i % 2 == 0, "embedding": [1.0, 2.0]}
    assert contents(opened, items) == data


@BOTH
@pytest.mark.parametrize("split", [None, "train"])
def test_data_files_are_resolved_once(
    split: str | None, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table().remove_columns("audio").to_json(str(tmp_path / "rows.jsonl"))
    made = []

    def counted(*arguments: object, **options: object) -> object:
        made.append(arguments)
        return load_dataset_builder(*arguments, **options)

    for module in (datasets, datasets.load):
        monkeypatch.setattr(module, "load_dataset_builder", counted)
    open_source(
        HfSpec(kind="hf", uri=str(tmp_path), audio_column="key", split=split, streaming=streaming)
    )
    assert len(made) == 1


def written(kind: str, folder: Path, seed: int, at_s: float) -> Path:
    """Two clips as a dataset of some kind. Another seed gives other audio of the same size."""
    data = [clip("wav", 0.2, seed=1), clip("wav", 0.2, seed=seed)]
    folder.mkdir(exist_ok=True)
    place = folder
    for number, content in enumerate(data if kind in ("folder", "paths") else ()):
        (folder / f"{number}.wav").write_bytes(content)
    if kind == "paths":
        place = folder / "rows.parquet"
        pa.parquet.write_table(pa.table({"audio": ["0.wav", "1.wav"]}), place)
        os.utime(place, (1e9, 1e9))
    elif kind == "parquet":
        place = folder / "rows.parquet"
        table(data).to_parquet(str(place))
    elif kind == "saved":
        place = folder / "saved"
        shutil.rmtree(place, ignore_errors=True)
        table(data).save_to_disk(place)
    for path in folder.rglob("*"):
        if path.suffix != ".parquet" or kind == "parquet":
            os.utime(path, (at_s, at_s))
    return place


@BOTH
@pytest.mark.parametrize("kind", ["parquet", "saved", "folder", "paths"])
def test_other_audio_of_the_same_size_is_a_change(
    kind: str, streaming: bool, tmp_path: Path
) -> None:
    """`extract --update` computes rows that differ from the plan."""
    place = written(kind, tmp_path / "data", seed=2, at_s=2e9)
    before = list(source(place, streaming=streaming).items())
    assert not compare(before, listing(source(place, streaming=streaming)))
    written(kind, tmp_path / "data", seed=3, at_s=2e9 + 60)
    found = compare(before, listing(source(place, streaming=streaming)))
    assert before[1].row_id in found.changed and not (found.added or found.removed)


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
    damaged = damaged_corpus()
    data = [path.read_bytes() for path in SPEECH_FILES] + [case.data for case in damaged]
    opened = source(write_parquet(tmp_path / "pq", table(data), files=2), streaming=streaming)
    items = list(opened.items())
    outcomes: list[str] = []
    for item, stream in opened.fetch(items):
        with stream:
            try:
                outcomes.append(decode(stream, uri=item.uri).facts.container)
            except RowError as error:
                outcomes.append(error.error_class)
    assert outcomes[: len(SPEECH_FILES)] == ["FLAC", "OGG", "WAV", "FLAC", "MP3", "OGG"]
    assert outcomes[len(SPEECH_FILES) :] == [case.error_class for case in damaged]


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
    if not streaming:
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
    # A stream's is that of its column, which holds a few bytes more.
    assert items[0].seconds == pytest.approx(1.0, rel=0.01)
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
    output = {"uri": "o", "shard_seconds": 1000.0, "shard_rows": 4}
    sections = {"extract": [{"model": "dau1997"}], "output": output}
    shards, ids = [], []
    for streaming in (False, True):
        where = {"kind": "hf", "uri": str(folder), "streaming": streaming}
        spec = JobSpec.load({"source": where, **sections})
        again = [make_plan(open_source(spec.source), spec) for _ in range(2)]
        assert again[0] == again[1]
        shards.append([len(shard.items) for shard in again[0].shards])
        ids.append([item.row_id for item in again[0].items()])
    assert ids[0] == ids[1]
    # A stream is cut between row groups, so that no two workers fetch the same one.
    assert shards == [[4, 4, 2], [4, 3, 3]]


def test_a_stream_without_a_schema_has_that_of_its_first_rows() -> None:
    rows = [{"id": f"row{k}", "audio": {"bytes": b"x", "path": None}} for k in range(9)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    assert stream.features is None
    assert set(features_of(HfSpec(kind="hf", uri="a/b", id_column="id"), stream)) == {"id", "audio"}
    with pytest.raises(SourceError, match=r"no column 'ids'.*columns: id, audio"):
        features_of(HfSpec(kind="hf", uri="a/b", id_column="ids"), stream)
