"""Bytes of a committed file: in an array of their own, or in passing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.storage import layout
from earmill.pipeline.storage.layout import Layout, StoredFile
from tests.waiting import DEADLINE_S

CONTENT = np.random.default_rng(1).integers(0, 256, 3000).astype(np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> StoredFile:
    (tmp_path / "x").write_bytes(CONTENT.tobytes())
    return StoredFile(Layout.open(str(tmp_path)), "x", len(CONTENT), "")


def test_what_is_read_is_the_readers_own(file: StoredFile) -> None:
    first = file.read(0, 1000)
    file.read(1000, 1000)
    np.testing.assert_array_equal(first, CONTENT[:1000])


def test_what_is_read_in_passing_is_there_until_the_thread_reads_again(file: StoredFile) -> None:
    first = file.read(0, 1000, passing=True)
    np.testing.assert_array_equal(first, CONTENT[:1000])
    second = file.read(1000, 1000, passing=True)
    np.testing.assert_array_equal(second, CONTENT[1000:2000])
    assert np.shares_memory(first, second)


def test_threads_read_in_passing_side_by_side(file: StoredFile) -> None:
    together = Barrier(4, timeout=DEADLINE_S)

    def right(start: int) -> bool:
        for _ in range(50):
            found = file.read(start, 700, passing=True)
            together.wait()
            if not (found == CONTENT[start : start + 700]).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, (0, 700, 1400, 2100)))


def test_more_than_a_thread_keeps_is_read_all_the_same(
    file: StoredFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SCRATCH_BYTES", 10)
    read = partial(file.read, passing=True)
    first, second = read(0, 1500), read(1500, 1500)
    np.testing.assert_array_equal(np.concatenate([first, second]), CONTENT)


def test_a_file_that_was_cut_short_is_named(file: StoredFile, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(CONTENT[:500].tobytes())
    with pytest.raises(CommitError, match="from byte 0 on, the file ends after 500"):
        file.read(0, 1000, passing=True)
