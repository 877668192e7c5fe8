"""A source and a format of others: one file and one entry point each, and a job has them.

A model of others is in tests/jobs/test_stranger_model.py; the job by processes here has it as well.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem

import earmill
from earmill import open_features
from earmill.jobs import cli
from earmill.pipeline.common.errors import ExtensionError, SpecError
from earmill.pipeline.dataset.garbage import collect_garbage
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.format import check_formats
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.testing import FormatConformance, SourceConformance
from tests.pipeline.again_jobs import shards_run_here
from tests.pipeline.audio_factory import clip
from tests.pipeline.reader_data import check_row, job_spec, write_set
from tests.pipeline.strangers import install

FILES = Path(__file__).parent / "stranger_files"
MOST_LINES = 60
ENTRIES = {
    "earmill.sources": {"zipped": "zipped_clips:ZIPPED"},
    "earmill.formats": {"npz": "npz_shards:NPZ"},
}
MODEL = Path(__file__).parents[1] / "jobs" / "stranger_level.py"
LEVEL = {"amtcore.models": {"level": "loud_things:Level"}}
IDS = ("a.wav", "deep/b.wav", "z.wav")


def put(folder: Path, **changed: str) -> Path:
    """The distribution in a folder; `changed` are other texts of its modules."""
    texts = {path.stem: path.read_text() for path in FILES.glob("[a-z]*.py")} | changed
    return install(folder, "strange-things", ENTRIES, texts)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """The folder of the distribution, on the path."""
    folder = put(tmp_path / "site")
    with on_path(folder):
        yield folder


@contextmanager
def on_path(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Inside, the distribution in the folder is installed; what else is patched goes with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            yield patch
        finally:
            forget()


def forget() -> None:
    for name in ("zipped_clips", "npz_shards", "loud_things"):
        sys.modules.pop(name, None)


def write_zip(path: Path, without: str = "") -> dict[str, bytes]:
    wanted = {name: clip("wav", 0.4, seed=seed) for seed, name in enumerate(IDS)}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in wanted.items():
            if name != without:
                archive.writestr(name, data)
    return wanted


@pytest.mark.usefixtures("installed")
class TestZipped(SourceConformance):
    kind = "zipped"

    def corpus(self, folder: Path) -> Any:
        return {"uri": str(folder / "clips.zip")}, write_zip(folder / "clips.zip")

    def lose(self, folder: Path, row_id: str) -> None:
        write_zip(folder / "clips.zip", without=row_id)

    def cut_off(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        def broken(*args: Any, **options: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(LocalFileSystem, "open", broken)


@pytest.mark.usefixtures("installed")
class TestNpz(FormatConformance):
    format = "npz"


@pytest.mark.parametrize("path", [*FILES.glob("[a-z]*.py")], ids=lambda path: path.stem)
def test_a_stranger_is_one_short_file(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MOST_LINES


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line where the distribution is on PYTHONPATH, which workers inherit."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(folder / "site")
    command = [sys.executable, "-m", "earmill.jobs.start", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_a_job_with_all_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "site")
    install(tmp_path / "site", "loud-things", LEVEL, {"loud_things": MODEL.read_text()})
    write_zip(tmp_path / "clips.zip")
    job = {
        "source": {"kind": "zipped", "uri": "clips.zip"},
        "extract": [{"model": "dau1997", "fs_hz": 16000}, {"model": "level"}],
        "output": {"uri": "out", "formats": ["npz", "webdataset", "zarr"], "shard_rows": 2},
        "run": {"executor": "local", "workers": 1, "threads_per_worker": 1},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with on_path(tmp_path / "site") as patch:
        patch.chdir(tmp_path)
        planned = earmill.plan("job.yaml")
    done = run(tmp_path, "extract", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    objects = sum(len(files) for _, _, files in os.walk(tmp_path / "out"))
    # A plan counts neither what a snapshot adds nor the record of which one counts.
    assert abs(planned.estimate.objects - objects) <= 3
    with on_path(tmp_path / "site"):
        assert verify(Layout.open(tmp_path / "out")).ok
    self_told = open_features(tmp_path / "out").dataset.provenance["extensions"]
    assert self_told["source"] == "strange-things 1.0"
    models = {name: info.model for name, info in open_features(tmp_path / "out").streams.items()}
    assert models == {"modulation": "dau1997", "level": "level"}
    assert self_told["formats"]["npz"] == "strange-things 1.0"
    # Here nothing of it is installed: one format cannot be read, the others can.
    with pytest.raises(ExtensionError, match=r"install strange-things 1\.0, or read it as web"):
        open_features(tmp_path / "out", format="npz")
    rows = {fmt: [*open_features(tmp_path / "out", format=fmt)] for fmt in ("webdataset", "zarr")}
    assert [row.row_id for row in rows["zarr"]] == [*IDS]
    assert verify(Layout.open(tmp_path / "out")).problems == []
    # Damage is repaired with it, and not without.
    (damaged, _) = sorted((tmp_path / "out" / "data").glob("*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with on_path(tmp_path / "site") as patch, shards_run_here():
        patch.chdir(tmp_path)
        assert cli.run(["extract", "job.yaml", "--resume", "--repair"]) == 0
    with on_path(tmp_path / "site"):
        read = open_features(tmp_path / "out", format="npz")
        for row, zarr in zip(read, rows["zarr"], strict=True):
            for name, values in row.features.items():
                np.testing.assert_array_equal(values, zarr.features[name])
        assert verify(Layout.open(tmp_path / "out")).problems == []
        card = (tmp_path / "out" / "README.md").read_text()
        assert 'webdataset.WebDataset("data/' in card
    shutil.rmtree(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert cli.run(["extract", "job.yaml", "--resume"]) == 2
    refused = capsys.readouterr().err
    assert (
        "source.kind: expected files, hf, kaldi, lhotse, manifest or webdataset, got 'zipped'"
        in refused
    )


class TestReading:
    def test_a_set_of_one_format_that_is_not_here(
        self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layout = write_set(tmp_path / "set", formats=["npz"], finalised=True).layout
        check_row(open_features(tmp_path / "set")[3], 3)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(installed)])
        with pytest.raises(ExtensionError) as caught:
            open_features(tmp_path / "set")
        assert "stored as 'npz', which cannot be read here: install the distribution that" in str(
            caught.value
        )
        assert verify(layout).problems == []  # every byte is still hashed

    def test_a_file_of_it_that_is_gone_is_a_problem(self, installed: Path, tmp_path: Path) -> None:
        layout = write_set(tmp_path, formats=["npz"], n_rows=3, finalised=True).layout
        (file,) = (tmp_path / "data").glob("*.npz")
        file.unlink()
        assert verify(layout).damaged == ["00000"]

    def test_orphans_of_a_format_that_is_not_here_go(self, tmp_path: Path) -> None:
        layout = write_set(tmp_path, n_rows=3, finalised=True).layout
        orphans = ["data/00000-00000bad.npz", "data/00000-00000bad.h5.d/part"]
        for name in (*orphans, "data/00000-00000bad"):
            layout.write_bytes(name, b"x")
        collected = collect_garbage(layout, grace_s=0)
        assert collected.parts == ("data/00000-00000bad.h5.d", "data/00000-00000bad.npz")
        assert layout.exists("data/00000-00000bad")


class TestRefused:
    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ("NPZ = NpzFormat()", "NPZ = NpzFormat", "expected its entry point to lead to a Form"),
            ('    suffix = ".npz"\n', "", r"expected a suffix like '\.tar', got None"),
            ('suffix = ".npz"', 'suffix = "/npz"', r"expected a suffix like '\.tar', got '/npz'"),
            ('suffix = ".npz"', 'suffix = ".zarr"', r"npz and zarr both write \.zarr files"),
        ],
    )
    def test_before_any_work(
        self, old: str, new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = (FILES / "npz_shards.py").read_text().replace(old, new)
        monkeypatch.syspath_prepend(str(put(tmp_path / "site", npz_shards=text)))
        with pytest.raises((ExtensionError, SpecError), match=said):
            check_formats(job_spec(["npz", "zarr"], "float16").output.formats)
        forget()

    @pytest.mark.parametrize("name", ["rows", "quarantine", "NPZ", "a/b", "1"])
    def test_a_name_that_no_dataset_could_hold(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts = {"npz_shards": (FILES / "npz_shards.py").read_text()}
        entries = {"earmill.formats": {name: "npz_shards:NPZ"}}
        monkeypatch.syspath_prepend(str(install(tmp_path / "site", "odd-names", entries, texts)))
        with pytest.raises(ExtensionError, match=r"odd-names 1\.0: expected the name of a format"):
            check_formats(["zarr", name])
        forget()

    def test_one_that_cannot_be_imported_breaks_jobs_that_name_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(put(tmp_path / "site", npz_shards="import no_such")))
        assert job_spec(["zarr"], "float16").output.formats == ("zarr",)
        with pytest.raises(SpecError, match=r"output\.formats\.0: format 'npz' of strange-things"):
            job_spec(["npz"], "float16")
        write_set(tmp_path / "set", n_rows=2, formats=["zarr"])
        check_row(open_features(tmp_path / "set")[1], 1)


def test_a_job_may_hold_a_section_of_a_stranger(installed: Path) -> None:
    job = job_spec(["npz"], "float16")
    assert JobSpec.load(job, ["source={kind: zipped, uri: x}"]).source.kind == "zipped"
