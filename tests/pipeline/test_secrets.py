"""Secrets in uris: used to fetch, and found nowhere else."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pyarrow.parquet
import pytest

from earmill.api import JobFailedError
from earmill.pipeline.common.errors import EarmillError, SourceError, SpecError, UnreadableError
from earmill.pipeline.common.redact import has_secrets, redact, redact_text
from earmill.pipeline.common.text import named_line, one_line
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.row_pipeline import quarantined
from tests.pipeline.audio_factory import clip
from tests.pipeline.only_plan import only_plan
from tests.pipeline.source_helpers import contents, manifest
from tests.pipeline.test_confine import Server, servers

__all__ = ["servers"]

SECRET = [
    ("https://me:hush@host/a.wav", "https://***@host/a.wav"),
    ("https://hush@host/a.wav", "https://***@host/a.wav"),
    ("s3://key:hush@bucket/a.wav", "s3://***@bucket/a.wav"),
    ("s3://key:hu/sh@bucket/a.wav", "s3://***@bucket/a.wav"),
    ("s3://key:12/hush@bucket/a.wav", "s3://***@bucket/a.wav"),
    ("simplecache::https://hush@host/a.wav", "simplecache::https://***@host/a.wav"),
    ("zip://a.wav::s3://key:hush@b/x.zip", "zip://a.wav::s3://***@b/x.zip"),
    ("https://h/a.wav?token=hush", "https://h/a.wav?***"),
    ("https://h/a.wav?id=7&access_token=hush", "https://h/a.wav?id=7&***"),
    ("https://h/a.wav?api_key=hush&id=7#t=1", "https://h/a.wav?id=7&***#t=1"),
    ("https://h/a.wav#access_token=hush", "https://h/a.wav#***"),
    (
        "https://b.s3.amazonaws.com/a.wav?versionId=3&X-Amz-Algorithm=A&X-Amz-Credential=hush"
        "&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host"
        "&X-Amz-Signature=hush",
        "https://b.s3.amazonaws.com/a.wav?versionId=3&***",
    ),
    (
        "https://b.s3.amazonaws.com/a.wav?AWSAccessKeyId=hush&Signature=hush&Expires=1",
        "https://b.s3.amazonaws.com/a.wav?***",
    ),
    (
        "https://x.blob.core.windows.net/c/a.wav?sv=2024&se=2026&sr=b&sp=r&sig=hush",
        "https://x.blob.core.windows.net/c/a.wav?***",
    ),
    ("https://s.example/a.wav?X-Goog-Signature=hush", "https://s.example/a.wav?***"),
]
HARMLESS = [
    "/data/a@b:c/x.wav",
    "rel/x.wav?sig=1",
    "s3://bucket/a@b.wav",
    "http://host:8000/a@b.wav?id=3&page=2",
    "abfs://box@account.dfs.core.windows.net/a.wav",
    "sftp://me@host/a.wav",
    "hf:data/x?split=train#row=3",
    "https://host/a.wav#t=0.1,0.2",
    "https://h/tokens/keys.wav?keyboard=1",
]


@pytest.mark.parametrize(("uri", "public"), SECRET)
def test_what_is_secret_goes_and_the_rest_stays(uri: str, public: str) -> None:
    assert redact(uri) == public
    assert redact(public) == public
    assert has_secrets(uri)
    assert redact_text(f"GET '{uri}' failed ({uri}), see {uri}.").count(public) == 3
    assert "hush" not in redact_text(f"GET '{uri}' failed ({uri}), see {uri}.")


@pytest.mark.parametrize("uri", HARMLESS)
def test_harmless_uris_stay_as_they_are(uri: str) -> None:
    assert redact(uri) == uri
    assert redact_text(f"see {uri}, please") == f"see {uri}, please"


def test_headers_in_messages() -> None:
    assert "hush" not in redact_text("{'Authorization': 'Bearer hushhushhush'}")
    assert "hush" not in redact_text("Authorization: Basic hushhushhush==")
    assert redact_text("the basic understanding") == "the basic understanding"


@pytest.mark.parametrize("uri", [uri for uri, _ in SECRET])
def test_a_job_refuses_secrets_in_its_uris(uri: str) -> None:
    """Spec, dataset.json, card and croissant hold these as they are written."""
    for kind in ("files", "manifest", "hf"):
        with pytest.raises(SpecError, match="use storage_options") as caught:
            JobSpec.load(job(kind, uri))
        assert "hush" not in str(caught.value)
    with pytest.raises(SpecError, match="use storage_options"):
        JobSpec.load(job("files", "x") | {"output": {"uri": uri}})
    with pytest.raises(SpecError, match="use storage_options"):
        JobSpec.load(job("manifest", "x", allow=[uri]))


def job(kind: str, uri: str, **source: object) -> dict[str, object]:
    section = {"kind": kind, "uri": uri, **source}
    return {"source": section, "extract": [{"model": "m"}], "output": {"uri": "o"}}


@pytest.mark.parametrize(("uri", "public"), SECRET)
def test_messages_hold_none(uri: str, public: str) -> None:
    """Errors of other programs quote the uri they were given."""
    foreign = ValueError(f"403, message='Forbidden', url='{uri}'")
    for line in (one_line(foreign), named_line(foreign), str(SourceError(f"source {uri}: x"))):
        assert "hush" not in line
        assert public in line
    for kind in {*EarmillError.__subclasses__()} - {JobFailedError}:
        error = pickle.loads(pickle.dumps(kind(f"{uri}: bad")))
        assert "hush" not in f"{error} {error!r}"
    row = quarantined("x", Item("x", public), UnreadableError(f"{uri} x"), 1)
    assert "hush" not in str(row)


def test_a_signed_manifest_is_fetched_and_leaves_no_trace(
    servers: list[Server], tmp_path: Path
) -> None:
    """Rows, plan and quarantine name the object; only the request has the signature."""
    url = servers[0].url()
    signed = [f"{url}/{n}.wav?X-Amz-Date=1&X-Amz-Signature=hush{n}" for n in range(3)]
    lines = [json.dumps({"uri": uri, "link": uri, "text": "a: b"}) for uri in signed]
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    section = job("manifest", str(tmp_path / "m.jsonl"), allow=[url])
    spec = JobSpec.load(section | {"output": {"uri": str(tmp_path / "out")}})
    source = manifest(tmp_path / "m.jsonl", allow=[url])
    plan = make_plan(source, spec)
    items = list(plan.items())
    assert [item.row_id for item in items] == [f"{url}/{n}.wav?***" for n in range(3)]
    assert items[0].extra == {"link": f"{url}/0.wav?***", "text": "a: b"}
    layout = Layout.open(str(tmp_path / "out"))
    stored = layout.read_bytes(plan.write(layout))
    table = pyarrow.parquet.read_table(io.BytesIO(stored))
    assert "hush" not in str(table.to_pylist()) + repr(items) + spec.canonical_json()
    # A worker, and a resumed run, have nothing but the stored plan.
    servers[0].asked.clear()
    again = list(only_plan(layout).items())
    worker = manifest(tmp_path / "m.jsonl", allow=[url])
    assert contents(worker, again) == [clip("wav", 0.2)] * 3
    assert {f"hush{n}" for n in range(3)} == {path[-5:] for path, _ in servers[0].asked}


def test_a_manifest_signed_again_keeps_its_rows(servers: list[Server], tmp_path: Path) -> None:
    """Signatures run out while a job waits: the same objects are found under new ones."""
    url = servers[0].url()
    table = tmp_path / "m.csv"
    table.write_text(f"uri\n{url}/a.wav?Signature=one&Expires=1\n")
    items = list(manifest(table, allow=[url]).items())
    table.write_text(f"uri\n{url}/a.wav?Signature=two&Expires=2\n")
    assert [i.row_id for i in manifest(table, allow=[url]).items()] == [i.row_id for i in items]
    assert contents(manifest(table, allow=[url]), items) == [clip("wav", 0.2)]
    assert servers[0].asked[-1][0] == "/a.wav?Signature=two&Expires=2"
