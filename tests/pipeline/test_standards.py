"""What others read of a dataset: Croissant by mlcroissant, PROV-O by rdflib; values as ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdflib import Graph

import earmill
from earmill.jobs.cli import run
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import read_current
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.event_data import write_spikes
from tests.pipeline.outputs import INFO, make_row, publish, small_dataset
from tests.pipeline.reader_data import Writer
from tests.pipeline.reader_data import make_row as reader_row

# What these packages use of others that is deprecated there.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ConjunctiveGraph is deprecated"),
    pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame"),
]
# Where the dataset is: ids in the file are relative to it.
PLACE = "https://example.org/speech/"
MIT = {"features": {"id": "MIT"}, "source": {"id": "CC0-1.0"}}


def state_licenses(layout: Layout) -> None:
    """As a job does that states them."""
    dataset = read_dataset(layout)
    assert dataset is not None
    layout.write_bytes("dataset.json", replace(dataset, licenses=MIT).to_json().encode())


def with_bytes(folder: Path) -> Layout:
    """Frames and events as bytes, two shards, a bad row."""
    writer = write_spikes(folder)
    state_licenses(writer.layout)
    writer.finalise()
    return writer.layout


def with_lists(folder: Path) -> Layout:
    """Frames as nested lists."""
    writer = Writer(folder, formats=["parquet"], parquet_form="nested")
    writer.shard(0, [reader_row(0, 0.5), reader_row(1, 0.3)])
    writer.shard(1, [reader_row(2, 1.1)], ["broken.wav"])
    state_licenses(writer.layout)
    writer.finalise()
    return writer.layout


@pytest.mark.parametrize("made", [with_bytes, with_lists])
def test_mlcroissant_accepts_the_card_and_loads_both_record_sets_with_our_values(
    made: Any, tmp_path: Path
) -> None:
    import mlcroissant

    made(tmp_path)
    loaded = mlcroissant.Dataset(jsonld=tmp_path / "croissant.json")
    assert not loaded.metadata.issues.errors
    assert [line for line in loaded.metadata.issues.warnings if "citeAs" not in line] == []
    assert loaded.metadata.license == ["https://spdx.org/licenses/MIT.html"]

    ours = earmill.open_features(tmp_path)
    index = [_plain(record, "index-rows") for record in loaded.records("index-rows")]
    good = {record["row_id"]: record for record in index if record["status"] == "ok"}
    assert list(good) == [row.row_id for row in ours]
    assert [r["row_id"] for r in index if r["status"] != "ok"] == ours.quarantine[
        "row_id"
    ].to_pylist()
    for row in ours:
        said = good[row.row_id]
        assert said["seconds"] == row.seconds and said["uri"] == f"corpus/{row.row_id}"

    found = [_plain(record, "features") for record in loaded.records("features")]
    assert [record["row_id"] for record in found] == [row.row_id for row in ours]
    for record, row in zip(found, ours, strict=True):
        assert record["seconds"] == row.seconds
        for name, info in ours.streams.items():
            mine = row.features[name]
            if info.layout == "events":
                events = np.frombuffer(record[name], "<i4").reshape(-1, 3)
                dense = np.zeros_like(mine.dense())
                np.add.at(dense, (events[:, 0], events[:, 1]), events[:, 2])
                np.testing.assert_array_equal(dense, mine.dense())
            else:
                theirs = _frames(record[name], info.width) * np.float16(info.scale_factor)
                np.testing.assert_array_equal(theirs, mine)


def _plain(record: dict[str, Any], record_set: str) -> dict[str, Any]:
    """Columns by their names, texts as texts."""
    found = {}
    for key, value in record.items():
        name = key.removeprefix(f"{record_set}/")
        is_cell = isinstance(value, bytes) and name in ("modulation", "spikes", "loudness")
        found[name] = value.decode() if isinstance(value, bytes) and not is_cell else value
    return found


def _frames(cell: Any, width: int) -> np.ndarray:
    if isinstance(cell, bytes):
        return np.frombuffer(cell, "<f2").reshape(-1, width)
    return np.array([np.asarray(frame) for frame in cell], "<f2").reshape(-1, width)


def test_mlcroissant_sees_a_wrong_card(tmp_path: Path) -> None:
    """The test above can fail: a field of a column that is not there is found."""
    import mlcroissant

    layout = with_lists(tmp_path)
    card = json.loads(layout.read_bytes("croissant.json"))
    card["recordSet"][1]["field"][0]["source"]["fileSet"]["@id"] = "nowhere"
    with pytest.raises(mlcroissant.ValidationError, match="nowhere"):
        mlcroissant.Dataset(jsonld=card)


def grown(folder: Path) -> Layout:
    """Two snapshots: one, and one for which a row was tried again by another release."""
    layout = small_dataset(folder)
    state_licenses(layout)
    finalise(layout)
    rows = [make_row("a.wav"), make_row("b.wav", 7), make_row("bad.wav", 9)]
    newer = {**INFO, "versions": {"earmill": "0.2.0", "torch": "2.11.0"}}
    assert publish(layout, "00000", "000000aa", rows, generation=1, info=newer)
    finalise(layout)
    return layout


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return grown(tmp_path_factory.mktemp("grown"))


def graph(layout: Layout) -> Graph:
    return Graph().parse(
        data=layout.read_bytes("provenance.jsonld"), format="json-ld", publicID=PLACE
    )


ASKED = """
PREFIX prov: <http://www.w3.org/ns/prov#>
PREFIX dct: <http://purl.org/dc/terms/>
PREFIX rdfs: <http://www.w3.org/2000/01/rdf-schema#>
PREFIX schema: <https://schema.org/>
SELECT ?number ?why ?job ?model ?source ?version WHERE {
  ?snapshot a prov:Entity ; prov:specializationOf ?dataset ; schema:version ?number ;
    prov:wasGeneratedBy ?run ; prov:wasDerivedFrom ?origin .
  ?dataset a schema:Dataset ; prov:wasDerivedFrom ?origin .
  ?origin a prov:Entity ; dct:identifier ?source .
  ?run a prov:Activity ; dct:type ?why ; prov:used ?origin, ?plan .
  ?plan a prov:Plan ; dct:identifier ?job ; rdfs:label ?model .
  OPTIONAL {
    ?run prov:qualifiedAssociation [ prov:agent ?agent ; prov:hadPlan ?plan ] ;
      prov:wasAssociatedWith ?agent .
    ?agent a prov:SoftwareAgent ; schema:softwareVersion ?version
  }
} ORDER BY ?number ?version
"""


def test_prov_o_says_which_job_release_and_source_made_each_snapshot(closed: Layout) -> None:
    answers = [
        tuple(None if value is None else str(value) for value in row)
        for row in graph(closed).query(ASKED)
    ]
    job = ("sha256:" + "ab" * 32, "job speech: dau1997", "corpus")
    assert answers == [
        ("1", "extract", *job, None),  # those test commits name no release
        ("2", "retry or repair", *job, "0.2.0"),
    ]


def test_a_real_job_names_its_release(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    rows = [make_row("a.wav"), make_row("b.wav", 7), make_row("bad.wav", 9)]
    now = {**INFO, "versions": {"earmill": "0.1.0"}}
    assert publish(layout, "00000", "000000aa", rows, generation=1, info=now)
    finalise(layout)
    (answer,) = graph(layout).query(ASKED)
    assert str(answer[-1]) == "0.1.0"
    agent = """SELECT ?commit WHERE { ?a a <http://www.w3.org/ns/prov#SoftwareAgent> ;
        <http://purl.org/dc/terms/hasVersion> ?commit }"""
    assert [str(row[0]) for row in graph(layout).query(agent)] == ["git:1234"]


def test_snapshots_revise_each_other_and_carry_their_hashes_and_times(closed: Layout) -> None:
    current = read_current(closed)
    assert current is not None
    asked = """
    PREFIX prov: <http://www.w3.org/ns/prov#> PREFIX dct: <http://purl.org/dc/terms/>
    SELECT ?snapshot ?before ?hash ?made WHERE {
      ?snapshot prov:specializationOf ?dataset ; dct:identifier ?hash ;
        prov:generatedAtTime ?made .
      OPTIONAL { ?snapshot prov:wasRevisionOf ?before } } ORDER BY ?made ?before"""
    found = {str(row[0]): row for row in graph(closed).query(asked)}
    names = [f"{PLACE}{past.snapshot.path}" for past in current.all_snapshots]
    assert sorted(found) == sorted(names)
    before = [found[name][1] and str(found[name][1]) for name in names]
    assert before == [None, *names[:-1]]
    for past, name in zip(current.all_snapshots, names, strict=True):
        assert str(found[name][2]) == f"sha256:{past.snapshot.sha256}"
        assert found[name][3].toPython().isoformat() == past.entry.created
    licences = """SELECT ?of ?licence WHERE { ?of <http://purl.org/dc/terms/license> ?licence }"""
    assert {(str(a), str(b)) for a, b in graph(closed).query(licences)} == {
        (f"{PLACE}#dataset", "https://spdx.org/licenses/MIT.html"),
        (f"{PLACE}#source", "https://spdx.org/licenses/CC0-1.0.html"),
    }


def test_a_lost_file_is_a_problem_and_comes_back_from_the_commits(closed: Layout) -> None:
    whole = closed.read_bytes("provenance.jsonld")
    for damaged in (None, whole[:-9], b"{}", b'{"@graph": [{"@id": "x"}]}'):
        closed.delete("provenance.jsonld")
        if damaged is not None:
            closed.write_bytes("provenance.jsonld", damaged)
        (problem,) = verify(closed, hashes=False).problems
        assert "provenance.jsonld" in problem and "--resume" in problem
        finalise(closed)
        assert closed.read_bytes("provenance.jsonld") == whole
        assert verify(closed).problems == []


def test_a_dataset_of_before_has_none_and_is_whole_and_closed(tmp_path: Path) -> None:
    from earmill.pipeline.dataset.snapshot import is_closed

    layout = small_dataset(tmp_path)
    finalise(layout)
    current = read_current(layout)
    assert current is not None
    older = replace(
        current,
        cards=tuple(
            c for c in current.cards if c.path.count(".json") < 1 or c.path == "croissant.json"
        ),
    )
    layout.write_bytes("current.json", older.to_json().encode())
    layout.delete("provenance.jsonld")
    assert len(older.cards) == 2
    assert verify(layout).problems == [] and is_closed(layout, commits(layout))
    assert run(["verify", str(tmp_path)]) == 0


def test_hostile_names_stay_literals(tmp_path: Path) -> None:
    from earmill.pipeline.dataset.lineage import lineage_of
    from earmill.pipeline.dataset.snapshot import EarlierSnapshot
    from tests.pipeline.outputs import SPEC, dataset_file

    name = 'a" } INSERT <x> \n\u202e ]}'
    dataset = dataset_file(name=name, spec={**SPEC, "source": {"uri": name}})
    layout = small_dataset(tmp_path)
    finalise(layout)
    current = read_current(layout)
    assert current is not None
    one = EarlierSnapshot(current.snapshot, current.entry)
    info = {"versions": {"earmill": name}}
    records = [replace(record, info=info) for record in commits(layout).values()]
    text = json.dumps(lineage_of(layout, dataset, records, (), one))
    parsed = Graph().parse(data=text, format="json-ld", publicID=PLACE)
    answer = next(iter(parsed.query(ASKED)))
    assert (str(answer[4]), str(answer[5])) == (name, name)
