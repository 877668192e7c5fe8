"""Croissant 1.1 description of a dataset, as JSON-LD.

Source: MLCommons Croissant format specification 1.1 (2025-12), appendix 1 (context) and provenance
(PROV-O). A feature stream is a field with `isArray` and shape `-1,<width>`, a stream of events one
of shape `-1,3`. Croissant has no reader for Zarr, so its stores are listed as files only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from earmill.pipeline.dataset.commit_record import CommitRecord
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.formats.format import BINARY, format_of
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.spec.licenses import License, stored_licenses

CONFORMS_TO = "http://mlcommons.org/croissant/1.1"
# The name that Croissant readers know; they refuse the registered application/vnd.apache.parquet.
PARQUET = "application/x-parquet"
PARQUET_FORMAT = "parquet"

_TERMS = (
    "annotation arrayShape citeAs column containedIn equivalentProperty excludes extract field "
    "fileObject fileProperty fileSet format includes isArray isLiveDataset jsonPath key md5 "
    "parentField path readLines recordSet references regex repeated replace samplingRate sdVersion "
    "separator source subField transform unArchive value"
)
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS.split()},
}


def croissant(
    dataset: DatasetFile, records: Sequence[CommitRecord], index: OutFile, url: str
) -> dict[str, Any]:
    """Return the document; `url` is the dataset's place without credentials."""
    streams = "; ".join(
        f"{layout.name}: {layout.model}, {layout.width} {layout.columns_are} {layout.rate_text}, "
        f"{layout.unit}"
        for layout in map(layout_of, dataset.streams)
    )
    created = [str(record.info["created"]) for record in records if "created" in record.info]
    ended = max([dataset.created, *created])
    table = tabular(records)
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": dataset.name,
        "description": f"Auditory-model features of audio, one row a clip. Streams: {streams}.",
        "conformsTo": CONFORMS_TO,
        "license": _license(stored_licenses(dataset.licenses).features),
        "url": url,
        "creator": {"@type": "sc:Organization", "name": f"earmill job {dataset.name}"},
        "datePublished": ended,
        "dateCreated": dataset.created,
        "version": f"1.0.0+{index.sha256[:16]}",
        **_lineage(dataset, ended),
        "distribution": _distribution(records, index),
        "recordSet": [_index_set(), *([_feature_set(dataset, table)] if table else [])],
    }


def _license(stated: License | None) -> Any:
    if stated is None:
        return {"@type": "sc:CreativeWork", "name": "not stated"}
    if stated.url is not None and stated.name is None:
        return stated.url
    named = {"@type": "sc:CreativeWork", "name": stated.title}
    return named | ({"url": stated.url} if stated.url else {})


def _lineage(dataset: DatasetFile, ended: str) -> dict[str, Any]:
    """PROV-O: the dataset was derived from the source by a job that this software ran."""
    provenance = dataset.provenance
    version = (provenance.get("versions") or {}).get("earmill", "unknown version")
    commit = (provenance.get("git") or {}).get("commit")
    source = {
        "@type": "prov:Entity",
        "prov:label": f"source audio: {dataset.spec.get('source', {}).get('uri', 'unknown')}",
        "license": _license(stored_licenses(dataset.licenses).source),
    }
    spec = {"@type": "prov:Entity", "prov:label": f"job spec, sha256 {dataset.spec_sha256}"}
    agent = {
        "@type": "prov:SoftwareAgent",
        "prov:label": f"earmill {version}" + (f", git {commit}" if commit else ""),
    }
    return {
        "prov:wasDerivedFrom": source,
        "prov:wasAttributedTo": agent,
        "prov:wasGeneratedBy": {
            "@type": "prov:Activity",
            "prov:label": f"feature extraction, plan {dataset.plan_id}",
            "prov:startedAtTime": dataset.created,
            "prov:endedAtTime": ended,
            "prov:used": [source, spec],
            "prov:wasAssociatedWith": agent,
        },
    }


