"""Columns of the source from its table to the reader: types, class names, and what is not kept."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Audio, ClassLabel, Features, Image, List, Value

from earmill import open_features
from earmill.pipeline.common.arrow_types import arrow_type, kept_type, type_json
from earmill.pipeline.common.errors import CommitError, SpecError
from earmill.pipeline.dataset.description import open_dataset, read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.planning.estimate import job_cost
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.source import HfSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.audio_factory import clip
from tests.pipeline.only_plan import only_plan
from tests.pipeline.outputs import SPEC_SHA256, dataset_file, make_bad, make_row, publish
from tests.pipeline.source_helpers import manifest

TYPES = [
    *(pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.string(), pa.large_string(), pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns")),
    *(pa.duration("ms"), pa.timestamp("us"), pa.timestamp("ns", "Europe/Berlin")),
    *(pa.decimal128(10, 2), pa.decimal256(50, 3)),
    *(pa.list_(pa.float32()), pa.list_(pa.list_(pa.int16())), pa.large_list(pa.string())),
    pa.list_(pa.float32(), 3),
    pa.struct([("a", pa.int32()), ("b c", pa.list_(pa.string()))]),
    pa.map_(pa.string(), pa.int32()),
]
BOTH = pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield
    if shown:
        datasets.enable_progress_bars()


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_types_survive_as_json(kind: pa.DataType) -> None:
    assert kept_type(kind) == kind
    assert arrow_type(json.loads(json.dumps(type_json(kind)))) == kind


def test_what_is_not_kept() -> None:
    for kind in (
        pa.binary(),
        pa.list_(pa.binary()),
        pa.struct([]),
        pa.struct([("b", pa.binary())]),
    ):
        assert kept_type(kind) is None
    assert kept_type(pa.dictionary(pa.int8(), pa.string())) == pa.string()
    assert kept_type(pa.null()) == pa.string()


@pytest.mark.parametrize("encoded", ["nonsense", {"list": ["nonsense"]}, {"exec": []}, [], None, 3])
def test_a_foreign_type_is_refused(encoded: Any) -> None:
    with pytest.raises(CommitError, match="expected the type of a column"):
        arrow_type(encoded)


def write_dataset(path: Path) -> Path:
    """A column of every kind that used to vanish or to change, and two that cannot be kept."""
    features = Features(
        {
            "audio": Audio(decode=False),
            "label": ClassLabel(names=["dog", "cat"]),
            "tags": List(ClassLabel(names=["loud", "soft"])),
            "embedding": List(Value("float32")),
            "meta": {"speaker": Value("string"), "age": Value("int8"), "kind": ClassLabel(2)},
            "at": Value("timestamp[us, tz=UTC]"),
            "price": Value("decimal128(10, 2)"),
            "take": Value("int32"),
            "picture": Image(),
            "blob": Value("binary"),
        }
    )
    rows = [
        {
            "audio": {"bytes": clip("wav", 0.2, seed=i), "path": None},
            "label": i % 2,
            "tags": [1, 0][: i % 3],
            "embedding": [0.1 * i, float("nan")],
            "meta": {"speaker": f"s{i}", "age": i, "kind": 0},
            "at": AT + datetime.timedelta(microseconds=i),
            "price": decimal.Decimal("12.30"),
            "take": None if i else 7,
            "picture": {"bytes": b"png", "path": None},
            "blob": b"x",
        }
        for i in range(4)
    ]
    # As datasets writes it, without what it needs to encode media: the schema holds the features.
    pq.write_table(pa.Table.from_pylist(rows, schema=features.arrow_schema), path)
    return path


def job(uri: Path, **source: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "hf", "uri": str(uri), **source},
            "extract": [{"model": "m"}],
            "output": {"uri": "o", "shard_rows": 2},
        }
    )


EXPECTED = {
    "label": pa.int64(),
    "tags": pa.list_(pa.int64()),
    "embedding": pa.list_(pa.float32()),
    "meta": pa.struct([("speaker", pa.string()), ("age", pa.int8()), ("kind", pa.int64())]),
    "at": pa.timestamp("us", "UTC"),
    "price": pa.decimal128(10, 2),
    "take": pa.int32(),
}


@BOTH
def test_a_dataset_keeps_its_types_to_the_reader(streaming: bool, tmp_path: Path) -> None:
    uri = write_dataset(tmp_path / "d.parquet")
    spec = job(uri, streaming=streaming)
    plan = make_plan(open_source(spec.source), spec)
    assert {name: arrow_type(kind) for name, kind in plan.extra_types.items()} == EXPECTED
    assert plan.dropped == {"picture": "Image", "blob": "binary"}
    assert plan.notes[0] == "columns not carried through: blob (binary), picture (Image)"
    assert plan.notes[1:2] == ["durations of 4 rows are estimated from their bytes"] * streaming
    layout = Layout.open(str(tmp_path / "out"))
    plan.write(layout)
    stored = only_plan(layout)
    assert (stored.extra_types, stored.extra_labels) == (plan.extra_types, plan.extra_labels)
    # NaN is not equal to itself.
    bare = [[item.extra | {"embedding": None} for item in p.items()] for p in (stored, plan)]
    assert bare[0] == bare[1]
    assert str(next(stored.items()).extra["embedding"]) == "[0.0, nan]"

    shards = {s.shard_id: [item.row_id for item in s.items] for s in stored.shards}
    wanted = dataset_file(
        plan_id=plan.plan_id, extra_types=plan.extra_types, extra_labels=plan.extra_labels
    )
    open_dataset(layout, wanted)
    for shard in stored.shards:
        # Of the second shard only a bad row and one without values are left.
        good, bad = shard.items[:1], shard.items[1:]
        extra = good[0].extra if shard.shard_id == "00000" else dict.fromkeys(good[0].extra)
        assert publish(
            layout,
            shard.shard_id,
            rows=[make_row(good[0].row_id, extra=extra)],
            bad=[make_bad(item.row_id) for item in bad],
            plan_id=plan.plan_id,
            plan_rows=shards[shard.shard_id],
            extra_types=stored.extra_types,
        )
    done = finalise(layout)
    index = pq.ParquetFile(io.BytesIO(layout.read_bytes(done.index.path))).read()
    assert {n: index.schema.field(f"extra_{n}").type for n in EXPECTED} == EXPECTED
    rows_file = next(name for name in layout.list("rows") if name.endswith(".parquet"))
    table = pq.ParquetFile(io.BytesIO(layout.read_bytes(rows_file))).read()
    assert {n: table.schema.field(f"extra_{n}").type for n in EXPECTED} == EXPECTED
    extra = open_features(layout.url())[0].extra
    assert extra["at"] == AT
    assert extra["tags"] == []
    assert extra["meta"] == {"speaker": "s0", "age": 0, "kind": 0}
    assert (extra["price"], extra["take"]) == (decimal.Decimal("12.30"), 7)
    described = read_dataset(layout)
    assert described is not None
    assert described.extra_labels == {"label": ["dog", "cat"], "tags[]": ["loud", "soft"]} | {
        "meta.kind": ["0", "1"]
    }
    assert SPEC_SHA256 == described.spec_sha256
    card = layout.read_bytes("README.md").decode()
    assert "## Classes" in card and "- `extra_label`: 0 `dog`, 1 `cat`\n" in card
    assert "- `extra_meta.kind`: 0 `0`, 1 `1`\n" in card


def test_a_parquet_manifest_keeps_its_types(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(clip("wav", 0.2))
    table = pa.table(
        {
            "uri": ["a.wav"],
            "vector": pa.array([[1.5, 2.0]], pa.list_(pa.float32())),
            "at": pa.array([AT], pa.timestamp("us", "UTC")),
            "who": pa.array(["x"]).dictionary_encode(),
            "blob": [b"x"],
        }
    )
    pq.write_table(table, tmp_path / "m.parquet")
    source = manifest(tmp_path / "m.parquet")
    (item,) = source.items()
    assert item.extra == {"vector": [1.5, 2.0], "at": AT, "who": "x"}
    columns = source.columns()
    assert columns.types == {
        "vector": pa.list_(pa.float32()),
        "at": pa.timestamp("us", "UTC"),
        "who": pa.string(),
    }
    assert columns.dropped == {"blob": "binary"}


def test_a_plan_of_plain_columns_is_what_it_was(tmp_path: Path) -> None:
    """Typed columns are a later version of the plan; others still read as the first."""
    (tmp_path / "a.wav").write_bytes(clip("wav", 0.2))
    (tmp_path / "m.csv").write_text("uri,n,x\na.wav,3,\n")
    spec = job(tmp_path / "m.csv")
    plan = make_plan(manifest(tmp_path / "m.csv"), spec)
    assert plan.extra_types == {"n": "int64", "x": "string"}
    layout = Layout.open(str(tmp_path / "out"))
    raw = layout.read_bytes(plan.write(layout))
    schema = pq.read_schema(io.BytesIO(raw))
    assert schema.metadata[b"version"] == b"1"
    assert only_plan(layout) == plan


def test_an_id_column_of_lists_is_refused(tmp_path: Path) -> None:
    from earmill.pipeline.common.errors import SourceError

    uri = write_dataset(tmp_path / "d.parquet")
    with pytest.raises(SourceError, match="expected a column of single values, got 'tags' of List"):
        open_source(HfSpec(kind="hf", uri=str(uri), id_column="tags"))


class OneColumn(torch.nn.Module):
    """(batch, time) as frames of one column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1)


@pytest.mark.parametrize(
    "names", [("frames",), ("extra_label",), ("same", "same_start"), ("variant_of",)]
)
def test_a_stream_named_as_a_column_is_refused_before_any_work(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Workers used to find out, shard by shard."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.wav").write_bytes(clip("wav", 0.2, seed=1))
    entry = {
        "model": "torch_module",
        "fs_hz": 16000,
        "params": {"module": f"{__name__}:OneColumn"},
        "streams": {name: {"width": 1, "frame_rate_hz": 16000} for name in names},
    }
    source = {"kind": "files", "uri": str(tmp_path / "clips")}
    output = {"uri": str(tmp_path / "out")}
    audio = {"variants": {"of": [{"name": "quiet", "gain_db": -6}]}}
    spec = JobSpec.load({"source": source, "audio": audio, "extract": [entry], "output": output})
    for ask in (job_cost, run_job):
        with pytest.raises(SpecError, match=f"got torch_module's '{names[-1]}', which is a column"):
            ask(spec)
    assert not (tmp_path / "out").exists()
