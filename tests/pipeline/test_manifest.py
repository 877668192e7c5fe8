"""Manifests: csv, jsonl and parquet say the same, and what is wrong with a table is named."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.errors import SourceError, UnreadableError
from pipeline.plan import make_plan
from pipeline.sources import open_source
from pipeline.sources.manifest import read_csv
from pipeline.sources.scalars import scalar, typed_column, unified_column
from pipeline.spec import JobSpec
from tests.pipeline.source_helpers import (
    contents,
    ids,
    manifest,
    write_corpus,
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


class TestManifest:
    def write_csv(self, path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path

    def write(self, kind: str, folder: Path, rows: Sequence[Mapping[str, object]]) -> Path:
        path = folder / f"clips.{kind}"
        if kind == "csv":
            return self.write_csv(path, rows)
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            pa.parquet.write_table(pa.Table.from_pylist(list(rows)), path)
        return path

    @pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
    def test_rows_spans_and_extra_columns(self, kind: str, corpus: Path) -> None:
        rows: list[dict[str, object]] = [
            {"uri": "b.wav", "id": "x1", "start": 0.05, "end": 0.15, "n": 3, "text": 'hé, "llo"'},
            {"uri": "deep/er/c.ogg", "id": "x2", "start": None, "end": None, "n": 4, "text": "b"},
            {
                "uri": str(corpus / "a.flac"),
                "id": None,
                "start": 0.1,
                "end": None,
                "n": 5,
                "text": "c",
            },
        ]
        source = manifest(self.write(kind, corpus, rows))
        items = list(source.items())
        assert [item.row_id for item in items] == ["x1", "x2", f"{corpus}/a.flac#t=0.1,"]
        assert [item.uri for item in items] == [
            str(corpus / name) for name in ("b.wav", "deep/er/c.ogg", "a.flac")
        ]
        assert [(i.start_s, i.end_s) for i in items] == [(0.05, 0.15), (None, None), (0.1, None)]
        assert [item.extra for item in items] == [
            {"n": 3, "text": 'hé, "llo"'},
            {"n": 4, "text": "b"},
            {"n": 5, "text": "c"},
        ]
        assert [item.seconds for item in items] == pytest.approx([0.1, 0.2, 0.1], abs=1e-3)
        assert items[0].size == (corpus / "b.wav").stat().st_size
        assert contents(source, items)[1] == (corpus / "deep/er/c.ogg").read_bytes()

    def test_only_uri_is_needed(self, corpus: Path) -> None:
        source = manifest(self.write_csv(corpus / "m.csv", [{"uri": "b.wav"}, {"uri": "a.flac"}]))
        assert ids(source) == ["b.wav", "a.flac"]  # the table's order

    def test_a_missing_file_is_one_bad_row(self, corpus: Path) -> None:
        rows = [{"uri": name} for name in ("b.wav", "gone.wav", "a.flac")]
        source = manifest(self.write_csv(corpus / "m.csv", rows))
        items = list(source.items())
        assert items[1].size is None
        found = contents(source, items)
        assert [isinstance(entry, bytes) for entry in found] == [True, False, True]
        assert isinstance(found[1], UnreadableError)
        assert found[1].stage == "fetch"
        assert "gone.wav: cannot be fetched: FileNotFoundError" in str(found[1])

    def test_spans_of_one_file_have_their_own_ids(self, corpus: Path) -> None:
        rows = [{"uri": "b.wav", "start": i / 1000, "end": 0.1} for i in range(3)]
        source = manifest(self.write_csv(corpus / "m.csv", rows))
        assert ids(source) == ["b.wav#t=0.0,0.1", "b.wav#t=0.001,0.1", "b.wav#t=0.002,0.1"]

    def test_rows_that_cannot_be_told_apart_stop_the_plan(self, corpus: Path) -> None:
        uri = self.write_csv(corpus / "m.csv", [{"uri": "b.wav"}, {"uri": "b.wav"}])
        job = {"source": {"kind": "manifest", "uri": str(uri)}, "extract": [{"model": "m"}]}
        spec = JobSpec.load(job | {"output": {"uri": "o"}})
        with pytest.raises(SourceError, match=r"occur more than once: 'b\.wav'"):
            make_plan(open_source(spec.source), spec)

    @pytest.mark.parametrize(
        ("name", "text", "expected"),
        [
            ("m.csv", "path\nb.wav\n", r"no column 'uri' \(found: path\)"),
            ("m.csv", "uri,start\nb.wav,soon\n", "row 1: expected seconds in 'start', got 'soon'"),
            ("m.csv", "uri,end\nb.wav,inf\n", "row 1: expected finite seconds in 'end'"),
            ("m.csv", "uri,x\nb.wav\n", "csv row 1: expected 2 cells, got 1"),
            ("m.csv", "uri,uri\na,b\n", "names a column twice"),
            ("m.csv", "uri,id\n,x\n", "row 1: expected a path or URI in 'uri', got ''"),
            ("m.csv", "uri\n", "the table has no rows"),
            ("m.csv", "", r"no column 'uri' \(found: none\)"),
            ("m.jsonl", '{"uri": "b.wav"}\n{"uri": \n', "line 2 is not JSON"),
            ("m.jsonl", "[1]\n", "line 1: expected a JSON object, got list"),
            ("m.parquet", "not parquet", "source .*m.parquet: "),
            ("m.xlsx", "x", r"expected a \.csv, \.jsonl or \.parquet table, got '\.xlsx'"),
        ],
    )
    def test_a_malformed_table(self, corpus: Path, name: str, text: str, expected: str) -> None:
        (corpus / name).write_text(text)
        with pytest.raises(SourceError, match=expected) as caught:
            ids(manifest(corpus / name))
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)

    def test_a_missing_table(self, corpus: Path) -> None:
        for uri in (corpus / "no.csv", corpus):
            with pytest.raises(SourceError, match="not found"):
                manifest(uri)


class TestScalars:
    def test_csv_text_that_only_looks_like_a_number_stays_text(self) -> None:
        assert typed_column(["0042", "7"]) == ["0042", "7"]
        assert typed_column(["1", "", "-3"]) == [1, None, -3]
        assert typed_column(["1", "2.5", "1e3"]) == [1.0, 2.5, 1000.0]
        assert typed_column(["true", "false", ""]) == [True, False, None]
        assert typed_column(["nan", "1"]) == ["nan", "1"]
        assert typed_column(["", ""]) == [None, None]

    def test_a_column_gets_one_type(self) -> None:
        assert unified_column([1, 2.5, None]) == [1.0, 2.5, None]
        assert unified_column([1, "a", True]) == ["1", "a", "true"]
        assert unified_column([None, 3]) == [None, 3]

    def test_single_values(self) -> None:
        import datetime

        import numpy as np

        assert scalar(np.float32(0.5)) == 0.5
        assert isinstance(scalar(np.int64(3)), int)
        assert scalar(float("nan")) is None
        assert scalar({"b": [1], "a": "é"}) == '{"a": "é", "b": [1]}'
        assert scalar(datetime.date(2020, 1, 2)) == "2020-01-02"
        assert scalar(b"bytes") is None

    def test_a_csv_with_a_byte_order_mark_and_blank_lines(self) -> None:
        raw = "\ufeffuri,id\r\n\r\na.wav,01\r\n".encode()
        assert read_csv(raw) == {"uri": ["a.wav"], "id": ["01"]}
