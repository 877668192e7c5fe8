"""docs/training.md: every example gives what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from tests.pipeline.reader_data import write_set

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "speech", n_rows=26, rows_per_shard=7, finalised=True)
    write_set(tmp_path / "music", n_rows=12, finalised=True)
    monkeypatch.chdir(tmp_path)
    page = doctest.DocTestParser().get_doctest(PAGE.read_text(), {}, PAGE.stem, str(PAGE), 0)
    assert len(page.examples) > 20
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(page, out=report.append)
    assert results.failed == 0, "".join(report)
