"""Damaged shards, indexes and cards are made again, and nothing that was good is lost by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.snapshot import current_index
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.operations.retry import RowFilter, damaged
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import LAYOUT_VERSION
from tests.chaos.jobs import committed_files
from tests.pipeline.again_jobs import (
    ALSO_BAD,
    BAD,
    Job,
    _corpus_as_it_was,  # noqa: F401
    _no_ray,  # noqa: F401
    corpus_made,  # noqa: F401
    finished_job,  # noqa: F401
    good_values,
    run_here,  # noqa: F401
)


def _change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {"missing": Path.unlink, "changed": _change}


@pytest.mark.parametrize("kind", list(DAMAGE))
@pytest.mark.parametrize("pattern", ["data/00001-*.parquet", "rows/00001-*", "commits/00001.json"])
def test_a_damaged_shard_is_computed_again(kind: str, pattern: str, job: Job, go: Any) -> None:
    before = good_values(job)
    (victim,) = job.out.glob(pattern)
    DAMAGE[kind](victim)
    assert not verify(job.layout).ok
    if kind == "changed" and pattern.startswith("commits"):
        # Wherever the changed byte fell, the record is no JSON now.
        victim.write_bytes(victim.read_bytes().rstrip()[:-1])
        with pytest.raises(CommitError, match=r"--resume --repair"):
            go(job.spec)
    go(job.spec, damaged)
    report = verify(job.layout)
    assert report.problems == [] and report.damaged == []
    assert good_values(job) == before
    anew = kind == "missing" and pattern.startswith("commits")
    assert job.generations() == {"00000": 0, "00001": 0 if anew else 1}


def test_a_lost_replacement_never_brings_the_commit_of_before_back(job: Job, go: Any) -> None:
    job.restore(BAD)
    go(job.spec, RowFilter.of(uri=f"*/{BAD}").choose)
    files, values = committed_files(job.out), good_values(job)
    job.layout.delete("commits/00000.r1.json")
    report = verify(job.layout)
    assert report.damaged == ["00000"] and "00000.r1.json: missing" in report.problems[0]
    with pytest.raises(CommitError, match=r"commits/00000\.r1\.json.*--repair"):
        go(job.spec)
    assert not verify(job.layout).ok
    go(job.spec, damaged)
    assert verify(job.layout).problems == [] and good_values(job) == values
    assert committed_files(job.out) == files and job.bad() == {ALSO_BAD: "truncated"}


def test_repair_of_a_damaged_index_or_card_needs_no_shard(job: Job, go: Any) -> None:
    for name in (str(current_index(job.layout)), "README.md", "current.json"):
        job.layout.write_bytes(name, job.layout.read_bytes(name)[:-1])
        assert not verify(job.layout).ok
        end, _ = go(job.spec)
        assert end.status == "nothing_to_do" and verify(job.layout).problems == []
    assert job.generations() == {"00000": 0, "00001": 0}
    job.layout.write_bytes("index/0123456789abcdef.parquet", b"of an earlier closing")
    (problem,) = verify(job.layout).problems
    assert problem.startswith("index/0123456789abcdef.parquet") and "may be removed" in problem


def test_a_replaced_commit_of_version_1_raises_the_version(job: Job, go: Any) -> None:
    for name in ("dataset.json", *job.layout.list("commits")):
        data = json.loads(job.layout.read_bytes(name)) | {"layout_version": 1}
        job.layout.write_bytes(name, json.dumps(data, indent=1, sort_keys=True).encode())
    for name in ("current.json", *job.layout.list("snapshots")):
        job.layout.delete(name)
    go(job.spec)
    assert json.loads(job.layout.read_bytes("dataset.json"))["layout_version"] == 1
    job.restore(BAD)
    go(job.spec, RowFilter.of(uri=f"*/{BAD}").choose)
    assert json.loads(job.layout.read_bytes("dataset.json"))["layout_version"] == LAYOUT_VERSION
    assert verify(job.layout).problems == [] and job.bad() == {ALSO_BAD: "truncated"}


def test_there_must_be_something_to_replace(tmp_path: Path) -> None:
    from tests.pipeline.outputs import make_row, publish

    layout = Layout.open(tmp_path)
    with pytest.raises(CommitError, match=r"expected commits/00000\.json, which this attempt"):
        publish(layout, rows=[make_row("a")], generation=1)
    assert publish(layout, rows=[make_row("a")])
    assert publish(layout, attempt="00000002", rows=[make_row("a")], generation=1)
    assert not publish(layout, attempt="00000003", rows=[make_row("a")], generation=1)
    assert commits(layout)["00000"].attempt == "00000002"


@pytest.mark.parametrize("name", ["pcm_sha256", "rate_hz", "channels", "reference_pcm_sha256"])
def test_other_audio_does_not_replace_a_commit(tmp_path: Path, name: str) -> None:
    from tests.pipeline.outputs import make_row, publish

    layout, row = Layout.open(tmp_path), make_row("a")
    facts = row.facts | {"channels": 1, "reference_pcm_sha256": "12" * 32}
    assert publish(layout, rows=[replace(row, facts=facts)])
    other = facts | {name: 2 if name == "channels" else type(facts[name])("34")}
    with pytest.raises(CommitError, match="the audio has changed since: 'a'; the commit stays"):
        publish(layout, attempt="00000002", rows=[replace(row, facts=other)], generation=1)
    assert publish(layout, attempt="00000003", rows=[replace(row, facts=facts)], generation=1)
