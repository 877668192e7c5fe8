"""Features that were added beside the rows are in the report as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import earmill
from earmill.jobs.report.build import Options, report_html
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import read_current
from earmill.pipeline.storage.layout import Layout
from tests.jobs.html_page import Element, parsed
from tests.pipeline.outputs import PLAN, dataset_file, make_bad, make_row, publish, write_plan


def write(root: Path, *bad: str) -> Layout:
    """The rows of PLAN, of which these are quarantined."""
    layout = Layout.open(root)
    write_plan(layout, PLAN)
    open_dataset(layout, dataset_file())
    for number, (shard, planned) in enumerate(PLAN.items()):
        good = [make_row(name) for name in planned if name not in bad]
        poor = [make_bad(name) for name in planned if name in bad]
        publish(layout, shard, f"{number:08x}", good, poor)
    finalise(layout)
    return layout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Element:
    """Of a set with one beside it, in which a.wav is quarantined."""
    root = tmp_path_factory.mktemp("additions") / "features"
    layout = write(root, "bad.wav")
    current = read_current(write(root / "additions/again", "bad.wav", "a.wav"))
    assert current is not None
    named = replace(current.snapshot, path=f"additions/again/{current.snapshot.path}")
    finalise(layout, add={"again": named})
    assert "a.wav" not in {row.row_id for row in earmill.open_features(root, additions=True)}
    options = Options(row_ids=["a.wav", "b.wav"])
    return parsed(report_html(str(root), options=options, storage_options={}))


def test_their_streams_are_listed(page: Element) -> None:
    listed = set(page.by_id("corpus").text.split())
    assert listed >= {"modulation", "envelope", "again.modulation", "again.envelope"}


def test_an_example_shows_them_where_its_row_has_them(page: Element) -> None:
    of_a, of_b = page.by_id("examples").text.split("b.wav")[:2]
    assert "a.wav" in of_a and "modulation" in of_a and "again.modulation" not in of_a
    assert "again.modulation" in of_b


def test_rows_that_they_lack_still_count(page: Element) -> None:
    (body,) = page.by_id("rows-table").all("tbody")
    assert "a.wav" in body.text
