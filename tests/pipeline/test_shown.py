"""Rows, batches and sets show themselves in one line, and as a table in notebooks."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amtcore.features.spike_events import SpikeEvents
from earmill import (
    Batch,
    Features,
    Row,
    collate,
    collate_jagged,
    collate_packed,
    mix,
    open_features,
)
from tests.pipeline.reader_data import write_set

WIDTH = 200


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Features:
    path: Path = tmp_path_factory.mktemp("shown")
    write_set(path, n_rows=12)
    return open_features(path)


class Cells(HTMLParser):
    """Texts of the cells of a table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_row_says_its_shapes(ds: Features) -> None:
    row = ds[3]
    assert repr(row) == (
        "<Row 3 'speaker 0/clip_0003.wav': 1.32 s; modulation (132, 7) float32, "
        "loudness (66, 1) float32; extra: label, text>"
    )
    cut = ds.slice(3, 0.5, 0.7)
    assert "(20, 7) float32" in repr(cut) and "\n" not in repr(cut)
    spikes = SpikeEvents.from_dense(np.eye(4, dtype=int))
    events = replace(row, features={"spikes": spikes}, label=3, start_s=0.5)
    assert repr(events) == (
        "<Row 3 'speaker 0/clip_0003.wav': 1.32 s, from 0.5 s; spikes 4 events, 4 steps, "
        "4 neurons; label 3; extra: label, text>"
    )


def test_a_batch_says_its_shapes(ds: Features) -> None:
    labelled = ds.torch(label="label")
    rows = [labelled[n] for n in (1, 2)]
    assert repr(collate(rows)) == (
        "<Batch of 2 rows: modulation (2, 93, 7) float32, loudness (2, 46, 1) float32; "
        "label (2) int64; extra: label, text>"
    )
    assert "modulation packed (134, 7) float32" in repr(collate_packed(rows))
    assert "modulation jagged (2, " in repr(collate_jagged(rows))


def test_long_and_strange_names_stay_short_and_harmless(ds: Features) -> None:
    name = "<script>alert(1)</script>\n\x1b[31m" + "x" * 500
    row: Row = replace(ds[0], row_id=name, extra={name: name, "label": 1})
    batch: Batch = collate([row, row])
    for shown in (row, batch):
        assert (
            len(repr(shown)) < 2 * WIDTH and "\n" not in repr(shown) and "\x1b" not in repr(shown)
        )
        page = Cells(shown._repr_html_())
        assert "script" not in page.tags and "\x1b" not in shown._repr_html_()
        assert max(map(len, page.texts)) < WIDTH


def test_tables_in_notebooks(ds: Features) -> None:
    row = Cells(ds[3]._repr_html_())
    assert {"modulation", "(132, 7) float32", "extra label", "3"} <= {*row.texts}
    batch = Cells(collate([ds[3]])._repr_html_())
    assert {"modulation", "(1, 132, 7) float32", "extra label", "(1) int64"} <= {*batch.texts}
    both = open_features([ds._uri, ds._uri])
    for features in (ds, both, mix([ds], [1])):
        page = Cells(features._repr_html_())
        assert {"modulation", "7", "100", "model units", "dau1997"} <= {*page.texts}
        assert f"{type(features).__name__}: {len(features)} rows" in page.texts
