"""Hugging Face datasets of a few clips, written in every way, and their bytes read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Audio, Dataset

from earmill.pipeline.common.errors import (
    RowError,
)
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.spec.source import HfSpec
from tests.pipeline.audio_factory import FORMATS, clip

ROWS = 10
KINDS = list(FORMATS)


BOTH = pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepared datasets go into the test's own folder; no progress bars in the output."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield
    if shown:
        datasets.enable_progress_bars()


def clips(n: int = ROWS) -> list[bytes]:
    return [clip(KINDS[i % len(KINDS)], 0.2 + 0.05 * i, seed=i) for i in range(n)]


def table(data: Sequence[bytes | None] | None = None) -> Dataset:
    """A dataset with audio bytes, scalars of every type, and a column that is no scalar."""
    cells = clips() if data is None else data
    n = len(cells)
    columns = {
        "audio": [{"bytes": cell, "path": f"{i}.x"} for i, cell in enumerate(cells)],
        "text": [f"sentence {i}" for i in range(n)],
        "key": [f"utt-{i:03d}" for i in range(n)],
        "n": list(range(n)),
        "snr": [0.5 * i for i in range(n)],
        "clean": [i % 2 == 0 for i in range(n)],
        "embedding": [[1.0, 2.0]] * n,
    }
    return Dataset.from_dict(columns).cast_column("audio", Audio(decode=False))


def write_parquet(folder: Path, dataset: Dataset, files: int = 3, split: str = "train") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        part = dataset.shard(files, index, contiguous=True)
        part.to_parquet(str(folder / f"{split}-{index:05d}-of-{files:05d}.parquet"))
    return folder


def source(uri: Path | str, **options: Any) -> Any:
    return open_source(HfSpec(kind="hf", uri=str(uri), **options))


def contents(opened: Any, items: Sequence[Item]) -> list[bytes | RowError]:
    found: list[bytes | RowError] = []
    for item, (fetched, stream) in zip(items, opened.fetch(items), strict=True):
        assert fetched is item
        if isinstance(stream, RowError):
            found.append(stream)
        else:
            with stream:
                found.append(stream.read())
    return found
