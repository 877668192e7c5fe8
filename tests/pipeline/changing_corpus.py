"""A finished job over a small real corpus that a test may change: both are as they were for each.

No Ray: shards run one after another in this process, see `again_jobs`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from earmill import open_features
from earmill.pipeline.driver import events
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.operations.update import start_update
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CREW, DRIVER_FILE
from earmill.pipeline.worker.row_pipeline import RowProcessor
from tests.chaos.jobs import FEW, write_corpus, write_job
from tests.pipeline import audio_factory
from tests.pipeline.again_jobs import Killed

CLIPS = 6
Values = dict[str, dict[str, bytes]]


class Changing:
    """A corpus of six clips and its finished output.

    Args:
        folder: Folder of both.
        formats: Formats of the output.
    """

    #: Rows of a shard.
    shard_rows = 2

    def __init__(self, folder: Path, formats: Sequence[str] = ("parquet",)) -> None:
        self.folder, self.corpus, self.out = folder, folder / "corpus", folder / "out"
        self.formats = formats
        self.computed: list[str] = []

    def spec(self, out: Path | None = None) -> JobSpec:
        place = self.out if out is None else out
        options = {"shard_rows": self.shard_rows, "shard_seconds": 100, "formats": [*self.formats]}
        file = write_job(self.folder / "job.yaml", self.corpus, place, params=FEW, **options)
        return JobSpec.load(file, overrides=("run.max_bad_fraction=1", "name=job"))

    @property
    def layout(self) -> Layout:
        return Layout.open(str(self.out))

    def write(self, name: str, seed: int, seconds: float = 0.5) -> Path:
        """A clip with audio of its own."""
        path = self.corpus / name
        path.write_bytes(audio_factory.clip("wav", seconds, seed=seed))
        return path

    def touch(self, name: str) -> None:
        """The same bytes, written at another time."""
        os.utime(self.corpus / name, (1e9, 1e9))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.corpus.iterdir())

    def extract(self, out: Path | None = None, **options: Any) -> events.JobFinished:
        return run_job(self.spec(out), **options)

    def update(self) -> tuple[events.JobFinished, list[events.Event]]:
        """As `earmill extract --update`; what was computed is in `computed`."""
        self.computed.clear()
        seen: list[events.Event] = []
        start_update(self.spec(), seen.append)
        return run_job(self.spec(), resume=True, sink=seen.append), seen

    def values(self, **options: Any) -> Values:
        return values_of(self.out, **options)


def values_of(out: Path, **options: Any) -> Values:
    """Row id to the bytes of its streams."""
    return {
        row.row_id: {name: values.tobytes() for name, values in row.features.items()}
        for row in open_features(out, **options)
    }


class Dying(Layout):
    """A process that is killed before it changes the output so many times."""

    left = 0

    @classmethod
    def patch(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on every layout that is opened is one."""
        opened = Layout.open

        def as_dying(*args: Any) -> Layout:
            found = opened(*args)
            return cls(found.backend, found.root)

        monkeypatch.setattr(Layout, "open", as_dying)

    def _one_less(self) -> None:
        if Dying.left == 0:
            raise Killed
        Dying.left -= 1

    def write_bytes(self, rel: str, data: bytes) -> None:
        self._one_less()
        super().write_bytes(rel, data)

    def put_if_absent(self, rel: str, data: bytes) -> bool:
        self._one_less()
        return super().put_if_absent(rel, data)

    def upload_file(self, local: Any, rel: str) -> None:
        self._one_less()
        super().upload_file(local, rel)

    def upload_dir(self, local: Any, rel: str) -> None:
        self._one_less()
        super().upload_dir(local, rel)

    def delete(self, rel: str) -> None:
        # What says that the driver lives goes with the process, and is found to be a dead one's.
        if rel != DRIVER_FILE and not rel.startswith(CREW):
            self._one_less()
        super().delete(rel)


@pytest.fixture(name="restored", scope="module")
def corpus_and_output(
    tmp_path_factory: pytest.TempPathFactory, no_ray: None
) -> Callable[[Sequence[str]], Changing]:
    """Return a function: formats to the job as it was when it had finished with these formats."""

    @cache
    def finished(formats: Sequence[str]) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("changing")
        job = Changing(folder, formats)
        write_corpus(job.corpus, CLIPS, seconds=0.5)
        end = job.extract()
        assert (end.rows_ok, end.shards) == (CLIPS, CLIPS // Changing.shard_rows)
        copy = folder.parent / f"{folder.name}-copy"
        shutil.copytree(folder, copy)
        return folder, copy

    def restored(formats: Sequence[str]) -> Changing:
        folder, copy = finished(formats)
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        return Changing(folder, formats)

    return restored


@pytest.fixture(name="changing")
def fresh(
    restored: Callable[[Sequence[str]], Changing],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Changing:
    """The finished job; with Parquet alone, unless the test is `in_both_formats`."""
    job = restored(getattr(request, "param", ("parquet",)))
    note_computed(monkeypatch, job.computed)
    return job


in_both_formats = pytest.mark.parametrize(
    "changing", [("parquet", "zarr")], ids=["both"], indirect=True
)


def note_computed(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """From now on the rows that are computed are added there."""
    process = RowProcessor.process

    def spied(rows: RowProcessor, items: Any, **options: Any) -> Any:
        names.extend(item.row_id for item in items)
        return process(rows, items, **options)

    monkeypatch.setattr(RowProcessor, "process", spied)
