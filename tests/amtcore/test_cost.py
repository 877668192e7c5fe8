"""The page about costs says what RESULTS.md says, and its sums are right."""

from __future__ import annotations

import pytest

from benchmarks.cost import (
    ASSUMED,
    PAGE,
    Node,
    cost_table,
    node_rate,
    price_on_node,
    rows_of,
    speeds,
    written,
)
from benchmarks.report import RESULTS


def test_the_page_has_the_figures_of_today() -> None:
    page = PAGE.read_text()
    known = speeds(RESULTS.read_text())
    assert written(page, known) == page, "run python -m benchmarks.cost"
    assert f"`r` is {1000 * known.rest_s:.2f} ms" in page
    assert len(cost_table(known, ASSUMED).splitlines()) > 7


def test_a_node_is_as_fast_as_its_slower_half() -> None:
    node = Node("any", 3.0, 20, 0.05)
    assert node_rate(30_000, 0.002, node) == 10_000
    assert node_rate(4_000, 0.002, node) == 4_000
    assert price_on_node(4_000, 0.002, node) == pytest.approx(4.0 / 4_000)


def test_a_section_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="expected a section 'Nothing'"):
        rows_of(RESULTS.read_text(), "Nothing")
