"""Fixtures of the pipeline's tests: feature sets that no test changes, and requests to stores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from botocore import session

from earmill.pipeline.storage.layout import Layout
from tests.pipeline.again_jobs import code_stays_as_it_is
from tests.pipeline.reader_data import (
    GROUPED_ROWS,
    LOADED_ROWS,
    N_ROWS,
    small_row_groups,
    write_chunked,
    write_set,
)


@pytest.fixture(scope="session", autouse=True)
def _code_stays_as_it_is() -> Iterator[None]:
    with code_stays_as_it_is():
        yield


@pytest.fixture(scope="session", autouse=True)
def _botocore_reads_once() -> Iterator[None]:
    """All sessions of botocore share a loader, so the description of S3 is parsed once.

    Each client of S3 would parse it anew, which takes longer than most tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "create_loader", cache(session.create_loader))
        yield


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 short rows in 4 shards, both formats, not finalised."""
    path = tmp_path_factory.mktemp("small")
    write_set(path, n_rows=N_ROWS)
    return path


@pytest.fixture(scope="session")
def finalised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows, finalised."""
    path = tmp_path_factory.mktemp("finalised")
    write_set(path, n_rows=N_ROWS, finalised=True)
    return path


@pytest.fixture(scope="session")
def seven_a_shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 short rows in 4 shards, which tests of loaders read."""
    path = tmp_path_factory.mktemp("seven")
    write_set(path, n_rows=LOADED_ROWS, rows_per_shard=7)
    return path


@pytest.fixture(scope="session")
def forty_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 rows of 0.5 s in 40 row groups of 4, read under `small_row_groups`."""
    path = tmp_path_factory.mktemp("grouped")
    with small_row_groups():
        write_set(path, n_rows=GROUPED_ROWS, rows_per_shard=20, seconds=lambda _: 0.5)
    return path


@pytest.fixture(scope="session")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 long rows over many small chunks, objects and row groups."""
    path = tmp_path_factory.mktemp("chunked")
    write_chunked(path)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every range that is read of a remote store: file and bytes."""
    found: list[tuple[str, int]] = []
    real = Layout.read_range

    def counting(self: Layout, rel: str, start: int, length: int) -> bytes:
        if not self.is_local:
            found.append((f"{rel} {start}", length))
        return real(self, rel, start, length)

    monkeypatch.setattr(Layout, "read_range", counting)
    return found
