"""Pipes, devices, sockets and headers without end under audio names: one bad row each, at once."""

from __future__ import annotations

import io
import os
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset

from earmill import open_features
from earmill.pipeline.audio.containers import probe
from earmill.pipeline.audio.containers.base import MAX_PARTS
from earmill.pipeline.audio.containers.pcm import W64_RIFF, W64_TAIL
from earmill.pipeline.audio.decoders import HEADER_BYTES
from earmill.pipeline.common.errors import (
    CommitError,
    EarmillError,
    NotRegularError,
    OutputError,
    RowError,
    SourceError,
)
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.sources import Source, open_source
from earmill.pipeline.sources.durations import header_seconds
from earmill.pipeline.sources.webdataset import WebDatasetSection
from earmill.pipeline.spec.source import HfSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.audio_factory import clip
from tests.pipeline.outputs import small_dataset
from tests.pipeline.source_helpers import contents, files, manifest
from tests.pipeline.whole_clips import decode

GOOD = "good.wav"
SPECIAL = {"pipe.wav": "a pipe", "socket.wav": "a socket", "zeros.wav": "a device"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / GOOD).write_bytes(clip("wav", 0.2))
    os.mkfifo("pipe.wav")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.wav")
    os.symlink("/dev/zero", "zeros.wav")
    return tmp_path


def from_files(folder: Path) -> Source:
    return files(folder)


def from_manifest(folder: Path) -> Source:
    (folder / "m.csv").write_text("uri\n" + "\n".join(sorted([GOOD, *SPECIAL])) + "\n")
    return manifest(folder / "m.csv")


def from_dataset(folder: Path) -> Source:
    cells = [{"bytes": None, "path": str(folder / name)} for name in sorted([GOOD, *SPECIAL])]
    pa.parquet.write_table(pa.table({"audio": cells}), folder / "d.parquet")
    return open_source(HfSpec(kind="hf", uri=str(folder / "d.parquet")))


@pytest.mark.parametrize("listed", [from_files, from_manifest, from_dataset])
def test_only_regular_files_are_opened(listed: Callable[[Path], Source], folder: Path) -> None:
    """A pipe waits for ever and /dev/zero never ends, in the plan as in the worker."""
    source = listed(folder)
    items = list(source.items())
    assert len(items) == 1 + len(SPECIAL)
    found = contents(source, items)
    assert found[0] == (folder / GOOD).read_bytes()
    for error, (name, kind) in zip(found[1:], sorted(SPECIAL.items()), strict=True):
        assert isinstance(error, NotRegularError)
        assert (error.stage, error.error_class) == ("fetch", "not_regular")
        assert f"{name}: expected a regular file, got {kind}" in str(error)


def test_a_file_that_becomes_a_pipe_after_the_plan(folder: Path) -> None:
    source = files(folder, glob=GOOD)
    items = list(source.items())
    (folder / GOOD).unlink()
    os.mkfifo(folder / GOOD)
    assert isinstance(contents(source, items)[0], NotRegularError)


