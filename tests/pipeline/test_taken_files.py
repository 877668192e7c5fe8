"""Odd files that a job takes, and the facts of their rows: sizes, ends, spans."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from earmill import open_features
from earmill.pipeline.audio.decode import Limits
from earmill.pipeline.audio.decoder_pool import DecoderPool
from earmill.pipeline.common.errors import RowError
from earmill.pipeline.formats.row_table import FACT_TYPES, row_table
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from tests.pipeline.again_jobs import shards_run_here
from tests.pipeline.audio_factory import clip, with_data_size
from tests.pipeline.mpeg_bytes import id3
from tests.pipeline.test_ogg_pages import pages_of
from tests.pipeline.test_row_pipeline import Job
from tests.pipeline.whole_clips import decode

FS_HZ = 16000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A usual file, one whose size was never written, one with a tag, and one without an end."""
    opus = clip("opus", 2.0)
    for name, data in {
        "usual.wav": clip("wav", 2.0),
        "unfinished.wav": with_data_size(clip("wav", 2.0), 0),
        "tagged.wav": id3(bytes(5000)) + clip("wav", 2.0),
        "note.ogg": b"".join(pages_of(opus)[:-1]),
    }.items():
        (tmp_path / name).write_bytes(data)
    table = [
        {"id": "whole", "uri": "usual.wav"},
        {"id": "unfinished", "uri": "unfinished.wav", "start": 1.0, "end": 2.0},
        {"id": "tagged", "uri": "tagged.wav", "start": 1.5, "end": 2.0},
        {"id": "rounded", "uri": "usual.wav", "start": 1.0, "end": 2.004},
        {"id": "late", "uri": "usual.wav", "start": 1.0, "end": 2.4},
        {"id": "too late", "uri": "usual.wav", "start": 1.0, "end": 3.0},
        {"id": "note", "uri": "note.ogg"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in table)
    (tmp_path / "rows.jsonl").write_text(lines)
    return tmp_path


def spec_of(folder: Path, **audio: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "manifest", "uri": str(folder / "rows.jsonl")},
            "audio": audio,
            "extract": [{"model": "dau1997", "fs_hz": FS_HZ}],
            "output": {"uri": str(folder / "out"), "formats": ["parquet"]},
        }
    )


def rows_of(folder: Path, **audio: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Good rows by id, and the reasons of the others."""
    job = Job(spec_of(folder, **audio))
    rows = job()
    job.rows.close()
    good = {row.row_id: row for row in rows.good}
    return good, {row.row_id: f"{row.error_class}: {row.message}" for row in rows.bad}


def test_a_job_that_says_nothing_takes_what_it_took_before(corpus: Path) -> None:
    good, bad = rows_of(corpus)
    assert sorted(good) == ["rounded", "tagged", "unfinished", "whole"]
    assert sorted(bad) == ["late", "note", "too late"]
    assert bad["note"].startswith("truncated: ") and "audio.unterminated: accept" in bad["note"]
    assert bad["late"].startswith("span: ") and "audio.span_tolerance_s" in bad["late"]


def test_a_job_that_says_so_takes_more(corpus: Path) -> None:
    good, bad = rows_of(corpus, unterminated="accept", span_tolerance_s=0.5)
    assert sorted(bad) == ["too late"]
    assert "0.5 here" in bad["too late"]
    assert good["late"].facts["frames"] == 22050
    assert good["late"].facts["end_s"] == 2.4


def test_rows_say_what_was_odd(corpus: Path) -> None:
    good, _ = rows_of(corpus, unterminated="accept", span_tolerance_s=0.5)
    names = ("header_size", "unterminated", "span_short_s")
    facts = {row_id: tuple(row.facts[name] for name in names) for row_id, row in good.items()}
    assert facts == {
        "whole": (None, None, None),
        "tagged": (None, None, None),
        "unfinished": ("ignored", None, None),
        "rounded": (None, None, pytest.approx(0.004, abs=1e-4)),
        "late": (None, None, pytest.approx(0.4, abs=1e-9)),
        "note": (None, True, None),
    }
    table = row_table(list(good.values()), [])
    assert {name: table.schema.field(name).type for name in names} == {
        name: FACT_TYPES[name] for name in names
    }


def test_a_child_says_the_same(corpus: Path) -> None:
    limits = Limits(unterminated=True, span_tolerance_s=0.5)
    children = DecoderPool()
    try:
        for name, end_s in (("note.ogg", None), ("unfinished.wav", 2.3), ("tagged.wav", None)):
            data = (corpus / name).read_bytes()
            options: dict[str, Any] = {"uri": name, "start_s": 1.0, "end_s": end_s}
            with children.open(
                io.BytesIO(data), channels="each", limits=limits, **options
            ) as reader:
                list(reader)
                facts = reader.facts
            wanted = decode(io.BytesIO(data), channels="each", limits=limits, **options).facts
            assert facts == wanted
        with pytest.raises(RowError, match=r"audio\.unterminated: accept"):
            children.open(
                io.BytesIO((corpus / "note.ogg").read_bytes()),
                uri="note",
                start_s=None,
                end_s=None,
                channels="each",
                limits=Limits(),
            )
    finally:
        children.close()


def test_a_stored_row_says_it_too(corpus: Path) -> None:
    spec = spec_of(corpus, span_tolerance_s=0.5)
    with shards_run_here():
        run_job(JobSpec.load(spec, ["run.max_bad_fraction=1"]))
    features = open_features(corpus / "out")
    at = {row_id: features.index_of(row_id) for row_id in features.table["row_id"].to_pylist()}
    facts = {row_id: features.provenance(position) for row_id, position in at.items()}
    assert facts["unfinished"]["header_size"] == "ignored"
    assert facts["late"]["span_short_s"] == pytest.approx(0.4)
    assert facts["whole"]["header_size"] is None
    reasons = features.quarantine.to_pydict()
    assert sorted(reasons["row_id"]) == ["note", "too late"]
