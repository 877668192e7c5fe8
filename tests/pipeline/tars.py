"""WebDataset tars for tests, as the package's own writer makes them and as nobody should."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import webdataset

from earmill.pipeline.sources import open_source
from earmill.pipeline.sources.webdataset import WebDatasetSection, WebDatasetSource
from tests.pipeline.audio_factory import clip

Members = Sequence[tuple[str, bytes]]


def source(uri: Path | str, **options: Any) -> WebDatasetSource:
    found = open_source(WebDatasetSection(kind="webdataset", uri=str(uri), **options))
    assert isinstance(found, WebDatasetSource)
    return found


def sample(number: int) -> dict[str, Any]:
    """One sample for `webdataset.TarWriter`."""
    return {
        "__key__": f"speaker/utt{number:03d}",
        "flac": clip("flac", 0.2, seed=number),
        "json": {"speaker": f"{number:04d}", "snr": number / 2, "tags": ["a", "b"]},
        "cls": number % 3,
        "txt": f"utterance {number}",
    }


def write_shards(folder: Path, shards: int = 3, per_shard: int = 4) -> Path:
    """Tars as the package writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"train-{shard:03d}.tar")) as sink:
            for number in range(shard * per_shard, (shard + 1) * per_shard):
                sink.write(sample(number))
    return folder


def write_tar(path: Path, members: Members, kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data) if kind == tarfile.REGTYPE else 0, kind
            info.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
            tar.addfile(info, io.BytesIO(data))
    return path


WAV = clip("wav", 0.2)
