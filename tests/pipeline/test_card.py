"""README.md and croissant.json agree with the files they describe."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from earmill.pipeline.dataset.card import readme
from earmill.pipeline.dataset.commit_record import CommitRecord, commits
from earmill.pipeline.dataset.croissant import _feature_set, croissant
from earmill.pipeline.dataset.description import open_dataset, read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import (
    SPEC,
    STREAMS,
    dataset_file,
    make_row,
    publish,
    small_dataset,
    write_plan,
)
from tests.pipeline.reader_data import STREAMS as READER_STREAMS
from tests.pipeline.reader_data import Writer

KINDS = ("parquet", "zarr", "rows", "quarantine")


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    layout = small_dataset(tmp_path_factory.mktemp("card"))
    finalise(layout)
    return layout


@pytest.fixture(scope="module")
def card(layout: Layout) -> str:
    return layout.read_bytes("README.md").decode()


@pytest.fixture(scope="module")
def described(layout: Layout) -> dict[str, Any]:
    return json.loads(layout.read_bytes("croissant.json"))


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every object inside a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from nodes(member)


def test_hugging_face_loads_the_folder_by_its_card(layout: Layout, tmp_path: Path) -> None:
    from datasets import load_dataset

    loaded = load_dataset(layout.root, cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded["row_id"][:] == ["a.wav", "b.wav", "c.flac"]
    cells = [np.frombuffer(cell, "<f2").reshape(-1, 8) for cell in loaded["modulation"][:]]
    assert [len(frames) for frames in cells] == [30, 7, 120]


def test_the_front_matter_names_the_committed_parquet_files(layout: Layout, card: str) -> None:
    front = yaml.safe_load(card.split("---")[1])
    assert front["configs"][0]["data_files"] == [
        record.path("parquet") for record in commits(layout).values()
    ]
    assert front["pretty_name"] == "speech"


def test_the_numbers_are_those_of_the_files(layout: Layout, card: str) -> None:
    named = [file for record in commits(layout).values() for file in record.files]
    size = sum(len(layout.read_bytes(file.path)) for file in named)
    for line in (
        "| rows | 3 |",
        "| rows in quarantine | 2 |",
        "| audio | 0.0004361 h |",
        f"| files | {len(named)} |",
        f"| size | {size / 1e6:.4g} MB |",
        f"| index | `{layout.list('index')[0]}` |",
        "| `modulation` | dau1997 | 8 | 3 | 100 Hz | mean | model units | time, channel",
        "| decode | not_audio | 1 |",
        "| decode | zero_length | 1 |",
        "| spec sha256 | `" + "ab" * 32 + "` |",
    ):
        assert line in card
    assert json.loads(card.split("```json\n")[1].split("\n```")[0]) == SPEC


def test_the_python_in_the_card_is_python(card: str) -> None:
    code = card.split("```python\n")[1].split("\n```")[0]
    compile(code, "README.md", "exec")
    assert "open_features" in code and "load_dataset" in code and "xarray" in code
    assert code.index("import numpy\n") < code.index("numpy.frombuffer")
    assert "several rows of one row_id" in code


def test_hostile_names_cannot_break_the_card(layout: Layout) -> None:
    dataset = dataset_file(name='a "b" | c\n# d', spec={"source": {"uri": "x|y\nz"}})
    index = pa.table({"stage": pa.nulls(1, pa.string()), "error_class": pa.nulls(1, pa.string())})
    text = readme(dataset, list(commits(layout).values()), index, OutFile("index/x", 1, "0" * 64))
    assert yaml.safe_load(text.split("---")[1])["pretty_name"] == 'a "b" | c\n# d'
    assert '\n# a "b" \\| c # d\n' in text
    assert "## Quarantine" not in text


@pytest.mark.parametrize(
    "name",
    [
        "`<script>alert(1)</script>`",
        "``` <img src=x onerror=alert(1)>",
        "[click](javascript:alert(1)) ![x](http://evil/x.png)",
        "a | b |\n\n# heading\n\n- list",
        "\x1b[31mred\u202e",
    ],
)
def test_names_with_markup_stay_names(name: str, layout: Layout) -> None:
    """In the text they are one code span, or escaped: no tag, link, image, heading or cell."""
    dataset = dataset_file(spec={"source": {"uri": name}}, provenance={"host": {"system": name}})
    index = pa.table({"stage": ["decode"], "error_class": [name]})
    text = readme(dataset, list(commits(layout).values()), index, OutFile("index/x", 1, "0" * 64))
    prose = re.sub(r"```(python|json)\n.*?\n```", "", text.split("---", 2)[2], flags=re.DOTALL)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", prose.replace("\\`", ""))
    assert "<" not in outside and "\x1b" not in text and "\u202e" not in text
    assert not re.search(r"(?<!\\)\]\(", outside)
    assert "\n# heading" not in text and "\n- list" not in text
    cells = [line for line in prose.splitlines() if line.startswith("| decode")]
    assert len(cells) == 1 and len(re.findall(r"(?<!\\)\|", cells[0])) == 4


def test_croissant_states_its_version_and_required_properties(described: dict[str, Any]) -> None:
    assert described["conformsTo"] == "http://mlcommons.org/croissant/1.1"
    for name in ("@context", "@type", "name", "description", "license", "url", "creator"):
        assert described[name]
    assert described["datePublished"] >= described["dateCreated"]
    terms = {
        key
        for node in nodes({k: v for k, v in described.items() if k != "@context"})
        for key in node
    }
    schema_org = set(
        "name description license url creator datePublished dateCreated version distribution "
        "contentUrl contentSize encodingFormat sha256".split()
    )
    plain = {term for term in terms if not term.startswith(("@", "prov:"))} - schema_org
    assert plain <= set(described["@context"])


def test_croissant_references_lead_somewhere(described: dict[str, Any]) -> None:
    defined = [node["@id"] for node in nodes(described) if "@type" in node and "@id" in node]
    assert len(defined) == len(set(defined))
    body = {key: value for key, value in described.items() if key != "@context"}
    used = [node["@id"] for node in nodes(body) if set(node) == {"@id"}]
    assert used and set(used) <= set(defined)


def test_croissant_files_exist_and_hash_as_stated(
    layout: Layout, described: dict[str, Any]
) -> None:
    index, *sets = described["distribution"]
    content = layout.read_bytes(index["contentUrl"])
    assert hashlib.sha256(content).hexdigest() == index["sha256"]
    assert index["contentSize"] == f"{len(content)} B"
    assert [file_set["@id"] for file_set in sets] == [
        "rows",
        "features-parquet",
        "features-zarr",
        "quarantine",
    ]
    present = [name for folder in ("data", "rows", "quarantine") for name in layout.list(folder)]
    named = {pattern: fnmatch.filter(present, pattern) for s in sets for pattern in s["includes"]}
    assert all(named.values())
    assert sorted(name for names in named.values() for name in names) == sorted(present)


def test_croissant_columns_and_shapes_are_those_of_the_files(
    layout: Layout, described: dict[str, Any]
) -> None:
    index, features = described["recordSet"]
    schemas = {
        "index-rows": pq.read_schema(layout.path(layout.list("index")[0])),
        "features": pq.read_schema(layout.path("data/00000-00000000.parquet")),
    }
    for record_set in (index, features):
        schema = schemas[record_set["@id"]]
        for field in [*record_set["field"], *record_set.get("annotation", [])]:
            assert field["source"]["extract"]["column"] in schema.names
    fields = {field["name"]: field for field in features["field"]}
    for info in STREAMS:
        columns = schemas["features"].field(info.name).metadata[b"earmill.columns"].decode()
        assert f"bytes of (-1, {columns}) float16, little" in fields[info.name]["description"]
        assert fields[info.name]["dataType"] == "sc:Text" and "isArray" not in fields[info.name]


def test_croissant_has_the_shapes_of_nested_lists(tmp_path: Path) -> None:
    layout = Writer(tmp_path, formats=["parquet"], parquet_form="nested").layout
    dataset = read_dataset(layout)
    assert dataset is not None and dataset.parquet_form == "nested"
    (features,) = [_feature_set(dataset, "parquet")]
    shapes = {f["name"]: f["arrayShape"] for f in features["field"] if f.get("isArray")}
    assert shapes == {info.name: f"-1,{info.width}" for info in READER_STREAMS}


def test_croissant_tells_the_lineage(described: dict[str, Any]) -> None:
    assert described["prov:wasDerivedFrom"]["prov:label"] == "source audio: corpus"
    activity = described["prov:wasGeneratedBy"]
    assert activity["prov:startedAtTime"] == "2026-01-02T03:04:05.000+00:00"
    assert activity["prov:endedAtTime"] > activity["prov:startedAtTime"]
    assert activity["prov:wasAssociatedWith"]["prov:label"] == "earmill 0.1.0, git 1234"
    assert any("ab" * 32 in entity["prov:label"] for entity in activity["prov:used"])
    of_rows = described["recordSet"][1]["annotation"]
    assert [note["name"] for note in of_rows] == ["uri", "pcm_sha256"]
    assert all(note["equivalentProperty"] == "prov:wasDerivedFrom" for note in of_rows)


def test_zarr_alone_has_no_parquet_to_offer(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    write_plan(layout, {"00000": ["a"]})
    open_dataset(layout, dataset_file())
    publish(layout, rows=[make_row("a")], formats=("zarr",))
    finalise(layout)
    card = layout.read_bytes("README.md").decode()
    assert "configs:" not in card and "load_dataset" not in card and "xarray" in card
    described = json.loads(layout.read_bytes("croissant.json"))
    assert [file_set["@id"] for file_set in described["distribution"]] == [
        "index",
        "rows",
        "features-zarr",
    ]
    assert [record_set["@id"] for record_set in described["recordSet"]] == ["index-rows"]


def test_no_pattern_of_a_card_matches_what_no_commit_names(layout: Layout) -> None:
    """However many shards there are."""
    (record, *_) = commits(layout).values()
    many = [replace(record, shard=f"{number:05d}") for number in range(300)]
    committed = {part for one in many for kind in KINDS if (part := one.path(kind))}
    orphan = [part.replace(record.attempt, "deadbeef") for part in committed]
    patterns = [line[4:] for line in _front_of(layout, many) if line.startswith("  - ")]
    described = croissant(dataset_file(), many, OutFile("index/x", 1, "0" * 64), "url")
    for file_set in described["distribution"][1:]:
        patterns += file_set["includes"]
    assert {pattern.removesuffix("/**") for pattern in patterns} == committed
    assert not any(fnmatch.fnmatch(part, pattern) for part in orphan for pattern in patterns[::25])


def _front_of(layout: Layout, records: list[CommitRecord]) -> list[str]:
    index = pa.table({"stage": pa.nulls(1, pa.string()), "error_class": pa.nulls(1, pa.string())})
    text = readme(dataset_file(), records, index, OutFile("index/x", 1, "0" * 64))
    assert "*.parquet" not in text
    return text.split("---")[1].splitlines()
