"""The report as people meet it: read, heard, searched by keyboard, offline, on a phone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from earmill.jobs.cli import run
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.storage.layout import Layout
from tests.browser.conftest import LOOKS, Opened, keep_image, until
from tests.jobs.test_report import HOSTILE
from tests.pipeline import outputs
from tests.pipeline.reader_data import write_set

Open = Callable[..., AbstractContextManager[Opened]]


@pytest.fixture(scope="session")
def report(job: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert run(["report", str(job), "--out", str(path)]) == 0
    return path.as_uri()


@pytest.fixture(scope="session")
def many(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of 1000 rows."""
    folder = tmp_path_factory.mktemp("many")
    write_set(folder / "out", n_rows=999, rows_per_shard=250, finalised=True, formats=("parquet",))
    assert run(["report", str(folder / "out"), "--out", str(folder / "report.html")]) == 0
    assert (folder / "report.html").stat().st_size < 5e6
    return (folder / "report.html").as_uri()


@pytest.mark.parametrize("look", LOOKS)
def test_it_is_accessible_quiet_and_fits(opened: Open, report: str, look: str) -> None:
    with opened(report, look, offline=True) as found:
        found.show_all()
        assert found.violations() == []
        width = found.page.evaluate("document.documentElement.scrollWidth")
        assert width <= LOOKS[look][0]
        assert found.said == []
        assert [url for url in found.asked if not url.startswith("data:")] == [report[:100]]


def test_pictures(opened: Open, report: str) -> None:
    with opened(report) as found:
        keep_image(found, "report", 1180)
    with opened(report, "390 px, light") as found:
        keep_image(found, "report-phone", 1500)
    with opened(report, "1280 px, dark") as found:
        example = found.page.locator(".example").nth(2).bounding_box()
        keep_image(found, "example-dark", 920, top=example["y"] - 24)


def test_everything_is_reached_by_keyboard(opened: Open, many: str) -> None:
    with opened(many) as found:
        page, keys = found.page, found.page.keyboard

        def focused() -> str:
            text: str = page.evaluate(
                "const one = document.activeElement; one.id || one.textContent.trim()"
            )
            return text

        keys.press("Tab")
        assert focused() == "Skip to the content"
        reached = []
        for _ in range(200):
            keys.press("Tab")
            reached.append(focused())
            if reached[-1] == "rows-next":
                break
        for name in ("Corpus", "Numbers of Durations", "rows-search", "rows-status", "duration"):
            assert name in reached, reached
        keys.press("Enter")
        assert page.inner_text("#rows-page") == "page 2 of 40"
        page.focus("#rows-search")
        keys.type("CLIP_0998")
        assert page.inner_text("#rows-count") == "1 found"
        assert page.locator("#rows-table tbody tr").count() == 1
        assert not page.is_visible("#rows-pager")


def test_rows_are_searched_sorted_and_paged(opened: Open, many: str) -> None:
    with opened(many) as found:
        page = found.page
        rows = page.locator("#rows-table tbody tr")
        assert rows.count() == 25 and page.inner_text("#rows-page") == "page 1 of 40"
        assert page.is_disabled("#rows-previous")
        page.click("#rows-next")
        assert "clip_0025" in rows.first.inner_text()
        page.select_option("#rows-status", "bad")
        assert rows.count() == 1 and "broken.wav" in rows.first.inner_text()
        page.select_option("#rows-status", "ok")
        page.click("#rows-table th:has-text('duration') button")
        shortest = page.locator("#rows-table tbody td[data-value]").first
        assert float(shortest.get_attribute("data-value")) == 0.02
        page.click("#rows-table th:has-text('duration') button")
        assert float(shortest.get_attribute("data-value")) == pytest.approx(1.32)
        assert page.locator("#rows-table th[aria-sort]").get_attribute("aria-sort") == "descending"
        page.fill("#rows-search", "no such row")
        assert rows.count() == 0 and page.inner_text("#rows-count") == "0 found"


def test_the_sound_plays_and_shows_where_it_is(opened: Open, report: str) -> None:
    with opened(report, offline=True) as found:
        page = found.page
        example = page.locator(".example").first
        example.locator("audio").focus()
        page.keyboard.press("Space")
        until(lambda: page.evaluate("document.querySelector('audio').currentTime > 0.3"))
        at = example.locator(".playhead").first.get_attribute("x1")
        assert 0 < float(at.rstrip("%")) < 100
        page.keyboard.press("Space")
        area = example.locator("[data-on-time]").first
        box = area.bounding_box()
        area.click(position={"x": box["width"] / 2, "y": 5})
        shown_s, now_s = page.evaluate(
            "const a = document.querySelector('audio'); [Number(a.dataset.seconds), a.currentTime]"
        )
        assert now_s == pytest.approx(shown_s / 2, abs=0.05)
        assert found.said == []


def test_without_scripts_all_rows_are_there(browser: Any, many: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(many)
        assert page.locator("#rows-table tbody tr").count() == 1000
        assert not page.is_visible("#rows-controls")
    finally:
        context.close()


def test_hostile_names_do_nothing(opened: Open, tmp_path: Path) -> None:
    layout = Layout.open(tmp_path / "out")
    names = [HOSTILE, "<img src=x onerror=alert(1)>" + "y" * 10_000, "\u05d0\u05d1.wav"]
    bad = outputs.make_bad(HOSTILE + "2", HOSTILE)
    outputs.write_plan(layout, {"00000": [*names, bad.row_id]})
    open_dataset(layout, outputs.dataset_file(name=HOSTILE))
    rows = [outputs.make_row(name, extra={HOSTILE: HOSTILE}) for name in names]
    assert outputs.publish(layout, rows=rows, bad=[bad], plan_rows=[*names, bad.row_id])
    assert run(["report", str(tmp_path / "out"), "--out", str(tmp_path / "r.html")]) == 0
    for look in LOOKS:
        with opened((tmp_path / "r.html").as_uri(), look) as found:
            found.show_all()
            assert found.violations() == [] and found.said == []
            assert [url for url in found.asked if not url.startswith(("data:", "file:"))] == []
            assert found.page.evaluate("document.documentElement.scrollWidth") <= LOOKS[look][0]
