"""WebDataset tars on remote stores: what listing them and fetching rows reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earmill.pipeline.sources import webdataset as source_module
from tests.pipeline.audio_factory import clip
from tests.pipeline.counting_store import served
from tests.pipeline.source_helpers import contents, ids
from tests.pipeline.tars import WAV, source, write_tar


def test_headers_are_looked_for_by_ranges_and_rows_are_fetched_once(tmp_path: Path) -> None:
    long = [clip("wav", 4.0, seed=n) for n in range(6)]  # 176 kB each
    with served() as (store, url):
        for tar in range(3):
            pairs = [(f"{n}.wav", long[n]) for n in (2 * tar, 2 * tar + 1)]
            members = [m for n, one in pairs for m in ((n, one), (f"{n[0]}.txt", b"hello"))]
            name = f"train-{tar}.tar"
            store.put(name, write_tar(tmp_path / name, members).read_bytes())
        opened = source(f"{url}/train-{{0..2}}.tar")
        items = list(opened.items())
        assert store.bytes_given < 0.11 * sum(map(len, store.files.values()))
        # A header that stands where a range begins anyway costs nothing more.
        assert [item.seconds for item in items] == pytest.approx([4.0] * 6, abs=1e-3)
        assert not any(item.estimated for item in items)
        assert [item.extra for item in items] == [{"txt": "hello"}] * 6
        store.forget()
        again = source(opened._section.uri)
        assert contents(opened, items[::2]) == long[::2]
        assert contents(again, items[1::2]) == long[1::2]
        wanted = {name: np.zeros(len(data), int) for name, data in store.files.items()}
        for item in items:
            place = source_module.Place.of(item.uri)
            wanted[place.tar.rpartition("/")[2]][place.start : place.end] += 1
        for name, counts in store.given.items():
            assert (counts == wanted[name]).all()


def test_small_members_are_read_through(tmp_path: Path) -> None:
    small = [(f"{n:03d}.wav", WAV) for n in range(100)]  # 9 kB each
    with served() as (store, url):
        for name in ("0.tar", "1.tar"):
            store.put(name, write_tar(tmp_path / name, small).read_bytes())
        assert len(ids(source(f"{url}/{{0..1}}.tar"))) == 200
        assert store.requests["GET"] < 10
        assert all(counts.max() == 1 for counts in store.given.values())
