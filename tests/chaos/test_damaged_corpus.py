"""A corpus with every kind of damage among good files, through the command line.

Each damaged file must be in quarantine with its own reason, each good row must be there, and the
exit code must say whether that is too many.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from earmill import open_features
from earmill.jobs.cli import run
from tests.chaos.jobs import assert_whole, write_corpus, write_job
from tests.pipeline import audio_factory
from tests.pipeline.again_jobs import shards_run_here

pytestmark = pytest.mark.chaos

GOOD = 8
STAGES = {
    "empty_file": "decode",
    "non_finite": "decode",
    "not_audio": "decode",
    "sample_rate": "decode",
    "span": "decode",
    "too_short": "extract",
    "truncated": "decode",
    "unreadable": "fetch",
    "zero_length": "decode",
}


def test_each_damaged_file_is_quarantined_and_each_good_row_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", GOOD)
    good = sorted(path.name for path in corpus.iterdir())
    expected = _damage(corpus)
    output = tmp_path / "out"
    job = _write_manifest_job(tmp_path / "job.yaml", corpus, output)

    with shards_run_here():
        assert run(["extract", str(job), "--json"]) == 3
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["event"] == "summary" and summary["status"] == "done"
    assert (summary["rows_ok"], summary["rows_bad"]) == (GOOD, len(expected))
    assert "run.max_bad_fraction 5.0%" in summary["message"]

    tables = [pq.read_table(path) for path in (output / "quarantine").iterdir()]
    bad = [row for table in tables for row in table.to_pylist()]
    assert {row["row_id"]: row["error_class"] for row in bad} == expected
    assert {(row["error_class"], row["stage"]) for row in bad} == STAGES.items()
    assert all(row["message"] and row["uri"] in row["message"] for row in bad)
    assert sorted(row.row_id for row in open_features(str(output))) == good
    assert_whole(output)

    # The same result is fine for a job that allows it, and there is nothing left to do.
    allowed = ["--set", "run.max_bad_fraction=0.9"]
    assert run(["extract", str(job), "--resume", "--json", *allowed]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["status"] == "nothing_to_do"


def _damage(corpus: Path) -> dict[str, str]:
    """Add damaged files to a corpus; their names and the reasons they must get."""
    cases = audio_factory.damaged_corpus()
    for case in cases:
        (corpus / case.name).write_bytes(case.data)
    (corpus / "blip.wav").write_bytes(audio_factory.clip("wav", 0.004))
    expected = {case.name: case.error_class for case in cases}
    return expected | {"blip.wav": "too_short", "gone.wav": "unreadable", "beyond": "span"}


def _write_manifest_job(path: Path, corpus: Path, output: Path) -> Path:
    """All files of the folder, one that does not exist, and a span behind the end of another."""
    lines = ["id,uri,start,end"]
    lines += [f"{file.name},{file},," for file in sorted(corpus.iterdir())]
    lines += [f"gone.wav,{corpus / 'gone.wav'},,", f"beyond,{corpus / '000.wav'},7.5,9"]
    manifest = path.with_name("manifest.csv")
    manifest.write_text("\n".join(lines))
    job = yaml.safe_load(write_job(path, corpus, output, shard_seconds=12).read_text())
    job["source"] = {"kind": "manifest", "uri": str(manifest)}
    path.write_text(yaml.safe_dump(job))
    return path