def _distribution(records: Sequence[CommitRecord], index: OutFile) -> list[dict[str, Any]]:
    file_sets = [("rows", PARQUET, parts_of(records, "rows"))]
    for name in formats_of(records):
        found, parts = format_of(name), parts_of(records, name)
        includes = [f"{part}/**" for part in parts] if found.is_folder else parts
        file_sets.append((f"features-{name}", found.media_type, includes))
    file_sets.append(("quarantine", PARQUET, parts_of(records, "quarantine")))
    return [
        {
            "@type": "cr:FileObject",
            "@id": "index",
            "name": index.path.rpartition("/")[2],
            "contentUrl": index.path,
            "contentSize": f"{index.bytes} B",
            "encodingFormat": PARQUET,
            "sha256": index.sha256,
            "description": "Index of all rows, good and quarantined",
        },
        *(
            {"@type": "cr:FileSet", "@id": name, "name": name}
            | {"encodingFormat": encoding, "includes": includes}
            for name, encoding, includes in file_sets
            if includes
        ),
    ]


def formats_of(records: Sequence[CommitRecord]) -> list[str]:
    return sorted({name for record in records for name in record.formats})


def tabular(records: Sequence[CommitRecord]) -> str:
    """Return the format whose files are tables that other libraries read; empty if none is."""
    return next((name for name in formats_of(records) if format_of(name).is_table), "")


def parts_of(records: Sequence[CommitRecord], kind: str) -> list[str]:
    """Return the committed parts of a kind one by one: a pattern would match garbage as well."""
    return [part for record in records if (part := record.path(kind))]


def _field(
    record_set: str, column: str, kind: str, text: str, source: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": f"{record_set}/{column}",
        "name": column,
        "description": text,
        "dataType": kind,
        "source": {**source, "extract": {"column": column}},
    }


def _index_set() -> dict[str, Any]:
    source = {"fileObject": {"@id": "index"}}
    columns = {
        "row_id": ("sc:Text", "Unique name of the row"),
        "plan_row_id": ("sc:Text", "The planned clip it came from"),
        "shard": ("sc:Text", "Shard that holds it"),
        "row": ("sc:Integer", "Position in the shard's files"),
        "seconds": ("sc:Float", "Duration of the audio, s"),
        "status": ("sc:Text", "ok or quarantined"),
        "error_class": ("sc:Text", "Why a row is in quarantine"),
        "uri": ("sc:Text", "Source audio"),
    }
    fields = [_field("index-rows", name, *about, source) for name, about in columns.items()]
    text = "All rows, good and quarantined, in the order of the plan"
    return _record_set("index-rows", text, fields)


def _record_set(name: str, text: str, fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "description": text,
        "key": {"@id": f"{name}/row_id"},
        "field": fields,
    }


def _feature_set(dataset: DatasetFile, table: str) -> dict[str, Any]:
    source = {"fileSet": {"@id": f"features-{table}"}}
    row_id = _field("features", "row_id", "sc:Text", "Unique name of the row", source)
    # Spelled as a source: the bare reference of the specification breaks mlcroissant 1.1.
    row_id["references"] = {"field": {"@id": "index-rows/row_id"}}
    origins = {"uri": "Source audio of the row", "pcm_sha256": "Hash of the decoded samples"}
    seconds = _field("features", "seconds", "sc:Float", "Duration of the audio, s", source)
    streams = [_stream_field(dataset, table, stream, source) for stream in dataset.streams]
    annotations = [
        _field("features", column, "sc:Text", text, source)
        | {"equivalentProperty": "prov:wasDerivedFrom"}
        for column, text in origins.items()
    ]
    text = "Good rows with their feature streams, time along the first axis"
    return _record_set("features", text, [row_id, seconds, *streams]) | {"annotation": annotations}


def has_bytes(dataset: DatasetFile, fmt: str) -> bool:
    """Return True if the stream columns of a table format hold the bytes of frames."""
    return fmt == PARQUET_FORMAT and dataset.parquet_form == BINARY


def _stream_field(
    dataset: DatasetFile, table: str, stream: Mapping[str, Any], source: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a column of arrays, or a column of bytes as text, because Croissant has no type for
    bytes, and its readers leave the bytes of a text unchanged."""
    layout = layout_of(stream)
    text = f"{stream['model']} in {stream['unit']}, {stream['frame_rate_hz']:g} frames/s, "
    text += f"pooled by {stream['pool']}" + (f"; {layout.field_text}" if layout.field_text else "")
    if not has_bytes(dataset, table):
        field = _field("features", layout.name, layout.croissant_type, text, source)
        return {**field, "isArray": True, "arrayShape": f"-1,{layout.stored_width}"}
    layout = format_of(table).layout_of(stream)
    stored = layout.stored_dtype(dataset.spec["output"]["dtype"])
    text += f"; bytes of (-1, {layout.stored_width}) {stored}, little endian"
    return _field("features", layout.name, "sc:Text", text, source)
