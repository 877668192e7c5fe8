"""Manifests: csv, jsonl and parquet say the same, and what is wrong with a table is named."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from earmill.pipeline.common.arrow_types import extra_types
from earmill.pipeline.common.errors import SourceError, UnreadableError
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.sources.tables import (
    CHUNK_ROWS,
    RESERVED,
    read_table,
    scalar,
    unified_column,
)
from earmill.pipeline.spec.job import JobSpec
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
            ("m.xlsx", "x", r"ends in \.csv, \.tsv, .*, got '\.xlsx'"),
            ("m.csv", "audio_filepath\nb.wav\n", r"set source\.columns to \{uri: audio_filepath\}"),
            (
                "m.json",
                '{"audio_filepath": "b.wav", "offset": 0.5, "duration": 0.7}\n',
                r"to \{uri: audio_filepath, start: offset, duration: duration\}",
            ),
            (
                "m.csv",
                "path,start,end_time,duration\nb.wav,0,0.1,0.1\n",
                r"set source\.columns to \{uri: path, end: end_time\}",
            ),
            ("m.jsonl", "[" * 100_000, "line 1 is not JSON: the JSON is nested too deeply"),
            (
                "m.jsonl",
                '{"uri": "' + "x" * 2**20 + '"}',
                "line 1 is not JSON: expected JSON of at",
            ),
        ],
    )
    def test_a_malformed_table(self, corpus: Path, name: str, text: str, expected: str) -> None:
        (corpus / name).write_text(text)
        with pytest.raises(SourceError, match=expected) as caught:
            ids(manifest(corpus / name))
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)

    def test_a_table_with_tabs_takes_quotation_marks_as_text(self, corpus: Path) -> None:
        (corpus / "m.tsv").write_text('uri\ttext\tn\nb.wav\tsay "hm\t3\n', encoding="utf-8")
        (item,) = manifest(corpus / "m.tsv").items()
        assert item.row_id == "b.wav" and item.extra == {"text": 'say "hm', "n": 3}

    def test_a_nemo_manifest(self, corpus: Path) -> None:
        rows = [
            {"audio_filepath": "b.wav", "offset": 0.05, "duration": 0.1, "text": "a"},
            {"audio_filepath": "b.wav", "duration": 0.2, "text": "b"},
        ]
        path = corpus / "train_manifest.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        names = {"uri": "audio_filepath", "start": "offset", "duration": "duration"}
        first, second = manifest(path, columns=names).items()
        assert (first.start_s, first.end_s, first.seconds) == (0.05, pytest.approx(0.15), 0.1)
        # Without an offset it is the whole file, however the length was rounded.
        assert (second.start_s, second.end_s, second.seconds) == (None, None, 0.2)
        assert first.extra == {"text": "a"} and second.extra == {"text": "b"}
        assert first.uri == str(corpus / "b.wav") and second.row_id == "b.wav"

    def test_a_span_under_other_names_is_never_overlooked(self, corpus: Path) -> None:
        path = corpus / "m.csv"
        path.write_text("uri,offset,duration\nb.wav,0.05,0.1\n")
        with pytest.raises(SourceError, match=r"offset and duration look like a span.*columns"):
            list(manifest(path).items())
        mapped = {"uri": "uri", "start": "offset", "duration": "duration"}
        (item,) = manifest(path, columns=mapped).items()
        assert (item.start_s, item.end_s) == (0.05, pytest.approx(0.15))
        (whole,) = manifest(path, columns={"uri": "uri"}).items()
        assert whole.start_s is None and whole.extra == {"offset": 0.05, "duration": 0.1}

    def test_a_mapped_id_stays_text(self, corpus: Path) -> None:
        (corpus / "m.csv").write_text("path,key\nb.wav,1.50\n")
        (item,) = manifest(corpus / "m.csv", columns={"uri": "path", "id": "key"}).items()
        assert item.row_id == "1.50" and item.extra == {}

    @pytest.mark.parametrize(
        ("columns", "expected"),
        [
            ({"uri": "paht"}, r"columns\.uri: the table has no column 'paht'; did you mean 'path'"),
            ({"uri": "path", "id": "n"}, r"columns\.id is 'n', but the table has a column 'id'"),
            ({"uri": "path", "duration": "n"}, "row 1: expected a duration above 0 s, got -3"),
        ],
    )
    def test_a_mapping_that_does_not_fit(
        self, corpus: Path, columns: dict[str, str], expected: str
    ) -> None:
        (corpus / "m.csv").write_text("path,n,id\nb.wav,-3,x\n")
        with pytest.raises(SourceError, match=expected):
            ids(manifest(corpus / "m.csv", columns=columns))

    def test_one_column_has_one_role_and_roles_are_known(self, corpus: Path) -> None:
        for columns in ({"start": "t", "end": "t"}, {"length": "t"}):
            with pytest.raises(ValueError, match="columns"):
                manifest(corpus / "m.csv", columns=columns)

    def test_without_a_mapping_the_hash_of_a_job_is_what_it_was(self, corpus: Path) -> None:
        job = {"source": {"kind": "manifest", "uri": "m.csv"}, "extract": [{"model": "m"}]}
        spec = JobSpec.load(job | {"output": {"uri": "o"}})
        assert spec.canonical()["source"] == {"kind": "manifest", "uri": "m.csv"}

    def test_a_missing_table(self, corpus: Path) -> None:
        for uri in (corpus / "no.csv", corpus):
            with pytest.raises(SourceError, match="not found"):
                manifest(uri)


def read_csv(raw: bytes) -> dict[str, Sequence[object]]:
    return dict(read_table("table.csv", raw, RESERVED)[0])


def typed_column(cells: Sequence[str]) -> list[object]:
    """Return the cells of a csv column as they are read."""
    lines = [f"{n},{cell}" for n, cell in enumerate(["column", *cells])]
    return list(read_csv("\n".join(lines).encode())["column"])


class TestScalars:
    def test_csv_text_that_only_looks_like_a_number_stays_text(self) -> None:
        assert typed_column(["0042", "7"]) == ["0042", "7"]
        assert typed_column(["1", "", "-3"]) == [1, None, -3]
        assert typed_column(["1", "2.5", "1e3"]) == [1.0, 2.5, 1000.0]
        assert typed_column(["true", "false", ""]) == [True, False, None]
        assert typed_column(["nan", "1"]) == ["nan", "1"]
        assert typed_column(["", ""]) == [None, None]

    def test_whole_numbers_beyond_double_keep_their_digits(self) -> None:
        assert typed_column(["1234567890123456789", "-7"]) == [1234567890123456789, -7]
        for other in ("2.5", "98765432109876543210"):
            cells = ["1234567890123456789", other]
            assert typed_column(cells) == cells
        assert typed_column(["9007199254740992", "2.5"]) == [2.0**53, 2.5]
        assert unified_column([2**53 + 1, 2.5]) == ["9007199254740993", "2.5"]
        assert extra_types([{"n": 2**53 + 1}, {"n": 2}]) == {"n": "int64"}
        assert extra_types([{"n": 2**53 + 1}, {"n": 2.5}]) == {"n": "string"}
        assert extra_types([{"n": 2**53}, {"n": 2.5}]) == {"n": "double"}

    def test_a_column_gets_one_type(self) -> None:
        assert unified_column([1, 2.5, None]) == [1.0, 2.5, None]
        assert unified_column([1, "a", True]) == ["1", "a", "true"]
        assert unified_column([None, 3]) == [None, 3]

    def test_single_values(self) -> None:
        assert scalar(float("nan")) is None
        assert scalar({"b": [1], "a": "é"}) == '{"a": "é", "b": [1]}'

    def test_a_csv_with_a_byte_order_mark_and_blank_lines(self) -> None:
        raw = "\ufeffuri,id\r\n\r\na.wav,01\r\n".encode()
        read = {name: list(cells) for name, cells in read_csv(raw).items()}
        assert read == {"uri": ["", "a.wav"], "id": ["", "01"]}  # the source counts blank rows

    def test_a_column_has_one_type_however_long_it_is(self) -> None:
        """Its cells are looked at a few thousand at a time."""
        rows = "".join(f"{n}.wav,{n},{n}\n" for n in range(3 * CHUNK_ROWS))
        columns = read_csv(f"uri,n,mixed\n{rows}x.wav,,y\n".encode())
        assert len(columns["uri"]) == 3 * CHUNK_ROWS + 1
        assert columns["n"][-2:] == [3 * CHUNK_ROWS - 1, None]
        assert columns["mixed"][:2] == ["0", "1"] and columns["mixed"][-1] == "y"
        with pytest.raises(ValueError, match=f"csv row {3 * CHUNK_ROWS + 1}: expected 2 cells"):
            read_csv(("a,b\n" + "1,2\n" * 3 * CHUNK_ROWS + "1\n").encode())
