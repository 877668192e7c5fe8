"""Tables as corpora ship them: folders beside the table, packed text, blank rows, pandas' index."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earmill.pipeline.common.errors import OutsideError, SourceError
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.sources import Item
from earmill.pipeline.sources.tables import read_table
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.audio_factory import clip
from tests.pipeline.only_plan import only_plan
from tests.pipeline.source_helpers import contents, ids, manifest

CLIPS = {name: clip("wav", 0.2, seed=seed) for seed, name in enumerate(("a.wav", "b.wav", "c.wav"))}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """`meta/a.wav`, `meta/clips/b.wav` and `audio/c.wav`; tables are written to `meta`."""
    for folder, name in (("meta", "a.wav"), ("meta/clips", "b.wav"), ("audio", "c.wav")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(CLIPS[name])
    return tmp_path / "meta"


def spec(table: Path, audio: Mapping[str, Any] | None = None, **options: Any) -> JobSpec:
    source = {"kind": "manifest", "uri": str(table), **options}
    job = {"source": source, "extract": [{"model": "m"}], "output": {"uri": "o"}}
    return JobSpec.load(job | {"audio": dict(audio or {})})


def planned(table: Path, **options: Any) -> Plan:
    job = spec(table, **options)
    return make_plan(planned_source(job), job)


class TestPrefix:
    def test_common_voice(self, corpus: Path) -> None:
        (corpus / "train.tsv").write_text('client_id\tpath\tsentence\nx\tb.wav\tHe said "hi\n')
        source = manifest(corpus / "train.tsv", columns={"uri": "path"}, prefix="clips/")
        (item,) = source.items()
        assert (item.row_id, item.uri) == ("b.wav", str(corpus / "clips/b.wav"))
        assert contents(source, [item]) == [CLIPS["b.wav"]]

    @pytest.mark.parametrize("prefix", ["../audio/", "../audio", "./../audio/."])
    def test_esc_50(self, corpus: Path, prefix: str) -> None:
        (corpus / "esc50.csv").write_text("filename,fold\nc.wav,1\n")
        source = manifest(corpus / "esc50.csv", columns={"uri": "filename"}, prefix=prefix)
        assert contents(source, list(source.items())) == [CLIPS["c.wav"]]

    def test_an_absolute_one(self, corpus: Path) -> None:
        (corpus / "m.csv").write_text("uri\nc.wav\n")
        for prefix in (f"{corpus.parent}/audio", f"file://{corpus.parent}/audio"):
            source = manifest(corpus / "m.csv", prefix=prefix)
            assert contents(source, list(source.items())) == [CLIPS["c.wav"]]

    def test_the_table_does_not_leave_the_folder_that_the_job_names(self, corpus: Path) -> None:
        """`../audio` of the job is trusted, `../` of the table is not."""
        (corpus / "m.csv").write_text("uri\nc.wav\n../meta/a.wav\n")
        with pytest.raises(SourceError, match=r"row 2: .*meta/a\.wav: lies outside"):
            ids(manifest(corpus / "m.csv", prefix="../audio"))
        source = manifest(corpus / "m.csv", prefix="../audio")
        (found,) = contents(source, [Item("x", str(corpus.parent / "secret.wav"))])
        assert isinstance(found, OutsideError)

    def test_absolute_paths_of_the_table_are_what_they_were(self, corpus: Path) -> None:
        (corpus / "m.csv").write_text(f"uri\n{corpus}/a.wav\nc.wav\n")
        source = manifest(corpus / "m.csv", prefix="../audio")
        assert contents(source, list(source.items())) == [CLIPS["a.wav"], CLIPS["c.wav"]]

    def test_a_bucket_in_front_of_a_table_here(self, corpus: Path) -> None:
        (corpus / "m.csv").write_text("uri\nsub/c.wav\n")
        options = {"key": "k", "secret": "hush"}
        source = manifest(corpus / "m.csv", prefix="s3://bucket/a::b/", storage_options=options)
        uri = "s3://bucket/a::b/sub/c.wav"
        assert source._inside.options(uri) == options
        with pytest.raises(OutsideError):
            source._inside.check("s3://bucket/other.wav")

    def test_a_job_without_one_has_the_hash_it_had(self, corpus: Path) -> None:
        without = spec(corpus / "m.csv")
        assert "prefix" not in without.canonical()["source"]
        assert spec(corpus / "m.csv", prefix="clips").sha256() != without.sha256()


def csv_zst(text: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(text.encode())
    return bytes(sink.getvalue())


TEXT = "uri,n\na.wav,1\n"
LINES = json.dumps({"uri": "a.wav", "n": 1}) + "\n"
AS_SHIPPED = {
    "m.csv.gz": gzip.compress(TEXT.encode()),
    "m.CSV.GZ": gzip.compress(TEXT.encode()),
    "two members.csv.gz": gzip.compress(b"uri,n\n") + gzip.compress(b"a.wav,1\n"),
    "m.tsv.bz2": bz2.compress(TEXT.replace(",", "\t").encode()),
    "m.csv.zst": csv_zst(TEXT),
    "m.jsonl.gz": gzip.compress(LINES.encode()),
    "m.json.zst": csv_zst(LINES),
    "m.ndjson": LINES.encode(),
    "list.json": f"[{LINES}]".encode(),
    "indented.json": json.dumps([{"uri": "a.wav", "n": 1}], indent=2).encode(),
    "mark.csv": b"\xef\xbb\xbf" + TEXT.encode(),
    "mark in quotes.csv": b'\xef\xbb\xbf"uri","n"\r\n"a.wav","1"\r\n',
    "utf-16.csv": TEXT.encode("utf-16"),
    "header with blanks.csv": b"uri , n \na.wav,1\n",
    "cells with blanks.csv": b"uri, n\n a.wav ,1\n",
    "old mac.csv": TEXT.replace("\n", "\r").encode(),
    "commas.tsv": TEXT.encode(),
    "tabs.csv": TEXT.replace(",", "\t").encode(),
    "semicolons.csv": TEXT.replace(",", ";").encode(),
    "longer rows.csv": b"uri,n\na.wav,1,\n",
    "blank columns.csv": b"uri,,n,\na.wav,,1,\n",
}


@pytest.mark.parametrize("name", AS_SHIPPED)
def test_a_table_as_it_is_shipped(name: str, corpus: Path) -> None:
    (corpus / name).write_bytes(AS_SHIPPED[name])
    source = manifest(corpus / name)
    (item,) = source.items()
    assert item.uri == str(corpus / "a.wav") and item.extra == {"n": 1}
    assert contents(source, [item]) == [CLIPS["a.wav"]]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("cut.csv.gz", AS_SHIPPED["m.csv.gz"][:-9], "compressed with gzip: Truncated"),
        ("cut.csv.zst", AS_SHIPPED["m.csv.zst"][:-1], "compressed with zstd: Truncated"),
        ("text.csv.gz", TEXT.encode(), "expected text compressed with gzip"),
        ("m.parquet.gz", b"", r"expected a table that ends in .*, got '\.gz'"),
        ("m.xls", b"", r"expected a table that ends in .*\.zst, got '\.xls'"),
        (
            "latin-1.csv",
            "uri,n\na.wav,\xe9\n".encode("latin-1"),
            "got the byte 0xe9; save .* UTF-8",
        ),
        ("m.json", b"[1]", "entry 1: expected a JSON object, got int"),
        ("m.json", b"[{]", "the list is not JSON"),
        ("short.csv", b"uri,n\na.wav\n", "csv row 1: expected 2 cells, got 1"),
        ("lost.csv", b"uri,n\na.wav,1\n,2\n", "row 2: expected a path or URI in 'uri', got ''"),
    ],
)
def test_what_cannot_be_read_is_told(
    name: str, content: bytes, expected: str, corpus: Path
) -> None:
    (corpus / name).write_bytes(content)
    with pytest.raises(SourceError, match=expected) as caught:
        ids(manifest(corpus / name))
    assert "\n" not in str(caught.value)


def test_packed_text_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("earmill.pipeline.sources.tables.MOST_TEXT_BYTES", 1000)
    with pytest.raises(ValueError, match="expected at most 1,000 bytes of text, got more"):
        read_table("m.csv.gz", gzip.compress(b"uri\n" + b"a.wav\n" * 1000), set())


BLANK = {
    "cells.csv": (b"uri,n\na.wav,1\n,\nclips/b.wav,2\n", 1),
    "lines.csv": (b"uri,n\na.wav,1\n\n   \n , \nclips/b.wav,2\n\n\n", 3),
    "index of pandas.csv": (b",uri,n\n0,a.wav,1.0\n1,,\n2,clips/b.wav,2.0\n", 1),
    "tabs.tsv": (b"uri\tn\na.wav\t1\n\t\nclips/b.wav\t2\n", 1),
    "lines.jsonl": (
        b'{"uri": "a.wav", "n": 1}\n\n{}\n{"uri": null}\n{"uri": "clips/b.wav", "n": 2}\n\n',
        3,
    ),
}


@pytest.mark.parametrize("name", BLANK)
def test_blank_rows_are_counted_and_no_rows(name: str, corpus: Path) -> None:
    content, blank = BLANK[name]
    (corpus / name).write_bytes(content)
    plan = planned(corpus / name)
    items = list(plan.items())
    assert [item.row_id for item in items] == ["a.wav", "clips/b.wav"]
    assert [item.extra["n"] for item in items] == [1, 2]
    assert [item.position for item in items] == [0, 1]
    assert plan.skipped == {"blank row": blank}
    assert f"{blank} blank row{'s' if blank > 1 else ''} skipped" in plan.notes
    source = manifest(corpus / name)
    assert contents(source, items) == [CLIPS["a.wav"], CLIPS["b.wav"]]


def test_blank_rows_of_parquet(corpus: Path) -> None:
    table = pa.table({"uri": ["a.wav", None, "clips/b.wav"], "n": [1, None, 2]})
    pq.write_table(table, corpus / "m.parquet")
    plan = planned(corpus / "m.parquet")
    assert [item.extra for item in plan.items()] == [{"n": 1}, {"n": 2}]
    assert plan.skipped == {"blank row": 1}


def test_a_table_of_blank_rows_has_none(corpus: Path) -> None:
    (corpus / "m.csv").write_text("uri,n\n,\n,\n")
    with pytest.raises(SourceError, match="the table has no rows"):
        planned(corpus / "m.csv")


@pytest.mark.parametrize("header", ["", "Unnamed: 0", '""', " "])
@pytest.mark.parametrize("numbers", [("0", "1"), ("17", "4")])
def test_the_index_of_pandas_is_no_column(
    header: str, numbers: tuple[str, str], corpus: Path
) -> None:
    rows = f"{numbers[0]},a.wav,x\n{numbers[1]},clips/b.wav,y\n"
    (corpus / "m.csv").write_text(f"{header},uri,text\n{rows}")
    plan = planned(corpus / "m.csv")
    assert [item.extra for item in plan.items()] == [{"text": "x"}, {"text": "y"}]
    assert plan.notes == ["columns not carried through: Unnamed: 0 (index of pandas)"]


def test_a_column_without_a_name_that_says_something_is_kept(corpus: Path) -> None:
    (corpus / "m.csv").write_text(",uri\n007,a.wav\nspk,clips/b.wav\n")
    plan = planned(corpus / "m.csv")
    assert [item.extra for item in plan.items()] == [{"Unnamed: 0": "007"}, {"Unnamed: 0": "spk"}]
    mapped = planned(corpus / "m.csv", columns={"uri": "uri", "id": "Unnamed: 0"})
    assert [item.row_id for item in mapped.items()] == ["007", "spk"]


def test_the_index_of_pandas_in_parquet(corpus: Path) -> None:
    table = pa.table({"uri": ["a.wav"], "n": [1.5], "__index_level_0__": [5]})
    pq.write_table(table, corpus / "m.parquet")
    (item,) = planned(corpus / "m.parquet").items()
    assert item.extra == {"n": 1.5}


class TestMissing:
    def test_the_plan_says_how_many_files_are_not_there(self, corpus: Path) -> None:
        (corpus / "m.csv").write_text("uri,duration\na.wav,40\nx.wav,40\nclips/y.wav,40\n")
        plan = planned(corpus / "m.csv", columns={"uri": "uri", "duration": "duration"})
        expected = f"2 of 3 rows name a file that cannot be found, first {corpus}/x.wav: they will"
        assert [note for note in plan.notes if note.startswith(expected)] == plan.notes
        assert "source.prefix" in plan.notes[0]
        layout = Layout.open(str(corpus / "out"))
        plan.write(layout)
        assert only_plan(layout) == plan

    def test_of_spans_too(self, corpus: Path) -> None:
        (corpus / "m.csv").write_text("uri,start,end\na.wav,0,0.1\nx.wav,0,1\nx.wav,1,2\n")
        plan = planned(corpus / "m.csv")
        assert plan.missing == 2 and plan.notes[-1].startswith("2 of 3 rows")
        cut = planned(corpus / "m.csv", audio={"spans": {"seconds": 20}})
        assert cut.missing == 2 and cut.notes[-1].startswith("2 of 3 rows")

    def test_all_there_is_no_note(self, corpus: Path) -> None:
        (corpus / "m.csv").write_text("uri\na.wav\n")
        assert planned(corpus / "m.csv").notes == []


def test_separators_of_windows(corpus: Path) -> None:
    """Only where no file is called as the table says."""
    (corpus / "m.csv").write_text("uri\nclips\\b.wav\n.\\a.wav\n")
    source = manifest(corpus / "m.csv")
    items = list(source.items())
    assert contents(source, items) == [CLIPS["b.wav"], CLIPS["a.wav"]]
    (corpus / "clips\\b.wav").write_bytes(CLIPS["c.wav"])
    again = manifest(corpus / "m.csv")
    assert contents(again, list(again.items()))[0] == CLIPS["c.wav"]


@pytest.mark.parametrize("cell", ["..\\audio\\c.wav", " /etc/hostname", " ../audio/c.wav"])
def test_no_reading_of_a_cell_leads_out(cell: str, corpus: Path) -> None:
    (corpus / "m.csv").write_text(f"uri,n\n{cell},1\n")
    with pytest.raises(SourceError, match=r"row 1: .* lies outside of what the source may read"):
        ids(manifest(corpus / "m.csv"))
