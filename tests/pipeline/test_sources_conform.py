"""The kinds of source that come with earmill hold to what is asked of strangers."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earmill.pipeline.sources import fetch
from earmill.pipeline.sources import webdataset as webdataset_source
from earmill.testing import SourceConformance
from earmill.testing.sources import Section
from tests.pipeline.audio_factory import clip

NAMES = ("a.wav", "b/c.wav", "d e#f.wav", "z.wav")
Corpus = tuple[Section, Mapping[str, bytes]]


def broken_disk(path: str) -> Any:
    """What a disk that is going says of every file."""
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def write_files(folder: Path) -> dict[str, bytes]:
    """Clips that differ, as files."""
    wanted = {name: clip("wav", 0.1, seed=seed) for seed, name in enumerate(NAMES)}
    for name, data in wanted.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return wanted


class _OnDisk(SourceConformance):
    def lose(self, folder: Path, row_id: str) -> None:
        (folder / row_id).unlink()

    def cut_off(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(fetch, "open_regular", broken_disk)


class TestFiles(_OnDisk):
    kind = "files"

    def corpus(self, folder: Path) -> Corpus:
        return {"uri": str(folder)}, write_files(folder)


class TestManifest(_OnDisk):
    kind = "manifest"

    def corpus(self, folder: Path) -> Corpus:
        wanted = write_files(folder)
        (folder / "clips.csv").write_text("\n".join(["uri,speaker", *(f"{n},s1" for n in NAMES)]))
        return {"uri": str(folder / "clips.csv")}, wanted


class TestKaldi(_OnDisk):
    kind = "kaldi"

    def corpus(self, folder: Path) -> Corpus:
        wanted = {name.replace(" ", "_"): data for name, data in write_files(folder).items()}
        lines = [f"{name.replace(' ', '_')} {name}\n" for name in NAMES]
        (folder / "wav.scp").write_text("".join(lines))
        return {"uri": str(folder)}, wanted

    def lose(self, folder: Path, row_id: str) -> None:
        super().lose(folder, row_id.replace("_", " "))


class TestLhotse(_OnDisk):
    kind = "lhotse"

    def corpus(self, folder: Path) -> Corpus:
        wanted = write_files(folder)
        sources = [{"type": "file", "channels": [0], "source": name} for name in NAMES]
        recordings = [
            {"id": name, "sources": [source], "duration": 0.1}
            for name, source in zip(NAMES, sources, strict=True)
        ]
        lines = [json.dumps(recording) + "\n" for recording in recordings]
        (folder / "recordings.jsonl").write_text("".join(lines))
        return {"uri": str(folder / "recordings.jsonl")}, wanted


class TestHf(_OnDisk):
    """Rows whose cells are paths: bytes inside the table cannot be lost one by one."""

    kind = "hf"

    @pytest.fixture(autouse=True)
    def private_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is built in the cache of whoever runs the tests."""
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def corpus(self, folder: Path) -> Corpus:
        wanted = write_files(folder)
        cells = [{"bytes": None, "path": str(folder / name)} for name in NAMES]
        pq.write_table(pa.table({"audio": cells, "id": NAMES}), folder / "rows.parquet")
        return {"uri": str(folder / "rows.parquet"), "split": "train", "id_column": "id"}, wanted


class TestWebDataset(SourceConformance):
    kind = "webdataset"

    def corpus(self, folder: Path) -> Corpus:
        wanted = {}
        for seed in range(4):
            data, name = clip("wav", 0.1, seed=seed), f"s{seed}/clip"
            self._write(folder / f"{seed}.tar", {f"{name}.wav": data, f"{name}.cls": b"3"})
            wanted[f"{seed}.tar/{name}"] = data
        return {"uri": f"{folder}/{{0..3}}.tar"}, wanted

    def lose(self, folder: Path, row_id: str) -> None:
        tar, _, key = row_id.partition("/")
        self._write(folder / tar, {f"{key}.cls": b"3"})

    def cut_off(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(webdataset_source, "open_regular", broken_disk)

    def _write(self, path: Path, members: Mapping[str, bytes]) -> None:
        with tarfile.open(path, "w") as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
