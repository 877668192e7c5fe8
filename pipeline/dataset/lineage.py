"""`provenance.jsonld`: PROV-O of all snapshots of a dataset, as JSON-LD that needs no network.

Source: W3C PROV-O (2013-04-30). Each snapshot is a specialisation of the dataset that a run of the
job generated, and revises the snapshot before. The job's spec is the plan of the run; the releases
of earmill that computed its rows are its agents. Ids are relative to the dataset's place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.dataset.commit_record import CommitRecord, read_commit
from earmill.pipeline.dataset.description import DatasetFile, read_description
from earmill.pipeline.dataset.snapshot import (
    EarlierSnapshot,
    read_checked,
    read_current,
    read_snapshot,
)
from earmill.pipeline.spec.licenses import License, stored_licenses
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.layout import Layout

CONTEXT: dict[str, Any] = {
    "prov": "http://www.w3.org/ns/prov#",
    "rdfs": "http://www.w3.org/2000/01/rdf-schema#",
    "dct": "http://purl.org/dc/terms/",
    "schema": "https://schema.org/",
    "xsd": "http://www.w3.org/2001/XMLSchema#",
    **{
        f"prov:{time}": {"@type": "xsd:dateTime"}
        for time in ("generatedAtTime", "startedAtTime", "endedAtTime")
    },
}
DATASET, SOURCE, JOB = ({"@id": f"#{name}"} for name in ("dataset", "source", "job"))
Node = dict[str, Any]


def lineage_of(
    layout: Layout,
    dataset: DatasetFile,
    records: Sequence[CommitRecord],
    past: Sequence[EarlierSnapshot],
    now: EarlierSnapshot,
) -> Node:
    """Return the document of earlier snapshots, the oldest first, and of the snapshot `now`."""
    known = _known_software(layout)
    # Releases of earmill that computed the rows of a snapshot, by its path.
    software = {now.snapshot.path: _software(records)}
    for one in past:
        path = one.snapshot.path
        software[path] = known.get(path, [])
        if path not in known:
            with suppress(CommitError):  # a record of an older snapshot may be gone
                refs = read_snapshot(layout, one).commits.items()
                found = [read_commit(layout, shard, ref.generation) for shard, ref in refs]
                software[path] = _software(record for record in found if record is not None)
    begun: dict[int, str | None] = {0: dataset.created}  # By number of the revision.
    for number in {one.entry.revision for one in past if one.entry.revision}:
        revision = read_description(layout, paths.revision_path(number))
        begun[number] = revision.change.created if revision and revision.change else None
    begun[now.entry.revision] = dataset.change.created if dataset.change else dataset.created
    versions, git = dataset.provenance.get("versions") or {}, dataset.provenance.get("git") or {}
    nodes = _things(dataset)
    for version in sorted({version for found in software.values() for version in found}):
        commit = git.get("commit") if versions.get("earmill") == version else None
        nodes.append(
            {
                "@id": _agent_id(version),
                "@type": "prov:SoftwareAgent",
                "rdfs:label": f"earmill {version}",
                "schema:name": "earmill",
                "schema:softwareVersion": version,
                **({"dct:hasVersion": f"git:{commit}"} if commit else {}),
            }
        )
    for before, one in zip((None, *past), (*past, now), strict=True):
        nodes.append(_snapshot(one, before))
        first = before is None or before.entry.revision != one.entry.revision
        start = begun.get(one.entry.revision) if first else None
        nodes.append(_run(dataset, one, software[one.snapshot.path], start))
    return {"@context": CONTEXT, "@graph": nodes}


def _things(dataset: DatasetFile) -> list[Node]:
    licenses = stored_licenses(dataset.licenses)
    source = dataset.spec.get("source", {})
    models = [entry["model"] for entry in dataset.spec["extract"]]
    return [
        {
            **DATASET,
            "@type": ["prov:Entity", "schema:Dataset"],
            "rdfs:label": dataset.name,
            **_licensed(licenses.features),
            "prov:wasDerivedFrom": SOURCE,
        },
        {
            **SOURCE,
            "@type": "prov:Entity",
            "rdfs:label": "source audio",
            "dct:identifier": source.get("uri", "unknown"),
            **({"dct:hasVersion": source["revision"]} if source.get("revision") else {}),
            **_licensed(licenses.source),
        },
        {
            **JOB,
            "@type": ["prov:Entity", "prov:Plan"],
            "rdfs:label": f"job {dataset.name}: {', '.join(models)}",
            "dct:identifier": f"sha256:{dataset.spec_sha256}",
            "prov:value": json.dumps(dataset.spec, sort_keys=True),
        },
    ]


def _licensed(stated: License | None) -> Node:
    if stated is None:
        return {}
    return {"dct:license": {"@id": stated.url} if stated.url else stated.title}


def _agent_id(version: str) -> str:
    return f"#earmill-{''.join(c if c.isalnum() or c in '.-_' else '-' for c in version)}"


def _snapshot(one: EarlierSnapshot, before: EarlierSnapshot | None) -> Node:
    entry = one.entry
    return {
        "@id": one.snapshot.path,
        "@type": "prov:Entity",
        "rdfs:label": f"snapshot {entry.number}",
        "schema:version": str(entry.number),
        "dct:identifier": f"sha256:{one.snapshot.sha256}",
        "prov:specializationOf": DATASET,
        "prov:wasDerivedFrom": SOURCE,
        "prov:wasGeneratedBy": {"@id": _run_id(one)},
        **({"prov:generatedAtTime": entry.created} if entry.created else {}),
        **({"prov:wasRevisionOf": {"@id": before.snapshot.path}} if before else {}),
        "dct:extent": f"{entry.rows_ok} rows, {entry.rows_bad} in quarantine",
    }


def _run_id(one: EarlierSnapshot) -> str:
    return f"#run-{PurePosixPath(one.snapshot.path).stem}"


def _run(
    dataset: DatasetFile, one: EarlierSnapshot, versions: Iterable[str], begun: str | None
) -> Node:
    agents = [{"@id": _agent_id(version)} for version in versions]
    entry = one.entry
    return {
        "@id": _run_id(one),
        "@type": "prov:Activity",
        "rdfs:label": f"{entry.why or 'run'} of job {dataset.name}",
        "dct:type": entry.why or "run",
        "prov:used": [SOURCE, JOB],
        "prov:wasAssociatedWith": agents,
        "prov:qualifiedAssociation": [
            {"@type": "prov:Association", "prov:agent": agent, "prov:hadPlan": JOB}
            for agent in agents
        ],
        **({"prov:startedAtTime": begun} if begun else {}),
        **({"prov:endedAtTime": entry.created} if entry.created else {}),
    }


def _software(records: Iterable[CommitRecord]) -> list[str]:
    """Return the releases that computed rows; copied rows keep their release."""
    found = {(record.info.get("versions") or {}).get("earmill") for record in records}
    return sorted(version for version in found if isinstance(version, str))


def _known_software(layout: Layout) -> dict[str, list[str]]:
    """Return the releases of each snapshot in the stored file; none if it is damaged or older."""
    try:
        current = read_current(layout)
        cards = current.cards if current else ()
        file = next((card for card in cards if card.path == paths.PROVENANCE_FILE), None)
        nodes = loads_json(read_checked(layout, file), max_chars=None)["@graph"] if file else []
        by_id = {node["@id"]: node for node in nodes}
        return {
            node["@id"]: [
                by_id[agent["@id"]]["schema:softwareVersion"]
                for agent in by_id[node["prov:wasGeneratedBy"]["@id"]]["prov:wasAssociatedWith"]
            ]
            for node in nodes
            if "prov:specializationOf" in node
        }
    except (CommitError, LookupError, TypeError, ValueError):
        return {}