def make_special(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in both formats, closed."""
    folder = tmp_path_factory.mktemp("written") / "out"
    layout = small_dataset(folder)
    finalise(layout)
    assert verify(layout).ok
    return folder


def parts(folder: Path) -> list[str]:
    """One file of each kind in a dataset."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    files = [name for name in names if (folder / name).is_file()]
    return list({name.partition("/")[0] + PurePath(name).suffix: name for name in files}.values())


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("a pipe", slice(None)),
        ("a socket", slice(0, None, 2)),
        ("a folder", slice(1, None, 2)),
        pytest.param("a socket", slice(1, None, 2), marks=pytest.mark.long),
        pytest.param("a folder", slice(0, None, 2), marks=pytest.mark.long),
    ],
)
def test_no_file_of_a_dataset_is_waited_for(
    kind: str, chosen: slice, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe waited for a writer for ever, whoever read the dataset."""
    monkeypatch.chdir(tmp_path)
    for name in parts(written)[chosen]:
        folder = Path(shutil.copytree(written, tmp_path / "out"))
        make_special(folder / name, kind)
        for fmt in ("parquet", "zarr"):
            # A format that does not need the file reads on; the other ends in one line.
            with suppress(EarmillError):
                assert len([row.features for row in open_features(folder, format=fmt)]) == 3
        try:
            assert not verify(Layout.open(folder)).ok, name
        except EarmillError as error:
            assert "expected a regular file, got " + kind in str(error), name
        shutil.rmtree(folder)


def test_the_file_that_is_needed_is_named(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "out"))
    data = next(folder.glob("data/*.parquet"))
    make_special(data, "a pipe")
    with pytest.raises(CommitError, match=r"\.parquet: expected a regular file, got a pipe; put"):
        list(open_features(folder, format="parquet"))
    make_special(folder / "dataset.json", "a pipe")
    with pytest.raises(
        OutputError, match=r"no regular file .*got a pipe.*; put it back from a copy"
    ):
        open_features(folder)


def test_a_linked_file_of_a_dataset_is_listed(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "out"))
    data = next(folder.glob("data/*.parquet"))
    data.rename(folder / "elsewhere")
    data.symlink_to(folder / "elsewhere")
    layout = Layout.open(folder)
    assert layout.sizes("data") == Layout.open(written).sizes("data")


@pytest.mark.parametrize("kind", ["a pipe", "a socket"])
@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "state.json", "dataset_info.json"])
def test_no_file_of_a_saved_dataset_is_waited_for(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Dataset(pa.table({"audio": [clip("wav", 0.1)]})).save_to_disk(tmp_path / "saved")
    make_special(tmp_path / "saved" / name, kind)
    for streaming in (False, True):
        with pytest.raises(SourceError, match=rf"{name}: expected a regular file, got {kind}"):
            open_source(HfSpec(kind="hf", uri=str(tmp_path / "saved"), streaming=streaming))


def test_a_tar_that_is_a_pipe_is_told_before_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    source = open_source(WebDatasetSection(kind="webdataset", uri=str(tmp_path)))
    with pytest.raises(SourceError, match=r"a\.tar: expected a regular file, got a pipe"):
        list(source.items())


class Counted(io.BytesIO):
    """A stream that counts what is asked of it."""

    reads = nbytes = 0

    def read(self, size: int | None = -1) -> bytes:
        chunk = super().read(size)
        self.reads, self.nbytes = self.reads + 1, self.nbytes + len(chunk)
        return chunk

    def digest(self) -> str:
        return "0" * 64


ENDLESS = {
    "riff": b"RIFF" + struct.pack("<I", 1 << 30) + b"WAVE",
    "riff chunks": b"RIFF" + struct.pack("<I", 1 << 30) + b"WAVE" + b"JUNK\0\0\0\0" * 60_000,
    "w64": W64_RIFF + struct.pack("<Q", 1 << 30) + b"wave" + W64_TAIL,
    "aiff": b"FORM" + struct.pack(">I", 1 << 30) + b"AIFF",
    "caf": b"caff\0\1\0\0",
    "nist": b"NIST_1A\n   1024\n",
    "au": b".snd",
    "id3": b"ID3\3\0\0\0\0\0\0" * 60_000,
    "ogg": b"OggS",
    "nothing": b"",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_header_without_end_is_not_walked(name: str) -> None:
    """Zeros behind a header were taken for chunks of no size, a hundred million a gigabyte."""
    data = ENDLESS[name] + bytes(2_000_000)
    stream = Counted(data)
    probe(stream, len(data))
    assert stream.reads < 2 * MAX_PARTS + 100
    assert header_seconds(stream, len(data)) is None
    with pytest.raises(RowError):
        decode(stream, uri="clip")
    assert stream.reads < 4 * MAX_PARTS + 30_000
    assert stream.nbytes < 2_000_000


def test_a_header_that_makes_the_decoder_read_on_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FLAC metadata blocks without content, as many as fit into the file."""
    assert HEADER_BYTES >= 32 << 20  # a cover picture may have 16 MB
    monkeypatch.setattr("earmill.pipeline.audio.decoders.HEADER_BYTES", 1 << 20)
    stream = Counted(b"fLaC" + b"\1\0\0\0" * 1_000_000)
    assert header_seconds(stream, 4_000_004) is None
    with pytest.raises(RowError):
        decode(stream, uri="clip")
    assert stream.nbytes < 3 << 20
