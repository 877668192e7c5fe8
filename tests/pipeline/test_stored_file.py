"""Bytes of a committed file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.storage.layout import Layout, StoredFile

CONTENT = np.random.default_rng(1).integers(0, 256, 3000).astype(np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> StoredFile:
    (tmp_path / "x").write_bytes(CONTENT.tobytes())
    return StoredFile(Layout.open(str(tmp_path)), "x", len(CONTENT), "")


def test_what_is_read_is_the_readers_own(file: StoredFile) -> None:
    first = file.read(0, 1000)
    file.read(1000, 1000)
    np.testing.assert_array_equal(first, CONTENT[:1000])


def test_a_file_that_was_cut_short_is_named(file: StoredFile, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(CONTENT[:500].tobytes())
    with pytest.raises(CommitError, match="from byte 0 on, the file ends after 500"):
        file.read(0, 1000)
