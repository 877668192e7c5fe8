"""Files with the same bytes are computed once; each is a row of its own, kill it or not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import earmill
from earmill import open_features
from earmill.pipeline.dataset import copied_rows
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.driver import events
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.operations.update import start_update
from earmill.pipeline.planning import equal_rows as module
from earmill.pipeline.planning import shards
from earmill.pipeline.planning.estimate import estimate
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import FEW, assert_whole, committed_files, write_job
from tests.pipeline import audio_factory
from tests.pipeline.again_jobs import Killed, module_without_ray  # noqa: F401
from tests.pipeline.changing_corpus import Dying, Values, note_computed, values_of
from tests.pipeline.only_plan import only_plan

pytestmark = pytest.mark.usefixtures("no_ray")
COPIES = {"copy/a.wav": "a.wav", "copy/c.wav": "c.wav", "d.wav": "b.wav", "e.wav": "a.wav"}
COMPUTED = ["a.wav", "b.wav", "c.wav", "like.wav"]


class Job:
    """A corpus of eight files, four of them copies, one like another but for a byte.

    Attributes:
        computed: Rows that were computed.
        formats: Formats of the output.
    """

    formats: Sequence[str] = ("parquet",)

    def __init__(self, folder: Path) -> None:
        self.folder, self.corpus, self.out = folder, folder / "corpus", folder / "out"
        (self.corpus / "copy").mkdir(parents=True)
        self.computed: list[str] = []
        for seed, name in enumerate(("a.wav", "b.wav", "c.wav")):
            (self.corpus / name).write_bytes(audio_factory.clip("wav", 0.5, seed=seed))
        for copy, name in COPIES.items():
            shutil.copy(self.corpus / name, self.corpus / copy)
        # Where no piece is looked at.
        data = bytearray((self.corpus / "a.wav").read_bytes())
        data[100] ^= 1
        (self.corpus / "like.wav").write_bytes(data)

    def spec(self, *overrides: str, once: bool = True) -> JobSpec:
        options = {"shard_rows": 2, "shard_seconds": 100, "formats": [*self.formats]}
        file = write_job(self.folder / "job.yaml", self.corpus, self.out, params=FEW, **options)
        wanted = [f"output.equal_files_once={str(once).lower()}", "run.max_bad_fraction=1"]
        return JobSpec.load(file, overrides=[*wanted, *overrides])

    def extract(self, **options: Any) -> Any:
        self.computed.clear()
        return run_job(self.spec(), **options)

    def values(self) -> Values:
        return values_of(self.out)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(tmp_path)
    note_computed(monkeypatch, made.computed)
    return made


def test_a_plan_counts_copies_but_does_not_compute_them(job: Job) -> None:
    plan = make_plan(open_source(job.spec().source), job.spec())
    assert estimate(plan, job.spec(), []).hours * 3600 == pytest.approx(8 * 0.5)
    assert sum(shard.rows for shard in plan.computed) == len(COMPUTED)


def test_equal_files_are_computed_once_and_each_is_a_row(job: Job, tmp_path: Path) -> None:
    end = job.extract()
    # Of equal files the first by name.
    assert sorted(job.computed) == COMPUTED
    assert (end.status, end.rows_ok, end.rows_bad) == ("done", 8, 0)
    assert_whole(job.out)
    now = job.values()
    for copy, name in COPIES.items():
        assert now[copy] == now[name]
    assert now["like.wav"] != now["a.wav"]
    # The same values as where each was computed; where its bytes are is each row's own.
    shutil.move(job.out, tmp_path / "once")
    run_job(job.spec(once=False))
    assert len(job.computed) == 4 + 8 and job.values() == now
    ds = open_features(tmp_path / "once")
    for name in now:
        facts = ds.provenance(ds.index_of(name))
        assert facts["uri"] == str(job.corpus / name)
        assert facts["size"] == (job.corpus / name).stat().st_size


@pytest.mark.parametrize("part_rows", [shards.PART_ROWS, 3])
def test_the_plan_says_which_row_is_copied_and_is_the_same_again(
    part_rows: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PART_ROWS", part_rows)
    spec = job.spec()
    plan = make_plan(open_source(spec.source), spec)
    copied = {i.row_id: i.equal_to.row_id for s in plan.copies for i in s.items if i.equal_to}
    assert copied == COPIES and plan.copied == 2 == len(plan.copies)
    assert all(i.equal_to is None for s in plan.shards[: -plan.copied] for i in s.items)
    assert any("4 rows are files equal to others" in note for note in plan.notes)
    layout = Layout.open(str(job.out))
    plan.write(layout)
    assert bool(plan.parts) is (part_rows == 3)
    read = only_plan(layout)
    assert read.copied == 2 and read.plan_id == plan.plan_id
    assert [i.equal_to for i in read.items()] == [i.equal_to for i in plan.items()]
    other = make_plan(open_source(spec.source), job.spec(once=False))
    assert (other.copied, other.rows) == (0, plan.rows)


def test_only_what_may_be_equal_is_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.corpus / "longer.wav").write_bytes(audio_factory.clip("wav", 0.7, seed=9))
    other = bytearray((job.corpus / "c.wav").read_bytes())
    other[-7] ^= 1
    (job.corpus / "other_end.wav").write_bytes(other)
    spec, fetched, looked = job.spec(), list[str](), list[str]()
    source, piece = open_source(spec.source), module._piece
    monkeypatch.setattr(module, "_piece", lambda i: looked.append(i.row_id) or piece(i))
    fetch = source.fetch

    def spied(items: Any) -> Any:
        fetched.extend(item.row_id for item in items)
        return fetch(items)

    monkeypatch.setattr(source, "fetch", spied)
    plan = make_plan(source, spec)
    assert "longer.wav" not in looked and "other_end.wav" in looked
    assert sorted(fetched) == sorted([*COPIES, *COMPUTED])
    assert sum(shard.rows for shard in plan.copies) == 4


def test_spans_of_equal_files_are_computed(job: Job) -> None:
    lines = [
        {"uri": str(job.corpus / "a.wav"), "id": "whole", "label": "x"},
        {"uri": str(job.corpus / "e.wav"), "id": "again", "label": "y"},
        {"uri": str(job.corpus / "e.wav"), "id": "span", "start": 0.1, "end": 0.3, "label": "z"},
    ]
    (job.folder / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = {"id": "id", "start": "start", "end": "end"}
    source = {"kind": "manifest", "uri": str(job.folder / "m.jsonl"), "columns": columns}
    spec = job.spec().model_dump(mode="json")
    spec["source"] = {**source, "allow": [str(job.corpus)]}
    end = run_job(JobSpec.load(spec))
    assert end.rows_ok == 3 and sorted(job.computed) == ["span", "whole"]
    ds = open_features(job.out)
    assert job.values()["whole"] == job.values()["again"] != job.values()["span"]
    labels = {row.row_id: row.extra["label"] for row in ds}
    assert labels == {"whole": "x", "again": "y", "span": "z"}


def test_killed_anywhere_it_ends_as_if_it_had_not_been(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.formats = ("parquet", "zarr")
    job.extract()
    whole, now = committed_files(job.out), job.values()
    Dying.patch(monkeypatch)
    kills = 0
    while True:
        shutil.rmtree(job.out)
        Dying.left = 9 * kills
        try:
            job.extract()
            break
        except Killed:
            kills += 1
        Dying.left = 10_000
        end = job.extract(resume=True)
        assert end.exit_code == 0 and end.rows_ok == 8
        assert committed_files(job.out) == whole and job.values() == now
    assert kills > 3


def test_a_copy_whose_original_is_bad_or_changed_is_in_quarantine_until_a_retry(job: Job) -> None:
    spec = job.spec()
    plan = make_plan(open_source(spec.source), spec)
    # Gone, and other bytes in a file of the same size and time.
    (job.corpus / "b.wav").unlink()
    path = job.corpus / "c.wav"
    was = path.stat()
    path.write_bytes(audio_factory.clip("wav", 0.5, seed=50))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert path.stat().st_size == was.st_size
    end = run_job(spec, plan=plan)
    assert (end.rows_ok, end.rows_bad) == (5, 3)
    for bad in open_features(job.out).quarantine.to_pylist():
        assert bad["uri"] == str(job.corpus / bad["row_id"])
        # Of a file its own is named.
        assert str(job.corpus) not in bad["message"] or bad["uri"] in bad["message"]
    assert_whole(job.out)
    earmill.retry(job.out, overrides=["run.max_bad_fraction=1"])
    rows = job.values()
    assert set(rows) == {*COPIES, *COMPUTED} - {"b.wav"}
    assert rows["c.wav"] != rows["copy/c.wav"]
    # What is computed now is the row's own, wherever it goes.
    earmill.compact(job.out)
    assert job.values() == rows
    assert_whole(job.out)


def test_what_becomes_of_equal_files_in_the_next_snapshot(job: Job) -> None:
    job.extract()
    before = job.values()
    # One that was computed goes, one changes, and a copy; the others have what they had.
    (job.corpus / "a.wav").unlink()
    for seed, name in enumerate(("b.wav", "copy/c.wav")):
        (job.corpus / name).write_bytes(audio_factory.clip("wav", 0.7, seed=77 + seed))
    start_update(job.spec())
    end = job.extract(resume=True)
    assert end.exit_code == 0 and sorted(job.computed) == ["b.wav", "copy/c.wav"]
    now = job.values()
    assert before.keys() - now.keys() == {"a.wav"}
    assert {k for k in now if now[k] != before[k]} == {"b.wav", "copy/c.wav"}
    assert_whole(job.out)


def test_equal_files_of_one_update_are_computed_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.formats = ("parquet", "zarr")
    job.extract()
    before = job.values()
    added = {"new/1.wav": 21, "new/2.wav": 21, "b.wav": 22, "new/3.wav": 22, "new/4.wav": 23}
    (job.corpus / "new").mkdir()
    for name, seed in added.items():
        (job.corpus / name).write_bytes(audio_factory.clip("wav", 0.5, seed=seed))
    shutil.copy(job.corpus / "a.wav", job.corpus / "new" / "5.wav")
    start_update(job.spec())
    plan = Plan.read(Layout.open(str(job.out)), stored_plan(job.out))
    copied = {i.row_id: i.equal_to.row_id for s in plan.copies for i in s.items if i.equal_to}
    assert copied == {"new/2.wav": "new/1.wav", "new/3.wav": "b.wav"}
    # Killed while copies are made, or before, it goes on with them.
    Dying.patch(monkeypatch)
    Dying.left = 12
    with pytest.raises(Killed):
        job.extract(resume=True)
    once = list(job.computed)
    Dying.left = 10_000
    assert job.extract(resume=True).exit_code == 0
    assert {*once, *job.computed} == {"b.wav", "new/1.wav", "new/4.wav"}
    now = job.values()
    assert now["new/1.wav"] == now["new/2.wav"] and now["new/3.wav"] == now["b.wav"]
    assert now["new/5.wav"] == before["a.wav"] and now["new/4.wav"] != now["b.wav"]
    assert {k for k in before if now[k] != before[k]} == {"b.wav"}
    assert_whole(job.out)
    # Nothing is left to do, and what comes next knows these rows as any others.
    start_update(job.spec())
    job.extract(resume=True)
    assert job.computed == []
    earmill.compact(job.out)
    assert job.values() == now


def test_copying_says_how_far_it_is(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_rows, "PROGRESS_S", 0.0)
    seen: list[Any] = []
    job.extract(sink=seen.append)
    (job.corpus / "a.wav").rename(job.corpus / "z.wav")
    start_update(job.spec())
    job.extract(resume=True, sink=seen.append)
    said = [event.text for event in seen if isinstance(event, events.Step)]
    assert [text for text in said if "copying" in text] == [
        "copying rows of equal files into 2 shards",
        "copying rows of equal files: 1 of 2 shards",
        "copying rows into 2 shards",
        "copying rows: 1 of 2 shards",
    ]


def stored_plan(out: Path) -> str:
    dataset = read_dataset(Layout.open(str(out)))
    assert dataset is not None
    return dataset.plan_id


def test_false_is_nothing_and_has_its_hash(job: Job) -> None:
    assert job.spec(once=False).sha256() != job.spec().sha256()
    plain = job.spec(once=False).model_dump(mode="json")
    del plain["output"]["equal_files_once"]
    assert JobSpec.load(plain).sha256() == job.spec(once=False).sha256()
