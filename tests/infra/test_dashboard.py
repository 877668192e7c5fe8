"""Dashboard and alerts ask for metrics and labels that a driver with --metrics really exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.infra.test_cluster_files import INFRA
from tests.pipeline.test_telemetry import END, fed, samples, scraped

# Of Prometheus itself: where a figure was scraped.
SCRAPED = {"instance", "job", "le"}


def panels() -> list[dict[str, Any]]:
    """Of infra/grafana.json."""
    found: list[dict[str, Any]] = json.loads((INFRA / "grafana.json").read_text())["panels"]
    return found


def dashboard_queries() -> Iterator[str]:
    """Every query of every panel."""
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


def alert_queries() -> Iterator[str]:
    """Every condition of infra/alerts.yaml."""
    for group in yaml.safe_load((INFRA / "alerts.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.fixture(scope="module")
def exported() -> set[tuple[str, str]]:
    """Every name and its labels, of a run that has had a bit of everything, and of its end."""
    figures = fed(END)
    # Some time has gone by, so that there is a rate.
    figures.tally._clock.sleep(10.0)  # type: ignore[attr-defined]
    over = samples(scraped(figures))
    figures.finished = None
    return {*over, *samples(scraped(figures)), *samples(scraped(fed()))}


def asked_labels(query: str) -> set[str]:
    """Labels in braces and behind by, on, ignoring."""
    grouped = re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", query)
    return set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query)) | {
        label.strip() for labels in grouped for label in labels.split(",")
    }


def test_every_query_asks_for_what_a_driver_exports(exported: set[tuple[str, str]]) -> None:
    names = {name for name, _ in exported}
    labels = {pair.split("=")[0] for _, of in exported for pair in of.split(",")}
    for query in (*dashboard_queries(), *alert_queries()):
        asked = set(re.findall(r"\bearmill_\w+", query))
        assert asked and asked <= names, query
        assert asked_labels(query) <= labels | SCRAPED, query


def test_values_of_labels_are_those_of_a_driver(exported: set[tuple[str, str]]) -> None:
    """A state that is spelt wrongly is an empty panel."""
    for query in dashboard_queries():
        for name, where in re.findall(r"(earmill_\w+)\{([^}]*)\}", query):
            wanted = {f"{label}={value}" for label, value in re.findall(r'(\w+)="(\w+)"', where)}
            assert any(name == key and wanted <= set(of.split(",")) for key, of in exported), query


def test_legends_show_labels_that_their_query_leaves() -> None:
    for panel in panels():
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.search(r"\bby \(([^)]*)\)", target["expr"])
            left = {"instance"} if grouped is None else set(grouped.group(1).split(", "))
            assert shown <= left, target


def test_panels_have_a_place_of_their_own() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels())
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())
